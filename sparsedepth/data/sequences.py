"""Sequences with their targets, for training and scoring: text, tasks and images.

Shapes: N sequences, T tokens of one sequence, S = T + 1 tokens with the last target.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparsedepth.config.task import IGNORED


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    inputs: np.ndarray
    """inputs_NT, int64; for images bytes inputs_NTP with P values per patch"""
    targets: np.ndarray
    """targets_NT, int64; IGNORED where not scored"""
    difficulty: np.ndarray | None = None
    """difficulty_NT, int64, of a task at scored positions (`config.task.TaskSpec.difficulty`); None for text"""

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice) -> "Sequences":
        difficulty = None if self.difficulty is None else self.difficulty[rows]
        return Sequences(inputs=self.inputs[rows], targets=self.targets[rows], difficulty=difficulty)

    @property
    def n_tokens(self) -> int:
        """Number of positions, scored or not."""
        return self.targets.size

    @property
    def n_scored(self) -> int:
        return int((self.targets != IGNORED).sum())


def next_tokens(tokens_NS: np.ndarray) -> Sequences:
    """Text: every position is scored, and its target is the next token."""
    return Sequences(inputs=tokens_NS[:, :-1], targets=tokens_NS[:, 1:])


class Counted(NamedTuple):
    """What `data.ngram_losses` counts of a source: pairs (context x, target y) of the scored positions."""

    held_out: Sequences
    trained: Iterable[Sequences]
    context: Callable[[Sequences], np.ndarray]
    """sequences -> context_NT, below n_contexts"""
    n_contexts: int
    columns: tuple[str | None, str | None]
    """which columns of `runs` are the losses of unigram and bigram"""


def after_tokens(held_out: Sequences, trained: Iterable[Sequences], vocab_size: int) -> Counted:
    """Each target after its token."""
    return Counted(held_out, trained, lambda part: part.inputs, vocab_size, ("unigram_loss", "bigram_loss"))
