"""Several budgets as a user meets them: `effects --as speedup`, `scaling depth`, and what both refuse."""

import json
import re

import pytest
from support.budget_results import FLOPS, budget_results
from support.tiny_sweep import sparsedepth

from sparsedepth.config.run import RunConfig
from sparsedepth.words.scaling import NO_TIMES


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return budget_results(tmp_path_factory.mktemp("budgets"))


def test_each_setting_is_worth_what_was_planted(results):
    rows = json.loads(sparsedepth("effects", results, "--as", "speedup", "--format", "json")[0])
    assert {(row["n_layers"], row["setting"]) for row in rows} == {(4, "depth_scale=lns"), (16, "depth_scale=lns")}
    assert len(rows) == 10
    for row in rows:
        assert row["lo"] <= 1.3 <= row["hi"] and row["multiplier"] == pytest.approx(1.3, rel=0.05)
        assert row["time_multiplier"] == pytest.approx(0.8 * row["multiplier"])
        assert row["law"] == "power law" and row["p_drift"] > 0.05 and row["seeds"] == 3
    out, _ = sparsedepth("effects", results, "--as", "speedup", "--knob", "depth_scale")
    assert "n_layers=16, depth_scale=lns: worth 1.3" in out and "times the compute (1." in out
    out, _ = sparsedepth("effects", results, "--as", "speedup", "--format", "csv")
    assert out.startswith("n_layers,setting,train_")


def test_times_of_a_cpu_are_not_compared(results, tmp_path):
    """Its runs are beside other work, and beside each other; what a setting is worth in compute stays."""
    folder = budget_results(tmp_path, budgets=FLOPS[:3], device="cpu (x86_64)")
    rows = json.loads(sparsedepth("effects", folder, "--as", "speedup", "--format", "json")[0])
    assert {(row["time_multiplier"], row["time_reason"]) for row in rows} == {(None, NO_TIMES)}
    assert all(row["multiplier"] == pytest.approx(1.3, rel=0.05) for row in rows)
    out = " ".join(sparsedepth("effects", folder, "--as", "speedup")[0].split())
    assert "times the time" not in out and "time_" not in out and out.count(NO_TIMES) == 1
    for of, are_known in ((results, True), (folder, False)):
        rows = json.loads(sparsedepth("effects", of, "--format", "json")[0])
        assert all((row["time"] is not None) == are_known for row in rows if row["question"] == "setting")


def test_a_recipe_says_what_its_settings_are_worth(results, tmp_path):
    """The planted 1.3, as `effects --as speedup` has it at the budget of the effect."""
    (candidate,) = json.loads(sparsedepth("recipe", results, "--format", "json")[0])["recipe"]["candidates"]
    worth, lo, hi = candidate["compute"]
    assert lo <= 1.3 <= hi
    rows = json.loads(sparsedepth("effects", results, "--as", "speedup", "--format", "json")[0])
    assert [worth, lo, hi] == [rows[-1][name] for name in ("multiplier", "lo", "hi")]
    out, _ = sparsedepth("recipe", results)
    assert f"worth {worth:.3g} times the compute ({lo:.3g} to {hi:.3g})." in " ".join(out.split())
    assert re.search(rf"x{worth:.3g} +depth_scale=lns", out)
    sparsedepth("recipe", results, "-o", tmp_path / "r.yaml")
    assert f"x{worth:.3g} ({lo:.3g} to {hi:.3g})" in (tmp_path / "r.card.md").read_text()


def test_the_budget_from_which_depth_is_worth_its_cost(results):
    out, _ = sparsedepth("scaling", "depth", results)
    assert "n_layers=16: worth its cost from " in out
    baseline, lns = json.loads(sparsedepth("scaling", "depth", results, "--format", "json")[0])
    assert (baseline["setting"], baseline["budget"], baseline["largest"]) == ("baseline", 8e12, 1.6e13)
    assert lns["setting"] == "depth_scale=lns" and lns["budget"] == 4e12  # at 1.3 times the compute


def test_a_rising_curve_and_other_data_are_refused(tmp_path):
    budget_results(tmp_path / "rising", budgets=FLOPS[:3], seeds=[0], rises=True)
    error = " ".join(sparsedepth("effects", tmp_path / "rising", "--as", "speedup", code=2)[1].split())
    assert "a loss that does not fall with the budget (1.331 at 1e+12 FLOPs, 1.5 at 4e+12); tune lr" in error
    folder = budget_results(tmp_path / "lengths", budgets=FLOPS[:3])
    budget_results(folder, budgets=FLOPS[:3], settings=["none"], seq_len=RunConfig().seq_len * 2)
    out, _ = sparsedepth("scaling", "depth", folder)  # within a setting the length is one
    assert (
        f"n_layers=16, seq_len={RunConfig().seq_len * 2}: not known (no difference is shown at" in out
        and "depths differ" not in out
    )
    error = " ".join(sparsedepth("effects", folder, "--as", "speedup", code=2)[1].split())
    assert "runs differ in seq_len: losses on other data or at other lengths" in error and "--knob" in error
    sparsedepth("effects", folder, "--as", "speedup", "--knob", "depth_scale")


def test_questions_that_go_with_losses_alone(results):
    assert "--as speedup is about" in sparsedepth("effects", results, "--as", "speedup", "--part", "chain", code=2)[1]
    error = sparsedepth("effects", results, "--as", "speedup", "--by", "params_total", code=2)[1]
    assert "is no loss that falls with compute" in " ".join(error.split())
    error = sparsedepth("effects", results, "--as", "speedup", "--knob", "norm", code=2)[1]
    assert "no two runs differ in norm" in error


def test_effects_are_of_the_largest_budget(results):
    """Budgets are no settings: LNS against the baseline at 1.6e13 FLOPs, where .5 (1.3 x 4)^-.4 - .5 4^-.4 = -.029."""
    out, _ = sparsedepth("effects", results)
    assert "several train_tokens were run: effects at that of most settings" in out and "beside" not in out
    rows = json.loads(sparsedepth("effects", results, "--format", "json")[0])
    (deep,) = [row for row in rows if row["question"] == "setting" and row["n_layers"] == 16]
    assert deep["setting"] == "depth_scale=lns" and deep["estimate"] == pytest.approx(-0.0286, abs=0.0015)
