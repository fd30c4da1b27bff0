"""Blocks skipped, swapped or left out: what later blocks, and the loss, make of it.

Causal score: how much later blocks' updates depend on a block; and how much the loss does.

    u_l = x_l - x_(l-1),   u'_l the same with block s skipped
    effect(s, l) = sum over tokens ||u'_l - u_l|| / sum over tokens ||u_l||,   s < l
    score = mean of effect(s, l) over the L (L - 1) / 2 pairs s < l
    skip increase(s) = (loss with block s skipped - loss) / loss

A score of 0 means that no block uses the output of an earlier one. Source: 2603.15389, after 2505.13898. A ratio of
means as in the former; the latter takes the largest ratio over tokens. x_L is taken before the final norm. The skip
increase is the identity control of usefulness. Norms are over all tokens, the loss over scored positions.

Permutation score: how much the order of blocks matters.

    effect(a, b) = |loss with blocks a and b swapped - loss| / loss,   a < b
    score = mean of effect(a, b) over the pairs

The blocks in between stay in place. 0: blocks are interchangeable; high: each has its own role (2603.15389; a plot
title of its released code says the opposite).

Most pairs are far apart, and swapping them also moves both blocks to depths they were not trained at: the effects of
neighbours, a row each in `pairs`, isolate the order of computation.

Noise raises absolute values, and resamples add the same noise again: their mean exceeds the score by about as much as
the score exceeds its truth. So the interval's lower end is lowered by twice that.

With `n_pairs` the mean is over a sample of pairs, systematic in order of a and random within an a: every pair is
equally likely, and each first layer, on which the effect depends most, is represented. The interval then includes the
sampling of pairs: mean exp(-+ z r), r the relative standard error of the sampled mean, sqrt(1 - n/M) sd / (sqrt(n)
mean) for n of M pairs; on a log scale, as effects are positive and skewed.

Causal trace: from which layer on the state at one position holds what the answer there needs.

    x'_0 = x_0 + 3 sd(x_0) e, e standard normal;   restored(l) = (loss' - loss' with x'_l := x_l at T) / (loss' - loss)

of the last position T, sums over sequences: 1 at L, and at every l in a model without attention. The map restores
x'_l at each position t in turn (2202.05262; there of one prompt with a corrupted subject; here all are corrupted).

Layer removal: the loss and accuracy lost by leaving out a block, or a contiguous range of blocks.

    drop(i, j) = (loss without blocks i..j - loss) / loss,   1 <= i <= j <= L
    accuracy lost(i, j) = accuracy - accuracy without blocks i..j, at scored positions
    score = mean of drop(i, i) over the L single blocks;   range score = mean over the longer ranges
    cosine correlation = Spearman's over blocks of drop(l, l) with 1 - E_tokens cos(x_l, x_(l-1))

Sources: single layers 2502.05795 (performance drop; there in downstream accuracy: `evaluate --without`), ranges
2403.17887. Negative if the model is better without the blocks. Pruning often uses the similarity of a block's input and
output in place of its drop; the correlation tests this (2605.14075: poorly). Single blocks are always removed; with
`n_ranges` the longer ranges are a sample.

Shapes: P ranges."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import (
    BootstrapEstimate,
    ByPair,
    bootstrap,
    by_pair,
    finite,
    finites,
    mean_of_last,
    ratio,
    shared_resamples,
)
from sparsedepth.measure.loss import fork_losses, relative_change, sequence_loss
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored, per_position
from sparsedepth.measure.usefulness import share_above
from sparsedepth.model.linear import TensorPair
from sparsedepth.probe.fork import batches, by_sequence, run_forks, stream
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities.measured import pairs_to_swap


def add_causal_rows(context: MeasureContext, rows: Measurements) -> None:
    """The effect of skipping each block on the update of each later one, and on the loss."""
    probed, scored = context.probed, context.scored
    change_NLL, update_NL, skipped_NL, base_N = by_sequence(
        probed, scored.parts(probed), lambda part: _skip_each(probed, part, scored.scale)
    )
    effect_LL = effect_matrix(change_NLL.mean(0), update_NL.mean(0))

    def score(change_RLL: np.ndarray, update_RL: np.ndarray) -> np.ndarray:
        return mean_of_last(effect_matrix(change_RLL, update_RL)[:, *np.triu_indices(probed.n_layers, 1)])

    rows.add_score("causal_score", bootstrap(score, change_NLL, update_NL, rng=context.rng()))
    increase_L = relative_change(skipped_NL.mean(0), base_N.mean())
    rows.summary["usefulness_identity"] = share_above(finites(increase_L), context.config.usefulness_threshold)
    rows.summary["skip_loss_increase"] = finite(increase_L.mean())
    rows.summary["score_tokens"] = scored.n_scored
    on_later = [finite(mean_of_last(row[s:]).item()) for s, row in enumerate(effect_LL, start=1)]  # None for the last
    rows.add_layers("causal_effect", on_later, context.n_tokens)
    rows.add_layers("skip_loss_increase", finites(increase_L), scored.n_scored)
    rows.add_pairs("causal_effect", by_pair(effect_LL, first=1), context.n_tokens)


def _skip_each(probed: ProbedModel, part: Scored, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each sequence: mean ||u'_l - u_l|| by s and l, mean ||u_l||, the loss without each block, the loss."""
    n_layers = probed.n_layers
    states = list(stream(probed, part.inputs))
    base_B = sequence_loss(probed, states[-1][None], part.targets, scale)[0]
    change_LLB = base_B.new_zeros(n_layers, n_layers, len(part))
    skipped_LB = base_B.new_empty(n_layers, len(part))
    # Up to block s a fork equals the recorded stream, so steps start at s.
    for step in run_forks(probed, states, [{layer: None} for layer in range(1, n_layers + 1)]):
        update_BTD = states[step.layer] - states[step.layer - 1]
        difference_FBTD = (step.after - step.before) - update_BTD
        change_LLB[step.forks, step.layer - 1] = token_norms(difference_FBTD)
        if step.layer == n_layers:
            skipped_LB[step.forks] = sequence_loss(probed, step.after, part.targets, scale)
    return change_LLB.movedim(-1, 0), update_norms(states), skipped_LB.T, base_B


