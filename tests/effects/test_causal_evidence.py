"""'associated', 'predicts' and 'causes' are earned, each by its own evidence."""

from dataclasses import replace

import numpy as np
import pytest
from support.runs_frame import grid, knob_of

from sparsedepth.effects.causal_evidence import (
    ChainRuns,
    Skill,
    chain_evidence,
    interventions,
    is_unchanged,
    link_between,
    link_evidence,
    link_verdict,
    skill,
)
from sparsedepth.effects.contrast import contrasts

LINK = ("residual_variance_last", "usefulness_loss_increase")
AXES = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1, 0.3], "seed": range(3)}


def runs_with(sparser=0.0, slope=1.0, at_24=1.0, noise=0.02, seed=0):
    """LNS halves the variance; the score falls with its logarithm, `at_24` times as fast at depth 24."""
    generator = np.random.default_rng(seed)

    def outcome(config):
        lns = config.depth_scale == "lns"
        log_variance = 4 - np.log(2) * lns - config.weight_decay + noise * generator.normal()
        turn = at_24 if config.n_layers == 24 else 1.0
        return {
            "residual_variance_last": float(np.exp(log_variance)),
            "weight_sparsity": 0.2 + sparser * lns + 0.001 * generator.normal(),
            "attention_sparsity_rel": 0.5 + 0.001 * generator.normal(),
            "usefulness_loss_increase": 5 - slope * turn * log_variance + noise * generator.normal(),
        }

    return grid(AXES, outcome)


def test_a_cause_was_moved_alone_and_its_effect_with_it():
    found = link_evidence(ChainRuns(runs_with()), *LINK)
    (tried,) = found.interventions
    assert (tried.moved.verdict, tried.effect.verdict, tried.is_alone) == ("lower", "higher", True)
    assert found.verdict == "causes"


def test_an_intervention_that_moves_something_else_too_shows_nothing():
    found = link_evidence(ChainRuns(runs_with(sparser=0.1)), *LINK)
    assert [one.is_alone for one in found.interventions] == [False]
    assert found.verdict == "predicts"
    unmeasured = runs_with().assign(attention_sparsity_rel=np.nan)
    assert not any(one.is_alone for one in interventions(ChainRuns(unmeasured), *LINK))


def test_depths_that_behave_alike_predict_each_other_and_opposite_ones_do_not():
    runs = runs_with(noise=0.1)
    alike = skill(runs, *LINK)
    assert alike.value is not None and alike.value > 0.5 and alike.lo is not None and alike.lo > 0
    opposite = skill(runs_with(at_24=-1.0), *LINK)
    assert opposite.value is not None and opposite.value < 0
    assert skill(runs[runs["n_layers"] == 12], *LINK).value is None


def test_skill_by_hand():
    """Perfectly ordered at both depths: the other depth's slope of ranks is 1, and nothing is left."""
    axes = {"n_layers": [12, 24], "weight_decay": [0.0, 0.1, 0.3], "seed": [0]}
    runs = grid(axes, lambda config: {"usefulness": config.weight_decay, "val_loss": config.weight_decay**2})
    assert skill(runs, "usefulness", "val_loss").value == pytest.approx(1.0)
    runs.loc[runs["n_layers"] == 24, "val_loss"] *= -1  # slopes 1 and -1: errors (2x)^2 against x^2
    assert skill(runs, "usefulness", "val_loss").value == pytest.approx(-3.0)


def test_noise_earns_no_word_and_what_was_not_measured_is_absent():
    runs = runs_with(slope=0.0, noise=1.0, seed=5)
    assert link_evidence(ChainRuns(runs), *LINK).verdict == "not distinguishable"
    assert [(one.cause, one.effect) for one in chain_evidence(runs)] == [
        ("weight_sparsity", "residual_variance_last"),
        ("attention_sparsity_rel", "residual_variance_last"),
        LINK,
    ]


def test_every_scope_is_there():
    runs = runs_with().assign(val_loss=3.0)
    assert [one.scope for one in link_evidence(ChainRuns(runs), *LINK).links] == [
        "pooled",
        "within depth",
        "within depth, given val_loss",
        "within weight_decay",
        "within depth_scale",
        "between knobs",
    ]


