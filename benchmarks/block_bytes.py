"""Bytes that a compiled block moves in one training step in bf16, by Inductor's own count, ours against plain PyTorch.

    python benchmarks/block_bytes.py                  # a row for each variant; nothing is compiled or run: a minute
    python benchmarks/block_bytes.py --width 1024 --heads 8 --hidden 2816

A large model's block waits for memory outside its products, so bytes foretell the gap between ours and plain PyTorch
on a GPU, and need none. Counted are inputs and outputs of each kernel of the forward and the backward graph; `moved`
leaves out products and attention, `kept` is what the forward graph leaves for the backward. The unit is tokens x width
x 2 bytes. Weights are left out, too: a number is the difference between two batches.

    plain         everything in bf16, one product for q, k, v and one for gate and up; written without autocast, which
                  from PyTorch 2.12 on promotes rms_norm to fp32
    stream fp32   ours, as trained by default
    stream bf16   ours with `--runtime stream=bf16`

Norms are those of a GPU: on a CPU training takes others (`sparsedepth.model.fused`), which a compiler does not fuse.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.model import fused
from sparsedepth.model.decoder import Decoder

BF16 = torch.bfloat16
LIMIT = 1.10
"""of what `stream bf16` moves, relative to plain"""


class Counted(Exception):
    """In place of compiled code."""


class Graph(NamedTuple):
    """Bytes of one graph."""

    moved: int
    products: int
    kept: int
    kernels: int


class Counter:
    """A backend that lowers and fuses each graph as Inductor does, counts, and runs the graph as it was."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def __call__(self, graph: Any, inputs: list[Tensor]) -> Any:
        return compile_fx(graph, inputs, inner_compile=self.count)

    def count(self, graph: Any, inputs: list[Tensor], **options: Any) -> Any:
        def stop(lowered: Any) -> None:
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            nodes = lowered.scheduler.nodes
            sizes = [(node.get_read_write_buffers_sizes(), node.is_extern()) for node in nodes]
            names = set(lowered.get_output_names())
            buffers = [
                buffer for name, buffer in lowered.name_to_buffer.items() if name in names
            ]  # whole, also of a view
            kept = sum(int(buffer.get_numel()) * buffer.get_dtype().itemsize for buffer in buffers)
            moved = sum(size for size, is_extern in sizes if not is_extern)
            kernels = sum(size > 0 for size, _ in sizes)
            self.graphs.append(Graph(moved, sum(size for size, _ in sizes) - moved, kept, kernels))
            raise Counted

        before = len(self.graphs)
        try:
            with mock.patch.object(GraphLowering, "compile_to_module", stop):
                compile_fx_inner(torch.fx.GraphModule(graph, graph.graph), inputs, **options)
        except Exception:  # Inductor wraps `Counted`
            if len(self.graphs) == before:
                raise
        return make_boxed_func(graph.forward)


class PlainBlock(nn.Module):
    """Master weights in fp32, all else in bf16."""

    def __init__(self, config: RunConfig):
        super().__init__()
        width = config.d_model
        assert config.d_ff
        self.n_heads = config.n_heads
        shapes: dict[str, tuple[int, ...]] = {
            "qkv": (3 * width, width),
            "output": (width, width),
            "gate_up": (2 * config.d_ff, width),
        }
        shapes |= {"down": (width, config.d_ff), "attention_norm": (width,), "ffn_norm": (width,)}
        self.weights = nn.ParameterDict({name: torch.randn(shape) * 0.02 for name, shape in shapes.items()})

    def forward(self, x_BTD: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
        width = x_BTD.shape[-1:]
        cast = {name: weight.to(BF16) for name, weight in self.weights.items()}
        qkv = F.linear(F.rms_norm(x_BTD, width, cast["attention_norm"]), cast["qkv"])
        q_BTHK, k_BTHK, v_BTHK = qkv.unflatten(-1, (3, self.n_heads, -1)).unbind(2)

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return torch.cat((first * cos_T1K - second * sin_T1K, second * cos_T1K + first * sin_T1K), -1)

        q, k, v = (part.transpose(1, 2) for part in (turned(q_BTHK), turned(k_BTHK), v_BTHK))
        out_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + F.linear(out_BHTK.transpose(1, 2).flatten(2), cast["output"])
        gate, up = F.linear(F.rms_norm(x_BTD, width, cast["ffn_norm"]), cast["gate_up"]).chunk(2, -1)
        return x_BTD + F.linear(F.silu(gate) * up, cast["down"])


def plain(config: RunConfig, n_sequences: int, backend: Counter) -> Tensor:
    block = PlainBlock(config).train()
    d_head = config.d_model // config.n_heads
    angle_TK = torch.arange(config.seq_len)[:, None] * torch.rand(d_head // 2)
    cos, sin = angle_TK.cos()[:, None].to(BF16), angle_TK.sin()[:, None].to(BF16)
    x_BTD = torch.randn(n_sequences, config.seq_len, config.d_model, dtype=BF16, requires_grad=True)
    block.compile(dynamic=False, backend=backend)
    return block(x_BTD, cos, sin)


def ours(config: RunConfig, n_sequences: int, backend: Counter, stream: torch.dtype) -> Tensor:
    model = Decoder(config).train()
    block, context = model.blocks[0], model.positions(config.seq_len)
    x_BTD = torch.randn(n_sequences, config.seq_len, config.d_model, dtype=stream, requires_grad=True)
    block.compile(dynamic=False, backend=backend)
    with torch.autocast("cpu", dtype=BF16):
        return block(x_BTD, context)


VARIANTS: dict[str, Callable[[RunConfig, int, Counter], Tensor]] = {
    "plain": plain,
    "stream fp32": lambda *given: ours(*given, torch.float32),
    "stream bf16": lambda *given: ours(*given, BF16),
}


def counted(config: RunConfig, variant: str) -> dict[str, float]:
    """Units of one step of a block."""
    found = []
    for n_sequences in (1, 2):
        torch._dynamo.reset()
        counter = Counter()
        out_BTD = VARIANTS[variant](config, n_sequences, counter)
        out_BTD.backward(torch.randn_like(out_BTD))
        forward, backward = counter.graphs
        found.append((forward.moved, backward.moved, forward.products + backward.products, forward.kept))
    kernels = forward.kernels + backward.kernels
    unit = config.seq_len * config.d_model * 2
    ahead, back, products, kept = ((two - one) / unit for one, two in zip(*found, strict=True))
    return {
        "forward": ahead,
        "backward": back,
        "moved": ahead + back,
        "products": products,
        "kept": kept,
        "kernels": kernels,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 512, "heads": 4, "hidden": 1408, "length": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = {"d_model": given.width, "n_heads": given.heads, "d_ff": given.hidden, "seq_len": given.length}
    fixed = {"n_layers": 2, "vocab_size": 64, "batch_tokens": given.length, "precision": "bf16"}
    config = build(RunConfig, {**fixed, **sizes, "train_tokens": given.length}, "benchmark")
    rows = {}
    with mock.patch.object(fused, "needs_fp32_grad", lambda x: False), inductor.patch(force_disable_caches=True):
        for variant in VARIANTS:
            rows[variant] = counted(config, variant)
            times = rows[variant]["moved"] / rows["plain"]["moved"]
            told = "  ".join(f"{name} {value:.1f}" for name, value in rows[variant].items())
            print(f"{variant:12} {told}  times plain {times:.2f}", flush=True)
    if rows["stream bf16"]["moved"] > LIMIT * rows["plain"]["moved"]:
        raise SystemExit(f"stream bf16 moves more than {LIMIT:.2f} times what plain does")


if __name__ == "__main__":
    main()
