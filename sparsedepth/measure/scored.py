"""What a measure with a loss reads: inputs, and the targets of the positions that count.

    loss = sum of -log p(target) over the positions that count / their number

A sequence's loss is scaled so that its mean over sequences is this one, whatever their numbers of positions that count:
its sum / the mean number. Ratios of losses need no more. A mean over positions with an interval is a ratio of two means
over sequences (`position_mean`), since resampling changes how many positions there are. In text all count, and both
are the plain means.

Shapes: N and B sequences, T tokens of one sequence, S = T + 1 tokens with the last target, R resamples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Sequences
from sparsedepth.measure.bootstrap import BootstrapEstimate, Estimate, itself, ratio
from sparsedepth.probe.fork import rows_per_pass
from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, eq=False)
class Scored:
    """Sequences to score a model on."""

    inputs: Tensor
    """inputs_NT"""
    targets: Tensor
    """targets_NT; IGNORED where a position does not count"""
    difficulty: Tensor | None = None
    """difficulty_NT of a task's positions that count"""

    @classmethod
    def of(cls, sequences: Sequences) -> "Scored":
        difficulty = None if sequences.difficulty is None else torch.from_numpy(sequences.difficulty)
        return cls(torch.from_numpy(sequences.inputs), torch.from_numpy(sequences.targets), difficulty)

    @classmethod
    def text(cls, tokens_NS: Tensor) -> "Scored":
        """Every position counts; its target is the next token."""
        return cls(tokens_NS[:, :-1], tokens_NS[:, 1:])

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def n_scored(self) -> int:
        """Positions that count."""
        return int((self.targets != IGNORED).sum())

    @cached_property
    def scale(self) -> float:
        """Tokens / positions that count: 1 in text. A mean over all tokens, 0 where none counts, times this is the mean
        over those that do. Raises ValueError where none does."""
        if not self.n_scored:
            raise ValueError(f"none of the {self.targets.numel():,} targets counts: all are {IGNORED}")
        return self.targets.numel() / self.n_scored

    @property
    def weight(self) -> np.ndarray:
        """weight_N: the positions of a sequence that count / their mean number over sequences; 1 in text."""
        counted_N = (self.targets != IGNORED).sum(1).double()
        return (counted_N / self.targets.shape[1] * self.scale).cpu().numpy()

    def parts(self, probed: ProbedModel, max_tokens: int) -> Iterator["Scored"]:
        """On the model's device, whole sequences, as `probe.fork.batches` splits tokens with their last target."""
        rows = rows_per_pass(probed, self.inputs.shape[1] + 1, max_tokens)
        for inputs_BT, targets_BT in zip(self.inputs.split(rows), self.targets.split(rows), strict=True):
            yield Scored(inputs_BT.to(probed.device), targets_BT.to(probed.device))


def position_mean(value_N: np.ndarray, weight_N: np.ndarray, estimate: Estimate) -> BootstrapEstimate:
    """The mean over positions of what `value_N` holds by sequence, scaled as above, with its interval."""
    return estimate(itself, value_N) if (weight_N == 1).all() else estimate(per_position, value_N, weight_N)


def per_position(value_R: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
    """Means over positions, from means over resampled sequences [R, ...], scaled as above, and their mean weights."""
    return ratio(value_R.T, weight_R).T
