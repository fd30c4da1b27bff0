"""A sweep that tunes, walked through every state: what each command and figure says of 0, 1, 3, ... complete runs."""

import math
import re
import shutil
from pathlib import Path

import pytest
import yaml
from support.made_up_runs import make_run

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.tasks import Plan
from sparsedepth.plots.draw import FIGURES, drawable
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.recipe.choose import derive
from sparsedepth.report.content import content
from sparsedepth.scaling.points import read_points
from sparsedepth.store import saved_queries
from sparsedepth.store.connection import open_store
from sparsedepth.words.plain_text import counted
from sparsedepth.words.saved_queries import answer_text

SWEEP = {
    "name": "walk",
    "question": "q",
    "hypothesis": "h",
    "base": {"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 1280},
    "space": {"n_layers": [2, 4]},
    "variants": [{}, {"n_experts": 4, "d_expert": 64, "top_k": 2}],  # the experts cost more, so they come first
    "tune": {"lr": [1e-3, 2e-3, 4e-3]},
    "tuning_seeds": [101],
    "seeds": 2,
}
N_TUNING, N_ALL = 12, 20
OF_TUNING = ("learning_rate", "layer_profile")
"""Figures that also show runs of tuning."""
OF_A_SEARCH = ("slices", "parallel")


def make(results: Path, config: RunConfig) -> float:
    """0.2 lower with experts, best at lr 0.002, and by far the lowest with the seed of tuning."""
    loss = 3 - 0.1 * config.n_layers - 0.2 * bool(config.n_experts) + abs(math.log(config.lr / 2e-3))
    loss += 0.01 * config.seed if config.seed < 101 else -0.5
    summary = {"val_loss": loss, "tokens_trained": 1280, "train_flops": 1e9, "params_total": 1000, "usefulness": 1.0}
    summary |= {"residual_variance_last": loss, "causal_score": loss, "weight_sparsity": loss, "params_active": 1000}
    metrics = ("residual_variance", "causal_effect", "affine_loss_increase", "gradient_norm")
    layers = [
        {"step": 5, "layer": layer, "metric": metric, "value": loss + layer, "n": 10}
        for layer in range(1, config.n_layers + 1)
        for metric in metrics
    ]
    curves = [{"step": step, "tokens": 128 * step, "train_loss": 5.0 - step / 10} for step in (1, 5, 10)]
    make_run(results, config, summary, layers=layers, curves=curves)
    return loss


def walk(results: Path, states: tuple[int, ...], sweep=SWEEP):
    """The number of complete runs, at each of the states; runs are completed in the order of the plan."""
    (results / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    plan, losses = Plan(build(SweepDefinition, sweep, "test")), dict[str, float]()
    for n_complete in states:
        while len(losses) < n_complete:
            config = next(run.config for run in plan.runs(losses.get) if run.run_id not in losses)
            losses[config.run_id] = make(results, config)
        yield n_complete


@pytest.fixture
def say(command, monkeypatch):
    """What a command prints, its lines joined."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments, code=0) -> str:
        out, err = command(*arguments, code=code)
        assert "Traceback" not in err and (code == 0 or err.count("\n") == 1)
        return " ".join((out + err).split())

    return call


def test_every_answer_is_true_in_every_state(tmp_path, say):
    for n in walk(tmp_path, (0, 1, 3, N_TUNING + 1)):
        status = say("status", tmp_path)
        assert f"{n} complete, 0 running, 0 interrupted, 0 failed, {N_ALL - n} planned" in status
        best = say("best", tmp_path, code=0 if n > N_TUNING else 2)
        if n == 0:
            none = f"no complete run in {tmp_path} so far; see the state of its sweep: sparsedepth status"
            for command in (("query", "--ask", "mechanism"), ("plot", "-o", tmp_path / "a.png"), ("scaling", "fit")):
                assert none in say(*command, tmp_path, code=2)
            assert none in best
            continue
        with open_store(tmp_path) as store:
            names = saved_queries.QUESTIONS if n > N_TUNING else saved_queries.sentences()
            answers = {name: " ".join(answer_text(saved_queries.answered(store, name)).split()) for name in names}
        assert "every run trained to the end" in answers.pop("diverged")
        assert "none: no model was measured" in answers.pop("models")
        assert "none: no training was measured" in answers.pop("trainings")
        lr_curves = answers.pop("lr_curves")
        assert ("no configuration was run at two values of lr" if n == 1 else "n_experts=4") in lr_curves
        if n <= N_TUNING:
            reason = f"only tuning runs are complete so far ({n} of {N_TUNING})"
            assert "lowest tuning run: val_loss" in status and "no result is complete yet" in status
            assert "n_experts=4, seed 101" in status
            with pytest.raises(ValueError, match=re.escape(reason)):
                read_points(tmp_path)
            assert all(reason in said for said in (best, *answers.values()))
            assert reason in say("effects", tmp_path, code=2)
            assert f"only tuning runs are complete so far ({n})" in say("recipe", tmp_path, code=2)
        else:
            assert "lowest single run: val_loss 2.4 (n_layers=4, n_experts=4, seed 0" in status
            assert "baseline: n_experts=0" in best and f"{counted((n - N_TUNING + 1) // 2, 'configuration')} of" in best
            assert "n_experts=4" in best.partition("setting")[2]
            assert "n_experts=4" in answers["mechanism"].partition("baseline: n_experts=0")[2]


@pytest.mark.parametrize("n", [3, N_TUNING + 1])
def test_every_figure_is_drawn_or_says_why_not_in_every_state(tmp_path, n):
    assert [*walk(tmp_path, (n,))] == [n]
    with open_store(tmp_path) as store:
        found = dict(drawable(store, FIGURES))
    left_out = {name: str(reason) for name, reason in found.items() if isinstance(reason, NothingToDraw)}
    drawings = {name: drawing for name, drawing in found.items() if name not in left_out}
    assert {*drawings} | {*left_out} == {*FIGURES}
    labels = {"n_experts=4"} if n == 3 else {"baseline", "n_experts=4"}
    assert set(drawings["learning_rate"].data["setting"]) == labels
    if n < N_TUNING:
        assert {*drawings} <= {*OF_TUNING}
        assert "no model of others was measured; sparsedepth measure MODEL" in left_out["models"]
        for name in {*left_out} - {*OF_A_SEARCH, "models"}:
            assert f"only tuning runs are complete so far ({n} of {N_TUNING})" in left_out[name]


def test_a_cut_space_names_the_lowest_run_of_what_is_left(tmp_path, say):
    for _ in walk(tmp_path, (N_ALL,)):
        pass
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({**SWEEP, "variants": [{}]}))
    status = say("status", tmp_path)
    assert "lowest single run of this definition: val_loss 2.6 (n_layers=4, baseline, seed 0" in status
    assert "10 other complete runs are in the folder" in status


def test_a_deepest_baseline_with_tuning_runs_alone_is_a_reason_and_no_error(tmp_path):
    """As between its tuning and its results, or where a new lr value reopened its tuning."""
    for _ in walk(tmp_path, (N_ALL,)):
        pass
    for run in (tmp_path / "runs").iterdir():
        config = yaml.safe_load((run / "config.yaml").read_text())
        if config["n_layers"] == 4 and not config["n_experts"] and config["seed"] < 101:
            shutil.rmtree(run)
    with open_store(tmp_path) as store:
        recipe = derive(store.frame("select * from runs"), depth=4)
    assert "the baseline of this depth has only tuning runs so far" in recipe.abstained


GRID = {name: value for name, value in SWEEP.items() if not name.startswith("tun")} | {
    "variants": [{}, {"norm": "post"}]
}
BRANCHES = {
    **GRID,
    "base": {**SWEEP["base"], "schedule": "wsd", "warmup_tokens": 128},
    "branch_at": [0.5],
    "space": {"n_layers": [2]},
}
SEARCH = {**SWEEP, "sampler": "random", "n_trials": 4, "seeds": 1, "space": {"n_layers": [2, 4], "lr": [1e-3, 2e-3]}}
SEARCH = {name: value for name, value in SEARCH.items() if name not in ("variants", "tune", "tuning_seeds")}
ASKED = (("recipe",), ("effects",), ("query", "--ask", "variance"), ("query", "--ask", "depth"))


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("sweep", [GRID, BRANCHES], ids=["grid", "branches"])
def test_pending_runs_are_told_by_every_answer_until_none_is_left(tmp_path, say, sweep, n):
    assert [*walk(tmp_path, (n,), sweep)] == [n]
    pending = f"ending: {8 - n} of the 8 planned runs are not complete"
    for question in ASKED:
        said = say(*question, tmp_path)
        assert (pending in said) == (n < 8), said
        assert "nothing was varied" not in said
    with open_store(tmp_path) as store:
        for name, found in drawable(store, FIGURES):
            assert not isinstance(found, NothingToDraw) or (pending in str(found)) == (n < 8), name
        assert (pending in content(store, [tmp_path]).summary[0]) == (n < 8)
    if sweep is GRID and n > 4:  # else there is one depth
        assert (pending in say("scaling", "depth", tmp_path)) == (n < 8)


def test_a_depth_never_run_and_a_setting_never_varied_are_no_pending_runs(tmp_path, say):
    for _ in walk(tmp_path, (4,), GRID | {"variants": [{}]}):
        assert "no setting was run at both 2 and 4 layers" in say("recipe", tmp_path, "--depth", 3)
        assert "no setting was run at both 4 and 2 layers" in say("recipe", tmp_path, "--depth", 9)
        assert "differ in depth alone" in say("query", "--ask", "variance", tmp_path)
        assert "differ in depth alone" in say("plot", "--figure", "effects", "-o", tmp_path / "x.png", tmp_path, code=2)


def test_a_search_has_no_pending_runs(tmp_path, say):
    for _ in walk(tmp_path, (1, 3), SEARCH):
        assert "pending" not in say("effects", tmp_path)
        for question in ASKED[2:]:
            assert "a search chose these runs" in say(*question, tmp_path, code=2)
        assert "rerun the best points" in say("recipe", tmp_path, code=2)


def test_imported_runs_are_never_pending(tmp_path, say):
    table, mapping = tmp_path / "runs.csv", tmp_path / "map.yaml"
    table.write_text("depth,norm,seed,loss\n2,pre,0,2.5\n2,pre,1,2.6\n")
    fields = {"n_layers": "depth", "norm": "norm", "seed": "seed", "val_loss": "loss"}
    mapping.write_text(yaml.safe_dump({"source": "a table", "fields": fields}))
    say("import", table, "--map", mapping, "-o", tmp_path / "theirs")
    told = ("have one configuration", "have one configuration", "was measured in no finished run", "one depth only")
    for question, reason in zip(ASKED, told, strict=True):
        said = say(*question, tmp_path / "theirs")
        assert reason in said and "planned runs" not in said
