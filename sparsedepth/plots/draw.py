"""Figures of a store, by name: compute the numbers, build the page, write picture and numbers atomically."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from matplotlib.figure import Figure

from sparsedepth.once import once
from sparsedepth.plots.page import FORMATS, Drawing, NothingToDraw, caption, check_numbers, check_path, render, write
from sparsedepth.plots.runs import ALL, Selection, select, selected, settings_of
from sparsedepth.plots.style import COLUMNS
from sparsedepth.plugins import is_accepted
from sparsedepth.quantities.measured import PLUGINS
from sparsedepth.store.connection import Store
from sparsedepth.store.packs import no_run
from sparsedepth.store.search import search_of
from sparsedepth.store.setting import pending
from sparsedepth.words.captions import data_note, folders_note
from sparsedepth.words.differences import data_text, pending_text
from sparsedepth.words.plain_text import did_you_mean, error_text

STYLES = ("screen", "paper")
OF_GRID, OF_ONE_RUN, COMPARES_LOSSES, OF_ALL = "grid", "one run", "losses", "all"
Progress = Callable[[str, float], None]
"""Gets what is being made, and the share that is done."""


@dataclass(frozen=True)
class FigureKind:
    place: str | Callable[..., Drawing]
    """'module:function', imported when it is drawn: takes a store, and if OF_ONE_RUN a run's id or None."""
    meaning: str
    traits: frozenset[str]
    """OF_GRID: compares configurations of a grid, so not drawn of a search, whose proposals depend on earlier results.
    COMPARES_LOSSES: of all its runs, so that it warns of different data, as `best` does. OF_ALL: shows no part of the
    depths and settings."""

    @property
    def of_one_run(self) -> bool:
        return OF_ONE_RUN in self.traits

    def drawing(self, store: Store, run: str | None = None) -> Drawing:
        """The figure's numbers. Raises NothingToDraw, and ValueError for an unknown run."""
        if OF_GRID in self.traits and search_of(store.roots):
            raise NothingToDraw("a search chose these runs by earlier results; draw --figure slices")
        load = self.place
        if any(selected.get(store, ALL)[:2]) and (OF_ALL in self.traits or callable(load)):
            raise NothingToDraw("it shows all depths and settings; leave out --depths and --settings")
        if isinstance(load, str):
            module, _, name = load.partition(":")
            load = getattr(import_module(f"sparsedepth.plots.{module}"), name)
            drawing: Drawing = load(store, *([run] if self.of_one_run else []))
        else:
            drawing = _of_plugin(load, store)
        if names := selected.get(store, ALL).panels:
            if drawing.of_panels is None:
                raise NothingToDraw("its panels cannot be chosen by name")
            drawing = drawing.of_panels(names)
        of_data, of_folders = _notes(store)
        notes = of_data * (COMPARES_LOSSES in self.traits) + of_folders
        return replace(drawing, page=partial(_with_notes, drawing.page, notes)) if notes else drawing


def _of_plugin(load: Callable[[Store], Drawing], store: Store) -> Drawing:
    """Raises NothingToDraw for whatever the plugin raises."""
    try:
        drawing = load(store)
        drawing.page()  # fails here, where the other figures are drawn nevertheless
        return replace(drawing)
    except Exception as error:
        raise NothingToDraw(f"its plugin failed: {error_text(error)}") from None


def _with_notes(page: Callable[[], Figure], notes: str) -> Figure:
    figure = page()
    caption(figure, *figure.get_supxlabel().splitlines(), notes.strip())
    return figure


@once
def _notes(store: Store) -> tuple[str, str]:
    """How the data of a store's runs differ, and its results folders, of several."""
    rows = store.sql("select distinct folder from runs where folder is not null").rows
    folders = sorted({str(Path(folder).parent.parent) for (folder,) in rows})
    settings = settings_of(store)
    return data_note(data_text(settings) if settings else ""), folders_note(folders)


