"""The last lines of a sweep: queries whose columns it has."""

import time
from pathlib import Path

import pytest

from sparsedepth.cli import progress
from sparsedepth.cli.progress import print_ranking
from sparsedepth.cli.run_progress import bar
from sparsedepth.config.load import build
from sparsedepth.config.sweep import SweepDefinition


@pytest.mark.parametrize(
    ("measured", "objectives", "columns"),
    [
        ([{"usefulness"}, {"usefulness"}], ["val_loss"], "val_loss, usefulness"),
        ([{"usefulness"}, {"usefulness"}], ["usefulness"], "usefulness"),
        ([set(), set()], ["val_loss", "train_flops"], "val_loss, train_flops"),
        ([{"permutation_score"}, {"permutation_score", "usefulness"}], ["val_loss"], "val_loss, permutation_score"),
    ],
)
def test_the_suggested_query_names_objectives_and_what_is_measured(measured, objectives, columns, monkeypatch, capsys):
    """`measured`: the scores of each run, whichever variant asked for them."""

    def read_columns(folder, names, damaged):
        return {str(i): {name: 0.5 if name in scores else None for name in names} for i, scores in enumerate(measured)}

    monkeypatch.setattr(progress, "read_columns", read_columns)
    monkeypatch.setattr(progress, "print_best", lambda *_, **__: None)
    content = {"name": "s", "question": "q", "hypothesis": "h", "space": {"n_layers": [2, 4]}, "seeds": [0]}
    definition = build(SweepDefinition, {**content, "objectives": objectives}, "s")
    print_ranking(definition, Path("results"))
    assert f'query results "select run_id, n_layers, {columns} from runs"' in capsys.readouterr().out


def test_without_a_terminal_a_run_says_at_the_start_and_every_half_minute_how_long_is_left(monkeypatch, capsys):
    """A resumed run, at 50% from its first step: 1% in 10 s, so the 46% that are left at 54% take 7m40s."""
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    with bar("run") as report:
        report("reading the text", 0.0)
        for step in range(5):
            report("training", 0.5 + 0.01 * step, 1.25)
            seconds += 10.0
            if step == 2:
                assert capsys.readouterr().err == "run: reading the text, 0% done\n"
        seconds += 1.0
        report("training", 0.55, 1.25)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "run: training, loss 1.250, 54% done, about 7m40s left" and not others
