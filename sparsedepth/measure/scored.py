"""Sequences to score a model on: inputs, and targets with unscored positions marked.

    loss = sum of -log p(target) over the scored positions / their number

A sequence's loss is its sum / the mean number of scored positions per sequence, so that its mean over sequences is the
loss above. Ratios of losses need nothing else. The interval of a mean over positions is that of a ratio of two means
over sequences (`position_mean`), since resampling changes the number of positions. In text all positions are scored,
and both are plain means.

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
from sparsedepth.measure.bootstrap import BootstrapEstimate, Estimator, identity, ratio
from sparsedepth.probe.fork import rows_per_pass
from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, eq=False)
class Scored:
    """Sequences to score a model on."""

    inputs: Tensor
    """inputs_NT"""
    targets: Tensor
    """targets_NT; IGNORED where not scored"""
    difficulty: Tensor | None = None
    """difficulty_NT at a task's scored positions"""

    @classmethod
    def of(cls, sequences: Sequences) -> "Scored":
        difficulty = None if sequences.difficulty is None else torch.from_numpy(sequences.difficulty)
        return cls(torch.from_numpy(sequences.inputs), torch.from_numpy(sequences.targets), difficulty)

    @classmethod
    def text(cls, tokens_NS: Tensor) -> "Scored":
        """All positions are scored; the target is the next token."""
        return cls(tokens_NS[:, :-1], tokens_NS[:, 1:])

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def n_scored(self) -> int:
        """Number of scored positions."""
        return int((self.targets != IGNORED).sum())

    @cached_property
    def scale(self) -> float:
        """Tokens / scored positions, 1 in text: a mean over all tokens (0 where unscored) times this is the mean over
        scored positions. Raises ValueError if there is none."""
        if not self.n_scored:
            raise ValueError(f"none of the {self.targets.numel():,} targets is scored: all are {IGNORED}")
        return self.targets.numel() / self.n_scored

    @property
    def weight(self) -> np.ndarray:
        """weight_N: a sequence's scored positions / their mean over sequences; 1 in text."""
        scored_N = (self.targets != IGNORED).sum(1).double()
        return (scored_N / self.targets.shape[1] * self.scale).cpu().numpy()

    def parts(self, probed: ProbedModel, max_tokens: int) -> Iterator["Scored"]:
        """Parts on the model's device, split as `probe.fork.batches` splits tokens with their last target."""
        rows = rows_per_pass(probed, self.inputs.shape[1] + 1, max_tokens)
        for inputs_BT, targets_BT in zip(self.inputs.split(rows), self.targets.split(rows), strict=True):
            yield Scored(inputs_BT.to(probed.device), targets_BT.to(probed.device))


def position_mean(value_N: np.ndarray, weight_N: np.ndarray, estimate: Estimator) -> BootstrapEstimate:
    """The mean over scored positions of `value_N`, scaled as above, with its interval."""
    return estimate(identity, value_N) if (weight_N == 1).all() else estimate(per_position, value_N, weight_N)


def per_position(value_R: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
    """Means over positions, from means over resampled sequences [R, ...] of values, scaled as above, and of weights."""
    return ratio(value_R.T, weight_R).T
