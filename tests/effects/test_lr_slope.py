"""Effects against the learning rate: by hand, a planted shift of the best one, a planted effect without any."""

import math

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import grid

from sparsedepth.effects.lr_slope import lr_lines, lr_slopes, lr_table

RATES = (0.001, 0.002, 0.004, 0.008)


def bowl(config, best: float, noise: float = 0.0) -> dict[str, float]:
    """A loss of 1 at the best lr, .1 more for each doubling away from it, squared."""
    return {"val_loss": 1.0 + 0.1 * math.log2(config.lr / best) ** 2 + noise}


def shifted(by: float, seeds=range(3), depths=(12, 24), lowered: float = 0.0, noise: float = 0.02) -> pd.DataFrame:
    """LNS with `by` times the best lr of the baseline, and a loss lower by `lowered`; tuned."""
    draws = iter(np.random.default_rng(0).normal(0, noise, 1000)) if noise else iter([0.0] * 1000)
    axes = {"depth_scale": ["none", "lns"], "lr": RATES, "n_layers": depths, "seed": seeds}

    def outcome(config):
        is_lns = config.depth_scale == "lns"
        loss = bowl(config, 0.002 * (by if is_lns else 1), float(next(draws)))
        return {"val_loss": loss["val_loss"] - lowered * is_lns}

    return grid(axes, outcome).assign(tuned_fields="lr", tuning="tuning")


def chosen(runs: pd.DataFrame) -> pd.DataFrame:
    """The same with the lowest lr chosen: its runs are results, the others none."""
    return runs.assign(tuning=np.where(runs["lr"] == RATES[0], "best", "rejected"))


def test_a_slope_by_hand():
    """d = .1 (x - 2)^2 - .1 (x - 1)^2 = .3 - .2 x with x = log2(lr / .001): -.2 for each doubling."""
    (slope,) = lr_slopes(chosen(shifted(2, noise=0)), "val_loss")
    assert (slope.setting, slope.baseline, slope.depths, slope.n_contexts) == (
        "depth_scale=lns", "depth_scale=none", (12, 24), 2,
    )  # fmt: skip
    assert slope.by_lr == pytest.approx(dict(zip(RATES, (0.3, 0.1, -0.1, -0.3), strict=True)))
    assert slope.by_seed == pytest.approx((-0.2, -0.2, -0.2))
    assert slope.effect.n == 3 * 2 * 4


def test_a_shift_of_the_best_lr_is_found_and_a_lower_loss_without_one_has_none():
    (shift,) = lr_slopes(chosen(shifted(2)), "val_loss")
    assert shift.verdict == "lower" and shift.effect.covers(-0.2)
    (level,) = lr_slopes(chosen(shifted(1, lowered=0.3)), "val_loss")
    assert level.verdict == "not distinguishable" and level.effect.covers(0.0)
    assert all(mean == pytest.approx(-0.3, abs=0.05) for mean in level.by_lr.values())


def test_seeds_of_the_chosen_lr_alone_weigh_nothing():
    runs = chosen(shifted(2))
    more = chosen(shifted(2, seeds=range(10, 16)))
    both = pd.concat([runs, more[more["lr"] == 0.001]], ignore_index=True)
    (alone,), (beside,) = (lr_slopes(each, "val_loss") for each in (runs, both))
    assert beside.by_lr == alone.by_lr and beside.by_seed == alone.by_seed


def test_a_seed_without_one_of_the_lr_is_left_out():
    runs = chosen(shifted(2, range(4), noise=0))
    (slope,) = lr_slopes(runs[(runs["seed"] != 3) | (runs["lr"] != 0.004) | (runs["n_layers"] == 12)], "val_loss")
    assert len(slope.by_seed) == 3 and [*slope.by_lr] == [*RATES]


