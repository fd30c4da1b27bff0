"""Where and how a run is computed: device, precision and kernels. They are no part of its `run_id`,
but recorded in its manifest, because kernels round differently."""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from sparsedepth.config.role import refuse_undeclared, undeclared
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import DEFAULT, Parallel, RuntimeConfig
from sparsedepth.model import kernels
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.init import generator
from sparsedepth.train import cuda_graph


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where a run is computed, with every `auto` resolved."""

    device: torch.device
    precision: Literal["fp32", "bf16"]
    threads: int
    kernels: dict[str, str] = field(default_factory=dict)
    """the arguments of `Decoder.use_kernels`"""
    kernel_reasons: dict[str, str] = field(default_factory=dict)
    parallel: Parallel = "none"
    micro_batch: int | None = None
    compile: bool = False
    cuda_graph: bool = False
    checkpoint_seconds: float = 30.0
    saves_in_background: bool = False
    """whether a thread writes checkpoints meanwhile: on GPUs, where the host is idle"""

    @property
    def autocast(self) -> torch.autocast:
        """The context of every forward pass: bf16 matrix products, or nothing."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")


def find_device(device: str) -> torch.device:
    """The device of that name; 'auto' is a GPU if there is one. Raises ValueError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", device):
        raise ValueError(f"device={device!r} is not supported; use auto, cpu, cuda, cuda:0 or mps")
    chosen = torch.device(device)
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={device!r} does not exist here: torch finds no GPU of Apple's; use cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r} does not exist here: {torch.cuda.device_count()} CUDA devices; use cpu")
    return chosen


def measuring_device(device: torch.device) -> torch.device:
    """Where a model trained on `device` is measured: on the CPU for Apple's, which has no fp64."""
    return torch.device("cpu") if device.type == "mps" else device


def resolve(config: RunConfig, runtime: RuntimeConfig = DEFAULT) -> Runtime:
    """Resolve every 'auto'. Raises ValueError for what is not possible here."""
    device = find_device(runtime.device)
    if runtime.threads is not None and runtime.threads > (os.cpu_count() or 1):
        raise ValueError(f"threads={runtime.threads} must lie between 1 and {os.cpu_count()}")
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if runtime.stream == "bf16" and (precision != "bf16" or config.stream_width > config.d_model):
        raise ValueError(
            "stream=bf16 needs precision=bf16, one stream (n_streams=1) and no attention_residuals; use stream=fp32"
        )
    setting = kernels.facts_of(config, device, torch.bfloat16 if precision == "bf16" else torch.float32)
    choices = {
        "attention": kernels.choose("attention", runtime.attention_kernel, setting),
        "experts": kernels.choose("experts", runtime.experts_kernel if config.n_experts else "auto", setting),
    }
    chosen = {part: choice.kernel for part, choice in choices.items()} | {"stream": runtime.stream}
    reasons = {part: choice.reason for part, choice in choices.items()}
    if runtime.compile is True:
        refuse_undeclared(config, "compile=true")
    obstacle = None
    if runtime.cuda_graph:
        obstacle = cuda_graph.obstacle(config, device, runtime.parallel, chosen["attention"], chosen["experts"])
        reasons["cuda_graph"] = obstacle or "the steps can be captured"
    if obstacle and runtime.cuda_graph is True:
        raise ValueError(f"cuda_graph=true is not possible: {obstacle}; use auto or false")
    return Runtime(
        device=device,
        precision=precision,
        threads=runtime.threads or torch.get_num_threads(),
        kernels=chosen,
        kernel_reasons=reasons,
        parallel=runtime.parallel,
        micro_batch=runtime.micro_batch,
        compile=runtime.compiles(config.n_steps, device.type == "cuda") and not undeclared(config),
        cuda_graph=bool(runtime.cuda_graph) and obstacle is None,
        checkpoint_seconds=runtime.checkpoint_seconds,
        saves_in_background=device.type == "cuda",
    )


def compile_blocks(model: Decoder) -> None:
    """Compile each block, and the loss between its products; blocks of one kind share their code.
    For static shapes: symbolic ones, the default of a second shape in a process, are slower."""
    for block in model.blocks:
        block.compile(dynamic=False)
    model.head.compile_loss()


def choose_attention_backends(config: RunConfig) -> None:
    """Disable cuDNN attention with a mask, whose backward pass can give NaN (pytorch issue 196678).
    For the whole process: a context manager cannot be part of a compiled graph."""
    is_masked = config.sliding_window is not None or config.mask_documents
    torch.backends.cuda.enable_cudnn_sdp(not is_masked)


@contextmanager
def dropout_masks(config: RunConfig, step: int, rank: int, device: torch.device) -> Generator[None]:
    """Context in which dropout is a function of seed, step and process, so that a resumed run drops
    the same entries; other kernels, devices or micro-batches drop others."""
    if not config.drops:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(generator(config.seed, f"dropout:{step}:{rank}").initial_seed())
        yield


SHORTAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Of a GPU library that could not allocate its workspace."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in SHORTAGES)


def device_memory(device: torch.device) -> int | None:
    """The bytes of a GPU; None elsewhere, where other programs share the memory."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


OTHER_PROCESSES_SHARE = 0.1
"""Share of a GPU's memory from which other processes may be the cause of a shortage."""


def other_processes_bytes(device: torch.device) -> int:
    """GPU memory held by other processes; 0 on a CPU, where the kernel kills without an error."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device)
    return held if held > OTHER_PROCESSES_SHARE * total else 0
