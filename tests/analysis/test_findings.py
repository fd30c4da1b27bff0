"""Every interval that docs/findings.md and README's findings state is one that `analysis/findings.py` prints, and the
other way round."""

import re
from pathlib import Path

import findings
import pandas as pd
import pytest

ROOT = Path(__file__).parent.parent.parent
NUMBER = r"-?\d+(?:\.\d+)?"
INTERVAL = re.compile(rf"({NUMBER})\s+\(({NUMBER})\s+to\s+({NUMBER})\)")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return findings.stated()


@pytest.fixture(scope="module")
def rows(table) -> list[dict]:
    return table.to_dict("records")


def rules() -> dict[int, str]:
    page = (ROOT / "docs" / "findings.md").read_text().partition("## Rules")[2].partition("![")[0]
    return {int(part.partition(".")[0]): part for part in re.split(r"^(?=\d\. )", page, flags=re.MULTILINE)[1:]}


def is_of(said: tuple[str, ...], row: dict) -> bool:
    """Whether a text states a row, to its own digits: 'raises by', or with the other sign 'lowers by'."""
    near = [0.5001 * 10.0 ** -len(text.partition(".")[2]) for text in said]
    ends = [(row["effect"], row["lo"], row["hi"]), (-row["effect"], -row["hi"], -row["lo"])]
    return any(all(abs(float(a) - b) <= off for a, b, off in zip(said, of, near, strict=True)) for of in ends)


def test_the_page_states_what_is_printed(rows):
    for rule, text in rules().items():
        said = INTERVAL.findall(text)
        of_rule = [row for row in rows if row["rule"] == rule and row["outcome"] != findings.COMPUTE]
        assert [one for one in said if not any(is_of(one, row) for row in of_rule)] == [], rule
        unsaid = [row for row in of_rule if not any(is_of(one, row) for one in said)]
        assert [row for row in unsaid if not (rule == 3 and row["setting"] in (findings.BUNDLE, findings.LNS))] == []


def test_numbers_without_an_interval(rows):
    worths = [row["effect"] for row in rows if row["outcome"] == findings.COMPUTE]
    assert "worth {:.2f}, {:.2f} and {:.2f} times the compute".format(*worths) in " ".join(rules()[1].split())
    of_rule = [row for row in rows if row["rule"] == 3 and row["outcome"] == findings.VARIANCE]
    variance = {row["setting"]: row["effect"] for row in of_rule}
    assert "divides the variance of the last layer by 50,000 and LNS by 10;" in " ".join(rules()[3].split())
    assert (round(1 / variance[findings.BUNDLE], -4), round(1 / variance[findings.LNS])) == (50_000, 10)


def test_what_readme_states_is_on_the_page():
    said = INTERVAL.findall((ROOT / "README.md").read_text().partition("## What was found")[2].partition("\n## ")[0])
    assert said and {*said} <= {*INTERVAL.findall("".join(rules().values()))}


def test_it_is_printed(table, monkeypatch, capsys):
    monkeypatch.setattr(findings, "stated", lambda: table)
    findings.main(["--format", "csv"])
    first, *others = capsys.readouterr().out.splitlines()
    assert first == ",".join(findings.COLUMNS) and len(others) == len(findings.STATED)
