"""The coordinate check (`train.coordinates`): activations and updates by place in the depth, against size."""

import pandas as pd

from sparsedepth.plots.facets import Panel, intervals, lines_drawing
from sparsedepth.plots.page import Drawing

PLACES = {"first quarter": 0.25, "middle": 0.5, "last block": 1.0}


def coordinates_drawing(found: pd.DataFrame, notes: str) -> Drawing:
    """`found`: axis, size, seed, quantity, place, value. A line for the blocks nearest to each of PLACES."""
    parts = []
    for (_, _, quantity), of in found.groupby(["axis", "size", "quantity"], sort=False):  # ty: ignore[not-iterable]
        for name, place in {"logits": 1.0}.items() if quantity == "update of logits" else PLACES.items():
            nearest = of["place"].iloc[(of["place"] - place).abs().argmin()]
            parts.append(of[of["place"] == nearest].assign(setting=name))
    rows = (
        pd.concat(parts).assign(panel=lambda rows: rows["axis"] + ": " + rows["quantity"]).rename(columns={"size": "x"})
    )
    points = intervals(rows, ["panel", "setting", "x"], is_log=True)
    kinds = [
        Panel(
            key=key,
            x_label=str(key).partition(":")[0],
            y_label=f"rms {str(key).partition(': ')[2]}",
            x="log",
            scale="log",
        )
        for key in dict.fromkeys(rows["panel"])
    ]
    return lines_drawing(points, kinds, f"\n{notes}")
