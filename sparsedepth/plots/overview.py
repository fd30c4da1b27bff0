"""Figures of many runs: the chain (`correlations`), the lines by layer (`by_layer`), or both on one page."""

from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.by_layer import READ, ByLayer, by_layer, draw_by_layer
from sparsedepth.plots.correlations import Correlations, correlations, draw_correlations
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import read_metrics, read_runs
from sparsedepth.plots.style import CHANGES_VARIANCE, RunPoints, caption, depth_colours, depth_legend
from sparsedepth.quantities import PROFILED
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption
from sparsedepth.store.imported_run import is_imported
from sparsedepth.store.search import search_of
from sparsedepth.store.tuning_roles import result_rows, without_measured_models, without_tuning_runs


def load_overview(figure: str, store: Store) -> Drawing:
    """The figure `overview`, `chain` or `by_layer`. Raises NothingToDraw."""
    runs, layers = read_runs(store), read_metrics(store, "layers", READ)
    is_search = search_of(store.roots) is not None
    chain, by_depth = parts_of(figure, runs, layers, is_search)
    if not (chain and chain.panels) and (by_depth is None or by_depth.layers.empty):
        advice = "measure them"
        if is_imported(runs):
            advice = "imported runs have only those that their map names: --figure depth draws the loss over n_layers"
        raise NothingToDraw(f"no finished run has two of the quantities of the figure {figure}; {advice}")
    return Drawing(data=data_of(chain, by_depth), page=partial(page_of_runs, runs, chain, by_depth, is_search))


def parts_of(
    figure: str, runs: pd.DataFrame, layers: pd.DataFrame, is_search: bool = False
) -> tuple[Correlations | None, ByLayer | None]:
    """The numbers of the chain and of the lines by layer; None for a part that the figure does not have."""
    trained = result_rows(runs).astype({"n_layers": int})
    return (
        correlations(trained, is_search) if figure != "by_layer" else None,
        by_layer(trained, layers, is_search) if figure != "chain" else None,
    )


def data_of(chain: Correlations | None, by_depth: ByLayer | None) -> pd.DataFrame:
    """Every number drawn: a row for each run of the chain, then one for each layer of a depth."""
    tables = [*([chain.points] if chain else []), *([by_depth.layers] if by_depth else [])]
    return pd.concat([table.astype(object) for table in tables], ignore_index=True)


def page_of_runs(
    runs: pd.DataFrame, chain: Correlations | None, by_depth: ByLayer | None, is_search: bool = False
) -> Figure:
    """Rows of up to three panels; one legend above and one caption below."""
    runs = without_tuning_runs(runs)
    trained = without_measured_models(runs).astype({"n_layers": int})
    n_links, n_lines = len(chain.panels) if chain else 0, len(by_depth.metrics) if by_depth else 0
    page, link_axes, layer_axes = _panels(n_links, n_lines)
    colours = depth_colours(trained.loc[trained["outcome"] == "ok", "n_layers"])
    text = f"{counted(len(chain.points), 'finished run')}, {chain.n_diverged} diverged (not shown)." if chain else ""
    if len(runs) > len(trained):
        text += (
            f" {len(runs) - len(trained)} measured without a training configuration "
            f"(not shown; see --figure layer_profile)."
        )
    if chain:
        RunPoints(chain.points, "knob").legend(page)
        draw_correlations(chain, link_axes)
        text += " ρ: Spearman's correlation [95% interval, jackknife over combinations of settings]."
        text += chain.degenerate
    else:
        depth_legend(page, colours)
    if by_depth:
        draw_by_layer(by_depth, layer_axes, colours)
        scores = [score.name for score in PROFILED if score.metric in by_depth.metrics and not chain]
        text += by_depth.degenerate + degeneracy_caption(scores, trained)
        shown = "the proposal with the lowest loss" if is_search else "baseline runs, or those closest to it"
        shown += f" ({by_depth.lr_text})" if by_depth.lr_text else ""
        dashed = "; dashed: usefulness threshold" if "affine_loss_increase" in by_depth.metrics else ""
        text += f" By layer: {shown}{dashed}." if layer_axes else ""
        if by_depth.dropped:
            text += f" Not shown: {by_depth.dropped} values by layer that are missing or not positive."
    drawn = chain.points if chain else by_depth.layers if by_depth else trained
    if (lrs := drawn["lr"].dropna()).nunique() > 1:
        text += f" Runs differ in lr ({lrs.min():g} to {lrs.max():g}){CHANGES_VARIANCE}."
    if absent := _absent(chain, by_depth):
        text += f" Not measured: {', '.join(absent)}."
    caption(page, text.strip())
    return page


def _panels(n_links: int, n_layer_panels: int) -> tuple[Figure, list[Any], list[Any]]:
    """The page with the axes of the links and those by layer, in separate rows of up to three."""
    n_columns = min(3, max(n_links, n_layer_panels))
    n_link_rows, n_layer_rows = (-(-n // n_columns) for n in (n_links, n_layer_panels))
    n_rows = n_link_rows + n_layer_rows
    page = Figure(figsize=(3.4 * max(2, n_columns), 3.0 * n_rows + 0.9), layout="constrained")
    axes = page.subplots(n_rows, n_columns, squeeze=False)
    links, by_layers = list(axes[:n_link_rows].ravel()), list(axes[n_link_rows:].ravel())
    for axis in (*links[n_links:], *by_layers[n_layer_panels:]):
        axis.remove()
    return page, links[:n_links], by_layers[:n_layer_panels]


def _absent(chain: Correlations | None, by_depth: ByLayer | None) -> list[str]:
    """Quantities that no run has, so that their panels are missing."""
    links = [] if chain is None else dict.fromkeys(name for panel in chain.links for name in panel)
    absent = [name for name in links if chain is not None and chain.points[name].isna().all()]
    return absent + ([] if by_depth is None else by_depth.absent)
