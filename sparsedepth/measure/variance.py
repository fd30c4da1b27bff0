"""Residual variance: the spread of the stream, and of each block's update, over its D entries, by layer.

    v_l = mean over tokens of var(x_l over its D entries)   (unbiased: divided by D - 1),   l = 0..L
    growth of layer l = v_l / v_(l-1);   growth = (v_L / v_1)^(1 / (L - 1)), the mean factor per layer
    branches: the same variance of the updates a_l by attention and f_l by the feed-forward part

x_L is taken before the final norm; a normed state has a variance near 1 at any depth. Sources: 2603.15389 (per-token
variance over the dimensions, averaged over tokens); 2502.05795 (growth).

Participation ratio and effective rank: the number of directions over which the residual stream, and each block's
update, spread their variance, by layer.

    C_l = covariance over tokens of the entries of x_l, with eigenvalues e_i;   p_i = e_i / sum e
    participation ratio of layer l = (tr C_l)^2 / tr C_l^2 = 1 / sum p_i^2,   l = 0..L
    effective rank of layer l      = exp(-sum p_i ln p_i)                     (Roy & Vetterli 2007)
    update rank of layer l         = effective rank of u_l = x_l - x_(l-1),   l = 1..L

Each is 1 if one direction holds all variance, and k if k directions hold equal shares; the effective rank gives more
weight to small shares, and is never below the ratio. Unlike residual variance neither depends on the scale of the
stream: if a few growing directions take over, the variance grows and the ratio falls. Source of the ratio:
Litwin-Kumar et al. 2017 (Neuron 93, 1153); along the layers of networks 1906.00443. Deviates: Roy & Vetterli take
shares of singular values, the roots of these.

For n tokens both are biased downwards: 1 / ratio is too large by about 1 / n for independent tokens. There are no
intervals: resamples of sequences would need a D x D matrix per sequence."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import entr
from torch import Tensor

from sparsedepth.measure.bootstrap import (
    complete_mean,
    finites,
    mean_of_last,
    ratio,
    shared_resamples,
)
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import batches, by_sequence, probing, stream, updates
from sparsedepth.probe.probed_model import ProbedModel


def add_variance_rows(context: MeasureContext, rows: Measurements) -> None:
    """residual_variance, whose score is v_L; residual_growth, factors per layer, None from a variance of 0 and, as a
    score, for a single layer; attention_variance and ffn_variance, if known. In squared units of the stream."""
    probed, n_tokens = context.probed, context.n_tokens
    variance_NL1, *branches = by_sequence(probed, batches(probed, context.inputs), partial(_variances, probed))
    by_layer, estimate = variance_NL1.mean(0), shared_resamples(context.rng())
    last = estimate(lambda value_RL: value_RL[:, -1], variance_NL1)
    rows.add_profile("residual_variance", finites(by_layer), last, n_tokens, first=0, called="residual_variance_last")
    growth, rate = finites(ratio(by_layer[1:], by_layer[:-1])), estimate(_growth_rate, variance_NL1)
    rows.add_profile("residual_growth", growth, rate, n_tokens, called="residual_variance_growth")
    for name, branch_NL in zip(("attention_variance", "ffn_variance"), branches, strict=False):
        rows.add_profile(name, finites(branch_NL.mean(0)), estimate(mean_of_last, branch_NL), n_tokens)


def _variances(probed: ProbedModel, tokens_BT: Tensor) -> list[Tensor]:
    """For each sequence v_0 .. v_L, and, if known for all blocks, attention's L variances and those of the other
    branch."""
    kinds: tuple[list[Tensor], ...] = ([], [], [])
    for update in updates(probed, tokens_BT):
        if update.layer == 1:
            kinds[0].append(token_variance(update.before))
        for kind, x_BTD in zip(kinds, (update.after, *(update.branches or ())), strict=False):
            kind.append(token_variance(x_BTD))
    return [torch.stack(kind, dim=1) for kind in kinds if len(kind) >= probed.n_layers]


def variance_by_sequence(probed: ProbedModel, tokens_NT: Tensor) -> np.ndarray:
    """variance_NL1: v_0 .. v_L of each sequence, in one forward pass without the head: cheap enough for training."""

    def variances(tokens_BT: Tensor) -> list[Tensor]:
        return [torch.stack([*map(token_variance, stream(probed, tokens_BT))], dim=1)]

    (variance_NL1,) = by_sequence(probed, batches(probed, tokens_NT), variances)
    return variance_NL1


def token_variance(x_BTD: Tensor) -> Tensor:
    """The variance over D, averaged over the tokens of each sequence: [B], fp64."""
    return x_BTD.var(dim=-1).mean(-1, dtype=torch.float64)


def _growth_rate(variance_RL1: np.ndarray) -> np.ndarray:
    n_layers = variance_RL1.shape[1] - 1
    if n_layers < 2:
        return np.full(len(variance_RL1), np.nan)
    return ratio(variance_RL1[:, -1], variance_RL1[:, 1]) ** (1 / (n_layers - 1))


def add_participation_rows(context: MeasureContext, rows: Measurements) -> None:
    """participation_ratio and effective_rank of layers 0..L, update_rank of layers 1..L; None
    without variance. One forward pass without the head, with 8 (2 L + 1) D^2 bytes of sums."""
    probed, tokens_NT = context.probed, context.inputs
    moments = []  # of each, means over tokens of the products of (1, x): 1, x and x x^T
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT):
            states = list(stream(probed, tokens_BT))
            updates = (after - before for before, after in itertools.pairwise(states))
            values_nX = (F.pad(x.flatten(0, 1).double(), (1, 0), value=1) for x in itertools.chain(states, updates))
            products = [x_nX.T @ x_nX / tokens_NT.numel() for x_nX in values_nX]
            moments = [a + b for a, b in zip(moments, products, strict=True)] if moments else products
    covariances = [mean_XX[1:, 1:] - torch.outer(mean_XX[0, 1:], mean_XX[0, 1:]) for mean_XX in moments]
    spectra = [
        energy_D.cpu().numpy().clip(0)
        for energy_D in batched(torch.linalg.eigvalsh, [*map(torch.nan_to_num, covariances)])
    ]
    share_SD = np.stack([ratio(energy_D, energy_D.sum()) for energy_D in spectra])
    # Of constant states only rounding errors are left; of those that are not finite no square is known.
    squares_S = np.array([mean_XX.diagonal()[1:].sum().item() for mean_XX in moments])
    is_known_S = np.array([energy_D.sum() for energy_D in spectra]) > 1e-12 * squares_S
    share_SD[~is_known_S] = np.nan
    ratios, ranks = finites(1 / (share_SD**2).sum(1)), finites(np.exp(entr(share_SD).sum(1)))
    n_states = probed.n_layers + 1
    of_states = {"participation_ratio": ratios[:n_states], "effective_rank": ranks[:n_states]}
    for name, values in (of_states | {"update_rank": ranks[n_states:]}).items():
        first = int(name == "update_rank")
        rows.summary[name] = complete_mean(values[1 - first :])
        rows.add_layers(name, values, context.n_tokens, first=first)


BATCH_BYTES = 2**28
"""Limit of the matrices of one call, at least one of them."""


def batched(function: Callable[[Tensor], Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """`function` of each matrix, applied to stacks of them, which a GPU computes at once. A decomposition that does not
    converge on a GPU is repeated on the CPU, whose LAPACK is more robust."""
    per_call = max(1, BATCH_BYTES // matrices[0].nbytes)
    results = []
    for start in range(0, len(matrices), per_call):
        stacked_nDD = torch.stack([*matrices[start : start + per_call]])
        try:
            result = function(stacked_nDD)
        except torch.linalg.LinAlgError:
            if stacked_nDD.device.type == "cpu":
                raise
            result = function(stacked_nDD.cpu()).to(stacked_nDD.device)
        results += result.unbind()
    return results
