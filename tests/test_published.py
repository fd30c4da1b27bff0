"""The table of published numbers in docs/papers.md shows docs/papers.csv, and a run can vary each of its fields.

`python tests/test_published.py` writes the table into the page.
"""

import csv
import itertools
import re
from pathlib import Path

from sparsedepth.config.run import RunConfig

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "papers.md"
TABLE = re.compile(r"(?<=\| values, baseline first \| source \|\n\|---\|---\|---\|---\|\n)(\|.*\n)+")
OURS = {"group_size": "n_kv_heads", "experts": "n_experts"}
"""Name of a published choice -> our field, where they differ."""


def published() -> list[dict[str, str]]:
    with (DOCS / "papers.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """A line for each published table: its settings with their values; source and context shortened."""
    lines = []
    of_table = ("field", "outcome", "paper", "source", "context", "architecture", "baseline")
    for key, group in itertools.groupby(published(), lambda row: tuple(row[name] for name in of_table)):
        field, outcome, paper, source, context, _, baseline = key
        where = f"{paper}, {source.partition(':')[0]}; {re.split('[,;]', context)[0]}"
        rows = sorted(group, key=lambda row: row["setting"] != baseline)
        values = ", ".join(f"{row['setting']}: {row['value']}" for row in rows)
        lines.append(f"| {field} | {outcome} | {values} | {where} |\n")
    return "".join(lines)


def test_the_page_shows_the_published_numbers():
    assert TABLE.search(PAGE.read_text())[0] == table(), "`python tests/test_published.py` rewrites it"


def test_every_published_table_is_of_a_field_that_a_run_can_vary_and_has_its_baseline():
    for row in published():
        assert OURS.get(row["field"], row["field"]) in RunConfig.model_fields
        assert float(row["value"]) >= 0
    baselines = [row for row in published() if row["setting"] == row["baseline"]]
    assert len(baselines) == table().count("\n")


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda match: table(), PAGE.read_text()))
