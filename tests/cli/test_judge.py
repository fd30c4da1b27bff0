"""The verdict on variants of a table: planted improvements are found, lucky seeds are not, columns are guessed."""

import json
import shlex

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import sparsedepth
from sparsedepth.recipe.judge import greatest_of, judge
from sparsedepth.recipe.judge_table import find_columns
from sparsedepth.scaling.points import read_points
from sparsedepth.store import table_file


def table(path, draw, effects, seeds=4, **more):
    """One row per run: the baseline, and a variant for each effect."""
    rows = [
        {"name": f"v{v}" if v else "baseline", "seed": seed, "val_loss": 3 + effect + 0.01 * draw.standard_normal()}
        for v, effect in enumerate([0.0, *effects])
        for seed in range(seeds)
    ]
    pd.DataFrame(rows).assign(**more).to_csv(path, index=False)
    return path


def test_a_planted_gain_is_found_and_the_others_are_not(tmp_path):
    found = judge(table(tmp_path / "runs.csv", np.random.default_rng(1), [0, -0.05, 0.05, 0]))
    verdicts = {row["variant"]: row["verdict"] for row in found.table.records()}
    assert verdicts == {"v1": "not shown", "v2": "better", "v3": "worse", "v4": "not shown"}
    first = found.table.records()[0]
    assert first["variant"] == "v2" and first["lo"] < -0.05 < first["hi"] < 0 and first["seeds_wanted"] is None
    assert found.verdict == "better" and found.is_paired and found.baseline == "baseline"
    alone = judge(tmp_path / "runs.csv", variant="v3")
    (row,) = alone.table.records()
    assert row == {r["variant"]: r for r in found.table.records()}["v3"] and alone.verdict == "worse"


def test_luck_is_what_the_lowest_of_equal_variants_gains(tmp_path):
    assert greatest_of(1) == pytest.approx(0, abs=1e-6)
    assert greatest_of(2) == pytest.approx(1 / np.sqrt(np.pi), rel=1e-5)
    assert greatest_of(10) == pytest.approx(1.53875, rel=1e-4)
    draw = np.random.default_rng(3)
    luck, gains = [], []
    for _ in range(10):
        found = judge(table(tmp_path / "null.csv", draw, [0.0] * 8, 4))
        assert found.luck[0] == 8
        luck.append(found.luck[1])
        gains.append(-found.table.records()[0]["effect"])
    assert np.mean(luck) == pytest.approx(np.mean(gains), rel=0.3)


def test_seeds_that_no_two_variants_share_are_compared_by_means(tmp_path):
    """Logs of speed runs: every run has a name of its own, and variants have different numbers of runs."""
    draw = np.random.default_rng(4)
    sizes = {"record": 12, "new": 6}
    rows = [
        {"record": name, "run": f"{name}-{k}", "val_loss": 3.28 - 0.004 * (name == "new") + 0.0013 * draw.normal()}
        for name, n in sizes.items()
        for k in range(n)
    ]
    path = tmp_path / "records.jsonl"
    pd.DataFrame(rows).to_json(path, orient="records", lines=True)
    found = judge(path)
    (row,) = found.table.records()
    assert not found.is_paired and found.baseline == "record" and row["verdict"] == "better"
    frame = pd.DataFrame(rows)
    losses = [frame[frame["record"] == name]["val_loss"].to_numpy() for name in ("new", "record")]
    from scipy.stats import ttest_ind

    assert row["effect"] == pytest.approx(losses[0].mean() - losses[1].mean())
    interval = ttest_ind(*losses, equal_var=False).confidence_interval()  # each side has its own noise
    assert (row["lo"], row["hi"]) == pytest.approx((interval.low, interval.high), rel=1e-5)


