"""What one run costs on a device: its peak memory, modelled (`peak_bytes`), and its time, assumed for the device or
calibrated by a few real steps of its shape.

    seconds = start + n_steps step + (F / f) forward
    step    = 3 f batch_tokens / rate + 3 n_layers pieces launch              untimed, on a CPU
    step    = max(sharing 3 f batch_tokens / rate, 3 n_layers pieces launch)  untimed, on a GPU: launches overlap
    rate    = peak D / (D + w peak / bandwidth)                               in bf16 on a GPU

f: forward FLOPs per token; F: forward FLOPs of measuring and observing; `forward`: seconds per token of a forward pass
in fp32; pieces: micro-batches per step; D: d_model. A narrow model is held up by reading and writing its activations:
w is fitted to an H200. `quantities.measured` has the cost of each measure in forward passes."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from sparsedepth.config.cost import cost
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import FIT, RunConfig
from sparsedepth.config.runtime import LOGITS_SHARE, Parallel, RuntimeConfig, graph_obstacle
from sparsedepth.files import digest
from sparsedepth.quantities.measured import MEASURES

CONTEXT_BYTES = {"cpu": 0, "cuda": 600_000_000}
"""Of each process, beside what PyTorch allocates: 0.5 to 0.7 GB on an H200."""

OBSERVED_TOKENS = 1024
"""Held-out tokens of one observation of residual variance during training."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Assumed speed of an untimed device."""

    fp32_rate: float
    """sustained FLOP/s in fp32; on a CPU of one thread"""
    start: float
    """seconds of a run outside its steps and measures"""
    peak: float | None = None
    """FLOP/s in bf16 of a GPU's data sheet"""
    bandwidth: float | None = None
    """byte/s of a GPU's data sheet"""
    memory: float | None = None
    """bytes; None if it depends on the machine"""

    def rate(self, d_model: int, *, bf16: bool, compiled: bool) -> float:
        """Sustained FLOP/s of training."""
        if not bf16 or self.peak is None or self.bandwidth is None:
            return self.fp32_rate
        return self.peak * d_model / (d_model + WIDTHS[compiled] * self.peak / self.bandwidth)


DEVICES = {
    "cpu": Device(fp32_rate=4e10, start=0.5),
    "a100": Device(fp32_rate=1.4e13, start=15.0, peak=3.12e14, bandwidth=2.0e12, memory=80e9),
    "h100": Device(fp32_rate=3.5e13, start=15.0, peak=9.89e14, bandwidth=3.35e12, memory=80e9),
    "h200": Device(fp32_rate=3.5e13, start=15.0, peak=9.89e14, bandwidth=4.8e12, memory=141e9),
}
"""By name; an unknown GPU is priced as an A100."""

WIDTHS = {False: 12.0, True: 6.3}
"""w, by whether blocks are compiled. Measured on an H200, in % of its peak, at widths 256, 1,024 and 1,536: 8, 30 and -
(not compiled), 16, 47 and 51 (compiled). The formula gives 9, 29, 38 and 16, 43, 53."""

LAUNCH = {"cpu": {False: 3e-4, True: 3e-4}, "cuda": {False: 1.1e-3, True: 6.4e-4}}
"""Seconds to launch one block's forward pass, by device and whether blocks are compiled: on an H200's host, 24 layers
of width 256 took 78 ms a step, compiled 46 ms. A CUDA graph has none."""

FACTOR, RELATED, CALIBRATED = 3.0, 1.6, 1.25
"""Accuracy of an assumed time; of one corrected by finished runs of other shapes; of one calibrated or measured."""


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
    """Memory saved by all blocks for the backward pass over n_sequences, including copies of weights; by one block:

        A = N (8 D + s ((3 + 3 c) D + 2 K + (3 + c) F))      of N tokens, s bytes per number

    K: channels of the keys; F: active width of the feed-forward part. Saved are the norms' inputs in fp32; q, k, v,
    attention's output, input and output of the projections; three tensors as wide as F. c = 1 under autocast without a
    compiler, which keeps the cast inputs, too. Attention saves no T x T (2205.14135)."""
    assert config.n_kv_heads is not None and config.d_ff is not None
    bf16 = is_bf16(config, place)
    d_model = config.d_model
    d_expert = config.d_expert or 0
    size = 2 if bf16 else 4
    cast = int(bf16 and not is_compiled(config, place))
    keys = config.n_kv_heads * d_model // config.n_heads
    n_routed = config.n_layers - config.n_dense_layers if config.n_experts else 0
    attention = 4 * 2 * d_model + size * ((3 + 3 * cast) * d_model + 2 * keys)
    dense = size * ((3 if config.is_gated else 2) + cast) * config.d_ff
    routed = (config.top_k or 0) * (4 * d_expert + 2 * d_model) + (3 + cast) * config.n_shared_experts * d_expert
    per_token = config.n_layers * attention + (config.n_layers - n_routed) * dense + n_routed * size * routed
    copies = 2 * bf16  # per weight of a block: cast
    in_blocks = cost(config).params_total - (1 if config.tie_embeddings else 2) * config.vocab_size * d_model
    return n_sequences * config.seq_len * per_token + copies * in_blocks


