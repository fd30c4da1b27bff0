"""Do the variance bounds of two papers hold? In one model with fixed weights, vary one thing and fit a slope.

    python analysis/theorems.py RUN|RESULTS [...]

RUN is the folder of a run with its weights. Each check fits ln y = a + b ln x by least squares, once in each layer
(changed alone: it reads the unchanged stream) or, if x is the layer, in each sequence. The slope is the mean b, with
Student's interval over layers or sequences.

    2603.15389, theorem 4   x = keys T that a token sees;  y = variance of attention's output, both means over tokens
                            with n/2 to n keys, n = 2, 4, 8, .. (harmonic for T);  b = -1
                theorem 5   x = number h of H heads whose outputs are averaged (random choice);  same y;  b = -1
                            x = groups G of heads, each with the mean keys and values of its heads;  same y;  b = 0,
                            since the theorem's 1/(T H) has no G
                theorem 6   x = experts k per token;  y = variance of the experts' output;  b = -1
                            y = E ||J' v||^2, J their Jacobian, v standard normal;  b = -1
    2502.05795, theorem 3.3 x = layer l, Pre-LN;  y = residual variance of layer l;  b >= 1, between c l and c exp(l)
                            y = ||d x_l / d x_1||, bounded, by random v;  b <= 0
                theorem 4.3 the same with LNS;  1 <= b < 2, and unbounded: b > 0

3.3 and 4.3 are checked on the trained weights and, to see the formula alone, on the same weights with LNS added or
removed. For RESULTS the residual variances of both are checked on the stored rows: a slope per run, averaged within a
seed, Student's over seeds. 'holds within the interval' if the interval contains a slope that the theorem allows; -1 and
0 are claimed to within 0.1, since they hold for an expectation over weights, and a model has few.

Shapes: B sequences, T tokens of one sequence, D width of the residual stream, L layers, H heads, G groups, E experts.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from estimate import Estimate, estimate
from script import read_runs, run_script
from torch import Tensor

from sparsedepth.measure.variance import variance_by_sequence
from sparsedepth.model.block import Block
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.feedforward import Experts
from sparsedepth.probe.folder import CONFIG
from sparsedepth.probe.fork import probing, stream
from sparsedepth.probe.load import RUN_CONFIG, load_model
from sparsedepth.probe.probed_model import ProbedDecoder, ProbedModel
from sparsedepth.probe.text import measure_source
from sparsedepth.store.connection import open_store
from sparsedepth.words.plain_text import wrapped

CLAIM = (
    "attention's output varies as 1/T (theorem 4) and 1/(T H) (5), an expert mixture's output and Jacobian as 1/k (6) "
    "(2603.15389); residual variance grows at least linearly in depth and the gradient end to end is bounded with "
    "Pre-LN (3.3), with LNS variance grows less than quadratically and the gradient without bound (4.3) (2502.05795)"
)

N_TOKENS = 4096
"""Most held-out tokens of a check."""
N_DRAWS = 4
"""Random choices of heads of one size, and random vectors."""

MINUS_ONE, ZERO, FROM_ONE, BELOW_TWO = (-1.1, -0.9), (-0.1, 0.1), (1.0, math.inf), (1.0, 2.0)
AT_MOST_0, ABOVE_0 = (-math.inf, 0.0), (1e-9, math.inf)


@dataclass(frozen=True, kw_only=True)
class Check:
    theorem: str
    what: str
    """y over x"""
    allowed: tuple[float, float]
    """Slopes that the theorem allows."""
    slope: Estimate
    units: str
    """What the interval is over."""

    @property
    def verdict(self) -> str:
        if self.slope.lo is None or self.slope.hi is None:
            return "no interval"
        meets = self.slope.lo <= self.allowed[1] and self.slope.hi >= self.allowed[0]
        return "holds within the interval" if meets else "does not hold"

    def __str__(self) -> str:
        lo, hi = self.allowed
        ends = f"at most {hi:g}" if lo == -math.inf else f"{lo:.1g} or more" if lo >= 1 else "above 0"
        claimed = f"{lo:g} to {hi:g}" if math.isfinite(hi - lo) else ends
        measured = f"slope {self.slope} over {self.slope.n} {self.units}"
        return f"Theorem {self.theorem}, {self.what}: {measured}; claimed {claimed}: {self.verdict}"


def slopes(x_X: Sequence[float] | np.ndarray, y_UX: np.ndarray) -> np.ndarray:
    """b of ln y = a + b ln x for each unit whose y are all above 0."""
    y_UX = y_UX[(y_UX > 0).all(1)]
    u_X = np.log(np.asarray(x_X, dtype=float))
    u_X = u_X - u_X.mean()
    return np.log(y_UX) @ u_X / (u_X @ u_X)


def check(
    theorem: str, what: str, x_X: Sequence[float], y_UX: np.ndarray, allowed: tuple[float, float], units: str
) -> Check:
    shown = f"{what} {', '.join(f'{x:.3g}' for x in x_X)}" if len(x_X) < 9 else f"{what} {x_X[0]:g} to {x_X[-1]:g}"
    return Check(theorem=theorem, what=shown, allowed=allowed, slope=estimate(slopes(x_X, y_UX)), units=units)


# One model with fixed weights


@torch.no_grad()
def branch_variances(probed: ProbedModel, states: Sequence[Tensor], branch: int) -> Tensor:
    """variance_LBT over D of the output of attention (0) or the feed-forward part (1), each layer reading `states`."""
    outputs = [probed.branches(layer, states[layer - 1]) for layer in range(1, probed.n_layers + 1)]
    if any(branches is None for branches in outputs):
        raise ValueError("the blocks of this model are not sums of stream, attention and feed-forward output")
    return torch.stack([branches[branch].double().var(-1) for branches in outputs if branches is not None])


def changed(probed: ProbedDecoder, change: Callable[[Block], None], tokens_BT: Tensor) -> ProbedDecoder:
    """A copy of the model with each block changed, after these tokens."""
    other = ProbedDecoder(copy.deepcopy(probed.model))
    for block in other.model.blocks:
        change(block)
    other.embed(tokens_BT)
    return other


def average_of_heads(heads: Sequence[int]) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        weight, width = block.attention.output.weight, block.attention.d_head
        share = torch.zeros(weight.shape[1] // width)
        share[list(heads)] = 1 / len(heads)
        weight.mul_(share.repeat_interleave(width))

    return change


def mean_of_groups(n_groups: int) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        for weight in (block.attention.key.weight, block.attention.value.weight):
            of_group = weight.unflatten(0, (n_groups, -1, block.attention.d_head))
            weight.copy_(of_group.mean(1, keepdim=True).expand_as(of_group).flatten(0, 2))

    return change


def experts_of(k: int) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        if isinstance(block.ffn, Experts):
            block.ffn.top_k = k

    return change


def by_keys(probed: ProbedDecoder, tokens_BT: Tensor) -> Iterator[Check]:
    length = tokens_BT.shape[1]
    n_keys = min(length, probed.model.config.sliding_window or length)  # later tokens see no more
    spans = [slice(2**power // 2, 2**power) for power in range(1, n_keys.bit_length())]
    if len(spans) < 2:
        return
    keys_X = [1 / np.mean([1 / (place + 1) for place in range(span.start, span.stop)]) for span in spans]
    variance_LBT = branch_variances(probed, list(stream(probed, tokens_BT)), 0)
    y_LX = np.stack([variance_LBT[:, :, span].mean((1, 2)).numpy() for span in spans], axis=1)
    yield check("4", "variance of attention's output, over visible keys", keys_X, y_LX, MINUS_ONE, "layers")


def by_heads(probed: ProbedDecoder, tokens_BT: Tensor) -> Iterator[Check]:
    config, states = probed.model.config, list(stream(probed, tokens_BT))
    rng = np.random.default_rng(0)

    def mean_variance(change: Callable[[Block], None]) -> np.ndarray:
        return branch_variances(changed(probed, change, tokens_BT), states, 0).mean((1, 2)).numpy()

    sizes = [2**power for power in range(config.n_heads.bit_length()) if 2**power <= config.n_heads]
    drawn = [[rng.choice(config.n_heads, h, replace=False) for _ in range(N_DRAWS)] for h in sizes]
    y_LX = np.stack([np.mean([mean_variance(average_of_heads(heads)) for heads in draws], 0) for draws in drawn], 1)
    if len(sizes) > 1:
        yield check("5", "variance of attention's output, over heads averaged", sizes, y_LX, MINUS_ONE, "layers")
    n_kv_heads = config.n_kv_heads or config.n_heads
    groups = [g for g in range(1, n_kv_heads + 1) if n_kv_heads % g == 0]
    if len(groups) > 1:
        y_LX = np.stack([mean_variance(mean_of_groups(g)) for g in groups], 1)
        yield check("5", "variance of attention's output, over groups", groups, y_LX, ZERO, "layers")


def by_experts(probed: ProbedDecoder, tokens_BT: Tensor) -> Iterator[Check]:
    config, states = probed.model.config, list(stream(probed, tokens_BT))
    if not config.n_experts:
        return
    sizes = [2**power for power in range(config.n_experts.bit_length()) if 2**power <= config.n_experts]
    others = [changed(probed, experts_of(k), tokens_BT) for k in sizes]
    routed = slice(config.n_dense_layers, None)
    y_LX = np.stack([branch_variances(other, states, 1).mean((1, 2)).numpy()[routed] for other in others], 1)
    yield check("6", "variance of the experts' output, over experts per token", sizes, y_LX, MINUS_ONE, "layers")
    y_LX = np.stack([expert_jacobians(other, states)[routed] for other in others], 1)
    yield check("6", "E ||J' v||^2 of the experts, over experts per token", sizes, y_LX, MINUS_ONE, "layers")


def expert_jacobians(probed: ProbedDecoder, states: Sequence[Tensor]) -> np.ndarray:
    """E ||J' v||^2 over tokens and v, by layer, J of the feed-forward part at the stream after attention."""
    draws, squares = torch.Generator().manual_seed(0), []
    for layer, block in enumerate(probed.model.blocks, start=1):
        branches = probed.branches(layer, states[layer - 1])
        assert branches is not None
        u_BTD = (states[layer - 1] + branches[0]).detach().requires_grad_()
        with torch.enable_grad():
            added_BTD = block.ffn_update(u_BTD)
            v_BTD = torch.randn(added_BTD.shape, generator=draws)
            (gradient_BTD,) = torch.autograd.grad(added_BTD, u_BTD, v_BTD)
        squares.append(gradient_BTD.double().square().sum(-1).mean().item())
    return np.array(squares)


