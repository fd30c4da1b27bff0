"""The record of a finished run: written in the scratch folder, completed by its marker, renamed into its place.

The rename is done for one process alone: whoever was taken for dead and wakes up later cannot change a result.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from sparsedepth import files
from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.measure.suite import Measurements
from sparsedepth.model.decoder import Decoder
from sparsedepth.run.lease import Lease
from sparsedepth.store import run_record
from sparsedepth.train.loop import Interrupted, TrainingResult


def write(
    target: Path,
    config: RunConfig,
    model: Decoder,
    trained: TrainingResult,
    measured: Measurements | None,
    manifest: Any,
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
    run_record.write_summary(target, {**_training_summary(config, trained), **(measured.summary if measured else {})})
    if measured:  # the weights of a diverged run are no result: they depend on when it was found out
        weights = {name: weight.detach().cpu().contiguous() for name, weight in model.named_parameters()}
        files.write_bytes(target / run_record.WEIGHTS, save(weights))
    run_record.finish(target)


def publish(aside: Path, target: Path, lease: Lease) -> None:
    """Rename the record, written aside, into its place; the first to do so makes the result."""
    if not lease.is_valid():
        raise Interrupted
    target.parent.mkdir(exist_ok=True)
    try:
        os.rename(aside, target)
    except OSError:  # a folder cannot be renamed over one that holds files: another process was first
        if not run_record.is_complete(target):
            raise
    files.sync_folder(target.parent)


def _training_summary(config: RunConfig, trained: TrainingResult) -> dict[str, Any]:
    counted = cost(config)
    tokens = trained.steps * config.batch_tokens
    tail = [row["train_loss"] for row in trained.curves if row["step"] > 0.9 * config.n_steps]
    return {
        "outcome": trained.outcome,
        "diverged_step": trained.diverged_step,
        "diverged_cause": trained.diverged_cause,
        "params_total": counted.params_total,
        "params_active": counted.params_active,
        "flops_per_token": counted.flops_per_token,
        "train_flops": counted.train_flops(tokens),
        "steps": trained.steps,
        "tokens_trained": tokens,
        "tokens_per_param": tokens / counted.params_total,
        "train_loss": float(np.mean(tail)) if tail and trained.outcome == "ok" else None,
    }
