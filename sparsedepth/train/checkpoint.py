"""Checkpoints: safetensors for tensors and JSON for the position; complete or absent, no pickle.

`step-N.safetensors` (weights, optimizer moments, RNG state) is written first, `step-N.json`
(position, curves, checksums) last: the JSON commits it. The two newest are kept; a damaged one is
skipped for the one before. The leader writes the full tensors: a checkpoint does not depend on the
number of processes."""

import errno
import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from sparsedepth import files
from sparsedepth.quantities.quantity import Named
from sparsedepth.train.checkpoint_files import checkpoint_files
from sparsedepth.train.devices import ALONE, Devices, full_tensor, sharded_like
from sparsedepth.train.optimizer import AnyOptimizer

N_KEPT = 2
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Position:
    """The state of a run other than tensors."""

    step: int
    """optimiser steps done"""
    curves: list[Named]
    observations: list[Named]
    seconds: float = 0.0
    """of training so far, in all its processes"""
    precision: str | None = None
    """of its steps, fp32 or bf16; None in checkpoints from before 2026-11-26"""
    data_hash: str | None = None
    """of the text or task that its steps read; None in checkpoints from before 2026-11-28"""


def commit(folder: Path, tensors: Tensors, position: Position, *, keep_all: bool = False) -> None:
    """Write the tensors of `snapshot` and the position, in the leader. With `keep_all`, in a folder
    to which several processes write, older checkpoints stay."""
    folder.mkdir(parents=True, exist_ok=True)
    tensor_file = _tensor_file(folder, position.step)
    content = {**vars(position), "sha256": write_tensors(tensor_file, tensors)}
    files.write_json(tensor_file.with_suffix(".json"), {**content, "digest": files.digest(content)})
    if keep_all:
        return
    kept = {newest.stem for newest in sorted(folder.glob("step-*.json"))[-N_KEPT:]}
    for path in checkpoint_files(folder):
        if path.stem not in kept:
            path.unlink(missing_ok=True)


def read(
    folder: Path, model: nn.Module, optimizer: AnyOptimizer, devices: Devices = ALONE, after: int = 0, upto: int = 10**9
) -> Position | None:
    """Load the newest valid checkpoint of more than `after` and at most `upto` steps into model and
    optimizer; None if there is none. Raises ValueError in a process that cannot read it."""
    commits = sorted(folder.glob("step-*.json"), reverse=True) if devices.is_leader else []
    commits = [commit for commit in commits if after < int(commit.stem.removeprefix("step-")) <= upto]
    position = next(filter(None, map(_read, commits)), None)
    step = devices.broadcast_from_leader(position.step if position else -1)
    if step < 0:
        return None
    tensor_file = _tensor_file(folder, step)
    position = position or _read(tensor_file.with_suffix(".json"))
    if position is None:
        raise ValueError(f"{tensor_file} cannot be read in every process; keep the results on shared storage")
    _restore(load_file(tensor_file), model, optimizer)
    return position


def write_tensors(path: Path, tensors: Tensors) -> str:
    """Write the tensors atomically and durably; returns the file's SHA-256. Raises OSError."""
    with files.atomic_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        with errors_of_system():
            save_file(tensors, temporary)
        temporary.chmod(mode)  # `save_file` makes it private, but results are shared
        return files.sha256(temporary)


@contextmanager
def errors_of_system() -> Generator[None]:
    """Errors of safetensors while writing, such as a full disk, as the OSError that caused them."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error).partition(" (os error")[0]) from None


def _read(commit: Path) -> Position | None:
    """The position, if the checkpoint is complete and undamaged."""
    try:
        content = json.loads(commit.read_text())
        intact = content.pop("digest") == files.digest(content)
        if intact and files.sha256(commit.with_suffix(".safetensors")) == content.pop("sha256"):
            return Position(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _tensor_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def snapshot(model: nn.Module, optimizer: AnyOptimizer, devices: Devices = ALONE, *, copy: bool = False) -> Tensors:
    """The tensors of a checkpoint, on the host; every process must call this, and the leader gets
    them. With `copy` they do not change when training continues."""
    tensors: Tensors = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        gathered = full_tensor(tensor.detach())
        if not devices.is_leader:
            return
        if gathered.device.type == "cuda":  # into pinned memory, which PyTorch reuses for the next checkpoint
            pinned = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            tensors[name] = pinned.copy_(gathered, non_blocking=True)
        else:
            tensors[name] = gathered.to("cpu", copy=copy).contiguous()

    device = _device_of(model)
    keep("rng.cpu", torch.get_rng_state())
    if device.type == "cuda":  # the state of another run's GPU would cost this one a CUDA context
        keep("rng.cuda", torch.cuda.get_rng_state(device))
    for name, parameter in model.named_parameters():
        keep(f"model.{name}", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            keep(f"optimizer.{key}.{name}", value)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tensors


def _device_of(model: nn.Module) -> torch.device:
    """Not the current device, which is the first of several unless a process group sets it."""
    return next(model.parameters()).device


@torch.no_grad()
def _restore(tensors: Tensors, model: nn.Module, optimizer: AnyOptimizer) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and (device := _device_of(model)).type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    for name, parameter in model.named_parameters():
        parameter.copy_(sharded_like(tensors[f"model.{name}"], parameter))
        for key in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"):
            # A clone: `step` must not share memory between parameters.
            value = tensors.get(f"optimizer.{key}.{name}")
            if value is not None:
                optimizer.state[parameter][key] = sharded_like(value, parameter).clone()
