"""Figures of a store, by name: compute the numbers, build the page, write picture and numbers atomically."""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from sparsedepth.config.plain_text import did_you_mean
from sparsedepth.plots.page import FORMATS, Drawing, NothingToDraw, check_path, render, write, write_for_paper
from sparsedepth.plots.runs import results_folders
from sparsedepth.plots.style import caption, escaped
from sparsedepth.store.best import no_runs
from sparsedepth.store.comparable_loss import unit_for_stores
from sparsedepth.store.connection import Store
from sparsedepth.store.search import search_of
from sparsedepth.store.setting import read_settings

BY_TOKEN = "/token"
SCORES = ("causal_effect", "affine_loss_increase", "affine_loss_added", "skip_loss_increase", "jacobian_deviation")
STYLES = ("screen", "paper")
NOT_FOR_PAPER = ("overview", "layer_profile")
"""Pages of many panels, too many for a column."""


@dataclass(frozen=True)
class FigureKind:
    place: str
    """'module:function': takes a store, and if `of_one_run` a run's id or None. Imported when it is drawn."""
    meaning: str
    _: KW_ONLY
    of_grid: bool = False
    """Compares configurations of a grid, so not drawn of a search, whose proposals depend on earlier results."""
    of_one_run: bool = False
    given: tuple[Any, ...] = ()
    """Before the store."""
    compares_losses: bool = False
    """Of all its runs, so that it warns of different data, as `best` does."""

    def drawing(self, store: Store, run: str | None = None) -> Drawing:
        """The figure's numbers. Raises NothingToDraw, and ValueError for an unknown run."""
        if self.of_grid and search_of(store.roots):
            raise NothingToDraw("a search chose these runs by earlier results; draw --figure slices")
        module, _, name = self.place.partition(":")
        load = getattr(import_module(f"sparsedepth.plots.{module}"), name)
        drawing: Drawing = load(*self.given, store, *([run] if self.of_one_run else []))
        if (unit := unit_for_stores(BY_TOKEN, store)) != BY_TOKEN:
            drawing = replace(drawing, page=partial(_in_unit, drawing.page, unit))
        notes = _caution(store) if self.compares_losses else ""
        if len(folders := results_folders(store)) > 1:
            notes += f" From {len(folders)} folders: {', '.join(map(escaped, folders))}."
        return replace(drawing, page=partial(_with_notes, drawing.page, notes)) if notes else drawing


def _caution(store: Store) -> str:
    """' Configurations differ in corpus: losses on different data are not comparable.', or ''."""
    settings = read_settings(store)
    text = settings.data_text if settings else ""
    return f" {text[0].upper()}{text[1:]}." if text else ""


def _in_unit(page: Callable[[], Figure], unit: str) -> Figure:
    """The page, with `unit` in place of BY_TOKEN on its axes and in its titles."""
    figure = page()
    for text in figure.findobj(Text):
        text.set_text(text.get_text().replace(BY_TOKEN, unit))
    return figure


def _with_notes(page: Callable[[], Figure], notes: str) -> Figure:
    """The page, with `notes` at the end of its caption."""
    figure = page()
    caption(figure, " ".join(figure.get_supxlabel().split()) + notes)
    return figure


Progress = Callable[[str, float], None]
"""Gets what is being made, and the share that is done."""
NUMBERS_SHARE = 0.3
"""Of the time of drawing: collecting the numbers; the rest is rendering."""


