"""Sparsity of weights, of attention, of activations and of experts.

Weight sparsity: the share of the blocks' matrix entries near zero.

    absolute: share of entries with |w| < eps                   2603.15389 (its values of eps are not published)
    relative: share of entries with |w| < c rms(own matrix)     control, ours: invariant to the scale of the matrix

The absolute share rises when weights shrink, for example by weight decay; the relative one does not. For entries of one
normal distribution the relative share is erf(c / sqrt 2): 0.0797 at c = 0.1. Only matrices that transform the stream
are counted (`ProbedModel.matrices`): no norm, router, embedding or head. A kind is a matrix's role (query, key, value,
output, gate, up, down); the experts of a layer are pooled. The released code announces a script for this and has none.

Attention sparsity: the share of causal attention weights near zero; their entropy, and the attention sink.

    a_ij = softmax_j(q_i k_j / sqrt(K)),   j <= i,   i = 1..T: T (T + 1) / 2 weights per head and sequence
    absolute: share with a_ij < tau                         2603.15389 (its values of tau are not published)
    relative: share with a_ij < c / i                       control, ours: 1/i is uniform attention
    entropy:  mean over rows of H_i = - sum_j a_ij ln a_ij  from 0 (one token) to ln i (uniform)
    relative entropy: mean over rows i >= 2 of H_i / ln i   from 0 to 1, uniform, at any T
    sink:     mean over rows i >= 2 of a_i1                 the share of the first token (2309.17453); 1/i if uniform

Under uniform attention the absolute share grows with T (every row i > 1/tau is all 'sparse'); the relative share is 0
for c <= 1 at any T. Weights hidden by a
window or the end of a document count as causal weights of 0. In an encoder j <= T: T^2 weights, and T in place of i.

Activation sparsity: the share of hidden units of dense feed-forward parts that are inactive.

    h = input of the down projection, F numbers per token
    zeros     share of the h that are exactly 0
    sparsity  share with |h| < NEAR_ZERO rms(h), rms over all tokens and units of the layer
    units     E over tokens of (sum_f h_f^2)^2 / (F sum_f h_f^4): 1 if all units are equal, 1/F if one dominates

relu, reglu and relu2 give exact zeros (counted by 2210.06313 in ReLU transformers); smooth functions do not, and are
compared by the other two. 2603.15389, section 3.2.1, lists activations as a form of sparsity. A token with h = 0 has no
`units`. Layers of experts have no dense part and are left out.

Expert use: how evenly the router spreads tokens, and how certain it is.

    load_e  = share of the layer's choices that fall on expert e;  sum over e = 1, balanced 1/E     (2101.03961, f_i)
    effective experts = exp(- sum_e load_e ln load_e)              from C (collapsed) to E (balanced)
    variation         = sd_e(load_e) / mean_e(load_e)              0 balanced, sqrt(E / C - 1) collapsed (1701.06538)
    router entropy    = mean over tokens of - sum_e p_e ln p_e     nat, from 0 (certain) to ln E; p over all experts

Collapsed: all tokens choose the same C experts. A router can be certain of each token and balanced over all, and vice
versa. The model's scores are means over the layers with experts; a dense model has none.

Shapes: H query heads, G key/value heads, K head width, S keys, E experts; C thresholds and last all entries, quantities
by name, or experts chosen per token; here R rows of a chunk."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import entr
from torch import Tensor

from sparsedepth.measure.bootstrap import finite, finites, identity, ratio, shared_resamples
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.model.attention import attention_rows
from sparsedepth.model.context import Context
from sparsedepth.probe.fork import batches, block_inputs, by_sequence, chunk_size, probing
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities import IN_RUNS
from sparsedepth.quantities.measured import MATRICES
from sparsedepth.quantities.quantity import Named


def weight_counts(probed: ProbedModel, thresholds: Sequence[float], *, relative: bool) -> dict[str, np.ndarray]:
    """count_LC by kind of matrix, "" for all: entries below each threshold, in units of a weight or (`relative`) of the
    rms of its matrix, and last their number, without matrices of zeros if they are relative."""
    count_LC = defaultdict(lambda: np.zeros((probed.n_layers, len(thresholds) + 1), dtype=np.int64))
    with probing(probed):
        for index in range(probed.n_layers):
            for name, matrix in probed.matrices(index + 1).items():
                # In fp32: bf16 would round the threshold by up to 0.4%, past some weights.
                size, unit = matrix.float().abs(), 1.0
                if relative:
                    unit = torch.linalg.vector_norm(matrix, dtype=torch.float64).item() / math.sqrt(matrix.numel())
                below = [*(int((size < t * unit).sum()) for t in thresholds), matrix.numel()] if unit > 0 else 0
                for kind in ("", name.rpartition(".")[2]):  # expert3.gate is a gate
                    count_LC[kind][index] += below
    return count_LC


def shares(count_LC: np.ndarray) -> list[list[float | None]]:
    """By threshold and layer; None without entries, as in a layer without the kind."""
    return [finites(ratio(below_L, count_LC[..., -1])) for below_L in np.moveaxis(count_LC[..., :-1], -1, 0)]


def add_weight_rows(context: MeasureContext, rows: Measurements) -> None:
    for name in ("weight_sparsity", "weight_sparsity_rel"):
        thresholds = getattr(context.config, IN_RUNS[name].threshold)
        counts = weight_counts(context.probed, thresholds, relative=name.endswith("_rel"))
        ((rows.summary[name],), *_) = shares(counts[""].sum(0, keepdims=True))
        for kind in ("", *MATRICES):
            if kind in counts:
                for threshold, values in zip(thresholds, shares(counts[kind]), strict=True):
                    metric = f"{name}_{kind}" if kind else name
                    rows.add_layers(f"{metric}@{threshold:g}", values, counts[kind][:, -1].tolist())


MAX_WEIGHTS = 2**22
"""Attention weights computed at a time (16 MiB in fp32; on a GPU more, `probe.fork.chunk_size`)."""


def add_attention_rows(context: MeasureContext, rows: Measurements) -> None:
    """attention_sparsity@tau and attention_sparsity_rel@tau (of 1/i) for each threshold, attention_entropy (nat),
    attention_entropy_rel and attention_sink, by head and layer, of the blocks whose weights are known: missing for a
    block without attention, and where no row defines it (relative entropy and sink of single tokens). The model's
    shares are at the first threshold."""
    probed, taus, relative_taus = context.probed, context.config.attention_tau, context.config.attention_rel_tau
    n_sequences, n_tokens = context.inputs.shape
    n_weights = n_tokens * (n_tokens + 1) // 2 if getattr(probed, "is_causal", True) else n_tokens**2
    sizes = {  # weights, or rows, per head and layer of a sequence
        **dict.fromkeys(_limits(taus, relative_taus), n_weights),
        "attention_entropy": n_tokens,
        "attention_entropy_rel": n_tokens - 1,
        "attention_sink": n_tokens - 1,
    }

    layers: dict[int, None] = {}

    def batch_sums(tokens_BT: Tensor) -> list[Tensor]:
        of_layers = []
        for layer, x_BTD in block_inputs(probed, tokens_BT):
            if (inputs := probed.attention_inputs(layer, x_BTD)) is not None:
                layers[layer] = None
                of_layers.append(attention_sums(*inputs, taus=taus, relative_taus=relative_taus))
        return [torch.stack([sums[name] for sums in of_layers], dim=1) for name in sizes if of_layers]

    estimate, found = shared_resamples(context.rng()), by_sequence(probed, batches(probed, context.inputs), batch_sums)
    for (name, size), sum_NlH in zip(sizes.items(), found, strict=False):  # none without any attention
        value_NlH = sum_NlH / (size or np.nan)
        value_LH = np.full((probed.n_layers, value_NlH.shape[2]), np.nan)
        value_LH[[layer - 1 for layer in layers]] = value_NlH.mean(0)
        if (column := name.partition("@")[0]) not in rows.summary:
            rows.add_score(column, estimate(identity, value_NlH.mean((1, 2))))
        rows.add_layers(name, finites(value_LH.mean(1)), n_sequences * size * value_LH.shape[1])
        rows.add_heads(name, value_LH, n_sequences * size)


def _limits(taus: Sequence[float], relative_taus: Sequence[float], n_keys: float | Tensor = 1.0) -> Named:
    """By name of the share: the limit below which a weight counts, in a row of so many keys."""
    return {
        **{f"attention_sparsity@{tau:g}": tau for tau in taus},
        **{f"attention_sparsity_rel@{tau:g}": tau / n_keys for tau in relative_taus},
    }


def attention_sums(
    q_BHTK: Tensor, k_BGTK: Tensor, context: Context, *, taus: Sequence[float], relative_taus: Sequence[float]
) -> dict[str, Tensor]:
    """By name, sum_BH in fp64 over the rows of each sequence and head."""
    n_sequences, n_heads, n_tokens, _ = q_BHTK.shape
    sums: Named = defaultdict(float)
    rows = max(1, chunk_size(q_BHTK.device, MAX_WEIGHTS) // (n_sequences * n_heads * n_tokens))
    for start in range(0, n_tokens, rows):
        stop = min(start + rows, n_tokens)
        weight_BHRS = attention_rows(q_BHTK, k_BGTK, start, stop, context)
        n_keys_R1 = torch.arange(start + 1, stop + 1, device=q_BHTK.device)[:, None]
        if not context.is_causal:
            n_keys_R1 = torch.full_like(n_keys_R1, n_tokens)
        after_first_R = slice(max(0, 1 - start), None)  # without the first row of the sequence
        entropy_BHR = torch.special.entr(weight_BHRS).sum(-1)
        relative_BHR = entropy_BHR[..., after_first_R] / n_keys_R1[after_first_R, 0].log()
        sums["attention_entropy"] += entropy_BHR.sum(-1, dtype=torch.float64)
        sums["attention_entropy_rel"] += relative_BHR.sum(-1, dtype=torch.float64)
        sums["attention_sink"] += weight_BHRS[..., after_first_R, 0].sum(-1, dtype=torch.float64)
        future_RS = torch.arange(weight_BHRS.shape[-1], device=q_BHTK.device) >= n_keys_R1
        weight_BHRS.masked_fill_(future_RS, torch.inf)  # below no threshold
        for name, limit in _limits(taus, relative_taus, n_keys_R1).items():
            sums[name] += (weight_BHRS < limit).sum((-1, -2), dtype=torch.float64)
    unknown_BH = 0 * sums["attention_entropy"]  # NaN where a weight is: no limit is above it
    return {name: sum_BH + unknown_BH for name, sum_BH in sums.items()}


NEAR_ZERO = 0.1
"""Threshold relative to the rms of a layer's hidden units, as the first of weight_rel_eps."""


