"""Our training steps against those of `transformers`, or of the same model in PyTorch's own modules (`plain`), with the
same weights, batches and optimizer.

    python benchmarks/train.py                       # 12 layers, width 128, T 256, batch 16, fp32, on the CPU
    python benchmarks/train.py --preset experts      # the same with 8 experts, against Mixtral
    python benchmarks/train.py --preset small        # width 32, 64, 4 to 32 layers, 2,048 tokens a step, against plain
    python benchmarks/train.py --observe             # the cost of observing residual variance

A step is forward, backward, clipping and fused AdamW. The variants take turns, in alternating order; a ratio is of
times of one repeat, so that other load affects both. Ours is the step of the training loop; for several runs trained as
one model, a run's share of it. With one CPU thread a time is the thread's CPU time, which other processes affect only
through the caches. Memory is the growth of the resident set of a separate process (Linux). `--top` also profiles: the
share of time outside matrix products, and the slowest operations. For a GPU: `benchmarks/gpu/train_rates.py`.
"""

import argparse
import copy
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain import PlainLlama
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.exchange.architecture import architecture
from sparsedepth.exchange.export import save_model
from sparsedepth.measure.suite import observe_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.estimate import OBSERVED_TOKENS
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.train.devices import ALONE
from sparsedepth.train.feed import Batch
from sparsedepth.train.loop import TrainingState
from sparsedepth.train.optimizer import learning_rate, make_optimizer
from sparsedepth.train.runtime import Runtime, resolve
from sparsedepth.train.stack import StackedStep

CPU = dict(n_layers=12, d_model=128, n_heads=4, d_ff=352, seq_len=256, batch_tokens=4096, precision="fp32")
EXPERTS = dict(n_experts=8, top_k=2, balance_loss=0.0, router_z_loss=0.0)
SMALL = [
    dict(d_model=width, n_heads=width // 16, n_layers=layers, seq_len=32, batch_tokens=2048, vocab_size=64)
    for width in (32, 64)
    for layers in (4, 12, 32)
]
PRESETS: dict[str, list[dict[str, Any]]] = {
    "cpu": [CPU],
    "experts": [{**CPU, **EXPERTS}],
    "quick": [{**CPU, "n_layers": 2, "batch_tokens": 1024}],
    "small": SMALL,
}
PRODUCTS = ("mkldnn::_linear_pointwise", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")

STACKED = "ours, 4 runs as one model"
RUNS_OF_STEP = {STACKED: 4}
"""variant -> number of runs that one step trains; 1 if not listed"""

Step = Callable[[int], Tensor]
"""Does the training step with that number; returns its cross-entropy, on the device."""


def batch(config: RunConfig, step: int) -> Batch:
    shape = (config.batch_tokens // config.seq_len, config.seq_len + 1)
    return Batch.of(next_tokens(np.random.default_rng(step).integers(config.vocab_size, size=shape)))


@functools.lru_cache(maxsize=1)
def drawn(config: RunConfig) -> Decoder:
    """Drawn once for all variants: a billion normals take half a minute on the host."""
    return Decoder(config, config.seed)


def ours(config: RunConfig, runtime: Runtime) -> Step:
    model = ALONE.place_model(copy.deepcopy(drawn(config)), runtime.device).train()
    model.use_kernels(**runtime.kernels)
    state = TrainingState(model, config, runtime, ALONE)

    def step(number: int) -> Tensor:
        state.take_step(batch(config, number).to(runtime.device))
        return state.recent.pop()[0]

    return step


def stacked(config: RunConfig, runtime: Runtime) -> Step:
    """A step of several runs with different seeds as one model, like a sweep's worker with small runs."""
    configs = [config.model_copy(update={"seed": config.seed + i}) for i in range(RUNS_OF_STEP[STACKED])]
    models = [ALONE.place_model(Decoder(run, run.seed), runtime.device).train() for run in configs]
    states = [TrainingState(model, run, runtime, ALONE) for model, run in zip(models, configs, strict=True)]
    stack = StackedStep(states)

    def step(number: int) -> Tensor:
        for state in states:
            state.batch = batch(config, number).to(runtime.device)
        stack.take()
        for state in states:
            state.take_step(state.batch)
        losses = [state.recent.pop()[0] for state in states]
        return losses[0]

    return step


def stepped(model: nn.Module, loss_of: Callable[[Batch], Tensor], config: RunConfig, runtime: Runtime) -> Step:
    """The step of a third-party model, with our optimizer, schedule and clipping."""
    optimizer = make_optimizer(model, config)

    def step(number: int) -> Tensor:
        given = batch(config, number).to(runtime.device)
        for group in optimizer.param_groups:  # standard parametrisation
            group["lr"] = learning_rate(config, number)
        with runtime.autocast:
            loss = loss_of(given)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def theirs(config: RunConfig, runtime: Runtime) -> Step:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Decoder(config), architecture(config), Path(folder), eos_token_id=0)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, attn_implementation="sdpa")
    model.to(runtime.device).train()
    objective: Any = torch.compile(model, dynamic=False) if runtime.compile else model

    def loss_of(given: Batch) -> Tensor:
        targets_BT = given.targets.contiguous()
        return objective(input_ids=given.inputs, labels=targets_BT, shift_labels=targets_BT, use_cache=False).loss

    return stepped(model, loss_of, config, runtime)


def plain(config: RunConfig, runtime: Runtime) -> Step:
    model = PlainLlama(drawn(config)).to(runtime.device).train()
    objective = torch.compile(model, dynamic=False) if runtime.compile else model
    return stepped(model, lambda given: objective(given.inputs, given.targets), config, runtime)


def against_plain(config: RunConfig, wanted: RuntimeConfig) -> dict[str, Callable[[], Step]]:
    """Eager and compiled by name, the reference first."""
    eager, compiled = (resolve(config, wanted.model_copy(update={"compile": on})) for on in (False, True))
    own: dict[str, Callable[[], Step]] = {
        "ours, eager": lambda: ours(config, eager),
        "ours, compiled": lambda: ours(config, compiled),
    }
    own[STACKED] = lambda: stacked(config, eager)
    if config.n_experts:
        return own
    return {"plain, eager": lambda: plain(config, eager), **own, "plain, compiled": lambda: plain(config, compiled)}


def show_top(name: str, step: Step, n_shown: int) -> float:
    """Profile three steps: print the slowest operations; returns the share of time outside matrix products."""
    for number in range(2):
        step(number)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(3):
            step(number).item()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"\n{name}: operations that take most")
    for event in events[:n_shown]:
        print(f"  {event.key[:60]:60} {event.self_cpu_time_total / total:6.1%} {event.count:6}")
    return 1 - sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS) / total


