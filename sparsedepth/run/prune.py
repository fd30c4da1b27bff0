"""End a run early when finished runs of its depth were better by then, judged from our own curves.

    at share f of the steps:  loss = mean train_loss of the rows logged in (0.9 f, f]
    prune if  loss > the keep-quantile of the same mean over the finished runs of this n_layers

Optuna cannot prune with several objectives; a curve can be compared whatever the objectives are. Only finished runs
count, so the first `min_runs` of a depth always run to their end. A pruned run is no result: it leaves a reason in its
scratch folder and no record.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import WINDOW, Prune, in_window
from sparsedepth.run.scratch import Pruned
from sparsedepth.store.checksums import MARKER, DamagedRun
from sparsedepth.store.connection import open_store


class PrunedRun(Exception):
    """Ends a run before its last step: finished runs did better by then."""

    def __init__(self, pruned: Pruned):
        super().__init__(pruned.reason)
        self.pruned = pruned


class Pruner:
    """Called after each step with the rows logged so far, those before an interruption too; raises PrunedRun."""

    def __init__(self, rule: Prune, config: RunConfig, results: Path):
        self.rule, self.config, self.results = rule, config, results
        self.waiting = list(rule.at)

    def __call__(self, step: int, curves: Sequence[Mapping[str, Any]]) -> None:
        n_steps = self.config.n_steps
        while self.waiting and step >= self.waiting[0] * n_steps:
            share = self.waiting.pop(0)
            rows = [row for row in curves if in_window(row["step"] / n_steps, share)]
            own = [row["train_loss"] for row in rows if row["train_loss"] is not None]
            if not own or step - 1 >= share * n_steps:
                continue  # resumed beyond this share: it was judged before, or nothing is known
            reason = verdict(self.rule, share, math.fsum(own) / len(own), self._others(share), self.config.n_layers)
            if reason:
                raise PrunedRun(Pruned(step=step, reason=reason))

    def _others(self, share: float) -> list[float]:
        """The same mean of each finished run; math.inf for one that diverged."""
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
            with open_store(self.results) as store:
                rows = store.sql(text).rows
        except DamagedRun as damage:  # of another run: it must not end this one
            logging.warning("%s Nothing is pruned.", damage)
            return []
        losses = [math.inf if outcome != "ok" else loss for _, outcome, loss in rows]
        return [loss for loss in losses if loss is not None]


def verdict(rule: Prune, share: float, loss: float, others: list[float], n_layers: int) -> str:
    """Why a run with this loss at this share is to be ended; '' if it is not."""
    if len(others) < rule.min_runs:
        return ""
    bar = sorted(others)[math.ceil(rule.keep * len(others)) - 1]
    if loss <= bar:
        return ""
    return (
        f"pruned at {share:.0%}: {rule.by} {loss:.4g} is above {bar:.4g}, which the best {rule.keep:.0%} of "
        f"{len(others)} finished runs with n_layers={n_layers} had reached"
    )
