"""RuntimeConfig: device, processes and kernels, which may differ between machines and are no part of a run's `run_id`.

The values chosen for 'auto' are recorded in the run's manifest, since kernels and devices affect rounding."""

from typing import Annotated, Literal

from sparsedepth.config.role import ROUNDS, changed, undeclared
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Count, Positive, Section, check
from sparsedepth.words.plain_text import commas

Parallel = Literal["none", "ddp", "fsdp"]

COMPILED_STEPS = 500
"""Steps from which `compile: auto` compiles on a GPU. On an H200 it took 5 to 8 s and saved 32 to 90 ms a step: it pays
after 100 to 170 steps, later where several processes compile at once."""

LOGITS_BYTES, LOGITS_SHARE = 2**28, 1 / 256
"""Limit of the fp32 logits of one part of a batch (`model.head`), without the copies for autocast and softmax; and the
share of a card's memory that they may take, if that is more: with fewer parts the head's gradient moves less often."""

MAX_TOKENS = 8192
"""Tokens per pass of a measure (forks x sequences x length). A pass keeps the L + 1 recorded states of
its sequences and about three copies of the forks' states: at most 4 (L + 4) MAX_TOKENS D bytes."""

CPU_PASS_TOKENS = 1024
"""Limit of the tokens of such a pass on a CPU, or as many as have CPU_PASS_VALUES, if that is more."""

CPU_PASS_VALUES = 2**17
"""Values of the stream in such a pass. With more, a block's output leaves the cache; with fewer, call overhead
dominates. Measured: at width 256, 8192 tokens in one pass take 1.3 times as long as in eight; at width 32, 4096 take
0.85 of the time of four times 1024, with 8 experts 0.75."""


class RuntimeConfig(Section):
    """The device, processes and kernels of a run."""

    device: Annotated[str, ROUNDS] = "auto"
    """auto, cpu, cuda, cuda:0, or mps (Apple's GPU, untested); auto: CUDA's first GPU if there is one, else the CPU"""
    threads: Annotated[Count | None, ROUNDS] = None
    """CPU threads; default all"""
    compile: Annotated[bool | Literal["auto"], ROUNDS] = "auto"
    """compile each block with torch.compile; auto: on a GPU, in runs of 500 steps and more"""
    cuda_graph: Annotated[bool | Literal["auto"], ROUNDS] = False
    """take each training step (of a run, of a stack) as one CUDA graph; auto: where it can be one. Off until a whole
    study has run with it"""
    attention_kernel: Annotated[Literal["sdpa", "flash", "reference", "auto"], ROUNDS] = "auto"
    """what computes attention; auto: PyTorch's; under a mask (window, documents) flash-attn if it can"""
    experts_kernel: Annotated[Literal["loop", "grouped", "megablocks", "auto"], ROUNDS] = "auto"
    """what multiplies tokens and experts; auto: grouped if it can"""
    parallel: Annotated[Parallel, ROUNDS.acting("rounding", "step")] = "none"
    """one model on several devices, under torchrun: ddp copies it, fsdp shards it"""
    micro_batch: Annotated[Count | None, ROUNDS] = None
    """sequences of one forward pass on one device; default the device's share of the batch"""
    stream: Annotated[Literal["fp32", "bf16"], ROUNDS] = "fp32"
    """the residual stream and its gradient while training with precision bf16: in bf16 a block moves a quarter less
    memory outside of products; not for studies of variance"""
    stack: Annotated[Count | Literal["auto"], ROUNDS] = "auto"
    """runs of one shape that a process of a sweep trains as one model, at most; auto: where it pays"""
    checkpoint_seconds: Annotated[Positive, ROUNDS.acting()] = 30.0
    """time between two checkpoints; longer where they would hold up training for more than 5% of the time"""

    @check
    def _check_stack(self) -> None:
        if self.stack not in ("auto", 1) and not self.can_stack:
            raise ValueError(f"stack={self.stack}: with parallel a process trains one run; leave one out")

    @property
    def can_stack(self) -> bool:
        """Whether nothing that was asked for is about the steps of one run."""
        return not any(role.touches("step") for role in changed(self).values())

    def compiles(self, n_steps: int, on_gpu: bool) -> bool:
        """Whether a run of so many steps is compiled."""
        return on_gpu and n_steps >= COMPILED_STEPS if self.compile == "auto" else self.compile


def graph_obstacle(config: RunConfig, device: str, parallel: Parallel) -> str | None:
    """Why no step can be captured as a CUDA graph, by what is known before a run; None if nothing is."""
    if device != "cuda":
        return f"it needs a CUDA device, not {device}"
    if parallel != "none":
        return f"parallel={parallel} exchanges gradients between processes"
    if unknown := undeclared(config):
        return f"{commas(sorted(unknown))} does not declare where it acts"
    return None if config.optimizer == "adamw" else f"optimizer={config.optimizer} reads the learning rate on the host"


DEFAULT = RuntimeConfig()
