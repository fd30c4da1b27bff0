"""Figures are written atomically in the requested format, and are reproducible."""

import importlib
import inspect
import re
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth import plots
from sparsedepth.plots.draw import FIGURES, _with_notes, default_figure, draw
from sparsedepth.plots.models import removal
from sparsedepth.plots.page import Drawing, NothingToDraw, caption, csv_bytes, mark_id, marks_of, panels, render
from sparsedepth.plots.runs import Selection, finished_of
from sparsedepth.store.connection import open_store

START = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


def fill(results, outcome="ok"):
    for i, (n_layers, scale) in enumerate([(2, "none"), (2, "lns"), (4, "none"), (4, "lns")]):
        layers = [
            {"step": 5, "layer": layer, "metric": metric, "value": 0.1 + layer + i, "n": 10}
            for layer in range(1, n_layers + 1)
            for metric in ("residual_variance", "causal_effect", "affine_loss_increase")
        ]
        names = ("weight_sparsity", "attention_sparsity_rel", "residual_variance_last", "usefulness_loss_increase")
        names += ("usefulness", "causal_score")
        summary = {name: 0.1 * (j + 1) + 0.01 * i for j, name in enumerate(names)}
        config = config_of(n_layers=n_layers, depth_scale=scale)
        summary |= {"tokens_trained": 1000, "val_loss": 3.0 - 0.1 * i, "outcome": outcome}
        make_run(results, config, summary, layers=layers)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    fill(results)
    with open_store(results) as opened:
        yield opened


@pytest.mark.parametrize("suffix", START)
def test_every_format_is_written(store, tmp_path, suffix):
    path = tmp_path / f"figure{suffix}"
    figure = None if suffix == ".png" else "by_layer"
    assert [*draw(store, figure, path).drawings] == [figure or "chain"]
    assert path.read_bytes().startswith(START[suffix])
    assert path.stat().st_size > 5000
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["figure.csv", path.name]  # nothing half-written


def test_numbers_replace_no_file_but_those_of_an_earlier_picture(store, tmp_path):
    """A table of the user's has the name that the numbers would get."""
    (tmp_path / "mine.csv").write_text("mine\n")
    with pytest.raises(ValueError, match=r"mine\.csv would be replaced by the numbers of mine\.svg"):
        draw(store, "effects", tmp_path / "mine.svg")
    (tmp_path / "effects.csv").write_text("mine\n")  # as `effects -o effects.csv` writes it
    with pytest.raises(ValueError, match=r"effects\.csv would be replaced"):
        draw(store, "effects", tmp_path)
    assert not [*tmp_path.glob("*.svg")] and {each.read_text() for each in tmp_path.glob("*.csv")} == {"mine\n"}
    for name in ("again.svg", "again.png", "again.svg"):
        draw(store, "effects", tmp_path / name)
    assert (tmp_path / "again.csv").read_text().startswith("outcome,setting")


def test_the_same_numbers_give_the_same_file(store, tmp_path):
    fill(tmp_path)
    first = render(FIGURES["chain"].drawing(store).page, ".svg").pictures
    with open_store(tmp_path) as other:
        assert first == render(FIGURES["chain"].drawing(other).page, ".svg").pictures


def test_numbers_of_a_csv_are_exact_and_formulas_escaped():
    n = pd.array([1, None, 3], dtype="Int64")
    data = pd.DataFrame({"name": ["=cmd()", "plain", None], "value": [0.1 + 0.2, np.nan, -1e-300], "n": n})
    lines = csv_bytes(data).decode().splitlines()
    assert lines == ["name,value,n", "'=cmd(),0.30000000000000004,1", "plain,,", ",-1e-300,3"]


def test_a_figure_for_a_paper_is_a_column_wide_and_its_caption_apart(store, tmp_path):
    figures = draw(store, "depth", tmp_path / "a.png", style="paper")
    assert [path.name for path in figures.paths] == ["a.pdf", "a.png"] and (tmp_path / "a.csv").exists()
    assert (
        figures.captions["depth"].startswith("One run each.")
        and "2 settings, at tuned values" in figures.captions["depth"]
    )
    width, _ = plt.imread(tmp_path / "a.png").shape[1::-1]
    assert width == pytest.approx(3.35 * 600, abs=2)
    paths = draw(store, "layer_profile", tmp_path / "b.png", style="paper").paths
    sizes = [plt.imread(path).shape for path in paths if path.suffix == ".png"]
    assert sizes and all(height <= 9.1 * 600 and abs(width - 3.35 * 600) <= 2 for height, width, _ in sizes)
    with pytest.raises(ValueError, match="no SVG; leave --format out"):
        draw(store, "depth", tmp_path / "a.svg", style="paper")
    with pytest.raises(ValueError, match="--style 'poster' is not one of screen, paper"):
        draw(store, "depth", tmp_path / "a.png", style="poster")


def test_all_figures_with_their_numbers_and_reasons_for_missing_ones(store, tmp_path):
    figures = draw(store, "all", tmp_path / "a", format="svg")
    written, left_out = [*figures.paths], figures.left_out
    assert {path.stem for path in written} | set(left_out) == set(FIGURES)
    needed = {"curves", "gradients", "matrices", "learning_rate", "isoflop", "history", "models", "ladder", "removal"}
    of_a_search = {"slices", "parallel"}
    differing = set(left_out) ^ (needed | of_a_search)
    assert not differing, f"{differing}: `fill` above must write what they draw, or they join `needed` as not drawn"
    assert all(reason and "\n" not in reason for reason in left_out.values())
    for path in written:
        assert len(pd.read_csv(path.with_suffix(".csv"))) > 0


