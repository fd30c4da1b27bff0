"""Every text that the functions of `words` gave in the tests: `make sentences` rewrites tests/words/sentences.txt.

    SENTENCES=FOLDER pytest ...                 each process keeps there what it saw
    python tests/support/sentences.py FOLDER    functions that were seen get new examples, others keep theirs

Numbers become #, run ids RUN, paths PATH, and runs of blanks or dashes two: what is left are the words. Of a function's
texts those with the smallest hashes are kept, so that a new text changes at most one line of it."""

import atexit
import functools
import hashlib
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sparsedepth import words

FILE = Path(__file__).parents[1] / "words" / "sentences.txt"
HEADING = "Texts of the functions of sparsedepth/words that the tests saw; `make sentences` rewrites this file.\n"
MOST_TEXTS, MOST_CHARACTERS = 6, 240
LAYOUT = ("formats", "plain_text", "table", "values")
"""Modules that lay out what others say."""

SEEN: dict[str, set[str]] = defaultdict(set)


def normalised(text: str) -> str:
    """One line without the numbers, names of runs and places that differ between tests."""
    text = re.sub(r"\b[0-9a-f]{12,}\b", "RUN", text)
    text = re.sub(r"(?<![\w.])(?:~|\.{1,2})?(?:/[\w.+@~-]+){2,}/?", "PATH", text)
    text = re.sub(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", "#", text)
    text = re.sub(r"(?:\n\s*)+", " / ", text.strip())
    text = re.sub(r"  +", "  ", re.sub(r"---+", "--", text))
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def modules() -> list[ModuleType]:
    names = [found.name for found in pkgutil.iter_modules(words.__path__) if found.name not in LAYOUT]
    return [importlib.import_module(f"{words.__name__}.{name}") for name in names]


def functions() -> dict[str, Callable[..., Any]]:
    """'plain_text.counted' -> the function, of all public ones that say something."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": function
        for module in modules()
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and name[0] != "_"
    }


def record(folder: Path) -> None:
    """Keep what the functions give in this process, which has not imported their users yet."""
    for name, function in functions().items():
        setattr(sys.modules[function.__module__], function.__name__, _recorded(name, function))
    atexit.register(lambda: folder.mkdir(parents=True, exist_ok=True) or write_seen(folder / f"{os.getpid()}.json"))


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*values: Any, **named: Any) -> Any:
        given = function(*values, **named)
        if isinstance(given, Iterator):
            given = [*given]
            see(name, given)
            return iter(given)
        see(name, given)
        return given

    return recorded


def see(name: str, given: Any) -> None:
    if isinstance(given, bytes):
        given = given.decode(errors="replace")
    if isinstance(given, str):
        if given.strip():
            SEEN[name].add(normalised(given))
    elif isinstance(given, Iterable):
        for text in given:
            see(name, text)


def write_seen(file: Path) -> None:
    file.write_text(json.dumps({name: sorted(texts) for name, texts in SEEN.items()}))


def read(file: Path = FILE) -> dict[str, list[str]]:
    """The committed examples by function."""
    texts: dict[str, list[str]] = {}
    for line in file.read_text().removeprefix(HEADING).splitlines() if file.exists() else ():
        if line.startswith("  "):
            texts[list(texts)[-1]].append(line[2:])
        elif line:
            texts[line] = []
    return texts


def write(folder: Path, file: Path = FILE) -> None:
    """Rewrite the file by what processes have seen."""
    seen = defaultdict[str, set[str]](set)
    for kept in folder.glob("*.json"):
        for name, texts in json.loads(kept.read_text()).items():
            seen[name] |= {*texts}
    known = functions()
    texts = {name: texts for name, texts in read(file).items() if name in known and name not in seen}
    for name, found in ((name, found) for name, found in seen.items() if name in known):
        by_hash = sorted(found, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
        texts[name] = sorted(by_hash[:MOST_TEXTS])
    parts = ["\n".join([name, *(f"  {text}" for text in texts[name])]) for name in sorted(texts)]
    file.write_text("\n\n".join([HEADING.strip(), *parts]) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
