"""The chain: sparsity -> residual variance -> effectiveness -> validation loss.

One panel per link, one point per run; the colour is the depth, the shape the changed field. The title has
Spearman's rho over all runs and within depth; its 95% interval is Fisher's, tanh(artanh rho +- 1.96 / sqrt(G - 3)),
with the number of settings G as sample size, since the runs of one are no independent observations. The line of each
depth is the least-squares fit on the scales of the axes. A degenerate score has neither.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.facets import draw_points, groups, lr_text
from sparsedepth.plots.page import Drawing, NothingToDraw, caption, depth_legend, panels
from sparsedepth.plots.runs import all_runs, changed_fields, trained_runs
from sparsedepth.plots.style import CHANGES_VARIANCE, GREY, depth_colours, kind_markers, set_scale
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy, degeneracy_caption, score_rows, sound_forms
from sparsedepth.store.search import search_of
from sparsedepth.store.small_sample import Z
from sparsedepth.store.subject import is_imported

WALKS = (
    ("weight_sparsity", "residual_variance_last", "usefulness_loss_increase", "val_loss"),
    ("attention_sparsity_rel", "residual_variance_last", "causal_score", "val_loss"),
)
"""Two rows, read from left to right. Usefulness is drawn in its continuous form, since the count has steps of 1/L and
is 0 for many small models. val_loss is replaced by the comparable loss, a degenerate score by its sound form."""
PANELS: tuple[tuple[str, str], ...] = tuple(link for walk in WALKS for link in pairwise(walk))
MIN_POINTS = 4
"""Distinct values of x that a regression line needs, and settings that an interval needs."""
MANY = 1000
"""Points of a panel that are pixels in a picture of lines: it would be large and slow."""


@dataclass(frozen=True, kw_only=True)
class Correlations:
    points: pd.DataFrame
    """Columns: run_id, n_layers, lr, setting, kind (`changed_fields`), and each quantity of the panels (NaN if not
    measured or not drawable)."""
    dropped: dict[tuple[str, str], int]
    """By panel: the number of finished runs that it cannot show."""
    n_diverged: int
    no_evidence: frozenset[str] = frozenset()
    """Degenerate scores without a sound form."""
    notes: str = ""

    @property
    def panels(self) -> list[tuple[str, str]]:
        """Those with at least two points: one shows no relation."""
        return [panel for panel, n in self.dropped.items() if n < len(self.points) - 1]


def chain(store: Store) -> Drawing:
    """Raises NothingToDraw without two runs that have both quantities of a link."""
    runs = trained_runs(store)
    found = correlations(runs, search_of(store.roots) is not None)
    if not found.panels:
        advice = "measure them"
        if is_imported(runs):
            advice = "imported runs have only those that their map names: --figure depth draws the loss over n_layers"
        raise NothingToDraw(f"no two finished runs have two quantities of the chain from sparsity to loss; {advice}")
    notes = ""
    if n_models := int(all_runs(store)["model"].notna().sum()):
        notes = f" {counted(n_models, 'model')} measured without a training configuration: see --figure layer_profile."
    return Drawing(data=found.points, page=partial(page_of_runs, found, notes))


def correlations(runs: pd.DataFrame, is_search: bool = False) -> Correlations:
    """The numbers of the chain, from the rows of `runs`."""
    finished = runs[runs["outcome"] == "ok"]
    requested = [with_loss(loss_of(runs), panel) for panel in PANELS]
    forms = sound_forms((name for panel in requested for name in panel), finished)
    names = list(dict.fromkeys(forms.values()))
    points = finished[["run_id", "n_layers", "lr", "setting"]].assign(kind=changed_fields(finished, is_search))
    for name in names:
        values = pd.to_numeric(finished[name], errors="coerce").astype(float)
        points[name] = values.where(values > 0) if is_log(name) else values
    judged = {name: degeneracy(name, score_rows(finished, name)) for name in names}
    return Correlations(
        points=points.reset_index(drop=True),
        dropped={
            (forms[x], forms[y]): int(points[[forms[x], forms[y]]].isna().any(axis=1).sum()) for x, y in requested
        },
        n_diverged=int((runs["outcome"] == "diverged").sum()),
        no_evidence=frozenset(name for name, found in judged.items() if found.is_degenerate),
        notes=degeneracy_caption(forms, finished, forms),
    )


def page_of_runs(found: Correlations, notes: str = "") -> Figure:
    """Rows of up to three panels; one legend above and one caption below."""
    page, axes = panels(len(found.panels), 3, 3.3, 3.0)
    colours, markers = depth_colours(found.points["n_layers"]), kind_markers(found.points["kind"])
    depth_legend(page, colours, markers)
    for axis, panel in zip(axes, found.panels, strict=True):
        draw_link(axis, found, colours, markers, *panel)
    text = f"{counted(len(found.points), 'finished run')}, {found.n_diverged} diverged (not shown)."
    text += " ρ: Spearman's correlation [95% interval, the number of settings as sample size]."
    text += found.notes
    text += lr_text(found.points["lr"], CHANGES_VARIANCE) if found.points["lr"].nunique() > 1 else ""
    missing = dict.fromkeys(name for panel in found.dropped for name in panel if found.points[name].isna().all())
    text += f" Not measured: {', '.join(missing)}." if missing else ""
    caption(page, text + notes)
    return page


def draw_link(
    axis: Axes, found: Correlations, colours: Mapping[int, str], markers: Mapping[str, str], x: str, y: str
) -> None:
    """One panel: the points, a line for each depth, and the correlations as its title."""
    shown = found.points.dropna(subset=[x, y])
    is_evidence = found.no_evidence.isdisjoint((x, y))
    look = {"s": 36 if len(shown) < 80 else 22, "alpha": 0.9 if is_evidence else 0.3, "rasterized": len(shown) > MANY}
    draw_points(axis, shown, x, y, colours, markers, **look)
    for (depth,), runs in groups(shown, "n_layers"):
        line = regression(runs[x], runs[y], is_log(x), is_log(y)) if is_evidence else None
        if line is not None:
            axis.plot(*line, color=colours[depth], linewidth=1.1, alpha=0.75, zorder=1)
    for name, which in ((x, "x"), (y, "y")):
        scale = IN_RUNS[name].scale
        set_scale(axis, which, "linear" if scale == "symlog" and min(shown[name]) > 0 else scale, shown[name])
    if not is_log(x):
        axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set(xlabel=axis_label(x), ylabel=axis_label(y))
    scopes = {"all runs": False, "within depth": True} if shown["n_layers"].nunique() > 1 else {"all runs": False}
    said = [f"{scope}: {rho_text(*rank_correlation(shown, x, y, within))}" for scope, within in scopes.items()]
    said = said if is_evidence else ["degenerate, so no evidence"]
    if found.dropped[x, y]:
        said.append(f"not shown: {found.dropped[x, y]} of {len(found.points)} (NULL)")
    axis.set_title("\n".join(said), color=GREY, fontsize=7.5, linespacing=1.35)


def rank_correlation(
    points: pd.DataFrame, x: str, y: str, within_depth: bool
) -> tuple[float, float | None, float | None, int]:
    """Spearman's rho (NaN where undefined), the ends of its interval, and the number of runs; ranks within a depth are
    a share of its number of runs."""
    ranked = points.groupby("n_layers") if within_depth else points
    ranks = ranked[[x, y]].rank(pct=True)
    if within_depth:
        ranks = ranks - ranks.groupby(points["n_layers"]).transform("mean")
    rho = float(ranks[x].corr(ranks[y])) if len(points) > 2 else math.nan
    n_settings = points["setting"].nunique() if "setting" in points else 0
    if math.isnan(rho) or n_settings < MIN_POINTS:
        return rho, None, None, len(points)
    z, half = math.atanh(max(-0.9999, min(rho, 0.9999))), Z / math.sqrt(n_settings - 3)
    return rho, math.tanh(z - half), math.tanh(z + half), len(points)


def rho_text(rho: float, lo: float | None, hi: float | None, n: int) -> str:
    """'ρ = +0.42 [-0.10, +0.76], n = 60'."""
    if math.isnan(rho):
        return f"ρ undefined, n = {n}"
    return f"ρ = {rho:+.2f} {'(no interval)' if lo is None else f'[{lo:+.2f}, {hi:+.2f}]'}, n = {n}"


def is_log(name: str) -> bool:
    return IN_RUNS[name].scale == "log"


def regression(x: pd.Series, y: pd.Series, log_x: bool, log_y: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """The end points of the least-squares line, fitted on the scale of each axis and cut at the values of y: x [2],
    y [2]. None with fewer than MIN_POINTS distinct x, or of a constant y."""
    if x.nunique() < MIN_POINTS or y.nunique() < 2:
        return None
    x_N, y_N = (np.log(values) if is_log else values for values, is_log in ((x, log_x), (y, log_y)))
    slope, intercept = np.polyfit(x_N, y_N, 1)
    at_ends = sorted((end - intercept) / slope for end in (y_N.min(), y_N.max())) if slope else (-math.inf, math.inf)
    ends_2 = np.array([max(x_N.min(), at_ends[0]), min(x_N.max(), at_ends[1])])
    fitted_2 = slope * ends_2 + intercept
    return (np.exp(ends_2) if log_x else ends_2, np.exp(fitted_2) if log_y else fitted_2)
