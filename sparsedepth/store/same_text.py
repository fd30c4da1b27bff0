"""Whether runs of several results folders, and models that were only measured, read the same text.

A run's fields name it by a path, under which each folder may have had another text, and a model's facts do not name it
at all; `data_hash` in the manifest is the hash of the tokens.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.store.find import read_file
from sparsedepth.store.query_result import QueryResult
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


def warn_of_other_tokens(query: Callable[[str], QueryResult]) -> None:
    """Warn of models that were measured on different tokens. `query`: `Store.sql`."""
    models: dict[str | None, str] = {}
    for folder, model in query("SELECT folder, model FROM every_run WHERE model IS NOT NULL ORDER BY 1").rows:
        models.setdefault(_data_hash(Path(folder)), f"{model} ({folder})")
    models.pop(None, None)
    if len(models) > 1:
        warnings.warn(
            f"measured models read different tokens, such as {' and '.join([*models.values()][:2])}: their losses and "
            f"scores cannot be compared; measure them again with the same --data or --tokens",
            stacklevel=2,
        )


def _data_hash(run: Path) -> str | None:
    try:
        return parse_object(run, "manifest.json", read_file(run, "manifest.json")).get("data_hash")
    except (OSError, ValueError):  # removed meanwhile
        return None
