"""How many blocks a model cannot do without, where several are replaced at once.

    S_0 = {};   S_k = S_(k-1) + the block whose replacement beside those of S_(k-1) leaves the lowest loss
    added(S) = loss with the blocks of S replaced by their affine maps (`usefulness`) - loss        (nat/token)
    jointly needed layers = L - the largest k such that added(S_1), ..., added(S_k) <= needed_threshold

Ours. `needed_layers` replaces one block at a time, and so counts none of two blocks that do the same: a model with
layers to spare spreads its work and seems to need few of them. Here the blocks that are left suffice by construction,
so the number is an upper bound of what is needed; a search over all subsets could find fewer. The maps are those of
the whole model, fitted on other tokens, and are not fitted again as blocks are replaced.

Blocks are chosen, and the loss added is taken, on the same sequences; the interval is over resamples of them, along
the order that was chosen.

Shapes: N sequences, L layers, K replacements that were tried in turn, R resamples.
"""

import numpy as np
from torch import Tensor

from sparsedepth.config.runtime import MAX_TOKENS
from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap
from sparsedepth.measure.context import MeasureContext
from sparsedepth.measure.loss import fork_losses
from sparsedepth.measure.rows import Measurements
from sparsedepth.measure.scored import Scored, per_position
from sparsedepth.measure.usefulness import fit_affine
from sparsedepth.probe.fork import Fork
from sparsedepth.probe.probed_model import ProbedModel


def jointly_needed_layers(
    probed: ProbedModel,
    fit_NT: Tensor,
    scored: Scored,
    threshold: float,
    rng: np.random.Generator,
    max_tokens: int = MAX_TOKENS,
) -> BootstrapEstimate:
    """The blocks that are left, `threshold` in nat/token. L (L + 1) / 2 forks at most.

    Raises ValueError unless there are more than D + 1 fit tokens.
    """
    maps = fit_affine(probed, fit_NT, max_tokens)
    kept, replaced = list(range(1, probed.n_layers + 1)), {}
    added_KN: list[np.ndarray] = []
    while kept and (not added_KN or added_KN[-1].mean() <= threshold):
        forks = [Fork({**replaced, layer: maps[layer - 1]}) for layer in kept]
        base_N, changed_NF = fork_losses(probed, scored, forks, max_tokens)
        best = int(np.nan_to_num(changed_NF.mean(0), nan=np.inf, posinf=np.inf).argmin())
        added_KN.append(changed_NF[:, best] - base_N)
        layer = kept.pop(best)
        replaced[layer] = maps[layer - 1]

    def count(added_RK: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
        within_RK = per_position(added_RK, weight_R) <= threshold
        n_needed_R = probed.n_layers - np.logical_and.accumulate(within_RK, axis=1).sum(1)
        return np.where(np.isnan(added_RK).any(1), np.nan, n_needed_R)  # a loss that is no number decides nothing

    return bootstrap(count, np.stack(added_KN, axis=1), scored.weight, rng=rng)


def add_rows(context: MeasureContext, made: Measurements) -> None:
    threshold = context.config.needed_threshold
    made.add_score(
        "jointly_needed_layers",
        jointly_needed_layers(
            context.probed, context.fit, context.scored, threshold, context.rng(), context.max_tokens
        ),
    )
