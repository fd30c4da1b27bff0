"""How a sweep stands and what its runs said, from folders made by hand: nothing here runs, and nothing is written."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support import forked_commands
from support.made_up_runs import make_run
from support.sweep_processes import until
from support.tiny_sweep import ENVIRONMENT, definition, known_runs, sparsedepth

from sparsedepth.cli import status as module
from sparsedepth.cli.input_file import sweep_definition
from sparsedepth.cli.progress import ProgressDisplay
from sparsedepth.cli.run_progress import bar
from sparsedepth.config.load import read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.tasks import Plan
from sparsedepth.run.lease import hold
from sparsedepth.run.scratch import Progress as RunProgress, Scratch
from sparsedepth.sweep.results_folder import ResultsIndex
from sparsedepth.sweep.status import RunState, remaining_and_trunks, scan
from sparsedepth.train.loop import divergence
from sparsedepth.words.progress import time_text

RESULTS = Path(__file__).parents[2] / "results"


def empty_sweep(folder: Path, **fields) -> tuple[SweepDefinition, Path]:
    """A sweep, and its results folder without runs."""
    path, results = definition(folder, **fields), folder / "results"
    results.mkdir()
    (results / "sweep.yaml").write_text(path.read_text())
    return sweep_definition(path), results


@pytest.fixture
def standing(tmp_path) -> tuple[Path, list[Scratch]]:
    """Four runs: one complete, one interrupted in training, one failed twice, one that does not fit into memory."""
    sweep, results = empty_sweep(tmp_path)
    runs = known_runs(Plan(sweep), results)
    works = [Scratch(results, config.run_id) for config in runs]
    for work in works:
        work.folder.mkdir(parents=True)
        work.log.write_text(f"this is {work.run_id}\n")
    make_run(results, runs[0], {"val_loss": 1.2345678})
    works[1].checkpoints.mkdir()
    works[1].write_progress("training", 0.25, 3.14159, 754.0)
    works[2].add_failure("ValueError: no")
    works[2].add_failure("killed by signal 9")
    works[3].halve_micro_batch(1, "CUDA out of memory")
    return results, works


def test_status_counts_and_names_damage(standing):
    results, works = standing
    path = results / "runs" / works[0].run_id / "summary.json"
    path.write_bytes(path.read_bytes().replace(b"1.23", b"1.03"))
    out, _ = sparsedepth("status", results)
    assert "0 complete, 0 running, 1 interrupted, 1 failed, 1 infeasible, 1 damaged, 0 planned" in out
    assert "damaged 1x: summary.json is not the file that was written (its checksum differs)" in out


def test_status_loads_neither_torch_nor_a_database(standing):
    code = "from sparsedepth.cli import status; from pathlib import Path; "
    code += f"status.StatusCommand(Path({str(standing[0])!r})).compute()"
    check = "import sys; print(sorted({'torch', 'duckdb', 'pandas', 'sqlalchemy', 'optuna'} & set(sys.modules)))"
    command = [sys.executable, "-c", f"{code}; {check}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout == "[]\n"


def test_status_counts_explains_and_names_the_best(standing):
    results, _ = standing
    written = read_yaml(results / "sweep.yaml")
    (results / "sweep.yaml").write_text(yaml.safe_dump({**written, "question": "How is this? " * 20}))
    before = sorted((path, path.stat().st_mtime_ns) for path in results.rglob("*"))
    out, _ = sparsedepth("status", results)
    assert "1 complete, 0 running, 1 interrupted, 1 failed, 1 infeasible, 0 planned" in out
    assert max(map(len, out.splitlines())) <= int(ENVIRONMENT.get("COLUMNS", 100)), "a line is too wide"
    assert "failed 1x: killed by signal 9" in out
    assert "infeasible 1x: out of memory with one sequence per forward pass: CUDA out of memory" in out
    lowest = "lowest single run: val_loss 1.235 (n_layers=3, baseline, seed 0; its only seed); what to train: `recipe`"
    assert lowest in out
    found = json.loads(sparsedepth("status", results, "--format", "json")[0])
    assert found["counts"] == {"complete": 1, "interrupted": 1, "failed": 1, "infeasible": 1} and found["is_left"]
    assert found["best"]["value"] == pytest.approx(1.235, abs=1e-3) and found["best"]["label"].startswith("n_layers=3")
    assert {end["state"]: end["runs"] for end in found["ended"]} == {"failed": 1, "infeasible": 1}
    assert sorted((path, path.stat().st_mtime_ns) for path in results.rglob("*")) == before, "status wrote something"


def test_the_run_of_an_interrupted_train_is_shown(tmp_path):
    """`train` writes neither a definition nor a configuration or a log into work/."""
    results, run_id = tmp_path / "one", "31b327eb5df7"
    scratch = Scratch(results, run_id)
    scratch.checkpoints.mkdir(parents=True)
    with hold(scratch.lock):
        out, _ = sparsedepth("status", results)
        assert out.startswith("0 complete, 1 running, 0 interrupted") and f"running {run_id}: starting" in out
    out, _ = sparsedepth("status", results)
    assert out.startswith("0 complete, 0 running, 1 interrupted")
    assert f"  interrupted {run_id}: run the same command again to resume\n" in out
    _, err = sparsedepth("logs", results, code=2)
    assert "holds no run logs: `train` prints to its terminal; see `status" in err
    for command in ("status", "logs"):
        assert "is not an existing folder" in sparsedepth(command, tmp_path / "none", code=2)[1]
    scratch.checkpoints.rmdir()  # as after an error before the first step
    _, err = sparsedepth("status", results, code=2)
    assert "no complete run under" in err


def test_logs_of_an_unknown_run_and_of_an_empty_log_say_so(standing):
    results, works = standing
    run_id = works[1].run_id
    wrong = run_id[:5] + run_id[6] + run_id[5] + run_id[7:] if run_id[5] != run_id[6] else run_id[:5] + run_id[6:]
    _, err = sparsedepth("logs", results, wrong, code=2)
    assert f"matches: did you mean {run_id!r}?" in err
    works[1].log.write_text("")
    assert sparsedepth("logs", results, run_id)[0] == f"the log of {run_id} is empty: {works[1].log}\n"


def test_watch_looks_again_until_nothing_is_left(standing, monkeypatch, capsys):
    results, works = standing
    configs = known_runs(Plan(sweep_definition(results / "sweep.yaml")), results)
    config = next(run for run in configs if run.run_id == works[1].run_id)
    made = make_run(results.parent / "elsewhere", config, {"val_loss": 1.0})

    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            made.rename(results / "runs" / config.run_id)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    module.status(results, watch=True, every=0.2)
    assert pauses == [0.2, 0.2] and "2 complete, 0 running, 0 interrupted" in capsys.readouterr().out


def test_logs_are_listed_failed_first_and_found_by_the_beginning_of_a_run_id(standing):
    results, works = standing
    out, _ = sparsedepth("logs", results)
    lines = out.splitlines()
    assert len(lines) == 4 and lines[0].startswith(f"{works[2].run_id}  failed") and "killed by signal 9" in lines[0]
    out, _ = sparsedepth("logs", results, works[1].run_id[:8])
    assert out == f"this is {works[1].run_id}\n"
    _, err = sparsedepth("logs", results, "zz", code=2)
    assert "RUN 'zz' must match exactly one run_id" in err and err.count("\n") == 1
    assert "leave it out" in sparsedepth("logs", results, works[1].run_id, "--task", "--follow", code=2)[1]


def test_the_log_of_a_run_in_a_stack_is_that_of_the_process(standing):
    results, works = standing
    works[0].note_leader(works[1])
    out, _ = sparsedepth("logs", results, works[0].run_id)
    pointer = f"trains in one process with other runs, log: ../{works[1].run_id}/log.txt"
    assert out == f"this is {works[0].run_id}\n{pointer}\nthis is {works[1].run_id}\n"
    assert works[1].leader() is None
    works[1].log.unlink()
    out, _ = sparsedepth("logs", results, works[0].run_id)
    assert out == f"this is {works[0].run_id}\n{pointer}\n"


def test_follow_goes_on_until_the_run_ends(standing):
    results, works = standing
    first = f"this is {works[1].run_id}\n"
    with hold(works[1].lock):
        reader = forked_commands.start(["logs", str(results), works[1].run_id, "--follow"], ENVIRONMENT)
        said = Path(reader.streams[0])
        until(lambda: said.exists() and said.read_text() == first)
        with open(works[1].log, "a") as log:
            log.write("and more\n")
    assert reader.communicate(timeout=300)[0] == f"{first}and more\n" and reader.returncode == 0


def test_a_folder_whose_definition_names_a_field_that_is_gone_is_shown(standing):
    """With one line on it, by what shows the folder; its sweep is refused."""
    results, _ = standing
    definition = results / "sweep.yaml"
    definition.write_text(definition.read_text().replace("base:", "base:\n  n_mirrors: 2"))
    out, err = sparsedepth("status", results)
    assert "1 complete, 0 running, 1 interrupted" in out
    assert "unknown key 'n_mirrors'" in err and err.endswith("The folder's runs are read without it\n")
    _, err = sparsedepth("report", results, "-o", results / "report.html")
    assert err.count("unknown key 'n_mirrors'") == 1 and (results / "report.html").exists()
    sparsedepth("sweep", definition, "--out", results, code=2)


def test_packages_that_differ_and_runs_of_an_earlier_definition_are_said_wherever_results_are_read(standing):
    results, _ = standing
    out = sparsedepth("status", results)[0] + sparsedepth("best", results)[0]
    assert "packages differ" not in out and "earlier version" not in out
    for seed, torch in ((7, "2.12.0"), (8, "2.12.0")):
        make_run(results, RunConfig(seed=seed), {"val_loss": 2.0}, manifest={"packages": {"torch": torch}})
    differ = "packages differ between the runs: torch 2.12.0 (2 runs), 2.13.0 (1 run)"
    out, _ = sparsedepth("status", results)
    assert "1 complete" in out and differ in out
    note = "2 other complete runs are in the folder (from an earlier version of the definition, or `train`); query"
    assert note in " ".join(out.split())
    ranked, _ = sparsedepth("best", results)
    assert "3 runs" in ranked and differ in ranked


def test_no_text_of_a_folder_reaches_the_terminal_as_control_characters(standing):
    """Titles, colours, cleared screens and 8-bit sequences in whatever a run said; a question with them is
    refused, and a folder that has one is shown without it."""
    results, works = standing
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    works[2].add_failure(evil)
    works[3].halve_micro_batch(1, evil)
    works[1].write_progress(evil, 0.25, 3.0, 1.0)
    (results / "work" / evil).mkdir()
    (results / "work" / evil / "log.txt").write_text("")
    works[1].log.write_text(f"before{evil}\n")
    with hold(works[1].lock):
        answers = [sparsedepth("status", results)[0], sparsedepth("logs", results)[0]]
    answers.append(sparsedepth("logs", results, works[1].run_id)[0])
    definition = (results / "sweep.yaml").read_text()
    (results / "sweep.yaml").write_text(definition.replace("Do three", '"\\e[2J\\x9b three').replace("two?", 'two?"'))
    out, err = sparsedepth("status", results)
    assert "question=" in err and "must be plain text" in err and "1 complete" in out
    answers += [out, err]
    for command in (("plan", results / "sweep.yaml"), ("sweep", results / "sweep.yaml", "-o", results)):
        out, err = sparsedepth(*command, code=2)
        assert "question=" in err and "must be plain text" in err and not out
        answers.append(err)
    for answer in answers:
        assert "\\x1b" in answer and all(character.isprintable() or character == "\n" for character in answer)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_read_all_the_same(standing):
    results, _ = standing
    for path in [results, *results.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    out, _ = sparsedepth("status", results)
    assert "1 complete" in out
    for path in [results, *results.rglob("*")]:
        path.chmod(0o700)


def test_status_and_best_judge_every_objective(tmp_path):
    objectives = ["val_loss", "usefulness"]
    space = {"weight_decay": {"low": 0.0, "high": 0.1}}
    _, results = empty_sweep(tmp_path, objectives=objectives, sampler="nsga2", n_trials=4, space=space)
    for decay, loss in ((0.01, 2.0), (0.02, 2.5)):
        make_run(results, RunConfig(weight_decay=decay), {"val_loss": loss, "chance_loss": 5.0, "usefulness": 0.0})
    for command in ("status", "best"):
        out = " ".join(sparsedepth(command, results)[0].split())
        assert "usefulness is degenerate: 0 in every run (2 of 2 runs)" in out


@pytest.mark.parametrize(("sampler", "advice"), [("random", "see `best`"), ("qmc", "see `best`"), ("grid", "`recipe`")])
def test_a_search_is_sent_to_best_and_a_grid_to_recipe(tmp_path, sampler, advice):
    """`recipe` refuses every search: its proposals share no baseline."""
    trials = {} if sampler == "grid" else {"n_trials": 2}
    sweep, results = empty_sweep(tmp_path, sampler=sampler, space={"n_layers": [1, 2]}, seeds=1, **trials)
    for config in known_runs(Plan(sweep), results):
        make_run(results, config, {"val_loss": 2.0})
    assert advice in " ".join(sparsedepth("status", results)[0].split())


def test_a_diverged_run_is_named_in_status_and_progress(standing, capsys):
    results, _ = standing
    sweep = sweep_definition(results / "sweep.yaml")
    runs = known_runs(Plan(sweep), results)
    display = ProgressDisplay(sweep, len(runs), results)
    display(scan(ResultsIndex(results, sweep), {run.run_id: run for run in runs}))
    diverged = {"outcome": "diverged", "val_loss": None, "diverged_step": 3}
    make_run(results, runs[1], {**diverged, "diverged_cause": divergence(5.0, 1.0, 2.0, 5.0, 2.0)})
    display(scan(ResultsIndex(results, sweep), {run.run_id: run for run in runs}))
    assert f"[2/{len(runs)}] complete: n_layers=2 seed=0, diverged" in capsys.readouterr().err
    out, _ = sparsedepth("status", results)
    assert "1 of the complete runs diverged: `query --ask diverged` lists them\n" in out


def test_the_time_left_is_that_of_the_flops_left_at_the_rate_since_the_start(tmp_path, monkeypatch):
    """Two of four runs were complete; the third takes 100 s, so three take 300 s more once tuning has added two."""
    sweep, results = empty_sweep(tmp_path)
    seconds, runs = 0.0, known_runs(Plan(sweep), results)
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    same = [runs[0].model_copy(update={"seed": 10 + i}) for i in range(6)]
    states = [RunState(run_id=config.run_id, state="planned", config=config) for config in same]
    complete = [replace(state, state="complete") for state in states]
    display, told = ProgressDisplay(sweep, 4, results), lambda found: (found.share, time_text(found))
    assert told(display.progress([*complete[:2], *states[2:4]])) == (0.5, "0s elapsed, estimating")
    seconds = 100.0
    left = display.progress([*complete[:3], *states[3:6]])
    assert told(left) == (0.5, "1m40s elapsed, about 5m00s left")
    slow = replace(
        states[3], state="running", progress=RunProgress(phase="training", done=0.0, loss=None, at=9e9, left=400.0)
    )
    assert told(display.progress([*complete[:3], slow, *states[4:6]])) == (0.5, "1m40s elapsed, about 6m40s left")
    failed = replace(states[3], state="failed")
    assert told(display.progress([*complete[:3], failed, *complete[4:6]])) == (1.0, "1m40s elapsed")


def test_a_branch_counts_from_where_it_leaves_its_trunk(tmp_path):
    """Of 8 steps of a trunk 5 are in the branch at half of it, which itself trains 4: 3 in common."""
    sweep, results = empty_sweep(tmp_path)
    base = known_runs(Plan(sweep), results)[0]
    wsd = {"schedule": "wsd", "decay_frac": 0.25, "warmup_tokens": base.batch_tokens}
    whole, half = (
        RunConfig(
            **{**base.model_dump(exclude={"run_id", "warmup_frac"}), **wsd, "train_tokens": n * base.batch_tokens}
        )
        for n in (8, 4)
    )
    done = RunState(run_id=half.run_id, state="complete", config=half)
    found = ProgressDisplay(sweep, 2, results).progress(
        [done, RunState(run_id=whole.run_id, state="planned", config=whole)]
    )
    assert found.share == 4 / (4 + 8 - 3)


def test_results_at_a_value_that_tuning_is_yet_to_confirm_are_of_the_definition(tmp_path):
    """A third value was added to the grid: the results at 0.001 stand, and are no 'other runs to move out'."""
    fields = {"space": {"n_layers": [2]}, "tuning_seeds": [8, 9], "seeds": [0, 1]}
    sweep, results = empty_sweep(tmp_path, **fields, tune={"lr": [0.001, 0.002, 0.004]})
    for lr, seeds in ((0.001, (8, 9, 0, 1)), (0.002, (8, 9))):
        for seed in seeds:
            make_run(results, sweep.run_config({"n_layers": 2, "lr": lr}, seed), {"val_loss": 1000 * lr + seed})
    out, _ = sparsedepth("status", results)
    assert "6 complete" in out and "2 planned" in out and "other complete runs" not in out
    assert len(remaining_and_trunks(Plan(sweep), results)[0]) == 2


def test_status_counts_the_tuning_seeds_that_are_a_cells_own_results(tmp_path):
    """The cell has seeds 0 to 2, of which 1 and 2 tuned it; the sweep's own is 0."""
    fields = {"cells": [{"n_layers": 2, "seeds": 3}], "space": {}, "tune": {"lr": [0.001, 0.002, 0.004]}, "seeds": [0]}
    fields |= {"tuning_seeds": [1, 2], "reuse_tuning_seeds": True}
    sweep, results = empty_sweep(tmp_path, **fields)
    for seed in range(3):
        make_run(results, sweep.run_config({"n_layers": 2, "lr": 0.001}, seed), {"val_loss": 2.0 - seed})
    out, _ = sparsedepth("status", results)
    assert "val_loss 0 (n_layers=2, baseline, seed 2; mean of its 3 seeds 1)" in " ".join(out.split())


