"""Every sampler through the study, the queue and the worker, with runs that are made up in an instant."""

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import warnings

import optuna
import pytest
import yaml
from support.instant_sweep import BASE, SPACE, MadeUp, Sweep, forget_study, made, run_ids, sweep, work

from sparsedepth.plan.tasks import Plan
from sparsedepth.run.lease import hold
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.sweep.results_folder import claim, lease_path
from sparsedepth.sweep.status import forget_failures, sweep_summary
from sparsedepth.sweep.storage import study_name
from sparsedepth.sweep.worker import Worker
from sparsedepth.words.sweep import plan_notes


class Killed(Exception):
    """In place of SIGKILL: nothing of the process's is told or cleaned up."""


@pytest.mark.parametrize("sampler", ["random", "qmc", "tpe", "nsga2"])
def test_a_sampler_proposes_continues_and_is_rebuilt(tmp_path, sampler):
    definition = sweep(sampler=sampler, n_trials=5, space=SPACE, seeds=[0, 1])
    study = work(tmp_path, definition)
    done = run_ids(tmp_path)
    assert len(done) == 10
    numbers = len(study.trials)
    assert len(work(tmp_path, definition).trials) == numbers and run_ids(tmp_path) == done, "nothing is repeated"
    forget_study(tmp_path)
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


def test_tpe_proposes_closer_to_the_best_lr_than_chance(tmp_path):
    study = work(tmp_path, sweep(sampler="tpe", n_trials=24, space={"lr": SPACE["lr"]}))
    distance = [abs(math.log(trial.params["lr"] / 0.01)) for trial in study.trials]
    assert statistics.median(distance[-10:]) < 0.6, "drawn at random it would be near ln(10) / 2"


@pytest.mark.parametrize("sampler", ["grid", "tpe", "nsga2"])
def test_several_objectives_make_a_front(tmp_path, sampler):
    """Depth 1 is the most useful, lr near 0.01 the best; a diverged run is in no front."""
    space = {"lr": [0.002, 0.01, 0.06], "n_layers": [1, 2]}
    size = {} if sampler == "grid" else {"sampler": sampler, "n_trials": 20}
    study = work(tmp_path, sweep(objectives=["val_loss", "usefulness"], space=space, **size))
    assert study.directions == [optuna.study.StudyDirection.MINIMIZE, optuna.study.StudyDirection.MAXIMIZE]
    assert {(t.params["lr"], t.params["n_layers"]) for t in study.best_trials} == {(0.01, 1)}
    diverged = [trial for trial in made(study) if trial.params["lr"] == 0.06]
    assert diverged and all(trial.state == optuna.trial.TrialState.PRUNED for trial in diverged)


def test_a_broken_constraint_is_told_to_the_sampler_and_never_run(tmp_path):
    """Depth 3 has 18,544 parameters, more than the bound; depths 1 and 2 fit."""
    definition = sweep(sampler="tpe", n_trials=16, space=SPACE, constraints={"params_total": 15_400})
    sweeping = Sweep(definition, tmp_path)
    study = sweeping.finish()
    for trial in study.trials:
        excess = trial.constraints["params_total"]
        assert (excess > 0) == ("infeasible" in trial.user_attrs) == (trial.params["n_layers"] == 3)
    assert {run["n_layers"] for run in configs(tmp_path)} == {1, 2}
    refused = sweeping.queue.refused()
    assert sum(refused.values()) == sum(t.params["n_layers"] == 3 for t in study.trials)
    assert "above 15400" in str(refused)


def configs(results):
    return [yaml.safe_load(path.read_text()) for path in results.glob("runs/*/config.yaml")]


def test_a_grid_leaves_out_what_breaks_a_constraint_and_says_so():
    definition = sweep(space={"n_layers": [1, 2, 3]}, constraints={"params_total": 15_400})
    plan = Plan(definition)
    assert [one.cell["n_layers"] for one in plan.matches] == [1, 2]
    note, _ = plan_notes(plan)
    assert note.startswith("skipped: {'n_layers': 3}: params_total is ") and note.endswith("above 15400")
    with pytest.raises(ValueError, match="no cell to run: params_total is"):
        Plan(sweep(constraints={"params_total": 10}))


