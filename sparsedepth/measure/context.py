"""What every measure of the suite is given: the model, the config, held-out sequences, and the limits of a pass.

Shapes: N sequences, T tokens of one sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.measure.scored import Scored
from sparsedepth.probe.probed_model import ProbedModel

ReadHeldOut = Callable[[int, int, int], Sequences]
"""(seq_len, n_tokens, skip_tokens) -> at most n_tokens held-out tokens, as sequences with their targets, after the
first skip_tokens tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasureContext:
    probed: ProbedModel
    config: RunConfig | MeasureOnlyConfig
    held_out: ReadHeldOut
    seed: int
    max_tokens: int
    bytes_per_token: float | None
    eod: int | None
    """the token that ends a document; None = not known"""

    def sequences(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Scored:
        return Scored.of(self.held_out(seq_len, n_tokens, skip_tokens))

    @cached_property
    def scored(self) -> Scored:
        return self.sequences(self.config.seq_len, self.config.measure_tokens)

    @property
    def inputs(self) -> Tensor:
        """inputs_NT."""
        return self.scored.inputs

    @property
    def fit(self) -> Tensor:
        """fit_NT: maps are fitted on every token, whether it counts or not."""
        return self.sequences(self.config.seq_len, self.config.fit_tokens, self.config.measure_tokens).inputs

    def rng(self) -> np.random.Generator:
        """A fresh one for each measure: every measure draws the same, whichever others run."""
        return np.random.default_rng(self.seed)
