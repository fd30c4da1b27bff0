"""Which loss compares runs: val_loss, at each run's own seq_len, or val_loss_common, at one context length for all; and
what makes losses incomparable: other texts, tokens or package versions.

A longer context lowers the loss by itself, since later positions are easier. Runs that differ in seq_len are therefore
compared by val_loss_common if all finished runs have it at the same context (without eval_seq_len it equals val_loss).
"""

import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparsedepth.config.images import unit_for
from sparsedepth.config.plain_text import counted, visible
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.quantities import IN_RUNS
from sparsedepth.store.find import read_file
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.run_record import parse_object
from sparsedepth.store.tuning_roles import IS_TRAINED

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.store.connection import Store

OWN, COMMON = "val_loss", "val_loss_common"


def layers_hint(outcome: str) -> str:
    """How a number of needed layers is to be compared; '' for another outcome."""
    quantity = IN_RUNS.get(outcome)
    if quantity is None or not (quantity.is_count and quantity.unit == "layer"):
        return ""
    return f"a better model needs more layers: `sparsedepth effects DIR --by {outcome}` compares at equal loss"


def loss_of(runs: "pd.DataFrame") -> str:
    """The loss that compares these rows of `runs`."""
    if not {"seq_len", "eval_seq_len", COMMON} <= set(runs.columns):
        return OWN
    finished = runs[runs["outcome"] == "ok"]
    is_common = finished["seq_len"].nunique() > 1 and finished[COMMON].notna().all() and has_one_context(finished)
    return COMMON if is_common else OWN


def has_one_context(runs: "pd.DataFrame") -> bool:
    """Whether val_loss_common has the same context in these rows of `runs`; NULL in imported ones is unknown."""
    import pandas as pd

    own, evaluated = (pd.to_numeric(runs[name], errors="coerce") for name in ("seq_len", "eval_seq_len"))
    context = evaluated.fillna(own.where(runs["origin"].isna()) if "origin" in runs.columns else own)
    return context.nunique() < 2


def loss_in(store: "Store") -> str:
    """The loss that compares all trained runs of a store; the rule of `loss_of`, without pandas."""
    ((is_common,),) = store.sql(
        f"SELECT count(DISTINCT seq_len) > 1 AND bool_and({COMMON} IS NOT NULL)"
        " AND count(DISTINCT coalesce(eval_seq_len, if(origin IS NULL, seq_len, NULL))) < 2 FROM runs"
        f" WHERE outcome = 'ok' AND {IS_TRAINED}"
    ).rows
    return COMMON if is_common else OWN


def unit_for_stores(unit: str, *stores: "Store") -> str:
    """A unit per token, or per image if all runs of these stores are of images."""
    sql = "SELECT DISTINCT corpus FROM runs WHERE corpus IS NOT NULL"
    return unit_for(unit, (corpus for store in stores for (corpus,) in store.sql(sql).rows))


def with_loss(loss: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names, with val_loss replaced by this loss."""
    return tuple(loss if name == OWN else name for name in names)


# What makes losses incomparable


_FIELDS = fields_where(RunConfig, lambda role: role.kind == "data")
_SQL = f"""
SELECT corpus, min(folder), regexp_replace(folder, '/[^/]*/[^/]*$', ''), {", ".join(_FIELDS)},
    if(tokenizer LIKE 'bpe:%', start_weights, NULL) -- whose model learned the tokenizer
FROM every_run WHERE {IS_TRAINED} AND origin IS NULL AND corpus NOT LIKE 'task:%' GROUP BY ALL ORDER BY 2
"""
"""For each text and results folder, one run."""


def warn_of_other_texts(query: Callable[[str], QueryResult]) -> None:
    """Warn of a text that differs between results folders: a path may have named another one. `query`: `Store.sql`."""
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