def test_an_lr_at_which_a_side_diverged_is_left_out_in_all_and_said():
    runs = chosen(shifted(2, noise=0))
    lost = (runs["lr"] == 0.008) & (runs["depth_scale"] == "none") & (runs["seed"] == 1) & (runs["n_layers"] == 12)
    runs.loc[lost, "outcome"] = "diverged"
    runs.loc[lost, "val_loss"] = None
    (slope,) = lr_slopes(runs, "val_loss")
    assert [*slope.by_lr] == [0.001, 0.002, 0.004] and slope.n_diverged == 1
    assert slope.by_seed == pytest.approx((-0.2, -0.2, -0.2))
    assert "1 pair diverged" in "\n".join(lr_lines(runs, "val_loss"))


def test_a_place_without_one_of_the_lr_takes_it_from_all():
    runs = chosen(shifted(2, noise=0))
    (slope,) = lr_slopes(runs[(runs["lr"] != 0.001) | (runs["n_layers"] == 24)], "val_loss")
    assert [*slope.by_lr] == [0.002, 0.004, 0.008] and slope.n_contexts == 2


def test_an_axis_of_the_sweep_does_as_well_and_two_tuned_fields_have_none():
    runs = shifted(2).drop(columns=["tuned_fields", "tuning"])
    (slope,) = lr_slopes(runs, "val_loss")
    assert slope.verdict == "lower"
    assert not lr_slopes(chosen(shifted(2)).assign(tuned_fields="lr,weight_decay"), "val_loss")
    with pytest.raises(ValueError, match="no setting was run with its baseline at 3 learning rates"):
        list(lr_lines(runs[runs["lr"] < 0.003], "val_loss"))


def test_a_knob_is_judged_among_all_and_one_that_does_not_vary_is_refused():
    runs = chosen(shifted(2))
    other = runs.assign(run_id=runs["run_id"] + "w", weight_decay=1.0)
    other["val_loss"] += 0.1 * runs["seed"] * runs["lr"]
    both = pd.concat([runs, other], ignore_index=True)
    family = lr_slopes(both, "val_loss")
    assert {slope.knob for slope in family} == {"depth_scale", "weight_decay"}
    (one,) = lr_slopes(both, "val_loss", "depth_scale")
    assert one.p_holm in {slope.p_holm for slope in family} and one.n_tested == 2
    assert all(slope.effect.df > len(slope.by_seed) - 1 for slope in family)  # they borrow from each other's noise
    with pytest.raises(ValueError, match="these runs vary"):
        lr_slopes(both, "val_loss", "norm")


def test_what_is_printed():
    text = "\n".join(lr_lines(chosen(shifted(2)), "val_loss"))
    assert "falls" in text and "at 0.001" in text and "depth_scale=lns" in text
    table = lr_table(lr_slopes(chosen(shifted(2)), "val_loss"))
    rows = table.records()
    assert [row["lr"] for row in rows] == [*RATES] and {row["verdict"] for row in rows} == {"falls"}
    with pytest.raises(ValueError, match="not a measured number"):
        lr_slopes(shifted(2), "val_los")


def test_runs_of_one_seed_from_several_starts_are_one_of_their_mean():
    """From one start the slope is -.2 by doubling, from the other there is none: -.1, in whatever order they come."""
    starts = [shifted(by, noise=0).assign(start_cell="c", start_weights=name) for by, name in ((2, "a"), (1, "b"))]
    runs = pd.concat(starts, ignore_index=True)
    runs["run_id"] = runs["run_id"] + runs["start_weights"]
    for each in (runs, runs[::-1].reset_index(drop=True)):
        (slope,) = lr_slopes(chosen(each), "val_loss")
        assert slope.effect.mean == pytest.approx(-0.1)


def test_depths_and_settings_that_read_alike_side_by_side_are_places_of_their_own():
    """12 heads of keys and values at 4 layers, and 1 at 24."""
    axes = {"n_layers": [4, 24], "n_kv_heads": [12, 1], "depth_scale": ["none", "lns"], "lr": RATES, "seed": range(3)}
    runs = grid(
        axes, lambda config: bowl(config, 0.004 if config.depth_scale == "lns" else 0.002), n_heads=12, d_model=96
    )
    found = {slope.setting: slope for slope in lr_slopes(runs, "val_loss")}
    assert found["depth_scale=lns"].n_contexts == 4
    assert found["depth_scale=lns"].by_seed == pytest.approx((-0.2, -0.2, -0.2))
