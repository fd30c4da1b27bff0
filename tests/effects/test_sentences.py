"""Sentences say what was measured, and what was not."""

from support.runs_frame import grid, knob_of

from sparsedepth.effects.chain import Link
from sparsedepth.effects.contrast import contrasts
from sparsedepth.effects.sentences import contrast_sentence, link_text


def runs_with(outcome, depths=(12,)):
    axes = {"n_layers": depths, "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}
    return grid(axes, lambda config: outcome(config.depth_scale == "lns", config.seed))


def only(runs, outcome):
    (found,) = contrasts(runs, knob_of(runs, "depth_scale"), outcome)
    return found


def test_a_distinguishable_effect():
    runs = runs_with(lambda lns, seed: {"val_loss": 3 + 0.01 * seed - (0.1 + 0.001 * seed) * lns})
    assert contrast_sentence(only(runs, "val_loss")) == (
        "n_layers=12, depth_scale=lns vs depth_scale=none: val_loss lower: -0.101 nat/token (95% interval -0.103 to "
        "-0.0985); 3 pairs, 3 seeds, 2 df, noise floor 0.0216. Matched: tokens, params_total, params_active, flops"
    )


def test_variance_is_told_as_a_ratio_and_an_unmatched_basis_is_named():
    runs = runs_with(
        lambda lns, seed: {
            "residual_variance_last": (100 + seed + 0.01 * lns * (seed - 1)) / (1 + lns),
            "train_flops": 1e9 * (1 + lns),
        }
    )
    text = contrast_sentence(only(runs, "residual_variance_last"))
    assert "residual_variance_last lower: x0.5 (95% interval x0.5 to x0.5)" in text
    assert text.endswith("Matched: tokens, params_total, params_active; setting / baseline: flops 2")


def test_divergence_and_missing_numbers_are_said():
    runs = runs_with(lambda lns, seed: {"val_loss": 3.0 - lns, "causal_score": None})
    runs.loc[(runs["depth_scale"] == "lns") & (runs["seed"] > 0), "outcome"] = "diverged"
    assert (
        "(too few for an interval); too few seeds to detect any effect; 1 pair, 1 seed, no noise floor (one "
        "seed); diverged: 2 of the setting, 0" in contrast_sentence(only(runs, "val_loss"))
    )
    unknown = contrast_sentence(only(runs, "causal_score"))
    assert unknown.endswith(
        "causal_score unknown; diverged: 2 of the setting, 0 of the baseline; not measured in 1 pair"
    )


def test_links():
    counts = {"n_runs": 24, "n_units": 8, "n_missing": 0, "n_diverged": 1}
    numbers = {"rho": -0.5, "lo": -0.8, "hi": -0.1, "p": 0.01, "p_holm": 0.03}
    one = Link(cause="usefulness", effect="val_loss", scope="pooled", **numbers, **counts)
    assert link_text(one) == (
        "pooled: associated: rho -0.50 (95% interval -0.80 to -0.10), Holm p 0.03; 24 runs of 8 combinations; "
        "excluded: 0 not measured, 1 diverged"
    )
