"""What `watch` costs in a training, in pairs: a training step and a measurement, one after the other.

    python benchmarks/watch.py [--pairs 5] [--layers 12] [--width 256]

The share is the measurement's time over that of `every` steps: variance at every 100 (8 sequences), and variance,
usefulness and causal score at every 1,000 (16 sequences, half of them for fitting)."""

import argparse
import time
import warnings
from functools import partial

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsedepth as sd

LENGTH, BATCH, VOCAB = 256, 8, 8192
CASES = {("variance",): (100, 8), ("variance", "usefulness", "causal"): (1000, 16)}
"""Measures -> every, and sequences."""


def model_of(n_layers: int, width: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": width, "intermediate_size": 8 * width // 3, "num_attention_heads": width // 64}
    return LlamaForCausalLM(LlamaConfig.from_dict({**sizes, "num_hidden_layers": n_layers, "vocab_size": VOCAB}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(given.layers, given.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def seconds_of(work) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def step() -> None:
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device=device)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    step()
    for measures, (every, n_sequences) in CASES.items():
        tokens = torch.randint(0, VOCAB, (n_sequences, LENGTH + 1))
        watch = sd.watch(model, tokens, every=every, out=None, measures=measures)
        watch(0)
        pairs = [(seconds_of(step), seconds_of(partial(watch, every, now=True))) for _ in range(given.pairs)]
        shares = [100 * measured / (every * stepped) for stepped, measured in pairs]
        low, median, high = np.quantile(shares, (0.25, 0.5, 0.75))
        times = np.median(pairs, axis=0)
        told = f"a step {times[0]:.3g} s, a measurement {times[1]:.3g} s"
        print(f"{', '.join(measures)} at every {every}: {median:.2g}% ({low:.2g} to {high:.2g}) of a step; {told}")


if __name__ == "__main__":
    main()
