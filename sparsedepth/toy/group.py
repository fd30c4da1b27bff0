"""Trains a toy group (continuing from its checkpoints) and writes its record.

Each group has a lock, so the same command, started again here or on a machine that shares the folder, takes other
groups.
"""

import datetime
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sparsedepth.files import is_locked, locked
from sparsedepth.store.checksums import is_complete
from sparsedepth.toy.config import ToyConfig
from sparsedepth.toy.network import student_axes
from sparsedepth.toy.record import save_toy, toy_folder
from sparsedepth.toy.training import Group, Progress, train


def scratch(results: Path, config: ToyConfig) -> Path:
    """`RESULTS/work/<run_id>`: the lock and the checkpoints of a group that is not complete."""
    return results / "work" / config.run_id


def is_busy(results: Path, config: ToyConfig) -> bool:
    """Whether a running process trains the group."""
    return is_locked(scratch(results, config) / "lock")


def make_group(
    config: ToyConfig,
    results: Path,
    device: torch.device,
    facts: Mapping[str, Any],
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Path:
    """Train the group into `results` unless complete; returns its folder.

    `facts` go into the manifest. Raises Interrupted, after a checkpoint, once `stop()` is true.
    """
    folder, work = toy_folder(results, config), scratch(results, config)
    with locked(work / "lock"):
        if not is_complete(folder):
            started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
            group = train(config, device, checkpoints=work / "checkpoints", progress=progress, stop=stop)
            times = {
                "started": started.isoformat(timespec="seconds"),
                "seconds": round(time.perf_counter() - clock, 3),  # of this process only
            }
            save_toy(results, config, student_rows(group), group.curves, {**times, **facts})
    shutil.rmtree(work, ignore_errors=True)
    return folder


def student_rows(group: Group) -> list[dict[str, Any]]:
    """The final losses of each student."""
    last = group.curves[-group.config.n_students :]
    return [
        {**axes, "student": row["student"], "test_loss": row["test_loss"], "train_loss": row["train_loss"]}
        for axes, row in zip(student_axes(group.config), last, strict=True)
    ]
