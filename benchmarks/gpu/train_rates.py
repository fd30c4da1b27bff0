"""Training steps of one size by several variants, in one process: a row after each variant.

    python benchmarks/gpu/train_rates.py SIZE VARIANT,VARIANT ROWS.jsonl [--device cpu]

    ours[-compiled][-graph], ours-eager    the loop's own step (`sparsedepth.train.loop.TrainingState.take_step`)
    plain[-compiled]                       a Llama in bf16 with one product for q, k, v and one for gate and up

Both have our fused AdamW, clipping and schedule, and are compiled block by block. Utilisation (mfu_percent) is 3 x the
forward FLOPs of `sparsedepth.config.cost` over the dense bf16 peak of an H100 or H200, 989.4 TFLOP/s; a step's time is
the median between CUDA events. The CPU takes tiny sizes, eager.

Shapes: B sequences, T tokens of one sequence, D d_model, H heads, K width of a head, N = B T.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.devices import ALONE
from sparsedepth.train.feed import Batch
from sparsedepth.train.loop import TrainingState
from sparsedepth.train.optimizer import learning_rate, make_optimizer
from sparsedepth.train.runtime import resolve

PEAK_FLOPS = 989.4e12
WARM_STEPS = 6
"""Untimed: they compile; a graph is captured at the fourth."""

LARGE = dict(vocab_size=32000, seq_len=1024, batch_tokens=32768)
SIZES: dict[str, dict[str, Any]] = {
    "250m": {**LARGE, "n_layers": 24, "d_model": 1024, "n_heads": 8, "d_ff": 2816},
    "1.2b": {**LARGE, "n_layers": 32, "d_model": 1536, "n_heads": 12, "d_ff": 5376, "batch_tokens": 16384},
    "100m": {**LARGE, "n_layers": 12, "d_model": 768, "n_heads": 6, "d_ff": 2048},
    "experts": {**LARGE, "n_layers": 16, "d_model": 1024, "n_heads": 8, "d_ff": 4096, "batch_tokens": 16384}
    | {"n_experts": 8, "top_k": 2, "d_expert": 2048},
    "small": dict(n_layers=24, d_model=256, n_heads=4, vocab_size=264, seq_len=256, batch_tokens=16384),
}
TINY = dict(n_layers=2, d_model=32, n_heads=2, d_ff=64, vocab_size=64, seq_len=32, batch_tokens=128)

Step = Callable[[Batch], Tensor]
"""Does one training step; returns its cross-entropy, on the device."""


def config_of(size: str, device: torch.device) -> RunConfig:
    fields = dict(SIZES[size])
    if device.type == "cpu":
        fields |= TINY | ({"d_expert": 32} if "n_experts" in fields else {})
    fixed = {"lr": 3e-4, "precision": "bf16", "fit_tokens": 16384, "log_every": 10**6, "observe_every": 10**6}
    return build(RunConfig, {**fixed, **fields, "train_tokens": 2000 * fields["batch_tokens"]}, size)


def batch(config: RunConfig, number: int, device: torch.device) -> Batch:
    shape = (config.batch_tokens // config.seq_len, config.seq_len + 1)
    return Batch.of(next_tokens(np.random.default_rng(number).integers(config.vocab_size, size=shape))).to(device)


def drawn(config: RunConfig, device: torch.device) -> Decoder:
    """Weights drawn on the device: a billion normals take half a minute on the host."""
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.02)
            else:
                weight.fill_(1)
        for layer, block in enumerate(model.blocks, start=1):
            block.depth_factor.fill_(1 / math.sqrt(layer))
    return model


def ours(config: RunConfig, device: torch.device, kinds: list[str]) -> Step:
    on_gpu = device.type == "cuda"
    wanted = RuntimeConfig(
        device=str(device), compile=on_gpu and "compiled" in kinds, cuda_graph=on_gpu and "graph" in kinds
    )
    runtime = resolve(config, wanted)
    model = ALONE.place_model(drawn(config, device), runtime.device).train()
    model.use_kernels(**runtime.kernels)
    state = TrainingState(model, config, runtime, ALONE)

    def step(given: Batch) -> Tensor:
        state.take_step(given)
        return state.recent.pop()[0]

    return step


class PlainBlock(nn.Module):
    def __init__(self, config: RunConfig):
        super().__init__()
        assert config.d_ff is not None
        width, self.n_heads = config.d_model, config.n_heads
        self.attention_norm, self.ffn_norm = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.qkv, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
        width = x_BTD.shape[-1:]
        qkv = self.qkv(F.rms_norm(x_BTD, width, self.attention_norm.to(x_BTD.dtype)))
        q_BTHK, k_BTHK, v_BTHK = qkv.unflatten(-1, (3, self.n_heads, -1)).unbind(2)

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            turned = (first * cos_T1K - second * sin_T1K, second * cos_T1K + first * sin_T1K)
            return torch.cat(turned, -1).to(v_BTHK.dtype)

        q, k, v = (part.transpose(1, 2) for part in (turned(q_BTHK), turned(k_BTHK), v_BTHK))
        out_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.output(out_BHTK.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(F.rms_norm(x_BTD, width, self.ffn_norm.to(x_BTD.dtype))).chunk(2, -1)
        return x_BTD + self.down(F.silu(gate) * up)


class Plain(nn.Module):
    def __init__(self, config: RunConfig):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layers))
        self.norm = nn.Parameter(torch.ones(config.d_model))
        d_head = config.d_model // config.n_heads
        frequency_K = config.rope_theta ** (-torch.arange(0, d_head, 2).float() / d_head)
        angle_TK = torch.arange(config.seq_len).float()[:, None] * frequency_K
        self.register_buffer("cos", angle_TK.cos()[:, None].bfloat16(), persistent=False)
        self.register_buffer("sin", angle_TK.sin()[:, None].bfloat16(), persistent=False)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embed(inputs_BT).bfloat16()
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos, self.sin)
        return self.loss(x_BTD, targets_BT.flatten())

    def loss(self, x_BTD: Tensor, target_N: Tensor) -> Tensor:
        logits_BTV = self.head(F.rms_norm(x_BTD, x_BTD.shape[-1:], self.norm.to(x_BTD.dtype)))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), target_N)


def plain(config: RunConfig, device: torch.device, kinds: list[str]) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = Plain(config).train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.02)
    if "compiled" in kinds and device.type == "cuda":
        for block in model.blocks:
            block.compile(dynamic=False)
        model.loss = torch.compile(model.loss, dynamic=False)
    optimizer, done = make_optimizer(model, config), [0]

    def step(given: Batch) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, done[0])
        done[0] += 1
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(given.inputs, given.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def timed(step: Step, batches: list[Batch], device: torch.device) -> tuple[list[float], float, list[Tensor]]:
    """Seconds of each step on the device, seconds of the host per step, and the losses."""
    if device.type == "cpu":
        began = time.perf_counter()
        losses = [step(given) for given in batches]
        seconds = (time.perf_counter() - began) / len(batches)
        return [seconds], seconds, losses
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    marks[0].record()
    began, losses = time.perf_counter(), []
    for given, mark in zip(batches, marks[1:], strict=True):
        losses.append(step(given))
        mark.record()
    host = (time.perf_counter() - began) / len(batches)
    torch.cuda.synchronize()
    each = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
    return each, host, losses


def measured(config: RunConfig, variant: str, device: torch.device) -> dict[str, Any]:
    name, *kinds = variant.split("-")
    began = time.perf_counter()
    step = {"ours": ours, "plain": plain}[name](config, device, kinds)
    losses = [step(batch(config, number, device)).item() for number in range(WARM_STEPS)]
    warm = time.perf_counter() - began
    n_steps = 12 if device.type == "cuda" else 2
    batches = [batch(config, WARM_STEPS + number, device) for number in range(n_steps)]
    each, host, timed_losses = timed(step, batches, device)
    seconds, size = statistics.median(each), cost(config)
    flops = 3 * size.flops_per_token * config.batch_tokens
    return {
        "params": size.params_total,
        "tokens": config.batch_tokens,
        "seq_len": config.seq_len,
        "step_ms": round(1e3 * seconds, 2),
        "range_ms": [round(1e3 * min(each), 2), round(1e3 * max(each), 2)],
        "host_ms": round(1e3 * host, 2),
        "tokens_per_s": round(config.batch_tokens / seconds),
        "mfu_percent": round(100 * flops / seconds / PEAK_FLOPS, 1) if device.type == "cuda" else None,
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None,
        "warm_s": round(warm, 1),
        "losses": [round(float(loss), 4) for loss in (*losses, *timed_losses)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("variants")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--device", default="cuda", type=torch.device)
    given = parser.parse_args()
    config, failed = config_of(given.size, given.device), False
    for variant in given.variants.split(","):
        torch._dynamo.reset()
        if given.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            row = measured(config, variant, given.device)
        except Exception as error:  # the other variants still run
            traceback.print_exc(limit=6)
            row, failed = {"error": f"{type(error).__name__}: {str(error)[:400]}"}, True
        name = torch.cuda.get_device_name() if given.device.type == "cuda" else "cpu"
        row = {"device": name, "size": given.size, "variant": variant, **row}
        print(json.dumps(row), flush=True)
        with given.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        gc.collect()
        if given.device.type == "cuda":
            torch.cuda.empty_cache()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
