"""RuntimeConfig: what may change between two machines that compute the same run, and is no part of its `run_id`.

It goes to every process of a sweep as JSON. What 'auto' came to is recorded in the run's manifest, since kernels and
the number of devices change rounding.
"""

from typing import Annotated, Literal

from pydantic import Field

from sparsedepth.config.run import Count, Positive, Section

AttentionKernel = Literal["sdpa", "flash", "reference"]
ExpertsKernel = Literal["loop", "grouped", "megablocks"]
Parallel = Literal["none", "ddp", "fsdp"]

LOGITS_BYTES = 2**28
"""What the fp32 logits of one piece of a batch may take (`model.head`); their copy in autocast's dtype is on top."""


class RuntimeConfig(Section):
    """Where and how fast a run is computed."""

    device: Annotated[str, Field(description="auto, cpu, cuda or cuda:0")] = "auto"
    threads: Annotated[Count | None, Field(description="CPU threads; default all")] = None
    compile: Annotated[bool, Field(description="compile each block with torch.compile")] = False
    attention_kernel: Annotated[
        AttentionKernel | Literal["auto"], Field(description="what computes attention; auto: flash-attn if it can")
    ] = "auto"
    experts_kernel: Annotated[
        ExpertsKernel | Literal["auto"],
        Field(description="what multiplies tokens and experts; auto: grouped if it can"),
    ] = "auto"
    parallel: Annotated[
        Parallel, Field(description="one model on several devices, under torchrun: ddp copies it, fsdp shards it")
    ] = "none"
    micro_batch: Annotated[
        Count | None,
        Field(description="sequences of one forward pass on one device; default the device's share of the batch"),
    ] = None
    checkpoint_seconds: Annotated[Positive, Field(description="time between two checkpoints")] = 30.0


DEFAULT = RuntimeConfig()
