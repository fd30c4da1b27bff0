"""The recipe finds what was planted, abstains from noise, says what it did not take, and writes a RunConfig."""

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import config_of, grid, runs_frame

from sparsedepth.config.load import build, parse_yaml, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.recipe.build_card import build_card, derive_card
from sparsedepth.recipe.card_text import stack_text, to_yaml, write_yaml
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.comparison_rows import comparison_rows
from sparsedepth.recipe.conclusion import rule_text, valid_for

AXES = {"depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1, 0.3], "n_kv_heads": [4, 1], "seed": [0, 1, 2]}


def sweep(loss, axes=AXES, sd=0.01, seed=0, **base):
    """A grid with val_loss = 3 + loss(config) + normal noise."""
    generator = np.random.default_rng(seed)
    return grid(axes, lambda config: {"val_loss": 3 + loss(config) + sd * generator.normal()}, **base)


def planted(config):
    return -0.05 * (config.depth_scale == "lns") - 0.03 * (config.weight_decay == 0.1)


def reasons(recipe):
    return {one.contrast.setting: one.refused for one in recipe.candidates}


def test_planted_effects_are_stacked_and_the_rest_keeps_its_baseline():
    recipe = derive(sweep(planted, seed=2))
    assert not recipe.abstained
    assert recipe.config == RunConfig(depth_scale="lns", weight_decay=0.1, n_kv_heads=4)
    assert reasons(recipe) == {
        "weight_decay=0.1": "",
        "weight_decay=0.3": "not distinguishable from the baseline",
        "n_kv_heads=1": "not distinguishable from the baseline",
        "depth_scale=lns": "",
    }
    assert recipe.grade == "C"
    assert stack_text(recipe).startswith("run together: against the baseline better: -0.0")
    assert "against the best single change, depth_scale=lns, " in stack_text(recipe)


def test_models_that_lose_to_a_bigram_table_earn_no_grade_above_d_and_the_first_line_says_so():
    runs = sweep(planted, seed=2)
    weak = derive(runs.assign(bigram_loss=1.0))
    assert (weak.grade, weak.abstained) == ("D", "") and weak.changes
    assert rule_text(derive_card(runs.assign(bigram_loss=1.0))).startswith(
        "No evidence about depth: the model is worse than a bigram table of"
    )
    strong = derive(runs.assign(bigram_loss=9.0))
    assert (strong.grade, strong.weakness) == ("C", "") and rule_text(derive_card(runs)).startswith(
        "At 12 layers: use "
    )


def test_a_recommended_setting_whose_own_runs_lose_to_a_bigram_table_earns_no_grade_above_d():
    """LNS alone is weak, half of all runs: no majority."""
    runs = sweep(planted, seed=2)
    recipe = derive(runs.assign(bigram_loss=np.where(runs["depth_scale"] == "lns", 1.0, 9.0)))
    assert recipe.changes and recipe.grade == "D"
    assert recipe.weakness.startswith("with depth_scale=lns, the model is worse than a bigram table")
    baseline = (runs["depth_scale"] == "none") & (runs["weight_decay"] == 0.0) & (runs["n_kv_heads"] == 4)
    recipe = derive(runs.assign(bigram_loss=np.where(baseline, 1.0, 9.0)))
    assert recipe.grade == "D" and recipe.weakness.startswith("at the baseline, the model is worse than a bigram table")


def test_a_degenerate_objective_is_no_ground_for_a_recipe():
    runs = sweep(planted, seed=2)
    score = runs["val_loss"].max() - runs["val_loss"] + 1.0
    sound = derive(runs.assign(causal_score=score, causal_score_largest_share=0.2), objective="causal_score")
    carried = derive(runs.assign(causal_score=score, causal_score_largest_share=0.9), objective="causal_score")
    assert sound.changes and not sound.abstained
    assert not carried.changes and "one block carries more than half of it" in carried.abstained


def test_the_best_of_two_good_settings_is_taken():
    recipe = derive(sweep(lambda config: -0.1 * config.weight_decay / 0.3))
    assert recipe.config == RunConfig(weight_decay=0.3)
    assert reasons(recipe)["weight_decay=0.1"] == "weight_decay=0.3 does better"
    assert stack_text(recipe) == "one change, nothing to combine"


def test_a_tuned_field_takes_the_value_that_was_best_for_what_is_chosen():
    """Both changes had their best loss at another lr; without a run of the whole, one of them alone is the recipe."""
    runs = sweep(planted, seed=2).assign(tuned_fields="lr", tuning="best")
    scaled, decayed = runs["depth_scale"] == "lns", runs["weight_decay"] == 0.1
    runs.loc[scaled | decayed, "lr"] = 2e-3
    runs.loc[scaled & decayed, "lr"] = 4e-3
    whole = derive(runs).config
    assert whole is not None and (whole.depth_scale, whole.weight_decay, whole.lr) == ("lns", 0.1, 4e-3)
    apart = derive(runs[~(scaled & decayed)])
    assert apart.config is not None
    assert (apart.config.depth_scale, apart.config.weight_decay, apart.config.lr) == ("lns", 0.0, 2e-3)
    assert reasons(apart)["weight_decay=0.1"].startswith("not run together with depth_scale=lns")
    nothing = derive(runs.assign(val_loss=3.0)).config
    assert nothing is not None and nothing.lr == RunConfig().lr


def test_the_luckiest_run_does_not_decide():
    runs = sweep(planted)
    unlucky = (
        (runs["n_kv_heads"] == 1) & (runs["seed"] == 0) & (runs["weight_decay"] == 0) & (runs["depth_scale"] == "none")
    )
    runs.loc[unlucky, "val_loss"] = 1.0
    recipe = derive(runs)
    assert recipe.config is not None and recipe.config.n_kv_heads == 4
    assert reasons(recipe)["n_kv_heads=1"] == "not distinguishable from the baseline"


def test_the_direction_comes_from_the_objective():
    noise = iter(np.random.default_rng(0).normal(size=999))
    runs = grid(AXES, lambda config: {"usefulness": 0.5 + 0.25 * (config.depth_scale == "lns") + 0.01 * next(noise)})
    assert derive(runs, objective="usefulness").config == RunConfig(depth_scale="lns", weight_decay=0.0)
    worse = derive(sweep(lambda config: 0.05 * (config.depth_scale == "lns")))
    assert worse.abstained
    assert reasons(worse)["depth_scale=lns"] == "worse: val_loss higher"


def test_pure_noise_yields_no_recipe():
    """60 sweeps of noise with shared seed effects: at least 90% abstain (Holm aims at 95% or more)."""
    generator = np.random.default_rng(1)
    axes = {"weight_decay": [0.0, 0.1, 0.3, 1.0], "seed": [0, 1, 2, 3]}
    runs = grid(axes, lambda config: {"val_loss": 0.0})
    abstained = 0
    for _ in range(60):
        shared = 0.01 * generator.normal(size=4)
        runs["val_loss"] = 3 + shared[runs["seed"]] + 0.01 * generator.normal(size=len(runs))
        recipe = derive(runs)
        abstained += bool(recipe.abstained)
        assert bool(recipe.abstained) == (recipe.config == RunConfig(weight_decay=0.0))
    assert abstained / 60 >= 0.90


def test_many_settings_need_more_evidence():
    """p of about .026: of one setting alone it stands, of one among four it is adjusted."""
    wiggle = [0.0, 0.028, 0.014]
    cells = [(0.0, 3.0), (0.3, 2.95)]
    one = runs_frame(
        (RunConfig(weight_decay=w, seed=s), {"val_loss": y + wiggle[s] * (w > 0)}) for w, y in cells for s in range(3)
    )
    (only,) = derive(one).candidates
    assert only.recommended and only.contrast.p_holm is not None and 0.02 < only.contrast.p_holm < 0.05
    extra = runs_frame(
        (RunConfig(weight_decay=0.0, lr=lr, seed=s), {"val_loss": 3.0 + (0.01, -0.01, 0.002)[s]})
        for lr in (2e-3, 3e-3, 4e-3)
        for s in range(3)
    )
    among_four = derive(pd.concat([one, extra], ignore_index=True))
    among = {candidate.contrast.setting: candidate.contrast for candidate in among_four.candidates}
    assert among["weight_decay=0.3"].n_tested == 4
    assert among["weight_decay=0.3"].p_holm > among["weight_decay=0.3"].effect.p


def test_it_abstains_with_a_reason():
    one_seed = derive(sweep(planted, {**AXES, "seed": [0]}))
    assert one_seed.grade == "D"
    assert one_seed.abstained == "no configuration was run with two seeds: there is no noise floor"
    assert one_seed.config == RunConfig(weight_decay=0.0)

    elsewhere = derive(sweep(planted), depth=24)
    assert elsewhere.place == "extrapolation"
    assert elsewhere.abstained == "only n_layers=12 was run, so how effects change with depth is unknown"
    assert elsewhere.config == RunConfig(n_layers=24, weight_decay=0.0)

    nothing = derive(sweep(planted).assign(outcome="diverged"))
    assert (nothing.abstained, nothing.config) == ("no finished run", None)
    lost = sweep(planted).assign(outcome="diverged")
    with pytest.raises(ValueError, match="no configuration to write"):
        to_yaml(build_card(lost, nothing))

    same = derive(sweep(planted, {"seed": [0, 1, 2]}))
    assert same.abstained.endswith("nothing was varied")
    assert (
        derive(sweep(planted), objective="usefulness").abstained
        == "usefulness was measured in no finished run at n_layers=12"
    )
    alone = rule_text(derive_card(sweep(planted, {**AXES, "seed": [0]})))
    assert alone == f"At 12 layers: no recommendation: {one_seed.abstained}."
    assert rule_text(build_card(lost, nothing)) == "No recommendation: no finished run."


def test_every_depth_has_its_own_recipe_and_the_deepest_is_the_default():
    def loss(config):
        return -0.05 * (config.depth_scale == "lns" and config.n_layers == 24)

    runs = sweep(loss, {"n_layers": [12, 24], **AXES})
    assert derive(runs).config == RunConfig(n_layers=24, depth_scale="lns", weight_decay=0.0)
    assert derive(runs, depth=12).abstained


DEPTHS = {"n_layers": [12, 16, 24], **AXES}


def test_a_depth_that_was_not_run_is_extrapolated_from_the_trend():
    """LNS gains 0.05 per doubling of depth from 12 layers on: nothing at 12, 0.1 at 48."""
    runs = sweep(lambda config: -0.05 * np.log2(config.n_layers / 12) * (config.depth_scale == "lns"), DEPTHS)
    recipe = derive(runs, depth=48)
    assert recipe.place == "extrapolation" and rule_text(derive_card(runs, depth=48)).startswith(
        "At 48 layers (extrapolation from other depths): use depth_scale=lns instead of depth_scale=none (lr "
    )
    assert recipe.config == RunConfig(n_layers=48, depth_scale="lns", weight_decay=0.0)
    (change,) = recipe.changes
    assert change.contrast.effect.covers(-0.1) and change.contrast.n_layers == 48
    assert derive(runs, depth=20).place == "interpolation"
    flat = sweep(lambda config: 0.0, DEPTHS)
    assert "val_loss unknown: no run at 48 layers" in rule_text(derive_card(flat, depth=48))
    near, far = (derive(runs, depth).candidates[-1].contrast.effect for depth in (20, 48))
    assert near.hi - near.lo < far.hi - far.lo


def test_a_depth_that_was_not_run_takes_the_tuned_value_of_the_nearest_below():
    runs = sweep(lambda config: -0.05 * (config.depth_scale == "lns"), DEPTHS).assign(tuned_fields="lr", tuning="best")
    runs["lr"] = runs["n_layers"].map({12: 4e-3, 16: 2e-3, 24: 1e-3})
    for depth, lr in ((8, 4e-3), (14, 4e-3), (20, 2e-3), (48, 1e-3)):
        assert derive(runs, depth).config.lr == lr, depth


def test_a_budget_says_nothing_of_how_large_the_effects_of_choices_are():
    """tau^2 of one effect is its square less that of its error; a width that gains 1 would make every effect likely."""
    axes = {"d_ff": [176, 704], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}
    recipe = derive(sweep(lambda config: -1.0 * (config.d_ff == 704) - 0.05 * (config.depth_scale == "lns"), axes))
    (lns,) = (one for one in recipe.candidates if one.contrast.setting == "depth_scale=lns")
    effect = lns.contrast.effect
    assert recipe.spread == pytest.approx((effect.mean**2 - effect.error**2) ** 0.5)
    assert lns.reliability == pytest.approx(1 - (effect.error / effect.mean) ** 2)


def test_an_effect_that_turns_with_depth_is_not_extrapolated_by_its_mean():
    """Good at 12 and 16, bad at 24: on average good, and at 48 worse."""
    gain = {12: -0.06, 16: -0.03, 24: 0.02}
    runs = sweep(lambda config: gain[config.n_layers] * (config.depth_scale == "lns"), DEPTHS)
    assert reasons(derive(runs, depth=48))["depth_scale=lns"] == "worse: val_loss higher"


@pytest.mark.parametrize(("n_diverged", "scale"), [(1, "lns"), (2, "none")])
def test_one_diverged_run_is_counted_and_two_more_than_the_baseline_has_remove_a_setting(n_diverged, scale):
    runs = sweep(planted)
    alone = (
        (runs["depth_scale"] == "lns") & (runs["weight_decay"] == 0) & (runs["n_kv_heads"] == runs["n_kv_heads"].max())
    )
    runs.loc[runs.index[alone][:n_diverged], ["outcome", "val_loss"]] = ["diverged", None]
    recipe = derive(runs)
    assert recipe.n_diverged == n_diverged
    assert recipe.config.depth_scale == scale


def test_a_setting_that_spends_more_of_what_is_matched_is_not_taken():
    runs = sweep(
        lambda config: -0.1 * (config.n_experts > 0), {"n_experts,top_k": [(0, None), (8, 2)], "seed": [0, 1, 2]}
    )
    assert derive(runs, matched="params_total").config == RunConfig(n_experts=8, top_k=2)
    runs.loc[runs["n_experts"] == 8, "params_total"] *= 3
    assert reasons(derive(runs, matched="params_total")) == {
        "n_experts=8, top_k=2": "it spends more params_total than the baseline"
    }
    assert not derive(runs, matched="params_active").abstained


def test_width_is_a_budget_and_no_recipe():
    runs = sweep(lambda config: -0.1 * (config.d_ff == 704), {"d_ff": [176, 704], "seed": [0, 1, 2]})
    assert reasons(derive(runs)) == {"d_ff=704": "a budget, no recipe"}


def test_other_data_are_no_remedy_even_where_a_choice_moves_with_them():
    """The easier text is read in the shorter context, which names the two; LNS lowers the loss on either."""

    def loss(config):
        return -1.0 * (config.corpus == "easy.txt") - 0.5 * (config.depth_scale == "lns")

    data = {"corpus,seq_len": [("hard.txt", 256), ("easy.txt", 512)], "seed": [0, 1, 2]}
    alone = derive(sweep(loss, data).assign(val_loss_common=1.0), objective="val_loss")
    assert (alone.candidates, alone.changes, alone.grade) == ((), (), "C")
    assert alone.abstained == "the runs at n_layers=12 differ only in their data (corpus), which is not a remedy"
    runs = sweep(loss, {**data, "depth_scale": ["none", "lns"]})
    crossed = derive(runs)
    assert [candidate.contrast.setting for candidate in crossed.candidates] == ["depth_scale=lns"] and crossed.changes
    best, baseline = comparison_rows(runs, crossed)
    assert (best.parts, best.setting, crossed.baseline.corpus) == (
        ("recommended", "best measured"),
        "depth_scale=lns",
        "hard.txt",
    )
    assert (baseline.n_seeds, baseline.mean - best.mean) == (3, pytest.approx(0.5, abs=0.03))  # of one text
    tasks = {"corpus": ("task:k_hop", "task:state_tracking"), "task_group": ("A5", "None")}
    named = valid_for(crossed.domain.model_copy(update={"values": tasks}))
    assert named.startswith("task k_hop, state_tracking of A5, width 64")


def test_a_longer_context_is_not_judged_by_its_own_loss():
    runs = sweep(lambda config: -0.1 * (config.seq_len == 512), {"seq_len": [256, 512], "seed": [0, 1, 2]})
    runs["val_loss_common"] = runs["val_loss"]
    assert "use val_loss_common" in reasons(derive(runs))["seq_len=512"]
    of_own = derive(runs, objective="val_loss_common")  # without eval_seq_len it is val_loss again
    assert not of_own.changes and "one eval_seq_len" in reasons(of_own)["seq_len=512"]
    of_one = derive(runs.assign(eval_seq_len=256), objective="val_loss_common")
    assert of_one.config == RunConfig(seq_len=512, eval_seq_len=256)


def one_at_a_time(stack_loss):
    """Baseline, two single changes, and their stack where `stack_loss` is given."""
    cells = [
        ({"weight_decay": 0.0}, 3.0),
        ({"weight_decay": 0.3}, 2.9),
        ({"weight_decay": 0.0, "depth_scale": "lns"}, 2.8),
    ]
    if stack_loss is not None:
        cells.append(({"weight_decay": 0.3, "depth_scale": "lns"}, stack_loss))
    wiggle = (0.0, 0.0005, -0.0005, 0.001)
    return runs_frame(
        (config_of(seed=seed, **cell), {"val_loss": loss + wiggle[(seed + i) % 4]})
        for i, (cell, loss) in enumerate(cells)
        for seed in range(4)
    )


def test_a_stack_that_was_not_run_is_called_that():
    recipe = derive(one_at_a_time(None))
    assert recipe.config == RunConfig(weight_decay=0.0, depth_scale="lns")
    together = "not run together with depth_scale=lns: two changes that were tested apart are no recipe"
    assert reasons(recipe)["weight_decay=0.3"] == together


def test_a_stack_that_adds_up_is_confirmed():
    recipe = derive(one_at_a_time(2.7))
    assert recipe.config == RunConfig(weight_decay=0.3, depth_scale="lns")
    assert stack_text(recipe).count("better: ") == 2
    assert recipe.stack.against_baseline is not None and recipe.stack.against_best is not None


def test_a_stack_worse_than_its_best_part_falls_back_to_that_part():
    """Main effects: decay -.1 and +.04, -.03 on average over 8 pairs; the pair of both is worse than LNS alone."""
    runs = one_at_a_time(2.81)
    extra = runs_frame(
        (
            RunConfig(seed=seed, weight_decay=decay, n_kv_heads=kv),
            {"val_loss": 3.0 - 0.1 * (decay > 0) + 0.001 * (seed % 2)},
        )
        for kv in (1, 2)
        for decay in (0.0, 0.3)
        for seed in range(4)
    )
    recipe = derive(pd.concat([runs, extra], ignore_index=True))
    assert "against the best single change, depth_scale=lns, worse: +0.01" in stack_text(recipe)
    assert recipe.config == RunConfig(weight_decay=0.0, depth_scale="lns")
    assert reasons(recipe)["weight_decay=0.3"] == "worse combined with depth_scale=lns than depth_scale=lns alone"


def test_the_yaml_is_the_run_config_with_its_evidence(tmp_path):
    card = derive_card(sweep(planted, corpus="hub:a b\u2028norm: post"))
    recipe = card.recipe
    write_yaml(tmp_path / "recipe.yaml", card)
    assert build(RunConfig, read_yaml(tmp_path / "recipe.yaml"), "recipe") == recipe.config
    text = to_yaml(card)
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    for wanted in (
        "use weight_decay=0.1 instead of weight_decay=0",
        "Valid for: corpus hub:a b\\u2028norm: post, width 64",
        "Do (shown to help):",
        "Grade C: in-sample, several seeds; no held-out test, which grades A and B need",
        *recipe.run_ids,
    ):
        assert wanted in " ".join(comments.replace("#", " ").split()), wanted
    assert not any(line.startswith("seed:") for line in text.replace("# ", "").splitlines())


def test_a_stack_is_judged_by_noise_that_the_candidates_lend():
    """Four seeds alone have 3 degrees of freedom."""
    stack = derive(one_at_a_time(2.7)).stack
    assert stack.against_baseline.effect.df > 3 and stack.against_best.effect.df > 3


def test_the_yaml_fills_sizes_that_follow():
    axes = {"n_experts,top_k": [(0, None), (8, 2), (8, 4)], "seed": [0, 1, 2]}
    card = derive_card(sweep(lambda config: -0.1 * (config.top_k == 4), axes))
    recipe, again = card.recipe, build(RunConfig, parse_yaml(to_yaml(card), "recipe"), "recipe")
    assert again == recipe.config == RunConfig(n_experts=8, top_k=4)
    assert again.d_expert == 44  # d_ff 176 / 4


def test_a_combination_that_cannot_be_built_is_refused_by_name():
    """LNS and scaled init both help alone; together they were not asked for, and RunConfig refuses them."""
    cells = [({}, 3.0), ({"depth_scale": "lns"}, 2.8), ({"init": "scaled"}, 2.9)]
    runs = runs_frame(
        (config_of(seed=seed, **cell), {"val_loss": loss + 0.001 * ((seed + i) % 3)})
        for i, (cell, loss) in enumerate(cells)
        for seed in range(4)
    )
    recipe = derive(runs)
    assert [one.contrast.setting for one in recipe.changes] == ["depth_scale=lns"]
    assert recipe.config == RunConfig(depth_scale="lns")
    assert reasons(recipe)["init=scaled"].startswith("cannot be combined with the other changes: ")


def test_the_same_rows_in_another_order_give_the_same_recipe():
    runs = sweep(planted)
    assert to_yaml(derive_card(runs)) == to_yaml(derive_card(runs.sample(frac=1, random_state=3)))


def test_wrong_questions_are_refused():
    runs = sweep(planted)
    with pytest.raises(ValueError, match=r"'steps' has no better direction \(optimiser steps taken\)"):
        derive(runs, objective="steps")
    with pytest.raises(ValueError, match="there is no measured quantity 'stops'"):
        derive(runs, objective="stops")
    with pytest.raises(ValueError, match="--matched 'time' is no basis of comparison"):
        derive(runs, matched="time")
    with pytest.raises(ValueError, match=r"no run has the baseline weight_decay=0\.2"):
        derive(runs, baselines={"weight_decay": 0.2})
    assert derive(runs, baselines={"weight_decay": 0.1}).config == RunConfig(weight_decay=0.1, depth_scale="lns")