def silent(name: str, done: float) -> None:
    """The Progress that shows nothing."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Figures:
    """The figures drawn. A notebook shows a single one."""

    drawings: dict[str, Drawing] = field(default_factory=dict)
    """By name; the `data` of each has every number drawn."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Figures without numbers in the store -> what is missing."""
    paths: list[Path] = field(default_factory=list)
    """The pictures written, each with its numbers in the .csv next to it."""
    captions: dict[str, str] = field(default_factory=dict)
    """Of style 'paper', whose pictures have none: figure -> its caption."""

    def __repr__(self) -> str:
        return f"Figures({', '.join(self.drawings)})"

    def _repr_png_(self) -> bytes | None:
        (*others, drawing) = self.drawings.values()
        return None if others else render(drawing.page, ".png").pictures[0]


def draw(
    store: Store,
    figure: str | None = None,
    out: Path | None = None,
    run: str | None = None,
    format: str = "png",
    style: str = "screen",
    progress: Progress = silent,
    columns: int = 1,
    only: Selection = ALL,
) -> Figures:
    """Draw a figure of FIGURES, "all" that the store has numbers for, or (None) the default one.

    `out` is a .png, .svg or .pdf file, or a folder for pictures in `format` named by figure (then None means all), each
    with its numbers in a .csv next to it. `run` chooses the run of a figure of one run (default: the lowest val_loss at
    the deepest depth). `style` 'paper' writes a .pdf and a .png of so many columns each, of several pages where one has
    no room, and returns the captions. `only`: these depths, settings and panels. Raises ValueError for what is unknown
    of these, NothingToDraw if numbers are missing."""
    into_folder = out is not None and (out.is_dir() or not out.suffix)
    is_paper = style == "paper"
    _check(figure, None if into_folder else out, format, style)
    if columns not in COLUMNS:
        raise ValueError(f"--columns {columns} is not one of {', '.join(map(str, COLUMNS))}")
    if columns > 1 and not is_paper:
        raise ValueError(f"--columns {columns} is of a paper; add --style paper, or leave it out")
    select(store, only)
    figure = figure or ("all" if into_folder else default_figure(store))
    names = [*FIGURES] if figure == "all" else [figure]
    if run is not None and not any(FIGURES[name].of_one_run for name in names):
        of_one = " or ".join(name for name, kind in FIGURES.items() if kind.of_one_run)
        raise ValueError(f"run={run!r} is for the figure {of_one}; the figure {figure!r} shows all runs")
    if out is not None and into_folder:
        for name in names:
            check_numbers(out / f"{name}.{format}")
    figures = Figures()
    for name, found in drawable(store, names, run, progress):
        if isinstance(found, NothingToDraw):
            figures.left_out[name] = str(found)
            continue
        figures.drawings[name] = found
        if out is not None:
            if into_folder:
                out.mkdir(parents=True, exist_ok=True)
            written, notes = write(found, out / f"{name}.{format}" if into_folder else out, columns * is_paper)
            figures.paths.extend(written)
            figures.captions.update({name: notes} if is_paper else {})
    if not figures.drawings:
        several = f"there is nothing to draw: {'; '.join(dict.fromkeys(figures.left_out.values()))}"
        raise NothingToDraw(several if figure == "all" else figures.left_out[figure])
    return figures


def _check(figure: str | None, file: Path | None, format: str, style: str) -> None:
    """Raises ValueError for what no store is needed to refuse; `file`: the one picture to write."""
    if style not in STYLES:
        raise ValueError(f"--style {style!r} is not one of {', '.join(STYLES)}")
    if f".{format}" not in FORMATS:
        raise ValueError(f"--format {format!r} is not one of {', '.join(suffix[1:] for suffix in FORMATS)}")
    if style == "paper" and (format != "png" or (file and file.suffix == ".svg")):
        raise ValueError("--style paper writes a PDF and a PNG, no SVG; leave --format out, or name a .pdf with -o")
    if file is not None:
        check_path(file)
        if figure == "all":
            raise ValueError(f"--figure all draws several pictures, and -o {str(file)!r} is one; name a folder")
    check_figure(figure or "all")