def by_depth(probed: ProbedModel, tokens_BT: Tensor, is_lns: bool, change: str) -> Iterator[Check]:
    theorem, growth, gradient = ("4.3", BELOW_TWO, ABOVE_0) if is_lns else ("3.3", FROM_ONE, AT_MOST_0)
    layers = list(range(1, probed.n_layers + 1))
    if len(layers) < 3:
        return
    y_BL = variance_by_sequence(probed, tokens_BT)[:, 1:]
    yield check(theorem, f"residual variance{change}, over layers", layers, y_BL, growth, "sequences")
    y_BL = stream_jacobians(probed, tokens_BT)
    yield check(theorem, f"||d x_l / d x_1||{change}, over layers", layers, y_BL, gradient, "sequences")


def stream_jacobians(probed: ProbedModel, tokens_BT: Tensor) -> np.ndarray:
    """norm_BL: sqrt(E ||J' v||^2 / (T D)), J = d x_l / d x_1, layers 1..L, of each sequence; 1 at layer 1."""
    draws, squares = torch.Generator().manual_seed(0), []
    with torch.enable_grad():
        states = [probed.block(1, probed.embed(tokens_BT)).detach().requires_grad_()]
        for layer in range(2, probed.n_layers + 1):
            states.append(probed.block(layer, states[-1]))
        for x_BTD in states:
            of_draws = []
            for _ in range(N_DRAWS):
                v_BTD = torch.randn(x_BTD.shape, generator=draws)
                (gradient_BTD,) = torch.autograd.grad(x_BTD, states[0], v_BTD, retain_graph=True)
                of_draws.append(gradient_BTD.double().square().mean((1, 2)))
            squares.append(torch.stack(of_draws).mean(0))
    return torch.stack(squares, dim=1).sqrt().numpy()


