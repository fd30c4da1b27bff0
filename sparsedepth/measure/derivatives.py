"""Derivatives along depth: the Jacobian of each block, and the gradient of the loss by the stream.

Jacobian deviation: how far a block is from the identity, seen by its derivative J_ts = d x_l[t] / d x_(l-1)[s].

    per_token = sqrt(E_t ||J_tt - I||_F^2)      a token's own block, root mean square over tokens
    averaged  = ||E_t J_tt - I||_F              what the tokens have in common
    released  = ||E_s sum_t J_ts - I||_F / D    as in the released code: summed over positions t it affects

The paper (2603.15389) writes ||J_l - I||_F. Deviates: per token the square is averaged, which random probes estimate
without bias, and which is at least the mean of the norms.

By probes: with v standard normal, E ||A^T v||^2 = ||A||_F^2 (Hutchinson 1990), A = J - I. One product with u at every
position gives g_s = sum_(t >= s) A_ts^T u_t, hence for
  released   u_t = v: mean_s g_s = A^T v of the averaged matrix; nothing more is needed;
  the others u_t = sign_t v_t with random signs: h_s = sign_s g_s
             = A_ss^T v_s + sum_(t > s) sign_s sign_t A_ts^T v_t.
             The sum has mean 0 over the signs. A second product with the same v and signs of its own gives h'_s, whose
             sum is independent of the first, so E [h_s . h'_s] = ||A_ss||_F^2: unbiased at every position at once. In
             the same way E [mean_s h_s . mean_s h'_s] = ||E A_tt||_F^2 where all positions share one v.
`per_token` draws v_s for every position, so its error shrinks with the tokens; the matrices of the other two are probed
by `n_probes` shared ones. The root is taken last. Where noise makes a square negative, the layer and the model's score
are NULL: a value of 0 would be a claim. With sqrt(D) times the D unit vectors as probes, one position at a time, the
same formulas are exact.

Standard errors are those of the probes, for the given tokens. Shared probes: the variance of v' B v is 2 tr B^2, and
E (h_i . h_j)^2 = tr B^2 for two probes i != j, B = A A^T (for `averaged` with the signs' noise in it: an upper bound).
per_token: the h_s . h'_s of two positions are uncorrelated, as no two pairs of signs (s, t > s) are the same, so their
scatter over the tokens is an upper bound.

Jacobian map: how far the blocks between two states are from the identity, J_t = d x_b[t] / d x_a[t].

    map(a, b) = sqrt(E_t ||J_t - I||_F^2),   0 <= a < b <= L;   map(l - 1, l) = per_token of block l

by the products above, of u at x_b with all earlier states at once. Pre-LN's deep blocks approach the identity
(2502.05795, section 3): a corner of the map near 0 is a range of blocks that leaves the stream as it is.

Gradient along depth: the norm of the loss's gradient with respect to the residual stream, by layer.

    g_l = d loss / d x_l,   stream_gradient of layer l = ||g_l|| / ||g_L||, l = 0..L
    gradient_gain = that of layer 0

Norms are over all entries of all tokens; the scale of the loss, a mean over scored positions, cancels. With a gain of 1
and all layers at 1 the model learns as if it were one block; 2502.05795 (Theorem 3.3) bounds it for Pre-LN, whose deep
blocks approach the identity, and lets it grow with depth for LNS. Derivatives are along the stream: what a block reads
of x_0 or of block 1's values (`residual_scalars`, `value_residual`) is held constant. If this measure is requested,
training records the gradients of each block's weights (`gradient_norm`, `train.loop`).

Shapes: P probes."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.config.task import IGNORED
from sparsedepth.measure.bootstrap import (
    BootstrapEstimate,
    bootstrap,
    by_pair,
    finite,
    finites,
    ratio,
    shared_resamples,
)
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored
from sparsedepth.probe.fork import batches, by_sequence
from sparsedepth.probe.probed_model import ProbedModel

Pull = Callable[[Tensor], Tensor]
"""u_BTD -> g_BTD with g_s = sum over t of (J_ts - I [t = s])^T u_t."""

Products = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of one block and batch: square_BT, ||J_tt - I||_F^2 or its estimate; (mean_t J_tt - I)^T v for each probe
[B, P, D], for the first and the second draw of signs; and (mean_s sum_t J_ts - I)^T v for each probe [B, P, D]."""