def add_activation_rows(context: MeasureContext, rows: Measurements) -> None:
    """The quantities above of layers 1..L; None for experts, or (units) if all hidden units are 0. Nothing
    if one is not finite. Two passes without the head, the first for the rms of each layer; each block runs to its
    hidden units twice."""
    probed, tokens_NT = context.probed, context.inputs
    of_layer: dict[int, Any] = defaultdict(float)  # squares and their number
    sums: dict[int, Any] = defaultdict(float)  # of the three shares over tokens, and numbers of tokens
    with probing(probed):
        for layer, h_nF in _hidden(probed, tokens_NT):
            of_layer[layer] += np.array([h_nF.square().sum().item(), h_nF.numel()])
        if not np.isfinite([*of_layer.values()]).all():
            return
        for layer, h_nF in _hidden(probed, tokens_NT):
            total, count = of_layer[layer]
            is_zero = h_nF == 0
            is_near = is_zero | (h_nF.abs() < NEAR_ZERO * math.sqrt(total / count))
            unit_n = h_nF.square().sum(1).square() / (h_nF.shape[1] * h_nF.pow(4).sum(1))  # NaN without any
            values_3n = torch.stack((is_zero.double().mean(1), is_near.double().mean(1), unit_n))
            sums[layer] += torch.stack((values_3n.nansum(1), (~values_3n.isnan()).sum(1))).cpu().numpy()
    means = {layer: finites(ratio(*sum_23)) for layer, sum_23 in sums.items()}
    by_layer = [means.get(layer, [None] * 3) for layer in range(1, probed.n_layers + 1)]
    names = ("activation_zeros", "activation_sparsity", "activation_units")
    for name, values in zip(names, zip(*by_layer, strict=True), strict=True):
        if known := [share for share in values if share is not None]:  # a mixture of experts may have no dense part
            rows.summary[name] = sum(known) / len(known)
            rows.add_layers(name, values, context.n_tokens)


