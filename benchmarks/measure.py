"""The measures against a naive implementation, on the same model and tokens.

    python benchmarks/measure.py --layers 24 --width 256 --sequences 16 --length 256 --repeats 3 --threads 1
    python benchmarks/measure.py --quick
    python benchmarks/measure.py --memory

Naive, at micro-batch 4 without gradients: one full forward pass per intervention (causal, permutation); full passes and
a least-squares solve per layer, then a pass with its replacement (usefulness); one vector-Jacobian product per
dimension (Jacobian, released form; others would need one per dimension and position), timed on the middle block and
multiplied by the number of blocks. Ours computes two Jacobian forms in its time: released and per token. Both take
turns, in alternating order; a ratio is of times of one repeat. The model is random, since speed does not depend on the
weights. At full size on one core a repeat takes about an hour.

Shapes: B sequences, S = T + 1 tokens of one sequence, T positions, D width of the residual stream.
"""

import argparse
import itertools
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.config.load import build
from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.measure.derivatives import add_jacobian_rows
from sparsedepth.measure.interventions import add_causal_rows, permutation_effect
from sparsedepth.measure.measurements import Measurements, Scored
from sparsedepth.measure.usefulness import add_usefulness_rows
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import stream
from sparsedepth.probe.probed_model import ProbedDecoder

MICRO_BATCH = 4
TOLERANCE = 1e-4
N_PROBES = 4
DEPTHS = (12, 24, 48)

Plan = Sequence[int | Callable[[Tensor], Tensor] | None]
"""What runs at each layer: the block with that number, a function, or nothing."""


