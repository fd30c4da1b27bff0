"""One run in its process: out of memory, taken by another, and left whole."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support.tiny_sweep import CPU, run_config, table

from sparsedepth.run import execute as module, lease, train_and_measure
from sparsedepth.run.execute import _exit_code, execute
from sparsedepth.run.process import NO_STORAGE
from sparsedepth.run.publish import publish, training_summary
from sparsedepth.run.scratch import Scratch
from sparsedepth.run.train_and_measure import Infeasible, Options, RunJob
from sparsedepth.store import run_record
from sparsedepth.sweep.results_folder import ResultsIndex
from sparsedepth.sweep.status import state_of
from sparsedepth.train.devices import LostError
from sparsedepth.train.loop import Interrupted, TrainingResult, training
from sparsedepth.train.runtime import is_out_of_memory, other_processes_bytes, resolve


def shortage(limit: int, tried: list, n_short: int | None = None):
    """A `training` that has memory for `limit` sequences per forward pass; after `n_short` tries for all."""

    def limited(model, config, runtime, *arguments, **options):
        tried.append(runtime.micro_batch)
        if (runtime.micro_batch or 4) > limit and (n_short is None or len(tried) <= n_short):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return training(model, config, runtime, *arguments, **options)

    return limited


def test_out_of_memory_halves_the_micro_batch_until_it_fits(tmp_path, monkeypatch):
    tried: list[int | None] = []
    monkeypatch.setattr(train_and_measure, "training", shortage(2, tried))
    cfg = run_config(tmp_path)
    made = run_record.read_run(execute(cfg, tmp_path / "results", Options(runtime=CPU)))
    assert tried == [None, 2]
    assert made.manifest["micro_batch"] == 2 and made.summary["tokens_trained"] == cfg.train_tokens
    assert not (Scratch(tmp_path / "results", cfg.run_id).folder / "memory.json").exists()


def test_what_does_not_fit_at_all_is_infeasible_and_no_failure(tmp_path, monkeypatch):
    tried: list[int | None] = []
    monkeypatch.setattr(train_and_measure, "training", shortage(0, tried))
    cfg = run_config(tmp_path)
    with pytest.raises(Infeasible, match="one sequence per forward pass: CUDA out of memory"):
        execute(cfg, tmp_path / "results", Options(runtime=CPU))
    assert tried == [None, 2, 1]
    state = state_of(ResultsIndex(tmp_path / "results", None), cfg.run_id)
    assert state.state == "infeasible" and "CUDA out of memory" in str(state.reason)
    scratch = Scratch(tmp_path / "results", cfg.run_id)
    assert not scratch.recorded().failures
    scratch.clear_failures()
    assert state_of(ResultsIndex(tmp_path / "results", None), cfg.run_id).state != "infeasible"


def test_processes_of_one_run_start_again_with_half_and_nothing_failed(tmp_path):
    cfg = run_config(tmp_path)
    scratch = Scratch(tmp_path / "results", cfg.run_id)
    scratch.folder.mkdir(parents=True)
    job = RunJob(cfg, scratch, None, SimpleNamespace(size=2), Options(runtime=CPU))  # ty: ignore[invalid-argument-type]
    with pytest.raises(LostError, match="out of memory with 2 sequences per forward pass; start again, with half"):
        job._halve_micro_batch(replace(resolve(cfg, CPU), micro_batch=64), torch.OutOfMemoryError("no"))
    assert scratch.recorded().micro_batch == 1
    assert _exit_code(LostError("start again"), scratch) == 1 and not scratch.recorded().failures


@pytest.mark.parametrize(("too_many", "own", "expected"), [((4,), 1, 1), ((4, 3), None, 2)])
def test_a_new_process_begins_with_what_fits_or_with_less_on_demand(tmp_path, monkeypatch, too_many, own, expected):
    cfg = run_config(tmp_path)
    scratch = Scratch(tmp_path / "results", cfg.run_id)
    scratch.folder.mkdir(parents=True)
    assert all([scratch.halve_micro_batch(n, "x") for n in too_many]) and scratch.recorded().micro_batch == 2
    tried: list[int | None] = []
    monkeypatch.setattr(train_and_measure, "training", shortage(4, tried))
    execute(cfg, tmp_path / "results", Options(runtime=CPU.model_copy(update={"micro_batch": own})))
    assert tried == [expected]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize("shortages", [1, 9])
def test_out_of_memory_while_measuring_leaves_the_micro_batch(tmp_path, monkeypatch, shortages):
    """It is tried again once; then it is infeasible, and says what would help."""
    left = iter(range(shortages))

    def measure(*arguments, **options):
        if next(left, None) is not None:
            raise MemoryError("no room")
        return measure_run(*arguments, **options)

    measure_run = train_and_measure.measure_run
    monkeypatch.setattr(train_and_measure, "measure_run", measure)
    cfg, results = run_config(tmp_path), tmp_path / "results"
    if shortages == 1:
        made = run_record.read_run(execute(cfg, results, Options(runtime=CPU)))
        assert made.manifest["micro_batch"] is None
        return
    with pytest.raises(Infeasible, match=r"while measuring; lower measure_tokens, .* no room"):
        execute(cfg, results, Options(runtime=CPU))
    assert next(left) == 2 and "while measuring" in str(Scratch(results, cfg.run_id).recorded().infeasible)


def test_a_neighbours_memory_is_waited_for(tmp_path, monkeypatch):
    """Twice another process leaves too little: the same micro-batch is tried a third time."""
    tried: list[int | None] = []
    monkeypatch.setattr(train_and_measure, "training", shortage(0, tried, n_short=2))
    monkeypatch.setattr(train_and_measure, "other_processes_bytes", lambda device: 2**33)
    monkeypatch.setattr(train_and_measure, "NEIGHBOUR_SECONDS", 0.01)
    made = run_record.read_run(execute(run_config(tmp_path), tmp_path / "results", Options(runtime=CPU)))
    assert tried == [None] * 3 and made.manifest["micro_batch"] is None


@pytest.mark.parametrize(("free", "expected"), [(60, 30), (85, 0)])
def test_what_a_neighbour_holds(monkeypatch, free, expected):
    """Of 100, 10 are this process's own; 5 for the context of whoever is no neighbour."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    assert other_processes_bytes(torch.device("cuda")) == expected and other_processes_bytes(torch.device("cpu")) == 0


