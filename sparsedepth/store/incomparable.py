"""What makes losses of several folders incomparable: other texts, other tokens, other versions of packages.

A run's fields name its text by a path, under which each folder may have had another one, and a model's facts do not
name it at all; `data_hash` in the manifest is the hash of the tokens.
"""

import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sparsedepth.config.plain_text import counted, visible
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.records import read_file
from sparsedepth.store.run_record import parse_object
from sparsedepth.store.tuning_roles import IS_TRAINED

_FIELDS = fields_where(RunConfig, lambda role: role.kind == "data")
_SQL = f"""
SELECT corpus, min(folder), regexp_replace(folder, '/[^/]*/[^/]*$', ''), {", ".join(_FIELDS)},
    if(tokenizer LIKE 'bpe:%', start_weights, NULL) -- whose model learned the tokenizer
FROM every_run WHERE {IS_TRAINED} AND origin IS NULL AND corpus NOT LIKE 'task:%' GROUP BY ALL ORDER BY 2
"""
"""For each text and results folder, one run."""


def warn_of_other_texts(query: Callable[[str], QueryResult]) -> None:
    """Warn of a text that differs between results folders. `query`: `Store.sql`."""
    folders: dict[tuple, dict[str, Path]] = {}
    for corpus, run, results, *fields in query(_SQL).rows:
        folders.setdefault((corpus, *fields), {})[results] = Path(run)
    for (corpus, *_), runs in folders.items():
        hashes = {_data_hash(run): results for results, run in runs.items()} if len(runs) > 1 else {}
        if len(places := [results for data_hash, results in hashes.items() if data_hash]) > 1:
            warnings.warn(
                f"corpus={corpus!r} is another text in {places[0]} than in {', '.join(places[1:])} (data_hash of their "
                f"runs): losses cannot be compared between them, even of equal configurations",
                stacklevel=2,
            )


def warn_of_other_tokens(models: Mapping[Path, str]) -> None:
    """Warn of models (folder -> name) that were measured on different tokens."""
    by_hash: dict[str | None, str] = {}
    for folder, model in sorted(models.items()):
        by_hash.setdefault(_data_hash(folder), f"{model} ({folder})")
    by_hash.pop(None, None)
    if len(by_hash) > 1:
        warnings.warn(
            f"measured models read different tokens, such as {' and '.join([*by_hash.values()][:2])}: their losses and "
            f"scores cannot be compared; measure them again with the same --data or --tokens",
            stacklevel=3,
        )


def _data_hash(run: Path) -> str | None:
    try:
        return parse_object(run, "manifest.json", read_file(run, "manifest.json")).get("data_hash")
    except (OSError, ValueError):  # removed meanwhile
        return None


def version_differences(packages: Iterable[str | None], here: Mapping[str, str | None] | None = None) -> str:
    """The packages with several versions, and the number of runs with each; '' where there are none. `packages`: that
    column of `runs`; `here`: the versions of this machine, if a run is to be added."""
    counts = defaultdict[str, Counter[str]](Counter)
    for text in packages:
        for name, version in json.loads(text or "{}").items():
            counts[name][str(version)] += 1
    texts = []
    for name, versions in sorted(counts.items()):
        if here is not None:
            versions[str(here.get(name))] += 0
        if len(versions) > 1:
            of_runs = {version: counted(n, "run") if n else "here" for version, n in sorted(versions.items())}
            texts.append(f"{name} " + ", ".join(f"{version} ({runs})" for version, runs in of_runs.items()))
    return visible(f"packages differ between the runs: {'; '.join(texts)}") if texts else ""
