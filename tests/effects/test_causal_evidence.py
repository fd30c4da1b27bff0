"""'associated', 'predicts' and 'causes' are earned, each by its own evidence."""

import numpy as np
import pytest
from support.runs_frame import grid

from sparsedepth.effects.causal_evidence import ChainRuns, chain_evidence, interventions, link_evidence, skill

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
