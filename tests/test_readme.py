"""The pages show what the commands print: every console block of every page is run and compared, every link followed.

`python tests/test_readme.py [PAGE...]` writes the true output into the pages.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import forked_commands
from test_structure import MODULES, level as part_level, part_of

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_PATH = re.compile(r"\b(?:sparsedepth|tests|sweeps|analysis|benchmarks|results)/[\w./-]*\w")
"""A file or folder of the repository, as prose names it."""
NAMED_OBJECT = re.compile(r"\bsparsedepth((?:\.\w+)+)")
PLACEHOLDER = re.compile(r"/[A-Z_]+\b")
"""What stands for a name of the reader's: results/models/NAME."""


def run(command: str) -> str:
    """What a command of a page prints, and what its pipe makes of that."""
    environment = {**os.environ, "COLUMNS": "100"}
    first, _, rest = command.partition(" | ")
    words = shlex.split(first)
    if words[0] in ("sparsedepth", "python"):
        program = str(ROOT / words.pop(1)) if words[0] == "python" else ""
        code, out, err = forked_commands.call(words[1:], environment, program=program, folder=str(ROOT))
        assert code == 0, f"{command}: {err}"
    else:
        out, rest = "", command
    if not rest:
        return out
    done = subprocess.run(
        ["bash", "-c", rest], input=out, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def commands(block: str) -> list[str]:
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def true_block(block: str) -> str:
    """The block as it should read: each command with its output."""
    return "\n".join(f"$ {command}\n{run(command)}" for command in commands(block))


def anchors(page: Path) -> set[str]:
    """What `#...` may name in a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    broken = []
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        aim = page.parent / path if path else page
        if not aim.exists() or (anchor and anchor not in anchors(aim)):
            broken.append(target)
    return broken


def missing_names(text: str) -> list[str]:
    """The files, folders, modules and functions that a text names and the repository does not have."""
    paths = [path for path in NAMED_PATH.findall(text) if not PLACEHOLDER.search(path)]
    missing = [path for path in paths if not (ROOT / path).exists()]
    return missing + [dotted for dotted in NAMED_OBJECT.findall(text) if not _is_defined(dotted)]


def _is_defined(dotted: str) -> bool:
    """Whether `.part.module` or `.part.module.name` is there, without importing it."""
    path = ROOT / "sparsedepth" / dotted[1:].replace(".", "/")
    module = path.parent.with_suffix(".py")
    return (
        path.is_dir()
        or path.with_suffix(".py").exists()
        or (module.exists() and re.search(rf"^(def|class) {path.name}\b", module.read_text(), re.MULTILINE) is not None)
    )


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shown() -> dict[str, Path]:
    """Each console block, once, and a page that has it."""
    return {block: page for page in PAGES for block in BLOCK.findall(page.read_text())}


@pytest.mark.parametrize(
    ("block", "page"),
    [pytest.param(*item, id=f"{item[1].stem}: {item[0].splitlines()[0][:60]}") for item in shown().items()],
)
def test_a_page_shows_the_true_output(block, page):
    assert commands(block) and block == true_block(block), f"`python tests/test_readme.py {name(page)}` rewrites it"


def test_readme_is_short_and_starts_with_the_two_commands():
    lines = README.read_text().splitlines()
    assert len(lines) <= 100 and len(README.read_text().split()) <= 900
    assert any(line.startswith("make quickstart") for line in lines[:20])
    assert any(line.startswith("make test") for line in lines[:20])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_and_every_name_leads_somewhere(page):
    assert not broken_links(page)
    assert not missing_names(page.read_text())


def test_a_broken_link_and_a_missing_name_are_seen(tmp_path):
    """The test above can fail."""
    page = tmp_path / "page.md"
    page.write_text("# A heading, long\n[good](#a-heading-long) [bad](#other) [gone](gone.md) [self](page.md)")
    assert broken_links(page) == ["#other", "gone.md"]
    there = "`sparsedepth/model/decoder.py`, `sparsedepth.model.decoder.Decoder`, `results/models/NAME`"
    assert not missing_names(there)
    assert missing_names("`sparsedepth/gone.py`, `sparsedepth.model.decoder.gone`") == [
        "sparsedepth/gone.py",
        ".model.decoder.gone",
    ]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=name)
def test_readme_leads_to_every_page_of_docs(page):
    assert f"](docs/{page.name}" in README.read_text()


def test_the_parts_of_the_architecture_are_those_there_are_lowest_first():
    block = (ROOT / "docs" / "architecture.md").read_text().split("\n\n")[1]
    named = [re.split(r" {3,}", line.strip())[0].split() for line in block.splitlines()]
    levels = [part_level(part) for parts in named for part in parts]
    assert levels == sorted(levels)
    assert {part for parts in named for part in parts} == {part_of(path) for path in MODULES} - {"__main__"}


if __name__ == "__main__":
    for page in [Path(argument) for argument in sys.argv[1:]] or PAGES:
        text = page.read_text()
        page.write_text(BLOCK.sub(lambda match: f"```console\n{true_block(match[1])}```", text))
