"""Figures of a store, by name: compute the numbers, lay out the page, write picture and numbers whole or not at all."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsedepth.effects.sentences import counted
from sparsedepth.files import write_bytes
from sparsedepth.plots import by_knob, forest, learning_rate, matrices, pareto
from sparsedepth.plots.page import FORMATS, Drawing, NothingToDraw, csv_bytes, render
from sparsedepth.plots.runs import check_comparable, chosen, trained

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from sparsedepth.plots.correlations import Correlations
    from sparsedepth.store.connection import Store

PARTS = {"overview": (True, True), "chain": (True, False), "profiles": (False, True)}
"""Figures of many runs -> whether they hold the chain, and the profiles."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A figure that a store may hold the numbers for."""

    meaning: str
    load: Callable[["Store", str | None], Drawing]
    """Reads the rows and computes the numbers; raises NothingToDraw, or ValueError for an unknown run."""
    of_one_run: bool = False
    """Whether `run` chooses what it shows."""


def draw(store: "Store", figure: str | None, path: Path, run: str | None = None) -> str:
    """Draw a figure into a .png, .svg or .pdf file, its numbers into the .csv beside it; returns the figure's name.

    `figure` is a name of FIGURES, or None for the one that says most about this store. `run` chooses the run of a
    figure of one run (default: the lowest val_loss at the deepest depth). Raises ValueError for another figure,
    suffix or run, NothingToDraw where the numbers are absent.
    """
    name = figure or default_figure(store)
    if name not in FIGURES:
        raise ValueError(f"figure {name!r} is unknown; choose one of: {', '.join(FIGURES)}, or all, into a folder")
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} must end in one of: {', '.join(FORMATS)}")
    if run is not None and not FIGURES[name].of_one_run:
        raise ValueError(f"run={run!r} chooses the run of a card; the figure {name!r} shows all runs")
    _write(FIGURES[name].load(store, run), path)
    return name


def draw_all(store: "Store", folder: Path, suffix: str, run: str | None = None) -> tuple[list[Path], dict[str, str]]:
    """Every figure of the store into a folder; returns the pictures, and why each of the others was left out."""
    written: list[Path] = []
    left_out: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in FIGURES.items():
        try:
            drawing = kind.load(store, run if kind.of_one_run else None)
        except NothingToDraw as reason:
            left_out[name] = str(reason)
            continue
        _write(drawing, folder / f"{name}{suffix}")
        written.append(folder / f"{name}{suffix}")
    if not written:
        raise NothingToDraw(f"there is nothing to draw: {'; '.join(dict.fromkeys(left_out.values()))}")
    return written, left_out


def default_figure(store: "Store") -> str:
    """The overview of trained runs; else the card of a measured model; else the toys."""
    runs = store.sql("select count(*), count(train_tokens) from runs").rows[0]
    return "overview" if runs[1] else "card" if runs[0] else "toy"


def _write(drawing: Drawing, path: Path) -> None:
    write_bytes(path, render(drawing.page, path.suffix.lower()))
    write_bytes(path.with_suffix(".csv"), csv_bytes(drawing.data))


def _of_runs(figure: str, store: "Store", run: str | None) -> Drawing:
    from sparsedepth.plots.correlations import correlations
    from sparsedepth.plots.profiles import METRICS, profiles

    runs = store.frame("select * from runs")
    check_comparable(runs)
    listed = ", ".join(f"'{metric}'" for metric in METRICS)
    layers = store.frame(f"select run_id, step, layer, metric, value from layers where metric in ({listed})")
    known = trained(chosen(runs))
    data = correlations(known).points if PARTS[figure][0] else profiles(known, layers).layers
    return Drawing(data=data, page=partial(page_of_runs, figure, runs, layers))


def _card(store: "Store", run: str | None) -> Drawing:
    import pandas as pd

    from sparsedepth.plots.layer_profile import load_card
    from sparsedepth.plots.layer_profile_page import card_page

    found = load_card(store, run)
    pairs = [
        {"name": name, "layer": layer, "other_layer": other, "value": values[other, layer]}
        for name, values in found.matrices.items()
        for other, layer in zip(*(~pd.isna(values)).nonzero(), strict=True)
    ]
    return Drawing(
        data=pd.concat([found.profiles, pd.DataFrame(pairs)], ignore_index=True), page=partial(card_page, found)
    )


def _trajectories(store: "Store", run: str | None) -> Drawing:
    from sparsedepth.plots.trajectories import load_picture, page_of_trajectories

    picture = load_picture(store, run)
    return Drawing(data=picture.data(), page=partial(page_of_trajectories, picture))


def _toy(store: "Store", run: str | None) -> Drawing:
    from sparsedepth.toy.figure import columns, data, page_of_toys

    toys = store.frame("select * from toys")
    if not len(toys):
        raise NothingToDraw("the store holds no toy networks")
    found = columns(toys)
    return Drawing(data=data(found), page=partial(page_of_toys, found))


FIGURES: dict[str, Kind] = {
    "overview": Kind(meaning="the chain and the profiles on one page", load=partial(_of_runs, "overview")),
    "chain": Kind(
        meaning="how sparsity, residual variance, effectiveness and loss move together, a point per run",
        load=partial(_of_runs, "chain"),
    ),
    "profiles": Kind(
        meaning="layer by layer at the baseline, a line per depth: variance, effect on later layers, usefulness",
        load=partial(_of_runs, "profiles"),
    ),
    "variance": Kind(
        meaning="residual variance over depth and over training, a line per setting of each knob", load=by_knob.variance
    ),
    "scores": Kind(meaning="the layers' scores, a line per setting of each knob", load=by_knob.scores),
    "effects": Kind(
        meaning="what each setting does at each depth: paired difference, interval, noise floor", load=forest.effects
    ),
    "pareto": Kind(meaning="validation loss, usefulness and cost of every configuration", load=pareto.pareto),
    "matrices": Kind(
        meaning="causal and permutation effects by pair of layers, the baseline beside each setting",
        load=matrices.matrices,
    ),
    "ladder": Kind(
        meaning="the stacked recipe: each change added, the whole, each change left out", load=forest.recipe_ladder
    ),
    "lr": Kind(meaning="loss against learning rate, a line per configuration", load=learning_rate.learning_rate),
    "card": Kind(meaning="every profile and matrix of one run (--run)", load=_card, of_one_run=True),
    "trajectories": Kind(
        meaning="how one run's tokens turn from layer to layer (--run), and the angle against depth",
        load=_trajectories,
        of_one_run=True,
    ),
    "toy": Kind(meaning="the teacher-student networks: loss against depth, and its exponent", load=_toy),
}


def page_of_runs(figure: str, runs: "pd.DataFrame", layers: "pd.DataFrame") -> "Figure":
    """One of PARTS, from the rows of `runs` and `layers`."""
    runs = chosen(runs)
    known = trained(runs)
    return _page(known, layers, *PARTS[figure], n_untrained=len(runs) - len(known))


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
    caption = f"{counted(len(found.points), 'finished run')}, {found.n_diverged} diverged (not shown)."
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