def test_one_seed_each_shows_nothing_and_says_how_many_are_needed(command, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("variant,loss\nbaseline,3.1\na,3.0\nb,3.2\n")
    out, _ = command("judge", path, code=3)
    assert "Not shown" in out and "run each with 3 seeds or more" in " ".join(out.split())
    assert [row["seeds_wanted"] for row in judge(path).table.records()] == [3, 3]


def test_worth_in_compute_and_in_time(command, tmp_path):
    """The public check: 1.130 times the compute, 1.067 times the time, at 410,000 for 433,986 tokens a second."""
    draw = np.random.default_rng(6)
    rows = [
        {"variant": name, "seed": seed, "flops": c, "tokens_per_second": speed,
         "loss": 1.6 + 87.65 * (c * factor) ** -0.0941 + 0.0002 * draw.normal()}
        for name, factor, speed in (("baseline", 1, 433_986), ("new", 1.13, 410_000))
        for seed in range(3) for c in (0.5e17, 1.3e17, 3.82e17)
    ]  # fmt: skip
    path = tmp_path / "runs.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    out, _ = command("judge", path)
    (row,) = judge(path).table.records()
    assert row["multiplier"] == pytest.approx(1.13, rel=0.03) and row["multiplier_lo"] < 1.13 < row["multiplier_hi"]
    assert row["time_multiplier"] == pytest.approx(row["multiplier"] * 410_000 / 433_986)
    assert row["budget"] == 3.82e17 and "times the compute (" in out


def budgets(path, factor=1.0, seeds=(0, 1, 2), column="flops"):
    """Three budgets of the baseline, and a variant that spends `factor` times them, with seeds of its own."""
    draw = np.random.default_rng(6)
    rows = [
        {"name": name, "seed": seed, column: c * times, "loss": 1.6 + 87.65 * c**-0.0941 - gain + 0.002 * draw.normal()}
        for name, times, gain, own in (("baseline", 1, 0, (0, 1, 2)), ("new", factor, 0.05, seeds))
        for seed in own for c in (1e17, 2e17, 4e17)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_the_worth_of_unpaired_runs_is_of_all_of_them_though_one_seed_is_shared(tmp_path):
    paired, shared, own = (judge(budgets(tmp_path / "runs.csv", seeds=s)) for s in ((0, 1, 2), (2, 3, 4), (3, 4, 5)))
    assert [found.is_paired for found in (paired, shared, own)] == [True, False, False]
    (wanted,), (row,) = own.table.records(), shared.table.records()
    assert row["multiplier"] == wanted["multiplier"] and row["multiplier_lo"] == wanted["multiplier_lo"] > 1


def test_flops_within_a_percent_are_one_budget_and_tokens_are_not(tmp_path):
    (row,) = judge(budgets(tmp_path / "runs.csv", 1.004)).table.records()
    assert row["budget"] == 4e17 and row["verdict"] == "better" and row["multiplier"] is not None
    for factor, column in ((1.02, "flops"), (1.004, "tokens")):
        with pytest.raises(ValueError, match="no budget in common"):
            judge(budgets(tmp_path / "runs.csv", factor, column=column))
    frame = pd.concat(
        [pd.read_csv(budgets(tmp_path / "runs.csv", 1.0)).assign(flops=flops) for flops in (1e17, 1.001e17)]
    )
    frame.drop_duplicates(["name", "seed", "flops"]).to_csv(tmp_path / "steps.csv", index=False)
    (row,) = judge(tmp_path / "steps.csv").table.records()
    assert row["budget"] == 1.001e17 and row["seeds"] == 3, "points of one run stay apart"


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_variant_whose_runs_all_diverged(tmp_path, loss):
    path = table(tmp_path / "runs.csv", np.random.default_rng(7), [-0.05, 0])
    frame = pd.read_csv(path)
    frame.loc[frame["name"] == "v2", "val_loss"] = loss
    frame.to_csv(path, index=False)
    rows = {row["variant"]: row for row in judge(path).table.records()}
    assert rows["v1"]["verdict"] == "better"
    assert rows["v2"]["diverged"] == 4 and rows["v2"]["effect"] is None and "none of its runs" in rows["v2"]["reason"]


def test_columns_are_found_by_their_usual_names():
    assert find_columns(["Run Name", "Random seed", "eval/loss", "train_tokens"], {}) == {
        "variant": "Run Name", "seed": "Random seed", "loss": "eval/loss", "budget": "train_tokens",
    }  # fmt: skip
    assert find_columns(["name", "loss", "bpb"], {"loss": "bpb"}) == {"variant": "name", "loss": "bpb"}
    for name in ("val_loss_bf16", "loss_accum_4", "error"):
        assert find_columns(["name", name], {"loss": name})["loss"] == name
    for name in ("val_acc", "accuracy", "f1", "eval/score"):
        with pytest.raises(ValueError, match="--column loss=error"):
            find_columns(["name", name], {"loss": name})


def test_what_is_adjusted_for_the_number_of_variants_is_said(command, tmp_path):
    told = "lo, hi: of each variant by itself; 'better', 'worse': p adjusted over the variants, below 0.05"
    for effects, is_told in (([-0.05, 0], True), ([-0.05], False)):
        out, _ = command("judge", table(tmp_path / "runs.csv", np.random.default_rng(1), effects))
        assert (told in " ".join(out.split())) == is_told


def test_json_and_exit_codes(command, tmp_path):
    path = table(tmp_path / "runs.csv", np.random.default_rng(1), [0.05, 0])
    out, _ = command("judge", path, "--format", "json", "--variant", "v1", code=4)
    (row,) = json.loads(out)
    assert row["variant"] == "v1" and row["verdict"] == "worse" and row["baseline"] == "baseline"
    command("judge", path, "--variant", "v2", code=3)
    command("judge", path, "--baseline", "v1", code=0)  # the baseline is better than v1


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        ("variant,seed,loss\na,0,1\na,1,2\n", (), "a second variant"),
        ("name,loss\na,1\nb,2\n", (), "another of 2 in column 'name'; --column variant=NAME names another column"),
        ("variant,loss\na,1\nb,2\n", ("--baseline", "c"), "no variant 'c' in column 'variant'"),
        ("variant,loss\na,1\nb,x\n", ("--baseline", "a"), "'x' in row 2 (line 3): a number is needed"),
        ("variant,seed,loss\na,0,1\na,0,2\nb,0,3\n", (), "'a' has seed '0' twice"),
        ("what,loss\na,1\nb,2\n", (), "no column is known as the variant"),
        ("variant,loss\na,1\nb,2\n", ("--column", "loss=l"), "no column 'l'"),
        ("variant,my loss\na,1\nb,2\n", ("--column", "loss=my los"), "did you mean 'my loss'?"),
        ("variant,loss\na,1\nb,2\n", ("--column", "varient=name"), "did you mean 'variant'?"),
        ("variant,loss\na,1\nb,2\n", ("--column", "loss"), "must be WHAT=COLUMN"),
        ("variant,seed,loss,tokens\na,0,1,5\na,0,1,6\nb,0,2,7\n", (), "no budget in common"),
        ("variant,loss\na,1\na,2\nb,3\n", (), "no column tells runs apart"),
        ("variant,loss\n", (), "the table has no rows"),
        ("variant,seed,loss\na,0,1\na,,2\nb,0,2\n", (), "row 2 (line 3) has no seed; fill it in"),
        ("variant,seed,loss\na,0,1\n\na,,2\nb,0,2\n", (), "row 2 has no seed"),
        ("variant,seed,loss\na,0,1\n'a\nb',1,2\na,,2\n".replace("'", '"'), (), "row 3 has no seed"),
        ("sep=,\nvariant,seed,loss\na,0,1\n", (), "its first line must name the columns"),
        ("variant,loss,flops\na,1,1\na,diverged,2\nb,2,1\n", (), "leave it empty of a run that diverged"),
        ("variant,loss,flops,params\na,3,1,1\na,2,2,2\na,2,2,2\nb,3,1,1\n", (), "row 3 (line 4) is 'a' again"),
        ("variant,accuracy\na,1\nb,2\n", ("--column", "loss=accuracy"), "better when higher"),
        ("variant,loss\na,1\nb,2\n", ("--where", "los < 2"), "no column 'los'; the table has variant, loss"),
        ("variant,loss\na,1\nb,2\n", ("--where", "loss > 2"), "no row meets --where 'loss > 2'; change it"),
    ],
)
def test_refusals_are_one_line(text, arguments, reason, command, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    _, err = command("judge", path, *arguments, code=2)
    assert reason in err and err.count("\n") == 1


@pytest.mark.parametrize("column", ["variant", "Run Name $HOME"])
def test_a_variant_without_a_common_budget_is_left_out_as_the_refusal_says(column, command, tmp_path):
    path, given = tmp_path / "runs.csv", ("--column", f"variant={column}")
    rows = [
        (name, seed, 3 - (0.1 - seed**2 / 1e3) * (name == "new"), 1e17) for name in ("base", "new") for seed in range(3)
    ]
    rows.append(("it's old", 0, np.nan, 3e17))
    pd.DataFrame(rows, columns=[column, "seed", "loss", "flops"]).to_csv(path, index=False)
    _, error = command("judge", path, *given, code=2)
    fix = shlex.split(error.partition("leave one of them out with ")[2])
    out, _ = command("judge", path, *given, *fix)
    assert "used: 6 of 6 runs; 1 row left out by where" in out and "Better: 'new'" in out


@pytest.mark.parametrize("slip", [338, 0.295])
def test_a_slipped_decimal_is_warned_of_and_left_out_as_the_warning_says(slip, command, tmp_path):
    path = table(tmp_path / "runs.csv", np.random.default_rng(1), [-0.05, 0.0])
    frame = pd.read_csv(path)
    assert not command("judge", path)[1]
    frame.loc[5, "val_loss"] = slip
    frame.to_csv(path, index=False)
    _, error = command("judge", path, "--format", "json", code=3)
    median = frame["val_loss"].drop(5)[frame["name"] == "v1"].median()
    told = f"val_loss is {slip} in row 6 (line 7), of 'v1': the median of the others is {median:.4g}"
    assert told in error and error.count("\n") == 1
    out, error = command("judge", path, *shlex.split(error.partition("leave it out with ")[2]))
    assert "1 row left out by where" in out and "Better: 'v1'" in out and not error


def test_a_task_that_few_runs_solve_and_a_long_ladder_have_no_slips(command, tmp_path):
    losses = [1.2, 1.21, 1.19, 0.03, 1.2, 1.22, 1.21, 0.05]
    path = tmp_path / "runs.csv"
    runs = pd.DataFrame({"variant": ["base"] * 4 + ["new"] * 4, "seed": [0, 1, 2, 3] * 2, "loss": losses})
    runs.to_csv(path, index=False)
    assert not command("judge", path, code=3)[1]
    rungs(path, lambda c: power_law(c) + 4e34 / c**2)
    assert not command("judge", path)[1]


def test_variants_that_differ_in_case_are_named(command, tmp_path):
    path = tmp_path / "runs.csv"
    names = ["base", "Muon W", "muon w"]
    lines = [f"{name},{seed},{3 + seed**2 / 100}" for name in names for seed in range(3)]
    path.write_text("\n".join(["variant,seed,loss", *lines]))
    _, error = command("judge", path, "--baseline", "base", code=3)
    assert "'Muon W' and 'muon w' are taken as different variants, and differ in upper case only" in error
    path.write_text(path.read_text().replace("Muon W", "soap"))
    assert not command("judge", path, "--baseline", "base", code=3)[1]


def test_a_results_folder_is_sent_to_effects(command, tmp_path):
    _, err = command("judge", tmp_path, code=2)
    assert "is not a table; use one of .csv, " in err and f"results folder: sparsedepth effects {tmp_path}" in err


def test_runs_at_several_lr_are_no_seeds_and_the_fix_works(command, tmp_path):
    path, rows = tmp_path / "runs.csv", ["config.optimizer,config.seed,config.lr,val/loss"]
    rows += [f"{name},{seed},{lr},{3 + lr + seed / 100}" for name in "ab" for seed in range(3) for lr in (0.1, 0.2)]
    path.write_text("\n".join(rows))
    given = ("--column", "variant=config.optimizer", "--baseline", "a")
    for more in ((), ("--target", 3)):
        _, err = command("judge", path, *(given if not more else (*given[:2], *more)), code=2)
        assert "'a' has 2 values of 'config.lr' at one budget, which are no seeds; keep one for each variant" in err
    path.write_text("\n".join(row for row in rows if ",0.2," not in row))
    out, _ = command("judge", path, *given, code=3)
    assert "seed 'config.seed', loss 'val/loss'; baseline: 'a'" in " ".join(out.split())


def seeds_written(path, own, base="{}"):
    """Five seeds of the baseline and of a variant that is better, each side's seeds written in its way."""
    rows = [
        (n, s, 3 + s / 10 - 0.05 * (n == "lns") + s * s / 1e4 * (n == "lns"))
        for n in ("baseline", "lns")
        for s in range(5)
    ]
    lines = [f"{n},{(own if n == 'lns' else base).format(s)},{loss}" for n, s, loss in rows]
    path.write_text("\n".join(["variant,seed,val_loss", *lines]))
    return path


@pytest.mark.parametrize("form", ["{}.0", "0{}", " {} ", "{}.00", "+{}"])
def test_seeds_are_compared_by_value(tmp_path, form):
    found, plain = (judge(seeds_written(tmp_path / "runs.csv", own)) for own in (form, "{}"))
    assert found.is_paired and found.table == plain.table and found.verdict == "better"


def test_steps_of_wandb_are_no_budget(tmp_path):
    frame = pd.read_csv(table(tmp_path / "runs.csv", np.random.default_rng(1), [-0.05]))
    wanted = judge(tmp_path / "runs.csv").table
    frame.assign(_step=range(1000, 1000 + len(frame)), _runtime=1).to_csv(tmp_path / "runs.csv", index=False)
    found = judge(tmp_path / "runs.csv")
    assert found.table == wanted and "budget" not in found.columns
    assert judge(tmp_path / "runs.csv", {"budget": "step"} if "step" in frame else {}).table == wanted


def test_evaluations_of_one_run_are_no_seeds(tmp_path):
    lines = [
        f"{name},{1e18 * (1 + k / 500):.6g},{loss + k * k / 1e4 * loss}"
        for name, loss in (("baseline", 3), ("new", 2.9))
        for k in range(5)
    ]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(["variant,flops,loss", *lines]))
    with pytest.raises(ValueError, match=r"no column tells runs apart.*--column seed=NAME"):
        judge(path)
    path.write_text("\n".join(["variant,flops,loss,which", *(f"{line},{n % 5}" for n, line in enumerate(lines))]))
    with pytest.raises(ValueError, match="no column tells runs apart"):
        judge(path)
    assert judge(path, {"seed": "which"}).verdict == "better", "the advice works"
    same = [line.replace(line.split(",")[1], "1e18") for line in lines]
    path.write_text("\n".join(["variant,flops,loss", *same]))
    with pytest.raises(ValueError, match="no column tells runs apart"):
        judge(path)


