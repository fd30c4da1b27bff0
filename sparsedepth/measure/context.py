"""What every measure of the suite is given: the model, the config, held-out text, and the limits of a pass.

Shapes: N sequences, T tokens of one sequence, S = T + 1 with the last target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.probe.stack import Stack

HeldOut = Callable[[int, int, int], np.ndarray]
"""(seq_len, n_tokens, skip_tokens) -> int64 [N, seq_len + 1]: at most n_tokens tokens of held-out text, as sequences
with their last target, after the first skip_tokens tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasureContext:
    stack: Stack
    config: RunConfig | MeasureOnlyConfig
    held_out: HeldOut
    seed: int
    max_tokens: int
    bytes_per_token: float | None
    eod: int | None
    """the token that ends a document; None = not known"""

    def sequences(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Tensor:
        return torch.from_numpy(self.held_out(seq_len, n_tokens, skip_tokens))

    @cached_property
    def scored(self) -> Tensor:
        """scored_NS."""
        return self.sequences(self.config.seq_len, self.config.measure_tokens)

    @property
    def inputs(self) -> Tensor:
        """inputs_NT."""
        return self.scored[:, :-1]

    @property
    def fit(self) -> Tensor:
        """fit_NT."""
        return self.sequences(self.config.seq_len, self.config.fit_tokens, self.config.measure_tokens)[:, :-1]

    def rng(self) -> np.random.Generator:
        """A fresh one for each measure: every measure draws the same, whichever others run."""
        return np.random.default_rng(self.seed)