def test_the_best_run_of_a_search_is_named_by_what_was_searched(tmp_path):
    definition = sweep(sampler="random", n_trials=4, space=SPACE)
    claim(tmp_path, definition)
    work(tmp_path, definition)
    best = sweep_summary(tmp_path).best
    run = run_record.read_run(tmp_path / "runs" / best.run_id).config
    assert best.label == f"n_layers={run.n_layers}, lr={run.lr:.6g}, seed 0"


def test_a_range_in_which_one_shape_is_tuned_is_rebuilt_whole(tmp_path):
    space, tune = {"n_layers": {"low": 1, "high": 3, "whole": True}}, {"at": {"n_layers": 2}, "lr": [0.005, 0.01, 0.02]}
    definition = sweep(sampler="random", n_trials=5, space=space, tune=tune, tuning_seeds=[7], carry_regret=0.1)
    study = work(tmp_path, definition)
    assert {trial.params["n_layers"] for trial in study.trials} == {1, 2, 3}
    forget_study(tmp_path)
    assert len(work(tmp_path, definition).trials) == len(study.trials)


def test_conditional_zipped_and_excluded_axes_of_a_sampler(tmp_path):
    axes = {"space": {"n_experts": [0, 4], "top_k": [2, 4], "lr": [0.01, 0.02]}, "only": {"top_k": {"n_experts": 4}}}
    axes |= {"zip": [{"seq_len": [32, 64], "n_layers": [1, 2]}], "exclude": [{"n_experts": 4, "lr": 0.02}]}
    definition = sweep(sampler="tpe", n_trials=12, **axes)
    study = work(tmp_path, definition)
    for trial in made(study):
        assert ("top_k" in trial.params) == (trial.params["n_experts"] == 4)
        excluded = trial.params["n_experts"] == 4 and trial.params["lr"] == 0.02
        assert (trial.constraints["buildable"] > 0) == excluded
    assert {(run["seq_len"], run["n_layers"]) for run in configs(tmp_path)} <= {(32, 1), (64, 2)}
    before = run_ids(tmp_path)
    forget_study(tmp_path)
    work(tmp_path, definition)
    assert before <= run_ids(tmp_path), "a rebuilt study asks for the infeasible proposals again, and repeats no run"


@pytest.mark.parametrize("first", ["top_k", "n_experts"])
def test_points_that_cannot_be_built_are_passed_over_and_conditions_may_stand_in_any_order(tmp_path, first):
    only = {"top_k": {"n_experts": 4}, "n_experts": {"norm": "pre"}}
    axes = {"n_kv_heads": [3, 1, 2], "norm": ["post", "pre"], "n_experts": [4], "top_k": [2, 4]}
    only = {name: only[name] for name in sorted(only, key=lambda name: name != first)}
    study = work(tmp_path, sweep(sampler="tpe", n_trials=12, space=axes, only=only))
    for trial in made(study):
        assert ("top_k" in trial.params) == ("n_experts" in trial.params) == (trial.params["norm"] == "pre")
        assert (trial.constraints["buildable"] > 0) == (trial.params["n_kv_heads"] == 3)
    assert {run["n_kv_heads"] for run in configs(tmp_path)} == {1, 2}


def test_trials_carry_the_results_for_a_dashboard(tmp_path):
    """For a grid as well, and for a study that was rebuilt from the folders."""
    tuned = {"tune": {"lr": [0.005, 0.01, 0.02]}, "tuning_seeds": [0], "reuse_tuning_seeds": True}
    definition = sweep(space={"n_layers": [1, 2]}, variants=[{}, {"weight_eps": [0.5]}], **tuned)
    for _ in range(2):
        study = work(tmp_path, definition)
        assert len(study.trials) == 12 and study.metric_names == ["val_loss"]
        for trial in study.trials:
            assert trial.user_attrs["val_loss"] == trial.value and trial.user_attrs["usefulness"]
            assert (tmp_path / "runs" / trial.user_attrs["run_id_seed_0"]).is_dir()
            assert set(trial.params) >= {"n_layers", "lr"}
        forget_study(tmp_path)


