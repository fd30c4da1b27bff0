"""Every interval that docs/findings.md and README's findings state is one that `analysis/findings.py` prints, and the
other way round."""

import re
from functools import cache
from pathlib import Path

import findings
import pytest

ROOT = Path(__file__).parent.parent.parent
NUMBER = r"(-?\d+(?:\.\d+)?)"
INTERVAL = re.compile(rf"{NUMBER}\s+\({NUMBER}\s+to\s+{NUMBER}\)")
PAGE = (ROOT / "docs" / "findings.md").read_text().partition("## Rules")[2].partition("![")[0]
RULES = {int(part[0]): " ".join(part.split()) for part in re.split(r"^(?=\d\. )", PAGE, flags=re.MULTILINE)[1:]}


@cache
def rows_of(rule: int) -> list[dict]:
    return findings.stated([one for one in findings.STATED if one.rule == rule]).to_dict("records")


def is_of(said: tuple[str, ...], row: dict) -> bool:
    """Whether a text states a row, to its own digits: 'raises by', or with the other sign 'lowers by'."""
    near = [0.5001 * 10.0 ** -len(text.partition(".")[2]) for text in said]
    ends = [(row["effect"], row["lo"], row["hi"]), (-row["effect"], -row["hi"], -row["lo"])]
    return any(all(abs(float(a) - b) <= off for a, b, off in zip(said, of, near, strict=True)) for of in ends)


@pytest.mark.parametrize("rule", sorted({one.rule for one in findings.STATED}))
def test_the_page_states_what_is_printed(rule):
    said = INTERVAL.findall(RULES[rule])
    of_rule = rows_of(rule)
    assert [one for one in said if not any(is_of(one, row) for row in of_rule)] == []
    unsaid = [row for row in of_rule if not any(is_of(one, row) for one in said)]
    factors = {row["setting"]: 1 / row["effect"] for row in unsaid}  # rounded, and without an interval
    assert (rule == 3) == bool(unsaid) and factors.keys() <= {findings.BUNDLE, findings.LNS}
    if rule == 3:
        assert (round(factors[findings.BUNDLE], -2), round(factors[findings.LNS])) == (2_300, 10)
        assert "divides the variance of the last layer by 2,300 and LNS by 10;" in RULES[3]


def test_what_readme_states_is_on_the_page():
    said = INTERVAL.findall((ROOT / "README.md").read_text().partition("## What was found")[2].partition("\n## ")[0])
    assert said and {*map(_by_size, said)} <= {*map(_by_size, INTERVAL.findall(" ".join(RULES.values())))}


def _by_size(interval):
    """An effect and its ends, as an increase: the page says 'lower by 0.042', README -0.042."""
    effect, *ends = map(float, interval)
    sign = -1 if effect < 0 else 1
    return abs(effect), *sorted(sign * end for end in ends)


def test_it_is_printed(monkeypatch, capsys):
    rows = findings.pd.DataFrame(rows_of(8))  # before it is replaced, in whichever process
    monkeypatch.setattr(findings, "stated", lambda: rows)
    findings.main(["--format", "csv"])
    first, *others = capsys.readouterr().out.splitlines()
    assert first == ",".join(findings.COLUMNS) and len(others) == sum(one.rule == 8 for one in findings.STATED)


def test_the_table_of_the_page_is_that_of_the_results(tmp_path):
    """`python analysis/findings.py --page docs/findings.md` writes it."""
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "findings.md").read_text())
    findings.main(["--page", str(page)])
    assert page.read_text() == (ROOT / "docs" / "findings.md").read_text()
    page.write_text("# Findings")
    with pytest.raises(ValueError, match="has not the lines"):
        findings.write_page(page)
