"""The regret of the smallest runs' learning rate, by hand and in planted worlds."""

import numpy as np
import pytest
from support.runs_frame import config_of, runs_frame

from sparsedepth.effects.lr_transfer import transfer_page, transfers
from sparsedepth.effects.scale_text import scale_lines

RATES = (0.001, 0.002, 0.004)


def tuned(losses_by_width, chosen=0.004, outcome="val_loss", **fields):
    """Rows of widths -> {lr: losses by seed}."""
    return [
        (
            config_of(d_model=width, n_heads=2, lr=lr, seed=seed, **fields),
            {outcome: loss, "params_total": width**2, "tuned_fields": "lr",
             "tuning": "best" if lr == chosen else "rejected"},
        )
        for width, losses in losses_by_width.items() for lr, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]  # fmt: skip


def parabola(best, n_seeds=3):
    return {lr: [3 + seed + np.log2(lr / best) ** 2 for seed in range(n_seeds)] for lr in RATES}


def test_the_regret_by_hand(monkeypatch):
    """Seeds differ in level alone, so each is 1 worse at twice its best lr."""
    runs = runs_frame(tuned({32: parabola(0.004), 64: parabola(0.002)}))
    small, large = transfers(runs, "val_loss")
    assert (small.best, small.transferred, small.regret, small.at_edge) == (0.004, 0.004, None, True)
    assert (large.best, large.transferred, large.at_edge) == (0.002, 0.004, False)
    assert (large.regret.mean, large.regret.lo, large.regret.n) == (pytest.approx(1.0), None, 3)
    assert large.regret.lacks_spread
    monkeypatch.setenv("COLUMNS", "150")
    assert [line.split() for line in transfer_page([small, large], "val_loss", runs).splitlines()[-2:]] == [
        ["-", "0.004", "0.004", "(edge)", "12", "32", "2.1e+06", "baseline"],
        ["1.000", "0.004", "0.002", "12", "64", "2.1e+06", "baseline"],
    ]
    assert "best lr of the smallest runs" in "\n".join(scale_lines(runs, "val_loss", None, {}))


def test_the_best_lr_of_each_seed_is_that_of_the_others():
    """Seeds 0 and 1 are best at 0.001 and 0.002; the means of the other two choose 0.004 for them (0.75 both times),
    the transferred lr. Of seeds 0 and 1 the mean is best at 0.001, at which seed 2 has 2 and at 0.004 none."""
    losses = {0.001: (0.0, 1.0, 2.0), 0.002: (2.0, 0.0, 2.0), 0.004: (1.5, 1.5, 0.0)}
    large = transfers(runs_frame(tuned({32: parabola(0.004), 64: losses})), "val_loss")[1]
    assert large.regret.mean == pytest.approx((0 + 0 - 2) / 3)


def test_an_lr_that_costs_nothing_has_no_regret_on_average():
    """At width 64 all values are equally good: against the lowest mean, 0.004 would seem to cost 0.05 on average."""
    generator = np.random.default_rng(0)
    regrets = []
    for _ in range(60):
        noise = {lr: 3 + 0.1 * generator.standard_normal(3) for lr in RATES}
        regrets.append(transfers(runs_frame(tuned({32: parabola(0.004), 64: noise})), "val_loss")[1].regret.mean)
    assert np.mean(regrets) == pytest.approx(0.0, abs=3 * np.std(regrets) / 60**0.5)
    assert np.std(regrets) / 60**0.5 < 0.015


def test_result_seeds_of_the_chosen_lr_do_not_count():
    """Two values alike on the tuning seeds; of five more seeds at the first, one is lucky."""
    losses = {0.002: (3.1, 3.1, 2.5, 3.3, 3.1, 3.2, 3.3), 0.004: (3.1, 3.1), 0.001: (4.0, 4.0)}
    large = transfers(runs_frame(tuned({32: parabola(0.004, 2), 64: losses})), "val_loss")[1]
    assert (large.transferred, large.regret.mean, large.regret.n) == (0.004, pytest.approx(0.0), 2)


def test_each_setting_has_its_own_smallest_runs():
    rows = tuned({32: parabola(0.004), 64: parabola(0.004)})
    rows += tuned({32: parabola(0.001), 64: parabola(0.002)}, depth_scale="lns")
    found = transfers(runs_frame(rows), "val_loss")
    assert [(each.setting, each.d_model, each.transferred) for each in found] == [
        ("baseline", 32, 0.004), ("baseline", 64, 0.004),
        ("depth_scale=lns", 32, 0.001), ("depth_scale=lns", 64, 0.001),
    ]  # fmt: skip
    assert [each.regret and each.regret.mean for each in found] == [None, pytest.approx(0), None, pytest.approx(1)]


def test_more_is_better_for_an_accuracy():
    scores = {width: {lr: [-loss for loss in losses] for lr, losses in parabola(best).items()}
              for width, best in ((32, 0.004), (64, 0.002))}  # fmt: skip
    small, large = transfers(runs_frame(tuned(scores, outcome="val_accuracy")), "val_accuracy")
    assert (small.best, large.best, large.regret.mean) == (0.004, 0.002, pytest.approx(1.0))


def test_the_best_lr_has_the_lowest_mean_and_not_the_luckiest_run():
    lucky = {0.001: (0.0, 9.0, 9.0), 0.002: (3.0, 3.0, 3.0), 0.004: (5.0, 5.0, 5.0)}
    (small, _) = transfers(runs_frame(tuned({32: lucky, 64: parabola(0.002)})), "val_loss")
    assert small.best == 0.002


def test_between_the_values_tried_a_loss_is_linear_in_the_logarithm_of_lr():
    """0.002 is half-way from 0.001, 1 above the best, to 0.004, the best: a regret of 1/2."""
    wide = {0.001: [4.0, 5.0, 6.0], 0.004: [3.0, 4.0, 5.0], 0.016: [7.0, 8.0, 9.0]}
    large = transfers(runs_frame(tuned({32: parabola(0.002), 64: wide})), "val_loss")[1]
    assert (large.transferred, large.best, large.regret.mean) == (0.002, 0.004, pytest.approx(0.5))


def test_the_smallest_runs_are_those_of_the_least_parameters_times_tokens():
    """Width 32 with 100 times the tokens is larger than width 64: 1024 x 100 against 4096."""
    rows = tuned({32: parabola(0.001)}, train_tokens=819_200) + tuned({64: parabola(0.004)}, train_tokens=8192)
    first, second = transfers(runs_frame(rows), "val_loss")
    assert (first.d_model, second.d_model, second.transferred) == (64, 32, 0.004)


def test_no_regret_with_one_seed_or_at_an_lr_outside_the_values_tried():
    one_seed = tuned({32: parabola(0.004, 1), 64: parabola(0.002, 1)})
    assert [each.regret for each in transfers(runs_frame(one_seed), "val_loss")] == [None, None]
    low = {lr: losses for lr, losses in parabola(0.001).items() if lr < 0.004}
    assert transfers(runs_frame(tuned({32: parabola(0.004), 64: low})), "val_loss")[1].regret is None