def checks_of_model(probed: ProbedDecoder, tokens_BT: Tensor) -> Iterator[Check]:
    """All checks of one model."""
    model = probed.model
    assert isinstance(model, Decoder)
    with probing(probed, gradients=True):
        for checks in (by_keys, by_heads, by_experts):
            yield from checks(probed, tokens_BT)
        if model.config.norm == "pre" and model.config.depth_scale in ("none", "lns"):
            for scale in ("none", "lns"):
                as_trained = scale == model.config.depth_scale
                other = changed(
                    probed, lambda block, scale=scale: setattr(block, "is_scaled", scale == "lns"), tokens_BT
                )
                change = "" if as_trained else f", {'with' if scale == 'lns' else 'without'} LNS on the same weights"
                yield from by_depth(other, tokens_BT, scale == "lns", change)


# Stored rows of runs with several seeds

ROWS = """
    select runs.n_layers, depth_scale, seed, layers.run_id, layer, value
    from layers join runs using (run_id)
    join (select run_id, max(step) as step from layers where metric = 'residual_variance' group by all) as last
    using (run_id, step)
    where metric = 'residual_variance' and layer > 0 and norm = 'pre' and depth_scale in ('none', 'lns')
    and outcome = 'ok' and runs.n_layers >= 3 order by all
"""


