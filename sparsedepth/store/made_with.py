"""What runs were made with, and where that differs: packages, and the code of plugins."""

import functools
import importlib.metadata
import json
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from sparsedepth.quantities import IN_RUNS
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import counted, visible

PACKAGES = ("torch", "numpy", "transformers", "datasets", "tokenizers", "safetensors", "optuna", "pyarrow")


@functools.cache
def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that can change a result; None if not installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def version_differences(
    packages: Iterable[str | None], here: Mapping[str, str | None] | None = None
) -> dict[str, Counter[str]]:
    """Package of several versions -> version -> runs. `packages`: that column of `runs`; `here`: the versions of this
    machine, if a run is to be added."""
    counts = defaultdict[str, Counter[str]](Counter)
    for versions in _objects(packages):
        for name, version in versions.items():
            counts[name][str(version)] += 1
    for name, versions in counts.items():
        if here is not None:
            versions[str(here.get(name))] += 0
    return {name: versions for name, versions in counts.items() if len(versions) > 1}


def plugins_of(texts: Iterable[str | None]) -> dict[str, Counter[tuple[str, str]]]:
    """Measure of a plugin -> its file and code -> runs. `texts`: the column `plugins` of `runs`."""
    counts = defaultdict[str, Counter[tuple[str, str]]](Counter)
    for made in _objects(texts):
        for name, by in made.items():
            if isinstance(by, dict) and not name.startswith("task:"):
                counts[name][str(by.get("file")), str(by.get("code"))] += 1
    return counts


def refuse_other_code(outcome: str, texts: Iterable[str | None]) -> None:
    """Raises ValueError for a number that plugins of different code measured in runs with these `plugins`."""
    measure = outcome in IN_RUNS and IN_RUNS[outcome].measure
    by_code = plugins_of(texts).get(measure, {}) if measure else {}
    if len({code for _, code in by_code}) > 1:
        parts = "; ".join(f"{file} {code} ({counted(n, 'run')})" for (file, code), n in sorted(by_code.items()))
        fix = f"measure them again with one, or rank those of one: best --where \"plugins like '%{min(by_code)[1]}%'\""
        raise ValueError(visible(f"{outcome} was measured by plugins of different code: {parts}; {fix}"))


def _objects(texts: Iterable[str | None]) -> Iterator[Named]:
    for text in texts:
        with suppress(ValueError, RecursionError):  # a manifest that was not written by us
            if isinstance(values := json.loads(text or "{}"), dict):
                yield values