def _hidden(probed: ProbedModel, tokens_NT: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(layer, h_nF in fp64) of each batch and dense layer."""
    for tokens_BT in batches(probed, tokens_NT):
        for layer, x_BTD in block_inputs(probed, tokens_BT):
            if (h_BTF := probed.hidden_units(layer, x_BTD)) is not None:
                yield layer, h_BTF.flatten(0, 1).double()


def add_expert_rows(context: MeasureContext, rows: Measurements) -> None:
    """For layers 1..L, None for a layer without experts; nothing for a model without."""
    probed, layers = context.probed, dict[int, None]()

    def of_batch(tokens_BT: Tensor) -> list[Tensor]:
        """The share of each expert, for each layer that has them; then the entropies."""
        loads, entropies = [], []
        for layer, x_BTD in block_inputs(probed, tokens_BT):
            if (routing := probed.routing(layer, x_BTD)) is not None:
                layers[layer] = None
                probability_BTE, choice_BTC = routing
                entropies.append(torch.special.entr(probability_BTE).sum(-1).mean(1, dtype=torch.float64))
                load_BE = F.one_hot(choice_BTC, probability_BTE.shape[-1]).double().mean((1, 2))
                loads.append(load_BE + 0 * entropies[-1][:, None])  # NaN where the router's probabilities are
        return loads + entropies

    found = by_sequence(probed, batches(probed, context.inputs), of_batch)
    if not layers:
        return
    loads, entropies, estimate = found[: len(layers)], found[len(layers) :], shared_resamples(context.rng())
    for name, statistic, values in (
        ("effective_experts", effective_experts, loads),
        ("expert_load_variation", variation, loads),
        ("router_entropy", identity, entropies),
    ):

        def mean(*means: np.ndarray, of_layer: Any = statistic) -> np.ndarray:
            return np.mean([of_layer(layer_mean) for layer_mean in means], axis=0)

        by_layer = {layer: finite(float(statistic(each.mean(0)))) for layer, each in zip(layers, values, strict=True)}
        every = range(1, probed.n_layers + 1)
        rows.add_profile(name, [*map(by_layer.get, every)], estimate(mean, *values), context.n_tokens)


def effective_experts(load: np.ndarray) -> np.ndarray:
    """exp of the entropy over the last axis, with 0 ln 0 = 0."""
    return np.exp(entr(load).sum(-1))


def variation(load: np.ndarray) -> np.ndarray:
    """Population standard deviation / mean over the last axis."""
    return load.std(-1) / load.mean(-1)
