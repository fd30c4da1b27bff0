"""Sequences with their targets, for training and scoring: text, tasks and images.

Shapes: N sequences, T tokens of one sequence, S = T + 1 tokens with the last target.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

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


Pairs = tuple[np.ndarray, np.ndarray]
"""x_n and y_n: the context and the target of each scored position"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Counted:
    """The pairs (context x, target y) of a source, from whose counts `data.ngram_losses` computes losses."""

    held_out: Pairs
    trained: Iterator[Pairs]
    n_contexts: int
    columns: tuple[str | None, str | None]
    """which columns of `runs` are the losses of unigram and bigram"""

    @classmethod
    def of(
        cls,
        context: Callable[[Sequences], np.ndarray],
        held_out: Sequences,
        trained: Iterable[Sequences],
        n_contexts: int,
        columns: tuple[str | None, str | None],
    ) -> "Counted":
        """Of the scored positions; `context`: sequences -> context_NT."""

        def pairs(part: Sequences) -> Pairs:
            scored_NT = part.targets != IGNORED
            return context(part)[scored_NT], part.targets[scored_NT]

        return cls(held_out=pairs(held_out), trained=map(pairs, trained), n_contexts=n_contexts, columns=columns)