def test_the_verdict_of_a_link_needs_its_correlation_within_depth_and_a_skill_that_is_sure():
    """Depth moves both alike, which makes a pooled correlation and no link."""
    sure, unsure = (Skill(value=0.5, lo=lo, hi=0.9, depths=(12, 24)) for lo in (0.1, -0.1))
    pooled, within, *others = link_evidence(ChainRuns(runs_with(noise=0.1)), *LINK).links
    assert (pooled.scope, within.scope, within.verdict) == ("pooled", "within depth", "associated")
    assert link_verdict([pooled, within, *others], sure, ()) == "predicts"
    assert link_verdict([pooled, within, *others], unsure, ()) == "associated"
    assert link_verdict([pooled, within, *others], replace(sure, lo=None), ()) == "associated"
    of_depth = replace(within, scope="pooled"), replace(within, lo=-0.1, hi=0.9)
    assert link_verdict([*of_depth, *others], sure, ()) == "not distinguishable"


def test_a_control_is_unchanged_if_its_whole_interval_is_within_a_tenth_of_the_baseline():
    """Of a baseline of 0.5 that is .05; of a ratio ln 1.1 = .0953, whatever the baseline."""
    runs = runs_with()
    (contrast,) = contrasts(runs[runs["n_layers"] == 12], knob_of(runs, "depth_scale"), "attention_sparsity_rel")

    def is_kept(mean, half, **fields):
        return is_unchanged(
            replace(contrast, effect=replace(contrast.effect, mean=mean, lo=mean - half, hi=mean + half), **fields)
        )

    share, ratio = {"unit": "share", "baseline_mean": 0.5}, {"unit": "ln ratio", "baseline_mean": 50.0}
    assert is_kept(0.0, 0.049, **share) and is_kept(-0.04, 0.009, **share)
    assert not is_kept(0.0, 0.051, **share) and not is_kept(-0.04, 0.011, **share) and not is_kept(0.04, 0.011, **share)
    assert is_kept(0.0, 0.095, **ratio) and not is_kept(0.0, 0.096, **ratio)
    assert not is_unchanged(replace(contrast, baseline_mean=None))


def test_an_intervention_without_controls_is_no_evidence():
    """A gate on branches damps the variance, and nothing says what must stand still beside it."""
    generator = np.random.default_rng(0)
    axes = {
        "n_layers": [12, 24],
        "residual_gate": ["none", "layerscale"],
        "weight_decay": [0.0, 0.1, 0.3],
        "seed": range(3),
    }

    def outcome(config):
        log_variance = (
            4 - np.log(2) * (config.residual_gate != "none") - config.weight_decay + 0.02 * generator.normal()
        )
        return {"residual_variance_last": float(np.exp(log_variance)), "usefulness_loss_increase": 5 - log_variance}

    found = link_evidence(ChainRuns(grid(axes, outcome)), *LINK)
    assert (found.interventions, found.verdict) == ((), "predicts")


def test_the_interval_of_a_skill_by_hand():
    """The jackknife's over six combinations of settings, each left out at both depths: t(4) = 2.77645."""
    generator = np.random.default_rng(2)
    axes = {"n_layers": [12, 24], "weight_decay": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], "seed": [0]}
    runs = grid(axes, lambda c: {"usefulness": c.weight_decay, "val_loss": c.weight_decay + 0.2 * generator.normal()})
    found = skill(runs, "usefulness", "val_loss")
    without = np.array(
        [skill(runs[runs["weight_decay"] != decay], "usefulness", "val_loss").value for decay in axes["weight_decay"]]
    )
    half = 2.77645 * np.sqrt(5 / 6 * ((without - without.mean()) ** 2).sum())
    assert (found.lo, found.hi) == pytest.approx((found.value - half, found.value + half), rel=1e-5)


def test_changes_by_knobs_are_ranked_within_depth():
    """Of three settings those that move x more move y more at 12 layers, and less at 24: a correlation of 0."""
    moved = {"depth_scale": 1.0, "weight_decay": 2.0, "n_kv_heads": 3.0}
    axes = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1], "n_kv_heads": [4, 1]}

    def outcome(config):
        x = moved["depth_scale"] * (config.depth_scale == "lns") + moved["weight_decay"] * (config.weight_decay > 0)
        x += moved["n_kv_heads"] * (config.n_kv_heads == 1)
        n_moved = (config.depth_scale == "lns") + (config.weight_decay > 0) + (config.n_kv_heads == 1)
        return {"usefulness": x, "val_loss": x if config.n_layers == 12 else 4 * n_moved - x}

    found = link_between(ChainRuns(grid(axes, outcome)), "usefulness", "val_loss")
    assert (found.rho, found.n_units) == (pytest.approx(0.0), 3)