def silent(name: str, done: float) -> None:
    """The Progress that shows nothing."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Figures:
    """The figures drawn. A notebook shows a single one."""

    drawings: dict[str, Drawing]
    """By name; the `data` of each has every number drawn."""
    left_out: dict[str, str]
    """Figures without numbers in the store -> what is missing."""
    paths: tuple[Path, ...]
    """The pictures written, each with its numbers in the .csv next to it."""
    captions: dict[str, str] = field(default_factory=dict)
    """Of style 'paper', whose pictures have none: figure -> its caption."""

    def __repr__(self) -> str:
        return f"Figures({', '.join(self.drawings)})"

    def _repr_png_(self) -> bytes | None:
        return render(next(iter(self.drawings.values())).page, ".png") if len(self.drawings) == 1 else None


def draw(
    store: Store,
    figure: str | None = None,
    out: Path | None = None,
    run: str | None = None,
    format: str = "png",
    style: str = "screen",
    progress: Progress = silent,
) -> Figures:
    """Draw a figure of FIGURES, "all" that the store has numbers for, or (None) the default one.

    `out` is a .png, .svg or .pdf file, or a folder for pictures in `format` named by figure (then None means all), each
    with its numbers in a .csv next to it. `run` chooses the run of a figure of one run (default: the lowest val_loss at
    the deepest depth). `style` 'paper' writes a .pdf and a .png of one column each, and returns the captions. Raises
    ValueError for an unknown figure, suffix, style or run, NothingToDraw if numbers are missing.
    """
    if style not in STYLES:
        raise ValueError(f"--style {style!r} is not one of {', '.join(STYLES)}")
    if f".{format}" not in FORMATS:
        raise ValueError(f"--format {format!r} is not one of {', '.join(suffix[1:] for suffix in FORMATS)}")
    into_folder = out is not None and (out.is_dir() or not out.suffix)
    if out is not None and not into_folder:
        check_path(out)
        if figure == "all":
            raise ValueError(f"--figure all draws several pictures, and -o {str(out)!r} is one; name a folder")
    figure = figure or ("all" if into_folder else default_figure(store))
    drawings, left_out = _drawings(store, figure, run, lambda name, done: progress(name, done * NUMBERS_SHARE))
    paths: list[Path] = []
    if out is not None:
        if into_folder:
            out.mkdir(parents=True, exist_ok=True)
        paths = [out / f"{name}.{format}" if into_folder else out for name in drawings]
    captions: dict[str, str] = {}
    if style == "paper":
        wide = {name: "a page of many panels, too many for a column" for name in drawings if name in NOT_FOR_PAPER}
        if len(wide) == len(drawings):
            raise NothingToDraw(f"--style paper is a single column, and {figure} is {next(iter(wide.values()))}")
        drawings, left_out = {name: drawings[name] for name in drawings if name not in wide}, left_out | wide
        paths = [path for path in paths if path.stem not in wide or not into_folder]
    for done, (path, (name, drawing)) in enumerate(zip(paths, drawings.items(), strict=False)):
        progress(name, NUMBERS_SHARE + (1 - NUMBERS_SHARE) * done / len(paths))
        if style == "paper":
            captions[name] = write_for_paper(drawing, path)
        else:
            write(drawing, path)
    if style == "paper":
        paths = [path.with_suffix(suffix) for path in paths for suffix in (".pdf", ".png")]
    return Figures(drawings=drawings, left_out=left_out, paths=tuple(paths), captions=captions)


def check_figure(name: str) -> None:
    """Raises ValueError for a name that is neither in FIGURES nor 'all'."""
    if name not in FIGURES and name != "all":
        hint = did_you_mean(name, FIGURES, f"choose one of: {', '.join(FIGURES)}, or all, into a folder")
        raise ValueError(f"figure {name!r} is unknown; {hint}")


def _drawings(
    store: Store, figure: str, run: str | None, progress: Progress
) -> tuple[dict[str, Drawing], dict[str, str]]:
    """The drawings of a figure, or of all; and why each of the others cannot be drawn."""
    if figure != "all":
        check_figure(figure)
        if run is not None and not FIGURES[figure].of_one_run:
            of_one = " or ".join(name for name, kind in FIGURES.items() if kind.of_one_run)
            raise ValueError(f"run={run!r} is for the figures {of_one}; the figure {figure!r} shows all runs")
        return {figure: FIGURES[figure].drawing(store, run)}, {}
    drawings, left_out = drawable(store, FIGURES, run, progress)
    if not drawings:
        raise NothingToDraw(f"there is nothing to draw: {'; '.join(dict.fromkeys(left_out.values()))}")
    return drawings, left_out


def drawable(
    store: Store, names: Collection[str], run: str | None = None, progress: Progress = silent
) -> tuple[dict[str, Drawing], dict[str, str]]:
    """The figures that the store has numbers for, and why each of the others cannot be drawn; `progress` gets the name
    of the next and the share that is done."""
    drawings: dict[str, Drawing] = {}
    left_out: dict[str, str] = {}
    for done, name in enumerate(names):
        progress(name, done / len(names))
        try:
            drawings[name] = FIGURES[name].drawing(store, run)
        except NothingToDraw as reason:
            left_out[name] = str(reason)
    return drawings, left_out


def default_figure(store: Store) -> str:
    """The front of a search with several objectives, the slices of another, the overview of other trained runs, or the
    profile of a measured model."""
    if search := search_of(store.roots):
        return "pareto" if len(search.objectives) > 1 else "slices"
    runs = store.sql("select count(*), count(train_tokens) from runs").rows[0]
    if not runs[0]:
        raise NothingToDraw(no_runs(store))
    return "overview" if runs[1] else "layer_profile"


FIGURES: dict[str, FigureKind] = {
    "overview": FigureKind(
        "overview:load_overview", "chain and by_layer on one page", given=(True,), compares_losses=True
    ),
    "chain": FigureKind(
        "overview:load_overview",
        "correlations of sparsity, residual variance, effectiveness and loss, one point per run",
        given=(False,),
        compares_losses=True,
    ),
    "by_layer": FigureKind(
        "by_setting:by_layer",
        "variance, effect on later layers and usefulness by layer at the baseline, one line per depth",
    ),
    "depth": FigureKind(
        "depth:depth",
        "does depth pay: loss, needed layers, solved difficulty and variance against n_layers, one line per setting",
        of_grid=True,
        compares_losses=True,
    ),
    "isoflop": FigureKind(
        "isoflop:isoflop",
        "is depth worth its cost: loss against training FLOPs, one line per depth, and from which budget on",
        of_grid=True,
        compares_losses=True,
    ),
    "difficulty": FigureKind(
        "difficulty:difficulty",
        "how far is a task solved: accuracy against difficulty by depth, one line per setting",
        of_grid=True,
    ),
    "curves": FigureKind(
        "by_setting:curves", "training loss during training, one line per setting", of_grid=True, compares_losses=True
    ),
    "variance": FigureKind(
        "by_setting:layer_lines",
        "residual variance by layer and during training, one line per setting",
        given=(("residual_variance",),),
        of_grid=True,
    ),
    "scores": FigureKind(
        "by_setting:layer_lines", "scores by layer, one line per setting", given=(SCORES,), of_grid=True
    ),
    "gradients": FigureKind(
        "by_setting:layer_lines",
        "gradients of weights and stream by layer, one line per setting",
        given=(("gradient_norm", "stream_gradient"),),
        of_grid=True,
    ),
    "effects": FigureKind(
        "forest:effects", "effect of each setting at each depth, with its interval", of_grid=True, compares_losses=True
    ),
    "pareto": FigureKind(
        "pareto:pareto", "validation loss, usefulness and cost of every configuration", compares_losses=True
    ),
    "matrices": FigureKind(
        "matrices:matrices",
        "causal and permutation effects by pair of layers, of the baseline and of each setting",
        of_grid=True,
    ),
    "learning_rate": FigureKind(
        "learning_rate:learning_rate",
        "loss against learning rate, one line per setting",
        of_grid=True,
        compares_losses=True,
    ),
    "importance": FigureKind("study:importance", "a search: how much each axis matters to each objective"),
    "history": FigureKind("study:history", "a search: every proposal's first objective, and the best so far"),
    "slices": FigureKind("study:slices", "a search: the first objective against each axis"),
    "layer_profile": FigureKind(
        "layer_profile:one_run", "every quantity by layer and by pair of layers of one run (--run)", of_one_run=True
    ),
    "trajectories": FigureKind(
        "trajectories:trajectories",
        "angles between the layers of one run (--run), and the mean angle against depth",
        of_one_run=True,
    ),
}
