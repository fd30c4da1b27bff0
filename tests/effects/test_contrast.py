"""Paired contrasts, worked out by hand, and their properties."""

import math

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import config_of, grid, knob_of, runs_frame

from sparsedepth.config.run import RunConfig
from sparsedepth.effects.contrast import compare, contrasts, noise
from sparsedepth.effects.knobs import depth_knob
from sparsedepth.effects.pairs import pairs

LOSS = {
    # (depth_scale, seed): val_loss
    ("none", 0): 3.00,
    ("none", 1): 3.02,
    ("none", 2): 3.04,
    ("lns", 0): 2.89,
    ("lns", 1): 2.92,
    ("lns", 2): 2.95,
}


def by_hand(**changes):
    runs = grid(
        {"depth_scale": ["none", "lns"], "seed": [0, 1, 2]},
        lambda config: {"val_loss": LOSS[config.depth_scale, config.seed], **changes},
    )
    return runs, knob_of(runs, "depth_scale")


def test_a_contrast_by_hand():
    runs, knob = by_hand()
    (found,) = contrasts(runs, knob, "val_loss")
    # differences -.11, -.10, -.09: mean -.10, s = .01, half-width 4.3027 x .01 / sqrt(3) = .02484
    assert found.effect.mean == pytest.approx(-0.10)
    assert found.effect.lo == pytest.approx(-0.12484, abs=1e-5)
    assert found.effect.hi == pytest.approx(-0.07516, abs=1e-5)
    # seeds within cells: .02 and .03 apart, so variances .0004 and .0009, pooled over 4 degrees of freedom
    assert found.noise == pytest.approx(math.sqrt((0.0004 + 0.0009) / 2))
    # t(4) = 2.7764, floor = t noise sqrt(2/3)
    assert found.floor == pytest.approx(2.77645 * math.sqrt(0.00065) * math.sqrt(2 / 3), rel=1e-5)
    assert (found.n_layers, found.setting, found.baseline) == (12, "depth_scale=lns", "depth_scale=none")
    assert (found.baseline_mean, found.unit) == (pytest.approx(3.02), "nat/token")
    assert (found.effect.n, found.n_seeds, found.verdict) == (3, 3, "lower")
    assert found.run_ids == tuple(sorted(runs["run_id"]))


def test_runs_of_unknown_seed_stand_as_one_of_their_mean():
    """2.92 - 3.02, without an interval; of those that finished, if one diverged: (2.89 + 2.92) / 2 - 3.02."""
    runs, knob = by_hand()
    unknown = runs.assign(seed=None)
    (found,) = contrasts(unknown, knob, "val_loss")
    assert (found.effect.mean, found.effect.lo, found.n_seeds) == (pytest.approx(-0.10), None, 1)
    unknown.loc[unknown["val_loss"] == 2.95, "outcome"] = "diverged"
    (found,) = contrasts(unknown, knob, "val_loss")
    assert (found.effect.mean, found.n_diverged) == (pytest.approx(-0.115), 1)


def test_the_order_of_the_rows_does_not_matter():
    runs, knob = by_hand()
    assert contrasts(runs.sample(frac=1, random_state=1), knob, "val_loss") == contrasts(runs, knob, "val_loss")


def test_under_the_noise_floor_is_not_distinguishable():
    """Seeds move both settings by 1 together: the pairs agree on -.10, but runs differ by far more without a cause."""
    runs, knob = by_hand()
    runs["val_loss"] += runs["seed"] * 1.0
    (found,) = contrasts(runs, knob, "val_loss")
    assert found.effect.mean == pytest.approx(-0.10)
    assert found.effect.excludes_zero
    assert found.floor is not None and found.floor > 0.10
    assert found.verdict == "not distinguishable"


def test_only_runs_that_differ_in_nothing_else_are_paired():
    runs = runs_frame(
        (config_of(**cell), {"val_loss": loss})
        for cell, loss in [
            ({"weight_decay": 0.0, "seed": 0}, 3.0),
            ({"weight_decay": 0.3, "seed": 0}, 2.5),
            ({"weight_decay": 0.3, "seed": 1}, 9.0),  # no partner with this seed
            ({"weight_decay": 0.0, "seed": 2}, 9.0),
            ({"weight_decay": 0.3, "seed": 2, "n_kv_heads": 1}, 9.0),  # differs in two
            ({"weight_decay": 0.0, "seed": 3, "val_tokens": 500}, 9.0),
            ({"weight_decay": 0.3, "seed": 3}, 9.0),  # measured on other text
        ]
    )
    found = pairs(runs, knob_of(runs, "weight_decay"), "val_loss")
    assert list(found["difference"]) == [-0.5]