def test_an_extended_sweep_runs_only_what_is_new(tmp_path):
    """A value, a depth and a seed more: every finished run is reused, and known to the new study."""
    work(tmp_path, sweep(space={"n_layers": [1, 2], "lr": [0.01, 0.02]}))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/complete")}
    study = work(tmp_path, sweep(space={"n_layers": [1, 2, 3], "lr": [0.005, 0.01, 0.02]}, seeds=[0, 1]))
    assert len(run_ids(tmp_path)) == 18 == len(study.trials)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in before}.items()


@pytest.mark.parametrize(
    ("before", "after", "n_runs"),
    [
        ({"space": {"n_layers": [1, 2, 3]}}, {"space": {"n_layers": [1, 3]}}, 2),
        ({}, {"exclude": [{"n_layers": 2}]}, 1),
        ({"variants": [{"depth_scale": "lns", "seeds": 3}]}, {"variants": [{"depth_scale": "lns", "seeds": 1}]}, 2),
        ({"sampler": "random", "n_trials": 4}, {"n_trials": 2}, 2),
        ({"sampler": "tpe", "n_trials": 4}, {"n_trials": 2}, 2),
    ],
)
def test_what_waits_of_an_earlier_definition_is_not_run(tmp_path, before, after, n_runs):
    """The names of the two studies are equal. A process was killed before it ran any, with one taken."""
    definition = {"space": {"n_layers": [1, 2], **({"lr": SPACE["lr"]} if "sampler" in before else {})}} | before
    killed = Sweep(sweep(**definition), tmp_path)
    killed._workers[0].take(killed.queue, 1, ())
    work(tmp_path, sweep(**definition | after))
    assert len(run_ids(tmp_path)) == n_runs


def proposals(study):
    return [trial.params["lr"] for trial in study.trials if trial.state.name == "COMPLETE"]


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_worker_that_is_killed_again_and_again_proposes_what_it_would_have_proposed(tmp_path, sampler):
    """Before its run, and between the run's end and telling the study; and as many distinct runs are made as asked."""
    definition = sweep(sampler=sampler, n_trials=14, space={"lr": {"low": 1e-3, "high": 4e-2, "log": True}})
    undisturbed = work(tmp_path / "undisturbed", definition)
    kills = iter([0, 1, 3, 4, 5, 9, 13])

    class Mortal(MadeUp):
        def run(self, config, trial):
            summary = None
            if self.number_of_kill is not None and trial.number == self.number_of_kill:
                if trial.number % 2:
                    summary = yield from super().run(config, trial)
                raise Killed
            return summary or (yield from super().run(config, trial))

    for kill in (*kills, None):
        Mortal.number_of_kill = kill
        try:
            study = work(tmp_path / "killed", definition, kind=Mortal)
        except Killed:
            continue
    assert len(run_ids(tmp_path / "killed")) == 14
    assert proposals(study) == proposals(undisturbed) and len(study.trials) == 14


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_sampler_makes_as_many_distinct_runs_as_asked_even_of_a_small_space(tmp_path, sampler):
    """Twelve points, twelve proposals, by three workers at a time: what repeats another gives way."""
    space = {"lr": [0.001, 0.002, 0.01, 0.02], "n_layers": [1, 2, 3]}
    definition = sweep(sampler=sampler, n_trials=12, space=space)
    work(tmp_path, definition, workers=3)
    assert len(run_ids(tmp_path)) == 12
    more = Sweep(sweep(sampler=sampler, n_trials=14, space=space), tmp_path)
    more.finish()
    assert len(run_ids(tmp_path)) == 12
    assert more.queue.refused() == {"every point of the space has already been proposed": 2}


def test_what_was_proposed_is_known_again_though_the_definition_writes_0_for_a_run_s_0_0(tmp_path):
    space = {"weight_decay": [0, 1, 2, 3, 4, 5]}
    work(tmp_path, sweep(sampler="tpe", n_trials=3, space=space))
    work(tmp_path, sweep(sampler="tpe", n_trials=6, space=space))
    assert len(run_ids(tmp_path)) == 6


