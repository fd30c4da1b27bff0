"""The last lines of a sweep: queries whose columns it has."""

from pathlib import Path

import pytest

from sparsedepth.cli import query
from sparsedepth.cli.progress import print_ranking
from sparsedepth.config.load import build
from sparsedepth.config.sweep import SweepDefinition


@pytest.mark.parametrize(
    ("measures", "objectives", "columns"),
    [
        (None, ["val_loss"], "val_loss, usefulness"),
        (None, ["usefulness"], "usefulness"),
        (["loss"], ["val_loss", "train_flops"], "val_loss, train_flops"),
        (["loss", "permutation"], ["val_loss"], "val_loss, permutation_score"),
    ],
)
def test_the_suggested_query_names_objectives_and_what_is_measured(measures, objectives, columns, monkeypatch, capsys):
    monkeypatch.setattr(query, "print_best", lambda *_, **__: None)
    content = {"name": "s", "question": "q", "hypothesis": "h", "space": {"n_layers": [2, 4]}, "seeds": [0]}
    base = {"measures": measures} if measures else {}
    definition = build(SweepDefinition, {**content, "objectives": objectives, "base": base}, "s")
    print_ranking(definition, Path("results"))
    assert f'query results "select run_id, n_layers, {columns} from runs"' in capsys.readouterr().out
