"""Fields that the runs of a store vary by choice, and plain values to compare and order them by."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.config.model import FILLED_FROM, with_derived_sizes
from sparsedepth.config.role import fields_where, roles
from sparsedepth.config.run import REPLICATE_FIELDS, RunConfig
from sparsedepth.store.tuning_roles import parse_tuned_fields, result_rows

Plain = bool | int | float | str | tuple | None

ROLES = roles(RunConfig)
DERIVED = fields_where(RunConfig, lambda role: role.derived_if_missing)
WITHOUT_EFFECT = fields_where(RunConfig, lambda role: role.kind == "record")
LEADERS = tuple(
    sorted((name for name in ROLES if ROLES[name].label_priority), key=lambda name: ROLES[name].label_priority or 0)
)
"""Fields that are named first."""


def plain(value: Any) -> Plain:
    """A cell of a frame as a plain value: NaN and NA -> None, whole floats -> int, arrays and JSON arrays -> tuples."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(plain(entry) for entry in value)
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if np.isnan(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value


def value_order(option: object) -> tuple[bool, float, str]:
    """Numbers by size, then others by name."""
    is_number = isinstance(option, int | float)
    return (not is_number, float(option) if is_number else 0.0, repr(option))


def keys(runs: pd.DataFrame, fields: Sequence[str]) -> pd.Series:
    """A text per run; two are equal exactly where all `fields` are (NULL equals NULL)."""
    columns = [_texts(runs[name]) for name in fields]
    rows = zip(*columns, strict=True) if columns else ([] for _ in range(len(runs)))
    return pd.Series(["\x1f".join(row) for row in rows], index=runs.index, dtype=object)


def _texts(values: pd.Series) -> list[str]:
    """The repr of every plain value, computed once per distinct value."""
    try:
        codes, distinct = pd.factorize(values, use_na_sentinel=False)
    except TypeError:  # unhashable lists, in frames that do not come from a store
        return [repr(plain(value)) for value in values]
    texts = [repr(plain(value)) for value in distinct]
    return [texts[code] for code in codes]


def tuned_fields(runs: pd.DataFrame) -> set[str]:
    """The fields that were tuned in any of these runs; a tuned value is no choice, nor is that of a folder with a fixed
    one beside it."""
    texts = runs["tuned_fields"].dropna().unique() if "tuned_fields" in runs.columns else ()
    return {name for text in texts for name in parse_tuned_fields(text)}


def chosen_fields(runs: pd.DataFrame) -> list[str]:
    """The RunConfig fields that vary, can change a result, and were not tuned or derived from other sizes; leaders
    first."""
    runs = result_rows(runs)
    excluded = {*WITHOUT_EFFECT, *tuned_fields(runs), *REPLICATE_FIELDS} - {"seed"}
    names = dict.fromkeys((*LEADERS, *RunConfig.model_fields))
    varying = [name for name in names if name in runs.columns and runs[name].nunique(dropna=False) > 1]
    return [n for n in varying if n not in excluded and (n not in DERIVED or not _is_derived(runs, n))]


def _is_derived(runs: pd.DataFrame, name: str) -> bool:
    sizes = [field for field in dict.fromkeys((*FILLED_FROM, *DERIVED)) if field in runs.columns]
    first = ~keys(runs, sizes).duplicated()
    columns = [[plain(value) for value in runs.loc[first, field]] for field in sizes]
    return all(_has_default(name, dict(zip(sizes, row, strict=True))) for row in zip(*columns, strict=True))


def _has_default(name: str, sizes: Mapping[str, Plain]) -> bool:
    """Whether a configuration of these other sizes has this value of `name` by default."""
    given = {field: value for field, value in sizes.items() if value is not None}
    filled = with_derived_sizes({field: value for field, value in given.items() if field != name})
    return filled.get(name) == given.get(name)
