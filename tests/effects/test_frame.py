"""The frame `effects`: answers by hand, questions, and one true sentence for each kind of bad input."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import config_of, grid, runs_frame
from support.walks import of_effects

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.equal_loss import effects_at_equal_loss
from sparsedepth.effects.frame import effects_frame, setting_effects
from sparsedepth.effects.listing import listing
from sparsedepth.words.effects import budget_text, effects_text, equal_loss_line, setting_text

LNS = {"depth_scale": ["none", "lns"]}


def frame(runs, outcome="val_loss"):
    return effects_frame(cells_of(runs, outcome))


def row(found, **where):
    for name, value in where.items():
        found = found[found[name] == value]
    assert len(found) == 1, found
    return found.iloc[0]


def noisy(mean, sd=0.01, rng_seed=0):
    """Losses of `mean(config)` with noise of its own per run."""
    rng = np.random.default_rng(rng_seed)
    return lambda config: {"val_loss": mean(config) + sd * rng.standard_normal()}


def test_two_settings_are_students_test_of_pairs():
    loss = {("none", 0): 3.0, ("none", 1): 3.2, ("none", 2): 3.1, ("lns", 0): 2.8, ("lns", 1): 3.1, ("lns", 2): 2.95}
    runs = grid({**LNS, "seed": range(3)}, lambda c: {"val_loss": loss[c.depth_scale, c.seed]}, n_layers=4)
    found = row(frame(runs), question="setting")
    differences = np.array([-0.2, -0.1, -0.15])
    error = differences.std(ddof=1) / math.sqrt(3)
    assert found["estimate"] == pytest.approx(-0.15)
    assert (found["lo"], found["hi"]) == pytest.approx((-0.15 - 4.3027 * error, -0.15 + 4.3027 * error), abs=1e-4)
    assert (found["df"], found["seeds"], found["seeds_baseline"]) == (pytest.approx(2), 3, 3)
    assert found["p"] == pytest.approx(2 * (0.5 - 5.19615 / (2 * math.sqrt(2 + 27))), abs=1e-3)  # t = -5.196, 2 df
    assert (found["verdict"], found["basis"]) == ("lower", "tokens")


def test_a_setting_alone_and_beside_another_are_two_questions():
    def mean(config):
        both = config.residual_gate == "layerscale"
        return 3.0 + (0.2 if both else -0.3) * (config.depth_scale == "lns")

    axes = {**LNS, "residual_gate": ["none", "layerscale"], "seed": range(4)}
    found = frame(grid(axes, noisy(mean), n_layers=4))
    alone = row(found, question="setting", setting="depth_scale=lns")
    beside = row(found, question="beside", setting="depth_scale=lns")
    interaction = row(found, question="interaction")
    assert (alone["verdict"], beside["verdict"], interaction["verdict"]) == ("lower", "higher", "higher")
    assert beside["context"] == "residual_gate=layerscale"
    assert interaction["estimate"] == pytest.approx(beside["estimate"] - alone["estimate"])


def test_effects_by_depth_and_their_slope():
    runs = grid(
        {**LNS, "n_layers": [4, 16], "seed": range(4)},
        noisy(lambda c: 3.0 - 0.1 * math.log2(c.n_layers / 4) * (c.depth_scale == "lns")),
    )
    found = frame(runs)
    assert row(found, question="setting", n_layers=16)["estimate"] == pytest.approx(-0.2, abs=0.03)
    slope = row(found, question="depth slope")
    assert slope["lo"] < -0.1 < slope["hi"] and slope["verdict"] == "lower"
    assert row(found, question="depth")["setting"] == "n_layers=16"


def test_every_distinct_depth_has_its_own_noise():
    rng = np.random.default_rng(0)
    runs = grid(
        {**LNS, "n_layers": [4, 16], "seed": range(5)},
        lambda c: {"val_loss": 3 + (0.1 if c.n_layers == 4 else 0.001) * rng.standard_normal()},
    )
    found = frame(runs)
    width = {depth: (lambda r: r["hi"] - r["lo"])(row(found, question="setting", n_layers=depth)) for depth in (4, 16)}
    assert width[16] < width[4] / 20


def tuned(loss, lrs=(0.001, 0.002, 0.004), chosen=0.002, seeds=4, scales=("none", "lns"), **more):
    """A tuned sweep: seeds 100, 101 choose, others are results at `chosen`."""
    rows = []
    for scale in scales:
        for lr in lrs:
            for seed in (100, 101, *(range(seeds) if lr == chosen else ())):
                config = config_of(**{"n_layers": 4, **more}, depth_scale=scale, lr=lr, seed=seed)
                role = "tuning" if seed >= 100 else "best"
                role = role if lr == chosen else "rejected"
                facts = {"tuned_fields": "lr", "tuned_by": "val_loss", "tuning": role}
                rows.append((config, {**loss(config), **facts}))
    return runs_frame(rows)


def test_a_tuned_lr_is_no_setting_and_its_choice_is_in_the_interval():
    found = row(frame(tuned(noisy(lambda c: 3 + 0.05 * math.log2(c.lr / 0.002) ** 2))), question="setting")
    assert (found["lr"], found["lr_baseline"], found["at"]) == (0.002, 0.002, "own lr")
    assert found["lo"] < 0 < found["hi"] and found["verdict"] == "not shown"
    assert found["seeds_part"] ** 2 + found["lr_part"] ** 2 == pytest.approx(((found["hi"] - found["lo"]) / 2) ** 2)
    assert found["detectable"] > (found["hi"] - found["lo"]) / 2


def test_lr_that_differ_by_rounding_are_one():
    """One folder's definition names 8.49e-3; another's grid was extended from 6e-3 by the root of 2. The variance, by
    which no tuning chose, is compared at equal lr: there LNS halves it."""
    steps = [0.006 * 2 ** (k / 2) for k in (-1, 0, 1)]
    loss = noisy(lambda c: 3.0)
    halved, rng = {"none": 2.0, "lns": 1.0}, np.random.default_rng(1)
    runs = tuned(
        lambda c: {**loss(c), "residual_variance_last": halved[c.depth_scale] * c.lr * rng.lognormal(0, 0.05)},
        steps,
        steps[2],
    )
    named = runs["lr"].where(runs["depth_scale"] == "none", [float(f"{lr:.3g}") for lr in runs["lr"]])
    found = row(frame(runs.assign(lr=named), "residual_variance_last"), question="setting")
    assert (found["at"], found["verdict"]) == ("equal lr", "lower")
    assert math.exp(found["estimate"]) == pytest.approx(0.5, rel=0.1)


def test_between_depths_the_choice_of_lr_counts_even_where_a_depth_has_the_baseline_alone():
    def mean(config):
        return 3 + 0.05 * math.log2(config.lr / 0.002) ** 2

    def between(*scales):
        loss = noisy(mean)
        runs = pd.concat([tuned(loss, scales=scales, n_layers=n_layers) for n_layers in (4, 16)])
        return row(frame(runs), question="depth")

    alone = between("none")
    assert alone["lr_part"] > alone["seeds_part"] > 0 and alone["lo"] < 0 < alone["hi"]
    assert between("none", "lns")["lr_part"] > 0


def test_the_losing_side_at_the_end_of_its_grid_bars_the_verdict():
    def mean(config):
        return 3 + 0.05 * math.log2(config.lr / 0.004) ** 2 - 0.3 * (config.depth_scale == "lns")

    found = row(frame(tuned(noisy(mean), chosen=0.004)), question="setting")
    assert (found["verdict"], found["reason"]) == (
        "not shown",
        "the baseline's lr 0.004 is the highest tried: its optimum may lie beyond",
    )


def test_a_folder_with_a_fixed_lr_joins_tuned_ones_at_that_lr():
    loss = noisy(lambda c: 3 + 0.05 * math.log2(c.lr / 0.002) ** 2 - 0.2 * (c.weight_decay == 1))
    fixed = [config_of(weight_decay=1.0, lr=0.001, seed=seed, n_layers=4) for seed in (100, 101)]
    both = pd.concat([tuned(loss), runs_frame([(config, loss(config)) for config in fixed])], ignore_index=True)
    found = frame(both)
    assert not found["setting"].str.contains("lr=").any()
    at = row(found, question="setting", setting="weight_decay=1")
    assert (at["at"], at["lr"], at["lr_baseline"]) == ("lr=0.001", 0.001, 0.001)
    assert at["estimate"] == pytest.approx(-0.2, abs=0.03)


def variance_runs(values, n_layers=4):
    """A tuned sweep of two lr whose settings chose different ones; `values`: (scale, lr) -> residual variance."""
    rows = []
    for scale, chosen in zip(("none", "lns"), (0.001, 0.004) if n_layers == 4 else (0.004, 0.002), strict=True):
        for lr in (0.001, 0.002, 0.004):
            for seed in (100, 101, *(range(4) if lr == chosen else ())):
                role = ("tuning" if seed >= 100 else "best") if lr == chosen else "rejected"
                config = config_of(depth_scale=scale, lr=lr, seed=seed, n_layers=n_layers)
                factor = 1 + 0.01 * ((7 * seed + round(1000 * lr)) % 5)
                facts = {"tuned_fields": "lr", "tuned_by": "val_loss", "tuning": role, "val_loss": 3.0}
                rows.append((config, {**facts, "residual_variance_last": values(scale, lr) * factor}))
    return runs_frame(rows)


def test_an_outcome_that_follows_lr_is_compared_at_equal_lr():
    """The setting has a sixth less at each lr, and more at its own, which is four times the baseline's."""
    follows = frame(
        variance_runs(lambda scale, lr: 1e3 * lr * (1.2 if scale == "none" else 1)), "residual_variance_last"
    )
    found = row(follows, question="setting")
    assert found["verdict"] == "lower" and found["estimate"] == pytest.approx(-math.log(1.2), abs=1e-3)
    assert found["estimate_own_lr"] == pytest.approx(math.log(4 / 1.2), abs=0.05)
    own = frame(variance_runs(lambda scale, lr: 5.0 if scale == "none" else 1.0), "residual_variance_last")
    found = row(own, question="setting")
    assert found["verdict"] == "lower" and found["estimate"] == pytest.approx(-math.log(5), abs=0.05)


