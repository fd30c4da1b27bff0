"""Every sampler through the study, the queue and the worker's objective, with runs that are made up in an instant."""

import json
import math
import statistics

import optuna
import pytest
from synthetic import make_run

from sparsedepth.config.load import build
from sparsedepth.config.runtime import DEFAULT
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.results_index import ResultsIndex
from sparsedepth.plan.tasks import Plan
from sparsedepth.run.scratch import Pruned, Scratch
from sparsedepth.sweep import study as queue
from sparsedepth.sweep.rebuild import rebuild
from sparsedepth.sweep.worker import Worker, empty_the_queue

BASE = {"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 1280}
SPACE = {"lr": {"low": 1e-3, "high": 1e-1, "log": True}, "n_layers": [1, 2, 3]}


def sweep(**fields) -> SweepDefinition:
    values = {"name": "s", "question": "q", "hypothesis": "h", "base": BASE, **fields}
    return build(SweepDefinition, values, "s.yaml")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Optuna's storage in memory, by URL, and nothing flushed to disk: what a power cut leaves is not tested here."""
    stores = {}
    monkeypatch.setattr(queue, "open_storage", lambda url: stores.setdefault(url, optuna.storages.InMemoryStorage()))
    monkeypatch.setattr("os.fsync", lambda handle: None)
    return stores


class MadeUp(Worker):
    """Runs that end at once: the loss is best at lr 0.01, deeper is less useful, and lr above 0.05 diverges."""

    def run(self, config, trial):
        loss = abs(math.log(config.lr / 0.01)) + 0.01 * config.seed
        summary = {"outcome": "ok", "val_loss": loss, "usefulness": 1 / config.n_layers}
        if config.lr > 0.05:
            summary = {"outcome": "diverged"}
        if not (self.results / "runs" / config.run_id).exists():
            make_run(self.results, config, summary)
        return summary


def given(definition, results):
    """What a worker needs that starts no process."""
    never = {"stop": lambda: False, "lease": "0" * 32, "nursery": None}
    return {"definition": definition, "results": results, "runtime": DEFAULT, "max_attempts": 1, **never}


def work(results, definition, number=0):
    """Queue what is missing until nothing is, as the driver does, and let one worker do it."""
    study = queue.open_study(definition, f"sqlite:///{results}/study.db")
    plan, finished = Plan(definition), ResultsIndex(results, definition)
    rebuild(study, plan, results, finished)
    worker = MadeUp(**given(definition, results))
    while missing := queue.missing(
        study, plan.items(finished), lambda item: all(map(finished.is_complete, plan.run_ids(item)))
    ):
        queue.enqueue(study, missing)
        empty_the_queue(worker, study, number)
    return study


def run_ids(results):
    return {path.name for path in results.glob("runs/*")}


@pytest.mark.parametrize("sampler", ["random", "qmc", "tpe", "nsga2"])
def test_a_sampler_proposes_continues_and_is_rebuilt(tmp_path, sampler, quick):
    definition = sweep(sampler=sampler, n_trials=8, space=SPACE, seeds=[0, 1])
    study = work(tmp_path, definition)
    done = run_ids(tmp_path)
    assert len(done) == 16
    numbers = len(study.trials)
    assert len(work(tmp_path, definition).trials) == numbers and run_ids(tmp_path) == done, "nothing is repeated"
    quick.clear()
    rebuilt = work(tmp_path, definition)
    assert run_ids(tmp_path) == done, "the rebuilt study knows what is finished"
    assert {trial.params["lr"] for trial in rebuilt.trials} == {trial.params["lr"] for trial in study.trials}
    best = [min(t.value for t in one.trials if t.value is not None) for one in (study, rebuilt)]
    assert best[0] == pytest.approx(best[1])


def test_points_of_random_and_qmc_depend_on_nothing_but_the_definition():
    """More trials append; QMC fills each half of an axis with half of the points, which random does not promise."""
    cells = {}
    for sampler in ("random", "qmc"):
        small, large = (
            [one.cell for one in Plan(sweep(sampler=sampler, n_trials=n, space=SPACE)).matches] for n in (5, 17)
        )
        assert large[:5] == small and len(large) == 17
        cells[sampler] = large[1:]
    assert cells["random"] != cells["qmc"]
    low = [cell["lr"] < 1e-2 for cell in cells["qmc"]]
    assert sum(low) == 8, "of 16 consecutive points of the sequence"


def test_tpe_learns(tmp_path):
    study = work(tmp_path, sweep(sampler="tpe", n_trials=40, space={"lr": SPACE["lr"]}))
    distance = [abs(math.log(trial.params["lr"] / 0.01)) for trial in study.trials]
    assert statistics.median(distance[-20:]) < 0.6, "drawn at random it would be near ln(10) / 2"


@pytest.mark.parametrize("sampler", ["grid", "tpe", "nsga2"])
def test_several_objectives_make_a_front(tmp_path, sampler):
    """Depth 1 is the most useful, lr near 0.01 the best; a diverged run is in no front."""
    space = {"lr": [0.002, 0.01, 0.06], "n_layers": [1, 2]}
    size = {} if sampler == "grid" else {"sampler": sampler, "n_trials": 20}
    study = work(tmp_path, sweep(objectives=["val_loss", "usefulness"], space=space, **size))
    assert study.directions == [optuna.study.StudyDirection.MINIMIZE, optuna.study.StudyDirection.MAXIMIZE]
    assert {(t.params["lr"], t.params["n_layers"]) for t in study.best_trials} == {(0.01, 1)}
    diverged = [trial for trial in study.trials if trial.params["lr"] == 0.06]
    assert diverged and all(trial.state == optuna.trial.TrialState.PRUNED for trial in diverged)


def test_a_broken_constraint_is_told_to_the_sampler_and_never_run(tmp_path):
    """Depth 3 has 18,544 parameters, more than the bound; depths 1 and 2 fit."""
    definition = sweep(sampler="tpe", n_trials=16, space=SPACE, constraints={"params_total": 15_400})
    study = work(tmp_path, definition)
    for trial in study.trials:
        excess = trial.constraints["params_total"]
        assert (excess > 0) == ("infeasible" in trial.user_attrs) == (trial.params["n_layers"] == 3)
    assert {run["n_layers"] for run in configs(tmp_path)} == {1, 2}
    refused = queue.refused(study)
    assert sum(refused.values()) == sum(t.params["n_layers"] == 3 for t in study.trials) and "above 15400" in str(
        refused
    )


def configs(results):
    import yaml

    return [yaml.safe_load(path.read_text()) for path in results.glob("runs/*/config.yaml")]


def test_a_grid_leaves_out_what_breaks_a_constraint_and_says_so():
    definition = sweep(space={"n_layers": [1, 2, 3]}, constraints={"params_total": 15_400})
    plan = Plan(definition)
    assert [one.cell["n_layers"] for one in plan.matches] == [1, 2]
    (note,) = plan.notes()
    assert note.startswith("left out: {'n_layers': 3}: params_total is ") and note.endswith("above 15400")
    with pytest.raises(ValueError, match="no cell to run: params_total is"):
        Plan(sweep(constraints={"params_total": 10}))


def test_conditional_zipped_and_excluded_axes_of_a_sampler(tmp_path, quick):
    definition = sweep(
        sampler="tpe",
        n_trials=12,
        space={"n_experts": [0, 4], "top_k": [1, 2], "lr": [0.01, 0.02]},
        zip=[{"seq_len": [32, 64], "n_layers": [1, 2]}],
        only={"top_k": {"n_experts": 4}},
        exclude=[{"n_experts": 4, "lr": 0.02}],
    )
    study = work(tmp_path, definition)
    for trial in study.trials:
        assert ("top_k" in trial.params) == (trial.params["n_experts"] == 4)
        excluded = trial.params["n_experts"] == 4 and trial.params["lr"] == 0.02
        assert (trial.constraints["buildable"] > 0) == excluded
    assert {(run["seq_len"], run["n_layers"]) for run in configs(tmp_path)} <= {(32, 1), (64, 2)}
    before = run_ids(tmp_path)
    quick.clear()
    work(tmp_path, definition)
    assert before <= run_ids(tmp_path), "a rebuilt study asks for the infeasible proposals again, and repeats no run"


def test_trials_carry_the_results_for_a_dashboard(tmp_path, quick):
    """For a grid as well, and for a study that was rebuilt from the folders."""
    definition = sweep(
        space={"n_layers": [1, 2]}, variants=[{}, {"weight_eps": [0.5]}], tune={"lr": [0.005, 0.01, 0.02]}
    )
    for _ in range(2):
        study = work(tmp_path, definition)
        assert len(study.trials) == 12 and study.metric_names == ["val_loss"]
        for trial in study.trials:
            assert trial.user_attrs["val_loss"] == trial.value and trial.user_attrs["usefulness"]
            assert (tmp_path / "runs" / trial.user_attrs["run_id_seed_0"]).is_dir()
            assert set(trial.params) >= {"n_layers", "lr"}
        quick.clear()


def test_an_extended_sweep_runs_only_what_is_new(tmp_path):
    """A value, a depth and a seed more: every finished run is reused, and known to the new study."""
    work(tmp_path, sweep(space={"n_layers": [1, 2], "lr": [0.01, 0.02]}))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/complete")}
    study = work(tmp_path, sweep(space={"n_layers": [1, 2, 3], "lr": [0.005, 0.01, 0.02]}, seeds=[0, 1]))
    assert len(run_ids(tmp_path)) == 18 == len(study.trials)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in before}.items()