def ladder(path, **columns):
    """A baseline and a better variant, one run of each at four budgets, the model growing with the budget."""
    rows = [
        {"variant": name, "flops": c * times, "loss": 1.6 + 87.65 * c**-0.0941 - gain, "params": (c / 6) ** 0.5}
        for name, gain, times in (("baseline", 0, 1), ("new", 0.05, 1.003))
        for c in (1e17, 2e17, 4e17, 8e17)
    ]
    pd.DataFrame(rows).assign(**columns).to_csv(path, index=False)
    return path


def test_one_run_at_each_budget_is_a_ladder_where_the_model_grows_with_it(tmp_path):
    found = judge(ladder(tmp_path / "runs.csv"))
    (row,) = found.table.records()
    assert "a ladder: each row is taken as a run of its own" in found.used and found.columns["size"] == "params"
    assert found.used.startswith("8 of 8 runs") and row["verdict"] == "better" and row["budgets"] == 4
    assert row["lo"] > 1 and row["effect"] == pytest.approx(-0.05, abs=0.01)
    for columns in ({"params": 1e8}, {"params": np.nan}, {"flops": 1e17}):
        with pytest.raises(ValueError, match="no column tells runs apart"):
            judge(ladder(tmp_path / "runs.csv", **columns))
    frame = pd.read_csv(ladder(tmp_path / "runs.csv")).rename(columns={"params": "Size (M)"})
    frame.rename(columns={"Size (M)": "params", "flops": "spent FLOPs"}).to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(ValueError, match="of a ladder the column of FLOPs or tokens with --column budget=NAME"):
        judge(tmp_path / "runs.csv")
    assert judge(tmp_path / "runs.csv", {"budget": "spent FLOPs"}).table == found.table, "the advice works"
    frame.assign(tokens=frame["Size (M)"] / 1e6).to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(ValueError, match="of a ladder the column of sizes with --column size=NAME"):
        judge(tmp_path / "runs.csv")
    sized = judge(tmp_path / "runs.csv", {"size": "Size (M)"})
    assert sized.table == found.table, "the advice works"
    assert "FLOPs are 1e+06 to 1e+06 times 6 x parameters x tokens in 8 of 8 rows" in sized.used
    lost = [np.nan if i == 5 else loss for i, loss in enumerate(frame["loss"])]
    assert judge(ladder(tmp_path / "runs.csv", loss=lost)).used.startswith(
        "7 of 8 runs, 1 without a loss: 'new' at 2e17; a ladder"
    )
    one_model = judge(ladder(tmp_path / "runs.csv", params=1e8, seed=0))
    assert "ladder" not in one_model.used and "size" not in one_model.columns and one_model.ladder is None
    for columns in ({"seed": 0}, {"run": range(8), "params": np.nan}):
        assert judge(ladder(tmp_path / "runs.csv", **columns)).table.rows[0][1:8] == found.table.rows[0][1:8]


