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
    few = {name: FIGURES[name] for name in ("learning_rate", "difficulty", "trajectories")}
    monkeypatch.setattr("sparsedepth.plots.draw.FIGURES", few)
    out, _ = command("plot", results, "-o", tmp_path / "new")
    skipped = [line for line in out.splitlines() if not line.startswith(str(tmp_path))]
    assert any(line.startswith("skipped difficulty: ") for line in skipped) and max(map(len, skipped)) <= 60


def test_a_mistyped_figure_is_named_before_a_missing_output(command, results):
    _, err = command("plot", results, "--figure", "learning_rat", code=2)
    assert "did you mean 'learning_rate'?" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{results}",), "give a results folder and an output"),
        (("{results}", "-o", "{tmp}/a.gif"), "must end in one of"),
        (("{results}", "-o", "{tmp}/a.png", "--figure", "all"), "name a folder"),
        (("{results}", "-o", "{tmp}/a.png", "--figure", "pie"), "choose one of"),
        (("{results}", "-o", "{tmp}/absent/a.png"), "absent' does not exist; create it"),
        (("{results}", "-o", "{tmp}/a", "--format", "gif"), "not one of png, svg, pdf"),
        (("{results}", "-o", "{tmp}/a.png", "--format", "svg"), "a.png' is for png, and --format is 'svg'; drop one"),
    ],
)
def test_refusals_are_one_line(command, results, tmp_path, arguments, words):
    filled = [one.format(results=results, tmp=tmp_path) for one in arguments]
    _, error = command("plot", *filled, code=2)
    assert words in error and len(error.splitlines()) == 1
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-o", "{tmp}/report.txt"), "must end in .html"),
        (("-o", "{tmp}/absent/report.html"), "absent' does not exist; create it"),
        (("-o", "{tmp}/a.html", "--objective", "steps"), "no better direction"),
        (("-o", "{tmp}/a.html", "--objective", "seed"), "no measured quantity 'seed'"),
    ],
)
def test_refusals_of_a_report(command, results, tmp_path, arguments, words):
    assert words in command("report", results, *[one.format(tmp=tmp_path) for one in arguments], code=2)[1]
    assert not [*tmp_path.iterdir()]
