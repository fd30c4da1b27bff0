"""Weight updates: the size and effective rank of the change of each block's matrices in training.

    dW = W - W_0,   W_0 the initial weights, recomputed from seed and configuration (`model.init`)
    rank = exp(-sum_i p_i ln p_i),   p_i = s_i^2 / sum s^2,   s the singular values of dW
    update rank of a layer  = mean over its matrices of rank / min(rows, columns), 0 to 1
    update size of a layer  = sqrt(sum over them of ||dW||^2 / sum of ||W_0||^2)

The rank is Roy & Vetterli's (2007) effective rank. Deviates: of squared singular values, as in `effective_rank`; theirs
takes s. An unchanged layer has size 0 and no rank. A matrix initialised to zero (init zero_outputs) counts in the size
only by its update. Each expert's matrices are counted separately.

Shapes: E experts, rows x columns of a matrix.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedepth.config.run import RunConfig
from sparsedepth.measure.bootstrap import complete_mean, finite
from sparsedepth.measure.context import MeasureContext, Measurements
from sparsedepth.measure.participation import spectrum_rank
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.init import initial_matrix
from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, kw_only=True)
class WeightUpdates:
    rank: list[float | None]
    """layers 1..L; None without a change"""
    size: list[float | None]
    """None if all initial weights are 0"""
    entries: list[int]
    """of the matrices of each layer"""


def weight_updates(probed: ProbedModel) -> WeightUpdates | None:
    """Rank and size of the change of each matrix, by an SVD; no forward pass. None if the initial weights cannot be
    recomputed: for a model that is no run of ours, or that started from others."""
    model = probed.model
    if not isinstance(model, Decoder) or not isinstance(model.config, RunConfig) or model.config.start_weights:
        return None
    ranks, sizes, entries = [], [], []
    for layer in range(probed.n_layers):
        rank, changed, initial, n = [], 0.0, 0.0, 0
        for weight, first in _matrices(model, model.config, layer):
            squares = torch.linalg.svdvals(weight.double() - first).square()
            # A matrix has as many singular values as its smaller side.
            rank += [spectrum_rank(p) / p.shape[0] for p in squares.view(-1, squares.shape[-1]) if p.sum() > 0]
            changed, initial = changed + squares.sum().item(), initial + first.square().sum().item()
            n += weight.numel()
        ranks.append(complete_mean(rank))
        sizes.append(finite(math.sqrt(changed / initial)) if initial > 0 else None)
        entries.append(n)
    return WeightUpdates(rank=ranks, size=sizes, entries=entries)


def _matrices(model: Decoder, config: RunConfig, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
    """W and W_0 in fp64 of each matrix (or all experts' matrices) of a block; looped blocks share them."""
    names = {weight: name for name, weight in model.named_parameters()}
    for weight in model.blocks[layer].parameters():
        if weight.ndim > 1:
            first = initial_matrix(names[weight], weight.shape, config, config.seed)
            yield weight.detach(), first.to(weight.device).double()


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    result = weight_updates(context.probed)
    if result is None:
        return
    for name, values in (("weight_update_rank", result.rank), ("weight_update_size", result.size)):
        rows.summary[name] = complete_mean(values)
        rows.add_layers(name, values, result.entries)
