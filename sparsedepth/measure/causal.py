"""Causal score: how much later blocks' updates depend on a block; and how much the loss does.

    u_l = x_l - x_(l-1),   u'_l the same with block s skipped
    effect(s, l) = sum over tokens ||u'_l - u_l|| / sum over tokens ||u_l||,   s < l
    score = mean of effect(s, l) over the L (L - 1) / 2 pairs s < l
    skip increase(s) = (loss with block s skipped - loss) / loss

A score of 0 means that no block uses the output of an earlier one. Source: 2603.15389, after 2505.13898. A ratio of
means as in the former; the latter takes the largest ratio over tokens. x_L is taken before the final norm. The skip
increase is the identity control of usefulness. Norms are over all tokens, the loss over scored positions.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap, finite, finites, mean_of_last
from sparsedepth.measure.loss import relative_change, sequence_loss
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored
from sparsedepth.measure.usefulness import share_above
from sparsedepth.probe.fork import probing, record_states, run_forks, skip
from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalEffect:
    effects: dict[tuple[int, int], float | None]
    """by pair of layers s < l, from 0"""
    by_layer: list[float | None]
    """mean of effect(s, l) over l > s for s = 1..L; None for the last block"""
    score: BootstrapEstimate
    """None for a single block"""
    skip_increase: list[float | None]
    """of blocks 1..L; negative if the loss is lower without the block"""


def causal_effect(probed: ProbedModel, scored: Scored, rng: np.random.Generator) -> CausalEffect:
    """The effect of skipping each block on the update of each later one, and on the loss."""
    with probing(probed):
        parts = [_skip_each(probed, part, scored.scale) for part in scored.parts(probed)]
        sums = [torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)]
    change_NLL, update_NL, skipped_NL, base_N = sums
    effect_LL = effect_matrix(change_NLL.mean(0), update_NL.mean(0))

    def score(change_RLL: np.ndarray, update_RL: np.ndarray) -> np.ndarray:
        return mean_of_last(effect_matrix(change_RLL, update_RL)[:, *np.triu_indices(probed.n_layers, 1)])

    pairs = itertools.combinations(range(1, probed.n_layers + 1), 2)
    return CausalEffect(
        effects={(s, later): finite(effect_LL[s - 1, later - 1]) for s, later in pairs},
        by_layer=[finite(mean_of_last(row[s:]).item()) for s, row in enumerate(effect_LL, start=1)],
        score=bootstrap(score, change_NLL, update_NL, rng=rng),
        skip_increase=finites(relative_change(skipped_NL.mean(0), base_N.mean())),
    )


def _skip_each(probed: ProbedModel, part: Scored, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each sequence: mean ||u'_l - u_l|| by s and l, mean ||u_l||, the loss without each block, the loss."""
    n_layers = probed.n_layers
    states = record_states(probed, part.inputs)
    base_B = sequence_loss(probed, states[-1][None], part.targets, scale)[0]
    change_LLB = base_B.new_zeros(n_layers, n_layers, len(part))
    skipped_LB = base_B.new_empty(n_layers, len(part))
    # Up to block s a fork equals the recorded stream, so steps start at s.
    for step in run_forks(probed, states, [skip(layer) for layer in range(1, n_layers + 1)]):
        update_BTD = states[step.layer] - states[step.layer - 1]
        difference_FBTD = (step.after - step.before) - update_BTD
        change_LLB[step.forks, step.layer - 1] = _token_norms(difference_FBTD)
        if step.layer == n_layers:
            skipped_LB[step.forks] = sequence_loss(probed, step.after, part.targets, scale)
    update_LB = torch.stack([_token_norms(after - before) for before, after in itertools.pairwise(states)])
    return change_LLB.movedim(-1, 0), update_LB.T, skipped_LB.T, base_B


def effect_matrix(change_RLL: np.ndarray, update_RL: np.ndarray) -> np.ndarray:
    """effect_RLL from the mean norms of u'_l - u_l and of u_l; NaN for l <= s."""
    with np.errstate(divide="ignore", invalid="ignore"):
        effect_RLL = change_RLL / update_RL[..., None, :]
    # A block with update 0 with and without block s is unaffected: 0, not 0/0. If its update is 0 only with block s,
    # the effect has no scale: undefined.
    effect_RLL = np.where(change_RLL == 0, 0.0, np.where(np.isinf(effect_RLL), np.nan, effect_RLL))
    later_LL = np.triu(np.ones(effect_RLL.shape[-2:], dtype=bool), 1)
    return np.where(later_LL, effect_RLL, np.nan)


def _token_norms(x: Tensor) -> Tensor:
    """Mean over tokens of the norm over D: [..., T, D] -> [...], fp64."""
    return torch.linalg.vector_norm(x, dim=-1).mean(-1, dtype=torch.float64)


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    result = causal_effect(context.probed, context.scored, context.rng())
    rows.add_score("causal_score", result.score)
    rows.summary["usefulness_identity"] = share_above(result.skip_increase, context.config.usefulness_threshold)
    rows.summary["skip_loss_increase"] = finite(np.mean(np.array(result.skip_increase, dtype=float)))
    rows.summary["score_tokens"] = context.scored.n_scored
    rows.add_layers("causal_effect", result.by_layer, context.n_tokens)
    rows.add_layers("skip_loss_increase", result.skip_increase, context.scored.n_scored)
    rows.add_pairs("causal_effect", result.effects, context.n_tokens)
