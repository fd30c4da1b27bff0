"""How the mean angle between the states of neighbouring middle layers shrinks with depth (2602.05970).

The power law of each setting is fitted over the mean of each depth (`TurnLaw`); grey is 1 / depth. Angles by layer, and
the ideals of early stop and even turning, are in the figure `layer_profile`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.plots.facets import intervals, lines_drawing, panel_of
from sparsedepth.plots.page import Drawing, NothingToDraw, not_shown
from sparsedepth.plots.runs import shown_settings, trained_runs
from sparsedepth.plots.style import MISSING, setting_styles
from sparsedepth.store.connection import Store
from sparsedepth.store.small_sample import t_critical

ANGLE = "angular_distance_middle"
LABEL = "mean angle of the middle layers (rad)"


@dataclass(frozen=True, kw_only=True)
class TurnLaw:
    """ln angle = intercept - b ln L, L the depth, by least squares over the mean of each depth: more seeds bring no
    mean nearer to the line. The interval is Student's, with two degrees of freedom less than depths."""

    b: float
    lo: float | None
    hi: float | None
    """95% interval of b; None of two depths."""
    intercept: float

    def __call__(self, depth: np.ndarray) -> np.ndarray:
        """The fitted angle, rad."""
        return np.exp(self.intercept) * depth**-self.b

    @property
    def text(self) -> str:
        return f"b = {self.b:.2f}" + ("" if self.lo is None else f" ({self.lo:.2f} to {self.hi:.2f})")


def trajectories(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting has an angle at two depths."""
    return angles_by_depth(trained_runs(store))


def angles_by_depth(runs: pd.DataFrame) -> Drawing:
    """From the result rows of `runs`; a model of 2 layers has no angle. Its points: panel, setting, x
    (n_layers), mean (geometric), lo, hi, n_seeds, b, b_lo, b_hi (of the setting's law)."""
    angles = pd.to_numeric(runs[ANGLE], errors="coerce")
    finished = runs[(runs["outcome"] == "ok") & (angles > 0)].rename(columns={"n_layers": "x"})
    finished = finished[finished.groupby("setting")["x"].transform("nunique") > 1]
    if finished.empty:
        raise NothingToDraw("no setting has an angle at two depths; measure 'geometry' at two depths")
    rows = finished[["setting", "x", "seed"]].assign(value=finished[ANGLE].astype(float))
    points = intervals(rows.sort_values("x"), ["setting", "x"], is_log=True).assign(panel=ANGLE)
    settings = shown_settings(points["setting"])
    laws = {name: turn_law(points[points["setting"] == name]) for name in settings}
    n_left_out = points["setting"].nunique() - len(settings)
    points = points[points["setting"].isin(settings)]
    of_points = [laws[name] for name in points["setting"]]
    points = points.assign(b=[law.b for law in of_points], b_lo=[law.lo for law in of_points])
    points = points.assign(b_hi=[law.hi for law in of_points])
    styles = setting_styles(settings)

    def draw_laws(axis: Any) -> None:
        ends = np.geomspace(points["x"].min(), points["x"].max(), 20)
        axis.plot(ends, points["mean"].max() * ends[0] / ends, color=MISSING, linewidth=2.5, zorder=0)
        for name, law in laws.items():
            of_setting = points.loc[points["setting"] == name, "x"]
            at = np.geomspace(of_setting.min(), of_setting.max(), 20)
            axis.plot(at, law(at), color=styles[name][0], linestyle=":", linewidth=1.0)

    return lines_drawing(
        points,
        [panel_of(ANGLE, x="depth", x_label="n_layers", scale="log", y_label=LABEL, decorate=draw_laws)],
        " Dotted: fit angle ~ depth^-b, with the 95% interval of b. Grey: b = 1."
        + not_shown(n_left_out, "further setting"),
        labels={name: f"{name}, {law.text}" for name, law in laws.items()},
        size=(4.8, 3.7),
        columns=1,
    )


def turn_law(points: pd.DataFrame) -> TurnLaw:
    """The fit over a setting's points at two depths or more."""
    x, y = np.log(points["x"].to_numpy(float)), np.log(points["mean"].to_numpy(float))
    (slope, intercept), squares, *_ = np.polyfit(x, y, 1, full=True)
    n = len(x)
    if n == 2:
        return TurnLaw(b=-slope, lo=None, hi=None, intercept=intercept)
    half = t_critical(n - 2) * float(np.sqrt(squares.sum() / (n - 2) / ((x - x.mean()) ** 2).sum()))
    return TurnLaw(b=-slope, lo=-slope - half, hi=-slope + half, intercept=intercept)
