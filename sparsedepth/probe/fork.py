"""Interventions on layers, as forks of the residual stream: a fork leaves the recorded stream at its first changed
layer.

    x'_(s-1) = x_(s-1),   x'_l = change_l(x'_(l-1)) at changed layers,   x'_l = block(l, x'_(l-1)) at the others

Forks at the same depth run through a block as one batch, so a score costs a few large passes from the changed layers on
instead of a full forward pass per intervention. Weights are never modified.

Shapes: F forks."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.runtime import CPU_PASS_TOKENS, CPU_PASS_VALUES, MAX_TOKENS
from sparsedepth.model.linear import TensorPair
from sparsedepth.probe.probed_model import ProbedModel

GPU_CHUNKS = 16
"""Factor by which chunks of logits, attention weights and cosines are larger on a GPU: 128 to 256 MiB each. A guess."""

Change = int | Callable[[Tensor], Tensor] | None
"""What replaces a layer: the block of another layer, a function x_BTD -> x_BTD, or (None) nothing."""

Fork = Mapping[int, Change]
"""Changed layers, numbered from 1: {2: None} skips a block, {1: 3, 3: 1} swaps two."""


@contextmanager
def probing(probed: ProbedModel, *, gradients: bool = False) -> Generator[None]:
    """Context in evaluation mode, fp32, without gradients; modes and random state are restored, also after an error.
    With `gradients` the code inside may differentiate a block by its input under `torch.enable_grad`; weights are
    frozen meanwhile, so that graphs keep nothing for their gradients."""
    in_training = [module for module in probed.model.modules() if module.training]
    weights = [(weight, weight.requires_grad) for weight in probed.model.parameters()]
    cuda = [probed.device] if probed.device.type == "cuda" else []
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")  # no TF32, whatever the calling program allows
        for module in in_training:
            module.training = False
        if gradients:
            probed.model.requires_grad_(False)
        with (
            torch.random.fork_rng(devices=cuda),
            # Tensors made in inference mode can never enter a graph.
            torch.no_grad() if gradients else torch.inference_mode(),
            torch.autocast(probed.device.type, enabled=False),
            probed.exact(),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module in in_training:
            module.training = True
        for weight, requires_grad in weights if gradients else []:
            weight.requires_grad_(requires_grad)


def batches(probed: ProbedModel, tokens: Tensor, memory: int = 1) -> Iterator[Tensor]:
    """Parts of `tokens` [N, T] on the model's device: whole sequences, as many as in a pass (`rows_per_pass`)."""
    for part in tokens.split(rows_per_pass(probed, tokens.shape[1], memory)):
        yield part.to(probed.device)


def by_sequence(
    probed: ProbedModel, parts: Iterable[Any], compute: Callable[[Any], Iterable[Tensor]], *, gradients: bool = False
) -> list[np.ndarray]:
    """compute(batch) of every batch under `probing`: each of its results [B, ...] concatenated over sequences."""
    with probing(probed, gradients=gradients):
        return [torch.cat(each).cpu().numpy() for each in zip(*map(compute, parts), strict=True)]


def rows_per_pass(probed: ProbedModel, length: int, memory: int = 1) -> int:
    """Sequences of `length` tokens in a pass, at least one; `memory` of a token, relative to a plain pass."""
    n_tokens = MAX_TOKENS // memory
    if probed.device.type == "cpu":
        n_tokens = min(n_tokens, max(CPU_PASS_TOKENS, CPU_PASS_VALUES // probed.stream_width))
    return max(1, n_tokens // length)


def chunk_size(device: torch.device, numbers: int) -> int:
    """`numbers` at a time on a CPU, GPU_CHUNKS times as many on a GPU."""
    return numbers if device.type == "cpu" else GPU_CHUNKS * numbers


def stream(probed: ProbedModel, tokens_BT: Tensor) -> Iterator[Tensor]:
    """The states x_0 .. x_L in order, each x_BTD, the last before the final norm."""
    x_BTD = probed.embed(tokens_BT)
    yield x_BTD
    for layer in range(1, probed.n_layers + 1):
        x_BTD = probed.block(layer, x_BTD)
        yield x_BTD


def block_inputs(probed: ProbedModel, tokens_BT: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(l, x_(l-1)) of the blocks l = 1..L; x_L is not computed."""
    return enumerate(itertools.islice(stream(probed, tokens_BT), probed.n_layers), start=1)


class Update(NamedTuple):
    """The states x_(l-1) and x_l, and what attention (a_l) and the feed-forward part (f_l) add, if the block is such a
    sum: x_l = x_(l-1) + a_l + f_l (2505.13898 writes a and m). Each is x_BTD."""

    layer: int
    before: Tensor
    after: Tensor
    branches: TensorPair | None
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


class Step(NamedTuple):
    """The states x'_(l-1) and x'_l, [F, B, T, D], of some forks at one layer."""

    layer: int
    forks: list[int]
    """indices into the sequence of forks"""
    before: Tensor
    after: Tensor


def run_forks(probed: ProbedModel, states: Sequence[Tensor], forks: Sequence[Fork]) -> Iterator[Step]:
    """Run forks of the recorded `states` to the last layer, as many per pass as fit into it (`rows_per_pass`). Yields
    every layer from a fork's start on; each fork is in exactly one step per layer."""
    assert all(min(fork) >= 1 and max(fork) <= probed.n_layers for fork in forks)
    sorted_forks = sorted(range(len(forks)), key=lambda index: min(forks[index]))
    per_pass = rows_per_pass(probed, states[0][..., 0].numel())
    for offset in range(0, len(forks), per_pass):
        yield from _run_group(probed, states, forks, sorted_forks[offset : offset + per_pass])


def _run_group(
    probed: ProbedModel, states: Sequence[Tensor], forks: Sequence[Fork], group: list[int]
) -> Iterator[Step]:
    """One pass over the forks in `group`, sorted by start: active forks are the first rows of the batch."""
    x_FBTD = states[0].new_empty(0, *states[0].shape)
    for layer in range(min(forks[group[0]]), probed.n_layers + 1):
        n_starting = sum(min(forks[index]) == layer for index in group)
        if n_starting:
            x_FBTD = torch.cat((x_FBTD, states[layer - 1].expand(n_starting, -1, -1, -1)))
        active = group[: len(x_FBTD)]
        after_FBTD = _advance(probed, layer, [forks[index] for index in active], x_FBTD)
        yield Step(layer, active, x_FBTD, after_FBTD)
        x_FBTD = after_FBTD


def _advance(probed: ProbedModel, layer: int, forks: Sequence[Fork], x_FBTD: Tensor) -> Tensor:
    """The state of each fork after `layer`: forks with the same change there run as one batch."""
    rows_by_change = defaultdict(list)
    for row, fork in enumerate(forks):
        rows_by_change[fork.get(layer, layer)].append(row)
    after_FBTD = torch.empty_like(x_FBTD)
    for change, rows in rows_by_change.items():
        x_BTD = x_FBTD[rows].flatten(0, 1)
        if change is not None:
            x_BTD = probed.block(change, x_BTD) if isinstance(change, int) else change(x_BTD)
        after_FBTD[rows] = x_BTD.unflatten(0, (len(rows), -1))
    return after_FBTD