def test_a_run_that_was_taken_by_another_process_writes_nothing(tmp_path, monkeypatch):
    """The lock is taken while this process trains; the other one's result stands."""
    cfg = run_config(tmp_path)
    results = tmp_path / "results"
    scratch = Scratch(results, cfg.run_id)

    def overtaken(*arguments, **options):
        trained = yield from training(*arguments, **options)
        with monkeypatch.context() as patch:
            patch.setattr(lease, "GRACE_SECONDS", 0.0)
            patch.setattr(lease, "HEARTBEAT_SECONDS", 60.0)
            patch.setattr(train_and_measure, "training", training)
            execute(cfg, results, Options(runtime=CPU))
        made.append((results / "runs" / cfg.run_id / "complete").stat().st_mtime_ns)
        return trained

    made: list[int] = []
    monkeypatch.setattr(train_and_measure, "training", overtaken)
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 60.0)
    with pytest.raises(Interrupted):
        execute(cfg, results, Options(runtime=CPU))
    assert [(results / "runs" / cfg.run_id / "complete").stat().st_mtime_ns] == made
    assert len(list((results / "runs").iterdir())) == 1 and not scratch.recorded().failures


@pytest.mark.parametrize(("lost", "asked"), [(True, False), (False, True), (False, False)])
def test_a_run_stops_at_its_next_step_if_its_lease_is_lost_or_a_stop_was_asked_for(lost, asked):
    job = SimpleNamespace(lease=SimpleNamespace(lost=lost), options=SimpleNamespace(stop=lambda: asked))
    assert RunJob._stop(cast(RunJob, job)) == (lost or asked)


