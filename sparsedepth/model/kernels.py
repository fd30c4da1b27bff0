"""The choice of kernels for attention and experts: what can run here, why not another, and the fix.

'auto' takes the first that can run. Attention: flash-attn with a mask (window, documents), which
PyTorch's fast kernels do not support, else PyTorch's (cuDNN on Hopper, faster than flash-attn 2).
Experts: PyTorch's grouped product, then the loop; megablocks, whose products are PyTorch's grouped
ones, by name only. The choice is recorded with the run, since kernels round differently."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import attention, moe_kernels
from sparsedepth.words.plain_text import error_text

Part = Literal["attention", "experts"]

SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FLASH_WIDTH = 256
"""The widest head of flash-attn 2."""
FLASH = "'flash-attn>=2.8.3'"
INSTALL_FLASH = f"pip install setuptools wheel packaging ninja psutil && pip install --no-build-isolation {FLASH}"
REBUILD_FLASH = f"pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation {FLASH}"
INSTALL_MEGABLOCKS = (
    "pip install setuptools wheel packaging && "
    "pip install --no-deps --no-build-isolation megablocks==0.10.0 stanford-stk==0.7.1"
)
"""Without dependencies: it pins a torch version."""


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """The facts that decide whether a kernel can run."""

    device: torch.device
    dtype: torch.dtype
    """of the matrix products: autocast's, or the weights'"""
    d_head: int = 64
    d_model: int = 64
    d_expert: int = 64
    is_masked: bool = True
    """by a window or documents"""
    may_wait: bool = False
    """whether the host may wait for the device: in measures, not in a training step"""


class Obstacle(NamedTuple):
    reason: str
    fix: str


class Choice(NamedTuple):
    kernel: str
    reason: str


def facts_of(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: bool) -> KernelFacts:
    """The facts of a decoder."""
    return KernelFacts(
        device=device,
        dtype=dtype,
        d_head=config.d_head,
        d_model=config.d_model,
        d_expert=config.d_expert or KernelFacts.d_expert,
        is_masked=config.sliding_window is not None or config.mask_documents,
        **more,
    )


def choose(part: Part, requested: str, facts: KernelFacts) -> Choice:
    """The kernel to use and why. Raises ValueError, with the fix, for one requested by name that
    cannot run."""
    if requested != "auto":
        obstacle = OBSTACLES[part][requested](facts)
        if obstacle:
            raise ValueError(f"{part}_kernel={requested!r} cannot run: {obstacle.reason}; {obstacle.fix}, or use auto")
        return Choice(requested, "asked for by name")
    rejected = []
    for kernel, obstacle_of in OBSTACLES[part].items():
        obstacle = obstacle_of(facts)
        reason = obstacle.reason if obstacle else None
        if reason is None and kernel == "flash" and not facts.is_masked:
            reason = "without a window or documents PyTorch's own attention is as fast or faster"
        if reason is None:
            return Choice(kernel, "; ".join(rejected) or "the first choice")
        rejected.append(f"{kernel} is not used: {reason}")
    raise AssertionError(f"one kernel for {part} can always run")


def _flash(facts: KernelFacts) -> Obstacle | None:
    """Why flash-attn cannot compute it here; None if it can."""
    if facts.device.type != "cuda":
        return Obstacle(f"flash-attn needs a CUDA device, not {facts.device.type}", "run on a GPU")
    if torch.cuda.get_device_capability(facts.device) < (8, 0):
        return Obstacle("flash-attn needs an Ampere GPU or newer", "run on a newer GPU")
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return Obstacle(
            f"flash-attn computes in bf16 or fp16, not in {SHORT.get(facts.dtype, facts.dtype)}", "set precision=bf16"
        )
    if facts.d_head > FLASH_WIDTH:
        reason = f"flash-attn takes heads up to {FLASH_WIDTH} wide, and d_model / n_heads is {facts.d_head}"
        return Obstacle(reason, "raise n_heads")
    return _absent("flash_attn", "flash-attn", attention.load_flash, INSTALL_FLASH, REBUILD_FLASH)


def _grouped(facts: KernelFacts) -> Obstacle | None:
    """Why the grouped product cannot compute it here; None if it can."""
    if facts.device.type == "cuda" and facts.dtype != torch.bfloat16 and not facts.may_wait:
        dtype = SHORT.get(facts.dtype, facts.dtype)
        reason = f"PyTorch's grouped product computes without waits in bf16 on CUDA, not in {dtype}"
        return Obstacle(reason, "set precision=bf16")
    if facts.device.type == "mps":
        return Obstacle("PyTorch's grouped product has not been tried on Apple's GPUs", "run on a CPU or a GPU by CUDA")
    multiple = 16 // facts.dtype.itemsize
    misaligned = [f"{name}={size}" for name in ("d_model", "d_expert") if (size := getattr(facts, name)) % multiple]
    if misaligned:
        reason = f"PyTorch's grouped product needs rows of a multiple of 16 bytes, unlike {' and '.join(misaligned)}"
        return Obstacle(reason, f"choose multiples of {multiple}")
    return None


def _megablocks(facts: KernelFacts) -> Obstacle | None:
    if facts.device.type != "cuda":
        return Obstacle(f"megablocks' kernels need a CUDA device, not {facts.device.type}", "run on a GPU")
    obstacle = _grouped(facts)  # the products are the same
    if obstacle:
        return obstacle
    if importlib.util.find_spec("triton") is None:
        return Obstacle("triton is not installed", "pip install triton")
    return _absent("megablocks", "megablocks", moe_kernels.load_megablocks, INSTALL_MEGABLOCKS, INSTALL_MEGABLOCKS)


def _absent(module: str, name: str, load: Callable[[], object], install: str, rebuild: str) -> Obstacle | None:
    try:
        if importlib.util.find_spec(module) is None:
            return Obstacle(f"{name} is not installed", install)
        load()
    except Exception as error:  # a build for another torch fails in many ways: missing symbols, libraries, names
        return Obstacle(f"{name} does not load: {error_text(error)}", rebuild)
    return None


def _runs_everywhere(facts: KernelFacts) -> None:
    return None


OBSTACLES: dict[Part, dict[str, Callable[[KernelFacts], Obstacle | None]]] = {
    "attention": {"flash": _flash, "sdpa": _runs_everywhere, "reference": _runs_everywhere},
    "experts": {"grouped": _grouped, "loop": _runs_everywhere, "megablocks": _megablocks},
}
"""For each kernel the obstacle to running it, or None; 'auto' tries them in order."""
