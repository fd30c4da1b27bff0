"""The chain (`correlations`), and with the lines by layer (`by_setting`) on one page: the overview."""

from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.by_setting import depth_styles, lines_by_depth, panels_by_depth, values_of
from sparsedepth.plots.correlations import Correlations, correlations, draw_correlations
from sparsedepth.plots.facets import draw_panel
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import all_runs, trained_runs
from sparsedepth.plots.style import CHANGES_VARIANCE, RunPoints, caption, panels
from sparsedepth.store.connection import Store
from sparsedepth.store.imported_run import is_imported
from sparsedepth.store.search import search_of

NO_LINES = (pd.DataFrame(), "")


def load_overview(with_layers: bool, store: Store) -> Drawing:
    """The chain, and `with_layers` the lines by layer. Raises NothingToDraw."""
    runs, is_search = trained_runs(store), search_of(store.roots) is not None
    chain = correlations(runs, is_search)
    lines, notes = lines_by_depth(runs, values_of(store, runs), is_search) if with_layers else NO_LINES
    if not chain.panels and lines.empty:
        advice = "measure them"
        if is_imported(runs):
            advice = "imported runs have only those that their map names: --figure depth draws the loss over n_layers"
        raise NothingToDraw(f"no finished run has two quantities of the chain from sparsity to loss; {advice}")
    if n_models := int(all_runs(store)["model"].notna().sum()):
        notes += f" {counted(n_models, 'model')} measured without a training configuration: see --figure layer_profile."
    data = pd.concat([part.astype(object) for part in (chain.points, lines) if len(part)], ignore_index=True)
    return Drawing(data=data, page=partial(page_of_runs, chain, lines, notes))


def page_of_runs(chain: Correlations, lines: pd.DataFrame, notes: str = "") -> Figure:
    """Rows of up to three panels; one legend above and one caption below."""
    kinds = panels_by_depth(lines) if len(lines) else []
    n_links = len(chain.panels)
    page, axes = panels(n_links + len(kinds), 3, 3.3, 3.0)
    if n_links:
        RunPoints(chain.points, "kind").legend(page)
        draw_correlations(chain, axes[:n_links])
    for axis, kind in zip(axes[n_links:], kinds, strict=True):
        draw_panel(axis, kind, lines[lines["panel"] == kind.key], depth_styles(lines))
    text = f"{counted(len(chain.points), 'finished run')}, {chain.n_diverged} diverged (not shown). ρ: Spearman's "
    text += "correlation [95% interval, the number of settings as sample size]." + chain.notes
    if (lrs := chain.points["lr"].dropna()).nunique() > 1:
        text += f" Runs differ in lr ({lrs.min():g} to {lrs.max():g}){CHANGES_VARIANCE}."
    missing = dict.fromkeys(name for panel in chain.dropped for name in panel if chain.points[name].isna().all())
    text += f" Not measured: {', '.join(missing)}." if missing else ""
    caption(page, text + notes)
    return page
