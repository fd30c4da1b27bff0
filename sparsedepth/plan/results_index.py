"""Results of a sweep's runs that the plan depends on; each run folder is checked and read once."""

import math
from collections.abc import Callable
from pathlib import Path

from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.store.find import is_whole, read_summary
from sparsedepth.store.tuning_roles import objective_as_loss


class ResultsIndex:
    """Which runs are complete, and their losses; `is_without_result` tells which runs ended without a result."""

    def __init__(
        self,
        results: Path,
        definition: SweepDefinition,
        is_without_result: Callable[[str], bool] = lambda run_id: False,
    ):
        self.results, self.objective, self.is_without_result = results, definition.objective, is_without_result
        self._complete: set[str] = set()
        self._losses: dict[str, float] = {}

    def loss_of(self, run_id: str) -> float | None:
        """The first objective as a loss (lower is better): math.inf if it diverged, was not scored or ended without a
        result; None if it has not ended."""
        if run_id not in self._losses:
            if not self.is_complete(run_id):
                return math.inf if self.is_without_result(run_id) else None
            self._losses[run_id] = objective_as_loss(read_summary(self.results, run_id), self.objective)
        return self._losses[run_id]

    def is_complete(self, run_id: str) -> bool:
        """Whether the run is complete and undamaged."""
        if run_id not in self._complete and is_whole(self.results, run_id):
            self._complete.add(run_id)
        return run_id in self._complete
