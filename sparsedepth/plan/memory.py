"""The peak memory of a run on one device, from its config alone; and the peak that a process really had.

    peak = 12 P + max(forward, 4 P + block)  +  the device's own        P parameters: weights and two AdamW moments
    forward = n_layers x block + head (+ 4 P from the second micro-batch on), block = what autograd keeps of one block

What autograd keeps is counted tensor by tensor for the blocks of `model.decoder` without torch.compile (tests hold it
to the tensors that a real step saves). A compiled block recomputes what is cheap: COMPILED of it is kept.
On a CPU the C library adds what it cannot give back at once (HEAP), and the peak may come later: while a checkpoint is
written, the weights and moments are in memory three times.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsedepth.config.cost import cost
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import LOGITS_BYTES, Parallel

COMPILED = {"fp32": 0.99, "bf16": 0.73}
"""Share of a block's saved tensors that are left under torch.compile: counted for a dense one, d_ff = 3 d_model."""

HEAP, KEPT = 1.13, 0.98
"""glibc on a CPU: what the heap takes for the blocks' tensors, which come and go, and how much of that is still there
when a checkpoint is written. Fitted to shapes of 0.6 to 13 M parameters (within 12%; 16% with q/k norm); none is
assumed for PyTorch's CUDA allocator."""

OWN_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""What any run adds, however small its model: the text's index, tables, workspaces."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run is computed, as far as its memory depends on it."""

    device: Literal["cpu", "cuda"] = "cpu"
    micro_batch: int | None = None
    compile: bool = False
    processes: int = 1
    """of one run, each with a device, or threads, of its own"""
    threads: int = 1
    parallel: Parallel = "none"


def is_bf16(config: RunConfig, place: Place) -> bool:
    """Whether matrix products are in bf16; 'auto' is taken for a GPU that has it."""
    return config.precision == "bf16" or (config.precision == "auto" and place.device == "cuda")


def saved_by_block(config: ModelConfig, n_sequences: int, *, bf16: bool, has_experts: bool) -> int:
    """Bytes that autograd keeps of one block for the backward pass over n_sequences sequences of seq_len."""
    assert config.n_kv_heads is not None and config.d_ff is not None
    d_model, n_tokens = config.d_model, n_sequences * config.seq_len
    kv = config.n_kv_heads * d_model // config.n_heads
    masked = config.mask_documents or (config.sliding_window or config.seq_len) < config.seq_len
    swiglu = 4 if bf16 else 3  # gate, up and their product; autograd's own keeps silu(gate) too (`model.fused`)
    wide = narrow = 0  # numbers per token in fp32, and in the dtype of the products
    n_norms = 4 if config.norm in ("sandwich", "peri") else 2
    wide += n_norms * (2 * (d_model + config.norm_groups) if config.norm_kind == "group" else d_model + 1)
    wide += config.n_heads  # the logsumexp of attention
    narrow += 2 * d_model + 2 * (d_model if masked else kv)  # q, out, k, v
    narrow += (4 if has_experts else 5) * d_model if bf16 else 2 * d_model  # inputs of products; autocast copies each
    if config.qk_norm:
        wide += (2 if config.qk_norm_over == "all" else config.n_heads + config.n_kv_heads) + d_model + kv
        narrow += d_model + kv if bf16 else 0
    if bf16 and n_norms == 4:
        narrow += 2 * d_model  # a branch's own norm reads bf16, and keeps what it normed
    if config.residual_gate != "none":
        narrow += 2 * d_model
    if has_experts:
        top_k, d_expert = config.top_k or 0, config.d_expert or 0
        narrow += top_k * (4 * d_expert + 2 * d_model) + swiglu * config.n_shared_experts * d_expert
        narrow += 2 * d_model if bf16 and config.n_shared_experts else 0
        wide += 3 * config.n_experts + 8 * top_k + 2  # the router's
    else:
        narrow += swiglu * config.d_ff
    size = 2 if bf16 else 4
    bytes_ = n_tokens * (4 * wide + size * narrow)
    if masked:  # as numbers that are added to the scores, in each block
        bytes_ += size * config.seq_len**2 * (n_sequences if config.mask_documents else 1)
    if not bf16 and not config.qk_norm:  # `model.fused`: weights of q and k with paired channels, and RoPE's angles
        bytes_ += 4 * (d_model + kv) * (d_model + config.seq_len)
    return bytes_ + _weight_copies(config, bf16=bf16, has_experts=has_experts)


