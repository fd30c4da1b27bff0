"""Decompositions of many matrices: in batches, which a GPU computes at once. One that does not converge on a GPU is
repeated on the CPU, whose LAPACK is more robust."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BATCH_BYTES = 2**28
"""Limit of the matrices of one call, at least one of them."""


def batched(function: Callable[[Tensor], Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """`function` of each matrix, applied to stacks of them."""
    per_call = max(1, BATCH_BYTES // matrices[0].nbytes)
    results: list[Tensor] = []
    for start in range(0, len(matrices), per_call):
        stacked_nDD = torch.stack([*matrices[start : start + per_call]])
        try:
            result = function(stacked_nDD)
        except torch.linalg.LinAlgError:
            if stacked_nDD.device.type == "cpu":
                raise
            result = function(stacked_nDD.cpu()).to(stacked_nDD.device)
        results += result.unbind()
    return results
