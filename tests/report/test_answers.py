"""Two questions, one sentence each: planted effects are named, and what the runs do not tell is said."""

import pandas as pd
import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of, grid
from support.tiny_sweep import sparsedepth

from sparsedepth.effects.cells import cells_of
from sparsedepth.report import answers
from sparsedepth.report.answers import answer
from sparsedepth.store.connection import open_store
from sparsedepth.words.report import whole_answer

SEEDS = [0, 1, 2, 3]
NOISE = [0.0, 0.02, -0.03, 0.01]


def measured(config):
    """LNS divides the variance by ten; one key/value head does nothing; each doubling of depth gains 0.5."""
    is_lns = config.depth_scale == "lns"
    noise = NOISE[config.seed] * (1 + (config.n_layers == 8) + config.n_kv_heads / 9 + is_lns / 7)
    return {
        "val_loss": 3 - 0.5 * (config.n_layers == 8) + noise,
        "residual_variance_last": (1 + noise) * (1 if is_lns else 10),
        "weight_sparsity": 0.2 + 0.1 * is_lns + noise / 10,
        "needed_layers": config.n_layers / 2,
        "train_flops": 1e9 * config.n_layers * config.train_tokens,
    }


def variance_answer(runs):
    return answers.variance_answer(cells_of(runs, "val_loss"))


def depth_answer(runs):
    return answers.depth_answer(cells_of(runs, "val_loss"))


def runs_of(**axes):
    return grid({"n_layers": [4, 8], "seed": SEEDS, **axes}, measured)


def records(found):
    return [dict(zip(found.table.columns, row, strict=True)) for row in found.table.rows]


def test_the_settings_that_lower_the_variance_are_named():
    found = variance_answer(runs_of(depth_scale=["none", "lns"], n_kv_heads=[4, 1]))
    names = "depth_scale=lns and n_kv_heads=1, depth_scale=lns"
    assert found.sentence == f"At 8 layers {names} lower the residual variance."
    rows = {row["setting"]: row for row in records(found)}
    lns = rows["depth_scale=lns"]
    assert lns["variance"].startswith("x0.1") and lns["verdict_at"] == "lower: 4, 8"
    assert lns["weight_sparsity"].startswith("+0.1")
    assert rows["n_kv_heads=1"]["verdict_at"] == "not shown: 4, 8"
    assert {row["outcome"] for row in found.rows.records()} == {"residual_variance_last", "weight_sparsity"}
    assert found.notes[0].startswith("raised at ") and "weight_sparsity by depth_scale=lns" in found.notes[0]


def test_what_lowers_and_what_raises_the_variance_are_both_named():
    runs = runs_of(depth_scale=["none", "lns"], n_kv_heads=[4, 1])
    raised = runs["residual_variance_last"].where(runs["n_kv_heads"] != 1, 10 * runs["residual_variance_last"])
    found = variance_answer(runs.assign(residual_variance_last=raised))
    assert found.sentence == ("At 8 layers depth_scale=lns lowers the residual variance, and n_kv_heads=1 raises it.")


def test_the_harm_of_what_lowers_the_variance_is_said_where_it_is_shown():
    runs = runs_of(depth_scale=["none", "lns"], n_kv_heads=[4, 1])
    is_lns = runs["depth_scale"] == "lns"
    rising = runs["val_loss"].where(~is_lns, runs["val_loss"] + 1)
    found = variance_answer(runs[runs["n_kv_heads"] == 4].assign(val_loss=rising))
    assert (
        found.sentence
        == "At 8 layers depth_scale=lns lowers the residual variance. There depth_scale=lns raises val_loss."
    )
    falling = runs["val_loss"].where(~is_lns, runs["val_loss"] - 1)
    assert "raises" not in variance_answer(runs.assign(val_loss=falling)).sentence
    shallow = runs["val_loss"].where(~is_lns | (runs["n_layers"] == 8), runs["val_loss"] + 1)
    assert "raises" not in variance_answer(runs.assign(val_loss=shallow)).sentence


