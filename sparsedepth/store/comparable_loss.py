"""Which loss compares runs: val_loss, at each run's own seq_len, or val_loss_common, at one context length for all;
and which packages, and which code of plugins, differ between them.

A longer context lowers the loss by itself, since later positions are easier. Runs that differ in seq_len are therefore
compared by val_loss_common if all finished runs have it at the same context (without eval_seq_len it equals val_loss).
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.quantities import IN_RUNS
from sparsedepth.store.tuning_roles import IS_TRAINED
from sparsedepth.words.plain_text import counted, visible

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.store.connection import Store

Loss = Literal["val_loss", "val_loss_common"]
OWN: Loss = "val_loss"
COMMON: Loss = "val_loss_common"
DATA = (*fields_where(RunConfig, lambda role: role.kind == "data"), "seq_len")
"""Fields between whose values losses are not comparable."""


def differing_data(rows: "pd.DataFrame") -> str:
    """The fields of data and length in which these rows differ, comma-separated."""
    return ", ".join(name for name in DATA if name in rows and rows[name].nunique(dropna=False) > 1)


def loss_of(runs: "pd.DataFrame") -> Loss:
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


def loss_in(store: "Store") -> Loss:
    """The loss that compares all trained runs of a store; the rule of `loss_of`, without pandas."""
    ((is_common,),) = store.sql(
        f"SELECT count(DISTINCT seq_len) > 1 AND bool_and({COMMON} IS NOT NULL)"
        " AND count(DISTINCT coalesce(eval_seq_len, if(origin IS NULL, seq_len, NULL))) < 2 FROM runs"
        f" WHERE outcome = 'ok' AND {IS_TRAINED}"
    ).rows
    return COMMON if is_common else OWN


def with_loss(loss: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names, with val_loss replaced by this loss."""
    return tuple(loss if name == OWN else name for name in names)


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


def _objects(texts: Iterable[str | None]) -> Iterator[dict[str, Any]]:
    for text in texts:
        with suppress(ValueError, RecursionError):  # a manifest that was not written by us
            if isinstance(values := json.loads(text or "{}"), dict):
                yield values
