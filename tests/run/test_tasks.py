"""A run on a task: it learns, is measured on what it never met, and reads and writes no text."""

import pytest
from support.tiny_sweep import CPU

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import TASKS as RECORDS
from sparsedepth.run.execute import execute
from sparsedepth.run.train_and_measure import Options
from sparsedepth.store import run_record
from sparsedepth.train.loop import Interrupted

TINY = {"n_layers": 2, "d_model": 16, "n_heads": 2, "batch_tokens": 512, "train_tokens": 512 * 60, "lr": 1e-2}
TINY = {**TINY, "precision": "fp32", "val_tokens": 512, "measure_tokens": 128, "fit_tokens": 256, "observe_every": 20}
TASKS = {
    "state_tracking": {"task_group": "S3", "n_operations": 2, "seq_len": 8},
    "k_hop": {"letters": 3, "max_hops": 2, "seq_len": 16},
}


def config(task: str, **fields) -> RunConfig:
    return build(RunConfig, {**TINY, "corpus": f"task:{task}", **TASKS[task], **fields}, "test")


@pytest.mark.parametrize("task", RECORDS)
def test_a_run_is_trained_and_measured_where_answers_count(tmp_path, task):
    made = run_record.read_run(execute(config(task), tmp_path, Options(runtime=CPU)))
    summary = made.summary
    assert summary["train_loss"] < made.tables["curves"]["train_loss"][0].as_py()
    assert summary["val_loss"] < 1.2 * summary["train_loss"]
    everywhere = {"state_tracking": 512, "k_hop": 512 * 15 // 16}
    assert summary["val_loss_tokens"] == everywhere[task]
    assert summary["val_bits_per_byte"] is None and summary["usefulness"] is not None
    rows = made.tables["difficulty"].to_pylist()
    assert sum(row["positions"] for row in rows) == summary["val_loss_tokens"] and {row["step"] for row in rows} == {60}
    total = sum(row["positions"] * row["accuracy"] for row in rows)
    assert total / summary["val_loss_tokens"] == pytest.approx(summary["val_accuracy"])
    assert rows[0]["difficulty"] - 1 <= summary["solved_difficulty"] <= rows[-1]["difficulty"]
    assert made.manifest["data"]["corpus"] == f"task:{task}" and not (tmp_path / "data").exists()


def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path):
    """Its seconds are those of all its processes: here 50, 10 and 0, by their clocks."""
    chosen = config("state_tracking", measures=["loss"])
    whole = run_record.read_run(execute(chosen, tmp_path / "whole", Options(runtime=CPU)))
    for steps, seconds in ((20, 50.0), (10, 10.0)):
        stop = iter([False] * steps + [True])
        clock = iter((0.0, 0.0, seconds))  # when the process began, when training did, at the checkpoint
        with pytest.raises(Interrupted):
            execute(chosen, tmp_path / "cut", Options(runtime=CPU, stop=stop.__next__, clock=clock.__next__))
    resumed = run_record.read_run(execute(chosen, tmp_path / "cut", Options(runtime=CPU, clock=lambda: 7.0)))
    assert resumed.summary == whole.summary
    assert resumed.manifest["training_seconds"] == resumed.manifest["seconds"] == 60