def test_logging_more_often_is_no_difference():
    runs = runs_frame(
        (RunConfig(weight_decay=decay, log_every=every), {"val_loss": loss})
        for decay, every, loss in [(0.0, 10, 3.0), (0.3, 5, 2.0)]
    )
    assert list(pairs(runs, knob_of(runs, "weight_decay"), "val_loss")["difference"]) == [-1.0]


def test_diverged_and_unmeasured_runs_are_counted_and_never_averaged():
    runs, knob = by_hand()
    lns = runs["depth_scale"] == "lns"
    runs.loc[lns & (runs["seed"] == 0), ["outcome", "val_loss"]] = ["diverged", 50.0]
    runs.loc[~lns & (runs["seed"] == 1), "val_loss"] = None
    (found,) = contrasts(runs, knob, "val_loss")
    assert (found.n_diverged, found.n_baseline_diverged, found.n_missing) == (1, 0, 1)
    assert found.effect.mean == pytest.approx(-0.09)  # seed 2 alone
    assert (found.effect.n, found.effect.lo, found.verdict) == (1, None, "not distinguishable")


def test_runs_of_one_seed_from_several_starts_are_one_of_their_mean():
    """Of two starts each seed gives two runs, which lie .10 and .30 apart: .20, in whatever order they come."""
    axes = {"start_weights": ["a" * 12, "b" * 12], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}
    gain = {"a" * 12: 0.1, "b" * 12: 0.3}

    def outcome(config):
        start = 3.0 + 10 * gain[config.start_weights]
        return {"val_loss": start - gain[config.start_weights] * (config.depth_scale == "lns")}

    runs = grid(axes, outcome, start_cell="c" * 12)
    mixed = pd.concat([runs[runs["depth_scale"] == "none"], runs[runs["depth_scale"] == "lns"][::-1]])
    for each in (runs, mixed.reset_index(drop=True)):
        (found,) = contrasts(each, knob_of(each, "depth_scale"), "val_loss")
        assert found.by_seed == pytest.approx((-0.2, -0.2, -0.2))


def test_runs_that_do_not_say_their_seed_are_no_further_pair_of_one():
    runs, knob = by_hand()
    runs = runs.assign(seed=runs["seed"].astype(float).where(runs["seed"] < 2))
    (found,) = contrasts(runs, knob, "val_loss")
    assert (found.effect.n, found.n_seeds, found.effect.mean) == (2, 2, pytest.approx((-0.11 - 0.10) / 2))
    (found,) = contrasts(runs[runs["seed"].isna()], knob, "val_loss")
    assert (found.n_seeds, found.effect.mean, found.floor) == (1, pytest.approx(-0.09), None)


def test_one_seed_has_no_noise_floor_and_no_verdict():
    runs = grid(
        {"depth_scale": ["none", "lns"], "n_kv_heads": [4, 2, 1]},
        lambda config: {"val_loss": 3 - (config.depth_scale == "lns")},
    )
    (found,) = contrasts(runs, knob_of(runs, "depth_scale"), "val_loss")
    assert (found.effect.n, found.n_seeds, found.floor) == (3, 1, None)
    assert found.verdict == "not distinguishable"


def test_variance_is_compared_as_a_ratio():
    runs, knob = by_hand()
    growth = {("none", 0): 100, ("lns", 0): 25, ("none", 1): 200, ("lns", 1): 50, ("none", 2): 400, ("lns", 2): 0}
    runs["residual_variance_last"] = [growth[key] for key in zip(runs["depth_scale"], runs["seed"], strict=True)]
    (found,) = contrasts(runs, knob, "residual_variance_last")
    assert found.effect.mean == pytest.approx(math.log(1 / 4))
    assert (found.unit, found.n_missing) == ("ln ratio", 1)  # a variance of 0 has no logarithm
    assert found.baseline_mean == pytest.approx(math.sqrt(100 * 200))