GRAPH_MEMORY = 8
"""Memory of a pass that keeps its graph, relative to one that does not (approximate)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FormDeviation:
    """One form of the deviation, from 0: the block is the identity plus a constant; None where noise makes the square
    negative. The score is the mean over layers, None if one is; its interval is over sequences, with fixed probes."""

    by_layer: list[float | None]
    score: BootstrapEstimate
    standard_error: list[float | None]
    """of the probes, by layer; 0 if exact"""
    score_standard_error: float | None
    """of the probes"""


def add_jacobian_rows(context: MeasureContext, rows: Measurements) -> None:
    """All forms for every block, by `n_probes` shared probes or (None) exactly. Costs per block 2 vector-Jacobian
    products for per_token, 2 n_probes for averaged, n_probes for released; exactly, D T for the first two together and
    D for the last, which suits small models only. Raises ValueError for a single probe: it has no standard error."""
    probed, tokens_NT, rng, n_probes = context.probed, context.inputs, context.rng(), context.config.jacobian_probes
    if n_probes is not None and n_probes < 2:
        raise ValueError(f"n_probes={n_probes} gives no standard error; use at least 2, or None for the exact value")
    shared_seed_L = rng.integers(2**63, size=probed.n_layers)
    own_seed_NL = iter(rng.integers(2**63, size=(len(tokens_NT), probed.n_layers)))

    def of_batch(tokens_BT: Tensor) -> list[Tensor]:
        x_BTD, products = probed.embed(tokens_BT), []
        own_seed_BL = np.stack([*itertools.islice(own_seed_NL, len(tokens_BT))])
        for index in range(probed.n_layers):
            pull, after_BTD = _differentiate(probed, index + 1, x_BTD)
            if n_probes is None:
                products.append(_exact_products(pull, x_BTD))
            else:
                shared = torch.Generator().manual_seed(int(shared_seed_L[index]))
                v_PD = torch.randn(n_probes, x_BTD.shape[-1], generator=shared).to(x_BTD.device)
                products.append(_probed_products(pull, x_BTD, v_PD, own_seed_BL[:, index]))
            x_BTD = after_BTD
        return [torch.stack(each, dim=1).double() for each in zip(*products, strict=True)]

    products = by_sequence(probed, batches(probed, tokens_NT, GRAPH_MEMORY), of_batch, gradients=True)
    for name, deviation in _summarise(*products, rng, is_exact=n_probes is None).items():
        rows.add_profile(name, deviation.by_layer, deviation.score, context.n_tokens)
        rows.summary[f"{name}_se"] = deviation.score_standard_error
        rows.add_layers(f"{name}_se", deviation.standard_error, context.n_tokens)


def _differentiate(probed: ProbedModel, layer: int, x_BTD: Tensor) -> tuple[Pull, Tensor]:
    """The vector-Jacobian product of block - identity at x_(l-1), and x_l."""
    with torch.enable_grad():
        x_BTD = x_BTD.detach().requires_grad_()
        after_BTD = probed.block(layer, x_BTD)
        update_BTD = after_BTD - x_BTD

    def pull(u_BTD: Tensor) -> Tensor:
        return torch.autograd.grad(update_BTD, x_BTD, u_BTD.expand_as(x_BTD), retain_graph=True)[0]

    return pull, after_BTD.detach()


def _probed_products(pull: Pull, x_BTD: Tensor, v_PD: Tensor, seeds: np.ndarray) -> Products:
    v_BTD, draw_signs = _draws(x_BTD, seeds.tolist())

    def signed(v_BTD: Tensor) -> Tensor:
        sign_BT1 = draw_signs()
        return sign_BT1 * pull(sign_BT1 * v_BTD)

    square_BT = (signed(v_BTD) * signed(v_BTD)).sum(-1)
    first, second = (torch.stack([signed(v_D).mean(1) for v_D in v_PD], dim=1) for _ in range(2))
    return square_BT, first, second, torch.stack([pull(v_D).mean(1) for v_D in v_PD], dim=1)


def _draws(x_BTD: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Callable[[], Tensor]]:
    """v_BTD, and what draws sign_BT1, of each sequence's own seed, so that results do not depend on the batching."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    v_BTD = torch.stack([torch.randn(x_BTD.shape[1:], generator=generator) for generator in generators])

    def draw_signs() -> Tensor:
        coins = [torch.randint(0, 2, (x_BTD.shape[1], 1), generator=generator) for generator in generators]
        return torch.stack(coins).to(x_BTD.device) * 2.0 - 1.0

    return v_BTD.to(x_BTD.device), draw_signs


