"""The last lines of a sweep: queries whose columns it has."""

from pathlib import Path

import pytest

from sparsedepth.cli import progress, query
from sparsedepth.cli.progress import print_ranking
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
    monkeypatch.setattr(query, "print_best", lambda *_, **__: None)
    content = {"name": "s", "question": "q", "hypothesis": "h", "space": {"n_layers": [2, 4]}, "seeds": [0]}
    definition = build(SweepDefinition, {**content, "objectives": objectives}, "s")
    print_ranking(definition, Path("results"))
    assert f'query results "select run_id, n_layers, {columns} from runs"' in capsys.readouterr().out
