"""The chain: sparsity -> residual variance -> effectiveness -> validation loss; with the lines by layer, the overview.

One panel per link, one point per run; the colour is the depth, the shape the changed field. The title has
Spearman's rho over all runs and within depth; its 95% interval is Fisher's, tanh(artanh rho +- 1.96 / sqrt(G - 3)),
with the number of settings G as sample size, since the runs of one are no independent observations. The line of each
depth is the least-squares fit on the scales of the axes. A degenerate score has neither.
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.by_setting import depth_styles, panels_by_depth, points_by_depth, values_by_depth
from sparsedepth.plots.facets import draw_panel, lr_text, means_text
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import all_runs, changed_fields, trained_runs
from sparsedepth.plots.style import CHANGES_VARIANCE, GREY, RunPoints, caption, depth_colours, groups, panels, set_scale
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
    """The chain alone."""
    return _drawing(store, trained_runs(store), pd.DataFrame(), "")


def overview(store: Store) -> Drawing:
    """The chain and the lines by layer."""
    runs = trained_runs(store)
    values, notes = values_by_depth(store, runs)
    lines, text = points_by_depth(runs, values, search_of(store.roots) is not None)
    text += f" {means_text(lines)}" if len(lines) else ""
    return _drawing(store, runs, lines, text + notes)


def _drawing(store: Store, runs: pd.DataFrame, lines: pd.DataFrame, notes: str) -> Drawing:
    found = correlations(runs, search_of(store.roots) is not None)
    if not found.panels and lines.empty:
        advice = "measure them"
        if is_imported(runs):
            advice = "imported runs have only those that their map names: --figure depth draws the loss over n_layers"
        raise NothingToDraw(f"no two finished runs have two quantities of the chain from sparsity to loss; {advice}")
    if n_models := int(all_runs(store)["model"].notna().sum()):
        notes += f" {counted(n_models, 'model')} measured without a training configuration: see --figure layer_profile."
    data = pd.concat([part.astype(object) for part in (found.points, lines) if len(part)], ignore_index=True)
    return Drawing(data=data, page=partial(page_of_runs, found, lines, notes))


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


def page_of_runs(found: Correlations, lines: pd.DataFrame, notes: str = "") -> Figure:
    """Rows of up to three panels; one legend above and one caption below."""
    kinds = panels_by_depth(lines) if len(lines) else []
    page, axes = panels(len(found.panels) + len(kinds), 3, 3.3, 3.0)
    if found.panels:
        points = RunPoints(found.points, "kind")
        points.legend(page)
        for axis, panel in zip(axes, found.panels, strict=False):
            draw_link(axis, found, points, *panel)
    for axis, kind in zip(axes[len(found.panels) :], kinds, strict=True):
        draw_panel(axis, kind, lines[lines["panel"] == kind.key], depth_styles(lines["n_layers"]))
    text = f"{counted(len(found.points), 'finished run')}, {found.n_diverged} diverged (not shown)."
    text += " ρ: Spearman's correlation [95% interval, the number of settings as sample size]." * bool(found.panels)
    text += found.notes
    text += lr_text(found.points["lr"], CHANGES_VARIANCE) if found.points["lr"].nunique() > 1 else ""
    missing = dict.fromkeys(name for panel in found.dropped for name in panel if found.points[name].isna().all())
    text += f" Not measured: {', '.join(missing)}." if missing else ""
    caption(page, text + notes)
    return page


def draw_link(axis: Any, found: Correlations, points: RunPoints, x: str, y: str) -> None:
    """One panel: the points, a line for each depth, and the correlations as its title."""
    shown = found.points.dropna(subset=[x, y])
    is_evidence = found.no_evidence.isdisjoint((x, y))
    colours = depth_colours(found.points["n_layers"])
    look = {"s": 36 if len(shown) < 80 else 22, "alpha": 0.9 if is_evidence else 0.3, "rasterized": len(shown) > MANY}
    points.draw(axis, shown, x, y, **look)
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