def test_between_depths_and_in_slopes_lr_alone_is_no_effect():
    """The variance is that of lr alone."""

    def of_lr(scale, lr):
        return 1e3 * lr

    shallow, deep = variance_runs(of_lr), variance_runs(of_lr, n_layers=16)
    found = frame(pd.concat([shallow, deep], ignore_index=True), "residual_variance_last")
    depth, slope = row(found, question="depth"), row(found, question="depth slope")
    assert depth["p"] > 0.9 and depth["verdict"] == "not shown" and abs(depth["estimate_own_lr"]) > 1
    assert slope["p"] > 0.9 and slope["verdict"] == "not shown"


def test_a_tie_of_two_chosen_lr_is_broken_by_the_loss_whatever_is_asked():
    """0.001 and 0.004 were chosen in two folders; 0.001 has less loss, and the less accuracy."""
    rows = []
    for lr, loss in ((0.001, 2.0), (0.004, 2.5)):
        facts = {"tuned_fields": "lr", "tuned_by": "val_loss", "tuning": "best"}
        for seed in range(3):
            summary = {**facts, "val_loss": loss + 0.01 * seed, "val_accuracy": 0.3 if lr == 0.001 else 0.2}
            rows.append((config_of(lr=lr, seed=seed, n_layers=4), summary))
    for outcome in ("val_loss", "val_accuracy"):
        (at,) = cells_of(runs_frame(rows), outcome).depths
        assert at.cells["baseline"].lr == 0.001


