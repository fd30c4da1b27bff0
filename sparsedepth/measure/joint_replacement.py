"""Jointly needed layers: how many blocks a model needs when several are replaced at once.

    S_0 = {};   S_k = S_(k-1) + the block whose replacement in addition to S_(k-1) gives the lowest loss
    added(S) = loss with the blocks of S replaced by their affine maps (`usefulness`) - loss        (nat/token)
    jointly needed layers = L - the largest k such that added(S_1), ..., added(S_k) <= needed_threshold

Ours. `needed_layers` replaces one block at a time, and so counts neither of two redundant blocks: a model with spare
layers spreads its work and seems to need few of them. Here the remaining blocks suffice by construction, so the number
is an upper bound of what is needed; a search over all subsets could find fewer. The maps are fitted once, to the whole
model, on other tokens.

Blocks are chosen, and losses measured, on the same sequences; the interval is over resamples of them, in the chosen
order.

Shapes: N sequences, L layers, K successive replacements, R resamples.
"""

import numpy as np
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap
from sparsedepth.measure.loss import fork_losses
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored, per_position
from sparsedepth.measure.usefulness import fit_affine
from sparsedepth.probe.fork import Fork
from sparsedepth.probe.probed_model import ProbedModel


def jointly_needed_layers(
    probed: ProbedModel, fit_NT: Tensor, scored: Scored, threshold: float, rng: np.random.Generator
) -> BootstrapEstimate:
    """The number of remaining blocks, `threshold` in nat/token. L (L + 1) / 2 forks at most. Raises ValueError unless
    there are more than D + 1 fit tokens."""
    maps = fit_affine(probed, fit_NT)
    remaining, replaced = list(range(1, probed.n_layers + 1)), {}
    added_KN: list[np.ndarray] = []
    while remaining and (not added_KN or added_KN[-1].mean() <= threshold):
        forks = [Fork({**replaced, layer: maps[layer - 1]}) for layer in remaining]
        base_N, changed_NF = fork_losses(probed, scored, forks)
        best = int(np.nan_to_num(changed_NF.mean(0), nan=np.inf, posinf=np.inf).argmin())
        added_KN.append(changed_NF[:, best] - base_N)
        layer = remaining.pop(best)
        replaced[layer] = maps[layer - 1]

    def count(added_RK: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
        within_RK = per_position(added_RK, weight_R) <= threshold
        n_needed_R = probed.n_layers - np.logical_and.accumulate(within_RK, axis=1).sum(1)
        return np.where(np.isnan(added_RK).any(1), np.nan, n_needed_R)  # undefined if a loss is NaN

    return bootstrap(count, np.stack(added_KN, axis=1), scored.weight, rng=rng)


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    result = jointly_needed_layers(
        context.probed, context.fit, context.scored, context.config.needed_threshold, context.rng()
    )
    rows.add_score("jointly_needed_layers", result)
