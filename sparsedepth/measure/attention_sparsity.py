"""Attention sparsity: the share of the causal attention weights that are near zero.

    a_ij = softmax_j(q_i k_j / sqrt(K)),   j <= i,   i = 1..T: T (T + 1) / 2 weights per head and sequence
    absolute: share with a_ij < tau          2603.15389 (its values of tau are not published)
    relative: share with a_ij < c / i        control, ours: 1/i is uniform attention

Under uniform attention the absolute share grows with T by itself (every row i > 1/tau is all 'sparse'); the relative
one is 0 for c <= 1 at any T. The weights are computed in blocks of rows, never a whole T x T for every head of a layer.

Shapes: N and B sequences, T tokens, H query heads, G key/value heads, M = H / G heads per group, K width of a head,
R rows of a block, C thresholds, L layers.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import Estimate, bootstrap
from sparsedepth.probe.fork import MAX_TOKENS, batches, probing, stream
from sparsedepth.probe.stack import Stack

MAX_WEIGHTS = 2**22
"""Attention weights that exist at a time (16 MiB in fp32), at least one row of every sequence and head of a batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadShares:
    """Shares from 0 to 1 at one threshold."""

    by_head: np.ndarray
    """[L, H]"""
    by_layer: np.ndarray
    """[L], the mean over heads"""
    total: Estimate
    """over layers and heads"""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSparsity:
    absolute: dict[float, HeadShares]
    """by tau"""
    relative: dict[float, HeadShares]
    """by c"""
    weights_per_head: int
    """causal weights behind the share of one head of one layer"""


def attention_sparsity(
    stack: Stack,
    tokens_NT: Tensor,
    taus: Sequence[float],
    relative_taus: Sequence[float],
    rng: np.random.Generator,
    max_tokens: int = MAX_TOKENS,
) -> AttentionSparsity:
    """Shares of every head at the thresholds `taus` (attention weight) and `relative_taus` (multiples of 1/i)."""
    parts = []
    with probing(stack):
        for tokens_BT in batches(stack, tokens_NT, max_tokens):
            inputs = itertools.islice(stream(stack, tokens_BT), stack.n_layers)
            counts = [
                count_below(*stack.queries_keys(layer, x_BTD), taus, relative_taus)
                for layer, x_BTD in enumerate(inputs, start=1)
            ]
            parts.append(torch.stack(counts, dim=1))
        count_NLHC = torch.cat(parts).cpu().numpy()
    n_tokens = tokens_NT.shape[1]
    weights = n_tokens * (n_tokens + 1) // 2
    seed = int(rng.integers(2**63))  # one set of resamples, so that thresholds differ by nothing else

    def shares(index: int) -> HeadShares:
        share_NLH = count_NLHC[..., index] / weights
        by_head = share_NLH.mean(0)
        total = bootstrap(lambda share_R: share_R, share_NLH.mean((1, 2)), rng=np.random.default_rng(seed))
        return HeadShares(by_head=by_head, by_layer=by_head.mean(1), total=total)

    return AttentionSparsity(
        absolute={tau: shares(index) for index, tau in enumerate(taus)},
        relative={tau: shares(len(taus) + index) for index, tau in enumerate(relative_taus)},
        weights_per_head=len(tokens_NT) * weights,
    )


def count_below(q_BHTK: Tensor, k_BGTK: Tensor, taus: Sequence[float], relative_taus: Sequence[float]) -> Tensor:
    """count_BHC: causal weights of each sequence and head below each of `taus`, then each of `relative_taus` / i."""
    n_sequences, n_heads, n_tokens, _ = q_BHTK.shape
    count_BHC = q_BHTK.new_zeros(n_sequences, n_heads, len(taus) + len(relative_taus), dtype=torch.int64)
    rows = max(1, MAX_WEIGHTS // (n_sequences * n_heads * n_tokens))
    for start in range(0, n_tokens, rows):
        stop = min(start + rows, n_tokens)
        weight_BHRT = _attention_rows(q_BHTK, k_BGTK, start, stop)
        seen_R1 = torch.arange(start + 1, stop + 1, device=q_BHTK.device)[:, None]
        limits = [*taus, *(tau / seen_R1 for tau in relative_taus)]
        for index, limit in enumerate(limits):
            count_BHC[..., index] += (weight_BHRT < limit).sum((-1, -2))
    return count_BHC


def _attention_rows(q_BHTK: Tensor, k_BGTK: Tensor, start: int, stop: int) -> Tensor:
    """weight_BHRT of the rows start .. stop - 1 over the keys before stop; inf, below no threshold, past row i's."""
    q_BGMRK = q_BHTK[:, :, start:stop].unflatten(1, (k_BGTK.shape[1], -1))
    k_BG1KT = k_BGTK[:, :, None, :stop].transpose(-1, -2)
    score_BHRT = (q_BGMRK @ k_BG1KT).flatten(1, 2).float() / math.sqrt(q_BHTK.shape[-1])
    hidden_RT = torch.ones(stop - start, stop, dtype=torch.bool, device=q_BHTK.device).triu(start + 1)
    weight_BHRT = score_BHRT.masked_fill_(hidden_RT, -math.inf).softmax(-1)
    return weight_BHRT.masked_fill_(hidden_RT, math.inf)
