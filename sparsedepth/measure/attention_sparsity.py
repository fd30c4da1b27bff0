"""Attention sparsity: the share of causal attention weights near zero; their entropy, and the attention sink.

    a_ij = softmax_j(q_i k_j / sqrt(K)),   j <= i,   i = 1..T: T (T + 1) / 2 weights per head and sequence
    absolute: share with a_ij < tau                         2603.15389 (its values of tau are not published)
    relative: share with a_ij < c / i                       control, ours: 1/i is uniform attention
    entropy:  mean over rows of H_i = - sum_j a_ij ln a_ij  from 0 (one token) to ln i (uniform)
    relative entropy: mean over rows i >= 2 of H_i / ln i   from 0 to 1, uniform, at any T
    sink:     mean over rows i >= 2 of a_i1                 the share of the first token (2309.17453); 1/i if uniform

Under uniform attention the absolute share grows with T (every row i > 1/tau is all 'sparse'); the relative share is 0
for c <= 1 at any T. Without causality (a ViT) every row has T weights, and i is T in each formula. Weights hidden by a
window or the end of a document count as causal weights of 0.

Shapes: H query heads, G key/value heads, K head width, S keys, C quantities by name; here R rows of a chunk.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, identity, shared_resamples
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import block_inputs, by_sequence, chunk_size
from sparsedepth.probe.probed_model import AttentionForm, ProbedModel, attention_rows

MAX_WEIGHTS = 2**22
"""Attention weights computed at a time (16 MiB in fp32; on a GPU more, `probe.fork.chunk_size`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadValues:
    """One quantity; NaN and None if no row defines it (relative entropy and sink of single tokens)."""

    by_head: np.ndarray
    """[L, H]"""
    total: BootstrapEstimate
    """over layers and heads"""
    n: int
    """causal weights, or rows, per head and layer"""


def attention_sparsity(
    probed: ProbedModel,
    tokens_NT: Tensor,
    taus: Sequence[float],
    relative_taus: Sequence[float],
    rng: np.random.Generator,
) -> dict[str, HeadValues]:
    """attention_sparsity@tau and attention_sparsity_rel@tau (of 1/i) for each threshold,
    attention_entropy (nat), attention_entropy_rel and attention_sink."""
    n_sequences, n_tokens = tokens_NT.shape[:2]
    n_weights = n_tokens * (n_tokens + 1) // 2 if probed.causal else n_tokens**2
    sizes = {
        **dict.fromkeys(_limits(taus, relative_taus), n_weights),
        "attention_entropy": n_tokens,
        "attention_entropy_rel": n_tokens - 1,
        "attention_sink": n_tokens - 1,
    }

    def batch_sums(tokens_BT: Tensor) -> Tensor:
        layers = [
            attention_sums(*probed.attention_inputs(layer, x_BTD), taus=taus, relative_taus=relative_taus)
            for layer, x_BTD in block_inputs(probed, tokens_BT)
        ]
        return torch.stack([torch.stack([sums[name] for sums in layers], dim=1) for name in sizes], dim=-1)

    sum_NLHC = by_sequence(probed, tokens_NT, batch_sums)
    estimate = shared_resamples(rng)
    values = {}
    for (name, size), sum_NLH in zip(sizes.items(), np.moveaxis(sum_NLHC, -1, 0), strict=True):
        value_NLH = sum_NLH / (size or np.nan)
        total = estimate(identity, value_NLH.mean((1, 2)))
        values[name] = HeadValues(by_head=value_NLH.mean(0), total=total, n=n_sequences * size)
    return values


def _limits(taus: Sequence[float], relative_taus: Sequence[float], n_keys: float | Tensor = 1.0) -> dict[str, Any]:
    """By name of the share: the limit below which a weight counts, in a row of so many keys."""
    return {
        **{f"attention_sparsity@{tau:g}": tau for tau in taus},
        **{f"attention_sparsity_rel@{tau:g}": tau / n_keys for tau in relative_taus},
    }


def attention_sums(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    form: AttentionForm,
    *,
    taus: Sequence[float],
    relative_taus: Sequence[float],
) -> dict[str, Tensor]:
    """By name, sum_BH in fp64 over the rows of each sequence and head."""
    n_sequences, n_heads, n_tokens, _ = q_BHTK.shape
    sums: dict[str, Any] = defaultdict(float)
    rows = max(1, chunk_size(q_BHTK.device, MAX_WEIGHTS) // (n_sequences * n_heads * n_tokens))
    for start in range(0, n_tokens, rows):
        stop = min(start + rows, n_tokens)
        weight_BHRS, future_RS = attention_rows(q_BHTK, k_BGTK, start, stop, form)
        n_keys_R1 = torch.arange(start + 1, stop + 1, device=q_BHTK.device)[:, None]
        if not form.causal:
            n_keys_R1 = torch.full_like(n_keys_R1, n_tokens)
        after_first_R = slice(max(0, 1 - start), None)  # without the first row of the sequence
        entropy_BHR = torch.special.entr(weight_BHRS).sum(-1)
        relative_BHR = entropy_BHR[..., after_first_R] / n_keys_R1[after_first_R, 0].log()
        sums["attention_entropy"] += entropy_BHR.sum(-1, dtype=torch.float64)
        sums["attention_entropy_rel"] += relative_BHR.sum(-1, dtype=torch.float64)
        sums["attention_sink"] += weight_BHRS[..., after_first_R, 0].sum(-1, dtype=torch.float64)
        weight_BHRS.masked_fill_(future_RS, torch.inf)  # below no threshold
        for name, limit in _limits(taus, relative_taus, n_keys_R1).items():
            sums[name] += (weight_BHRS < limit).sum((-1, -2), dtype=torch.float64)
    return sums


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    """The model's shares at the first threshold; shares by head and layer at each, named with it."""
    taus, relative_taus = context.config.attention_tau, context.config.attention_rel_tau
    for name, values in attention_sparsity(context.probed, context.inputs, taus, relative_taus, context.rng()).items():
        column = name.partition("@")[0]
        if column not in rows.summary:
            rows.add_score(column, values.total)
        rows.add_layers(name, values.by_head.mean(1).tolist(), values.n * values.by_head.shape[1])
        rows.add_heads(name, values.by_head, values.n)