def test_every_function_that_makes_a_drawing_is_a_figure():
    places = {kind.place for kind in FIGURES.values()}
    for path in sorted(Path(plots.__file__).parent.glob("*.py")):
        module = importlib.import_module(f"sparsedepth.plots.{path.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_public = function.__module__ == module.__name__ and not name.startswith("_")
            takes_store = next(iter(function.__annotations__), "") == "store"
            if is_public and takes_store and function.__annotations__["return"] is Drawing:
                assert f"{path.stem}:{name}" in places, f"add {path.stem}.{name} to FIGURES of plots/draw.py"


def test_the_default_figure_depends_on_the_store():
    stores = [SimpleNamespace(roots=(), sql=lambda text, n=n: SimpleNamespace(rows=((4, n),))) for n in (2, 0)]
    assert [default_figure(store) for store in stores] == ["chain", "layer_profile"]
    with pytest.raises(NothingToDraw, match="no complete run"):
        default_figure(SimpleNamespace(roots=(), sql=lambda text: SimpleNamespace(rows=((0, 0),))))


def test_a_profile_is_of_a_depth_that_was_asked_for(tmp_path):
    fill(tmp_path)
    with open_store(tmp_path) as store:
        drawn = draw(store, "layer_profile", only=Selection(depths=(2,))).drawings["layer_profile"]
    assert drawn.data["layer"].max() == 2


def test_only_points_that_are_seen_answer_to_the_pointer():
    page, (upper, lower) = panels(2, 1, 3, 2)
    for axis in (upper, lower):
        axis.set(xlim=(0, 4), ylim=(0, 4))
        y = [1.0, 4.0, np.nan, 6.0]  # at the edge; of a diverged run; above the axis, where the other panel stands
        axis.marks = pd.DataFrame({"x": [1.0, 2.0, 3.0, 3.0], "y": y, "group": "a", "text": "b"})
    marks = marks_of(page)
    assert len(marks.points) == 4 and marks.n_left_out == 2


@pytest.mark.parametrize(("group", "kind"), [("corpus=task:parity", ""), ("4 layers", "tokenizer=bpe:8192")])
def test_groups_and_kinds_are_told_apart_where_their_names_have_colons(group, kind):
    script = (files("sparsedepth.report") / "figures.js").read_text()
    between = {*re.findall(r'mark\.split\("(.+?)"\)', script)}
    assert [
        mark_id(group, kind).removeprefix("mark:").split(*(one.encode().decode("unicode_escape") for one in between))
    ] == [[group, kind]]


def test_a_run_for_a_figure_of_all_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match="run='abc' is for the figure layer_profile; the figure 'chain' shows all"):
        draw(store, "chain", tmp_path / "a.png", run="abc")
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_finished_runs(tmp_path):
    fill(tmp_path, outcome="diverged")
    with open_store(tmp_path) as store, pytest.raises(NothingToDraw, match="none of the 4 runs finished"):
        draw(store, "chain", tmp_path / "a.png")


def test_a_store_of_measured_models_has_layer_profiles_only(tmp_path):
    fill(tmp_path)
    with open_store(tmp_path) as store:
        runs = store.frame("select * from runs").assign(train_tokens=np.nan, model="a model")
    with pytest.raises(ValueError, match=r"no finished run has a training configuration.* --figure layer_profile"):
        finished_of(runs)


def test_figures_that_compare_losses_say_that_the_data_differ(tmp_path):
    for corpus, n_layers in (("a", 2), ("a", 4), ("b", 2), ("b", 4)):
        config = config_of(n_layers=n_layers, corpus=corpus)
        make_run(tmp_path, config, {"val_loss": 3.0 - 0.1 * n_layers, "train_flops": 1e9 * n_layers})
    with open_store(tmp_path) as opened:
        for name in ("depth", "pareto"):
            text = " ".join(draw(opened, name).drawings[name].page().get_supxlabel().split())
            assert text.endswith("Configurations differ in corpus: losses on different data are not comparable.")


def test_notes_on_the_data_keep_the_paragraphs_of_a_caption():
    def page():
        figure = Figure(figsize=(8, 4))
        caption(figure, "One.", "Two.")
        return figure

    assert _with_notes(page, " From 2 folders.").get_supxlabel().splitlines() == ["One.", "Two.", "From 2 folders."]


def test_what_tasks_lose_is_drawn_of_models_alone(monkeypatch):
    """None is of a run: the column of their ids has no value, so no type."""
    rows = {"panel": "arc, acc_lost", "run_id": None, "model": "qwen", "x": [1, 2], "mean": [0.3, 0.1]}
    stands_for = SimpleNamespace(frame=lambda text: pd.DataFrame(rows).assign(lo=0.0, hi=0.4))
    runs = pd.DataFrame({"run_id": ["a"], "setting": ["baseline"]})
    monkeypatch.setattr("sparsedepth.plots.models.all_runs", lambda store: runs)
    assert removal(stands_for).data["setting"].tolist() == ["qwen", "qwen"]