def test_what_would_have_been_seen_is_said_where_nothing_is_shown():
    sentence = variance_answer(runs_of(n_kv_heads=[4, 1])).sentence
    assert sentence.startswith("At 8 layers no setting is shown to change the residual variance; a change by a factor")
    missing = variance_answer(runs_of(n_kv_heads=[4, 1]).assign(residual_variance_last=None))
    assert missing.sentence == "residual_variance_last was measured in no finished run (measure: variance)"
    assert not missing.table.rows


def test_depth_is_compared_at_equal_tokens_and_without_a_sentence_about_cost():
    found = depth_answer(runs_of())
    tokens = "At equal tokens 8 layers have 0.5 nat/token less val_loss than 4"
    assert found.sentence == f"{tokens}; no runs at equal FLOPs, so the cost of depth is not judged."
    shallow, deep = records(found)
    assert (shallow["verdict"], deep["verdict"]) == ("(compared with)", "lower")
    assert (deep["equal"], deep["n_layers"], deep["needed_layers"], deep["flops"]) == ("tokens", 8, 4.0, "x2")


@pytest.mark.parametrize(("gain", "says"), [(0.5, "are worth their cost"), (-0.5, "are not worth their cost")])
def test_depth_at_equal_flops_where_runs_have_them(gain, says):
    """4 layers with twice the tokens of 8; and the budget of the 8 layers at both depths."""
    sizes = {"n_layers,train_tokens": [(4, 20_480), (4, 10_240), (8, 10_240)], "seed": SEEDS}
    runs = grid(sizes, measured, batch_tokens=1024)
    noise = runs["seed"].map(NOISE.__getitem__) * runs["n_layers"] / 4
    runs = runs.assign(val_loss=3 - gain * (runs["n_layers"] == 8) + noise, tokens_trained=runs["train_tokens"])
    found = depth_answer(runs)
    size = "-0.5 nat/token (-0.534 to -0.466)" if gain > 0 else "+0.5 nat/token (+0.466 to +0.534)"
    assert f"at equal FLOPs 8 layers {says}: at 8.2e13 FLOPs {size} against 4 layers." in found.sentence
    assert records(found)[-1]["worth_it"] == ("yes" if gain > 0 else "no")
    assert [row["equal"] for row in records(found)] == ["tokens", "tokens", "FLOPs", "FLOPs"]


def test_of_several_budgets_the_largest_is_compared():
    sizes = [(4, 20_480), (8, 10_240), (4, 40_960), (8, 20_480)]
    runs = grid({"n_layers,train_tokens": sizes, "seed": SEEDS}, measured, batch_tokens=1024)
    found = depth_answer(runs.assign(tokens_trained=runs["train_tokens"]))
    assert "at equal FLOPs 8 layers are worth their cost: at 1.6e14 FLOPs -0.5 nat/token" in found.sentence


def test_depths_that_share_no_cost_are_not_compared():
    runs = grid({"n_layers,train_tokens": [(4, 10_240), (8, 40_960)], "seed": SEEDS}, measured, batch_tokens=1024)
    assert depth_answer(runs).sentence.startswith("The depths differ in tokens and in FLOPs: what depth alone does is")
    one_seed = depth_answer(runs_of().query("seed == 0"))
    assert "lo" not in one_seed.table.columns and "interval" not in one_seed.notes[0]
    alone = depth_answer(runs[runs["n_layers"] == 4])
    assert alone.sentence == "The baseline has results at one depth only: there is nothing to say about depth."


def test_an_lr_for_each_depth_is_no_setting_and_is_said():
    """As where a sweep gives each depth the lr that an earlier one found; two at one depth are two settings."""
    own = grid({"n_layers,lr": [(4, 0.002), (8, 0.001)], "seed": SEEDS}, measured)
    found = depth_answer(own)
    assert found.sentence.startswith("At equal tokens 8 layers have 0.5 nat/token less val_loss than 4;")
    assert "lr depends on n_layers: 0.002000 at 4, 0.001000 at 8" in found.notes
    both = grid({"n_layers,lr": [(4, 0.002), (8, 0.002), (8, 0.001)], "seed": SEEDS}, measured)
    assert {*cells_of(both, "val_loss").changes} == {"baseline", "lr=0.002"}


