"""Effects beside other settings, by hand; a planted remedy that makes another superfluous, and one that does not."""

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import grid

from sparsedepth.effects import summary, text_report
from sparsedepth.effects.sentences import estimate_text
from sparsedepth.effects.setting_interactions import setting_interactions

CROSSED = {"depth_scale": ["none", "lns"], "residual_gate": ["none", "layerscale"], "n_layers": [4, 12]}


def crossed(loss_of, n_seeds=3, **axes):
    """Runs of every combination; `loss_of(config, noise)`."""
    noise = np.random.default_rng(0).normal(0, 0.01, 1000)
    each = iter(noise)
    return grid(
        {**CROSSED, "seed": range(n_seeds), **axes}, lambda config: {"val_loss": loss_of(config, float(next(each)))}
    )


def superfluous(config, noise):
    """Either of the two lowers the loss by .3 at 12 layers; both together do no more."""
    remedied = config.depth_scale == "lns" or config.residual_gate == "layerscale"
    return 3.0 - 0.3 * (remedied and config.n_layers == 12) + noise


def test_an_interaction_by_hand():
    effect = {("none", 0): -0.3, ("none", 1): -0.2, ("layerscale", 0): -0.05, ("layerscale", 1): 0.05}

    def loss_of(config, noise):
        return 3.0 + config.seed + effect[config.residual_gate, config.seed] * (config.depth_scale == "lns")

    (interaction,) = setting_interactions(crossed(loss_of, 2, n_layers=[12]), "val_loss", "depth_scale")
    assert (interaction.setting, interaction.settings, interaction.n_layers) == (
        "depth_scale=lns",
        ("residual_gate=layerscale",),
        12,
    )
    assert interaction.alone.effect.mean == pytest.approx(-0.25)
    assert interaction.combined.effect.mean == pytest.approx(0.0)
    assert interaction.by_seed == pytest.approx((0.25, 0.25))
    assert interaction.effect.n == 2


def test_a_remedy_that_makes_another_superfluous_is_found_at_its_depth_alone():
    shallow, deep = setting_interactions(crossed(superfluous, 5), "val_loss")
    assert (shallow.n_layers, shallow.verdict) == (4, "not distinguishable")
    assert (deep.n_layers, deep.verdict) == (12, "higher")
    assert deep.effect.covers(0.3)
    assert deep.p_holm is not None and shallow.p_holm is not None


def test_two_remedies_that_add_up_have_no_interaction():
    def additive(config, noise):
        return 3.0 - 0.3 * (config.depth_scale == "lns") - 0.2 * (config.residual_gate == "layerscale") + noise

    family = setting_interactions(crossed(additive, 5), "val_loss")
    assert [each.verdict for each in family] == ["not distinguishable"] * 2


def test_two_settings_have_one_interaction_whichever_is_asked_for():
    runs = crossed(superfluous)
    both = setting_interactions(runs, "val_loss")
    of_gate = setting_interactions(runs, "val_loss", "residual_gate")
    of_scale = setting_interactions(runs, "val_loss", "depth_scale")
    assert len(both) == len(of_gate) == len(of_scale) == 2
    assert [each.effect.mean for each in of_gate] == pytest.approx([each.effect.mean for each in of_scale])
    assert [each.text for each in of_gate] == ["residual_gate=layerscale with depth_scale=lns"] * 2
    assert [each.text for each in of_scale] == ["depth_scale=lns with residual_gate=layerscale"] * 2


def test_seeds_that_only_one_side_has_do_not_count():
    runs = crossed(superfluous, 5)
    gone = (runs["seed"] > 2) & (runs["depth_scale"] == "lns") & (runs["residual_gate"] == "layerscale")
    for each in setting_interactions(runs[~gone], "val_loss"):
        assert len(each.by_seed) == each.alone.n_seeds == each.combined.n_seeds == 3


