"""Runs reach a tracker once, whole, also after a kill: the rule on a tracker in memory, and each real tracker read back
from its own files. The real ones need `pip install .[trackers]`; nothing leaves this machine."""

import json
import os
import shlex
import signal
import sqlite3
import sys
import types
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.made_up_runs import MANIFEST, make_run
from support.runs_frame import config_of
from support.tiny_sweep import sparsedepth, start

from sparsedepth.cli.exchange import sync as send
from sparsedepth.store.connection import open_store
from sparsedepth.trackers import runs
from sparsedepth.trackers.runs import PLACES, open_tracker, sync, tracked_runs

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
SUMMARY = {"val_loss": 2.5, "train_loss": 2.5, "params_total": 1234, "steps": 20, "usefulness": None}
"""Its train_loss is another than the last of the curves."""
CURVES = [{"step": 10, "train_loss": 3.0, "lr": 1e-3}, {"step": 20, "train_loss": 2.75, "lr": 5e-4}]


def add(results: Path, seed: int) -> str:
    config = config_of(n_layers=2, seed=seed)
    manifest = {**MANIFEST, "training_seconds": 4.0}
    make_run(results, config, {**SUMMARY, "val_loss": 2.5 + seed}, curves=CURVES, manifest=manifest)
    return config.run_id


@pytest.fixture
def results(tmp_path):
    for seed in (0, 1, 2):
        add(tmp_path / "results", seed)
    return tmp_path / "results"


class Memory:
    """A tracker that remembers, and can be killed while it takes a run."""

    def __init__(self, place="memory"):
        self.place, self.runs, self.n_sent, self.dies_at = place, {}, 0, None

    def held(self):
        return {*self.runs}

    def discard(self, run_id):
        self.runs.pop(run_id, None)

    def send(self, run):
        assert run.run_id not in self.runs, "sent on top of what is there"
        self.n_sent += 1
        self.runs[run.run_id] = "half"
        if self.n_sent == self.dies_at:
            raise KeyboardInterrupt
        self.runs[run.run_id] = run

    def view_command(self):
        return ""


def test_a_run_is_what_its_record_says_and_what_is_missing_is_left_out(results):
    with open_store(results) as store:
        (run,) = (run for run in tracked_runs(store) if run.run_id == config_of(n_layers=2, seed=1).run_id)
    assert run.params["n_layers"] == 2 and run.params["seed"] == 1 and run.params["corpus"] == "stdlib"
    assert run.curves == ((10, {"train_loss": 3.0, "lr": 1e-3}), (20, {"train_loss": 2.75, "lr": 5e-4}))
    known = {"val_loss": 3.5, "train_loss": 2.5, "params_total": 1234, "steps": 20}
    assert run.summary == {**known, "seconds": 1.5, "training_seconds": 4.0}
    assert run.tags["outcome"] == "ok" and run.tags["cell_id"] and "model" not in run.tags
    assert [run.time_at(step) - STARTED for step in (0, 10, 20)] == [0.0, 2.0, 4.0]


def test_each_run_is_sent_once_and_a_new_one_alone(results):
    tracker = Memory()
    assert len([*sync(results, "mlflow", tracker)]) == 3 and [*sync(results, "mlflow", tracker)] == []
    new = add(results, 3)
    assert [*sync(results, "mlflow", tracker)] == [new] and len(tracker.runs) == 4
    assert len([*sync(results, "mlflow", Memory("elsewhere"))]) == 4, "another place has nothing yet"
    assert [*sync(results, "mlflow", tracker)] == [], "and the first place is not forgotten"


def test_a_run_that_a_kill_cut_off_is_sent_anew_and_no_other(results):
    tracker = Memory()
    tracker.dies_at = 2
    with pytest.raises(KeyboardInterrupt):
        list(sync(results, "mlflow", tracker))
    assert [*tracker.runs.values()].count("half") == 1
    assert len([*sync(results, "mlflow", tracker)]) == 2
    assert tracker.n_sent == 4 and "half" not in tracker.runs.values() and len(tracker.runs) == 3


