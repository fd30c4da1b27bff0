"""A model of the peak memory of a run on one device.

    peak = 12 P + max(L A + head, 4 P + A)       P parameters: weights, two AdamW moments; gradients; L blocks
    A    = N (8 D + s ((4 + 3 c) D + 2 K + (3 + c) F))      activations saved by a block of N tokens

s: bytes per number; D: d_model; K: channels of the keys; F: active width of the feed-forward part. Saved are the norms'
inputs in fp32; q, k, v, attention's output, input and output of the projections; three tensors as wide as F. c = 1
under autocast without a compiler, which keeps the cast inputs, too. Attention saves no T x T (2205.14135).

A GPU adds one CUDA context per process. On an H200 the model is within 8% of the peaks of five runs (19M to 1.2B, one
with experts). What gates, further norms and dropout add is not modelled: measured peaks correct it (`plan.price`).
"""

from dataclasses import dataclass
from typing import Literal

from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import LOGITS_BYTES, Parallel, RuntimeConfig

CONTEXT_BYTES = {"cpu": 0, "cuda": 600_000_000}
"""Of each process, beside what PyTorch allocates: 0.5 to 0.7 GB on an H200."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Device settings of a run that its memory and time depend on."""

    device: Literal["cpu", "cuda"] = "cpu"
    micro_batch: int | None = None
    compile: bool | Literal["auto"] = False
    cuda_graph: bool | Literal["auto"] = False
    processes: int = 1
    """of one run, each with its own device or threads"""
    sharing: int = 1
    """runs that share a GPU"""
    threads: int = 1
    parallel: Parallel = "none"


def is_bf16(config: RunConfig, place: Place) -> bool:
    """Whether matrix products are in bf16; for 'auto' on any GPU."""
    return config.precision == "bf16" or (config.precision == "auto" and place.device == "cuda")


def is_compiled(config: RunConfig, place: Place) -> bool:
    return RuntimeConfig(compile=place.compile).compiles(config.n_steps, on_gpu=place.device == "cuda")


def activation_bytes(config: RunConfig, n_sequences: int, place: Place = Place()) -> float:
    """Memory saved by all blocks for the backward pass over n_sequences, including copies of weights."""
    assert config.n_kv_heads is not None and config.d_ff is not None
    bf16, d_model, d_expert = is_bf16(config, place), config.d_model, config.d_expert or 0
    size, cast = (2 if bf16 else 4), int(bf16 and not is_compiled(config, place))
    keys = config.n_kv_heads * d_model // config.n_heads
    n_routed = config.n_layers - config.n_dense_layers if config.n_experts else 0
    attention = 4 * 2 * d_model + size * ((4 + 3 * cast) * d_model + 2 * keys)
    dense = size * ((3 if config.is_gated else 2) + cast) * config.d_ff
    routed = (config.top_k or 0) * (4 * d_expert + 2 * d_model) + (3 + cast) * config.n_shared_experts * d_expert
    per_token = config.n_layers * attention + (config.n_layers - n_routed) * dense + n_routed * size * routed
    copies = 2 * bf16  # per weight of a block: cast
    in_blocks = cost(config).params_total - (1 if config.tie_embeddings else 2) * config.vocab_size * d_model
    return n_sequences * config.seq_len * per_token + copies * in_blocks


def peak_bytes(config: RunConfig, place: Place = Place()) -> int:
    """Peak memory that a run allocates on one device, without the context; on a CPU, what it adds to its process."""
    params = cost(config).params_total
    own = params / (place.processes if place.parallel == "fsdp" else 1)
    share = max(1, config.batch_tokens // config.seq_len // place.processes)
    n_sequences = min(place.micro_batch or share, share)
    activations = activation_bytes(config, n_sequences, place)
    if place.device == "cpu":
        return round(24 * params + activations)  # 16 of training; the heap keeps what measuring and writing add
    logits = min(LOGITS_BYTES, 4 * n_sequences * config.seq_len * config.vocab_size)
    forward = activations + 2 * logits + 4 * config.vocab_size * config.d_model
    if n_sequences < share or place.parallel == "ddp":  # gradients of earlier micro-batches, or DDP's buckets
        forward += 4 * own
    gathered = 4 * params / config.n_layers if own < params else 0  # a block of sharded weights, whole
    return round(12 * own + max(forward, 4 * own + activations / config.n_layers) + gathered)
