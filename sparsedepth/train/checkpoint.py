"""Checkpoints that are whole or absent: safetensors for tensors, JSON for the position, no pickle.

`step-N.safetensors` (weights, AdamW moments, RNG) is written first, `step-N.json` (position, curves, checksum) last:
the JSON is the commit. The two newest are kept; a damaged one is passed over for the one before it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from sparsedepth import files

KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands: everything but tensors."""

    step: int
    """optimiser steps done"""
    curves: list[dict[str, Any]]
    observations: list[dict[str, Any]]


def write(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> None:
    """Commit a checkpoint to `folder`, then drop all but the newest two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = folder / f"step-{position.step:09d}.safetensors"
    files.write_bytes(tensors, save(_tensors(model, optimizer)))
    files.write_json(
        tensors.with_suffix(".json"),
        {
            "step": position.step,
            "curves": position.curves,
            "observations": position.observations,
            "sha256": files.sha256(tensors),
        },
    )
    for old in sorted(folder.glob("step-*.json"))[:-KEPT]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def read(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position | None:
    """Load the newest whole checkpoint into model and optimizer; None if there is none."""
    for commit in sorted(folder.glob("step-*.json"), reverse=True):
        tensors = commit.with_suffix(".safetensors")
        try:
            content = json.loads(commit.read_text())
            whole = files.sha256(tensors) == content["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if whole:
            _restore(load_file(tensors), model, optimizer)
            return Position(step=content["step"], curves=content["curves"], observations=content["observations"])
    return None


def remove(folder: Path) -> None:
    """Delete the checkpoints of a finished run."""
    for path in folder.glob("step-*"):
        path.unlink()
    for path in folder.glob(".step-*.tmp-*"):
        path.unlink()
    if folder.exists():
        folder.rmdir()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    kept = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        kept["rng.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in model.named_parameters():
        kept[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            kept[f"adamw.{key}.{name}"] = value
    return {name: tensor.cpu().contiguous() for name, tensor in kept.items()}


@torch.no_grad()
def _restore(tensors: dict[str, torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[f"model.{name}"])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            # A fresh clone: `step` must not share memory between parameters, and fused AdamW wants it on the device.
            value = tensors.get(f"adamw.{key}.{name}")
            if value is not None:
                optimizer.state[parameter][key] = value.to(parameter.device).clone()