def rungs(path, loss_of, sides=(("baseline", 1.0), ("new", 1.15)), budgets=6, **columns):
    """One run at each budget, with noise of .004; `loss_of`: compute -> loss, which a side has at times its own."""
    draw, flops = np.random.default_rng(3), np.geomspace(2e17, 6.4e18, 6)[:budgets]
    rows = [
        {"variant": name, "flops": c, "params": (c / 120) ** 0.5, "tokens": 20 * (c / 120) ** 0.5,
         "loss": loss_of(c * times) + draw.normal(0, 0.004)}
        for name, times in sides for c in flops
    ]  # fmt: skip
    pd.DataFrame(rows).assign(**columns).to_csv(path, index=False)
    return path


def power_law(c):
    return 1.9 + 4.1 * (c / 1e16) ** -0.13


def test_a_ladder_is_answered_in_a_sentence_for_each_variant(command, tmp_path):
    sides = (("baseline", 1.0), ("new", 1.15), ("same", 1.0), ("worse", 0.8))
    out, _ = command("judge", rungs(tmp_path / "runs.csv", power_law, sides))
    assert "'new': worth 1.1" in out and "times the compute" in out and "at every size" in out
    assert "'same': not shown: " in out and "'worse': worth 0." in out and "Better: 'new'." in out
    table = command("judge", tmp_path / "runs.csv", "--format", "json")[0]
    by_name = {row["variant"]: row for row in json.loads(table)}
    assert [by_name[name]["verdict"] for name, _ in sides[1:]] == ["better", "not shown", "worse"]
    new = by_name["new"]
    assert new["beyond_hi"] / new["beyond_lo"] > new["hi"] / new["lo"] > 1, "an extrapolation is less certain"