def checks_of_rows(paths: Sequence[str]) -> Iterator[Check]:
    """Theorems 3.3 and 4.3 for the stored residual variances, at each depth."""
    with open_store(*paths) as store:
        rows = store.frame(ROWS)
    kinds = rows[["n_layers", "depth_scale"]].drop_duplicates().sort_values(["n_layers", "depth_scale"])
    for n_layers, scale in kinds.itertuples(index=False):
        group = rows[(rows["n_layers"] == n_layers) & (rows["depth_scale"] == scale)]
        y_RL = group.pivot_table(index=["seed", "run_id"], columns="layer", values="value")
        slope = y_RL.apply(lambda y_L: slopes(y_L.index, y_L.to_numpy()[None]).mean(), axis=1).dropna()
        by_seed = slope.groupby("seed").mean()
        yield Check(
            theorem="4.3" if scale == "lns" else "3.3",
            what=f"residual variance of {len(slope)} runs, over layers 1 to {n_layers}",
            allowed=BELOW_TWO if scale == "lns" else FROM_ONE,
            slope=estimate(by_seed.to_numpy()),
            units="seeds",
        )


def held_out(folder: Path) -> tuple[ProbedDecoder, Tensor]:
    loaded = load_model(folder)
    assert loaded.config is not None and isinstance(loaded.probed, ProbedDecoder)
    length = loaded.config.seq_len
    source = measure_source(loaded, loaded.config.corpus, length, N_TOKENS, folder.resolve().parent.parent / "data")
    return loaded.probed, torch.from_numpy(source.held_out(length, N_TOKENS).inputs)


def main(paths: list[str]) -> None:
    models = [path for path in paths if (Path(path) / RUN_CONFIG).exists() and not (Path(path) / CONFIG).exists()]
    results = [path for path in paths if path not in models]
    lines = []
    for path in models:
        probed, tokens_BT = held_out(Path(path))
        of_model = [f"  {check}" for check in checks_of_model(probed, tokens_BT)]
        lines += [f"{path}:", *of_model] if of_model else []
    if results or not models:
        read_runs(results)  # raises ValueError where there is none
        lines += [f"  {check}" for check in checks_of_rows(results)]
    if not lines:
        raise ValueError("none of these runs has residual_variance by layer, three layers and pre-norm")
    print(wrapped([f"Claimed: {CLAIM}", "Measured:", *lines]), end="")


if __name__ == "__main__":
    run_script(main)
