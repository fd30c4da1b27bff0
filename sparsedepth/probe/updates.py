"""The residual stream block by block, with each block's update split into branches if the model is such a sum.

    x_l = x_(l-1) + a_l + f_l,   u_l = x_l - x_(l-1) = a_l + f_l,   l = 1..L

a_l is what attention adds, f_l what the feed-forward part adds (2505.13898 writes a and m).

Shapes: B sequences, T tokens of one sequence, D width of the residual stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, eq=False)
class Update:
    """The states before and after one block; each state and update is x_BTD."""

    layer: int
    before: Tensor
    """x_(l-1)"""
    after: Tensor
    """x_l"""
    branches: tuple[Tensor, Tensor] | None
    """(a_l, f_l), or None if unknown"""


def updates(probed: ProbedModel, tokens_BT: Tensor) -> Iterator[Update]:
    """Blocks 1..L in order. With known branches x_l is computed as their sum, so that no block runs twice."""
    before_BTD = probed.embed(tokens_BT)
    for layer in range(1, probed.n_layers + 1):
        branches = probed.branches(layer, before_BTD)
        if branches is None:
            after_BTD = probed.block(layer, before_BTD)
        else:
            attention_BTD, ffn_BTD = branches
            after_BTD = before_BTD + attention_BTD + ffn_BTD
        yield Update(layer, before_BTD, after_BTD, branches)
        before_BTD = after_BTD