def test_workers_seeds_differ_and_a_worker_repeats_itself(tmp_path):
    definition = sweep(sampler="tpe", n_trials=1, space={"lr": SPACE["lr"]})
    seen = []
    for number in (0, 1, 0):
        results = tmp_path / str(len(seen))
        results.mkdir()
        seen.append(work(results, definition, number).trials[0].params["lr"])
    assert seen[0] == seen[2] != seen[1]


def test_a_pruned_proposal_is_settled_even_after_the_study_is_lost(tmp_path, quick):
    definition = sweep(
        sampler="tpe",
        n_trials=3,
        space=SPACE,
        prune={"by": "train_loss", "at": [0.5]},
        objectives=["val_loss", "usefulness"],
    )

    class Prunes(MadeUp):
        def run(self, config, trial):
            work = Scratch(self.results, config.run_id)
            work.folder.mkdir(parents=True, exist_ok=True)
            (work.folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
            work.prune(Pruned(step=5, reason="worse"))
            return Worker.run(self, config, trial)

    study = queue.open_study(definition, f"sqlite:///{tmp_path}/study.db")
    worker = Prunes(**given(definition, tmp_path))
    queue.enqueue(study, Plan(definition).items())
    empty_the_queue(worker, study, 0)
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.PRUNED] * 3
    assert {trial.user_attrs["pruned"] for trial in study.trials} == {"worse"}
    quick.clear()
    study = queue.open_study(definition, f"sqlite:///{tmp_path}/study.db")
    plan = Plan(definition)
    rebuild(study, plan, tmp_path, ResultsIndex(tmp_path, definition))
    assert not queue.missing(study, plan.items(), lambda item: False)
