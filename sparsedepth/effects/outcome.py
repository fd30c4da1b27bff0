"""The quantity that effects are asked about: its unit, its values on the scale on which runs are compared; and cells of
a frame as plain values."""

import difflib
import json
import math
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth import quantities


def unit_of(outcome: str, runs: pd.DataFrame | None = None) -> str:
    """The unit of a difference in this outcome. Raises ValueError for an outcome that is no
    number of `runs`."""
    quantity = quantities.IN_RUNS.get(outcome)
    if quantity is None or quantity.type == "VARCHAR":
        names = [name for name, other in quantities.IN_RUNS.items() if other.type == "DOUBLE"]
        near = ", ".join(difflib.get_close_matches(outcome, names, n=3))
        hint = f"the nearest: {near}" if near else "see `sparsedepth metrics`"
        raise ValueError(f"outcome {outcome!r} is not a measured number of a run; {hint}")
    if runs is not None:
        quantities.check_scored(outcome, runs.columns)
    return "ln ratio" if quantity.is_ratio else quantity.unit


def is_ratio(outcome: str) -> bool:
    """Whether runs are compared by the ratio of this outcome, as a difference of logarithms."""
    return outcome in quantities.IN_RUNS and quantities.IN_RUNS[outcome].is_ratio


def values_of(runs: pd.DataFrame, outcome: str) -> pd.Series:
    """The outcome on its comparison scale (linear or ln); NaN where it is missing or the run diverged."""
    values = pd.to_numeric(runs[outcome], errors="coerce").astype(float)
    if is_ratio(outcome):
        values = np.log(values.where(values > 0))
    return values.where(runs["outcome"] == "ok")


def plain(value: Any) -> Any:
    """A cell of a frame as a plain value: NaN and NA -> None, whole floats -> int, arrays and JSON arrays -> tuples."""
    if isinstance(value, str):
        with suppress(ValueError):
            return plain(json.loads(value)) if value.startswith("[") else value
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(plain(entry) for entry in value)
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value
