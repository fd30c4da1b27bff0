"""Expert use: how evenly the router spreads tokens, and how certain it is.

    load_e  = share of the layer's choices that fall on expert e;  sum over e = 1, balanced 1/E     (2101.03961, f_i)
    effective experts = exp(- sum_e load_e ln load_e)              from C (collapsed) to E (balanced)
    variation         = sd_e(load_e) / mean_e(load_e)              0 balanced, sqrt(E / C - 1) collapsed (1701.06538)
    router entropy    = mean over tokens of - sum_e p_e ln p_e     nat, from 0 (certain) to ln E; p over all experts

Collapsed: all tokens choose the same C experts. A router can be certain of each token and balanced over all, and vice
versa. The model's scores are means over the layers with experts; a dense model has none.

Shapes: E experts, C experts chosen per token.
"""

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.measure.bootstrap import ScoreByLayer, identity, shared_resamples
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import batches, block_inputs, probing
from sparsedepth.probe.probed_model import ProbedModel


def expert_use(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """By name, for layers 1..L, None for a layer without experts; empty for a model without."""
    parts: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT):
            for layer, x_BTD in block_inputs(probed, tokens_BT):
                if (routing := probed.routing(layer, x_BTD)) is not None:
                    probability_BTE, choice_BTC = routing
                    chosen_BE = F.one_hot(choice_BTC, probability_BTE.shape[-1]).double().mean((1, 2))
                    entropy_BT = torch.special.entr(probability_BTE).sum(-1)
                    parts[layer].append((chosen_BE, entropy_BT.mean(1, dtype=torch.float64)))
    if not parts:
        return {}
    loads, entropies = (
        {layer: torch.cat([part[i] for part in of_layer]).cpu().numpy() for layer, of_layer in parts.items()}
        for i in range(2)
    )
    estimate = shared_resamples(rng)

    def profile(statistic: Callable[[np.ndarray], np.ndarray], by_sequence: dict[int, np.ndarray]) -> ScoreByLayer:
        def mean(*means: np.ndarray) -> np.ndarray:
            return np.mean([statistic(layer_mean) for layer_mean in means], axis=0)

        by_layer = {layer: float(statistic(values.mean(0))) for layer, values in by_sequence.items()}
        layers = range(1, probed.n_layers + 1)
        return ScoreByLayer(by_layer=[*map(by_layer.get, layers)], score=estimate(mean, *by_sequence.values()))

    return {
        "effective_experts": profile(effective_experts, loads),
        "expert_load_variation": profile(variation, loads),
        "router_entropy": profile(identity, entropies),
    }


def effective_experts(load: np.ndarray) -> np.ndarray:
    """exp of the entropy over the last axis, with 0 ln 0 = 0."""
    return np.exp(-(load * np.log(np.where(load > 0, load, 1))).sum(-1))


def variation(load: np.ndarray) -> np.ndarray:
    """Population standard deviation / mean over the last axis."""
    return load.std(-1) / load.mean(-1)


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    rows.add_profiles(expert_use(context.probed, context.inputs, context.rng()), context.n_tokens)
