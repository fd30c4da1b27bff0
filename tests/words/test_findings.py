"""Sentences of findings, which other tests meet in processes of their own: links, laws, crossovers, effects."""

from pathlib import Path
from types import SimpleNamespace as Record

from sparsedepth.store.query_result import QueryResult
from sparsedepth.words import captions, differences, effects, judge, report, scaling

RESULTS = Path(__file__).parents[2] / "results"


def test_a_link_says_its_sign_and_its_interval():
    within = Record(cause="weight_sparsity", effect="usefulness", rho=-0.5, lo=-0.8, hi=-0.1, n_runs=24, n_settings=8)
    said = report.link_sentence(Record(within=within, verdict="associated"))
    assert said.startswith(
        "At equal depth, more weight_sparsity goes with less usefulness (Spearman -0.50, 95% interval -0.80 to -0.10, "
        "24 runs of 8 combinations of settings): "
    )


def test_models_without_a_run_are_counted():
    assert captions.models_note(0) == ""
    assert captions.models_note(1).startswith(" 1 model measured without a training configuration: ")


def test_what_is_independent_in_a_law():
    assert [scaling.units_text(Record(has_clusters=has)) for has in (True, False)] == ["clusters", "points"]


def test_multipliers_are_a_table_and_what_was_left_out():
    table = QueryResult(columns=("n_layers", "multiplier", "setting"), rows=((12, 1.25, "depth_scale=lns"),))
    row = {
        "n_layers": 12,
        "setting": "depth_scale=lns",
        "train_flops": 1.2e13,
        "multiplier": 1.0,
        "lo": 0.95,
        "hi": 1.06,
    }
    row |= dict.fromkeys(("time_multiplier", "time_lo", "time_hi"))
    row |= {"law": "power law with drift", "p_drift": 0.001, "reason": "", "time_reason": scaling.NO_TIMES}
    first = row | {"train_flops": 1.5e12, "multiplier": 1.25, "lo": 1.2, "hi": 1.3}
    lines = scaling.speedup_lines(Record(table=table, at_ends=[(first, row)], refused=["n_layers=4: 2 budgets"]))
    assert "1.250  depth_scale=lns" in lines[1] and lines[3:] == [scaling.NO_TIMES, "left out: n_layers=4: 2 budgets"]
    assert lines[2] == (
        "n_layers=12, depth_scale=lns: worth 1 times the compute (0.95 to 1.06) at 1.2e13 FLOPs, fading from 1.25 "
        "(1.2 to 1.3) at 1.5e12 (p 0.001)"
    )
    assert scaling.law_rejected(0.002) == "no one law fits the runs (p 0.002): by the slope to the next budget"
    assert scaling.beyond_law(100.0).endswith("does not reach its loss within 100 times its budgets")


def test_an_effect_and_what_it_is_at_own_lr():
    row = {
        "question": "setting",
        "setting": "depth_scale=lns",
        "n_layers": 12,
        "outcome": "val_loss",
        "unit": "nat/token",
    }
    row |= {"unit": "nat/token", "estimate": 0.034, "lo": 0.018, "hi": 0.051, "seeds": 5, "verdict": "higher"}
    assert effects.effect_sentence(row) == (
        "n_layers=12, depth_scale=lns: val_loss higher, +0.034 nat/token (95% interval +0.018 to +0.051, 5 seeds)"
    )
    row |= {"unit": "ln ratio", "estimate_own_lr": 1.0367, "lr_baseline": 0.003, "lr": 0.012}
    said = "depth_scale=lns at n_layers=12: x2.82 with each side at its own lr (0.003 -> 0.012)"
    assert effects.own_lr_line(row) == said


def test_the_law_and_the_crossovers_of_committed_results(command):
    out, _ = command("scaling", "fit", RESULTS / "depth_study_two_depths", "--bootstrap", 0)
    assert "warning: 70 points have 3 shapes and budgets" in out
    out, _ = command("scaling", "depth", RESULTS / "equal_flops_trial_tuned")
    assert "n_layers=32: worth its cost from 1.1e13 FLOPs" in " ".join(out.split())


def test_costs_say_what_they_are_relative_to():
    baseline = Record(model=None, params=124128, flops=6.393e11, knobs={"n_layers": 12})
    settings = Record(baseline=baseline, varying=("lr", "n_layers"))
    assert differences.cost_text(settings, ("seeds", "params")) == (
        "params: relative to the baseline with 12 layers (124128)"
    )
    assert differences.cost_text(settings, ("seeds",)) == ""


def test_what_carrying_lr_costs_and_whether_it_may_be():
    regret = (0.0123, 0.001, 0.024)
    shapes = [
        Record(regret=0.0, edge=None),
        Record(regret=0.025, edge=None),
        Record(regret=None, shape="n_layers=24", lr=0.01),
    ]
    carried = [Record(setting="baseline", regret=regret, n_seeds=3, shapes=shapes, rms=0.02)]
    first, second, _ = scaling.carry_lines(carried, {"n_layers": 6})
    assert first == (
        "baseline: carrying lr from n_layers=6 adds 0.0123 nat/token (0.001 to 0.024, 3 seeds, 2 shapes); rms over "
        "shapes, for a definition: carry_regret: 0.02"
    )
    assert second == "baseline: left out: n_layers=24, where lr=0.01, the best at n_layers=6, was not run"
    slopes = [
        Record(axis=axis, quantity="update", slope=slope, is_flat=abs(slope) < 0.2)
        for axis, slope in (("d_model", 0.5), ("n_layers", 0.01))
    ]
    wide, deep = scaling.check_lines(slopes, "standard")
    assert "not flat (update): do not carry lr over d_model" in wide and "update d_model^+0.50" in wide
    assert "flat: lr may be carried over n_layers" in deep


def test_captions_of_ladders_and_of_parallel_lines():
    assert "with its 95% interval: one value for all budgets." in captions.ladder_caption(0, [])
    drifting = captions.ladder_caption(2, ["depth_scale=lns"])
    assert "at each budget of depth_scale=lns, whose drift is shown; else one value" in drifting
    assert drifting.endswith(" Not shown: 2 settings worth less.")
    assert captions.ladder_caption(1, [], "tokens").endswith(" Not shown: 1 setting worth less.")
    assert "Below: the tokens that the baseline needs" in captions.ladder_caption(0, [], "tokens")
    assert captions.parallel_caption(1, "val_loss").startswith("Each line: one of 1 proposal, darker the better")


def test_the_worth_at_both_ends_of_a_ladder():
    ends = {"at_smallest": (1.25, 1.18, 1.32, 2e17), "at_largest": (1.01, 0.958, 1.07, 6.4e18)}
    record = {}
    for name, (worth, lo, hi, budget) in ends.items():
        record |= {name: worth, f"{name}_lo": lo, f"{name}_hi": hi, f"{name.removeprefix('at_')}_budget": budget}
    assert judge.ends_text(record) == "1.25 (1.18 to 1.32) at 2e17, 1.01 (0.958 to 1.07) at 6.4e18"


def test_what_raises_a_quantity():
    raised = {"weight_sparsity": ["weight_decay=1"], "usefulness": []}
    told = "raised at 12 layers: weight_sparsity by weight_decay=1; usefulness by no setting"
    assert report.raised_line(12, raised) == told
    assert report.raised_line(12, {}) == ""
