"""Packages whose versions differ between runs that are compared: a number may change with them."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from sparsedepth.config.plain_text import visible


def version_differences(packages: Iterable[str | None], here: Mapping[str, str | None] | None = None) -> str:
    """Which versions the runs were made with, of the packages of which there are several; '' where there are none.

    `packages` is that column of `runs`, a JSON object for each run; `here` are the versions of this machine, where a
    run is to be added.
    """
    counts: dict[str, Counter[str]] = {}
    for text in packages:
        for name, version in (json.loads(text) if text else {}).items():
            counts.setdefault(name, Counter())[str(version)] += 1
    for name in counts:
        if here is not None:
            counts[name][str(here.get(name))] += 0
    several = {name: versions for name, versions in sorted(counts.items()) if len(versions) > 1}
    words = [
        f"{name} " + ", ".join(f"{version} ({_count(n)})" for version, n in sorted(versions.items()))
        for name, versions in several.items()
    ]
    return visible(f"packages differ between the runs: {'; '.join(words)}") if words else ""


def _count(n: int) -> str:
    return f"{n} run{'s' * (n != 1)}" if n else "here"