def update_norms(states: Sequence[Tensor]) -> Tensor:
    """[B, L]: mean ||u_l||."""
    return torch.stack([token_norms(after - before) for before, after in itertools.pairwise(states)], dim=1)


def effect_matrix(change_RLL: np.ndarray, update_RL: np.ndarray) -> np.ndarray:
    """effect_RLL from the mean norms of u'_l - u_l and of u_l; NaN for l <= s."""
    with np.errstate(divide="ignore", invalid="ignore"):
        effect_RLL = change_RLL / update_RL[..., None, :]
    # A block with update 0 with and without block s is unaffected: 0, not 0/0. If its update is 0 only with block s,
    # the effect has no scale: undefined.
    effect_RLL = np.where(change_RLL == 0, 0.0, np.where(np.isinf(effect_RLL), np.nan, effect_RLL))
    return np.where(np.triu(np.ones(effect_RLL.shape[-2:], dtype=bool), 1), effect_RLL, np.nan)


def token_norms(x: Tensor) -> Tensor:
    """Mean over tokens of the norm over D: [..., T, D] -> [...], fp64."""
    return torch.linalg.vector_norm(x, dim=-1).mean(-1, dtype=torch.float64)


Z_PAIRS = 2.8
"""Half-width in standard errors. 1.96 suffices for the mean of many values; for 16 to 50 with a skew
like exp(normal), whose standard deviation is uncertain too, 2.8 covers 95% (simulated in the tests)."""


def permutation_effect(
    probed: ProbedModel, scored: Scored, rng: np.random.Generator, n_pairs: int | None = None
) -> tuple[ByPair, BootstrapEstimate]:
    """The relative change of the loss, from 0, with each pair of blocks a < b swapped; and the score, None for a single
    block, whose interval is over sequences, and over sampled pairs."""
    n_layers = probed.n_layers
    pairs = choose_pairs(n_layers, n_pairs, rng)
    base_N, swapped_NP = fork_losses(probed, scored, [{a: b, b: a} for a, b in pairs])

    def mean_effect(swapped_RP: np.ndarray, base_R: np.ndarray) -> np.ndarray:
        return mean_of_last(np.abs(relative_change(swapped_RP, base_R[:, None])))

    score = bootstrap(mean_effect, swapped_NP, base_N, rng=rng)
    if score.lo is not None:
        score = replace(score, lo=max(0.0, score.lo - 2 * max(score.excess, 0.0)))
    effects = np.abs(relative_change(swapped_NP.mean(0), base_N.mean()))
    return dict(zip(pairs, finites(effects), strict=True)), _with_pair_sampling(score, effects, math.comb(n_layers, 2))


