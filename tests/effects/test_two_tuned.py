"""Effects where tuning chose by two fields, or among values with 0: the curve is in the first field, beside the chosen
value of the second, and none goes through 0."""

import math
from itertools import product

import numpy as np
import pytest
from support.runs_frame import config_of, runs_frame

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import setting_effects


def tuned(loss, lrs, decays, chosen, scales=("none", "lns"), tuning_seeds=(100, 101)):
    """Each setting at all values with tuning seeds, and at the chosen one with the seeds 0 to 3."""
    rng = np.random.default_rng(0)
    rows = []
    for scale, lr, decay in product(scales, lrs, decays):
        is_chosen = (lr, decay) == chosen
        for seed in (*tuning_seeds, *(range(4) if is_chosen or not tuning_seeds else ())):
            config = config_of(n_layers=4, depth_scale=scale, lr=lr, weight_decay=decay, seed=seed)
            role = "rejected" if not is_chosen else "tuning" if seed in tuning_seeds else "best"
            varied = [name for name, of in (("lr", lrs), ("weight_decay", decays)) if len(of) > 1]
            facts = {"tuned_fields": ",".join(varied), "tuned_by": "val_loss", "tuning": role}
            rows.append((config, {"val_loss": loss(config) + 0.01 * rng.standard_normal(), **facts}))
    return runs_frame(rows)


def loss(config):
    bowl = 0.05 * math.log2(config.lr / 0.004) ** 2 + 0.02 * math.log2(config.weight_decay / 0.1) ** 2
    return 3 + bowl - 0.3 * (config.depth_scale == "lns")


@pytest.mark.parametrize("decays", [(0.1,), (0.05, 0.1, 0.2)])
def test_the_curve_of_lr_stays_where_weight_decay_was_tuned_too(decays):
    """The baseline's lr is the highest tried, and the choice of lr is in the interval."""
    runs = tuned(loss, (0.001, 0.002, 0.004), decays, (0.004, 0.1))
    (found,) = (row for _, row in setting_effects(cells_of(runs, "val_loss")).iterrows())
    assert (found["verdict"], found["reason"]) == (
        "not shown",
        "the baseline's lr 0.004 is the highest tried: its optimum may lie beyond",
    )
    assert found["lr_part"] > found["seeds_part"] > 0 and found["seeds"] == 4


@pytest.mark.parametrize(("decays", "end"), [((0.05, 0.1), "highest"), ((0.1, 0.2), "lowest"), ((0.05, 0.1, 0.2), "")])
def test_a_second_field_at_the_end_of_its_grid_withholds_a_verdict_as_lr_does(decays, end):
    runs = tuned(lambda c: loss(c) + 0.1 * math.log2(c.lr / 0.002) ** 2, (0.001, 0.002, 0.004), decays, (0.002, 0.1))
    (found,) = (row for _, row in setting_effects(cells_of(runs, "val_loss")).iterrows())
    withheld = f"the baseline's weight_decay 0.1 is the {end} tried: its optimum may lie beyond"
    assert (found["verdict"], found["reason"]) == (("not shown", withheld) if end else ("lower", ""))


@pytest.mark.parametrize("best", [0.0, 0.1])
def test_a_rejected_value_is_no_result_where_0_was_tried(best):
    """At a rejected value the loss is .5 higher: no mean of results has any of it."""
    runs = tuned(
        lambda config: 3 + 0.5 * (config.weight_decay != best) - 0.3 * (config.depth_scale == "lns"),
        *((0.001,), (0.0, 0.05, 0.1, 0.2), (0.001, best)),
        tuning_seeds=(),
    )
    (found,) = (row for _, row in setting_effects(cells_of(runs, "val_loss")).iterrows())
    assert found["baseline_value"] == pytest.approx(3, abs=0.02) == found["fitted_baseline"]
    assert (found["verdict"], found["seeds"]) == ("lower", 4) and found["estimate"] == pytest.approx(-0.3, abs=0.03)