def variants(config: RunConfig, wanted: RuntimeConfig) -> dict[str, Callable[[], Step]]:
    """Variants by name, transformers' first."""
    eager = resolve(config, wanted)
    compiled = dataclasses.replace(eager, compile=True)
    return {
        "theirs, eager": lambda: theirs(config, eager),
        "ours, eager": lambda: ours(config, eager),
        "theirs, compiled": lambda: theirs(config, compiled),
        **({} if config.n_experts else {"plain, compiled": lambda: plain(config, compiled)}),
        "ours, compiled": lambda: ours(config, compiled),
    }


def timed(step: Step, number: int) -> tuple[float, float]:
    """Seconds, and the loss."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    loss = step(number).item()
    return clock() - began, loss


@dataclasses.dataclass
class Result:
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    memory: int = 0


def take_turns(found: dict[str, Callable[[], Step]], repeats: int) -> dict[str, Result]:
    """Time all variants on the same steps, without the first two."""
    results = {name: Result() for name in found}
    steps = {name: make() for name, make in found.items()}
    for number in range(repeats + 2):
        for name in list(found)[:: 1 if number % 2 else -1]:
            seconds, loss = timed(steps[name], number)
            results[name].seconds.append(seconds / RUNS_OF_STEP.get(name, 1))
            results[name].losses.append(loss)
    for result in results.values():
        del result.seconds[:2]
    return results


def memory_of(name: str, arguments: list[str]) -> int:
    """Growth of the resident set of a fresh process by two steps of one variant, in bytes."""
    command = [sys.executable, __file__, *arguments, "--memory-of", name]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def grown(make: Callable[[], Step]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _resident("VmRSS")
    step = make()
    for number in range(2):
        step(number)
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def ratio(base: Result, result: Result) -> tuple[str, float]:
    """How many times as fast as `base` in the same repeats: median (quartiles; range), and the median."""
    ratios = [a / b for a, b in zip(base.seconds, result.seconds, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return f"{median:.2f} ({lower:.2f}-{upper:.2f}; {min(ratios):.2f}-{max(ratios):.2f})", median


def report(config: RunConfig, results: dict[str, Result], rows: Path | None = None) -> None:
    flops = cost(config).train_flops(config.batch_tokens)
    first, *_ = results.values()
    print(f"\n{cost(config).params_total / 1e6:,.1f}M parameters, {config.n_layers} layers, T {config.seq_len}")
    unit = "GFLOP/s"
    print(f"{'':34}tokens/s {unit:>9} memory GB  times theirs, median (quartiles; range)  largest loss difference")
    for name, result in results.items():
        seconds = statistics.median(result.seconds)
        used = flops / seconds / 1e9
        spread, times = ratio(first, result)
        off = max(abs(a - b) for a, b in zip(first.losses, result.losses, strict=True))
        speed = f"{config.batch_tokens / seconds:12,.0f} {used:9.1f} {result.memory / 1e9:9.2f}"
        print(f"{name:30}{speed}  {spread:40}{off:.1e}", flush=True)
        if rows:
            sizes = {"params": cost(config).params_total, "n_layers": config.n_layers, "d_model": config.d_model}
            rate = {"tokens_per_second": round(config.batch_tokens / seconds), unit: round(used, 2)}
            row = {**sizes, "seq_len": config.seq_len, "variant": name, **rate, "times": round(times, 2)}
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    for name in ("theirs, compiled", "plain, compiled"):
        if name in results:
            print(f"ours, compiled, times {name}: {ratio(results[name], results['ours, compiled'])[0]}")
    tolerance = 1e-4 if config.precision == "fp32" else 5e-2
    worst = max(abs(a - b) for r in results.values() for a, b in zip(first.losses, r.losses, strict=True))
    if worst > tolerance:
        sys.exit(f"the losses differ by {worst:.2g}, more than {tolerance}: these are not the same steps")


def observation(config: RunConfig, runtime: Runtime, repeats: int) -> None:
    """Time of one observation, as a share of the observe_every steps between two."""
    step, model = ours(config, runtime), Decoder(config).to(runtime.device)
    n_sequences = max(1, OBSERVED_TOKENS // config.seq_len)
    tokens_NT = batch(config, 0).inputs[:n_sequences]
    shares = []
    for number in range(repeats + 1):
        seconds, _ = timed(step, number)
        began = time.perf_counter()
        observe_variance(ProbedDecoder(model), tokens_NT, number)
        shares.append((time.perf_counter() - began) / (seconds * config.observe_every))
    share, *rest = statistics.median(shares[1:]), min(shares[1:]), max(shares[1:])
    print(f"observing {tokens_NT.numel()} tokens every {config.observe_every} steps: {share:.2%} of the time "
          f"({rest[0]:.2%}-{rest[1]:.2%})")  # fmt: skip


def configs(preset: str, batch_tokens: int | None) -> list[RunConfig]:
    fixed = {"lr": 1e-3, "weight_decay_on": "all", "fit_tokens": 16384}
    sized = [{**shape, "batch_tokens": batch_tokens or shape["batch_tokens"]} for shape in PRESETS[preset]]
    return [
        build(RunConfig, {**fixed, **shape, "train_tokens": shape["batch_tokens"] * 1000}, preset) for shape in sized
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--widths", type=int, nargs="+", help="of the preset's sizes those of these widths")
    parser.add_argument("--layers", type=int, nargs="+", help="those of these depths")
    parser.add_argument("--batch-tokens", type=int, help="of a step, in place of the preset's")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--observe", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled variants out")
    parser.add_argument("--top", type=int, default=0, help="profile each variant and print this many operations")
    parser.add_argument("--json", type=Path, help="append a line for each variant to this file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    wanted = RuntimeConfig(device="cpu")
    for config in configs(given.preset, given.batch_tokens):
        if config.d_model not in (given.widths or [config.d_model]):
            continue
        if config.n_layers not in (given.layers or [config.n_layers]):
            continue
        if given.observe:
            observation(config, resolve(config, wanted), given.repeats)
            continue
        torch._dynamo.reset()  # else a second size would be compiled with symbolic shapes
        found = (against_plain if given.preset == "small" else variants)(config, wanted)
        found = {name: make for name, make in found.items() if not (given.no_compile and "compiled" in name)}
        if given.memory_of:
            print(grown(found[given.memory_of]))
            return
        results = take_turns(found, given.repeats)
        if given.preset != "small":
            same = ["--preset", given.preset, "--threads", str(given.threads)]
            for name, result in results.items():
                result.memory = memory_of(name, same)
        report(config, results, given.json)
        for name, make in found.items() if given.top else ():
            share = show_top(name, make(), given.top)
            print(f"{name}: {share:.0%} of the time outside of matrix products", flush=True)


if __name__ == "__main__":
    main()