def peak_bytes(config: RunConfig, place: Place = Place()) -> int:
    """Peak memory that a run allocates on one device, without the context; on a CPU, what it adds to its process.

        peak = 12 P + max(L A + head, 4 P + A)       P parameters: weights, two AdamW moments; gradients; L blocks

    On an H200 the model is within 8% of the peaks of five runs (19M to 1.2B, one with experts). What gates, further
    norms and dropout add is not modelled: measured peaks correct it (`plan.price`)."""
    params = cost(config).params_total
    own = params / (place.processes if place.parallel == "fsdp" else 1)
    share = max(1, config.sequences_per_step // place.processes)
    n_sequences = min(place.micro_batch or share, share)
    activations = activation_bytes(config, n_sequences, place)
    if place.device == "cpu":
        maps = 40 * config.n_layers * config.stream_width**2 * (not FIT.isdisjoint(config.measures))
        return round(24 * params + max(activations, maps))  # 16 of training; the heap keeps what measuring adds
    logits = min(LOGITS_SHARE * 80e9, 4 * n_sequences * config.seq_len * config.vocab_size)
    forward = activations + 2 * logits + 4 * config.vocab_size * config.d_model
    if n_sequences < share or place.parallel == "ddp":  # gradients of earlier micro-batches, or DDP's buckets
        forward += 4 * own
    gathered = 4 * params / config.n_layers if own < params else 0  # a block of sharded weights, whole
    return round(12 * own + max(forward, 4 * own + activations / config.n_layers) + gathered)


FITS = 0.92
"""Share of a device's memory up to which a peak fits: by so much the model may be wrong."""


def fitted(config: RunConfig, place: Place, memory: float | None, correction: float = 1.0) -> Place:
    """The place with the largest power of 2 of sequences per forward pass with which the run fits into so many bytes:
    none where the whole share of its batch does or one was asked for, 1 where nothing does."""

    def fits(size: int | None) -> bool:
        peak = correction * peak_bytes(config, replace(place, micro_batch=size)) + CONTEXT_BYTES[place.device]
        return memory is None or peak <= FITS * memory

    if place.micro_batch or fits(None):
        return place
    share = max(1, config.sequences_per_step // place.processes)
    sizes = [2**exponent for exponent in reversed(range((share - 1).bit_length()))]
    return replace(place, micro_batch=next(filter(fits, sizes), 1))


class Timing(NamedTuple):
    step: float
    """seconds of an optimiser step"""
    forward: float
    """seconds per token of a measure's forward pass, in fp32"""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """A time between `value / factor` and `value * factor`."""

    value: float
    factor: float

    @property
    def calibrated(self) -> bool:
        return self.factor < FACTOR

    @property
    def low(self) -> float:
        return self.value / self.factor

    @property
    def high(self) -> float:
        return self.value * self.factor


def shape(config: RunConfig, *, step_only: bool = False) -> dict[str, object]:
    """The fields that a run's price depends on; with `step_only` those that the time of a step depends on."""
    free = ("nothing", "amount") if step_only else ("nothing",)
    names = fields_where(type(config), lambda role: role.acts is None or role.cost_scope not in free)
    return config.model_dump(mode="json", include={*names})


def shape_id(config: RunConfig, *, step_only: bool = False) -> str:
    return digest(shape(config, step_only=step_only))


def measuring_flops(config: RunConfig) -> float:
    """Forward FLOPs of the observations during training and of the measures after it."""
    flops_per_token = cost(config).flops_per_token
    head = 2 * config.vocab_size * config.d_model
    body = flops_per_token - head
    tokens = config.measure_tokens
    observed = (config.n_steps // config.observe_every) * max(OBSERVED_TOKENS, config.seq_len) * body
    passes = [measure.passes(config) for measure in MEASURES if measure.name in config.measures]
    scored = tokens * sum(in_blocks * body + in_head * head for in_blocks, in_head in passes)
    if "loss" in config.measures:
        is_scored_twice = config.eval_seq_len not in (None, config.seq_len)
        scored += config.val_tokens * (2 if is_scored_twice else 1) * flops_per_token
    if "usefulness" in config.measures:
        scored += config.fit_tokens * (body + 8 * config.n_layers * config.stream_width**2)
    return observed + scored


def seconds(config: RunConfig, place: Place, device: Device, timing: Timing | None = None) -> Seconds:
    """How long the run takes on its device, or on place.processes devices."""
    per_token = cost(config).flops_per_token
    if timing:
        measuring = measuring_flops(config) / per_token * timing.forward
        return Seconds(value=device.start + config.n_steps * timing.step + measuring, factor=CALIBRATED)
    threads = place.threads if place.device == "cpu" else 1
    compiled = is_compiled(config, place)
    rate = device.rate(config.d_model, bf16=is_bf16(config, place), compiled=compiled)
    share = max(1, config.sequences_per_step // place.processes)
    pieces = -(-share // (place.micro_batch or share))
    computing = place.sharing * 3 * per_token * config.batch_tokens / place.processes / (rate * threads)
    is_captured = place.cuda_graph and graph_obstacle(config, place.device, place.parallel) is None
    launching = 0.0 if is_captured else 3 * config.n_layers * pieces * LAUNCH[place.device][compiled]
    step = computing + launching if place.device == "cpu" else max(computing, launching)
    measuring = place.sharing * measuring_flops(config) / (device.fp32_rate * threads)
    return Seconds(value=device.start + config.n_steps * step + measuring, factor=FACTOR)
