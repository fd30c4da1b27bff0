"""The table of published numbers in docs/papers.md shows docs/papers.csv, and a run can vary each of its fields.

`python tests/test_published.py` writes the table into the page.
"""

import csv
import re
from pathlib import Path

from sparsedepth.config.run import RunConfig

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "papers.md"
TABLE = re.compile(r"(?<=\|field\|outcome\|source\|values\|\n\|---\|---\|---\|---\|\n)(\|.*\n)+")
SHOWN = ("weight_decay", "seq_len", "group_size", "experts", "depth_scale", "n_layers")
"""Fields whose numbers the page shows; the file has those of norms, initialisations and gates, too."""
OURS = {"group_size": "n_kv_heads", "experts": "n_experts"}
"""Name of a published choice -> our field, where they differ."""


def published() -> list[dict[str, str]]:
    with (DOCS / "papers.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """A line for each published table and field: for each model its settings with their values, the baseline first."""
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in sorted(published(), key=lambda row: row["setting"] != row["baseline"]):
        if row["field"] not in SHOWN:
            continue
        name, _, model = row["source"].partition(":")[0].partition(", ")
        line = lines.setdefault((row["field"], row["outcome"], f"{row['paper']}, {name}"), {})
        line.setdefault(model, []).append(f"{row['setting']}: {row['value']}")
    values = lambda line: "; ".join(f"({model}) " * bool(model) + ", ".join(line[model]) for model in line)  # noqa: E731
    return "".join(f"|{'|'.join(key)}|{values(line)}|\n" for key, line in lines.items())


def test_the_page_shows_the_published_numbers():
    assert TABLE.search(PAGE.read_text())[0] == table(), "`python tests/test_published.py` rewrites it"


def test_every_published_table_is_of_a_field_that_a_run_can_vary_and_has_its_baseline():
    tables: dict[tuple[str, ...], list[bool]] = {}
    for row in published():
        assert OURS.get(row["field"], row["field"]) in RunConfig.model_fields
        assert float(row["value"]) >= 0
        key = (row["field"], row["outcome"], row["paper"], row["source"], row["context"])
        tables.setdefault(key, []).append(row["setting"] == row["baseline"])
    assert all(sum(of_table) == 1 for of_table in tables.values())


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda match: table(), PAGE.read_text()))