def test_a_run_that_was_sent_and_not_noted_is_replaced(results):
    tracker = Memory()
    for _ in sync(results, "mlflow", tracker):
        break  # killed between two runs
    ledger = results / "trackers" / "sent-mlflow.json"
    assert len(json.loads(ledger.read_text())["memory"]) == 1
    ledger.unlink()
    assert len([*sync(results, "mlflow", tracker)]) == 3 and len(tracker.runs) == 3


def test_what_the_tracker_has_lost_is_sent_again(results):
    tracker = Memory()
    list(sync(results, "mlflow", tracker))
    gone = min(tracker.runs)
    del tracker.runs[gone]
    assert [*sync(results, "mlflow", tracker)] == [gone]
    tracker.held = lambda: None  # cannot be asked: the note decides
    del tracker.runs[gone]
    assert [*sync(results, "mlflow", tracker)] == []


@pytest.mark.parametrize("name", PLACES)
def test_a_package_that_is_missing_is_one_line(results, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"sparsedepth.trackers.{name}", raising=False)
    with pytest.raises(ValueError, match=rf"^--to {name} needs a package .*: pip install {name}, or '\.\[tr"):
        open_tracker(name, results)
    assert not (results / "trackers").exists()


def test_mistakes_are_one_line(tmp_path, results):
    with pytest.raises(ValueError, match="--to 'neptune' is not one of tensorboard, mlflow, trackio, wandb"):
        open_tracker("neptune", results)
    with pytest.raises(ValueError, match="tensorboard has no projects"):
        open_tracker("tensorboard", results, project="mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no complete run"):
        list(sync(tmp_path / "empty", "mlflow", Memory()))


def test_what_a_trackers_package_raises_is_one_line_and_what_was_sent_stays(results):
    tracker, taken = Memory(), []

    def refuse(run):
        if taken:
            raise RuntimeError("500: try\nlater")
        taken.append(run.run_id)
        tracker.runs[run.run_id] = run

    tracker.send = refuse
    with pytest.raises(ValueError, match="mlflow refused a run: 500: try later; the runs sent so far are kept"):
        [*sync(results, "mlflow", tracker)]
    tracker.send = lambda run: taken.append(run.run_id)
    assert len([*sync(results, "mlflow", tracker)]) == 2 and len({*taken}) == 3
    (results / "trackers" / "sent-mlflow.json").write_text("{")
    with pytest.raises(ValueError, match=r"sent-mlflow.json is damaged; delete it"):
        [*sync(results, "mlflow", tracker)]


def test_watching_sends_what_ends_and_ends_with_the_sweep(results, monkeypatch, capsys):
    """The sweep ends between two looks: its last run is sent, too."""
    tracker, looks = Memory(), iter([True, False])

    def has_unfinished_runs(folder):
        still = next(looks)
        if not still:
            add(results, 5)
        return still

    monkeypatch.setattr(runs, "open_tracker", lambda *given: tracker)
    monkeypatch.setattr(runs, "has_unfinished_runs", has_unfinished_runs)
    send(results, "mlflow", watch=True, every=0.0)
    assert len(tracker.runs) == 4 and "4 runs sent to mlflow" in capsys.readouterr().out


# Real trackers


def scalars_of_tensorboard(results: Path) -> dict[str, dict]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = {}
    for folder in (results / "trackers" / "tensorboard").iterdir():
        events = EventAccumulator(str(folder)).Reload()
        curve, (summary,) = events.Scalars("curves/train_loss"), events.Scalars("summary/val_loss")
        assert [round(event.wall_time - STARTED, 3) for event in curve] == [2.0, 4.0]
        assert set(events.Tags()["tensors"]) == {"_hparams_/session_start_info", "tags"}
        assert "outcome: ok" in events.Tensors("tags")[0].tensor_proto.string_val[0].decode()
        start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        runs[folder.name] = {
            "curve": [(event.step, event.value) for event in curve],
            "val_loss": (summary.step, summary.value),
            "has_params": b"n_layers" in start,
        }
    return runs


