"""The chain: sparsity -> residual variance -> effectiveness -> validation loss.

One panel per link, one point per run; the colour is the depth, the shape the changed knob. The title has Spearman's rho
over all runs and within depth, with its 95% interval (jackknife over combinations of settings); the line of each depth
is the least-squares fit on the scales of the axes.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from sparsedepth.effects.chain import Link, Scope, link, units_of
from sparsedepth.plots.runs import changed_knobs, sources
from sparsedepth.plots.style import GREY, RunPoints, depth_colours, groups, set_scale
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.degeneracy import degeneracy_caption, sound_forms

WALKS = (
    ("weight_sparsity", "residual_variance_last", "usefulness_loss_increase", "val_loss"),
    ("attention_sparsity_rel", "residual_variance_last", "causal_score", "val_loss"),
)
"""Two rows, read from left to right. Usefulness is drawn in its continuous form, since the count has steps of 1/L and
is 0 for many small models. val_loss is replaced by the comparable loss, a degenerate score by its sound form."""
PANELS: tuple[tuple[str, str], ...] = tuple(link for walk in WALKS for link in pairwise(walk))
MIN_POINTS = 4
"""Distinct values of x that a regression line needs."""
SCOPES: tuple[Scope, ...] = ("pooled", "within depth")


@dataclass(frozen=True, kw_only=True)
class Correlations:
    points: pd.DataFrame
    """Columns: run_id, n_layers, lr, knob, source (for several results folders), and each quantity of the panels (NaN
    if not measured or not drawable)."""
    links: dict[tuple[str, str], tuple[Link, ...]]
    """By panel: pooled, and within depth if there are several."""
    dropped: dict[tuple[str, str], int]
    """By panel: the number of finished runs that it cannot show."""
    n_diverged: int
    degenerate: str
    """A sentence: which scores are degenerate, and what is drawn instead."""

    @property
    def panels(self) -> list[tuple[str, str]]:
        """Those with at least one point."""
        return [panel for panel, n in self.dropped.items() if n < len(self.points)]


def correlations(runs: pd.DataFrame, is_search: bool = False) -> Correlations:
    """The numbers of the figure, from the rows of `runs`."""
    finished = runs[runs["outcome"] == "ok"]
    requested = [with_loss(loss_of(runs), panel) for panel in PANELS]
    forms = sound_forms((name for panel in requested for name in panel), finished)
    panels = [(forms[x], forms[y]) for x, y in requested]
    names = list(forms.values())
    points = finished[["run_id", "n_layers", "lr", "outcome"]].assign(unit=units_of(runs))
    points["knob"] = changed_knobs(finished, runs, is_search)
    for name in names:
        values = pd.to_numeric(finished[name], errors="coerce").astype(float)
        points[name] = values.where(values > 0) if is_log(name) else values
    points["source"] = sources(finished)
    columns = ["run_id", "n_layers", "lr", "knob", *(["source"] if points["source"].any() else []), *names]
    scopes = SCOPES if points["n_layers"].nunique() > 1 else SCOPES[:1]
    return Correlations(
        points=points[columns].reset_index(drop=True),
        links={panel: tuple(link(points, *panel, scope) for scope in scopes) for panel in panels},
        dropped={panel: int(points[list(panel)].isna().any(axis=1).sum()) for panel in panels},
        n_diverged=int((runs["outcome"] == "diverged").sum()),
        degenerate=degeneracy_caption(forms, finished, forms),
    )


def draw_correlations(chain: Correlations, axes: list[Any]) -> None:
    """Draw into as many axes as there are panels."""
    points = chain.points
    markers, colours = RunPoints(points, "knob"), depth_colours(points["n_layers"])
    for axis, panel in zip(axes, chain.panels, strict=True):
        x, y = panel
        shown = points.dropna(subset=list(panel))
        markers.draw(axis, shown, x, y, s=36 if len(shown) < 80 else 28, alpha=0.9)
        for (depth,), runs in groups(shown, "n_layers"):
            line = regression(runs[x], runs[y], is_log(x), is_log(y))
            if line is not None:
                axis.plot(*line, color=colours[depth], linewidth=1.1, alpha=0.75, zorder=1)
        for name, which in ((x, "x"), (y, "y")):
            scale = IN_RUNS[name].scale
            set_scale(axis, which, "linear" if scale == "symlog" and min(shown[name]) > 0 else scale, shown[name])
        if not is_log(x):
            axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.set(xlabel=axis_label(x), ylabel=axis_label(y))
        lines = [_rho_text(link) for link in chain.links[panel]]
        if chain.dropped[panel]:
            lines.append(f"not shown: {chain.dropped[panel]} of {len(points)} (NULL)")
        axis.set_title("\n".join(lines), color=GREY, fontsize=7.5, linespacing=1.35)


def is_log(name: str) -> bool:
    return IN_RUNS[name].scale == "log"


def regression(x: pd.Series, y: pd.Series, log_x: bool, log_y: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """The end points of the least-squares line, fitted on the scale of each axis: x [2], y [2]. None with fewer than
    MIN_POINTS distinct x."""
    if x.nunique() < MIN_POINTS:
        return None
    x_N, y_N = (np.log(values) if is_log else values for values, is_log in ((x, log_x), (y, log_y)))
    slope, intercept = np.polyfit(x_N, y_N, 1)
    ends_2 = np.array([x_N.min(), x_N.max()])
    fitted_2 = slope * ends_2 + intercept
    return (np.exp(ends_2) if log_x else ends_2, np.exp(fitted_2) if log_y else fitted_2)


def _rho_text(link: Link) -> str:
    scope = "all runs" if link.scope == "pooled" else "within depth"
    if link.rho is None:
        return f"{scope}: ρ undefined, n = {link.n_runs}"
    interval = f"[{link.lo:+.2f}, {link.hi:+.2f}]" if link.lo is not None and link.hi is not None else "(no interval)"
    return f"{scope}: ρ = {link.rho:+.2f} {interval}, n = {link.n_runs}"