@pytest.mark.parametrize(
    ("outcome", "layer"), [("usefulness", 1 / 12), ("usefulness_5pct", 1 / 12), ("needed_layers", 1)]
)
def test_one_layer_more_in_every_seed_is_not_enough(outcome, layer):
    runs, knob = by_hand()
    runs[outcome] = layer * np.where(runs["depth_scale"] == "lns", 10, 9)
    (one,) = contrasts(runs, knob, outcome)
    assert (one.effect.mean, one.verdict) == (pytest.approx(layer), "not distinguishable")
    runs[outcome] = layer * np.where(runs["depth_scale"] == "lns", 12, 9)
    (three,) = contrasts(runs, knob, outcome)
    assert three.verdict == "higher"


def test_what_was_matched_is_read_from_the_runs():
    runs, knob = by_hand()
    runs.loc[runs["depth_scale"] == "lns", "params_total"] *= 0.8
    runs.loc[runs["depth_scale"] == "lns", "train_flops"] *= 2
    runs["params_active"] = None
    (found,) = contrasts(runs, knob, "val_loss")
    assert found.ratios == {
        "tokens": (1.0, 1.0),
        "params_total": (pytest.approx(0.8), pytest.approx(0.8)),
        "params_active": None,
        "flops": (2.0, 2.0),
    }
    assert [found.matches(basis) for basis in found.ratios] == [True, False, False, False]
    assert [found.costs_no_more(basis) for basis in found.ratios] == [True, True, False, False]


def test_what_one_pair_of_many_spends_counts():
    """One seed has 3% more parameters, another 3% fewer; the third as many."""
    runs, knob = by_hand()
    for seed, factor in ((0, 1.03), (1, 0.97)):
        runs.loc[(runs["depth_scale"] == "lns") & (runs["seed"] == seed), "params_total"] *= factor
    (found,) = contrasts(runs, knob, "val_loss")
    assert found.ratios["params_total"] == (pytest.approx(0.97), pytest.approx(1.03))
    assert not found.costs_no_more("params_total") and not found.matches("params_total")
    runs.loc[runs["seed"] == 0, "params_total"] = 1000
    (fewer,) = contrasts(runs, knob, "val_loss")
    assert fewer.costs_no_more("params_total") and not fewer.matches("params_total")


def test_each_depth_has_equal_weight_though_it_has_fewer_seeds():
    """-.1 at 12 layers in three seeds, -.5 at 24 in two: -.3 over both."""
    gain = {12: -0.1, 24: -0.5}
    axes = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}
    runs = grid(axes, lambda c: {"val_loss": 3 + 0.01 * c.seed + gain[c.n_layers] * (c.depth_scale == "lns")})
    runs = runs[(runs["n_layers"] == 12) | (runs["seed"] < 2)]
    found = compare(runs, knob_of(runs, "depth_scale"), "depth_scale=lns", "val_loss")
    assert found is not None and found.effect.mean == pytest.approx(-0.3)


def test_a_setting_at_the_edge_is_counted_on_either_side():
    runs, knob = by_hand()
    lns = runs["depth_scale"] == "lns"
    for at_edge, n in ((lns, 3), (~lns, 3), (lns & (runs["seed"] == 0), 1), (runs["seed"] == 0, 1)):
        tuned = runs.assign(tuned_fields="lr", tuning=np.where(at_edge, "edge", "best"))
        (found,) = contrasts(tuned, knob, "val_loss")
        assert found.n_at_edge == n


def test_noise_between_seeds_of_depths_belongs_to_the_deepest():
    runs = grid({"n_layers": [12, 24, 8], "seed": [0, 1, 2]}, lambda config: {"val_loss": 3 - config.n_layers / 120})
    deeper = {contrast.setting: contrast.noise_depth for contrast in contrasts(runs, depth_knob(runs), "val_loss")}
    assert deeper == {"n_layers=12": 12, "n_layers=24": 24}


