"""`plot` and `report` from the command line: files or folders, names, refusals in one line."""

import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth.plots.draw import FIGURES


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for lr in (1e-3, 3e-3):
        make_run(folder, config_of(n_layers=2, lr=lr), {"val_loss": 3 + lr})
    return folder


def test_the_list_names_every_figure(command):
    out, _ = command("plot", "--list")
    assert [line.split()[0] for line in out.splitlines()] == list(FIGURES)


def test_one_figure_into_a_file_or_a_folder(command, results, tmp_path):
    of_file = ("-o", tmp_path / "a.svg", "--format", "svg")  # said twice, alike
    out, _ = command("plot", results, "--figure", "learning_rate", *of_file)
    assert "a.csv" in out
    command("plot", results, "--figure", "learning_rate", "--format", "pdf", "-o", tmp_path / "new")
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert found == {"a.svg", "a.csv", "new/learning_rate.pdf", "new/learning_rate.csv"}


def test_figures_without_data_are_named_within_the_terminal(command, results, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    few = {name: FIGURES[name] for name in ("learning_rate", "isoflop")}
    monkeypatch.setattr("sparsedepth.plots.draw.FIGURES", few)
    out, _ = command("plot", results, "-o", tmp_path / "new")
    skipped = [line for line in out.splitlines() if not line.startswith(str(tmp_path))]
    assert any(line.startswith("skipped isoflop: ") for line in skipped) and max(map(len, skipped)) <= 60
    few |= {name: FIGURES[name] for name in ("slices", "parallel")}
    monkeypatch.setattr("sparsedepth.plots.draw.FIGURES", few)
    told = " ".join(command("plot", results, "-o", tmp_path / "new")[0].splitlines())
    assert "skipped isoflop, slices, parallel: the folder has no rows for them; --figure NAME says" in " ".join(
        told.split()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plot", "--figure", "learning_rat"), "did you mean 'learning_rate'?"),  # before the missing output
        (("plot",), "give a results folder and an output"),
        (("plot", "-o", "{tmp}/a.gif"), "must end in one of"),
        (("plot", "-o", "{tmp}/a.png", "--figure", "all"), "name a folder"),
        (("plot", "-o", "{tmp}/absent/a.png"), "absent' does not exist; create it"),
        (("plot", "-o", "{tmp}/a", "--format", "gif"), "not one of png, svg, pdf"),
        (("plot", "-o", "{tmp}/a.png", "--format", "svg"), "a.png' is for png, and --format is 'svg'; drop one"),
        (("plot", "-o", "{tmp}/a.png", "--figure", "learning_rate", "--columns", "2"), "add --style paper"),
        (("plot", "-o", "{tmp}/a.png", "--figure", "ladder", "--depths", "2"), "shows all depths and settings"),
        (("report", "-o", "{tmp}/report.txt"), "must end in .html"),
        (("report", "-o", "{tmp}/absent/report.html"), "absent' does not exist; create it"),
        (("report", "-o", "{tmp}/a.html", "--objective", "steps"), "no better direction"),
        (("report", "-o", "{tmp}/a.html", "--objective", "seed"), "no measured quantity 'seed'"),
    ],
)
def test_refusals_are_one_line(command, results, tmp_path, arguments, words):
    name, *filled = [one.format(tmp=tmp_path) for one in arguments]
    _, error = command(name, results, *filled, code=2)
    assert words in error and len(error.splitlines()) == 1
    assert not list(tmp_path.rglob("*.*"))
