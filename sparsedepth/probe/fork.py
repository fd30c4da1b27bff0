"""An intervention is a fork of the residual stream, which leaves the recorded one before the first layer it changes.

    x'_(s-1) = x_(s-1),   x'_l = change_l(x'_(l-1)) at the changed layers,   x'_l = block(l, x'_(l-1)) at the others

Forks that stand at the same depth run through a block as one batch, so a score costs a few large passes from the
changed layers on, rather than one full forward pass per intervention. No weight is ever touched.

Shapes: F forks, B sequences, T tokens of one sequence, D width of the residual stream.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedepth.config.runtime import CPU_NUMBERS, CPU_TOKENS
from sparsedepth.probe.probed_model import ProbedModel

GPU_PIECES = 16
"""How many times larger the pieces of logits, attention weights and cosines are on a GPU, which a small product leaves
idle: 128 to 256 MiB each. Expected, not yet measured."""

Change = int | Callable[[Tensor], Tensor] | None
"""What runs in a layer's place: the block of another layer, a function x_BTD -> x_BTD, or (None) nothing."""


@dataclass(frozen=True)
class Fork:
    """The layers that differ, by number from 1."""

    changes: Mapping[int, Change]

    @property
    def start(self) -> int:
        return min(self.changes)


def skip(layer: int) -> Fork:
    """Leave a block out: x'_l = x_(l-1)."""
    return Fork({layer: None})


def swap(first: int, second: int) -> Fork:
    """Run each of two blocks in the other's place; those in between stay where they are."""
    return Fork({first: second, second: first})


def replace(layer: int, function: Callable[[Tensor], Tensor]) -> Fork:
    """x'_l = function(x_(l-1))."""
    return Fork({layer: function})