def choose_pairs(
    n_layers: int, n_pairs: int | None, rng: np.random.Generator, *, by_first: bool = True
) -> list[tuple[int, int]]:
    """All pairs of layers a < b in order, or `n_pairs` at random without replacement (all, if fewer exist), of every a
    its share (`by_first`)."""
    pairs = list(itertools.combinations(range(1, n_layers + 1), 2))
    if n_pairs is None or n_pairs >= len(pairs):
        return pairs
    if by_first:
        shuffled = np.lexsort((rng.random(len(pairs)), np.array(pairs)[:, 0]))  # by a, at random within it
        chosen = shuffled[((np.arange(n_pairs) + rng.random()) * len(pairs) / n_pairs).astype(int)]
    else:
        chosen = rng.choice(len(pairs), n_pairs, replace=False)
    return [pairs[index] for index in np.sort(chosen)]


def _with_pair_sampling(score: BootstrapEstimate, effects: np.ndarray, n_all: int) -> BootstrapEstimate:
    """Combine the independent intervals over sequences and pairs: distances from the value add as squares."""
    if score.value is None or len(effects) == n_all:
        return score
    lo, hi = pair_interval(effects, n_all)
    if score.lo is None or score.hi is None or math.isnan(lo):
        return replace(score, lo=None, hi=None)
    below = math.hypot(score.value - score.lo, score.value - lo)
    above = math.hypot(score.hi - score.value, hi - score.value)
    return replace(score, lo=max(0.0, score.value - below), hi=score.value + above)


def pair_interval(effects: np.ndarray, n_all: int) -> tuple[float, float]:
    """The 95% interval of the mean over all `n_all` pairs, from a sample of them; NaN for a single pair."""
    n, mean = len(effects), effects.mean()
    if n < 2:
        return math.nan, math.nan
    if mean == 0:
        return 0.0, 0.0
    relative_error = math.sqrt((1 - n / n_all) / n) * effects.std(ddof=1) / mean
    return mean * math.exp(-Z_PAIRS * relative_error), mean * math.exp(Z_PAIRS * relative_error)


def add_permutation_rows(context: MeasureContext, rows: Measurements) -> None:
    n_pairs = pairs_to_swap(context.probed.n_layers, context.config.permutation_pairs)
    effects, score = permutation_effect(context.probed, context.scored, context.rng(), n_pairs)
    rows.add_score("permutation_score", score)
    rows.summary["permutation_swaps"] = len(effects)
    rows.add_pairs("permutation_effect", effects, context.scored.n_scored)


def add_removal_rows(context: MeasureContext, rows: Measurements) -> None:
    """The loss without each block, and without all longer ranges or `removal_ranges` of them. The range score is None
    without a longer range; its interval ignores the sampling of ranges."""
    probed, scored, rng, n_layers = context.probed, context.scored, context.rng(), context.probed.n_layers
    longer = choose_pairs(n_layers, context.config.removal_ranges, rng, by_first=False)
    ranges = [*((layer, layer) for layer in range(1, n_layers + 1)), *longer]
    forks = [dict.fromkeys(range(first, last + 1)) for first, last in ranges]
    base_N2, removed_NP2 = fork_losses(probed, scored, forks, accuracy=True)
    base_N, removed_NP = base_N2[:, 0], removed_NP2[..., 0]
    drops = finites(relative_change(removed_NP.mean(0), base_N.mean()))
    lost_NP = base_N2[:, 1:] - removed_NP2[..., 1]
    estimate, lost_N = shared_resamples(rng), lost_NP[:, :n_layers].mean(1)

    def mean_drop(removed_RK: np.ndarray, base_R: np.ndarray) -> np.ndarray:
        return mean_of_last(relative_change(removed_RK, base_R[:, None]))

    rows.add_score("removal_score", estimate(mean_drop, removed_NP[:, :n_layers], base_N))
    rows.add_score("removal_range_score", estimate(mean_drop, removed_NP[:, n_layers:], base_N))
    rows.add_score("removal_accuracy_lost", estimate(per_position, lost_N, scored.weight))
    influence = block_influence(probed, scored.inputs)
    rows.summary["removal_cosine_correlation"] = rank_correlation(drops[:n_layers], influence)
    rows.add_pairs("removal_drop", dict(zip(ranges, drops, strict=True)), scored.n_scored)
    accuracy_lost = dict(zip(ranges, finites(lost_NP.mean(0)), strict=True))
    rows.add_pairs("removal_accuracy_lost", accuracy_lost, scored.n_scored)