def test_budgets_that_are_no_flops_and_losses_in_another_unit_have_their_own_names(command, tmp_path):
    path = rungs(tmp_path / "runs.csv", power_law)
    own = pd.read_csv(path).drop(columns="tokens").rename(columns={"flops": "steps", "loss": "val_bpb"})
    own.to_csv(path, index=False)
    out, _ = command("judge", path, "--plot", tmp_path / "a.svg")
    assert " times the steps (" in out and "compute" not in out
    picture = (tmp_path / "a.svg").read_text()
    assert ">val_bpb<" in picture and ">steps multiplier<" in picture
    assert not any(word in picture for word in ("FLOP", "nat/token", "compute"))


def test_nothing_that_is_written_replaces_the_table(command, tmp_path):
    """Also where a picture of that name lies beside the table."""
    path = rungs(tmp_path / "runs.csv", power_law)
    before = path.read_bytes()
    for _ in range(2):
        _, error = command("judge", path, "--plot", tmp_path / "runs.svg", code=2)
        assert "runs.csv would be replaced by the numbers of runs.svg; give the picture another name" in error
        _, error = command("judge", path, "-o", path, code=2)
        assert "runs.csv is the table itself, which would be replaced by its verdicts; name another file" in error
        assert path.read_bytes() == before
        (tmp_path / "runs.svg").touch()


