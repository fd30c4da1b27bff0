"""Many small runs: as one stacked model, as one process each, or one after the other.

    python benchmarks/stack.py                                            # all of it, about 10 minutes
    python benchmarks/stack.py --widths 32 --layers 12 --stacks 4 --tokens 480 --processes 2

    1 x K    one process, K runs as one model (`train.stack`); 1 x 1 is one run after the other, the unit of 'times'
    P x 1    P processes in parallel, one run each, like `sweep` with one worker for each of P cores
    P x K    P processes, each with K runs as one model: the gain of a sweep is P x K over P x 1, the last column

`--ways` takes each of them also compiled, and on a GPU captured as one CUDA graph (`graph`, `compiled-graph`). The unit
is the first way, so that `--ways eager graph` shows what capturing a stack gains.

Rates are tokens of all runs and processes per second; each process has one thread and lives for all repeats. The
variants take turns, in alternating order, and a ratio is of rates of one repeat, so that other load affects all alike.
A step is forward, backward, clipping and AdamW of every run, with its own batch. `update` is the share of it that
clipping and AdamW take, run by run: what one optimizer over stacked tensors could save at most. Seconds are the host's;
on a GPU they are those of launches, and none of a captured step.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.devices import ALONE
from sparsedepth.train.feed import Batch
from sparsedepth.train.loop import TrainingState
from sparsedepth.train.runtime import resolve
from sparsedepth.train.stack import StackedStep


def batch(config: RunConfig, step: int) -> Batch:
    shape = (config.batch_tokens // config.seq_len, config.seq_len + 1)
    drawn = np.random.default_rng((config.seed, step)).integers(config.vocab_size, size=shape)
    return Batch.of(next_tokens(drawn))


class TimedState(TrainingState):
    """Adds up the seconds of its clipping and AdamW."""

    update_seconds = 0.0

    def apply(self, entropy: Tensor, balance: Tensor) -> Tensor:
        began = self.clock()
        row = super().apply(entropy, balance)
        self.update_seconds += self.clock() - began
        return row


WAYS = ["eager", "compiled", "graph", "compiled-graph"]


class Trials:
    """K runs trained as one model, or a single one."""

    def __init__(self, shape: dict[str, Any], trials: int, device: str, way: str, clock: Callable[[], float]):
        fields = {**shape, "vocab_size": 64, "train_tokens": shape["batch_tokens"] * 10**6}
        self.configs = [build(RunConfig, {**fields, "seed": seed}, "benchmark") for seed in range(trials)]
        wanted = RuntimeConfig(device=device, compile="compiled" in way, cuda_graph="graph" in way, threads=1)
        runtimes = [resolve(config, wanted) for config in self.configs]
        self.device = runtimes[0].device
        models = [ALONE.place_model(Decoder(config, config.seed), self.device).train() for config in self.configs]
        self.states = [TimedState(*run, ALONE, clock) for run in zip(models, self.configs, runtimes, strict=True)]
        self.stack = StackedStep(self.states) if trials > 1 else None
        self.clock = clock

    def step(self, number: int) -> None:
        for state, config in zip(self.states, self.configs, strict=True):
            state.batch = batch(config, number).to(self.device)
        if self.stack:
            self.stack.take()
        for state in self.states:
            state.take_step(state.batch)
            state.recent.clear()

    def rate(self, seconds: float) -> tuple[float, float]:
        """Tokens of all trials per second, over steps for about this many seconds; and the share of updates."""
        began, steps = self.clock(), 0
        updates = sum(state.update_seconds for state in self.states)
        while steps < 2 or self.clock() - began < seconds:
            self.step(steps)
            steps += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        taken = self.clock() - began
        updates = sum(state.update_seconds for state in self.states) - updates
        return steps * len(self.configs) * self.configs[0].batch_tokens / taken, updates / taken


def child(shape: dict[str, Any], trials: int, way: str, given: argparse.Namespace, pipe: Connection) -> None:
    """Receives seconds to train for, and sends the rate; None ends it."""
    torch.set_num_threads(1)
    runs = Trials(shape, trials, given.device, way, time.process_time if given.cpu_time else time.perf_counter)
    runs.rate(0.0)
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        pipe.send(runs.rate(seconds))


class Variant:
    """P processes of K trials, forked: imports, 15 s on some machines, are done once. The parent computes nothing, so
    there is neither a CUDA context nor a pool of threads that a fork would break."""

    def __init__(self, shape: dict[str, Any], processes: int, trials: int, way: str, given: argparse.Namespace):
        self.processes, self.trials, self.way, self.pipes = processes, trials, way, []
        self.name = f"{processes} x {trials}" + (f" {way}" if way != given.ways[0] else "")
        self.shares: list[float] = []
        context = multiprocessing.get_context("fork")
        for _ in range(processes):
            ours, theirs = context.Pipe()
            context.Process(target=child, args=(shape, trials, way, given, theirs), daemon=True).start()
            theirs.close()  # else a child's death would not be noticed
            self.pipes.append(ours)

    def wait(self) -> None:
        """Until all processes have done their first steps."""
        try:
            assert all(pipe.recv() == "ready" for pipe in self.pipes)
        except EOFError:
            sys.exit(f"{self.name}: a process did not start")

    def rate(self, seconds: float) -> float:
        for pipe in self.pipes:
            pipe.send(seconds)
        rates, shares = zip(*(pipe.recv() for pipe in self.pipes), strict=True)
        self.shares.extend(shares)
        return sum(rates)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


def compare(shape: dict[str, Any], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each variant and repeat, then one for each variant with its ratios."""
    counts = sorted({(1, 1), (given.processes, 1), *itertools.product({1, given.processes}, given.stacks)})
    variants = [Variant(shape, *count, way, given) for count in counts for way in given.ways]
    for variant in variants:
        variant.wait()
    rates: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for repeat in range(given.repeats):
        for variant in variants[:: 1 if repeat % 2 else -1]:
            rates[variant.name].append(variant.rate(given.seconds))
            yield {**shape, "variant": variant.name, "repeat": repeat, "tokens_per_s": round(rates[variant.name][-1])}
    for variant in variants:
        variant.end()
        own = rates[variant.name]
        row = {**shape, "variant": variant.name, "tokens_per_s": round(statistics.median(own))}
        row["update"] = round(statistics.median(variant.shares), 3)
        for ratio, base in (("times_one", "1 x 1"), ("times_processes", f"{variant.processes} x 1")):
            ratios = [a / b for a, b in zip(own, rates[base], strict=True)]
            lower, median, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            row[ratio] = [round(value, 2) for value in (median, lower, upper)]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 32])
    parser.add_argument("--stacks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[480, 2040], help="of a step of one run")
    parser.add_argument("--seq-len", type=int, default=24)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of steps of one variant in one repeat")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:1])
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds: on a machine with other work")
    parser.add_argument("--json", help="append a row after each variant of each repeat to this file, then the ratios")
    given = parser.parse_args()
    print(
        f"{'width':>5} {'layers':>6} {'tokens':>6}  {'variant':22} {'tokens/s':>9}  times 1 x 1 (quartiles)  "
        "times P x 1       update"
    )
    for width, layers, tokens in itertools.product(given.widths, given.layers, given.tokens):
        heads, tokens = max(1, width // 16), tokens // given.seq_len * given.seq_len
        sizes = {"d_model": width, "n_layers": layers, "n_heads": heads}
        for row in compare({**sizes, "seq_len": given.seq_len, "batch_tokens": tokens}, given):
            if given.json:
                with open(given.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
            if "repeat" in row:
                continue
            alone, beside = ("{:.2f} ({:.2f}-{:.2f})".format(*row[name]) for name in ("times_one", "times_processes"))
            shape = f"{width:5} {layers:6} {tokens:6}  {row['variant']:22} {row['tokens_per_s']:9,}"
            print(f"{shape}  {alone:23}  {beside:16}  {row['update']:.1%}", flush=True)


if __name__ == "__main__":
    main()
