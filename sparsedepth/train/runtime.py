"""Where and how fast a run is computed: everything that may change between two machines that compute the same run.

None of it is part of `run_id`; what was used is recorded in the run's manifest, because kernels change rounding.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from sparsedepth.config.run import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Runtime:
    device: torch.device
    precision: Literal["fp32", "bf16"]
    threads: int
    compile: bool = False
    checkpoint_seconds: float = 30.0

    @property
    def autocast(self) -> torch.autocast:
        """The context of every forward pass: bf16 matrix products, or nothing."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")


def find_device(device: str) -> torch.device:
    """The device of that name; 'auto' is a GPU where there is one. Raises ValueError for one that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r} is not a device; use auto, cpu, cuda or cuda:0") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not supported; use auto, cpu, cuda or cuda:0")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r} does not exist here: {torch.cuda.device_count()} CUDA devices; use cpu")
    return chosen


def resolve(config: TrainConfig, device: str = "auto", threads: int | None = None, compiled: bool = False) -> Runtime:
    """The device and precision that 'auto' means here. Raises ValueError for a device that is not there."""
    chosen = find_device(device)
    if threads is not None and not 1 <= threads <= (os.cpu_count() or 1):
        raise ValueError(f"threads={threads} must lie between 1 and {os.cpu_count()}")
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if chosen.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return Runtime(device=chosen, precision=precision, threads=threads or torch.get_num_threads(), compile=compiled)