def check_figure(name: str) -> None:
    """Raises ValueError for a name that is neither in FIGURES nor 'all'."""
    if name not in FIGURES and name != "all":
        hint = did_you_mean(name, FIGURES, f"choose one of: {', '.join(FIGURES)}, or all, into a folder")
        raise ValueError(f"figure {name!r} is unknown; {hint}")


def drawable(
    store: Store,
    names: Iterable[str],
    run: str | None = None,
    progress: Progress = silent,
) -> Iterator[tuple[str, Drawing | NothingToDraw]]:
    """Each figure, or why it cannot be drawn of this store; `progress` gets the name of the next and the share that is
    done."""
    names = [*names]
    for done, name in enumerate(names):
        progress(name, done / len(names))
        try:
            yield name, FIGURES[name].drawing(store, run)
        except NothingToDraw as reason:
            told = pending_text(pending(store))
            yield name, NothingToDraw(f"{reason}; {told}") if told else reason


def default_figure(store: Store) -> str:
    """The front of a search with several objectives, the slices of another, the chain of several trained runs, or the
    profile of one, or of a measured model."""
    if search := search_of(store.roots):
        return "pareto" if len(search.objectives) > 1 else "slices"
    runs = store.sql("select count(*), count(train_tokens) from runs").rows[0]
    if not runs[0]:
        raise NothingToDraw(str(no_run(store.roots)))
    return "chain" if runs[1] > 1 else "layer_profile"


FIGURES = {
    name: FigureKind(f"{module}:{name}", meaning, frozenset(traits))
    for name, module, meaning, *traits in (
        ("effects", "forest", "effect of each setting at each depth, with its interval", OF_GRID, COMPARES_LOSSES),
        ("depth", "depth", "does depth pay: loss, needed layers, variance against n_layers", OF_GRID, COMPARES_LOSSES),
        ("isoflop", "depth", "is depth worth its cost: loss against training FLOPs", OF_GRID, COMPARES_LOSSES),
        ("ladder", "ladder", "loss and worth at each budget of one run each", OF_GRID, COMPARES_LOSSES, OF_ALL),
        ("by_layer", "by_setting", "variance and effects by layer at the baseline, one line per depth"),
        ("variance", "by_setting", "residual variance by layer and during training, one line per setting", OF_GRID),
        ("models", "models", "the blocks that measured models need, against those that they have", OF_ALL),
        ("removal", "models", "what tasks lose without each layer (evaluate --without all), a line per model", OF_ALL),
        ("history", "by_setting", "scores of watched trainings along their steps, one line per setting"),
        ("curves", "by_setting", "training loss during training, one line per setting", OF_GRID, COMPARES_LOSSES),
        ("scores", "by_setting", "scores by layer, one line per setting", OF_GRID),
        ("gradients", "by_setting", "gradients of weights and stream by layer, one line per setting", OF_GRID),
        ("matrices", "matrices", "effects, angles, Jacobians by pair of layers, causal traces, by setting", OF_GRID),
        ("learning_rate", "by_setting", "loss against learning rate, by setting", OF_GRID, COMPARES_LOSSES),
        ("slices", "points", "a search: the first objective in order of start, and against each axis"),
        ("parallel", "points", "a search: every proposal as a line over its axes and objectives"),
        ("pareto", "points", "validation loss, usefulness and cost of every configuration", COMPARES_LOSSES),
        ("chain", "points", "correlations from sparsity over variance to loss", COMPARES_LOSSES),
        ("layer_profile", "layer_profile", "every quantity by layer of one run (--run)", OF_ONE_RUN),
    )
}
for _plugin in PLUGINS:  # {name: (function of a store that returns a Drawing, its meaning)}
    for _name, (_load, _meaning) in _plugin.get("FIGURES", {}).items():
        if is_accepted(_plugin, "figure", [_name], FIGURES):
            FIGURES[_name] = FigureKind(_load, _meaning, frozenset())