def test_the_order_of_folders_changes_nothing():
    """As many runs were scored on more tokens, or on how many is not known: those scored as the baseline remain."""
    baseline, other = (
        grid({"depth_scale": [scale], "seed": range(3)}, noisy(lambda c: 3.0), n_layers=4, val_tokens=tokens)
        for scale, tokens in (("none", 8192), ("lns", 4096))
    )
    for parts in ([baseline, other], [other, baseline], [baseline, other.assign(val_tokens=np.nan)]):
        found = cells_of(pd.concat(parts, ignore_index=True), "val_loss")
        assert {*found.rows["setting"]} == {"baseline"}
        assert "3 runs scored in another way than most are left out" in effects_text(
            listing(effects_frame(found), found)
        )
    measured = other.assign(val_tokens=8192, measures='["loss"]')
    assert row(frame(pd.concat([baseline, measured], ignore_index=True)), question="setting")["seeds"] == 3


def test_a_number_of_the_table_passes_few_files():
    taken = of_effects(tuned(noisy(lambda c: 3.0)), "val_loss")
    rooms = [room for room in taken.rooms if not room.startswith(("config/", "words/"))]
    assert len(rooms) <= 13, rooms
    assert {("effects/frame.py", "_settings"), ("effects/verdict.py", "verdict_of")} <= taken.names


# Bad input: one true sentence each