def test_where_nothing_was_run_alone_there_is_no_interaction():
    runs = crossed(superfluous)
    bare = (runs["depth_scale"] == "none") & (runs["residual_gate"] == "none")
    assert setting_interactions(runs[~bare], "val_loss") == []


def test_one_seed_shows_no_interaction():
    assert setting_interactions(crossed(superfluous, 1), "val_loss") == []


def test_what_tuning_explains_of_an_interaction_is_the_difference_of_both():
    """Combined .05 - .02, alone .01 - 0. All four sides add to the variance of the difference."""
    excess = {("lns", "none"): 0.01, ("lns", "layerscale"): 0.05, ("none", "layerscale"): 0.02, ("none", "none"): 0.0}
    runs = crossed(superfluous, n_layers=[12])
    regrets = [excess[key] for key in zip(runs["depth_scale"], runs["residual_gate"], strict=True)]
    runs = runs.assign(
        tuned_fields="lr", tuned_by="val_loss", tuning="best", tuning_variance=1e-6, tuning_df=5.0, tuned_values=None,
        tuned_rivals=None, tuning_n_seeds=3.0, tuning_excess=regrets,
    )  # fmt: skip
    (found,) = setting_interactions(runs, "val_loss", "depth_scale")
    assert found.expected_regret == pytest.approx(0.02) and len(found.extra_variances) == 4


def test_a_count_rounds_in_all_four_runs_of_an_interaction():
    """Variance 1/12 each."""
    runs = crossed(superfluous, n_layers=[12]).assign(needed_layers=lambda frame: 3.0 + frame["seed"])
    (found,) = setting_interactions(runs, "needed_layers", "depth_scale")
    assert found.least_sd == pytest.approx((4 / 12) ** 0.5)


def test_widths_are_no_settings_to_stand_beside():
    runs = crossed(lambda config, noise: 3.0 - config.d_model * (config.depth_scale == "lns"), d_model=[32, 64])
    family = setting_interactions(runs, "val_loss")
    assert {each.settings for each in family} == {("residual_gate=layerscale",)}
    assert [each.effect.mean for each in family] == pytest.approx([0.0, 0.0])
    assert {each.effect.n for each in family} == {6}


def test_a_knob_that_moves_a_size_as_well_is_one_to_stand_beside():
    def loss_of(config, noise):
        return 3.0 + (config.depth_scale == "lns") * (-0.5 if config.activation == "relu2" else -0.1)

    gated, squared = (
        crossed(loss_of, residual_gate=["none"], n_layers=[12], activation=[activation], d_ff=[d_ff])
        for activation, d_ff in [("swiglu", 64), ("relu2", 96)]
    )
    (interaction,) = setting_interactions(pd.concat([gated, squared], ignore_index=True), "val_loss", "depth_scale")
    assert interaction.text == "depth_scale=lns with d_ff=96, activation=relu2"
    assert interaction.alone.effect.mean == pytest.approx(-0.1)
    assert interaction.effect.mean == pytest.approx(-0.4)


def test_no_effect_is_shown_without_its_interval():
    """The table has the difference; the sentence both effects, too, moderated as those of every contrast."""
    runs = crossed(superfluous)
    table = "\n".join(summary.knob_lines(runs, "val_loss")).partition("Does an effect on val_loss depend on ")[2]
    assert "depth_scale=lns" in table and "n_layers  difference" in table
    sentences = "\n".join(text_report.knob_lines(runs, "val_loss")).partition("Do effects on")[2]
    for each in setting_interactions(runs, "val_loss"):
        alone, combined = (estimate_text(side.effect, side.unit) for side in (each.alone, each.combined))
        assert f"({combined}) minus effect alone ({alone})" in sentences
        assert all(
            side.effect.df > side.n_seeds - 1 and "95% interval" in alone for side in (each.alone, each.combined)
        )


def test_a_sweep_without_a_cross_prints_no_such_table():
    runs = crossed(superfluous, residual_gate=["none"])
    assert "depend on the other settings" not in "\n".join(summary.knob_lines(runs, "val_loss"))