@pytest.mark.parametrize(
    ("before", "after", "n_runs"),
    [
        ({"zip": [{"seq_len": [32, 64], "n_layers": [1, 2]}]}, {"zip": [{"seq_len": [32, 64], "n_layers": [1, 3]}]}, 6),
        ({"only": {"lr": {"weight_decay": 0.1}}}, {}, 5),
        ({}, {"space": {"lr": [0.02, 0.03], "weight_decay": [0.1, 0.2]}}, 6),
        ({}, {"space": {"lr": {"low": 0.015, "high": 0.02}, "weight_decay": [0.1, 0.2]}}, 6),
    ],
)
def test_proposals_whose_cells_are_others_by_now_are_made_anew(tmp_path, before, after, n_runs):
    """Where the axes were the same, so was the study, which took the old runs for the new definition's; where a value
    was gone, its runs could not be told to the new one."""
    definition = {"sampler": "tpe", "space": {"lr": [0.01, 0.02], "weight_decay": [0.1, 0.2]}}
    if "zip" in before:
        definition["space"] = {"lr": [0.01, 0.02]}
    work(tmp_path, sweep(**definition | before, n_trials=4))
    work(tmp_path, sweep(**definition | after, n_trials=4))
    assert len(run_ids(tmp_path)) == n_runs


class Ends(MadeUp):
    """Runs at lr 0.03 end without a result."""

    def run(self, config, trial):
        if config.lr != 0.03:
            return (yield from super().run(config, trial))
        scratch = Scratch(self.results, config.run_id)
        scratch.folder.mkdir(parents=True, exist_ok=True)
        if self.definition.prune:
            scratch.prune(5, "worse")
        else:
            scratch.add_failure("no")
            scratch.add_failure("no")
        return (yield from Worker.run(self, config, trial))


@pytest.mark.parametrize("how", ["pruned", "failed"])
def test_tuning_goes_on_without_a_run_that_was_pruned_or_failed_and_its_results_count(tmp_path, how):
    fields = {"space": {"n_layers": [1, 2]}, "tune": {"lr": [0.01, 0.02, 0.03]}, "tuning_seeds": [101]}
    if how == "pruned":
        prune = {"by": "train_loss", "at": [0.5]}
        fields |= {"sampler": "random", "n_trials": 9, "prune": prune, "base": {**BASE, "log_every": 1}}
    definition = sweep(**fields)
    claim(tmp_path, definition)
    driver = Sweep(definition, tmp_path, kind=Ends)
    driver.finish()
    n_complete = 2 * (2 + 1 + 1)  # at 0.01, which is best, the grid is extended; then the seed of the results
    result, summary = driver._result(driver.queue), sweep_summary(tmp_path)
    assert len(run_ids(tmp_path)) == n_complete == summary.counts["complete"]
    assert {state.state for state in result.states} == {"complete", how} == set(summary.counts)
    assert result.unfinished == (2 if how == "failed" else 0) and (
        summary.n_diverged,
        summary.judgements,
        summary.n_others,
    ) == (0, (), 0)


def test_a_run_that_was_deleted_from_a_finished_adaptive_sweep_is_made_again(tmp_path):
    definition = sweep(sampler="tpe", n_trials=6, space=SPACE)
    work(tmp_path, definition)
    before = run_ids(tmp_path)
    lost = sorted(before)[2]
    for file in (tmp_path / "runs" / lost).iterdir():
        file.unlink()
    (tmp_path / "runs" / lost).rmdir()
    driver = Sweep(definition, tmp_path)
    assert len(driver.queue.undone()) == 1, "the exit code would say that all is there"
    driver.finish()
    assert run_ids(tmp_path) == before and driver._result(driver.queue).unfinished == 0


