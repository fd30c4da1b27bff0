"""'associated', 'predicts' and 'causes' are earned, each by its own evidence."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.runs_frame import grid

from sparsedepth.effects.chain import LinkEvidence, Skill, chain_evidence, interventions, is_unchanged, skill

LINK = ("residual_variance_last", "usefulness_loss_increase")
AXES = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1, 0.3], "seed": range(3)}


def evidence(runs, link=LINK):
    """The evidence for one link, and p-values over all links of the runs."""
    (found,) = [one for one in chain_evidence(runs) if (one.within.cause, one.within.effect) == link]
    return found


@cache
def found_by_lns():
    return evidence(runs_with())


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
    found = found_by_lns()
    assert [tried.effect.n_layers for tried in found.interventions] == [12, 24]
    for tried in found.interventions:
        assert (tried.moved.verdict, tried.effect.verdict, tried.is_alone) == ("lower", "higher", True)
    assert found.verdict == "causes"


def test_an_intervention_that_moves_something_else_too_shows_nothing():
    found = evidence(runs_with(sparser=0.1))
    assert [one.is_alone for one in found.interventions] == [False, False]
    assert found.verdict == "predicts"
    unmeasured = runs_with().assign(attention_sparsity_rel=np.nan)
    assert not any(one.is_alone for one in interventions(unmeasured)(*LINK))


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
    assert evidence(runs).verdict == "not distinguishable"
    assert [(one.within.cause, one.within.effect) for one in chain_evidence(runs)] == [
        ("weight_sparsity", "residual_variance_last"),
        ("attention_sparsity_rel", "residual_variance_last"),
        LINK,
    ]


def test_every_scope_is_there():
    runs = runs_with().assign(val_loss=np.arange(36) % 5, lr=1.0 + np.arange(36) % 3)
    scopes = [one.scope for one in evidence(runs).links]
    assert scopes == ["pooled", "within depth", "within depth, given lr", "within depth, given val_loss"]
    to_loss = evidence(runs, ("usefulness_loss_increase", "val_loss"))
    assert [one.scope for one in to_loss.links] == scopes[:3]


def test_the_verdict_of_a_link_needs_its_correlation_within_depth_and_a_skill_that_is_sure():
    """Depth moves both alike, which makes a pooled correlation and no link."""
    sure, unsure = (Skill(value=0.5, lo=lo, hi=0.9, depths=(12, 24)) for lo in (0.1, -0.1))
    pooled, within, *_ = found_by_lns().links

    def verdict(skill, **fields):
        return LinkEvidence((pooled, replace(within, **fields)), skill, ()).verdict

    assert [verdict(each) for each in (sure, unsure, sure._replace(lo=None))] == ["predicts"] + 2 * ["associated"]
    assert verdict(sure, lo=-0.1, hi=0.9) == "not distinguishable"


def test_an_intervention_that_was_tried_at_many_depths_needs_more():
    """Adjusted p .02 over the settings of a depth is no proof at one of three."""
    (tried, _) = found_by_lns().interventions
    tried = tried._replace(effect=tried.effect.model_copy(update={"p_adjusted": 0.02}))
    assert tried.confirms(2) and not tried.confirms(3)
    not_shown = tried._replace(effect=tried.effect.model_copy(update={"verdict": "lr decides"}))
    assert not not_shown.confirms(1)


def test_a_control_is_unchanged_if_its_whole_interval_is_within_a_tenth_of_the_baseline():
    """Of a baseline of 0.5 that is .05; of a ratio ln 1.1 = .0953, whatever the baseline."""
    control = found_by_lns().interventions[0].controls[0]

    def is_kept(mean, half, **fields):
        interval = {"estimate": mean, "lo": mean - half, "hi": mean + half}
        return is_unchanged(control.model_copy(update=interval | fields))

    share, ratio = {"unit": "share", "baseline_value": 0.5}, {"unit": "ln ratio", "baseline_value": 50.0}
    assert is_kept(0.0, 0.049, **share) and is_kept(-0.04, 0.009, **share)
    assert not is_kept(0.0, 0.051, **share) and not is_kept(-0.04, 0.011, **share) and not is_kept(0.04, 0.011, **share)
    assert is_kept(0.0, 0.095, **ratio) and not is_kept(0.0, 0.096, **ratio)
    assert not is_kept(0.0, 0.0, baseline_value=None)


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

    found = evidence(grid(axes, outcome))
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