def passes(probed: ProbedDecoder, tokens_BS: Tensor, plan: Plan) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Full forward passes in micro-batches: x_0 .. x_L, and the loss of every sequence."""
    for part_BS in tokens_BS.split(MICRO_BATCH):
        states = [probed.embed(part_BS[:, :-1])]
        for what in plan:
            x_BTD = states[-1]
            after_BTD = probed.block(what, x_BTD) if isinstance(what, int) else x_BTD if what is None else what(x_BTD)
            states.append(after_BTD)
        logits_BVT = probed.logits(states[-1]).transpose(1, 2)
        yield states, F.cross_entropy(logits_BVT, part_BS[:, 1:], reduction="none").mean(1)


def loss(probed: ProbedDecoder, tokens_BS: Tensor, plan: Plan) -> float:
    return torch.cat([loss_B for _, loss_B in passes(probed, tokens_BS, plan)]).double().mean().item()


def naive_causal(probed: ProbedDecoder, tokens_BS: Tensor) -> np.ndarray:
    """effect(s, l) over the pairs s < l, then the relative loss increase without each block."""
    order = range(1, probed.n_layers + 1)
    base = [
        ([after - before for before, after in itertools.pairwise(states)], loss_B)
        for states, loss_B in passes(probed, tokens_BS, order)
    ]
    base_loss = torch.cat([loss_B for _, loss_B in base]).mean().item()
    size_L = sum(np.array([update.norm(dim=-1).sum().item() for update in updates]) for updates, _ in base)
    effects, increases = [], []
    for s in order:
        change_L, losses = np.zeros(probed.n_layers), []
        skipped = passes(probed, tokens_BS, [None if layer == s else layer for layer in order])
        for (updates, _), (states, loss_B) in zip(base, skipped, strict=True):
            for layer in range(s + 1, probed.n_layers + 1):
                difference = states[layer] - states[layer - 1] - updates[layer - 1]
                change_L[layer - 1] += difference.norm(dim=-1).sum().item()
            losses.append(loss_B)
        effects.extend((change_L / size_L)[s:])
        increases.append(torch.cat(losses).mean().item() / base_loss - 1)
    return np.array(effects + increases)


def naive_permutation(probed: ProbedDecoder, tokens_BS: Tensor) -> np.ndarray:
    order = range(1, probed.n_layers + 1)
    base = loss(probed, tokens_BS, order)
    plans = ([{a: b, b: a}.get(layer, layer) for layer in order] for a, b in itertools.combinations(order, 2))
    return np.array([abs(loss(probed, tokens_BS, plan) - base) / base for plan in plans])


def naive_usefulness(probed: ProbedDecoder, fit_BS: Tensor, tokens_BS: Tensor) -> np.ndarray:
    order = range(1, probed.n_layers + 1)
    base, increases = loss(probed, tokens_BS, order), []
    for layer in order:
        pairs = [(states[layer - 1], states[layer]) for states, _ in passes(probed, fit_BS, order)]
        x_nD, after_nD = (torch.cat(side).flatten(0, 1).double() for side in zip(*pairs, strict=True))
        design = torch.cat((x_nD, torch.ones_like(x_nD[:, :1])), dim=1)
        # Not lstsq: its only driver on CUDA needs full rank, and x_0 has at most as many dimensions as tokens.
        inverse = torch.linalg.pinv(design.T @ design, hermitian=True)
        solution = (inverse @ (design.T @ after_nD)).float()

        def affine(x_BTD: Tensor, solution: Tensor = solution) -> Tensor:
            return x_BTD @ solution[:-1] + solution[-1]

        increases.append(loss(probed, tokens_BS, [affine if at == layer else at for at in order]) / base - 1)
    return np.array(increases)


def naive_jacobian(probed: ProbedDecoder, tokens_BS: Tensor, layer: int) -> float:
    """||E_s sum_t J_ts - I||_F / D of one block; the model's weights are frozen by the caller."""
    rows_DD: Tensor | float = 0.0
    for states, _ in passes(probed, tokens_BS, range(1, layer)):
        with torch.enable_grad():
            x_BTD = states[-1].detach().requires_grad_()
            after_BTD = probed.block(layer, x_BTD)
        width, rows = x_BTD.shape[-1], []
        for dimension in range(width):
            u_BTD = torch.zeros_like(after_BTD)
            u_BTD[..., dimension] = 1
            rows.append(torch.autograd.grad(after_BTD, x_BTD, u_BTD, retain_graph=True)[0].sum((0, 1)))
        rows_DD = rows_DD + torch.stack(rows)
    mean_DD = torch.as_tensor(rows_DD) / tokens_BS[:, 1:].numel()
    return (torch.linalg.matrix_norm(mean_DD - torch.eye(width, device=probed.device)) / width).item()


def scored_text(tokens_NS: Tensor) -> Scored:
    """All positions are scored; the target is the next token."""
    return Scored(tokens_NS[:, :-1], tokens_NS[:, 1:])


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def measured(add_rows: Callable[..., None], probed: ProbedDecoder, tokens_BS: Tensor, **more: Any) -> Measurements:
    """The rows that a measure adds, with the default settings."""
    scored, rows = scored_text(tokens_BS), Measurements(step=0)
    settings = {"config": MeasureOnlyConfig(jacobian_probes=N_PROBES), "n_tokens": scored.targets.numel(), "rng": rng}
    add_rows(SimpleNamespace(probed=probed, scored=scored, inputs=scored.inputs, **settings, **more), rows)
    return rows


def our_causal(probed: ProbedDecoder, tokens_BS: Tensor) -> np.ndarray:
    rows = measured(add_causal_rows, probed, tokens_BS)
    increases = [row["value"] for row in rows.layers if row["metric"] == "skip_loss_increase"]
    return np.array([row["value"] for row in rows.pairs] + increases)


def our_permutation(probed: ProbedDecoder, tokens_BS: Tensor) -> np.ndarray:
    return np.array([*permutation_effect(probed, scored_text(tokens_BS), rng())[0].values()])


def our_usefulness(probed: ProbedDecoder, fit_BS: Tensor, tokens_BS: Tensor) -> np.ndarray:
    rows = measured(add_usefulness_rows, probed, tokens_BS, fit=fit_BS[:, :-1])
    return np.array([row["value"] for row in rows.layers if row["metric"] == "affine_loss_increase"])


