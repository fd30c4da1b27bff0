"""Checkpoints that are whole or absent: safetensors for tensors, JSON for the position, no pickle.

`step-N.safetensors` (weights, the optimizer's moments, RNG) is written first, `step-N.json` (position, curves,
checksums) last: the JSON is the commit. The two newest are kept; a damaged one is passed over for the one before it.

Of several processes the first writes, and what it writes is whole: a checkpoint knows nothing of how many there were.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from sparsedepth import files
from sparsedepth.train.devices import ALONE, Devices, sharded_like, whole
from sparsedepth.train.optimizer import AnyOptimizer

KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands: everything but tensors."""

    step: int
    """optimiser steps done"""
    curves: list[dict[str, Any]]
    observations: list[dict[str, Any]]
    seconds: float = 0.0
    """that training has taken until then, in all its processes"""


def write(folder: Path, model: nn.Module, optimizer: AnyOptimizer, position: Position) -> None:
    """Commit a checkpoint to `folder`, then drop all but the newest two."""
    commit(folder, snapshot(model, optimizer), position)


def commit(folder: Path, kept: dict[str, torch.Tensor], position: Position) -> None:
    """Write what `snapshot` gave, in the leader."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors_of(folder, position.step)
    whole_bytes = save(kept)
    files.write_bytes(tensors, whole_bytes)
    content = {
        "step": position.step,
        "curves": position.curves,
        "observations": position.observations,
        "seconds": position.seconds,
        "sha256": hashlib.sha256(whole_bytes).hexdigest(),  # not by reading it again
    }
    files.write_json(tensors.with_suffix(".json"), {**content, "digest": files.digest(content)})
    for old in sorted(folder.glob("step-*.json"))[:-KEPT]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def read(folder: Path, model: nn.Module, optimizer: AnyOptimizer, devices: Devices = ALONE) -> Position | None:
    """Load the newest whole checkpoint into model and optimizer; None if there is none.

    Raises ValueError in a process that does not see the checkpoint that the first one found.
    """
    position = _newest(folder) if devices.is_leader else None
    step = devices.broadcast_from_leader(position.step if position else -1)
    if step < 0:
        return None
    tensors = _tensors_of(folder, step)
    if position is None:
        position = _read(tensors.with_suffix(".json"))
        if position is None:
            raise ValueError(f"{tensors} cannot be read in every process; keep the results on storage that all share")
    _restore(load_file(tensors), model, optimizer)
    return position


def _newest(folder: Path) -> Position | None:
    commits = sorted(folder.glob("step-*.json"), reverse=True)
    return next((position for commit in commits if (position := _read(commit)) is not None), None)


def _read(commit: Path) -> Position | None:
    """The position, if the checkpoint is whole."""
    try:
        content = json.loads(commit.read_text())
        intact = content.pop("digest") == files.digest(content)
        if intact and files.sha256(commit.with_suffix(".safetensors")) == content.pop("sha256"):
            return Position(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _tensors_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def remove(folder: Path) -> None:
    """Delete the checkpoints of a finished run."""
    for path in folder.glob("step-*"):
        path.unlink()
    for path in folder.glob(".step-*.tmp-*"):
        path.unlink()
    if folder.exists():
        folder.rmdir()


def snapshot(
    model: nn.Module, optimizer: AnyOptimizer, devices: Devices = ALONE, *, copy: bool = False
) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, on the host; empty in all processes but the first, which must take part all the same.

    With `copy` nothing of it changes when training goes on.
    """
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        gathered = whole(tensor.detach())
        if not devices.is_leader:
            return
        if gathered.device.type == "cuda":  # into pinned memory, which PyTorch keeps for the next checkpoint
            pinned = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            kept[name] = pinned.copy_(gathered, non_blocking=True)
        else:
            kept[name] = gathered.clone().contiguous() if copy else gathered.contiguous()

    keep("rng.cpu", torch.get_rng_state())
    if torch.cuda.is_available():
        keep("rng.cuda", torch.cuda.get_rng_state())
    for name, parameter in model.named_parameters():
        keep(f"model.{name}", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            keep(f"optimizer.{key}.{name}", value)
    if any(parameter.device.type == "cuda" for parameter in model.parameters()):
        torch.cuda.synchronize()
    return kept


@torch.no_grad()
def _restore(tensors: dict[str, torch.Tensor], model: nn.Module, optimizer: AnyOptimizer) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    for name, parameter in model.named_parameters():
        parameter.copy_(sharded_like(tensors[f"model.{name}"], parameter))
        for key in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"):
            # A fresh clone: `step` must not share memory between parameters, and fused AdamW wants it on the device.
            value = tensors.get(f"optimizer.{key}.{name}")
            if value is not None:
                optimizer.state[parameter][key] = sharded_like(value, parameter).clone()
