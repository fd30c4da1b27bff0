"""`--baseline`: effects and depth with a setting in the baseline's place, in worlds where LNS alone makes depth pay."""

import numpy as np
import pytest
from support.runs_frame import grid

from sparsedepth.effects.cells import BASELINE, cells_of, changes_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.report.answers import depth_answer, variance_answer

DEPTHS = (4, 16)
LNS = "depth_scale=lns"


def world(gain=0.3, tokens=(32768, 8192), **base):
    """16 layers have the loss of 4, and with LNS `gain` less; two key/value heads change nothing. Each depth has its
    tokens, at equal FLOPs."""
    rng = np.random.default_rng(0)

    def outcome(config):
        loss = 3 - gain * (config.depth_scale == "lns") * (config.n_layers == 16) + 0.01 * rng.standard_normal()
        variance = (0.1 if config.depth_scale == "lns" else 1.0) * rng.lognormal(0, 0.05)
        return {"val_loss": loss, "residual_variance_last": variance, "needed_layers": 4.0, "usefulness": 0.5}

    axes = {"n_layers,train_tokens": zip(DEPTHS, tokens, strict=True), "depth_scale": ["none", "lns"]}
    return grid(
        axes | {"n_kv_heads": [4, 2], "seed": range(6)},
        outcome,
        n_heads=4,
        d_model=32,
        batch_tokens=1024,
        seq_len=128,
        **base,
    )


def found(runs, baseline, outcome="val_loss"):
    return effects_frame(cells_of(runs, outcome, baseline=changes_of(runs, baseline))).set_index("setting")


def test_depth_pays_with_the_setting_that_makes_it_pay_and_not_without():
    runs = world()
    usual, asked = (found(runs, name).loc["n_layers=16"] for name in ("", LNS))
    assert (usual["verdict"], asked["verdict"]) == ("not shown", "lower")
    assert asked["estimate"] == pytest.approx(-0.3, abs=0.03)
    usual, asked = (depth_answer(cells_of(runs, "val_loss", baseline=changes_of(runs, name))) for name in ("", LNS))
    assert "16 layers are worth their cost" in asked.sentence and "are worth their cost" not in usual.sentence


def test_an_effect_is_that_of_the_way_back():
    """The effect of leaving LNS out is minus that of LNS, with its interval; of the others it is that beside LNS."""
    there, back = (found(world(), name).query("n_layers == 16") for name in ("", LNS))
    of_lns, without = (rows[rows["question"] == "setting"] for rows in (there, back))
    effect, lo, hi = of_lns.loc[LNS, ["estimate", "lo", "hi"]]
    assert without.loc["depth_scale=none", ["estimate", "lo", "hi"]].tolist() == pytest.approx([-effect, -hi, -lo])
    beside = there[(there["question"] == "beside") & (there["context"] == LNS)].loc["n_kv_heads=2", "estimate"]
    assert without.loc["n_kv_heads=2", "estimate"] == pytest.approx(beside)


def test_the_variance_is_compared_with_that_of_the_setting():
    answer = variance_answer(cells_of(runs := world(), "val_loss", baseline=changes_of(runs, LNS)))
    assert "depth_scale=none raise" in answer.sentence or "depth_scale=none raises" in answer.sentence


def test_of_branches_the_setting_of_several_fields_is_named_without_its_budget():
    """Two budgets of a trunk: the name in the table says nothing of tokens, and the answer is at the larger one."""
    runs = world(schedule="wsd")
    short = world(0.0, (8192, 2048), schedule="wsd")
    both = runs.assign(run_id="a" + runs["run_id"]).merge(short.assign(run_id="b" + short["run_id"]), how="outer")
    both["train_flops"] = both["n_layers"] * both["train_tokens"]
    name = f"n_kv_heads=2, {LNS}"
    answer = depth_answer(cells_of(both, "val_loss", baseline=changes_of(both, name)))
    assert "16 layers are worth their cost" in answer.sentence


@pytest.mark.parametrize("name", ["", BASELINE])
def test_the_baseline_may_be_named(name):
    runs = world()
    assert found(runs, name).equals(effects_frame(cells_of(runs, "val_loss")).set_index("setting"))


def test_a_setting_that_was_not_run_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"baseline 'depth_scale=ln' was not run; did you mean 'depth_scale=lns'\?"):
        changes_of(world(), "depth_scale=ln")
    with pytest.raises(ValueError, match=r"choose one of: baseline; depth_scale=lns; n_kv_heads=2"):
        changes_of(world(), "experts")