def our_jacobian(probed: ProbedDecoder, tokens_BS: Tensor, layer: int) -> tuple[float, float]:
    """The released form of one block with its standard error (all blocks are measured)."""
    rows = measured(add_jacobian_rows, probed, tokens_BS).layers
    names = ("jacobian_deviation_released", "jacobian_deviation_released_se")
    value, error = ([row["value"] for row in rows if row["metric"] == name][layer - 1] for name in names)
    assert value is not None, "its square is a sum of squares"
    return value, error


def time_one(function: Callable, *arguments: object) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, np.asarray(result)


def build_model(layers: int, options: argparse.Namespace) -> ProbedDecoder:
    fields = {"n_layers": layers, "d_model": options.width, "n_heads": options.heads, "seq_len": options.length}
    config = build(RunConfig, {**fields, "init_std": 0.05}, "benchmark")
    probed = ProbedDecoder(Decoder(config).to(options.device))
    probed.model.requires_grad_(False).eval()
    return probed


def sequences(options: argparse.Namespace, n: int, seed: int) -> Tensor:
    drawn = torch.randint(264, (n, options.length + 1), generator=torch.Generator().manual_seed(seed))
    return drawn.to(options.device)


@torch.no_grad()
def compare(options: argparse.Namespace) -> None:
    probed, tokens_BS = build_model(options.layers, options), sequences(options, options.sequences, 0)
    n_fit = max(options.sequences, 2 * options.width // options.length + 1)
    fit_BS, middle = sequences(options, n_fit, 1), (options.layers + 1) // 2
    scores = {
        "causal": (our_causal, naive_causal, (tokens_BS,), 1),
        "usefulness": (our_usefulness, naive_usefulness, (fit_BS, tokens_BS), 1),
        "jacobian": (our_jacobian, naive_jacobian, (tokens_BS, middle), options.layers),
        "permutation": (our_permutation, naive_permutation, (tokens_BS,), 1),
    }
    our_causal(probed, tokens_BS[:1])  # the first pass includes setup
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (*scores, "suite")}
    for repeat in range(options.repeats):
        for name, (ours, naive, arguments, times) in scores.items():
            order = [ours, naive][:: (-1) ** repeat]
            timed = {implementation: time_one(implementation, probed, *arguments) for implementation in order}
            agree(name, timed[ours][1], timed[naive][1])
            fast, slow, sampled = timed[ours][0], timed[naive][0] * times, timed[ours][0]
            if name == "permutation":
                sampled, _ = time_one(permutation_effect, probed, scored_text(tokens_BS), rng(), options.pairs)
            seconds[name].append((fast, slow, sampled))
            report(f"{name}, repeat {repeat + 1}", [seconds[name][-1]])
        fast, slow, sampled = (sum(seconds[name][-1][i] for name in scores) for i in range(3))
        seconds["suite"].append((fast, slow, sampled))
    print(f"\n{'score':24} {'ours s':>9} {'naive s':>10} {'ratio':>7} {'spread':>13} {'with pairs sampled':>19}")
    for name, rows in seconds.items():
        report(name, rows)


def report(name: str, rows: Sequence[tuple[float, float, float]]) -> None:
    """Medians over the repeats; the spread is the smallest and largest ratio."""
    fast, slow, sampled = np.array(rows).T
    ratio = slow / fast
    spread = f"{ratio.min():.2f} .. {ratio.max():.2f}"
    print(
        f"{name:24} {np.median(fast):9.2f} {np.median(slow):10.2f} {np.median(ratio):7.2f} {spread:>13}"
        f" {np.median(slow / sampled):19.2f}",
        flush=True,
    )


