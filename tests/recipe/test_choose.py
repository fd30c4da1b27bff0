"""The recipe takes what the frame `effects` calls better, all else at the baseline, and says why it takes no other."""

from functools import cache

import numpy as np
import pandas as pd
from support.planted_recipes import AXES, cells, planted, sweep
from support.runs_frame import grid

from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.recipe.choose import Evidence, derive
from sparsedepth.words.effects import nothing_text, untuned_line

COSTS = {name: lambda runs: 1000.0 * runs["d_model"] for name in ("train_flops", "params_total", "params_active")}
FEW = {"depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}
DEPTHS = {"n_layers": [12, 16, 24], **FEW}


@cache
def four():
    """LNS and decay, alone and together: both help."""
    return sweep(planted, FEW, sd=0.005)


def refused(recipe):
    return {one.setting: one.refused for one in recipe.candidates}


def lists(recipe):
    return {one.setting: one.comparison for one in recipe.candidates if not one.is_combination}


def changes(recipe):
    return [one.setting for one in recipe.changes]


# Three lists


def test_planted_effects_are_on_their_lists_and_are_stacked():
    recipe = derive(sweep(lambda c: planted(c) + 0.06 * (c.n_kv_heads == 1), seed=2))
    assert not recipe.abstained and recipe.config == RunConfig(depth_scale="lns", weight_decay=0.1, n_kv_heads=4)
    assert lists(recipe) == {
        "weight_decay=0.1": "better",
        "weight_decay=0.3": "not shown",
        "n_kv_heads=1": "worse",
        "depth_scale=lns": "better",
    }
    assert set(changes(recipe)) == {"depth_scale=lns", "weight_decay=0.1"}
    assert recipe.effect.setting == "depth_scale=lns, weight_decay=0.1"
    assert recipe.effect.lo < -0.08 < recipe.effect.hi


def test_the_effects_are_rows_of_the_frame():
    runs = sweep(planted, {"n_layers": [8, 12], **FEW})
    frame = effects_frame(cells_of(runs, "val_loss"))
    rows = {row["setting"]: row for row in frame[frame["n_layers"] == 12].to_dict("records")[:3]}
    recipe = derive(runs)
    assert recipe.depth == 12 and len(recipe.candidates) == len(rows) == 3
    for one in recipe.candidates:
        row, effect = rows[one.setting], one.effect
        assert (effect.estimate, effect.lo, effect.hi) == (row["estimate"], row["lo"], row["hi"])
        assert (effect.p_adjusted, effect.detectable) == (row["p_adjusted"], row["detectable"])


def test_what_depends_on_another_setting_is_said_beside_what_it_does_alone():
    """LNS gains .3 alone and loses .2 beside experts."""
    moe = {"n_experts": 4, "top_k": 2}
    runs = cells([({}, 3.0), ({"depth_scale": "lns"}, 2.7), (moe, 2.9), ({"depth_scale": "lns", **moe}, 3.1)])
    recipe = derive(runs)
    assert changes(recipe) == ["depth_scale=lns"] and lists(recipe)["n_experts=4"] == "better"
    beside = {(e.setting, e.context): e.verdict for e in recipe.others if e.question == "beside"}
    assert beside["depth_scale=lns", "n_experts=4"] == "higher"
    assert refused(recipe)["n_experts=4"] == "no better together with depth_scale=lns than depth_scale=lns alone"


def test_the_direction_comes_from_the_objective():
    noise = iter(np.random.default_rng(0).normal(size=999))
    runs = grid(FEW, lambda config: {"usefulness": 0.5 + 0.25 * (config.depth_scale == "lns") + 0.01 * next(noise)})
    assert derive(runs, objective="usefulness").config == RunConfig(depth_scale="lns", weight_decay=0.0)


def test_pure_noise_yields_no_recipe():
    """12 sweeps of noise with shared seed effects: at least 10 abstain (the family's level is 5%)."""
    generator = np.random.default_rng(1)
    runs = grid({"weight_decay": [0.0, 0.1, 0.3, 1.0], "seed": [0, 1, 2, 3]}, lambda config: {"val_loss": 0.0})
    abstained = 0
    for _ in range(12):
        shared = 0.01 * generator.normal(size=4)
        runs["val_loss"] = 3 + shared[runs["seed"]] + 0.01 * generator.normal(size=len(runs))
        recipe = derive(runs)
        abstained += bool(recipe.abstained)
        assert bool(recipe.abstained) == (recipe.config == RunConfig(weight_decay=0.0))
    assert abstained >= 10


# What is not recommended though it is better


def test_the_best_of_two_values_of_a_field_is_taken():
    recipe = derive(sweep(lambda config: -0.1 * config.weight_decay / 0.3))
    assert recipe.config == RunConfig(weight_decay=0.3)
    assert refused(recipe)["weight_decay=0.1"] == "weight_decay=0.3 does better"


def test_two_settings_that_were_not_run_together_are_no_recipe():
    runs = cells([({"weight_decay": 0.0}, 3.0), ({"weight_decay": 0.3}, 2.9)])
    runs = pd.concat([runs, cells([({"weight_decay": 0.0, "depth_scale": "lns"}, 2.8)])], ignore_index=True)
    recipe = derive(runs)
    assert recipe.config == RunConfig(weight_decay=0.0, depth_scale="lns")
    assert recipe.untested == ("depth_scale=lns", "weight_decay=0.3")
    assert refused(recipe)["weight_decay=0.3"] == "not run together with depth_scale=lns"
    both = cells([({"weight_decay": 0.3, "depth_scale": "lns"}, 2.7)])
    together = derive(pd.concat([runs, both], ignore_index=True))
    assert together.config == RunConfig(weight_decay=0.3, depth_scale="lns") and together.untested is None


def test_a_combination_that_cannot_be_built_is_refused_by_name():
    """LNS and scaled init both help alone; together they were not asked for, and RunConfig refuses them."""
    recipe = derive(cells([({}, 3.0), ({"depth_scale": "lns"}, 2.8), ({"init": "scaled"}, 2.9)]))
    assert recipe.config == RunConfig(depth_scale="lns") and recipe.untested is None
    assert refused(recipe)["init=scaled"].startswith("cannot be combined with depth_scale=lns: ")


def test_imported_runs_that_this_program_cannot_build_are_refused_by_name():
    runs = cells([({}, 3.0), ({"n_heads": 2}, 2.9), ({"depth_scale": "lns"}, 2.8)])
    runs.loc[runs["n_heads"] == 2, "n_heads"] = 7
    recipe = derive(runs)
    assert recipe.config == RunConfig(depth_scale="lns")
    why = refused(recipe)["n_heads=7, n_kv_heads=2"]
    assert why.startswith("it cannot be built: recipe: n_heads=7 does not divide d_model=64 ")
    assert derive(runs.assign(n_heads=7)).abstained.startswith("its baseline cannot be built: recipe: n_heads=7 ")


def test_a_setting_that_spends_more_of_what_is_matched_is_not_taken():
    runs = cells([({}, 3.0), ({"n_experts": 8, "top_k": 2}, 2.9)])
    assert derive(runs, matched="params_total").config == RunConfig(n_experts=8, top_k=2)
    runs.loc[runs["n_experts"] == 8, "params_total"] *= 3
    kept = derive(runs, matched="params_total")
    assert kept.abstained == "n_experts=8 is better, but it spends more params_total than the baseline"
    assert derive(runs, matched="params_active").changes


def test_width_is_a_budget_and_no_recipe():
    runs = sweep(lambda config: -0.1 * (config.d_ff == 704), {"d_ff": [176, 704], "seed": [0, 1, 2]})
    assert refused(derive(runs)) == {"d_ff=704": "it is a budget, which no recipe recommends"}


def test_another_width_or_budget_tests_a_recipe():
    """LNS gains .1 at the smaller size; at the larger one .1 too, or it loses .1."""
    lns = {"depth_scale": "lns"}
    for large in ({"d_model": 128}, {"train_tokens": 4_194_304}):
        for loss, verdict in ((2.4, "lower"), (2.6, "higher")):
            recipe = derive(cells([({}, 3.0), (lns, 2.9), (large, 2.5), ({**large, **lns}, loss)]))
            assert recipe.config == RunConfig(**lns)
            assert [effect.verdict for effect in recipe.scales] == [verdict]


def test_other_data_are_no_remedy():
    """LNS lowers the loss on either text; the easier text is no choice."""

    def loss(config):
        return -1.0 * (config.corpus == "easy.txt") - 0.5 * (config.depth_scale == "lns")

    data = {"corpus": ["hard.txt", "easy.txt"], "seed": [0, 1, 2]}
    alone = derive(sweep(loss, data))
    assert (alone.candidates, alone.changes) == ((), ())
    assert alone.abstained == "the runs differ only in their data (corpus), which is not a remedy"
    crossed = derive(sweep(loss, {**data, "depth_scale": ["none", "lns"]}))
    assert changes(crossed) == ["depth_scale=lns"] and len(crossed.candidates) == 1


def test_what_changes_beside_a_setting_without_being_named_is_no_remedy():
    """As from two folders: LNS was run at another width, on another text, or at a width solved for equal FLOPs."""
    lns = {"depth_scale": "lns"}
    wider = derive(cells([({}, 3.0), ({**lns, "d_model": 128, "d_ff": 344}, 2.5)]).assign(**COSTS))
    assert refused(wider) == {"depth_scale=lns": "d_ff and d_model differ too, a budget that no recipe recommends"}
    same_cost = cells([({}, 3.0), ({**lns, "d_model": 128, "d_ff": 344}, 2.5)]).assign(**COSTS | {"train_flops": 1e9})
    assert changes(derive(same_cost)) == ["depth_scale=lns"]
    easier = derive(cells([({}, 3.0), ({**lns, "corpus": "easy.txt"}, 2.5)]))
    assert (easier.candidates, easier.changes) == ((), ()) and "differ only in their data (corpus)" in easier.abstained


def test_a_longer_context_is_not_judged_by_its_own_loss():
    runs = sweep(lambda config: -0.1 * (config.seq_len == 512), {"seq_len": [256, 512], "seed": [0, 1, 2]})
    runs["val_loss_common"] = runs["val_loss"]
    assert "use val_loss_common" in refused(derive(runs))["seq_len=512"]
    of_own = derive(runs, objective="val_loss_common")  # without eval_seq_len it is val_loss again
    assert not of_own.changes and "one eval_seq_len" in refused(of_own)["seq_len=512"]
    of_one = derive(runs.assign(eval_seq_len=256), objective="val_loss_common")
    assert of_one.config == RunConfig(seq_len=512, eval_seq_len=256)


# The configuration


def test_a_tuned_field_takes_the_value_that_was_best_for_what_is_chosen():
    runs = four().assign(tuned_fields="lr", tuned_by="val_loss", tuning="best")
    scaled, decayed = runs["depth_scale"] == "lns", runs["weight_decay"] == 0.1
    runs.loc[scaled | decayed, "lr"] = 2e-3
    runs.loc[scaled & decayed, "lr"] = 4e-3
    whole = derive(runs).config
    assert (whole.depth_scale, whole.weight_decay, whole.lr) == ("lns", 0.1, 4e-3)
    apart = derive(runs[~(scaled & decayed)]).config
    assert (apart.depth_scale, apart.weight_decay, apart.lr) == ("lns", 0.0, 2e-3)
    assert derive(runs.assign(val_loss=3.0)).config.lr == RunConfig().lr


def test_a_folder_with_a_fixed_lr_joins_a_tuned_one_and_lr_is_no_setting():
    """Tuning chose 2e-3 for the baseline; another folder ran decay 1 at 1e-3 alone, with its baseline there."""

    def loss(config):
        return -0.2 * (config.depth_scale == "lns") + 0.3 * (config.weight_decay == 1.0)

    axes = {"lr": [1e-3, 2e-3, 4e-3], "depth_scale": ["none", "lns"], "seed": [0, 1, 2, 3]}
    tuned = sweep(loss, axes).assign(tuned_fields="lr", tuned_by="val_loss")
    tuned["tuning"] = np.where(tuned["lr"] == 2e-3, "best", "rejected")
    fixed = sweep(loss, {"weight_decay": [0.1, 1.0], "seed": [0, 1, 2, 3]}, lr=1e-3)
    recipe = derive(pd.concat([tuned, fixed], ignore_index=True))
    assert lists(recipe) == {"depth_scale=lns": "better", "weight_decay=1": "worse"}
    assert recipe.config == RunConfig(depth_scale="lns", lr=2e-3)


def test_the_baseline_has_the_lr_that_its_effects_have_whatever_more_runs_have():
    """Tuning chose 2e-3; a folder with more seeds ran the baseline at 4e-3 alone."""
    axes = {"lr": [1e-3, 2e-3, 4e-3], "depth_scale": ["none", "lns"], "seed": [0, 1, 2, 3]}
    tuned = sweep(lambda config: 0.1 * (config.lr != 2e-3), axes).assign(tuned_fields="lr", tuned_by="val_loss")
    tuned["tuning"] = np.where(tuned["lr"] == 2e-3, "best", "rejected")
    more = sweep(lambda config: 0.1, {"seed": range(10, 18)}, lr=4e-3)
    recipe = derive(pd.concat([tuned, more], ignore_index=True))
    assert recipe.baseline.lr == recipe.config.lr == 2e-3 == recipe.candidates[0].effect.lr_baseline
    assert recipe.baseline_seeds == recipe.candidates[0].effect.seeds_baseline == 4


def test_a_depth_whose_lr_is_not_known_has_a_recipe_beside_a_tuned_one():
    tuned = sweep(planted, {**AXES, "lr": [2e-3]}, n_layers=4).assign(tuned_fields="lr", tuning="best")
    unknown = sweep(planted, AXES, n_layers=8).assign(lr=None)
    assert derive(pd.concat([tuned, unknown], ignore_index=True), 8).abstained == derive(unknown, 8).abstained == ""


def test_sizes_that_follow_are_filled_in():
    recipe = derive(cells([({}, 3.0), ({"n_experts": 8, "top_k": 2}, 3.1), ({"n_experts": 8, "top_k": 4}, 2.9)]))
    assert recipe.config == RunConfig(n_experts=8, top_k=4) and recipe.config.d_expert == 44  # d_ff 176 / 4


# Depths that were not run


def test_every_depth_has_its_own_recipe_and_the_deepest_is_the_default():
    axes = {"n_layers": [12, 24], **FEW}
    runs = sweep(lambda config: -0.05 * (config.depth_scale == "lns" and config.n_layers == 24), axes)
    assert derive(runs).config == RunConfig(n_layers=24, depth_scale="lns", weight_decay=0.0)
    assert derive(runs, depth=12).abstained
    found = Evidence(cells_of(runs, "val_loss"))
    assert derive(runs, 12, evidence=found) == derive(runs, 12)


def test_a_depth_that_was_not_run_takes_what_both_neighbours_show():
    """LNS helps from 16 layers on, decay .1 at every depth."""

    def loss(config):
        return -0.06 * (config.depth_scale == "lns" and config.n_layers > 12) - 0.04 * (config.weight_decay == 0.1)

    runs = sweep(loss, DEPTHS, sd=0.005, seed=1)
    far = derive(runs, depth=48)
    assert (far.place, far.shown_at) == ("extrapolation", (24, 16))
    assert far.config == RunConfig(n_layers=48, depth_scale="lns", weight_decay=0.1)
    assert far.candidates[0].effect.n_layers == 24
    between = derive(runs, depth=14)
    assert (between.place, between.shown_at) == ("interpolation", (12, 16))
    assert between.config == RunConfig(n_layers=14, weight_decay=0.1)
    assert derive(runs, depth=8).shown_at == (12, 16)


def test_an_effect_that_turns_with_depth_is_not_taken_further():
    gain = {12: -0.06, 16: -0.06, 24: 0.05}
    runs = sweep(lambda config: gain[config.n_layers] * (config.depth_scale == "lns"), DEPTHS)
    far = derive(runs, depth=48)
    assert lists(far)["depth_scale=lns"] == "worse"
    assert refused(far)["depth_scale=lns"] == "not shown to hurt at 16 layers"
    assert refused(derive(runs, depth=20))["depth_scale=lns"] == "not shown to help at 24 layers"


def test_a_depth_that_was_not_run_takes_the_tuned_value_of_the_nearest_below():
    runs = sweep(lambda config: -0.05 * (config.depth_scale == "lns"), DEPTHS)
    runs = runs.assign(tuned_fields="lr", tuned_by="val_loss", tuning="best")
    runs["lr"] = runs["n_layers"].map({12: 4e-3, 16: 2e-3, 24: 1e-3})
    for depth, lr in ((8, 4e-3), (14, 4e-3), (20, 2e-3), (48, 1e-3)):
        assert derive(runs, depth).config.lr == lr, depth


# Abstentions


def test_below_the_bigram_table_there_is_no_recipe():
    """Twice the tokens trained, where that is more than a first sweep needs."""
    better = four()
    assert not derive(better.assign(bigram_loss=99.0)).abstained
    weak = derive(better.assign(bigram_loss=0.5))
    assert weak.abstained == f"train longer: about {2 * weak.baseline.train_tokens:,} tokens" and not weak.changes
    assert "worse than a bigram table" in weak.weakness and weak.config == weak.baseline
    few = derive(better.assign(bigram_loss=0.5, train_tokens=8192))
    assert few.abstained == f"train longer: about {240 * 8192:,} tokens"


def test_it_abstains_with_a_reason():
    one_seed = derive(four()[four()["seed"] == 0])
    assert (
        one_seed.abstained == "only one seed in common: an interval needs two, or three budgets (effects --as speedup)"
    )
    assert one_seed.config == RunConfig(weight_decay=0.0) and not one_seed.is_compared
    elsewhere = derive(four(), depth=24)
    assert elsewhere.abstained == "24 layers were never run, and one other depth, 12, tells no trend"
    assert elsewhere.config == RunConfig(n_layers=24, weight_decay=0.0)
    same = derive(sweep(planted, {"seed": [0, 1, 2]}))
    assert same.abstained == "its complete runs have one configuration: there is nothing to compare"
    unmeasured = derive(four(), objective="usefulness")
    assert unmeasured.abstained == "usefulness was measured in no finished run (measure: usefulness)"
    equal = derive(four().assign(val_loss=3.0))
    assert equal.abstained.startswith("the runs of different seeds have equal values")
    lost = derive(four().assign(outcome="diverged"))
    assert lost.abstained == "all 12 complete runs diverged: run them again with a lower lr" and lost.config is None
    assert nothing_text(cells_of(four().assign(outcome="diverged"), "usefulness")) == lost.abstained
    tuning = derive(four().assign(tuned_fields="lr", tuning="rejected"))
    assert tuning.abstained == "only tuning runs are complete so far (12)"


def test_a_depth_without_its_baseline_says_so():
    runs = sweep(planted, {"n_layers": [12, 24], **FEW})
    is_baseline = (runs["depth_scale"] == "none") & (runs["weight_decay"] == 0)
    lost = derive(runs[~is_baseline | (runs["n_layers"] == 12)])
    assert lost.abstained == "the baseline was not run at this depth in these folders" and lost.config is None
    rescored = runs.assign(val_tokens=np.where(is_baseline & (runs["n_layers"] == 24), 4096, 8192))
    assert derive(rescored).abstained.startswith("the baseline was scored in another way than most runs")


def test_weak_models_are_named():
    runs = four()
    weak = derive(runs.assign(bigram_loss=1.0))
    assert not weak.changes and weak.weakness.startswith("the model is worse than a bigram table")
    assert derive(runs.assign(bigram_loss=9.0)).weakness == ""
    of_lns = derive(runs.assign(bigram_loss=np.where(runs["depth_scale"] == "lns", 1.0, 9.0)))
    assert of_lns.weakness.startswith("with depth_scale=lns, the model is worse than a bigram table")
    baseline = (runs["depth_scale"] == "none") & (runs["weight_decay"] == 0.0)
    of_baseline = derive(runs.assign(bigram_loss=np.where(baseline, 1.0, 9.0)))
    assert of_baseline.weakness.startswith("at the baseline, the model is worse than a bigram table")


def test_a_degenerate_objective_is_no_ground_for_a_recipe():
    runs = four()
    score = runs["val_loss"].max() - runs["val_loss"] + 1.0
    sound = derive(runs.assign(causal_score=score, causal_score_largest_share=0.2), objective="causal_score")
    carried = derive(runs.assign(causal_score=score, causal_score_largest_share=0.9), objective="causal_score")
    assert sound.changes and not sound.abstained
    assert not carried.changes and "one block carries more than half of it" in carried.abstained


def test_an_lr_that_was_not_tuned_is_told_where_effects_and_depths_are_compared():
    """Of one lr; not where runs had several, or where tuning chose them."""
    line = "the lr was not tuned: all runs used 0.003, and what needs another looks worse than it is"
    runs = four().assign(lr=0.003)
    found = derive(runs)
    assert found.shared_lr == 0.003 == cells_of(runs, "val_loss").shared_lr and untuned_line(found.shared_lr) == line
    several = runs.assign(lr=np.where(runs["depth_scale"] == "lns", 0.003, 0.001))
    tuned = runs.assign(tuned_fields="lr", tuning="selected", tuned_by="val_loss")
    for others in (several, tuned, runs.assign(lr=None), runs.drop(columns="lr")):
        assert cells_of(others, "val_loss").shared_lr is None
    assert untuned_line(None) == ""
