"""Progress of a running sweep, and its final summary."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sparsedepth import quantities
from sparsedepth.cli.option import aside
from sparsedepth.cli.run_progress import QUIET_SECONDS
from sparsedepth.config.cost import cost
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.budgets import shared_steps
from sparsedepth.quantities.quantity import Row
from sparsedepth.store.packs import read_summary
from sparsedepth.sweep.results_folder import FAILED
from sparsedepth.sweep.status import WITHOUT_RESULT, RunState, varied_fields
from sparsedepth.words.effects import all_diverged
from sparsedepth.words.plain_text import in_shell
from sparsedepth.words.progress import complete_text, next_text, progress_lines, running_lines, share_text
from sparsedepth.words.sweep import run_text


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a sweep is."""

    definition: SweepDefinition
    states: list[RunState]
    summaries: Mapping[str, Row]
    """Of the complete runs; empty for one that cannot be read, or was complete before."""
    expected: int
    """Tuning may have extended a grid."""
    elapsed: float
    share: float = 0.0
    """Of the sweep's FLOPs."""
    left: float | None = None
    """Seconds, once there is a rate."""

    @property
    def complete(self) -> int:
        return len(self.summaries)

    @property
    def failed(self) -> list[RunState]:
        return [state for state in self.states if state.state in FAILED]

    @property
    def best(self) -> tuple[float, RunState] | None:
        """The complete run with the best objective."""
        scored = [(value, state) for state in self.states if (value := self.value(state)) is not None]
        better = quantities.sign(self.definition.objective)
        return max(scored, key=lambda pair: better * pair[0], default=None)

    def value(self, state: RunState) -> float | None:
        """Its objective; None if it has none, or is damaged, which is reported when its record is read."""
        value = self.summaries.get(state.run_id, {}).get(self.definition.objective)
        return value if isinstance(value, int | float) else None

    def name(self, state: RunState) -> str:
        """The fields that vary."""
        return run_text(varied_fields(self.definition, state.config)) if state.config else state.run_id

    def is_diverged(self, state: RunState) -> bool:
        return self.summaries.get(state.run_id, {}).get("outcome") == "diverged"


class ProgressDisplay:
    """Shows the run states that the driver passes a few times a second: on a terminal lines that are redrawn,
    elsewhere a line per complete run, and all every QUIET_SECONDS."""

    def __init__(self, definition: SweepDefinition, expected: int, results: Path):
        self.definition = definition
        self.expected = expected
        self.results = results
        self.summaries = dict[str, Row]()
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.started = self.printed_at = time.monotonic()
        self.initial: dict[str, float] = {}
        """run_id -> the FLOPs that were done when it was first seen"""
        self.is_first = True

    def __enter__(self) -> "ProgressDisplay":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def __call__(self, states: list[RunState]) -> None:
        """Show how far the sweep is."""
        new = [state for state in states if state.state == "complete" and state.run_id not in self.summaries]
        for state in new:
            self.summaries[state.run_id] = {}
            if self.console.is_terminal or not self.is_first:
                with contextlib.suppress(OSError, ValueError):
                    self.summaries[state.run_id] = read_summary(self.results, state.run_id)
        progress = self.progress(states)
        if self.console.is_terminal:
            self.live.update(Text("\n".join(progress_lines(progress))))
            return
        lines = [] if self.is_first else [complete_text(progress, state) for state in new]
        if time.monotonic() - self.printed_at > QUIET_SECONDS and not lines:
            lines = [share_text(progress), *running_lines(progress)]
        self.is_first = False
        for line in lines:
            aside(line)
            self.printed_at = time.monotonic()

    def progress(self, states: list[RunState]) -> Progress:
        """The share that is done, and the time that the FLOPs left will take at the rate so far. A branch counts from
        where it leaves its trunk; a run that ended without a result is done."""
        configs = [state.config for state in states if state.config]
        shared = dict(zip((config.run_id for config in configs), shared_steps(configs), strict=True))
        done = total = gained = 0.0
        for state in states:
            steps, taken_over, flops_per_step = 1, 0, 1
            if config := state.config:
                steps, taken_over = config.n_steps, shared[config.run_id]
                flops_per_step = cost(config).flops_per_token * config.batch_tokens
            steps_done = steps if state.state in WITHOUT_RESULT else state.done * steps
            own = max(steps_done - taken_over, 0.0) * flops_per_step
            gained += own - self.initial.setdefault(state.run_id, own)
            done += own
            total += (steps - taken_over) * flops_per_step
        self.expected = max(self.expected, len(states))  # tuning may have extended a grid
        total *= self.expected / max(1, len(states))  # of runs at values that tuning has yet to choose
        elapsed = time.monotonic() - self.started
        share = done / total if total else 0.0
        left = elapsed * (total - done) / gained if gained > 0.005 * (total - done) else None
        running = [state.progress.left for state in states if state.state == "running" and state.progress]
        longest = max(filter(None, running), default=0.0)
        return Progress(
            definition=self.definition,
            states=states,
            summaries=self.summaries,
            expected=self.expected,
            elapsed=elapsed,
            share=share,
            left=left and max(left, longest),
        )


def print_failures(states: list[RunState], out: Path) -> None:
    for state in states:
        if state.state == "pruned":
            print(f"run {state.run_id} {state.reason}")
        elif state.state in FAILED:
            aside(f"{state.state}: run {state.run_id}: {state.reason} (log: {out}/work/{state.run_id}/log.txt)")


def print_ranking(definition: SweepDefinition, out: Path) -> None:
    """Print the best configurations and what to do next; or that only tuning runs are complete."""
    from sparsedepth.store.best import best
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.setting import only_tuning
    from sparsedepth.words.best import heading, ranking_table
    from sparsedepth.words.differences import only_tuning_text

    with open_store(out) as store:
        if told := only_tuning_text(only_tuning(store)):
            print(told)
            return
        ranking = best(store, definition.objective, top=20)
    questions = next_text(in_shell(out), definition.is_search)
    then = f"\n{all_diverged(ranking.n_runs)}" if ranking.n_diverged == ranking.n_runs else questions
    print(f"\n{heading(ranking)}\n{ranking_table(ranking)}\n{then}")