def block_influence(probed: ProbedModel, tokens_NT: Tensor) -> list[float]:
    """1 - E cos(x_l, x_(l-1)) of blocks 1..L, in one pass without the head."""

    def cosines(tokens_BT: Tensor) -> list[Tensor]:
        states = itertools.pairwise(stream(probed, tokens_BT))
        return [torch.cosine_similarity(*pair, dim=-1).mean(1, dtype=torch.float64) for pair in states]

    return [1 - float(cosine_N.mean()) for cosine_N in by_sequence(probed, batches(probed, tokens_NT), cosines)]


def rank_correlation(x: Sequence[float | None], y: Sequence[float | None]) -> float | None:
    """Spearman's; None with fewer than three values, a missing one, or all equal."""
    values = pd.DataFrame({"x": x, "y": y}, dtype=float)
    return finite(values.corr("spearman", min_periods=max(3, len(values))).loc["x", "y"])


NOISE = 3.0
"""Standard deviations of the embeddings' entries."""


def add_trace_rows(context: MeasureContext, rows: Measurements) -> None:
    """The share of the loss that noise in the embeddings adds which a clean state at the last position restores, by
    layer, and its score with a bootstrap over sequences."""
    loss_NF = _traced(context, [context.scored.targets.shape[1] - 1])
    estimate = bootstrap(lambda loss_RF: mean_of_last(_restored(loss_RF)[:, :-1]), loss_NF, rng=context.rng())
    rows.add_score("trace_restored", estimate)
    rows.add_layers("trace_restored", finites(_restored(loss_NF.mean(0)[None])[0]), len(loss_NF), first=0)


def add_trace_map_rows(context: MeasureContext, rows: Measurements) -> None:
    """That share for a clean state at each layer and position."""
    n_positions = context.scored.targets.shape[1]
    loss_NF = _traced(context, range(n_positions))
    share_TL = _restored(loss_NF.mean(0)[None]).reshape(n_positions, -1)
    for position, share_L in enumerate(share_TL, start=1):
        rows.add_layers(f"trace_map@{position}", finites(share_L), len(loss_NF), first=0)


def _restored(loss_RF: np.ndarray) -> np.ndarray:
    return ratio(loss_RF[:, 1:2] - loss_RF[:, 2:], loss_RF[:, 1:2] - loss_RF[:, :1])


def _traced(context: MeasureContext, positions: Sequence[int]) -> np.ndarray:
    """The loss at the last position by sequence: of the model; with noise; and with noise and the clean state at each
    of these positions (from 0), at each of the layers 0 to L."""
    probed = context.probed
    layers = range(1, probed.n_layers + 1)
    length = context.scored.targets.shape[1]

    def moments(tokens_BT: Tensor) -> TensorPair:
        x_BX = probed.embed(tokens_BT).double().flatten(1)
        return x_BX.mean(1), x_BX.square().mean(1)

    mean_N, square_N = by_sequence(probed, batches(probed, context.inputs), moments)
    sd = math.sqrt(square_N.mean() - mean_N.mean() ** 2)  # of all sequences, however many run at once
    # One draw for all sequences.
    noise_TD = NOISE * sd * torch.from_numpy(context.rng().standard_normal((length, probed.stream_width))).float()

    def of_part(part: Scored) -> list[Tensor]:
        states = list(stream(probed, part.inputs))
        noisy = [states[0] + noise_TD.to(states[0].device)]
        for layer in layers:
            noisy.append(probed.block(layer, noisy[-1]))

        def loss(x_BTD: Tensor) -> Tensor:
            return sequence_loss(probed, x_BTD[None, :, -1:], part.targets[:, -1:], 1.0)[0]

        losses = [loss(states[-1]), loss(noisy[-1])]
        for position, restored in itertools.product(positions, range(probed.n_layers + 1)):
            x_BTD = noisy[restored].clone()
            x_BTD[:, position] = states[restored][:, position]
            for layer in layers[restored:]:
                x_BTD = probed.block(layer, x_BTD)
            losses.append(loss(x_BTD))
        return [torch.stack(losses, dim=1)]

    return by_sequence(probed, context.scored.parts(probed), of_part)[0]