def agree(name: str, ours: np.ndarray, obvious: np.ndarray) -> None:
    """Raises SystemExit if the two implementations disagree."""
    if name == "jacobian":
        value, standard_error = ours
        distance, allowed = abs(value - obvious), 4 * standard_error
    else:
        distance, allowed = np.abs(ours - obvious).max(), TOLERANCE
    print(f"{name}: the two implementations differ by {distance:.1e} (allowed {allowed:.1e})", flush=True)
    if not distance <= allowed:
        raise SystemExit(f"{name}: {distance:.2e} is more than {allowed:.2e}")


@torch.no_grad()
def growth(options: argparse.Namespace) -> None:
    """Seconds of each of our scores by depth, at a quarter of the sequences."""
    n_sequences = max(1, options.sequences // 4)
    tokens_BS = sequences(options, n_sequences, 0)
    fit_BS = sequences(options, max(n_sequences, 2 * options.width // options.length + 1), 1)
    print(f"\nseconds of ours by depth, {n_sequences} sequences\n{'score':24}" + "".join(f"{n:>9}" for n in DEPTHS))
    rows: dict[str, list[float]] = {}
    for depth in DEPTHS:
        probed = build_model(depth, options)
        for name, run in {
            "causal": (our_causal, tokens_BS),
            "usefulness": (our_usefulness, fit_BS, tokens_BS),
            "jacobian": (our_jacobian, tokens_BS, 1),
            "permutation, sampled": (permutation_effect, tokens_BS, rng(), options.pairs),
            "permutation": (our_permutation, tokens_BS),
        }.items():
            rows.setdefault(name, []).append(time_one(run[0], probed, *run[1:])[0])
    for name, values in rows.items():
        print(f"{name:24}" + "".join(f"{value:9.2f}" for value in values), flush=True)


def memory_parts(options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The workloads, each run once in a separate process. 'nothing' builds only the model and the tokens."""
    probed, tokens_BS = build_model(options.layers, options), sequences(options, options.sequences, 0)
    fit_BS = sequences(options, options.sequences, 1)

    @torch.no_grad()
    def forward() -> None:
        states = list(stream(probed, tokens_BS[:, :-1]))
        F.cross_entropy(probed.logits(states[-1]).flatten(0, 1), tokens_BS[:, 1:].flatten())

    return {
        "nothing": lambda: None,
        "forward": forward,
        "causal": lambda: our_causal(probed, tokens_BS),
        "permutation": lambda: permutation_effect(probed, scored_text(tokens_BS), rng(), 4),
        "usefulness": lambda: our_usefulness(probed, fit_BS, tokens_BS),
        "jacobian": lambda: our_jacobian(probed, tokens_BS, 1),
    }


def memory(arguments: Sequence[str]) -> None:
    """Peak memory of each score relative to one plain forward pass that records all states, each in its own process."""
    peaks: dict[str, int] = {}
    for name in ("nothing", "forward", "causal", "permutation", "usefulness", "jacobian"):
        command = [sys.executable, __file__, *arguments, "--memory-of", name]
        peaks[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"\n{'peak memory':24} {'MiB':>9} {'/ forward':>10}")
    for name, kib in peaks.items():
        print(f"{name:24} {kib / 1024:9.0f} {kib / peaks['forward']:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 24), ("width", 256), ("sequences", 16), ("length", 256), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=32, help="pairs of blocks where permutation is sampled")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="8 layers of width 64, 4 x 64 tokens, 2 repeats")
    parser.add_argument("--growth", action="store_true", help="also the time of each score by depth")
    parser.add_argument("--memory", action="store_true", help="the peak memory of each score, and no times")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(layers=8, width=64, sequences=4, length=64, repeats=2, pairs=8)
    torch.set_num_threads(options.threads)
    if options.memory_of:
        memory_parts(options)[options.memory_of]()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB on Linux
        return
    if options.memory:
        memory([word for word in sys.argv[1:] if word != "--memory"])
        return
    compare(options)
    if options.growth:
        growth(options)


if __name__ == "__main__":
    main()
