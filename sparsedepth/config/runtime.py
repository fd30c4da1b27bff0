"""RuntimeConfig: what may change between two machines that compute the same run, and is no part of its `run_id`.

It goes to every process of a sweep as JSON. What 'auto' came to is recorded in the run's manifest, since kernels and
the number of devices change rounding.
"""

from typing import Literal

from sparsedepth.config.run import Count, Positive, Section

AttentionKernel = Literal["sdpa", "flash", "reference"]
ExpertsKernel = Literal["loop", "grouped", "megablocks"]
ProductsKernel = Literal["blas", "onednn"]
Parallel = Literal["none", "ddp", "fsdp"]

COMPILED_STEPS = 1000
"""Steps from which `compile: auto` compiles on a GPU: it takes tens of seconds, and saves some ten milliseconds of
most steps there, where bf16 runs unfused without it. Expected, not yet measured."""

LOGITS_BYTES = 2**28
"""What the fp32 logits of one piece of a batch may take (`model.head`); their copies, in autocast's dtype and for
the softmax, are on top."""

MAX_TOKENS = 8192
"""Tokens per pass of a measure (forks x sequences x length) unless told otherwise. A pass keeps the L + 1 recorded
states of its sequences and about three copies of the forks' own: 4 (L + 4) MAX_TOKENS D bytes at most."""

CPU_TOKENS, CPU_NUMBERS = 1024, 2**17
"""Tokens per such pass that a CPU is given at most, or where that is more, numbers of the stream: with more, what a
block makes leaves the cache; with fewer, calls are the work. Measured: at width 256 8192 tokens in one pass take 1.3
times as long as in eight; at width 32 4096 take 0.85 of the time of four times 1024, with 8 experts 0.75."""


class RuntimeConfig(Section):
    """The device, processes and kernels of a run, which do not change what it is (`run_id`)."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:0"""
    threads: Count | None = None
    """CPU threads; default all"""
    compile: bool | Literal["auto"] = "auto"
    """compile each block with torch.compile; auto: on a GPU, in runs of 1,000 steps and more"""
    cuda_graph: bool | Literal["auto"] = False
    """take each training step as one CUDA graph; auto: where it can be one. Off until a GPU has shown what it saves"""
    attention_kernel: AttentionKernel | Literal["auto"] = "auto"
    """what computes attention; auto: PyTorch's; under a mask (window, documents) flash-attn if it can"""
    experts_kernel: ExpertsKernel | Literal["auto"] = "auto"
    """what multiplies tokens and experts; auto: grouped if it can"""
    products_kernel: ProductsKernel | Literal["auto"] = "auto"
    """what multiplies a step's matrices; auto: onednn on an AMD CPU with AVX-512, else blas"""
    parallel: Parallel = "none"
    """one model on several devices, under torchrun: ddp copies it, fsdp shards it"""
    micro_batch: Count | None = None
    """sequences of one forward pass on one device; default the device's share of the batch"""
    stack: Count | Literal["auto"] = "auto"
    """runs of one shape that a process of a sweep trains as one model, at most; auto: where it pays"""
    checkpoint_seconds: Positive = 30.0
    """time between two checkpoints; longer where they would hold up training for more than 5% of the time"""

    def compiles(self, n_steps: int, on_gpu: bool) -> bool:
        """Whether a run of so many steps is compiled."""
        return on_gpu and n_steps >= COMPILED_STEPS if self.compile == "auto" else self.compile


DEFAULT = RuntimeConfig()
