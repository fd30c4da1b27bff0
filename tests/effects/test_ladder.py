"""The ladder through a designed sweep: rungs, leave-one-out and the whole, by hand."""

import pytest
from support.runs_frame import config_of, runs_frame

from sparsedepth.effects.ladder import ladder

T, W, G = {"seq_len": 512}, {"weight_decay": 0.3}, {"n_kv_heads": 1}
CELLS = [({}, 3.0), (T, 2.9), (T | W, 2.7), (T | W | G, 2.75), (W | G, 2.85), (T | G, 2.95)]


def designed(cells):
    wiggle = (0.0, 0.001, -0.001)
    return runs_frame(
        (config_of(seed=seed, **cell), {"val_loss_common": loss + wiggle[seed] * len(cell)})
        for cell, loss in cells
        for seed in range(3)
    )


def test_the_rungs_of_a_designed_ladder():
    found = ladder(designed(CELLS), "val_loss_common")
    assert [(one.setting, round(one.effect.mean or 0, 6), one.verdict) for one in found.rungs] == [
        ("seq_len=512", -0.1, "lower"),
        ("weight_decay=0.3", -0.2, "lower"),
        ("n_kv_heads=1", 0.05, "higher"),
    ]
    # the whole (2.75) against the whole without it: 2.85 without T, 2.95 without W, 2.7 without G
    assert [(one.setting, round(one.effect.mean or 0, 6)) for one in found.last_in] == [
        ("seq_len=512", -0.1),
        ("weight_decay=0.3", -0.2),
        ("n_kv_heads=1", 0.05),
    ]
    assert found.whole is not None
    assert found.whole.effect.mean == pytest.approx(-0.25)
    assert found.whole.effect.n == 3


def test_the_best_setting_of_a_rung_carries_the_next():
    stronger = {"weight_decay": 1.0}
    found = ladder(designed([({}, 3.0), (W, 2.8), (stronger, 2.9), (W | G, 2.7)]), "val_loss_common")
    assert [(one.setting, round(one.effect.mean or 0, 6)) for one in found.rungs] == [
        ("weight_decay=0.3", -0.2),
        ("weight_decay=1", -0.1),
        ("n_kv_heads=1", -0.1),
    ]


def test_no_ladder_and_no_direction():
    nothing = ladder(designed([({}, 3.0)]), "val_loss_common")
    assert (nothing.rungs, nothing.last_in, nothing.whole) == ((), (), None)
    with pytest.raises(ValueError, match="no measured quantity 'train_loss_typo'; did you mean 'train_loss'"):
        ladder(designed(CELLS), "train_loss_typo")