def _exact_products(pull: Pull, x_BTD: Tensor) -> Products:
    """The same with unit vectors as probes, scaled so that a mean over them is a trace."""
    _, n_tokens, width = x_BTD.shape
    place_TT1 = torch.eye(n_tokens, device=x_BTD.device)[..., None]
    square_BT, averaged_BD, released_BD = torch.zeros_like(x_BTD[..., 0]), [], []
    for v_D in math.sqrt(width) * torch.eye(width, device=x_BTD.device):
        h_BTD = torch.stack([pull(place_T1 * v_D)[:, t] for t, place_T1 in enumerate(place_TT1)], dim=1)
        square_BT += h_BTD.square().sum(-1) / width
        averaged_BD.append(h_BTD.mean(1))
        released_BD.append(pull(v_D).mean(1))
    averaged_BPD = torch.stack(averaged_BD, dim=1)
    return square_BT, averaged_BPD, averaged_BPD, torch.stack(released_BD, dim=1)


def _summarise(
    square_NLT: np.ndarray,
    first_NLPD: np.ndarray,
    second_NLPD: np.ndarray,
    released_NLPD: np.ndarray,
    rng: np.random.Generator,
    *,
    is_exact: bool,
) -> dict[str, FormDeviation]:
    """The three forms of the deviation by layer and as scores, from the products of each sequence with the probes."""
    estimate, (n_sequences, n_layers, n_tokens) = shared_resamples(rng), square_NLT.shape

    def deviation(kernel_LNN: np.ndarray, variance_L: np.ndarray, unit: float = 1) -> FormDeviation:
        """From kernels with w' K w the square for weights w of sequences, and its variance over probes."""

        def score(weight_RN: np.ndarray) -> np.ndarray:
            square_LR = ((weight_RN @ kernel_LNN) * weight_RN).sum(-1)
            return np.sqrt(np.maximum(square_LR, 0)).mean(0) / unit

        square_L = kernel_LNN.mean((1, 2))
        value_L = np.sqrt(np.maximum(square_L, 0))
        square_error_L = 0 * value_L if is_exact else np.sqrt(variance_L)
        with np.errstate(divide="ignore", invalid="ignore"):
            # d sqrt(q) = dq / (2 sqrt(q)), at most the root of the error, also where q is 0.
            error_L = np.fmin(square_error_L / (2 * value_L), np.sqrt(square_error_L)) / unit
        found = estimate(score, np.eye(n_sequences))
        return FormDeviation(
            by_layer=finites(np.where(square_L >= 0, value_L / unit, np.nan)),
            standard_error=finites(error_L),
            score=found if (square_L >= 0).all() else replace(found, value=None, lo=None, hi=None),
            score_standard_error=finite(np.linalg.norm(error_L) / n_layers),
        )

    mean_LN1 = square_NLT.mean(-1).T[..., None]  # linear in the resample's weights
    return {
        "jacobian_deviation": deviation(mean_LN1, square_NLT.var((0, 2)) / (n_sequences * n_tokens)),
        "jacobian_deviation_averaged": deviation(*_kernel(first_NLPD, second_NLPD)),
        "jacobian_deviation_released": deviation(*_kernel(released_NLPD, released_NLPD), unit=released_NLPD.shape[-1]),
    }


