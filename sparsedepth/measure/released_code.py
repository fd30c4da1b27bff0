"""Scores as computed by the code released with 2603.15389, where it differs from the paper's definitions.

For comparison with published values, and to quantify each difference. The released code counts layers from 0 and reads
transformers' `hidden_states`, whose last entry is after the final norm."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import ByPair, by_pair, complete_mean, finite, finites, ratio
from sparsedepth.measure.interventions import permutation_effect, token_norms, update_norms
from sparsedepth.measure.loss import fork_losses, relative_change
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored
from sparsedepth.measure.usefulness import AffineUpdate, fit_affine, share_above
from sparsedepth.measure.variance import token_variance
from sparsedepth.probe.fork import batches, by_sequence, run_forks, stream
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities.quantity import without_none


def causal_misaligned(probed: ProbedModel, tokens_NT: Tensor) -> ByPair:
    """Causal effects of dense models: the update of block l + 1 without block s, against that of block l with it. A run
    that skips block s records one state less, so from s on its list is one layer ahead: effect(s, l) = sum over tokens
    ||u'_(l+1) - u_l|| / sum ||u_l|| for s < l < L, where u'_L ends in norm(x'_L). Too large: of different blocks."""
    n_layers = probed.n_layers

    def changes(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        states = list(stream(probed, tokens_BT))
        update_BL = update_norms(states)
        change_LLB = update_BL.new_zeros(n_layers, n_layers, len(tokens_BT))
        for step in run_forks(probed, states, [{layer: None} for layer in range(1, n_layers + 1)]):
            after = probed.final_norm(step.after) if step.layer == n_layers else step.after
            if after.shape != step.after.shape:  # the norm of attended sources: no update
                after = torch.full_like(step.after, torch.nan)
            if (layer := step.layer - 1) > 0:  # to which the released code assigns this update
                difference = (after - step.before) - (states[layer] - states[layer - 1])
                change_LLB[step.forks, layer - 1] = token_norms(difference)
        return change_LLB.movedim(-1, 0), update_BL

    change_NLL, update_NL = by_sequence(probed, batches(probed, tokens_NT), changes)
    return by_pair(ratio(change_NLL.mean(0), update_NL.mean(0))[:-1, :-1], first=1)


def affine_increase_in_sample(probed: ProbedModel, scored: Scored) -> list[float | None]:
    """Loss increases of usefulness for blocks 1..L, fitted and scored on the same tokens, with the transposed map: the
    solution A of x A = x_l is installed as the weight of a linear layer, which multiplies by x A^T. Such a map can be
    worse than none, so useless blocks count as useful; the fit on scored tokens flatters it, less."""
    maps = fit_affine(probed, scored.inputs)
    forks = [{layer: transpose(affine)} for layer, affine in enumerate(maps, start=1)]
    base_N, affine_NL = fork_losses(probed, scored, forks)
    return finites(relative_change(affine_NL.mean(0), base_N.mean()))


def transpose(affine: AffineUpdate) -> Callable[[Tensor], Tensor]:
    """x A^T + c for the map x A + c, where A = 1 + weight and c = bias - mean weight."""
    offset_D = affine.bias - affine.mean @ affine.weight
    return lambda x_BTD: x_BTD + x_BTD @ affine.weight.T + offset_D


def permutation_weighted(effects: Mapping[tuple[int, int], float], n_layers: int) -> float | None:
    """`global_score_weighted` from the permutation effects of all pairs: each layer's mean effect times 0.9^(l-1), and
    the sum divided by L, not by the sum of weights, so that equal effects of 1 give 0.71 at 8 layers and 0.30 at 32."""
    of_layers = ([effect for pair, effect in effects.items() if layer in pair] for layer in range(1, n_layers + 1))
    weighted = [0.9**i * (complete_mean(effects_of_layer) or 0.0) for i, effects_of_layer in enumerate(of_layers)]
    return sum(weighted) / n_layers if effects else None


def normalised_last_variance(probed: ProbedModel, tokens_NT: Tensor) -> float | None:
    """The released last-layer variance: of norm(x_L), near the squared gain of the norm at any depth."""

    def variance(tokens_BT: Tensor) -> list[Tensor]:
        *_, x_BTD = stream(probed, tokens_BT)
        return [token_variance(probed.final_norm(x_BTD))]

    (variance_N,) = by_sequence(probed, batches(probed, tokens_NT), variance)
    return finite(variance_N.mean())


def add_released_rows(context: MeasureContext, rows: Measurements) -> None:
    probed, scored = context.probed, context.scored
    pairs, _ = permutation_effect(probed, scored, context.rng())
    increases = affine_increase_in_sample(probed, scored)
    rows.summary.update(
        causal_score_released=complete_mean([*causal_misaligned(probed, context.inputs).values()]),
        permutation_score_released=permutation_weighted(without_none(pairs), probed.n_layers),
        usefulness_released=share_above(increases, context.config.usefulness_threshold),
        residual_variance_last_released=normalised_last_variance(probed, context.inputs),
    )