def test_the_first_record_in_its_place_stands(tmp_path):
    """Even where both believe that the run is theirs: the rename has one winner."""
    cfg = run_config(tmp_path)
    results = tmp_path / "results"
    target = execute(cfg, results, Options(runtime=CPU))
    before = (target / "complete").stat().st_mtime_ns
    second = tmp_path / "second" / cfg.run_id
    second.mkdir(parents=True)
    (second / "complete").write_text("{}")
    with lease.hold(tmp_path / "lock") as held:
        publish(second, target, held)
    assert (target / "complete").stat().st_mtime_ns == before and second.exists()
    run_record.verify(target)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), NO_STORAGE),
        (OSError(errno.EROFS, "Read-only file system"), NO_STORAGE),
        (OSError(errno.ENOENT, "No such file or directory"), 1),
        (RuntimeError("No space left on device"), 1),
    ],
)
def test_storage_that_cannot_be_written_is_no_failure_of_the_run(tmp_path, error, code):
    scratch = Scratch(tmp_path, "0" * 12)
    scratch.folder.mkdir(parents=True)
    assert _exit_code(error, scratch) == code
    assert len(scratch.recorded().failures) == int(code == 1)
    wrapped = RuntimeError("the checkpoint was not written")
    wrapped.__cause__ = error
    assert _exit_code(wrapped, scratch) == code


def test_a_file_system_that_fills_at_the_rename_of_the_record_leaves_nothing(tmp_path, monkeypatch):
    cfg = run_config(tmp_path)
    results, undisturbed = tmp_path / "results", tmp_path / "undisturbed"
    rename, full = os.rename, [True]

    def fills_up(source, target):
        if Path(target).parent.name == "runs" and full:
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        rename(source, target)

    monkeypatch.setattr("os.rename", fills_up)
    with pytest.raises(OSError, match="No space left"):
        execute(cfg, results, Options(runtime=CPU))
    assert not list(results.glob("runs/*"))
    target = execute(cfg, results, Options(runtime=CPU))
    run_record.verify(target)
    assert table(results) == table(execute(cfg, undisturbed, Options(runtime=CPU)).parent.parent)
    assert not list(results.glob("work/*/record-*"))


def test_a_cut_short_copy_is_set_aside_and_made_again(tmp_path):
    cfg = run_config(tmp_path)
    results = tmp_path / "results"
    target = execute(cfg, results, Options(runtime=CPU))
    (target / "complete").unlink()
    assert execute(cfg, results, Options(runtime=CPU)) == target
    run_record.verify(target)
    assert len(list((results / "work" / cfg.run_id).glob("damaged-*"))) == 1


def test_progress_tells_the_time_left(tmp_path, monkeypatch):
    """A resumed run: the text is read again, and 40% were done before; then 10% in 0.6 s."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    scratch = Scratch(tmp_path, "0" * 12)
    scratch.folder.mkdir(parents=True)
    speaker = module.ProgressWriter(scratch)
    speaker("reading the text", 0.0, None)
    clock.now += 5.0
    speaker("training", 0.4, None)
    clock.now += 0.6
    speaker("training", 0.5, 2.0)
    said = scratch.progress()
    assert said is not None and said.loss == 2.0 and said.left == pytest.approx(5 * 0.6)
    clock.now += 0.4
    speaker("training", 0.6, 2.0)
    assert scratch.progress() == said, "said again within half a second"
    speaker("measuring", 0.9, 2.0)
    assert scratch.progress() != said


def test_the_training_loss_of_a_run_is_that_of_its_last_tenth(tmp_path):
    """Of steps 19 and 20 of 20, with the losses 19 and 20; none of a run that diverged."""
    cfg = run_config(tmp_path, batch_tokens=64, train_tokens=20 * 64, seq_len=16)
    curves = [{"step": step, "train_loss": float(step)} for step in range(1, 21)]
    for outcome, expected in (("ok", 19.5), ("diverged", None)):
        trained = TrainingResult(outcome=outcome, diverged_step=None, diverged_cause=None, steps=20, curves=curves,
                                 observations=[])  # fmt: skip
        assert training_summary(cfg, trained)["train_loss"] == expected
