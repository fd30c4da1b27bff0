"""The record of a finished run: its provenance (code, packages, device, kernels, data; no environment variable or host
name), its files, written in the scratch folder, and the rename to its final path.

Only the holder of the lease can publish: a process that was presumed dead and wakes up cannot change a result."""

import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Container
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

import sparsedepth
from sparsedepth import files
from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.measure.measurements import Measurements
from sparsedepth.model.decoder import Decoder
from sparsedepth.plugins import used
from sparsedepth.quantities.measured import PLUGINS
from sparsedepth.run.lease import Lease
from sparsedepth.run.process import anonymous_bytes
from sparsedepth.store import run_record
from sparsedepth.store.made_with import package_versions
from sparsedepth.store.subject import MeasuredModel
from sparsedepth.train.checkpoint import write_tensors
from sparsedepth.train.loop import Clock, Interrupted, TrainingResult
from sparsedepth.train.runtime import Runtime


@functools.cache
def code_version() -> Fields:
    """The release and, in a checkout, the commit; `changed` is true with uncommitted changes."""
    root = Path(sparsedepth.__file__).parent.parent
    commit = changes = None
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", "sparsedepth")
    changed = None if changes is None else bool(changes)
    return {"version": sparsedepth.__version__, "commit": commit, "changed": changed}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Stopwatch:
    """Start time and duration, including the time of earlier processes."""

    def __init__(self, clock: Clock = time.perf_counter):
        self.clock = clock
        self.began = clock()
        self.earlier_seconds = 0.0
        self.started = datetime.now(UTC).isoformat(timespec="seconds")

    def seconds(self) -> float:
        return round(self.earlier_seconds + self.clock() - self.began, 3)

    def facts(self) -> Fields:
        return {"started": self.started, "seconds": self.seconds()}


def provenance(run_id: str, data_hash: str, made: Container[str] = ()) -> Fields:
    """The run of a record, and the code, command, data and packages that produced it; `made`: its measures, its corpus,
    which plugins may make."""
    of_plugins = used(PLUGINS, made)
    return {
        "run_id": run_id,
        "code": code_version(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "data_hash": data_hash,
        "packages": package_versions(),
        **({"plugins": of_plugins} if of_plugins else {}),
    }


def device_facts(runtime: Runtime, before: tuple[int, int] | None = None) -> Fields:
    """The device, its settings and peak memory: on a GPU as allocated by PyTorch; on a CPU (Linux) the anonymous memory
    added since `before`, an earlier `anonymous_bytes`."""
    if runtime.device.type == "cuda":
        name = torch.cuda.get_device_name(runtime.device)
        peak = torch.cuda.max_memory_allocated(runtime.device)
    else:
        name = platform.processor() or platform.machine()
        memory = anonymous_bytes()
        peak = max(0, memory[1] - before[0]) if before and memory else None
    return {
        "device": f"{runtime.device.type} ({name})",
        "precision": runtime.precision,
        "stream": runtime.kernels.get("stream", "fp32"),
        "threads": runtime.threads,
        "compiled": runtime.compile,
        "cuda_graph": runtime.cuda_graph,
        "parallel": runtime.parallel,
        "micro_batch": runtime.micro_batch,
        "peak_memory_bytes": peak,
    }


def write_measured(
    out: Path,
    model: MeasuredModel,
    measurements: Measurements,
    watch: Stopwatch,
    device: torch.device,
    facts: Fields | None = None,
) -> None:
    """Write the record of a model that was measured, in fp32, with the files of its tables and `facts` of the model."""
    runtime = Runtime(device=device, precision="fp32", threads=torch.get_num_threads())
    made = provenance(model.run_id, model.data_hash, model.measures)
    manifest = {**watch.facts(), **device_facts(runtime), **made, **(facts or {})}
    run_record.save_measured(out, model, measurements.summary, manifest, measurements.tables())


def write(
    target: Path,
    config: RunConfig,
    model: Decoder,
    trained: TrainingResult,
    measured: Measurements | None,
    manifest: Fields,
) -> None:
    """Write every file of the record, then its marker (`store.run_record.finish`)."""
    target.mkdir(parents=True)
    run_record.write_config(target, config)
    run_record.write_manifest(target, manifest)
    run_record.write_table(target, "curves", trained.curves)
    run_record.write_table(target, "layers", [*trained.observations, *(measured.layers if measured else [])])
    if measured:
        for table, rows in measured.tables().items():
            if table in ("heads", "pairs") or (rows and table != "layers"):
                run_record.write_table(target, table, rows)
    run_record.write_summary(target, {**training_summary(config, trained), **(measured.summary if measured else {})})
    if measured:  # a diverged run's weights are no result: they depend on when the divergence was detected
        weights = {name: weight.detach().cpu().contiguous() for name, weight in model.named_parameters()}
        write_tensors(target / run_record.WEIGHTS, weights)
    run_record.finish(target)


def training_summary(config: RunConfig, trained: TrainingResult) -> Fields:
    """How a run's training ended, what it cost, and `train_loss`, the mean over the last tenth of steps (nat/token)."""
    run_cost = cost(config)
    tokens = trained.steps * config.batch_tokens
    last_losses = [row["train_loss"] for row in trained.curves if row["step"] > 0.9 * config.n_steps]
    return {
        "outcome": trained.outcome,
        "diverged_step": trained.diverged_step,
        "diverged_cause": trained.diverged_cause,
        "params_total": run_cost.params_total,
        "params_active": run_cost.params_active,
        "flops_per_token": run_cost.flops_per_token,
        "train_flops": run_cost.train_flops(tokens),
        "steps": trained.steps,
        "tokens_trained": tokens,
        "tokens_per_param": tokens / run_cost.params_total,
        "train_loss": float(np.mean(last_losses)) if last_losses and trained.outcome == "ok" else None,
    }


def publish(aside: Path, target: Path, lease: Lease) -> None:
    """Rename the record from `aside` to `target`; the first process to do so wins."""
    if not lease.is_valid():
        raise Interrupted
    target.parent.mkdir(exist_ok=True)
    try:
        os.rename(aside, target)
    except OSError:  # the target exists: another process was first
        if not run_record.is_complete(target):
            raise
    files.sync(target.parent)
