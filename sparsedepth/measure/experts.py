"""Expert use: how evenly the router spreads tokens, and how certain it is.

    load_e  = share of the layer's choices that fall on expert e;  sum over e = 1, balanced 1/E     (2101.03961, f_i)
    effective experts = exp(- sum_e load_e ln load_e)              from C (collapsed) to E (balanced)
    variation         = sd_e(load_e) / mean_e(load_e)              0 balanced, sqrt(E / C - 1) collapsed (1701.06538)
    router entropy    = mean over tokens of - sum_e p_e ln p_e     nat, from 0 (certain) to ln E; p over all experts

Collapsed: all tokens choose the same C experts. A router can be certain of each token and balanced over all (entropy
near 0, effective experts near E), and vice versa. The model's scores are means over the layers with experts; a dense
model has none.

Shapes: N and B sequences, T tokens of one sequence, E experts, C experts chosen per token, M layers with experts,
R resamples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.config.runtime import MAX_TOKENS
from sparsedepth.measure.bootstrap import BootstrapEstimate, identity, shared_resamples
from sparsedepth.measure.context import MeasureContext
from sparsedepth.measure.rows import Measurements
from sparsedepth.probe.fork import batches, block_inputs, probing
from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertUse:
    """Lists are by layer 1..L, None for a layer without experts."""

    load: list[np.ndarray | None]
    """[E] shares that sum to 1"""
    effective_experts: list[float | None]
    variation: list[float | None]
    router_entropy: list[float | None]
    mean_effective_experts: BootstrapEstimate
    mean_variation: BootstrapEstimate
    mean_router_entropy: BootstrapEstimate


def expert_use(
    probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator, max_tokens: int = MAX_TOKENS
) -> ExpertUse | None:
    """Load and router entropy of every layer with experts; None for a model without."""
    loads: dict[int, list[Tensor]] = {}
    entropies: dict[int, list[Tensor]] = {}
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT, max_tokens):
            for layer, x_BTD in block_inputs(probed, tokens_BT):
                if (routing := probed.routing(layer, x_BTD)) is None:
                    continue
                probability_BTE, choice_BTC = routing
                chosen_BE = F.one_hot(choice_BTC, probability_BTE.shape[-1]).double().mean((1, 2))
                entropy_BT = torch.special.entr(probability_BTE).sum(-1)
                loads.setdefault(layer, []).append(chosen_BE)
                entropies.setdefault(layer, []).append(entropy_BT.mean(1, dtype=torch.float64))
    if not loads:
        return None
    load_NE = {layer: torch.cat(parts).cpu().numpy() for layer, parts in loads.items()}
    entropy_N = {layer: torch.cat(parts).cpu().numpy() for layer, parts in entropies.items()}
    estimate = shared_resamples(rng)

    def by_layer(value_of_layer: Callable[[int], float]) -> list[float | None]:
        return [value_of_layer(layer) if layer in load_NE else None for layer in range(1, probed.n_layers + 1)]

    def mean_over_layers(statistic: Callable[[np.ndarray], np.ndarray]) -> BootstrapEstimate:
        def score(*load_RE: np.ndarray) -> np.ndarray:
            return np.mean([statistic(load) for load in load_RE], axis=0)

        return estimate(score, *load_NE.values())

    return ExpertUse(
        load=[load_NE[layer].mean(0) if layer in load_NE else None for layer in range(1, probed.n_layers + 1)],
        effective_experts=by_layer(lambda layer: float(effective_experts(load_NE[layer].mean(0)))),
        variation=by_layer(lambda layer: float(variation(load_NE[layer].mean(0)))),
        router_entropy=by_layer(lambda layer: float(entropy_N[layer].mean())),
        mean_effective_experts=mean_over_layers(effective_experts),
        mean_variation=mean_over_layers(variation),
        mean_router_entropy=estimate(identity, np.mean([*entropy_N.values()], axis=0)),
    )


def effective_experts(load: np.ndarray) -> np.ndarray:
    """exp of the entropy over the last axis, with 0 ln 0 = 0."""
    return np.exp(-(load * np.log(np.where(load > 0, load, 1))).sum(-1))


def variation(load: np.ndarray) -> np.ndarray:
    """Population standard deviation / mean over the last axis."""
    return load.std(-1) / load.mean(-1)


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    result = expert_use(context.probed, context.inputs, context.rng(), context.max_tokens)
    if result is None:
        return
    for name, mean, by_layer in (
        ("effective_experts", result.mean_effective_experts, result.effective_experts),
        ("expert_load_variation", result.mean_variation, result.variation),
        ("router_entropy", result.mean_router_entropy, result.router_entropy),
    ):
        rows.add_score(name, mean)
        rows.add_layers(name, by_layer, context.n_tokens)
