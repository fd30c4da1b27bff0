"""The inputs of all measures: model, config, held-out sequences, seed and token limit.

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
"""(seq_len, n_tokens, skip_tokens) -> at most n_tokens held-out tokens after the first skip_tokens, as sequences with
targets."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasureContext:
    probed: ProbedModel
    config: RunConfig | MeasureOnlyConfig
    held_out: ReadHeldOut
    seed: int
    max_tokens: int
    bytes_per_token: float | None
    eod: int | None
    """the token that ends a document; None = unknown"""

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
    def n_tokens(self) -> int:
        """Scored or not."""
        return self.scored.targets.numel()

    @property
    def fit(self) -> Tensor:
        """fit_NT, on all of whose tokens maps are fitted, scored or not."""
        return self.sequences(self.config.seq_len, self.config.fit_tokens, self.config.measure_tokens).inputs

    def rng(self) -> np.random.Generator:
        """A new generator: a measure's draws do not depend on which others run."""
        return np.random.default_rng(self.seed)