def test_folders_that_share_a_storage_do_not_share_a_study(tmp_path):
    names = set()
    for folder in ("a", "b", "a"):
        definition = sweep(sampler="tpe", n_trials=2, space=SPACE)
        names.add(study_name(definition, tmp_path / folder))
    assert len(names) == 2


def test_the_trial_of_a_dead_process_is_taken_over_and_that_of_a_living_one_is_not(tmp_path):
    """With its number; the task of the living one is waited for until it is done."""
    definition = sweep(space={"n_layers": [1, 2, 3]})
    with pytest.raises(ValueError, match="hexadecimal"):
        lease_path(tmp_path, "../../elsewhere")
    living, dead, third = (Sweep(definition, tmp_path) for _ in range(3))
    with hold(lease_path(tmp_path, living.queue.lease_id)):
        for sweeping in (living, dead):
            assert sweeping._workers[0].take(sweeping.queue, 3, ())
        for _ in range(3):
            assert third.assign()
            third._workers[0].advance()
        assert [trial.state.name for trial in third.study.trials] == ["RUNNING", "COMPLETE", "COMPLETE"]
        assert third.assign() and third.queue.elsewhere == {living.queue.lease_id: 1}
    third.finish()
    assert [trial.state.name for trial in third.study.trials] == ["COMPLETE"] * 3 and not third.queue.elsewhere