@contextmanager
def probing(probed: ProbedModel, *, gradients: bool = False) -> Generator[None, None, None]:
    """Evaluation mode, fp32, no gradients; modes and random state end as they were found, also after an error.

    With `gradients` the code inside may differentiate a block by its input under `torch.enable_grad`. The weights are
    frozen meanwhile, so that no graph keeps what only their gradients need.
    """
    in_training = [module for module in probed.model.modules() if module.training]
    weights = [(weight, weight.requires_grad) for weight in probed.model.parameters()]
    cuda = [probed.device] if probed.device.type == "cuda" else []
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")  # no TF32, whatever the program around it allows itself
        for module in in_training:
            module.training = False
        if gradients:
            probed.model.requires_grad_(False)
        with (
            torch.random.fork_rng(devices=cuda),
            # A tensor made in inference mode can never enter a graph.
            torch.no_grad() if gradients else torch.inference_mode(),
            torch.autocast(probed.device.type, enabled=False),
            probed.exact(),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module in in_training:
            module.training = True
        for weight, needed in weights if gradients else []:
            weight.requires_grad_(needed)


def batches(probed: ProbedModel, tokens: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """`tokens` [N, T] on the model's device, in parts of whole sequences: max_tokens tokens each, or one sequence."""
    for part in tokens.split(rows_per_pass(probed, tokens.shape[1], max_tokens)):
        yield part.to(probed.device)


def token_count(tokens_NT: Tensor) -> int:
    """N T, of ids and of patches, which have several numbers each."""
    return len(tokens_NT) * tokens_NT.shape[1]


def rows_per_pass(probed: ProbedModel, length: int, max_tokens: int) -> int:
    """Sequences of `length` tokens in one pass of max_tokens, one at least."""
    return max(1, _per_pass(probed, max_tokens) // length)


def _per_pass(probed: ProbedModel, max_tokens: int) -> int:
    most = max(CPU_TOKENS, CPU_NUMBERS // probed.stream_width)
    return min(max_tokens, most) if probed.device.type == "cpu" else max_tokens


def piece(device: torch.device, numbers: int) -> int:
    """So many numbers at a time on a CPU, and on a GPU as many more as it takes to keep it busy."""
    return numbers if device.type == "cpu" else GPU_PIECES * numbers


def stream(probed: ProbedModel, tokens_BT: Tensor) -> Iterator[Tensor]:
    """The states x_0 .. x_L one after the other, each x_BTD, the last before the final norm."""
    x_BTD = probed.embed(tokens_BT)
    yield x_BTD
    for layer in range(1, probed.n_layers + 1):
        x_BTD = probed.block(layer, x_BTD)
        yield x_BTD


def block_inputs(probed: ProbedModel, tokens_BT: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(l, x_(l-1)) of the blocks l = 1..L; the last state enters none, and is not computed."""
    return enumerate(itertools.islice(stream(probed, tokens_BT), probed.n_layers), start=1)


def record(probed: ProbedModel, tokens_BT: Tensor) -> list[Tensor]:
    """The whole stream, x_0 .. x_L: what forks start from."""
    return list(stream(probed, tokens_BT))


@dataclass(frozen=True, eq=False)
class Step:
    """Some forks, at one layer."""

    layer: int
    forks: list[int]
    """indices into the sequence of forks that was asked for"""
    before: Tensor
    after: Tensor
    """their states x'_(l-1) and x'_l: [F, B, T, D]"""


def walk(probed: ProbedModel, states: Sequence[Tensor], forks: Sequence[Fork], max_tokens: int) -> Iterator[Step]:
    """Run forks of the recorded `states` to the last layer, max_tokens tokens (at least one fork) per pass.

    Yields every layer from a fork's start on; each fork is in exactly one step per layer.
    """
    assert all(min(fork.changes) >= 1 and max(fork.changes) <= probed.n_layers for fork in forks)
    by_start = sorted(range(len(forks)), key=lambda index: forks[index].start)
    per_pass = max(1, _per_pass(probed, max_tokens) // states[0][..., 0].numel())
    for offset in range(0, len(forks), per_pass):
        yield from _walk_together(probed, states, forks, by_start[offset : offset + per_pass])


def _walk_together(
    probed: ProbedModel, states: Sequence[Tensor], forks: Sequence[Fork], group: list[int]
) -> Iterator[Step]:
    """One pass over the forks in `group`, sorted by start: those that have started are the first rows of the batch."""
    x_FBTD = states[0].new_empty(0, *states[0].shape)
    for layer in range(forks[group[0]].start, probed.n_layers + 1):
        n_joining = sum(forks[index].start == layer for index in group)
        if n_joining:
            x_FBTD = torch.cat((x_FBTD, states[layer - 1].expand(n_joining, -1, -1, -1)))
        running = group[: len(x_FBTD)]
        after_FBTD = _advance(probed, layer, [forks[index] for index in running], x_FBTD)
        yield Step(layer, running, x_FBTD, after_FBTD)
        x_FBTD = after_FBTD


def _advance(probed: ProbedModel, layer: int, forks: Sequence[Fork], x_FBTD: Tensor) -> Tensor:
    """The state of each fork after `layer`: forks that run the same thing there run it as one batch."""
    rows_by_change: dict[Change, list[int]] = {}
    for row, fork in enumerate(forks):
        rows_by_change.setdefault(fork.changes.get(layer, layer), []).append(row)
    if len(rows_by_change) == 1:
        return _apply(probed, next(iter(rows_by_change)), x_FBTD)
    after_FBTD = torch.empty_like(x_FBTD)
    for change, rows in rows_by_change.items():
        after_FBTD[rows] = _apply(probed, change, x_FBTD[rows])
    return after_FBTD


def _apply(probed: ProbedModel, change: Change, x_FBTD: Tensor) -> Tensor:
    if change is None:
        return x_FBTD
    x_BTD = x_FBTD.flatten(0, 1)
    out_BTD = probed.block(change, x_BTD) if isinstance(change, int) else change(x_BTD)
    return out_BTD.view_as(x_FBTD)
