"""At equal loss: a planted slope and effect are told apart, and a setting that only lowers the loss has none.

Of 600 intervals of such draws .95 hold the truth.
"""

import re

import numpy as np
import pytest
from support.runs_frame import grid

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.equal_loss import equal_loss_lines

AXES = {"depth_scale": ["none", "lns"], "n_layers": [4, 8], "seed": range(8)}


def runs(own, slope=-5.0):
    """LNS lowers the loss by 0.2 nat and adds `own` layers; every nat within a setting costs `slope` layers."""
    rng = np.random.default_rng(1)

    def summary(config):
        lns = config.depth_scale == "lns"
        loss = 2 - 0.2 * lns + 0.1 * rng.standard_normal()
        needed = config.n_layers / 2 + slope * (loss - 2) + own * lns + 0.05 * rng.standard_normal()
        return {"val_loss": loss, "needed_layers": needed}

    return grid(AXES, summary)


@pytest.mark.parametrize("own", [0.0, 2.0])
def test_the_slope_and_the_setting_are_told_apart(own):
    frame = runs(own)
    lines = list(equal_loss_lines(cells_of(frame, "needed_layers")))
    assert [line.partition(" (")[0] for line in lines] == ["at equal val_loss, 4 layers", "at equal val_loss, 8 layers"]
    for line in lines:
        slope, r, effect, low, high = map(float, re.findall(r"[+-]\d[\d.e+-]*", line))
        assert slope == pytest.approx(-5, abs=0.4) and r < -0.98
        assert low <= own <= high and high - low < 0.5 and effect == pytest.approx(own, abs=0.2)


def test_only_a_number_of_layers_is_compared_at_equal_loss():
    frame = runs(2.0).assign(causal_score=0.1)
    assert not list(equal_loss_lines(cells_of(frame, "causal_score")))
    assert not list(equal_loss_lines(cells_of(frame.assign(val_loss=2.0), "needed_layers")))
