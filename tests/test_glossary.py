"""Each term has one meaning: no class or file takes a name of the glossary for something else."""

import re
from pathlib import Path

import pytest

from sparsedepth.effects import frame

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sparsedepth"

NOT_YET_RENAMED = {
    "context": {"model/context.py"},
}
"""Files that still give a term another meaning; the set may only shrink."""

COLUMNS_OF_WORDS = {"at", "reason", "without", "verdict_without"}
"""Columns of the frame whose names are plain words."""


def glossary() -> dict[str, set[str]]:
    """Term -> the files where it is at home."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("| term | meaning | where |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {term: set(re.findall(r"`([a-z_/]+\.py)`", where)) for term, _, where in rows}


CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


def named_after(term: str, sources: dict[str, str]) -> set[str]:
    """The files that are named after a term, or hold a class that is."""
    own = {term, f"{term}s"}
    return {
        file
        for file, source in sources.items()
        if own & {Path(file).stem, *(name.lower() for name in CLASS.findall(source))}
    }


@pytest.mark.parametrize("term", glossary())
def test_a_term_has_one_meaning(term):
    homes = glossary()[term]
    assert homes and homes <= SOURCES.keys(), f"the glossary sends readers of {term!r} to a file that does not exist"
    others = named_after(term, SOURCES) - homes
    assert others == NOT_YET_RENAMED.get(term, set()), f"{term!r} means something else there"


def test_the_glossary_holds_what_the_table_of_effects_prints():
    assert set(frame.TEXTS) - COLUMNS_OF_WORDS <= glossary().keys()
