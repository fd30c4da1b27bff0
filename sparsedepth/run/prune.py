"""End a run early if finished runs of its depth had a lower training loss at the same point.

    at share f of the steps:  loss = mean train_loss of the rows logged in (0.9 f, f]
    prune if  loss > the keep-quantile of the same mean over the finished runs of this n_layers

Optuna cannot prune with several objectives, so pruning uses our own training curves. The first `min_runs` of a depth
always run to the end. A pruned run is no result: it leaves a reason in its scratch folder and no record."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import WINDOW, Prune, in_window
from sparsedepth.files import MARKER
from sparsedepth.quantities.quantity import Row
from sparsedepth.store.checksums import DamagedRun


class PrunedRun(Exception):
    """Ends a run before its last step."""

    def __init__(self, step: int, reason: str):
        super().__init__(reason)
        self.step = step
        self.reason = reason


class Pruner:
    """Called after each step with all rows logged so far, including those before an interruption; raises PrunedRun."""

    def __init__(self, rule: Prune, config: RunConfig, results: Path):
        self.rule = rule
        self.config = config
        self.results = results
        self.pending = list(rule.at)

    def __call__(self, step: int, curves: Sequence[Row]) -> None:
        """Compare at each share of the steps that has been reached, once."""
        n_steps = self.config.n_steps
        while self.pending and step >= self.pending[0] * n_steps:
            share = self.pending.pop(0)
            rows = [row for row in curves if in_window(row["step"] / n_steps, share)]
            losses = [row["train_loss"] for row in rows if row["train_loss"] is not None]
            if not losses or step - 1 >= share * n_steps:
                continue  # resumed after this share: it was checked before, or has no rows
            loss = fmean(losses)
            others = self._finished_losses(share)
            if loss > (level := level_reached(self.rule, others)):
                raise PrunedRun(
                    step,
                    f"pruned at {share:.0%}: {self.rule.by} {loss:.4g} is above {level:.4g}, "
                    f"the level reached by the best {self.rule.keep:.0%} of {len(others)} finished runs with "
                    f"n_layers={self.config.n_layers}",
                )

    def _finished_losses(self, share: float) -> list[float]:
        """The same mean for each finished run; math.inf if it diverged."""
        done = "step * batch_tokens / train_tokens"
        text = f"""
            SELECT run_id, any_value(outcome),
                avg(curves.train_loss) FILTER ({done} > {share * (1 - WINDOW)} AND {done} <= {share})
            FROM curves JOIN runs USING (run_id)
            WHERE n_layers = {self.config.n_layers} AND model IS NULL AND run_id != '{self.config.run_id}'
            GROUP BY run_id"""
        if not any(self.results.glob(f"runs/*/{MARKER}")):
            return []
        try:
            from sparsedepth.store.connection import open_store  # DuckDB, which other runs do not need

            with open_store(self.results) as store:
                rows = store.sql(text).rows
        except DamagedRun as damage:  # damage of another run must not end this one
            logging.warning("%s Nothing is pruned.", damage)
            return []
        losses = [math.inf if outcome != "ok" else loss for _, outcome, loss in rows]
        return [loss for loss in losses if loss is not None]


def level_reached(rule: Prune, others: list[float]) -> float:
    """The loss that a run must not exceed; infinite as long as too few have finished."""
    if len(others) < rule.min_runs:
        return math.inf
    return sorted(others)[math.ceil(rule.keep * len(others)) - 1]