def test_a_pinned_asymptote_changes_the_worth_as_the_formula_says(tmp_path):
    """ln m = ln(part of the baseline / part of the variant) / alpha, of what lies above L_inf."""
    path = rungs(tmp_path / "runs.csv", power_law)
    (row,) = judge(path, asymptote=1.9).table.records()
    assert row["multiplier"] == pytest.approx(1.15, abs=0.03)
    with pytest.raises(ValueError, match=r"the asymptote 3\.9 is not between 0 and the lowest loss"):
        judge(path, asymptote=3.9)
    with pytest.raises(ValueError, match=r"--asymptote 1\.9 is for a ladder"):
        judge(table(tmp_path / "seeds.csv", np.random.default_rng(1), [0.0], 3), asymptote=1.9)


def test_what_no_ladder_can_answer(command, tmp_path):
    path = tmp_path / "runs.csv"
    with pytest.raises(ValueError, match="a loss that does not fall with the budget"):
        judge(rungs(path, lambda c: -power_law(c) + 9))
    frame = pd.read_csv(rungs(path, power_law))
    frame.loc[3, "flops"] /= 1e15
    frame.to_csv(path, index=False)
    with pytest.raises(ValueError, match="write all budgets in one unit"):
        judge(path)
    frame = pd.read_csv(rungs(path, power_law))
    frame.assign(tokens=1.2 * frame["tokens"]).to_csv(path, index=False)
    assert "FLOPs are 0.83 to 0.83 times 6 x parameters x tokens in 12 of 12 rows" in judge(path).used
    (row,) = judge(rungs(path, power_law, budgets=2)).table.records()
    assert row["verdict"] == "not shown" and "two seeds" in row["reason"]
    frame = pd.read_csv(rungs(path, power_law))
    frame[(frame["variant"] == "baseline") | (frame["flops"] < 3e17)].to_csv(path, index=False)
    (row,) = judge(path).table.records()
    assert row["lo"] is None and "leaves no noise to judge by" in row["reason"]
    frame.loc[frame["variant"] == "new", "loss"] = 1.0
    frame.to_csv(path, index=False)
    out, _ = command("judge", path, code=3)
    assert "withheld: the law of the baseline does not reach its loss" in out


