"""Which loss compares runs."""

import pandas as pd
import pytest
from support.made_up_runs import make_run

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.store.best import best
from sparsedepth.store.comparable_loss import loss_in, loss_of, with_loss
from sparsedepth.store.connection import open_store
from sparsedepth.store.saved_queries import ask


@pytest.mark.parametrize(
    ("lengths", "common", "outcomes", "expected"),
    [
        ((128, 128), (2.0, 3.0), ("ok", "ok"), "val_loss"),
        ((128, 512), (2.0, 3.0), ("ok", "ok"), "val_loss_common"),
        ((128, 512), (2.0, None), ("ok", "ok"), "val_loss"),
        ((128, 512), (2.0, None), ("ok", "diverged"), "val_loss"),
        ((128, 512, 256), (2.0, 3.0, None), ("ok", "ok", "diverged"), "val_loss_common"),
    ],
)
def test_runs_of_several_contexts_are_compared_at_one(lengths, common, outcomes, expected, tmp_path):
    for i, (seq_len, loss, outcome) in enumerate(zip(lengths, common, outcomes, strict=True)):
        config = build(RunConfig, {"n_layers": 2, "seq_len": seq_len, "eval_seq_len": 128, "seed": i}, "test")
        make_run(tmp_path, config, {"val_loss": 2.0 - i, "val_loss_common": loss, "outcome": outcome})
    with open_store(tmp_path) as store:
        runs = store.frame("select * from runs")
        assert loss_of(runs) == loss_in(store) == expected
        ranking = best(store)
        assert ranking.by == expected
        (row,) = ask(store, "best_per_depth").rows
        assert row[ask(store, "best_per_depth").columns.index(expected)] == ranking.table.rows[0][-4]


def test_a_loss_that_each_run_has_at_its_own_context_is_no_common_one(tmp_path):
    """Without eval_seq_len, val_loss_common is val_loss: the longer context would be recommended for being longer."""
    for seq_len, loss in ((128, 3.0), (512, 2.0)):
        config = build(RunConfig, {"n_layers": 2, "seq_len": seq_len}, "test")
        make_run(tmp_path, config, {"val_loss": loss, "val_loss_common": loss})
    with open_store(tmp_path) as store:
        assert loss_of(store.frame("select * from runs")) == loss_in(store) == "val_loss"


def test_frames_without_the_columns_have_one_loss():
    assert loss_of(pd.DataFrame({"val_loss": [1.0]})) == "val_loss"
    assert with_loss("val_loss_common", ("usefulness", "val_loss")) == ("usefulness", "val_loss_common")