@pytest.mark.parametrize("command", ["recipe", "effects", "best", "status"])
def test_what_asks_for_runs_says_that_there_are_toy_networks(command):
    _, err = sparsedepth(command, RESULTS / "toy", code=2)
    assert "holds toy networks and no runs; see their exponents: python analysis/toy.py" in err and err.count("\n") == 1


def test_status_of_measured_models_names_what_ranks_them(tmp_path):
    (tmp_path / "models").mkdir()
    _, err = sparsedepth("status", tmp_path, code=2)
    assert f"holds measured models and no runs; see them ranked: sparsedepth query {tmp_path} --ask models" in err


def test_status_above_several_results_folders_names_a_command_for_one(tmp_path):
    for name in ("b", "a/it's a"):  # as deep as `query` looks for them
        make_run(tmp_path / name, RunConfig(), {"val_loss": 1.0})
    _, err = sparsedepth("status", tmp_path, code=2)
    assert err.count("\n") == 1
    fix = shlex.split(err.partition("holds 2 results folders; give one of them: sparsedepth ")[2])
    assert "1 complete" in sparsedepth(*fix)[0]


def test_a_search_that_has_no_run_yet_is_shown_where_other_commands_send_to(tmp_path):
    search, results = empty_sweep(tmp_path, sampler="tpe", n_trials=20, space={"n_layers": [1, 2]})
    shutil.copytree(results, tmp_path / "other")
    _, err = sparsedepth("query", results, tmp_path / "other", "select 1 as n", code=2)
    fix = shlex.split(err.partition("see the state of its sweep: sparsedepth ")[2])
    assert "0 complete" in sparsedepth(*fix)[0]
    is_left = lambda: json.loads(sparsedepth(*fix, "--format", "json")[0])["is_left"]  # noqa: E731
    assert is_left()
    make_run(results, search.run_config({"n_layers": 1}, 0), {"val_loss": 1.0})
    (results / "work").mkdir()
    with hold(results / "work" / "sweep-1.lock"):
        assert is_left(), "its process may propose more"
    assert not is_left()


def test_without_a_terminal_a_run_says_at_the_start_and_every_half_minute_how_long_is_left(monkeypatch, capsys):
    """A resumed run, at 50% from its first step: 1% in 10 s, so the 46% that are left at 54% take 7m40s."""
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    with bar("run") as report:
        report("reading the text", 0.0)
        for step in range(5):
            report("training", 0.5 + 0.01 * step, 1.25)
            seconds += 10.0
            if step == 2:
                assert capsys.readouterr().err == "run: reading the text, 0% done\n"
        seconds += 1.0
        report("training", 0.55, 1.25)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "run: training, loss 1.250, 54% done, about 7m40s left" and not others