def _kernel(first_NLPD: np.ndarray, second_NLPD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """kernel_LNN of the products with two draws, and variance_L."""
    n_probes = first_NLPD.shape[2]
    mean_LPD = first_NLPD.mean(0)
    gram_LPP = mean_LPD @ mean_LPD.swapaxes(1, 2)
    off_diagonal_L = (gram_LPP**2 * (1 - np.eye(n_probes))).sum((1, 2))
    kernel_LNN = np.einsum("nlpd,mlpd->lnm", first_NLPD, second_NLPD, optimize=True) / n_probes
    return kernel_LNN, 2 * off_diagonal_L / (n_probes**2 * max(1, n_probes - 1))


def add_jacobian_map_rows(context: MeasureContext, rows: Measurements) -> None:
    """One pass with a graph of all blocks, and from each block two products back to all earlier states."""
    probed = context.probed
    seeds = iter(context.rng().integers(2**63, size=len(context.inputs)).tolist())

    def squares(tokens_BT: Tensor) -> list[Tensor]:
        states = _states(probed, tokens_BT)
        v_BTD, draw_signs = _draws(states[0], [*itertools.islice(seeds, len(tokens_BT))])
        square_BLL = v_BTD.new_zeros(len(tokens_BT), len(states), len(states))

        def pulled(last: int) -> Tensor:
            sign_BT1 = draw_signs()
            products = torch.autograd.grad(states[last], states[:last], sign_BT1 * v_BTD, retain_graph=True)
            return sign_BT1 * torch.stack(products) - v_BTD

        for last in range(1, len(states)):
            square_BLL[:, :last, last] = (pulled(last) * pulled(last)).sum(-1).mean(-1).T
        return [square_BLL.double()]

    (square_NLL,) = by_sequence(probed, batches(probed, context.inputs, GRAPH_MEMORY), squares, gradients=True)
    square_LL = square_NLL.mean(0)
    deviation_LL = np.sqrt(np.where(square_LL < 0, np.nan, square_LL))
    rows.add_pairs("jacobian_map", by_pair(deviation_LL, first=0), context.n_tokens)


def _states(probed: ProbedModel, tokens_BT: Tensor) -> list[Tensor]:
    """x_0 .. x_L in one graph."""
    with torch.enable_grad():
        states = [probed.embed(tokens_BT).detach().requires_grad_()]
        for layer in range(1, probed.n_layers + 1):
            states.append(probed.block(layer, states[-1]))
    return states


def add_gradient_rows(context: MeasureContext, rows: Measurements) -> None:
    """Layers 0..L, 1 at L, and the gain; None if no gradient reaches x_L. One forward and one
    backward pass, with a graph of all blocks."""

    probed = context.probed

    def squares(part: Scored) -> list[Tensor]:
        states = _states(probed, part.inputs)
        with torch.enable_grad():
            logits_NV, target_N = probed.logits(states[-1]).flatten(0, 1), part.targets.flatten()
            # The sum, not the mean, so that batches add up.
            loss = F.cross_entropy(logits_NV, target_N, ignore_index=IGNORED, reduction="sum")
            grads = torch.autograd.grad(loss, states)
        return [torch.stack([grad.double().square().sum((1, 2)) for grad in grads], dim=1)]

    (square_NL,) = by_sequence(probed, context.scored.parts(probed, GRAPH_MEMORY), squares, gradients=True)

    def by_layer(square_RL: np.ndarray) -> np.ndarray:
        return np.sqrt(ratio(square_RL, square_RL[:, -1:]))

    gain = bootstrap(lambda square_RL: by_layer(square_RL)[:, 0], square_NL, rng=context.rng())
    norms = finites(by_layer(square_NL.mean(0)[None])[0])
    rows.add_profile("stream_gradient", norms, gain, context.n_tokens, first=0, called="gradient_gain")
