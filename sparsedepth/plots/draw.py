"""Figures of a store, by name: compute the numbers, lay out the page, write the file whole or not at all."""

import io
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsedepth.files import write_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from sparsedepth.plots.correlations import Correlations
    from sparsedepth.store.open import Store

FORMATS = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""Suffix -> metadata to leave out, so that the same numbers give the same file."""


FIGURES = {"all": (True, True), "chain": (True, False), "profiles": (False, True)}
"""Figures of many runs -> whether they hold the chain, and the profiles."""
NAMES = ("all", "chain", "profiles", "card")


def draw(store: "Store", figure: str, path: Path, run: str | None = None) -> None:
    """Draw a figure of a store into a .png, .svg or .pdf file.

    'chain': how sparsity, variance, effectiveness and loss move together; 'profiles': layer by layer; 'all': both;
    'card': every profile and matrix of one run, `run` (default: the lowest val_loss at the deepest depth).
    Raises ValueError for another figure, suffix or run, or a store with nothing to draw.
    """
    if figure not in NAMES:
        raise ValueError(f"figure {figure!r} is unknown; choose one of: {', '.join(NAMES)}")
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} must end in one of: {', '.join(FORMATS)}")
    if run is not None and figure != "card":
        raise ValueError(f"run={run!r} chooses the run of a card; the figure {figure!r} shows all runs")
    write_bytes(path, render(_builder(store, figure, run), path.suffix.lower()))


def _builder(store: "Store", figure: str, run: str | None) -> Callable[[], "Figure"]:
    """The rows are read here, the page is built when the style is set."""
    if figure == "card":
        from sparsedepth.plots.card import load_card
        from sparsedepth.plots.card_page import card_page

        return partial(card_page, load_card(store, run))
    runs = store.frame("select * from runs")
    check_comparable(runs)
    layers = store.frame("select run_id, step, layer, metric, value from layers")
    return partial(page_of_runs, figure, runs, layers)


def check_comparable(runs: "pd.DataFrame") -> None:
    """Raises ValueError unless a run that finished has a training configuration."""
    if not (runs["outcome"] == "ok").any():
        raise ValueError(f"none of the {len(runs)} runs finished, so there is nothing to draw")
    if not (trained(runs)["outcome"] == "ok").any():
        raise ValueError(
            "no finished run has a training configuration, so there is nothing to compare; draw --figure card"
        )


def render(build: Callable[[], "Figure"], suffix: str) -> bytes:
    """A page as the bytes of a file of that kind."""
    import matplotlib

    from sparsedepth.plots.style import RC

    with matplotlib.rc_context(RC):
        content = io.BytesIO()
        build().savefig(content, format=suffix[1:], metadata=FORMATS[suffix])
    return content.getvalue()


def trained(runs: "pd.DataFrame") -> "pd.DataFrame":
    """The runs that have a training configuration: a model that was only measured has no knobs to compare."""
    return runs[runs["train_tokens"].notna()].astype({"n_layers": int})


def page_of_runs(figure: str, runs: "pd.DataFrame", layers: "pd.DataFrame") -> "Figure":
    """One of FIGURES, from the rows of `runs` and `layers`."""
    known = trained(runs)
    return _page(known, layers, *FIGURES[figure], n_untrained=len(runs) - len(known))


def _page(
    runs: "pd.DataFrame", layers: "pd.DataFrame", with_chain: bool, with_profiles: bool, n_untrained: int
) -> "Figure":
    """Rows of three panels: two of the chain, one of profiles, one legend above and one caption below."""
    from matplotlib.figure import Figure

    from sparsedepth.plots.correlations import correlations, draw_correlations
    from sparsedepth.plots.profiles import draw_profiles, profiles
    from sparsedepth.plots.style import GREY, depth_colours

    n_rows = 2 * with_chain + with_profiles
    page = Figure(figsize=(10.2, 3.0 * n_rows + 0.9), layout="constrained")
    axes = page.subplots(n_rows, 3, squeeze=False)
    found = correlations(runs)
    colours = depth_colours(found.points["n_layers"])
    caption = f"{len(found.points)} finished runs, {found.n_diverged} diverged (not shown)."
    if n_untrained:
        caption += f" {n_untrained} measured without a training configuration (not shown; see --figure card)."
    if with_chain:
        draw_correlations(found, list(axes[:2].ravel()))
        caption += " ρ: Spearman, [95% interval, bootstrap over configurations]."
    if with_profiles:
        lines = profiles(runs, layers)
        draw_profiles(lines, axes[-1], colours)
        caption += " Profiles: runs at the baseline, or nearest to it; dashed: the threshold of usefulness."
        if lines.dropped:
            caption += f" {lines.dropped} layer values are NULL or not positive, and not shown."
    _legend(page, found, colours, with_chain)
    page.supxlabel("\n".join(textwrap.wrap(caption, 180)), x=0.01, ha="left", fontsize=7.5, color=GREY)
    return page


def _legend(page: "Figure", found: "Correlations", colours: dict[int, str], with_knobs: bool) -> None:
    from matplotlib.lines import Line2D

    from sparsedepth.plots.correlations import knob_names
    from sparsedepth.plots.style import knob_markers

    def swatch(label: str, colour: str, marker: str) -> Line2D:
        return Line2D([], [], linestyle="", marker=marker, markersize=6, color=colour, label=label)

    tight: dict[str, Any] = {"handletextpad": 0.1, "columnspacing": 1.2}
    depths = [swatch(f"{depth} layers", colour, "o") for depth, colour in colours.items()]
    knobs = [swatch(name, "#444444", marker) for name, marker in knob_markers(knob_names(found)).items()]
    page.legend(handles=depths, loc="outside upper left", ncols=min(4, len(depths)), **tight)
    if with_knobs:
        page.legend(handles=knobs, loc="outside upper right", ncols=min(6, len(knobs)), **tight)
