"""Package versions that differ between compared runs: results may depend on them."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from sparsedepth.config.plain_text import counted, visible


def version_differences(packages: Iterable[str | None], here: Mapping[str, str | None] | None = None) -> str:
    """The packages with several versions, and the number of runs with each; '' where there are none.

    `packages` is that column of `runs`, a JSON object per run; `here` has the versions of this machine, if a run is to
    be added.
    """
    counts: dict[str, Counter[str]] = {}
    for text in packages:
        for name, version in (json.loads(text) if text else {}).items():
            counts.setdefault(name, Counter())[str(version)] += 1
    for name in counts:
        if here is not None:
            counts[name][str(here.get(name))] += 0
    several = {name: versions for name, versions in sorted(counts.items()) if len(versions) > 1}
    texts = [
        f"{name} "
        + ", ".join(f"{version} ({counted(n, 'run') if n else 'here'})" for version, n in sorted(versions.items()))
        for name, versions in several.items()
    ]
    return visible(f"packages differ between the runs: {'; '.join(texts)}") if texts else ""
