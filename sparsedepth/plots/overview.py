"""The figures of many runs on one page: the chain (`correlations`) and the lines by layer (`by_layer`)."""

from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.effects.sentences import counted
from sparsedepth.plots.by_layer import READ, ByLayer, by_layer, draw_by_layer
from sparsedepth.plots.correlations import Correlations, correlations, draw_correlations
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import read_metrics, read_runs
from sparsedepth.plots.style import MOVES_VARIANCE, RunPoints, caption, depth_colours, depth_legend
from sparsedepth.quantities import PROFILED
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption
from sparsedepth.store.search import search_of
from sparsedepth.store.tuning_roles import result_rows, without_measured_models, without_tuning_runs

PARTS = {"overview": (True, True), "chain": (True, False), "by_layer": (False, True)}
"""Figure -> whether it holds the chain, and the lines by layer."""


def load_overview(figure: str, store: Store) -> Drawing:
    """One of PARTS. Raises NothingToDraw."""
    runs, layers = read_runs(store), read_metrics(store, "layers", READ)
    is_search = search_of(store.roots) is not None
    chain, by_depth = parts_of(figure, runs, layers, is_search)
    has_links = chain is not None and bool(chain.panels)
    if not has_links and (by_depth is None or by_depth.layers.empty):
        raise NothingToDraw(f"no finished run has two of the quantities that {figure} shows; measure them")
    return Drawing(data=data_of(chain, by_depth), page=partial(page_of_runs, runs, chain, by_depth, is_search))


def parts_of(
    figure: str, runs: pd.DataFrame, layers: pd.DataFrame, is_search: bool = False
) -> tuple[Correlations | None, ByLayer | None]:
    """The numbers of the chain and of the lines by layer, where the figure holds them."""
    known = result_rows(runs).astype({"n_layers": int})
    with_chain, with_layers = PARTS[figure]
    return (
        correlations(known, is_search) if with_chain else None,
        by_layer(known, layers, is_search) if with_layers else None,
    )


def data_of(chain: Correlations | None, by_depth: ByLayer | None) -> pd.DataFrame:
    """Every number that is drawn: a row for each run of the chain, then one for each layer of a depth."""
    tables = [*([chain.points] if chain else []), *([by_depth.layers] if by_depth else [])]
    return pd.concat([table.astype(object) for table in tables], ignore_index=True)


def page_of_runs(
    runs: pd.DataFrame, chain: Correlations | None, by_depth: ByLayer | None, is_search: bool = False
) -> Figure:
    """Rows of up to three panels, of the chain and of lines by layer; one legend above and one caption below."""
    runs = without_tuning_runs(runs)
    known = without_measured_models(runs).astype({"n_layers": int})
    n_links, n_lines = len(chain.panels) if chain else 0, len(by_depth.metrics) if by_depth else 0
    page, link_axes, layer_axes = _panels(n_links, n_lines)
    colours = depth_colours(known.loc[known["outcome"] == "ok", "n_layers"])
    text = f"{counted(len(chain.points), 'finished run')}, {chain.n_diverged} diverged (not shown)." if chain else ""
    if len(runs) > len(known):
        text += (
            f" {len(runs) - len(known)} measured without a training configuration "
            f"(not shown; see --figure layer_profile)."
        )
    if chain:
        RunPoints(chain.points, "knob").legend(page)
        draw_correlations(chain, link_axes)
        text += " ρ: Spearman, [95% interval, jackknife over combinations of settings]."
        text += chain.degenerate
    else:
        depth_legend(page, colours)
    if by_depth:
        draw_by_layer(by_depth, layer_axes, colours)
        scores = [score.name for score in PROFILED if score.rows in by_depth.metrics and not chain]
        text += by_depth.degenerate + degeneracy_caption(scores, known)
        shown = "the proposal of the lowest loss" if is_search else "runs at the baseline, or nearest to it"
        shown += f" ({by_depth.rates})" if by_depth.rates else ""
        dashed = "; dashed: the threshold of usefulness" if "affine_loss_increase" in by_depth.metrics else ""
        text += f" By layer: {shown}{dashed}." if layer_axes else ""
        if by_depth.dropped:
            text += f" {by_depth.dropped} layer values are NULL or not positive, and not shown."
    drawn = chain.points if chain else by_depth.layers if by_depth else known
    if (rates := drawn["lr"].dropna()).nunique() > 1:
        text += f" lr{MOVES_VARIANCE}, is not the same: {rates.min():g} to {rates.max():g} (in the data)."
    if absent := _absent(chain, by_depth):
        text += f" Not measured: {', '.join(absent)}."
    caption(page, text.strip())
    return page


def _panels(n_links: int, n_layer_panels: int) -> tuple[Figure, list[Any], list[Any]]:
    """A page of as many panels, in rows of up to three, those by layer in rows of their own."""
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
    """What no run has a value of, and has no panel for that."""
    links = [] if chain is None else dict.fromkeys(name for panel in chain.links for name in panel)
    absent = [name for name in links if chain is not None and chain.points[name].isna().all()]
    return absent + ([] if by_depth is None else by_depth.absent)
