"""Signal-to-noise of quantities: answers worked out on paper, scipy's one-way F, and made-up configurations."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.store import signal_to_noise
from sparsedepth.store.connection import open_store
from sparsedepth.store.saved_queries import answered
from sparsedepth.words.saved_queries import answer_text

WEIGHT_DECAYS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def answer_and_text(folder, values, quantity="val_loss", **other):
    """The row of `quantity` for runs of {(n_layers, weight_decay): its values by seed}; the answer as text."""
    for (n_layers, weight_decay), of_seeds in values.items():
        for seed, value in enumerate(of_seeds):
            config = RunConfig(n_layers=n_layers, weight_decay=weight_decay, seed=seed)
            make_run(folder, config, {quantity: value, **other})
    with open_store(folder) as store:
        rows = {row["quantity"]: row for row in signal_to_noise.answer(store).records()}
        return rows.get(quantity), answer_text(answered(store, "signal_to_noise"))


def answer(*arguments):
    return answer_and_text(*arguments)[0]


def test_two_configurations_of_two_seeds_worked_out_by_hand(tmp_path):
    """Means 2 and 6, both variances 2: MS_between 16, MS_within 2, n0 2, so signal^2 = (16 - 2) / 2 = 7."""
    row = answer(tmp_path, {(12, 0.0): [1.0, 3.0], (12, 0.1): [5.0, 7.0]})
    assert (row["configurations"], row["seeds"]) == (2, 4)
    assert row["signal"] == pytest.approx(math.sqrt(7)) and row["noise"] == pytest.approx(math.sqrt(2))
    assert row["signal_to_noise"] == pytest.approx(math.sqrt(3.5))
    assert row["decision_accuracy"] == pytest.approx(0.5 + math.atan(math.sqrt(3.5)) / math.pi)
    assert row["seeds_for_90pct"] == 3  # tan(0.4 pi)^2 / 3.5 = 9.47 / 3.5 = 2.7
    # F = 8 is not significant with 1 and 2 degrees of freedom (95%: 38.5), and far above the lower quantile, .0013.
    assert row["lo"] == 0.5 and row["hi"] > 0.98


def test_runs_of_one_seed_from_several_start_weights_count_once(tmp_path):
    """Their mean does: the values are those by hand, 1, 3 and 5, 7."""
    for decay, mean in ((0.0, 2.0), (0.1, 6.0)):
        for seed in (0, 1):
            for start in (-0.5, 0.0, 0.5):
                of = {"start_weights": f"{2 * start + 1:012.0f}", "start_cell": "a" * 12}
                config = RunConfig(n_layers=12, weight_decay=decay, seed=seed, **of)
                make_run(tmp_path, config, {"val_loss": mean + 2 * seed - 1 + start})
    with open_store(tmp_path) as store:
        (row,) = (row for row in signal_to_noise.answer(store).records() if row["quantity"] == "val_loss")
    assert (row["configurations"], row["seeds"]) == (2, 4) and row["noise"] == pytest.approx(math.sqrt(2))


def test_of_the_branches_of_a_trunk_the_longest_counts(tmp_path):
    """The other budget, with another mean, is no further configuration."""
    for decay, mean in ((0.0, 2.0), (0.1, 6.0)):
        for seed in (0, 1):
            for tokens in (81920, 163840):
                wsd = {"schedule": "wsd", "warmup_tokens": 8192, "train_tokens": tokens, "seed": seed}
                value = mean + 2 * seed - 1 + 50 * (tokens == 81920)
                make_run(tmp_path, RunConfig(n_layers=12, weight_decay=decay, **wsd), {"val_loss": value})
    with open_store(tmp_path) as store:
        (row,) = (row for row in signal_to_noise.answer(store).records() if row["quantity"] == "val_loss")
    assert (row["configurations"], row["seeds"]) == (2, 4) and row["signal"] == pytest.approx(math.sqrt(7))


def test_runs_that_only_tuned_are_no_configurations(tmp_path):
    """Two configurations, each with two result seeds at one of three rates that two other seeds chose."""
    for decay, mean in ((0.0, 2.0), (0.1, 6.0)):
        for lr in (0.001, 0.002, 0.004):
            seeds = (101, 102, 0, 1) if lr == 0.002 else (101, 102)
            for seed in seeds:
                config = RunConfig(n_layers=12, weight_decay=decay, lr=lr, seed=seed)
                make_run(tmp_path, config, {"val_loss": mean + (seed % 2 * 2 - 1) + 50 * (lr != 0.002)})
    definition = {"name": "s", "question": "q", "hypothesis": "h", "tune": {"lr": [0.001, 0.002, 0.004]}}
    (tmp_path / "sweep.yaml").write_text(json.dumps({**definition, "tuning_seeds": [101, 102], "seeds": [0, 1]}))
    with open_store(tmp_path) as store:
        (row,) = (row for row in signal_to_noise.answer(store).records() if row["quantity"] == "val_loss")
    assert (row["configurations"], row["seeds"]) == (2, 4) and row["signal"] == pytest.approx(math.sqrt(7))


def test_depths_are_pooled_and_not_compared_with_each_other(tmp_path):
    """The same two configurations at another depth, 100 higher: the same answer from twice the runs."""
    alone = {(12, 0.0): [1.0, 3.0], (12, 0.1): [5.0, 7.0]}
    deeper = {(24, decay): [value + 100 for value in values] for (_, decay), values in alone.items()}
    row = answer(tmp_path, alone | deeper)
    assert row["signal"] == pytest.approx(math.sqrt(7)) and row["seeds"] == 8


def test_one_depth_agrees_with_one_way_analysis_of_variance(tmp_path):
    generator = np.random.default_rng(1)
    values = {(12, decay): list(4 + decay + generator.normal(0, 0.3, 5)) for decay in WEIGHT_DECAYS}
    row = answer(tmp_path, values)
    ratio = stats.f_oneway(*values.values()).statistic
    assert row["signal_to_noise"] == pytest.approx(math.sqrt(max(0, ratio - 1) / 5))


def test_ratios_are_compared_by_their_logarithm(tmp_path):
    values = {(12, 0.0): [math.e, math.e**3], (12, 0.1): [math.e**5, math.e**7]}
    row = answer(tmp_path, values, "residual_variance_last")
    assert row["signal"] == pytest.approx(math.sqrt(7))


def test_unequal_seeds_count_as_they_are_and_single_ones_not_at_all(tmp_path):
    """n = 2 and 4, means 0 and 3 about the grand mean 2: MS_between 2 * 4 + 4 * 1 = 12; n0 = 6 - 20 / 6 = 8 / 3."""
    values = {(12, 0.0): [-1.0, 1.0], (12, 0.1): [2.0, 4.0, 2.0, 4.0], (12, 0.2): [50.0], (24, 0.0): [9.0, 8.0]}
    row = answer(tmp_path, values)
    within = (2 + 4) / 4
    assert (row["configurations"], row["seeds"]) == (2, 6)
    assert row["signal"] == pytest.approx(math.sqrt((12 - within) * 3 / 8))


@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.0])
def test_decision_accuracy_is_the_share_of_pairs_in_the_right_order(ratio):
    generator = np.random.default_rng(0)
    true = generator.normal(0, ratio, (2, 200_000))
    measured = true + generator.normal(0, 1, true.shape)
    right = np.mean(np.sign(true[0] - true[1]) == np.sign(measured[0] - measured[1]))
    assert signal_to_noise._decision_accuracy(ratio) == pytest.approx(right, abs=0.004)


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_the_interval_holds_the_truth_in_95_percent(signal):
    """16 configurations of 4 seeds; the ratio of the mean squares comes from their own definition."""
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(1000):
        values = generator.normal(0, signal, (16, 1)) + generator.normal(0, 1, (16, 4))
        ratio = 4 * values.mean(1).var(ddof=1) / values.var(1, ddof=1).mean()
        lo, hi = signal_to_noise._ratio_interval(ratio, 15, 48)
        covered += lo <= 1 + 4 * signal**2 <= hi
    assert 0.93 <= covered / 1000 <= 0.97


def test_noise_alone_is_called_chance(tmp_path):
    """Every configuration has the same values: nothing between their means, so every order is a coin's."""
    row = answer(tmp_path, {(12, decay): [1.0, 2.0, 3.0] for decay in WEIGHT_DECAYS})
    assert (row["signal"], row["decision_accuracy"], row["seeds_for_90pct"]) == (0, 0.5, None)


def test_a_quantity_without_noise_or_without_two_configurations_has_no_row(tmp_path):
    row, text = answer_and_text(tmp_path / "constant", {(12, 0.0): [1.0, 1.0], (12, 0.1): [2.0, 2.0]})
    assert row is None and "none: " in text
    row, text = answer_and_text(tmp_path / "single", {(12, 0.0): [1.0, 2.0], (24, 0.0): [1.0, 2.0]})
    assert row is None and "none: no depth has two configurations with two finished seeds each" in text


def test_a_degenerate_score_is_named_with_its_reason(tmp_path):
    chance = {"val_loss": 4.0, "chance_loss": 4.0}
    row, text = answer_and_text(tmp_path, {(12, 0.0): [0.1, 0.3], (12, 0.1): [0.5, 0.7]}, "usefulness", **chance)
    assert row["degenerate"] == "the model is at chance"
    assert "degenerate (the model is at chance): usefulness\n" in text