def test_no_baseline_at_a_depth():
    runs = grid({**LNS, "n_layers": [4, 16], "seed": range(3)}, noisy(lambda c: 3.0))
    runs = runs[(runs["n_layers"] == 4) | (runs["depth_scale"] == "lns")]
    found = row(frame(runs), question="setting", n_layers=16)
    assert found["reason"] == "the baseline was not run at this depth in these folders"
    assert found["verdict"] == "not shown" and math.isnan(found["estimate"])
    measured = grid({**LNS, "seed": range(3)}, lambda c: {"val_loss": 3.0, "usefulness": 0.5}, n_layers=4)
    measured["usefulness"] = measured["usefulness"].where(measured["depth_scale"] == "lns")
    reason = row(frame(measured, "usefulness"), question="setting")["reason"]
    assert reason == "the baseline has no usefulness at this depth"


def test_depths_of_other_data_are_not_compared():
    loss = noisy(lambda c: 3.0 - 0.1 * c.n_layers)
    runs = grid({"n_layers,corpus": [(4, "wiki.txt"), (12, "code.txt")], "seed": range(3)}, loss)
    found = row(frame(runs), question="depth")
    assert found["reason"] == "depths differ in corpus" and math.isnan(found["estimate"])


def test_no_common_seed_one_seed_and_equal_values():
    apart = grid({**LNS, "seed": range(6)}, noisy(lambda c: 3.0), n_layers=4)
    apart = apart[(apart["depth_scale"] == "none") == (apart["seed"] < 3)]
    assert row(frame(apart), question="setting")["reason"] == "the setting and the baseline have no seed in common"
    one = grid({**LNS, "seed": [0]}, noisy(lambda c: 3.0), n_layers=4)
    assert (
        row(frame(one), question="setting")["reason"]
        == "only one seed in common: an interval needs two, or three budgets (effects --as speedup)"
    )
    equal = grid({**LNS, "seed": range(3)}, lambda c: {"val_loss": 3.0}, n_layers=4)
    assert row(frame(equal), question="setting")["reason"].startswith("the runs of different seeds have equal values")


def test_an_outcome_measured_in_a_part_of_the_runs():
    rng = np.random.default_rng(0)
    runs = grid(
        {**LNS, "norm": ["pre", "sandwich"], "seed": range(3)},
        lambda c: {"val_loss": 3.0, "usefulness_loss_increase": rng.random() if c.norm == "pre" else None},
        n_layers=4,
    )
    found = frame(runs, "usefulness_loss_increase")
    assert row(found, question="setting", setting="depth_scale=lns")["seeds"] == 3
    unmeasured = found[(found["question"] == "setting") & found["setting"].str.contains("norm=sandwich")]
    assert [*unmeasured["setting"]] == ["norm=sandwich", "norm=sandwich, depth_scale=lns"]
    assert {*unmeasured["reason"]} == {"usefulness_loss_increase was measured in no run of this setting"}
    assert {*unmeasured["verdict"]} == {"not shown"} and unmeasured[["estimate", "lo", "p", "lr", "seeds"]].isna().all(
        axis=None
    )
    assert "measured in no run of this setting" in effects_text(
        listing(found, cells_of(runs, "usefulness_loss_increase"))
    )


def test_a_diverged_run_is_counted_and_does_not_remove_its_setting():
    runs = grid({**LNS, "seed": range(5)}, noisy(lambda c: 3.0 - 0.5 * (c.depth_scale == "lns")), n_layers=4)
    bad = (runs["depth_scale"] == "lns") & (runs["seed"] == 0)
    runs.loc[bad, "outcome"] = "diverged"
    found = row(frame(runs), question="setting")
    assert (found["diverged"], found["seeds"], found["verdict"]) == (1, 4, "lower")
    runs.loc[(runs["depth_scale"] == "lns") & (runs["seed"] < 2), "outcome"] = "diverged"
    found = row(frame(runs), question="setting")
    assert (found["verdict"], found["reason"]) == ("not shown", "2 runs of the setting diverged, 0 of the baseline")


# Slopes


def test_an_effect_that_changes_with_width_and_budget():
    """-.1 a doubling of width and +.05 a doubling of tokens."""

    def mean(config):
        wider, longer = math.log2(config.d_model / 64), math.log2(config.train_tokens / 65536)
        return 3 - 0.2 * wider + (0.4 - 0.1 * wider + 0.05 * longer) * (config.depth_scale == "lns")

    axes = {**LNS, "d_model": [64, 128, 256], "train_tokens": [65536, 262144], "seed": range(4)}
    found = frame(grid(axes, noisy(mean), n_layers=4))
    for question, truth, verdict in (("width slope", -0.1, "lower"), ("budget slope", 0.05, "higher")):
        slope = row(found, question=question)
        assert (slope["setting"], slope["verdict"], slope["seeds"]) == ("depth_scale=lns", verdict, 4)
        assert slope["estimate"] == pytest.approx(truth, abs=0.02) and slope["hi"] - slope["lo"] < 0.06


