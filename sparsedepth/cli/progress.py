"""A sweep or a run while it runs: a live bar on a terminal, a line per event elsewhere; and what a run measured."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sparsedepth import quantities
from sparsedepth.config.cost import cost
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.sweep.status import Best, RunState, State, is_silent, varied

QUIET_SECONDS = 30.0
DAY = 24 * 3600
YEAR = 365 * DAY


def duration(seconds: float) -> str:
    """12s, 3m05s, 1h02m; from two days on 3d04h, from two years on 4.5 years."""
    whole = max(0, round(seconds))
    if whole >= 2 * YEAR:
        return f"{whole / YEAR:,.{0 if whole >= 10 * YEAR else 1}f} years"
    if whole >= 2 * DAY:
        return f"{whole // DAY}d{whole % DAY // 3600:02d}h"
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


@contextmanager
def bar(title: str) -> Generator[Callable[..., None], None, None]:
    """A progress bar with the time left, on stderr, a line now and then where that is no terminal; yields report(phase,
    share done, loss=None)."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=1.0)
        said_at = time.monotonic()

        def report(phase: str, done: float, loss: float | None = None) -> None:
            nonlocal said_at
            text = f"{phase}, loss {loss:.3f}" if loss is not None else phase
            progress.update(task, completed=done, description=text)
            if not console.is_terminal and time.monotonic() - said_at > QUIET_SECONDS:
                print(f"{title}: {text}, {done:.0%} done", file=sys.stderr, flush=True)
                said_at = time.monotonic()

        yield report


def print_summary(summary: Mapping[str, Any]) -> None:
    """What was measured, with units and intervals; missing values are left out."""
    for column, value, ends in quantities.with_intervals(summary):
        interval = f"  [{ends[0]:.4g}, {ends[1]:.4g}]" if ends else ""
        shown = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        unit = f" {column.unit}" if column.unit not in ("", "1") else ""
        print(f"  {column.name:26} {shown}{unit}{interval}")


def counted(states: list[RunState], *, is_grid: bool = True) -> str:
    """How many runs are in each state; what a sampler has not proposed yet is not known."""
    counts = Counter(state.state for state in states)
    named: list[State] = ["complete", "running", "interrupted", "failed"]
    rare: tuple[State, ...] = ("infeasible", "pruned", "damaged")
    named += [state for state in rare if counts[state]] + ["planned"] * is_grid
    return ", ".join(f"{counts[state]} {state}" for state in named)


def running_line(state: RunState, name: str) -> str:
    """How a running run stands: its phase, share done, loss and estimated time left."""
    if state.progress is None:
        return f"{name}: starting"
    parts = [state.progress.phase, f"{state.progress.done:.0%}"]
    if state.progress.loss is not None:
        parts.append(f"loss {state.progress.loss:.3f}")
    if state.progress.left is not None:
        parts.append(f"about {duration(state.progress.left)} left")
    return f"{name}: {', '.join(parts)}" + " (silent for minutes)" * is_silent(state.progress)


class Watcher:
    """Shows the states that the driver passes a few times a second."""

    def __init__(self, definition: SweepDefinition, expected: int, results: Path):
        self.definition, self.expected = definition, expected
        self.best = Best(results, definition.objective)
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.started = self.said_at = time.monotonic()
        self.begun_with: float | None = None
        self.complete: set[str] | None = None

    def __enter__(self) -> "Watcher":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def __call__(self, states: list[RunState]) -> None:
        self.expected = max(self.expected, len(states))  # tuning may have extended a grid
        finished = {state.run_id for state in states if state.state == "complete"}
        newly = finished - self.complete if self.complete is not None else set()
        self.complete = finished
        share = self._share(states)
        if self.begun_with is None:
            self.begun_with = share
        eta = self._eta(share)
        if self.console.is_terminal:
            self.live.update(self._table(states, share, eta))
            return
        now = time.monotonic()
        for state in states:
            if state.run_id in newly:
                what = f"[{len(finished)}/{self.expected}] complete: {self._name(state)}{self._value_text(state)}"
                print(f"{what}  ({eta})", file=sys.stderr, flush=True)
                self.said_at = now
        if now - self.said_at > QUIET_SECONDS:
            print(f"[{len(finished)}/{self.expected}] {share:.0%} done  ({eta})", file=sys.stderr, flush=True)
            for state in states:
                if state.state == "running":
                    print(f"  {running_line(state, self._name(state))}", file=sys.stderr, flush=True)
            self.said_at = now

    def _share(self, states: list[RunState]) -> float:
        """Done share of the whole sweep, each run weighted with its FLOPs where its config is known."""
        done = total = 0.0
        for state in states:
            weight = cost(state.config).flops_per_token * state.config.train_tokens if state.config else 1.0
            done, total = done + weight * state.done, total + weight
        unknown = max(0, self.expected - len(states))
        return done / (total + unknown * (total / len(states) if states else 1.0)) if total else 0.0

    def _eta(self, share: float) -> str:
        elapsed = time.monotonic() - self.started
        gained = share - (self.begun_with or 0.0)
        left = f"about {duration(elapsed * (1 - share) / gained)} left" if gained > 0.005 else "estimating"
        return f"{duration(elapsed)} elapsed, {left}"

    def _table(self, states: list[RunState], share: float, eta: str) -> Table:
        counts = Counter(state.state for state in states)
        filled = round(30 * share)
        table = Table.grid(padding=(0, 1))
        table.add_row(
            f"{self.definition.name} [green]{'━' * filled}[/][dim]{'━' * (30 - filled)}[/] {share:4.0%}  "
            f"{counts['complete']}/{self.expected} runs, {counts['failed']} failed  {eta}"
        )
        for state in states:
            if state.state == "running":
                table.add_row(f"  {escape(running_line(state, self._name(state)))}")
        failed = Counter(state.reason for state in states if state.state in ("failed", "infeasible"))
        for reason, count in failed.most_common(3):
            table.add_row(f"  [red]failed {count}x[/]: {escape(str(reason))[:150]}")
        if best := self.best.of(states):
            table.add_row(f"  best so far: {self.definition.objective} {best[1]:.4g}, {escape(self._name(best[0]))}")
        return table

    def _value_text(self, state: RunState) -> str:
        """', val_loss 2.815' of a complete run that has one."""
        value = self.best.value(state.run_id)
        return "" if value is None else f", {self.definition.objective} {value:.4g}"

    def _name(self, state: RunState) -> str:
        return varied(self.definition, state.config) if state.config else state.run_id