RECORD = [3.27676, 3.27770, 3.27869, 3.27831, 3.27789, 3.27830, 3.27757, 3.27857]
"""Eight runs of a public speed record, whose rule asks for a mean below 3.28."""


def test_a_target_as_rules_of_records_ask(command, tmp_path):
    """mean 3.27797375, sd .000641: t -8.94 of 7 degrees of freedom, p 2.2e-5."""
    path = tmp_path / "runs.csv"
    runs = pd.DataFrame({"variant": "nsr", "seed": range(8), "val_loss": RECORD})
    near = runs.assign(variant="near", val_loss=3.2795 + np.array([0, 1, -1, 2, -2, 1, -1, 0]) * 1e-3)
    above = runs.assign(variant="above", val_loss=runs["val_loss"] + 0.01)
    runs.to_csv(path, index=False)
    (row,) = sparsedepth.judge(path, target=3.28).table.records()
    assert row["p_adjusted"] == pytest.approx(stats.ttest_1samp(RECORD, 3.28, alternative="less").pvalue, rel=1e-6)
    assert row["p_adjusted"] < 1e-4 and row["verdict"] == "below"
    pd.concat([runs, near, above, runs.head(1).assign(variant="one")]).to_csv(path, index=False)
    out, _ = command("judge", path, "--target", 3.28)
    assert "'nsr': below 3.28 (p " in out and "'above': not shown: its mean, 3.288" in out
    assert "'one': not shown: a test needs two seeds" in out
    (found,) = sparsedepth.judge(path, target=3.28, variant="near").table.records()
    wanted = found["seeds_wanted"]
    effect = 0.0005 / near["val_loss"].std()
    assert found["verdict"] == "not shown" and wanted > 8
    power = stats.nct.cdf(-stats.t.ppf(0.99, wanted - 1), wanted - 1, -effect * np.sqrt(wanted))
    assert power == pytest.approx(0.8, abs=0.05)
    command("judge", path, "--target", 3.28, "--variant", "near", code=3)
    for arguments in (("--baseline", "nsr"), ("--variant", "nrs"), ("--asymptote", 1)):
        command("judge", path, "--target", 3.28, *arguments, code=2)
    command("judge", path, "--target", "nan", code=2)