def test_a_run_is_matched_once_with_one_of_its_size_or_else_the_nearest():
    """At equal FLOPs, to 1%: of baselines .5% off at the same d_ff and 0% off at another the former; and of two sizes
    of a setting one takes the only baseline."""

    def matched(*cells):
        runs = runs_frame(
            (config_of(depth_scale=scale, d_ff=d_ff), {"val_loss": 3.0, "train_flops": flops})
            for scale, d_ff, flops in cells
        )
        found = pairs(runs, knob_of(runs, "depth_scale"), "val_loss", "flops")
        flops_of = runs.set_index("run_id")["train_flops"]
        return [
            (flops_of[one], flops_of[other])
            for one, other in zip(found["run_id"], found["run_id_baseline"], strict=True)
        ]

    assert matched(("none", 160, 1005.0), ("none", 168, 1000.0), ("lns", 160, 1000.0)) == [(1000.0, 1005.0)]
    far = ("none", 160, 9000.0), ("lns", 152, 1.0), ("none", 176, 7000.0)  # or depth_scale would follow from d_ff
    assert matched(("none", 152, 1005.0), ("none", 168, 1001.0), ("lns", 160, 1000.0), *far) == [(1000.0, 1001.0)]
    assert matched(("none", 168, 1000.0), ("lns", 168, 1006.0), ("lns", 176, 1005.0), *far) == [(1006.0, 1000.0)]


def test_depth_itself_is_contrasted_over_all_depths():
    runs = grid({"n_layers": [24, 12], "seed": [0, 1, 2]}, lambda config: {"val_loss": 3 - config.n_layers / 120})
    depth = depth_knob(runs)
    assert depth is not None
    (found,) = contrasts(runs, depth, "val_loss")
    assert (found.n_layers, found.baseline, found.setting) == (None, "n_layers=12", "n_layers=24")
    assert found.effect.mean == pytest.approx(-0.1)


def test_compare_ignores_depth_strata_and_knows_when_there_is_no_pair():
    runs, knob = by_hand()
    found = compare(runs, knob, "depth_scale=lns", "val_loss")
    assert found is not None and found.effect.mean == pytest.approx(-0.10)
    assert compare(runs[runs["depth_scale"] == "lns"], knob, "depth_scale=lns", "val_loss") is None


def test_noise_is_pooled_over_cells():
    runs, _ = by_hand()
    assert noise(runs, "val_loss") == (pytest.approx(math.sqrt(0.00065)), 4)
    assert noise(runs[runs["seed"] == 0], "val_loss") == (None, 0)


def test_an_unknown_outcome_is_refused():
    runs, knob = by_hand()
    with pytest.raises(ValueError, match=r"outcome 'loss' is not a measured number.*val_loss"):
        contrasts(runs, knob, "loss")


def test_planted_effects_are_covered_and_absent_ones_are_not_found():
    """200 sweeps, told apart by their depth: 2 x 2 cells x 4 seeds with shared seed effects, so 8 pairs per knob.

    The interval should cover the planted effect in 95% of them (standard deviation 1.5%), and the absent one should be
    called something in at most 5%.
    """
    generator = np.random.default_rng(3)
    depths = range(1, 201)
    axes = {"n_layers": depths, "depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": range(4)}
    runs = grid(axes, lambda config: {})
    shared = 0.01 * generator.normal(size=(201, 4))[runs["n_layers"], runs["seed"]]
    runs["val_loss"] = 3 - 0.04 * (runs["depth_scale"] == "lns") + shared + 0.01 * generator.normal(size=len(runs))
    found = contrasts(runs, knob_of(runs, "depth_scale"), "val_loss")
    assert [one.n_layers for one in found] == list(depths)
    assert 0.91 <= np.mean([one.effect.covers(-0.04) for one in found]) <= 0.99
    assert np.mean([one.verdict == "lower" for one in found]) > 0.9
    absent = contrasts(runs, knob_of(runs, "n_kv_heads"), "val_loss")
    assert np.mean([one.verdict != "not distinguishable" for one in absent]) <= 0.08


def test_missing_numbers_from_a_store_are_nan_or_none_alike():
    runs, knob = by_hand()
    as_nan = runs.assign(val_loss=pd.Series([np.nan, *runs["val_loss"][1:]], index=runs.index))
    as_none = runs.assign(val_loss=pd.Series([None, *runs["val_loss"][1:]], index=runs.index, dtype=object))
    assert contrasts(as_nan, knob, "val_loss") == contrasts(as_none, knob, "val_loss")
