"""Results folders that were made to harm: every reader ends at once, with an answer or a line on what is wrong."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.made_up_runs import make_run
from support.run_folders import loud_run
from support.tiny_sweep import definition

from sparsedepth.cli import status
from sparsedepth.config.run import RunConfig
from sparsedepth.probe.load import load_model
from sparsedepth.run.scratch import Scratch
from sparsedepth.store.connection import open_store
from sparsedepth.words.status import status_lines

DEEP = "[" * 5_000
KIND = {"shape_id": "x", "seconds": {"value": "1", "factor": 0}, "memory_bytes": None}

FORMS = {
    "deep": lambda path: path.write_text(DEEP),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "empty": Path.touch,
    "bytes": lambda path: path.write_bytes(b"\xff\x00\xfe"),
    "null": lambda path: path.write_text("null"),
    "a list of lists": lambda path: path.write_text("[[1], null, {}]"),
    "wrong types": lambda path: path.write_text(
        json.dumps(
            {"phase": 1, "done": "x", "loss": [], "at": None, "left": {}, "step": "1", "micro_batch": 1e99,
             "kinds": [KIND], "infeasible": [1], "files": {"config.yaml": {"sha256": 1, "bytes": "x"}}, "run_id": 5,
             "version": [], "outcome": "ok", "val_loss": "low"}
        )
    ),
}  # fmt: skip
"""What may lie where a file of ours is expected."""

ASIDE = (
    "study.journal",
    ".cache/pack.json",
    "work/{run}/progress.json",
    "work/{run}/failures.json",
    "work/{run}/memory.json",
    "work/{run}/pruned.json",
    "work/{run}/lock",
    "work/{other}/log.txt",
)
"""Files that no result rests on."""

RECORDS = ("sweep.yaml", "pack.json", "runs/{run}/summary.json", "runs/{run}/manifest.json", "runs/{run}/complete")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sweep with two complete runs, and one that is at work."""
    folder = tmp_path_factory.mktemp("hostile")
    results = folder / "results"
    for seed in range(2):
        make_run(results, RunConfig(n_layers=2, seed=seed), {"val_loss": 3.0})
    (results / "sweep.yaml").write_text(definition(folder).read_text())
    scratch = Scratch(results, "0123456789ab")
    scratch.folder.mkdir(parents=True)
    (scratch.folder / "config.yaml").write_text("{}")
    scratch.log.write_text("said\n")
    return results


@pytest.fixture(autouse=True)
def clock():
    """Ends what waits for a pipe, or reads a device without end."""
    signal.alarm(100)
    yield
    signal.alarm(0)


def spoilt(folder: Path, place: str, form: str) -> None:
    """Put something else in a file's place."""
    run = next(path.name for path in sorted((folder / ("runs" if "runs" in place else "work")).iterdir()))
    path = folder / place.format(run=run, other="ba9876543210")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    FORMS[form](path)


def copied(whole: Path, folder: Path) -> Path:
    return Path(shutil.copytree(whole, folder, copy_function=os.link))


@pytest.mark.parametrize("form", FORMS)
def test_crafted_files_beside_the_runs_change_no_answer(whole, tmp_path, form, monkeypatch):
    monkeypatch.setattr("sparsedepth.store.cache.CACHE_FROM", 1)
    results = copied(whole, tmp_path / "results")
    for place in ASIDE:
        spoilt(results, place, form)
    lines = status_lines(status.StatusCommand(results).compute())
    assert lines[1].startswith("0 complete, 0 running, ")
    assert status._runs_with_log(results)
    with open_store(results) as store:
        assert store.sql("SELECT count(*), avg(val_loss) FROM runs").rows == ((2, 3.0),)


@pytest.mark.filterwarnings("ignore:.* its runs have no `tuning`")
@pytest.mark.parametrize("form", FORMS)
def test_a_crafted_record_is_an_answer_or_a_line(whole, tmp_path, form):
    for number, place in enumerate(RECORDS):
        results = copied(whole, tmp_path / str(number))
        spoilt(results, place, form)
        for read in (lambda results: status.StatusCommand(results).compute(), status._runs_with_log, open_store):
            try:
                assert read(results)
            except (ValueError, OSError) as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("text", ["tune: [", "tune: {lr: [3, 2, 1]}", "tune: 3\nname: x", "- 1", "colour: red"])
def test_a_sweep_definition_that_is_none_hides_no_run(whole, tmp_path, text):
    results = copied(whole, tmp_path / "results")
    (results / "sweep.yaml").unlink()
    (results / "sweep.yaml").write_text(text)
    said = pytest.warns(UserWarning, match=r"sweep.yaml.* its runs have no `tuning`")
    with open_store(results) as store, said if text != "colour: red" else nullcontext():
        assert store.sql("SELECT count(*), count(tuning) FROM runs").rows == ((2, 0),)


@pytest.mark.parametrize("form", ["folder", "pipe", "a link to itself", "a device", "deep"])
def test_a_crafted_model_folder_stops_no_measure(tmp_path, form):
    whole = loud_run(tmp_path, corpus="stdlib")
    for name in ("config.yaml", "model.safetensors", "tokenizer.json", "complete", "more"):
        run = copied(whole, tmp_path / name / whole.name)
        (run / name).unlink(missing_ok=True)
        FORMS[form](run / name)
        try:
            assert load_model(run)
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            assert name in ("tokenizer.json", "complete", "more"), name
            assert form in ("folder", "a link to itself", "deep"), name