def test_the_commands_answer_in_few_lines(tmp_path):
    for depth in (4, 8):
        for scale in ("none", "lns"):
            for seed in SEEDS:
                config = config_of(n_layers=depth, depth_scale=scale, seed=seed)
                make_run(tmp_path, config, measured(config))
    with open_store(tmp_path) as store:
        for name in ("variance", "depth"):
            lines = whole_answer(answer(store, name), 100).splitlines()
            assert 3 < len(lines) <= 25 and max(map(len, lines)) <= 100, name
    out, _ = sparsedepth("query", tmp_path, "--ask", "depth", "--format", "csv")
    assert out.splitlines()[0].startswith("outcome,unit,") and len(out.splitlines()) == 3


def test_a_depth_with_tuning_runs_alone_is_the_one_compared_with():
    """The frame takes tuning seeds where there are no fresh ones; so does the row of the depth compared with."""
    roles = {4: "tuning", 8: "best"}
    runs = runs_of().assign(tuned_fields="lr", tuned_by="val_loss")
    found = depth_answer(runs.assign(tuning=runs["n_layers"].map(roles)))
    first, second = records(found)
    assert ", each at its own lr;" in found.notes[0]
    assert "its own lr" not in depth_answer(runs_of()).notes[0]  # nothing was tuned
    assert (first["n_layers"], first["verdict"], second["n_layers"]) == (4, "(compared with)", 8)
    assert float(first["fitted"]) == pytest.approx(runs.loc[runs["n_layers"] == 4, "val_loss"].mean())


def test_a_depth_whose_fresh_seeds_all_diverged_is_not_compared_with():
    """Its tuning seeds have a value, and the frame leaves it out: 16 layers are compared with 8, 0.5 above 16."""

    def halved(config):
        return {**measured(config), "val_loss": 3 - 0.5 * (config.n_layers // 8) + NOISE[config.seed] * config.n_layers}

    runs = grid({"n_layers": [4, 8, 16], "seed": SEEDS}, halved).assign(tuned_fields="lr", tuned_by="val_loss")
    runs["tuning"] = ["tuning" if seed < 2 else "best" for seed in runs["seed"]]
    diverged = (runs["n_layers"] == 4) & (runs["tuning"] == "best")
    runs.loc[diverged, "outcome"], runs.loc[diverged, "val_loss"] = "diverged", None
    assert [row["n_layers"] for row in records(depth_answer(runs))] == [8, 16]


@pytest.mark.parametrize("budgets", [[1e16], [1e15, 1e16]])
def test_depth_is_judged_at_equal_flops_where_no_tokens_are_known(budgets):
    """As in a table of FLOPs and losses: at the largest budget, which the sentence and the table share. 8 layers gain
    0.1 at 1e15 FLOPs, and 0.5 at 1e16."""

    def at_budget(budget):
        gain = 0.1 if budget < 1e16 else 0.5
        runs = grid({"n_layers": [4, 8], "seed": SEEDS}, lambda c: {"val_loss": 3 - gain * (c.n_layers == 8)})
        noise = [
            NOISE[seed] * (1 + (n_layers == 8)) for seed, n_layers in zip(runs["seed"], runs["n_layers"], strict=True)
        ]
        known = {"train_flops": budget, "val_loss": runs["val_loss"] + noise, "run_id": runs["run_id"] + f"{budget:g}"}
        return runs.assign(**known, train_tokens=None, tokens_trained=None)

    found = depth_answer(pd.concat([*map(at_budget, budgets)], ignore_index=True))
    assert found.sentence.startswith(
        "No runs at equal tokens; at equal FLOPs 8 layers are worth their cost: at 1e16 FLOPs"
    )
    first, deep = records(found)
    assert (first["equal"], deep["equal"], deep["worth_it"]) == ("FLOPs", "FLOPs", "yes")
    assert float(deep["effect"]) == pytest.approx(-0.5, abs=0.01) and f"{deep['effect']} nat/token" in found.sentence
