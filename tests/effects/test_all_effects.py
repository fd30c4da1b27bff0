"""All effects of a store: four bases, the correction for asking often, and power on planted effects."""

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import config_of, grid, knob_of, runs_frame

from sparsedepth.effects.all_effects import (
    _moderated,
    effects_of,
    measure_slopes,
)
from sparsedepth.effects.contrast import contrasts
from sparsedepth.effects.intervals import correct, holm
from sparsedepth.effects.knobs import depth_knob
from sparsedepth.effects.pairs import pairs


def experts(train_tokens, n_experts, seed, loss):
    """A run whose FLOPs are tokens x (1 + experts): at equal tokens experts cost twice as much."""
    flops = float(train_tokens * (1 + (n_experts > 0)))
    config = config_of(train_tokens=train_tokens, n_experts=n_experts, top_k=2 if n_experts else None, seed=seed)
    return config, {
        "val_loss": loss + 0.001 * (seed - 1) * bool(n_experts),
        "train_flops": flops,
        "params_total": 1000 * (1 + n_experts),
    }


@pytest.fixture
def two_budgets():
    """Dense at 8 and 16 steps, experts at 8: equal tokens favours the experts by .2, equal FLOPs the dense by .1."""
    cells = [(8 * 8192, 0, 3.0), (16 * 8192, 0, 2.7), (8 * 8192, 4, 2.8)]
    return runs_frame(experts(tokens, n, seed, loss) for tokens, n, loss in cells for seed in range(3))


def test_a_run_is_in_one_pair_at_most_and_equal_sizes_come_first():
    """Two dense widths have the experts' FLOPs: the one of the same width stands beside them."""
    rows = [
        (config_of(d_model=width, n_experts=n, top_k=n // 2 or None, seed=seed), {"val_loss": loss, "train_flops": 1.0})
        for width, n, loss in [(64, 0, 3.0), (128, 0, 2.0), (64, 4, 2.9)]
        for seed in range(2)
    ]
    runs = runs_frame(rows)
    found = pairs(runs, knob_of(runs, "n_experts"), "val_loss", "flops")
    assert list(found["difference"]) == pytest.approx([-0.1, -0.1])
    assert not found["run_id"].duplicated().any() and not found["run_id_baseline"].duplicated().any()


def test_effects_of_depth_lend_nothing():
    """They are means over settings, and less noisy than any of one."""
    generator = np.random.default_rng(0)
    axes = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "seed": range(3)}
    runs = grid(axes, lambda config: {"val_loss": 3 + 0.01 * generator.normal()})
    lns = [one for one in contrasts(runs, knob_of(runs, "depth_scale"), "val_loss") if one.n_layers == 24]
    deeper = contrasts(runs, depth_knob(runs), "val_loss")
    assert len(lns) == len(deeper) == 1 and lns[0].noise_depth == deeper[0].noise_depth == 24
    assert _moderated(lns, lenders=deeper) == _moderated(lns)
    assert _moderated([*lns, *deeper])[0] == _moderated(lns)[0]
    assert _moderated(deeper, lenders=lns) != _moderated(deeper)


def test_slopes_are_corrected_together():
    def outcome(config):
        lns = config.depth_scale == "lns"
        return {
            "val_loss": 3 - lns * (0.1 if config.n_layers == 12 else 0.3) + 0.0001 * config.seed * lns * config.n_layers
        }

    axes = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": range(3)}
    found = measure_slopes(grid(axes, outcome))
    assert {one.knob: one.verdict for one in found} == {
        "depth_scale": "lower",
        "n_kv_heads": "not distinguishable",
    }
    assert found == correct(found) and [one.p_holm for one in found] == holm([one.effect.p for one in found])


# Power


def stores(n_stores, axes, generator, shared_sd=0.01):
    """The runs of many sweeps in one frame, told apart by n_layers: noise of runs, and of seeds shared by settings."""
    one = grid(axes, lambda config: {})
    runs = pd.concat([one.assign(n_layers=depth) for depth in range(1, n_stores + 1)], ignore_index=True)
    for name in ("run_id", "cell_id"):
        runs[name] += runs["n_layers"].astype(str)
    shared = shared_sd * generator.normal(size=(n_stores + 1, 99))[runs["n_layers"], runs["seed"]]
    return runs.assign(val_loss=3 + shared + 0.01 * generator.normal(size=len(runs)))


def test_planted_effects_are_covered_at_the_nominal_rate():
    """500 sweeps of 2 x 2 cells x 3 seeds: 6 pairs each. The 95% interval covers the effect in 95% +- 2%."""
    axes = {"depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": range(3)}
    runs = stores(500, axes, np.random.default_rng(0))
    runs["val_loss"] -= 0.04 * (runs["depth_scale"] == "lns")
    found = effects_of(runs, [knob_of(runs, "depth_scale")], "val_loss")
    assert len(found) == 500 and {one.effect.n for one in found} == {6}
    assert 0.93 <= np.mean([one.effect.covers(-0.04) for one in found]) <= 0.97
    assert np.mean([one.verdict == "lower" for one in found]) > 0.75  # by the 2 degrees of freedom of one setting
    assert not any(one.verdict == "higher" for one in found)