def test_settings_that_never_share_a_budget_are_compared_by_the_law(tmp_path):
    frame = pd.read_csv(rungs(tmp_path / "runs.csv", power_law))
    own = frame["variant"] == "new"
    frame.loc[own, "loss"] = power_law(1.15 * 1.4 * frame.loc[own, "flops"])
    frame.loc[own, "flops"] *= 1.4
    frame.drop(columns=["params", "tokens"]).assign(run=range(12)).to_csv(tmp_path / "runs.csv", index=False)
    (row,) = judge(tmp_path / "runs.csv").table.records()
    assert row["verdict"] == "better" and row["lo"] < 1.15 < row["hi"]


def test_two_thousand_variants_are_judged_and_more_refused_in_a_line(tmp_path, monkeypatch):
    table(tmp_path / "runs.csv", np.random.default_rng(1), [0.0] * 300, 2)
    assert len(judge(tmp_path / "runs.csv").table.rows) == 300
    monkeypatch.setattr("sparsedepth.recipe.variants.MAX_SIZE", 300 * 300)
    with pytest.raises(ValueError, match=r"300 variants and 2 seeds at one budget are too many.*leave some out"):
        judge(tmp_path / "runs.csv")


@pytest.mark.parametrize("has_seeds", [True, False])
def test_the_order_of_rows_says_nothing(tmp_path, has_seeds):
    frame = pd.read_csv((budgets if has_seeds else ladder)(tmp_path / "runs.csv"))
    answers = []
    for draw in range(3):
        frame.sample(frac=1, random_state=draw).to_csv(tmp_path / "runs.csv", index=False)
        answers.append(judge(tmp_path / "runs.csv"))
    assert len({str(answer) for answer in answers}) == 1


def test_it_says_what_it_used(command, tmp_path):
    path = table(tmp_path / "runs.csv", np.random.default_rng(7), [-0.05, 0], seeds=4)
    frame = pd.read_csv(path)
    frame.loc[[1, 6], "val_loss"] = np.nan
    frame.rename(columns={"name": "name "}).assign(**{"": np.nan}).to_csv(path, index=False)
    out, _ = command("judge", path)
    assert (
        "used: 10 of 12 runs, 2 without a loss; 1 column without a name left out; blanks around 1 name left out, "
        "such as 'name'" in " ".join(out.split())
    )
    assert judge(budgets(path, seeds=(0, 1, 2))).used == "6 of 18 runs, 12 at budgets that are not compared"


def test_a_table_has_as_long_as_it_is_given(command, tmp_path, monkeypatch):
    """Seconds without progress, as the message of its end advises."""
    path, given = table(tmp_path / "runs.csv", np.random.default_rng(7), [-0.05, 0]), []
    read = table_file.in_child
    monkeypatch.setattr(table_file, "in_child", lambda *a: given.append(a[-1]) or read(*a))
    command("judge", path, "--deadline", 7)
    judge(path)
    points = tmp_path / "points.csv"
    pd.DataFrame({"model_size": [1e6], "num_tokens": [1e8], "d_model": [64], "n_layers": [2], "loss": [3.0]}).to_csv(
        points
    )
    read_points(points, seconds=9)
    assert given == [7, 60, 9]


@pytest.mark.parametrize(
    "rows, told",
    [
        ({"name": ["base", "base", "new", "new"], "seed": [0, 1, 0, 1], "loss": [3.2, 3.1, -3.2, -3.1]},
         r"'loss' is below and above 0 \(-3\.2 to 3\.2\).*negate log-likelihoods"),
        ({"run_name": ["adam_seed0", "adam_seed1", "muon_seed0", "muon_seed1"], "loss": [3.2, 3.1, 3.0, 2.9]},
         "names such as 'adam_seed0' seem to end in a seed: give 'adam' and 'muon', and the seeds, a column each"),
        ({"run_name": ["w64", "w128", "lns"], "loss": [3.2, 3.1, 3.0]}, "which variant is the baseline"),
    ],
)  # fmt: skip
def test_a_table_that_means_something_else_is_refused_with_the_fix(tmp_path, rows, told):
    pd.DataFrame(rows).to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(ValueError, match=told):
        judge(tmp_path / "runs.csv", {"variant": next(iter(rows))})