def scalars_of_mlflow(results: Path) -> dict[str, dict]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{results / 'trackers' / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "results"]
    runs = {}
    for run in client.search_runs([experiment.experiment_id]):
        *history, last = client.get_metric_history(run.info.run_id, "train_loss")
        assert last.value == run.data.metrics["train_loss"] == 2.5, "what a table of runs shows"
        (summary,) = client.get_metric_history(run.info.run_id, "val_loss")
        run_id = run.data.tags["sparsedepth.run_id"]
        assert run_id not in runs and run.info.status == "FINISHED" and run.data.tags["sparsedepth.outcome"] == "ok"
        assert run.info.start_time == 1000 * STARTED and run.info.end_time == 1000 * STARTED + 4000
        runs[run_id] = {
            "curve": [(metric.step, metric.value) for metric in history],
            "val_loss": (summary.step - 1, summary.value),
            "has_params": run.data.params["n_layers"] == "2",
        }
    return runs


def test_the_command_that_shows_a_project_survives_a_shell(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", types.ModuleType("trackio"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    command = open_tracker("trackio", tmp_path / "my results").view_command
    assert shlex.split(command)[1:] == ["trackio", "show", "--project", "my results"]


def scalars_of_trackio(results: Path) -> dict[str, dict]:
    with sqlite3.connect(results / "trackers" / "trackio" / "results.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
        configs = {name: json.loads(text) for name, text in database.execute("select run_name, config from configs")}
    assert {config["tag_outcome"] for config in configs.values()} == {"ok"}
    runs = {name: {"curve": [], "has_params": config["n_layers"] == 2} for name, config in configs.items()}
    for name, step, text in rows:
        values = json.loads(text)
        if "val_loss" in values:
            runs[name]["val_loss"] = (step - 1, values["val_loss"])
        else:
            runs[name]["curve"].append((step, values["train_loss"]))
    return runs


def scalars_of_wandb(results: Path) -> dict[str, dict]:
    from wandb.proto.wandb_internal_pb2 import Record

    from sparsedepth.trackers.wandb import records

    runs = {}
    for path in (results / "trackers").glob("*/wandb/offline-run-*/run-*.wandb"):
        run, name, last = {"curve": []}, None, None
        for content in records(path):
            record = Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "run":
                name, config = record.run.run_id, {item.key: item.value_json for item in record.run.config.update}
                run["has_params"] = config["n_layers"] == "2" and config["tag_outcome"] == '"ok"'
            for item in record.summary.update:
                if "val_loss" in (item.key, *item.nested_key):
                    run["val_loss"] = (20, json.loads(item.value_json))
                if "train_loss" in (item.key, *item.nested_key):
                    last = json.loads(item.value_json)
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if "train_loss" in values:
                run["curve"].append((int(values["_step"]), json.loads(values["train_loss"])))
        assert last == 2.5, "what a table of runs shows"
        assert name not in runs
        runs[name] = run
    return runs


READ = {name: globals()[f"scalars_of_{name}"] for name in PLACES}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_a_real_tracker_holds_every_run_once_also_after_a_kill(results, name, monkeypatch):
    """The first command is killed after its first run; the second sends the others, the third nothing."""
    pytest.importorskip(name)
    for variable in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(variable, raising=False)
    command = ("sync", results, "--to", name)
    process = start(*command)
    assert process.stdout.readline().startswith("sent ")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    out, _ = sparsedepth(*command)
    assert out.splitlines()[-2].startswith(("1 run sent", "2 runs sent"))
    assert "0 runs sent" in sparsedepth(*command)[0]
    runs = READ[name](results)
    assert set(runs) == {config_of(n_layers=2, seed=seed).run_id for seed in (0, 1, 2)}
    for seed in (0, 1, 2):
        run = runs[config_of(n_layers=2, seed=seed).run_id]
        assert run == {"curve": [(10, 3.0), (20, 2.75)], "val_loss": (20, 2.5 + seed), "has_params": True}
