"""Figures of a store, by name: compute the numbers, lay out the page, write picture and numbers whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparsedepth.plots import by_knob, forest, learning_rate, matrices, pareto
from sparsedepth.plots.layer_profile_page import one_run
from sparsedepth.plots.overview import load_overview
from sparsedepth.plots.page import Drawing, NothingToDraw, check_suffix, write
from sparsedepth.plots.trajectories import trajectories
from sparsedepth.toy.figure import toys

if TYPE_CHECKING:
    from sparsedepth.store.connection import Store


@dataclass(frozen=True)
class FigureKind:
    """A figure that a store may hold the numbers for."""

    load: Callable[..., Drawing]
    """Of a store, and of a run's id or None where the figure is `of_one_run`."""
    meaning: str
    of_one_run: bool = False

    def drawing(self, store: "Store", run: str | None = None) -> Drawing:
        """The figure's numbers. Raises NothingToDraw, and ValueError for an unknown run."""
        return self.load(store, run) if self.of_one_run else self.load(store)


def draw(store: "Store", figure: str | None, path: Path, run: str | None = None) -> str:
    """Draw a figure into a .png, .svg or .pdf file, its numbers into the .csv beside it; returns the figure's name.

    `figure` is a name of FIGURES, or None for the one that says most about this store. `run` chooses the run of a
    figure of one run (default: the lowest val_loss at the deepest depth). Raises ValueError for another figure,
    suffix or run, NothingToDraw where the numbers are absent.
    """
    name = figure or default_figure(store)
    if name not in FIGURES:
        raise ValueError(f"figure {name!r} is unknown; choose one of: {', '.join(FIGURES)}, or all, into a folder")
    check_suffix(path)
    if run is not None and not FIGURES[name].of_one_run:
        of_one = " or ".join(name for name, kind in FIGURES.items() if kind.of_one_run)
        raise ValueError(f"run={run!r} chooses the run of {of_one}; the figure {name!r} shows all runs")
    write(FIGURES[name].drawing(store, run), path)
    return name


def draw_all(store: "Store", folder: Path, suffix: str, run: str | None = None) -> tuple[list[Path], dict[str, str]]:
    """Every figure of the store into a folder; returns the pictures, and why each of the others was left out."""
    written: list[Path] = []
    left_out: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in FIGURES.items():
        try:
            drawing = kind.drawing(store, run)
        except NothingToDraw as reason:
            left_out[name] = str(reason)
            continue
        write(drawing, folder / f"{name}{suffix}")
        written.append(folder / f"{name}{suffix}")
    if not written:
        raise NothingToDraw(f"there is nothing to draw: {'; '.join(dict.fromkeys(left_out.values()))}")
    return written, left_out


def default_figure(store: "Store") -> str:
    """The overview of trained runs; else the layer profile of a measured model; else the toys."""
    runs = store.sql("select count(*), count(train_tokens) from runs").rows[0]
    return "overview" if runs[1] else "layer_profile" if runs[0] else "toy"


_CHAIN = "how sparsity, residual variance, effectiveness and loss move together, a point per run"
_PROFILES = "layer by layer at the baseline, a line per depth: variance, effect on later layers, usefulness"
_VARIANCE = "residual variance over depth and over training, a line per setting of each knob"
_EFFECTS = "what each setting does at each depth: paired difference, interval, noise floor"
_MATRICES = "causal and permutation effects by pair of layers, the baseline beside each setting"
_ANGLES = "how one run's tokens turn from layer to layer (--run), and the angle against depth"

FIGURES: dict[str, FigureKind] = {
    "overview": FigureKind(partial(load_overview, "overview"), "the chain and the profiles on one page"),
    "chain": FigureKind(partial(load_overview, "chain"), _CHAIN),
    "profiles": FigureKind(partial(load_overview, "profiles"), _PROFILES),
    "variance": FigureKind(by_knob.variance, _VARIANCE),
    "scores": FigureKind(by_knob.scores, "the layers' scores, a line per setting of each knob"),
    "effects": FigureKind(forest.effects, _EFFECTS),
    "pareto": FigureKind(pareto.pareto, "validation loss, usefulness and cost of every configuration"),
    "matrices": FigureKind(matrices.matrices, _MATRICES),
    "ladder": FigureKind(
        forest.recipe_ladder, "the stacked recipe: each change added, the whole, each change left out"
    ),
    "learning_rate": FigureKind(learning_rate.learning_rate, "loss against learning rate, a line per configuration"),
    "layer_profile": FigureKind(
        one_run, "every profile by layer and matrix by pair of layers of one run (--run)", True
    ),
    "trajectories": FigureKind(trajectories, _ANGLES, True),
    "toy": FigureKind(toys, "the teacher-student networks: loss against depth, and its exponent"),
}