def _weight_copies(config: ModelConfig, *, bf16: bool, has_experts: bool) -> int:
    """Bytes of a block's matrices that are kept beside them: cast by autocast, or with their mask applied."""
    d_model = config.d_model
    matrices = 2 * d_model * d_model + 2 * d_model * (config.n_kv_heads or 0) * (d_model // config.n_heads)
    ffn = (config.n_experts + config.n_shared_experts) * (config.d_expert or 0) if has_experts else config.d_ff or 0
    matrices += 3 * d_model * ffn
    masked = matrices * (1 if bf16 else 5) if config.weight_density < 1 else 0
    return masked + (2 * matrices if bf16 else 0)


def peak_bytes(config: RunConfig, place: Place = Place()) -> int:
    """The most that a run has allocated at once on one device; on a CPU, what it adds to its process."""
    bf16 = is_bf16(config, place)
    sharding = place.processes if place.parallel == "fsdp" else 1
    params = cost(config).params_total
    own = params / sharding
    share = max(1, config.batch_tokens // config.seq_len // place.processes)
    n_sequences = min(place.micro_batch or share, share)
    n_routed = config.n_layers - config.n_dense_layers if config.n_experts else 0

    def block(has_experts: bool) -> float:
        kept = saved_by_block(config, n_sequences, bf16=bf16, has_experts=has_experts)
        heap = HEAP if place.device == "cpu" else 1
        return kept * heap * (COMPILED["bf16" if bf16 else "fp32"] if place.compile else 1)

    blocks = n_routed * (block(True) if n_routed else 0) + (config.n_layers - n_routed) * block(False)
    forward = blocks + _head_bytes(config, n_sequences * config.seq_len, bf16)
    if n_sequences < share or place.parallel == "ddp":  # gradients of earlier micro-batches, or DDP's buckets
        forward += 4 * own
    backward = 4 * own + block(n_routed > 0) + _passing(config, n_sequences * config.seq_len, bf16)
    training = 12 * own + max(forward, backward) + (4 * params / config.n_layers if sharding > 1 else 0)
    writing = 36 * params + KEPT * blocks if place.device == "cpu" else 0
    return round(max(training, writing, _measuring(config, place, params)) + OWN_BYTES[place.device])


def _head_bytes(config: ModelConfig, n_tokens: int, bf16: bool) -> float:
    """The final norm's saved tensors, and the larger of what the head's forward and its backward pass add."""
    size, table = (2 if bf16 else 4), config.vocab_size * config.d_model
    kept = n_tokens * config.d_model * (4 + 2 * size) + 4 * table
    piece = min(LOGITS_BYTES, 4 * n_tokens * config.vocab_size)
    forward = (1.5 if bf16 else 2) * piece + n_tokens * config.d_model * 4 + (4 * table if bf16 else 0)
    return kept + max(forward, 4 * table + _passing(config, n_tokens, bf16))


def _passing(config: ModelConfig, n_tokens: int, bf16: bool) -> float:
    """Gradients of activations that are alive at once in a block's backward pass."""
    width = (config.top_k or 0) * (config.d_expert or 0) if config.n_experts else config.d_ff or 0
    return n_tokens * (8 * config.d_model + (2 if bf16 else 4) * 3 * width)


def _measuring(config: RunConfig, place: Place, params: int) -> float:
    """The suite: weights, the recorded stream with its forks, the logits of a pass, usefulness's moments."""
    tokens = max(config.seq_len, 8192 if place.device == "cuda" else 1024)
    logits = 8 * min(tokens * config.vocab_size, 2**26)
    moments = 24 * config.n_layers * config.d_model**2 if "usefulness" in config.measures else 0
    return 4 * params + 4 * (config.n_layers + 8) * tokens * config.d_model + logits + moments


# What a process really had


def resident_bytes() -> dict[str, int] | None:
    """The memory of this process in bytes: 'RssAnon', 'RssFile', 'VmHWM' (peak of both); None where Linux is not."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: 1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")}


def added_bytes(before: dict[str, int] | None) -> int | None:
    """How much anonymous memory this process had at its peak beyond what it had `before`.

    Pages of files (libraries, the token shards) do not count: the system takes them back when it needs to.
    """
    now = resident_bytes()
    if before is None or now is None:
        return None
    return max(0, now["VmHWM"] - now["RssFile"] - now["RssShmem"] - before["RssAnon"])
