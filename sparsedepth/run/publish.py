"""Write the record of a finished run in its scratch folder, then rename it to its final path.

Only the holder of the lease can publish: a process that was presumed dead and wakes up cannot change a result.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from sparsedepth import files
from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.measure.suite import Measurements
from sparsedepth.model.decoder import Decoder
from sparsedepth.run.lease import Lease
from sparsedepth.store import run_record
from sparsedepth.train.loop import Interrupted, TrainingResult
from sparsedepth.train.tensor_file import write_tensors


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
    if measured:  # a diverged run's weights are no result: they depend on when the divergence was detected
        weights = {name: weight.detach().cpu().contiguous() for name, weight in model.named_parameters()}
        write_tensors(target / run_record.WEIGHTS, weights)
    run_record.finish(target)


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


def _training_summary(config: RunConfig, trained: TrainingResult) -> dict[str, Any]:
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
