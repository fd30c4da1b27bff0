"""Attention weights of any model, in chunks of rows.

    a_ij = softmax_j(cap(q_i k_j / sqrt(K))),   i - window < j <= i,   cap(s) = c tanh(s / c) or s

Without causality (a ViT) over every j. Window and cap are optional. Causal weights outside a window (2310.06825,
section 2) are 0, as are those of other documents in a packed sequence; a cap (2408.00118, section 2) bounds the scores.

Shapes: B sequences, T tokens, H query heads, G key/value heads, M = H / G heads per group, K head width, R rows of a
chunk, D width of the residual stream.
"""

import math

import torch
from torch import Tensor

from sparsedepth.probe.probed_model import AttentionForm


def attention_rows(
    q_BHTK: Tensor, k_BGTK: Tensor, start: int, stop: int, form: AttentionForm | None = None
) -> tuple[Tensor, Tensor]:
    """weight_BHRS of rows start .. stop - 1 over the S = stop keys before stop (all T without causality), and
    future_RS, true for j > i with causality.

    Weights of the future, outside the window and of other documents are 0.
    """
    form = form or AttentionForm()
    q_BGMRK = q_BHTK[:, :, start:stop].unflatten(1, (k_BGTK.shape[1], -1))
    n_keys = stop if form.causal else k_BGTK.shape[2]
    k_BG1KS = k_BGTK[:, :, None, :n_keys].transpose(-1, -2)
    score_BHRS = (q_BGMRK @ k_BG1KS).flatten(1, 2).float() / math.sqrt(q_BHTK.shape[-1])
    if form.softcap is not None:
        score_BHRS = form.softcap * torch.tanh(score_BHRS / form.softcap)
    ones_RS = torch.ones(stop - start, n_keys, dtype=torch.bool, device=q_BHTK.device)
    future_RS = ones_RS.triu(start + 1) if form.causal else ~ones_RS
    hidden_RS = future_RS if form.window is None else future_RS | ones_RS.tril(start - form.window)
    score_BHRS.masked_fill_(hidden_RS, -math.inf)
    if form.documents is not None:
        document_BR1, document_B1S = form.documents[:, start:stop, None], form.documents[:, None, :n_keys]
        score_BHRS.masked_fill_((document_BR1 != document_B1S)[:, None], -math.inf)
    return score_BHRS.softmax(-1), future_RS
