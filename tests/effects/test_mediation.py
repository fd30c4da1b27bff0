"""Shares that pass through a mediator: by hand, and recovered from planted ones."""

import numpy as np
import pandas as pd
import pytest
from frames import grid, knob_of

from sparsedepth.effects.mediation import mediation, mediations

PATH = (("causal_score", "val_loss"),)


def test_a_share_by_hand():
    """The mediator rises by 1, 2, 3 over seeds and the outcome by .5 + .5 of that: 1 of 1.5 passes through."""

    def outcome(config):
        moved = (config.seed + 1.0) * (config.depth_scale == "lns")
        return {"causal_score": 5 + moved, "val_loss": 3 + 0.5 * moved + 0.5 * (config.depth_scale == "lns")}

    runs = grid({"depth_scale": ["none", "lns"], "seed": range(3)}, outcome)
    (found,) = mediations(runs, knob_of(runs, "depth_scale"), PATH)
    assert found.share == pytest.approx(1 / 1.5)
    assert (found.lo, found.n_contexts) == (None, 1)  # one configuration is no sample of configurations
    assert found.total.mean == pytest.approx(1.5)


def test_nothing_to_share_is_no_share():
    def outcome(config):
        lns = config.depth_scale == "lns"
        return {"causal_score": 1.0 + lns, "val_loss": 3 + lns * (0.1 if config.seed % 2 else -0.1)}

    runs = grid({"depth_scale": ["none", "lns"], "seed": range(4)}, outcome)
    (found,) = mediations(runs, knob_of(runs, "depth_scale"), PATH)
    assert (found.share, found.lo, found.hi) == (None, None, None)
    assert mediations(runs, knob_of(runs, "depth_scale"), (("usefulness", "val_loss"),)) == []  # not measured


def test_depth_is_no_mediation():
    """Both move more at depth 24, by amounts that have nothing to do with each other within a depth."""

    def outcome(config):
        lns, deep = config.depth_scale == "lns", config.n_layers == 24
        up = (1 if config.seed % 2 else -1) * 0.1
        return {"causal_score": lns * (1 + deep + up), "val_loss": 3 + lns * (1 + deep + 0.1 * (config.seed > 1))}

    runs = grid({"n_layers": [12, 24], "depth_scale": ["none", "lns"], "seed": range(4)}, outcome)
    (found,) = mediations(runs, knob_of(runs, "depth_scale"), PATH)
    assert found.share == pytest.approx(0.0, abs=1e-9)


def test_a_planted_share_is_covered():
    """300 stores of 16 contexts x 3 seeds with share .6. The bootstrap of so few contexts covers a little less than
    95%: 90% to 98% is asked."""
    generator = np.random.default_rng(0)
    runs = grid({"depth_scale": ["none", "lns"], "seed": [0]}, lambda config: {})
    knob = knob_of(runs, "depth_scale")
    covered = []
    for store in range(300):
        n = 48
        moved = 1 + generator.normal(size=16)[np.arange(n) // 3] * 0.3 + 0.3 * generator.normal(size=n)
        changed = 0.4 + 0.6 * moved + 0.2 * generator.normal(size=n)
        frame = pd.DataFrame(
            {
                "setting": "depth_scale=lns",
                "n_layers": 12,
                "cell_id": [f"a{i // 3}" for i in range(n)],
                "seed": np.arange(n) % 3,
            }
        ).assign(cell_id_baseline=lambda rows: rows["cell_id"] + "b")
        found = mediation(
            frame.assign(difference=moved), frame.assign(difference=changed), knob, "depth_scale=lns", "m", "y", store
        )
        assert found.lo is not None and found.hi is not None
        covered.append(found.lo <= 0.6 <= found.hi)
    assert 0.90 <= np.mean(covered) <= 0.98
