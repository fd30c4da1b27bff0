"""Where and how fast a run is computed: everything that may change between two machines that compute the same run.

None of it is part of `run_id`; what was used is recorded in the run's manifest, because kernels change rounding.
"""

import contextlib
import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import DEFAULT, Parallel, RuntimeConfig
from sparsedepth.model import kernels
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.init import generator
from sparsedepth.train import cuda_graph


@dataclass(frozen=True, kw_only=True)
class Runtime:
    device: torch.device
    precision: Literal["fp32", "bf16"]
    threads: int
    attention_kernel: str = "sdpa"
    experts_kernel: str = "grouped"
    products_kernel: str = "blas"
    kernel_reasons: dict[str, str] = field(default_factory=dict)
    """Why each of them was chosen: what stood against the others."""
    parallel: Parallel = "none"
    micro_batch: int | None = None
    compile: bool = False
    cuda_graph: bool = False
    checkpoint_seconds: float = 30.0
    saves_aside: bool = False
    """Whether a thread writes checkpoints while training goes on: where a device computes, and the host has time."""

    @property
    def chosen_kernels(self) -> dict[str, str]:
        """What computes each part: the arguments of `Decoder.use_kernels`."""
        chosen = {"attention": self.attention_kernel, "experts": self.experts_kernel}
        return {**chosen, "products": self.products_kernel}

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


def resolve(config: RunConfig, wanted: RuntimeConfig = DEFAULT) -> Runtime:
    """What 'auto' means here. Raises ValueError for a device, kernel or number of threads that is not there, and for a
    CUDA graph of steps that cannot be one."""
    chosen = find_device(wanted.device)
    if wanted.threads is not None and wanted.threads > (os.cpu_count() or 1):
        raise ValueError(f"threads={wanted.threads} must lie between 1 and {os.cpu_count()}")
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if chosen.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    products = torch.bfloat16 if precision == "bf16" else torch.float32
    here = kernels.setting(config, chosen, products)
    attention = kernels.choose("attention", wanted.attention_kernel, here)
    experts = kernels.choose("experts", wanted.experts_kernel if config.n_experts else "auto", here)
    matrices = kernels.choose("products", wanted.products_kernel, here)
    reasons = {"attention": attention.reason, "experts": experts.reason, "products": matrices.reason}
    obstacle = None
    if wanted.cuda_graph:
        obstacle = cuda_graph.obstacle(config, chosen, wanted.parallel, attention.kernel, experts.kernel)
        reasons["cuda_graph"] = obstacle or "nothing stands against it"
    if obstacle and wanted.cuda_graph is True:
        raise ValueError(f"cuda_graph=true cannot be: {obstacle}; use auto, which then goes without, or false")
    return Runtime(
        device=chosen,
        precision=precision,
        threads=wanted.threads or torch.get_num_threads(),
        attention_kernel=attention.kernel,
        experts_kernel=experts.kernel,
        products_kernel=matrices.kernel,
        kernel_reasons=reasons,
        parallel=wanted.parallel,
        micro_batch=wanted.micro_batch,
        compile=wanted.compiles(config.n_steps, chosen.type == "cuda"),
        cuda_graph=bool(wanted.cuda_graph) and obstacle is None,
        checkpoint_seconds=wanted.checkpoint_seconds,
        saves_aside=chosen.type == "cuda",
    )


def compile_blocks(model: Decoder) -> None:
    """Compile each block for the shapes that it meets; blocks of one kind share their code.

    Never with symbolic sizes, which a second shape in one process would get: they are slower.
    """
    for block in model.blocks:
        block.compile(dynamic=False)


def choose_attention_backends(config: RunConfig) -> None:
    """Keep PyTorch's attention from cuDNN under a mask, where its backward pass can give NaN (pytorch issue 196678),
    which would be recorded as divergence. For the whole process: a context is no part of a compiled graph."""
    is_masked = config.sliding_window is not None or config.mask_documents
    torch.backends.cuda.enable_cudnn_sdp(not is_masked)


def dropout_masks(config: RunConfig, step: int, rank: int, device: torch.device) -> AbstractContextManager[None]:
    """While it is open, what is dropped is a function of the seed, the step and the process: a run that resumes drops
    what it would have dropped. Another kernel, device or micro-batch drops other entries, as it rounds otherwise."""
    return _random(config.seed, f"dropout:{step}:{rank}", device) if config.drops else contextlib.nullcontext()


@contextmanager
def _random(seed: int, name: str, device: torch.device) -> Generator[None]:
    """PyTorch's own random numbers are those of a name, and go on after it as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(generator(seed, name).initial_seed())
        yield


SHORTAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors say that are no OutOfMemoryError: a library of the GPU could not get its workspace."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in SHORTAGES)


NEIGHBOURS_SHARE = 0.1
"""of a GPU's memory, from which another process on it may be why there is too little."""


def neighbours_bytes(device: torch.device) -> int:
    """Memory of a GPU that other processes hold; 0 on a CPU, where the kernel kills and does not say."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device)
    return held if held > NEIGHBOURS_SHARE * total else 0
