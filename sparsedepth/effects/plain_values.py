"""Cells of a frame as plain values, and their order."""

import json
from typing import Any

import numpy as np
import pandas as pd

Plain = bool | int | float | str | tuple | None


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
