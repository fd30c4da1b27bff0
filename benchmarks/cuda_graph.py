"""Training steps replayed as one CUDA graph, against the same steps with normal kernel launches.

    python benchmarks/cuda_graph.py                                    # widths 64, 128, 512 and 12, 24 layers, on a GPU
    python benchmarks/cuda_graph.py --widths 128 --layers 24 --experts  # with 8 experts, 2 of them chosen
    python benchmarks/cuda_graph.py --recorded --widths 16 --layers 2 --tokens 64 --seq-len 8     # dry run on a CPU

Eager and compiled, each with and without a graph. The first two steps of each variant are not counted, and a median
ignores the step that captures. The losses of all variants are compared; only the learning rate's rounding can differ.
`--recorded` replaces the GPU by tests/support/cpu_graph.py: it shows that everything runs, but not how fast.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from train import Step, ours, report, take_turns

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.train import loop
from sparsedepth.train.runtime import Runtime, resolve


def shape(width: int, layers: int, given: argparse.Namespace) -> RunConfig:
    fields = {"n_layers": layers, "d_model": width, "n_heads": max(1, width // 64), "seq_len": given.seq_len}
    fields |= {"batch_tokens": given.tokens, "train_tokens": given.tokens * 1000, "vocab_size": 256, "lr": 1e-3}
    fields |= {"n_experts": 8, "top_k": 2} if given.experts else {}
    return build(RunConfig, {**fields, "precision": "fp32" if given.recorded else "bf16"}, "a shape")


def variants(config: RunConfig, device: str) -> dict[str, Runtime]:
    """Variants by name, the reference first. On a CPU nothing is compiled."""
    found: dict[str, Runtime] = {}
    for compiled in (False, True) if device == "cuda" else (False,):
        plain = resolve(config, RuntimeConfig(device=device, compile=compiled))
        name = "compiled" if compiled else "eager"
        found |= {f"plain, {name}": plain, f"graph, {name}": dataclasses.replace(plain, cuda_graph=True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--recorded", action="store_true", help="on a CPU, with a stand-in")
    parser.add_argument("--json", type=Path, help="append a line for each variant to this file")
    given = parser.parse_args()
    if given.recorded:
        from support.cpu_graph import RecordedCapture

        module: Any = loop
        module.CudaCapture = RecordedCapture
    device = "cpu" if given.recorded else "cuda"
    for width in given.widths:
        for layers in given.layers:
            torch._dynamo.reset()  # else a second size would be compiled with symbolic shapes
            config = shape(width, layers, given)
            steps: dict[str, Callable[[], Step]] = {
                name: functools.partial(ours, config, runtime) for name, runtime in variants(config, device).items()
            }
            report(config, take_turns(steps, given.repeats, torch.device(device)), torch.device(device), given.json)


if __name__ == "__main__":
    main()