HOLDER = """
import os, signal, sys
from pathlib import Path
from sparsedepth.run.lease import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_sweep_behind_a_stopped_process_ends_where_all_is_done_and_else_names_it(tmp_path):
    """Its lease is never free, since it lives, and its runs go on without it."""
    definition = sweep(space={"n_layers": [1, 2]})
    stopped, second = (Sweep(definition, tmp_path) for _ in range(2))
    command = [sys.executable, "-c", HOLDER, str(lease_path(tmp_path, stopped.queue.lease_id))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        tasks = [run.task for run in stopped.plan.runs()]
        for _ in tasks:
            assert stopped._workers[0].take(stopped.queue, 2, {*stopped._workers[0].task_steps})
        made = iter(stopped._workers[0].task_steps.values())
        next(next(made), None)
        with pytest.warns(UserWarning, match=rf"process {process.pid} .*stopped.* has 1 task: .*kill -CONT"):
            assert second.assign(), "a task is not done"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert second.assign(), "it is said once"
            next(next(made), None)
            assert not second.assign(), "all is done, though the trials run"
        assert second._result(second.queue).unfinished == 0
        process.kill()


def test_a_trial_has_the_lease_of_the_process_that_runs_it_though_another_wanted_it_too(tmp_path, monkeypatch):
    """One is about to take over a lost trial when the other takes; without a lock both would run it."""
    definition = sweep(space={"n_layers": [1]})
    dead, first, second = (Sweep(definition, tmp_path) for _ in range(3))
    dead._workers[0].take(dead.queue, 1, ())
    note, taken = first.study._storage.set_trial_user_attr, {}

    def take(driver):
        with driver._locked_queue():
            taken[driver.queue.lease_id] = driver._workers[0].take(driver.queue, 1, ())

    other = threading.Thread(target=take, args=(second,))

    def note_late(trial_id, key, value):
        if key == "lease" and not other.is_alive():
            other.start()
            other.join(0.2)
        note(trial_id, key, value)

    monkeypatch.setattr(first.study._storage, "set_trial_user_attr", note_late)
    with hold(lease_path(tmp_path, first.queue.lease_id)), hold(lease_path(tmp_path, second.queue.lease_id)):
        take(first)
        other.join()
    (trial,) = first.study.trials
    assert trial.state.name == "RUNNING" and sorted(taken.values()) == [False, True]
    assert taken[trial.user_attrs["lease"]]


def test_a_pruned_proposal_is_settled_even_after_the_study_is_lost(tmp_path):
    fields = {"base": {**BASE, "log_every": 1}, "prune": {"by": "train_loss", "at": [0.5]}}
    definition = sweep(sampler="tpe", n_trials=3, space=SPACE, objectives=["val_loss", "usefulness"], **fields)

    class Prunes(MadeUp):
        def run(self, config, trial):
            scratch = Scratch(self.results, config.run_id)
            scratch.folder.mkdir(parents=True, exist_ok=True)
            (scratch.folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
            scratch.prune(5, "worse")
            return (yield from Worker.run(self, config, trial))

    study = work(tmp_path, definition, kind=Prunes)
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.PRUNED] * 3
    assert {trial.user_attrs["pruned"] for trial in study.trials} == {"worse"}
    forget_study(tmp_path)
    driver = Sweep(definition, tmp_path)
    assert not driver.queue.undone()
    forget_study(tmp_path)
    next(tmp_path.glob("work/*/config.yaml")).write_bytes(b"\xff")  # damaged: it is proposed again
    driver = Sweep(definition, tmp_path)
    assert len(driver.queue.undone()) == 1


def test_a_proposal_that_has_ended_asks_for_no_further_seed(tmp_path):
    """Dropout does not stack: the first of three seeds is made by itself, and pruned, and with it the proposal."""
    tried = []

    class Prunes(Worker):
        def _watch_process(self, configs):
            yield
            tried.append([config.seed for config in configs])
            scratch = Scratch(self.results, configs[0].run_id)
            scratch.folder.mkdir(parents=True, exist_ok=True)
            scratch.prune(5, "worse")
            return 0

    base = {**BASE, "attention_dropout": 0.1, "log_every": 1}
    rule = {"by": "train_loss", "at": [0.5]}
    definition = sweep(sampler="tpe", n_trials=1, space=SPACE, seeds=[0, 1, 2], base=base, prune=rule)
    sweeping = Sweep(definition, tmp_path, kind=Prunes)
    (trial,) = sweeping.finish().trials
    assert trial.state == optuna.trial.TrialState.PRUNED and tried == [[0]]
    assert all(worker.is_idle for worker in sweeping._workers), "no process was started for the other seeds"


def test_a_run_that_the_kernel_kills_for_memory_is_halved_until_it_is_infeasible(tmp_path, monkeypatch):
    """No failure: 128 tokens are four sequences of 32, then two, then one; then it does not fit."""
    kills, tried = iter(range(100)), []

    class Killed(Worker):
        def _watch_process(self, configs):
            yield
            scratch = Scratch(self.results, configs[0].run_id)
            tried.append(scratch.recorded().micro_batch)
            scratch.folder.mkdir(parents=True, exist_ok=True)
            return -9

    monkeypatch.setattr("sparsedepth.sweep.worker.oom_kills", lambda: next(kills))
    sweeping = Sweep(sweep(space={"n_layers": [1]}), tmp_path, kind=Killed)
    study = sweeping.finish()
    (trial,) = study.trials
    assert tried == [None, 2, 1] and trial.state == optuna.trial.TrialState.PRUNED
    assert "killed by the kernel" in trial.user_attrs["infeasible"] and sweeping._result(sweeping.queue).unfinished == 1
    assert not list(tmp_path.glob("work/*/failures.json"))


def test_a_proposal_that_did_not_fit_into_memory_is_run_once_that_is_forgotten(tmp_path):
    """As --retry-failed does; the refused trial is then no longer counted."""

    class Killed(MadeUp):
        def run(self, config, trial):
            scratch = Scratch(self.results, config.run_id)
            scratch.folder.mkdir(parents=True)
            run_record.write_config(scratch.folder, config)
            scratch.set_infeasible("out of memory")
            yield from Worker.run(self, config, trial)

    definition = sweep(sampler="tpe", n_trials=1, space={"n_layers": [1, 2]})
    refusing = Sweep(definition, tmp_path, kind=Killed)
    refusing.finish()
    assert dict(refusing.queue.refused()) == {"out of memory": 1}
    assert Sweep(definition, tmp_path).finish().trials[0].user_attrs["infeasible"], "it stays refused"
    assert not run_ids(tmp_path)

    forget_failures(tmp_path, definition, 2)
    again = Sweep(definition, tmp_path)
    again.finish()
    assert len(run_ids(tmp_path)) == 1 and not again.queue.refused()
    assert not again.queue.undone()
