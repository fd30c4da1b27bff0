"""What to use at each depth, one row per depth, from the frame of effects."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.cells import Cells
from sparsedepth.effects.frame import setting_effects
from sparsedepth.effects.text import interval_text, is_missing
from sparsedepth.effects.verdict import POWER, size_text
from sparsedepth.report.tables import Table, table_of


def best_by_depth(cells: Cells) -> tuple[Table, str] | None:
    """Of each depth the setting shown to be best, or the baseline; and the caption of the table. None where no setting
    was compared."""
    frame = setting_effects(cells)
    if frame.empty or cells.settings is None:
        return None
    columns = [
        ("n_layers", ""),
        ("use", "the setting shown to be best, else the baseline"),
        ("lr", ""),
        ("seeds", ""),
        (cells.outcome, "mean over seeds"),
        ("gain", "against the baseline of this depth, with its 95% interval"),
        ("detectable", f"the smallest gain of another setting that would have been seen ({POWER:.0%} power)"),
        ("training FLOPs", "relative to the baseline"),
        ("time", "relative to the baseline, as measured: depends on the load of its machine"),
    ]
    text = f"What to use at each depth, by {cells.outcome}; {cells.settings.baseline_text}; detectable: the gain of "
    text += f"another setting that would have been seen ({POWER:.0%} power)"
    rows = [[*_line(cells, at)] for _, at in frame.groupby("n_layers")]
    return table_of(columns, rows), text


def _line(cells: Cells, at: pd.DataFrame) -> Iterator[Any]:
    is_low = quantities.IN_RUNS[cells.outcome].better != "high"
    shown = at[at["verdict"] == ("lower" if is_low else "higher")].sort_values("estimate", ascending=is_low)
    used = shown.iloc[0] if len(shown) else None
    row = at.iloc[0] if used is None else used
    side = "_baseline" if used is None else ""
    value = row["baseline_value"] if used is None else row["baseline_value"] + row["estimate"]
    value = None if is_missing(value) else math.exp(value) if cells.unit == "ln ratio" else value
    yield int(row["n_layers"])
    yield "baseline" if used is None else row["setting"]
    yield None if is_missing(row[f"lr{side}"]) else f"{row[f'lr{side}']:g}"
    yield row[f"seeds{side}"]
    yield None if value is None else f"{value:.4g}"
    yield "none shown" if used is None else interval_text({**used, "unit": cells.unit}, "95% interval ")
    sizes = at.loc[~at["verdict"].isin(["lower", "higher"]), "detectable"].dropna()
    ends = dict.fromkeys(size_text(size, cells.unit) for size in (sizes.min(), sizes.max())) if len(sizes) else {}
    yield " to ".join(ends) or None
    for cost in ("flops", "time"):
        ratio = 1.0 if used is None else row[cost]
        yield None if is_missing(ratio) else f"x{ratio:.3g}"
