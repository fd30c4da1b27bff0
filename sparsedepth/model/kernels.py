"""Which kernel computes attention and the experts here, why not another, and what would fix that.

'auto' takes the first that can run: flash-attn under a mask (window, documents), which PyTorch's fast kernels do not
take, else PyTorch's attention (cuDNN's on Hopper, faster than flash-attn 2); PyTorch's grouped product, then the loop;
oneDNN's products where MKL leaves the processor's AVX-512 unused, else PyTorch's.
A kernel asked for by name that cannot run is refused before anything is computed. What was chosen is recorded with the
run, since kernels round differently.
"""

import importlib.util
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import flash, megablocks

Part = Literal["attention", "experts", "products"]

FLASH_WIDTH = 256
"""The widest head of flash-attn 2."""
FLASH = "'flash-attn>=2.8.3'"
INSTALL_FLASH = f"pip install setuptools wheel packaging ninja psutil && pip install --no-build-isolation {FLASH}"
REBUILD_FLASH = f"pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation {FLASH}"
INSTALL_MEGABLOCKS = (
    "pip install setuptools wheel packaging && "
    "pip install --no-deps --no-build-isolation megablocks==0.10.0 stanford-stk==0.7.1"
)
"""Without its dependencies: it pins a torch of its own, and would replace the one that is installed."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What decides whether a kernel can run."""

    device: torch.device
    dtype: torch.dtype
    """Of the matrix products: autocast's, or the weights'."""
    d_head: int = 64
    d_model: int = 64
    d_expert: int = 64
    is_masked: bool = True
    """whether attention has a window or documents"""


CPU_FACTS = Path("/proc/cpuinfo")


class Obstacle(NamedTuple):
    reason: str
    fix: str


UNMASKED = Obstacle("without a window or documents PyTorch's own attention is as fast or faster", "ask for it by name")


SLOWER = Obstacle("PyTorch's own products use all that this processor has", "ask for it by name")


class Choice(NamedTuple):
    kernel: str
    reason: str


def setting(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Setting:
    """The setting of one decoder."""
    d_expert = config.d_expert or Setting.d_expert
    d_head = config.d_model // config.n_heads
    is_masked = config.sliding_window is not None or config.mask_documents
    sizes = {"d_head": d_head, "d_model": config.d_model, "d_expert": d_expert}
    return Setting(device=device, dtype=dtype, is_masked=is_masked, **sizes)


def choose(part: Part, wanted: str, here: Setting) -> Choice:
    """The kernel to use and why. Raises ValueError for one asked for by name that cannot run, with what fixes it."""
    if wanted != "auto":
        obstacle = OBSTACLES[part][wanted](here)
        if obstacle:
            raise ValueError(f"{part}_kernel={wanted!r} cannot run: {obstacle.reason}; {obstacle.fix}, or use auto")
        return Choice(wanted, f"asked for by name{_note(wanted)}")
    passed: list[str] = []
    for kernel in AUTO[part]:
        obstacle = OBSTACLES[part][kernel](here) or _not_faster(kernel, here)
        if obstacle is None:
            return Choice(kernel, "; ".join(passed) or "the first choice, and it can run")
        passed.append(f"not {kernel}: {obstacle.reason}")
    raise AssertionError(f"the last choice for {part} can always run")


def _note(kernel: str) -> str:
    stands_in = kernel == "megablocks" and not megablocks.load().compiled
    return "; PyTorch stands in for megablocks' compiled functions" if stands_in else ""


def _not_faster(kernel: str, here: Setting) -> Obstacle | None:
    """Why 'auto' passes by a kernel that can run."""
    if kernel == "flash" and not here.is_masked:
        return UNMASKED
    return SLOWER if kernel == "onednn" and not mkl_leaves_avx512_unused() else None


def mkl_leaves_avx512_unused() -> bool:
    """Whether the processor has AVX-512 and is AMD's: PyTorch's MKL then multiplies with AVX2."""
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and CPU_FACTS.exists() and "AuthenticAMD" in CPU_FACTS.read_text()


def _onednn(here: Setting) -> Obstacle | None:
    if here.device.type != "cpu" or here.dtype != torch.float32:
        reason = f"oneDNN multiplies on a CPU in fp32 alone, not on {here.device.type} in {_short(here.dtype)}"
        return Obstacle(reason, "run on a CPU with precision=fp32")
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return Obstacle("this torch is built without oneDNN", "install a torch for x86-64")
    return None


def _nothing(here: Setting) -> None:
    """What runs everywhere."""


def _flash(here: Setting) -> Obstacle | None:
    if here.device.type != "cuda":
        return Obstacle(f"flash-attn needs a CUDA device, not {here.device.type}", "run on a GPU")
    if torch.cuda.get_device_capability(here.device) < (8, 0):
        return Obstacle("flash-attn needs an Ampere GPU or newer", "run on a newer GPU")
    if here.dtype not in (torch.bfloat16, torch.float16):
        return Obstacle(f"flash-attn computes in bf16 or fp16, not in {_short(here.dtype)}", "set precision=bf16")
    if here.d_head > FLASH_WIDTH:
        reason = f"flash-attn takes heads up to {FLASH_WIDTH} wide, and d_model / n_heads is {here.d_head}"
        return Obstacle(reason, "raise n_heads")
    return _absent("flash_attn", "flash-attn", flash.load, INSTALL_FLASH, REBUILD_FLASH)


def _grouped(here: Setting) -> Obstacle | None:
    if here.device.type == "cuda" and here.dtype != torch.bfloat16:
        reason = f"PyTorch's grouped product computes in bf16 on CUDA, not in {_short(here.dtype)}"
        return Obstacle(reason, "set precision=bf16")
    multiple = 16 // here.dtype.itemsize
    odd = [f"{name}={size}" for name in ("d_model", "d_expert") if (size := getattr(here, name)) % multiple]
    if odd:
        reason = f"PyTorch's grouped product takes rows of 16 bytes, and {' and '.join(odd)} gives others"
        return Obstacle(reason, f"choose multiples of {multiple}")
    return None


def _megablocks(here: Setting) -> Obstacle | None:
    if here.device.type != "cuda":
        return Obstacle(f"megablocks' kernels need a CUDA device, not {here.device.type}", "run on a GPU")
    obstacle = _grouped(here)  # the products are the same
    if obstacle:
        return obstacle
    if importlib.util.find_spec("triton") is None:
        return Obstacle("triton is not installed", "pip install triton")
    return _absent("megablocks", "megablocks", megablocks.load, INSTALL_MEGABLOCKS, INSTALL_MEGABLOCKS)


def _absent(module: str, name: str, load: Callable[[], object], install: str, rebuild: str) -> Obstacle | None:
    try:
        if importlib.util.find_spec(module) is None:
            return Obstacle(f"{name} is not installed", install)
        load()
    except Exception as error:  # a build for another torch fails in many ways: missing symbols, libraries, names
        shown = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        return Obstacle(f"{name} does not load: {shown}", rebuild)
    return None


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, str(dtype))


OBSTACLES: dict[Part, dict[str, Callable[[Setting], Obstacle | None]]] = {
    "attention": {"flash": _flash, "sdpa": _nothing, "reference": _nothing},
    "experts": {"grouped": _grouped, "megablocks": _megablocks, "loop": _nothing},
    "products": {"onednn": _onednn, "blas": _nothing},
}
"""For each kernel what keeps it from running, or None."""

AUTO: dict[Part, tuple[str, ...]] = {
    "attention": ("flash", "sdpa"),
    "experts": ("grouped", "loop"),
    "products": ("onednn", "blas"),
}
"""What 'auto' tries, in this order."""
