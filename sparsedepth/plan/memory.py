"""A model of the peak memory of a run on one device.

    peak = 12 P + max( L A + head, 4 P + A )       P parameters: weights, two AdamW moments; gradients; L blocks
    A    = N ( 4 norms D + s ((4 + 3 c) D + 2 K + (3 + c) F) )      activations saved by a block of N tokens

s: bytes per number; D: d_model; K: channels of the keys; F: active width of the feed-forward part. Saved are the norms'
inputs in fp32; q, k, v, attention's output, input and output of the projections; three tensors as wide as F. c = 1
under autocast without a compiler, which casts inputs again for each use. Attention saves no T x T (2205.14135). On a
CPU, whose heap does not shrink, the peak comes later: a checkpoint holds weights and moments three times in addition to
the activations, and measuring adds to that.

A is within an eighth of what autograd saves (tests). On a CPU the peaks of 187 real runs of 6 to 32 layers at contexts
of 128 were 0.87 to 1.22 times this model; at contexts of 512 up to 3 times, with a factor of two between seeds. So the
price uses measured peaks of the sweep's runs if there are any (`price.with_peaks`). Peaks on a GPU were not compared.
Muon keeps one moment of a block's matrix, which is counted as two.
"""

from dataclasses import dataclass
from typing import Literal

from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import (
    CPU_PASS_TOKENS,
    CPU_PASS_VALUES,
    LOGITS_BYTES,
    MAX_TOKENS,
    Parallel,
    RuntimeConfig,
)

HEAP = {"cpu": 1.05, "cuda": 1.0}
"""Overhead factor of the C library's heap; none is assumed for PyTorch's CUDA allocator."""

OWN_BYTES = {"cpu": 4 * 2**20, "cuda": 160 * 2**20}
"""Memory of any run, however small its model: text index, tables, workspaces (on Hopper 32 MiB for each of cuBLAS's
handles: two threads, and as many of a captured graph)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Device settings of a run that its memory depends on."""

    device: Literal["cpu", "cuda"] = "cpu"
    micro_batch: int | None = None
    compile: bool | Literal["auto"] = False
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
    further_norms = (
        2 * (config.norm in ("sandwich", "peri", "keel")) + (config.norm_kind == "group") + 2 * config.qk_norm
    )
    norms = (4 * 2 + (4 + 2 * cast) * further_norms) * d_model
    attention = size * ((4 + 3 * cast) * d_model + 2 * keys + config.seq_len * config.mask_documents)
    gates = size * 2 * d_model * (config.residual_gate != "none")
    carried = 4 * 2 * d_model * (config.residual_scalars + config.gpas) + size * 2 * keys * config.value_residual
    dense = size * ((3 if config.is_gated else 2) + cast) * config.d_ff
    routed = (config.top_k or 0) * (4 * d_expert + 2 * d_model) + (3 + cast) * config.n_shared_experts * d_expert
    per_token = config.n_layers * (norms + attention + gates + carried) + (config.n_layers - n_routed) * dense
    per_token += n_routed * size * routed
    per_token += 2 * config.n_layers * _stream_bytes(config)
    per_token += config.n_layers * size * 2 * d_model * (config.residual_dropout > 0)
    per_token += (config.n_layers - n_routed) * size * config.d_ff * (config.ffn_dropout > 0)
    if config.attention_dropout and place.device == "cpu":  # the kernel with dropout saves all weights, in fp32
        per_token += config.n_layers * (12 + 2 * bf16) * config.n_heads * config.seq_len
    copies = 2 * bf16 + 4 * (config.weight_density < 1)  # per weight of a block: cast, and masked
    in_blocks = cost(config).params_total - (1 if config.tie_embeddings else 2) * config.vocab_size * d_model
    return n_sequences * config.seq_len * per_token + copies * in_blocks


def _stream_bytes(config: RunConfig) -> int:
    """Bytes per token that a branch saves with several streams: the streams, their norm twice, the update; with
    manifold, the steps to a doubly stochastic matrix; with attention residuals, the sources and their norm."""
    n = config.n_streams
    if config.attention_residuals:
        return 4 * 2 * (config.stream_width + config.attention_residuals + 1)
    if n == 1:
        return 0
    steps = 40 * (n * n + n) if config.stream_mixing == "manifold" else 0
    return 4 * ((3 * n + 1) * config.d_model + 4 * n * (n + 2) + steps)


def peak_bytes(config: RunConfig, place: Place = Place()) -> int:
    """Peak memory of a run on one device; on a CPU, the memory that it adds to its process."""
    sharding = place.processes if place.parallel == "fsdp" else 1
    params = cost(config).params_total
    own = params / sharding
    share = max(1, config.batch_tokens // config.seq_len // place.processes)
    n_sequences = min(place.micro_batch or share, share)
    activations = HEAP[place.device] * activation_bytes(config, n_sequences, place)
    logits = min(LOGITS_BYTES, 4 * n_sequences * config.seq_len * config.vocab_size)
    forward = activations + 2 * logits + 4 * config.vocab_size * config.d_model
    if n_sequences < share or place.parallel == "ddp":  # gradients of earlier micro-batches, or DDP's buckets
        forward += 4 * own
    training = 12 * own + max(forward, 4 * own + activations / config.n_layers)
    training += 4 * params / config.n_layers if sharding > 1 else 0  # a block gathered whole
    measuring = (36 * params + activations if place.device == "cpu" else 4 * params) + _measuring_bytes(config, place)
    return round(max(training, measuring) + OWN_BYTES[place.device])


def _measuring_bytes(config: RunConfig, place: Place) -> float:
    """Memory of the measures without the weights: recorded stream with forks, a pass's logits, usefulness's moments."""
    if set(config.measures) == {"loss"}:
        return 0
    on_cpu = max(CPU_PASS_TOKENS, CPU_PASS_VALUES // config.stream_width)
    tokens = max(config.seq_len, MAX_TOKENS if place.device == "cuda" else on_cpu)
    logits = 8 * min(tokens * config.vocab_size, 2**26)
    moments = 24 * config.n_layers * config.stream_width**2 if "usefulness" in config.measures else 0
    return 4 * (config.n_layers + 8) * tokens * config.stream_width + logits + moments