def test_of_the_branches_of_trunks_the_largest_budget_is_compared():
    """An effect of -.1 at 65k tokens and of +.1 at 262k."""

    def mean(config):
        return 3 + (0.1 if config.train_tokens > 65536 else -0.1) * (config.depth_scale == "lns")

    axes = {**LNS, "train_tokens": [65536, 262144], "seed": range(4)}
    runs = grid(axes, noisy(mean), n_layers=4, schedule="wsd")
    found = frame(runs.assign(train_flops=1e6 * runs["train_tokens"]))
    (effect,) = found[found["question"] == "setting"].to_dict("records")
    assert (effect["setting"], effect["verdict"]) == ("depth_scale=lns", "higher")


def test_where_budgets_differ_by_depth_each_depth_is_compared_at_the_one_with_most_settings():
    """At equal FLOPs 8 layers take half the tokens of 4, LNS one step more; a larger budget has the baseline alone,
    with another loss."""
    cells = [
        (n_layers, tokens // n_layers + 8192 * (scale == "lns"), scale)
        for n_layers in (4, 8)
        for tokens, scales in ((2**20, ("none", "lns")), (2**22, ("none",)))
        for scale in scales
    ]
    axes = {"n_layers,train_tokens,depth_scale": cells, "seed": range(4)}
    runs = grid(axes, noisy(lambda c: 3 - 0.1 * (c.depth_scale == "lns") - (c.n_layers * c.train_tokens > 2**21)))
    flops = np.where(runs["n_layers"] * runs["train_tokens"] > 2**21, 4e12, 1e12)
    found = cells_of(runs.assign(train_flops=flops), "val_loss")
    assert "at that of most settings" in budget_text(found)
    of_setting = setting_effects(found)
    assert [*of_setting["n_layers"]] == [4, 8] and {*of_setting["setting"]} == {"depth_scale=lns"}
    assert of_setting["estimate"].tolist() == pytest.approx([-0.1, -0.1], abs=0.02)
    assert (of_setting["flops"] == 1).all()


def test_sizes_that_change_together_are_named():
    axes = {**LNS, "d_model,train_tokens": [(64, 65536), (128, 131072), (256, 262144)], "seed": range(4)}
    found = frame(grid(axes, noisy(lambda c: 3 - 0.1 * math.log2(c.d_model) * (c.depth_scale == "lns")), n_layers=4))
    slope = row(found, question="width slope")
    assert (slope["context"], slope["verdict"]) == ("train_tokens", "lower")
    assert setting_text(slope) == "depth_scale=lns: per doubling of width (with train_tokens)"
    assert "budget slope" not in set(found["question"])


def test_an_effect_that_changes_with_lr():
    """By hand: the effect is 0, -.1, -.2 at lr .001, .002, .004, which is -.1 a doubling."""
    runs = tuned(noisy(lambda c: 3 - 0.1 * math.log2(c.lr / 0.001) * (c.depth_scale == "lns")))
    slope = row(frame(runs), question="lr slope")
    assert slope["estimate"] == pytest.approx(-0.1, abs=0.02) and slope["verdict"] == "lower"
    assert slope["seeds"] == 2 and 0.01 < slope["hi"] - slope["lo"] < 0.06
    runs.loc[(runs["lr"] == 0.004) & (runs["seed"] == 100), "outcome"] = "diverged"
    assert row(frame(runs), question="lr slope")["estimate"] == pytest.approx(-0.1, abs=0.05)
    one_lr = runs[(runs["lr"] == 0.002) | (runs["depth_scale"] == "none")]
    assert "lr slope" not in set(frame(one_lr)["question"])


def test_the_table_lists_an_lr_slope_only_where_it_is_shown():
    changes = tuned(noisy(lambda c: 3 - 0.1 * math.log2(c.lr / 0.001) * (c.depth_scale == "lns")))
    assert "per doubling of lr" in effects_text(listing(frame(changes), cells_of(changes, "val_loss")))
    equal = tuned(noisy(lambda c: 3.0, rng_seed=1))
    text, detailed = (
        effects_text(listing(frame(equal), cells_of(equal, "val_loss"), detail)) for detail in (False, True)
    )
    assert "1 effect not shown to change with lr" in text and "per doubling of lr" not in text
    assert "per doubling of lr" in detailed


def test_of_two_tuned_fields_the_second_stays_at_its_chosen_value():
    runs = tuned(noisy(lambda c: 3.0)).assign(tuned_fields="lr,weight_decay")
    text = " ".join(effects_text(listing(frame(runs), cells_of(runs, "val_loss"))).split())
    assert "the curve and its error are in lr alone: weight_decay at the value that tuning chose" in text


def test_the_column_of_a_tuned_field_has_its_name():
    runs = tuned(noisy(lambda c: 3.0))
    other = runs.assign(tuned_fields="warmup_frac", warmup_frac=runs["lr"] * 10, lr=0.001)
    table = listing(frame(other), cells_of(other, "val_loss")).table
    assert "warmup_frac" in table.columns and "lr" not in table.columns


# At equal loss


def needing_layers(own, slope=-5.0):
    """LNS lowers the loss by 0.2 nat and adds `own` layers; every nat within a setting costs `slope` layers."""
    rng = np.random.default_rng(1)

    def summary(config):
        lns = config.depth_scale == "lns"
        loss = 2 - 0.2 * lns + 0.1 * rng.standard_normal()
        needed = config.n_layers / 2 + slope * (loss - 2) + own * lns + 0.05 * rng.standard_normal()
        return {"val_loss": loss, "needed_layers": needed}

    return grid({**LNS, "n_layers": [4, 8], "seed": range(8)}, summary)


@pytest.mark.parametrize("own", [0.0, 2.0])
def test_the_slope_and_the_setting_are_told_apart(own):
    """Of 600 intervals of such draws .95 hold the truth."""
    runs = needing_layers(own)
    lines = [*map(equal_loss_line, effects_at_equal_loss(cells_of(runs, "needed_layers")))]
    assert [line.partition(" (")[0] for line in lines] == ["at equal val_loss, 4 layers", "at equal val_loss, 8 layers"]
    for line in lines:
        slope, r, effect, low, high = map(float, re.findall(r"[+-]\d[\d.e+-]*", line))
        assert slope == pytest.approx(-5, abs=0.4) and r < -0.98
        assert low <= own <= high and high - low < 0.5 and effect == pytest.approx(own, abs=0.2)


def test_only_a_number_of_layers_is_compared_at_equal_loss():
    runs = needing_layers(2.0).assign(causal_score=0.1)
    assert not [*effects_at_equal_loss(cells_of(runs, "causal_score"))]
    assert not [*effects_at_equal_loss(cells_of(runs.assign(val_loss=2.0), "needed_layers"))]


def test_budgets_that_no_tokens_tell_apart_are_told_to_be_averaged():
    """As in a table of FLOPs and losses: a budget is no seed."""
    runs = grid({**LNS, "seed": range(4)}, noisy(lambda config: 3.0), n_layers=4)
    budgets = runs.assign(train_flops=np.where(runs["seed"] < 2, 1e15, 1e16))
    unknown = {"train_tokens": None, "tokens_trained": None}
    assert "are averaged, as they have no train_tokens" in budget_text(cells_of(budgets.assign(**unknown), "val_loss"))
    one = [budgets, runs.assign(train_flops=1e15, **unknown), runs.assign(train_flops=None, **unknown)]
    assert [budget_text(cells_of(told, "val_loss")) for told in one] == ["", "", ""]


def test_heads_that_follow_from_the_depth_are_no_setting():
    """Shapes of one number of parameters: wider models have more heads of one size, so that depth alone is compared."""
    shapes = [(8, 64, 4, 142), (4, 96, 6, 175), (16, 48, 3, 88)]
    axes = {"n_layers,d_model,n_heads,d_ff": shapes, "seed": range(4)}
    found = cells_of(grid(axes, noisy(lambda config: 3.0 + 0.01 * config.n_layers)), "val_loss")
    assert {*found.rows["setting"]} == {"baseline"}
    assert found.settings.by_depth == {"d_model": {4: 96, 8: 64, 16: 48}}  # from which the others follow
    of_depth = effects_frame(found)
    assert of_depth["setting"].tolist() == ["n_layers=8", "n_layers=16"]
    assert of_depth["estimate"].tolist() == pytest.approx([0.04, 0.12], abs=0.02)
