"""Progress of a running sweep: a live table on a terminal, a line per event elsewhere; and its final summary."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from sparsedepth import quantities
from sparsedepth.cli.run_progress import QUIET_SECONDS
from sparsedepth.config.cost import cost
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.budgets import shared_steps
from sparsedepth.store.packs import read_summary
from sparsedepth.sweep.results_folder import FAILED
from sparsedepth.sweep.status import WITHOUT_RESULT, RunState, varied_fields
from sparsedepth.words.plain_text import duration, visible
from sparsedepth.words.status import running_text
from sparsedepth.words.sweep import run_text


class ProgressDisplay:
    """Shows the run states that the driver passes a few times a second."""

    def __init__(self, definition: SweepDefinition, expected: int, results: Path):
        self.definition, self.expected = definition, expected
        self.results, self.summaries = results, dict[str, Mapping[str, Any]]()
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.started = self.printed_at = time.monotonic()
        self.initial: dict[str, float] = {}
        """run_id -> the FLOPs that were done when it was first seen"""
        self.complete: set[str] | None = None

    def __enter__(self) -> "ProgressDisplay":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def __call__(self, states: list[RunState]) -> None:
        self.expected = max(self.expected, len(states))  # tuning may have extended a grid
        complete = {state.run_id for state in states if state.state == "complete"}
        newly_complete = complete - self.complete if self.complete is not None else set()
        self.complete = complete
        share, eta = self._share_and_eta(states)
        if self.console.is_terminal:
            self.live.update(self._table(states, share, eta))
            return
        now = time.monotonic()
        count = f"[{len(complete)}/{self.expected}]"
        for state in states:
            if state.run_id in newly_complete:
                value = self._value(state.run_id)
                result = ", diverged" if self.summaries[state.run_id].get("outcome") == "diverged" else ""
                result = result if value is None else f", {self.definition.objective} {value:.4g}"
                print(f"{count} complete: {self._name(state)}{result}  ({eta})", file=sys.stderr, flush=True)
                self.printed_at = now
        if now - self.printed_at > QUIET_SECONDS:
            print(f"{count} {share:.0%} done  ({eta})", file=sys.stderr, flush=True)
            for state in states:
                if state.state == "running":
                    print(f"  {running_text(state, self._name(state))}", file=sys.stderr, flush=True)
            self.printed_at = now

    def _share_and_eta(self, states: list[RunState]) -> tuple[float, str]:
        """Share of the sweep's FLOPs that is done, and the time that those left will take at the rate so far. A branch
        counts from where it leaves its trunk; a run that ended without a result is done."""
        configs = [state.config for state in states if state.config]
        shared = dict(zip((config.run_id for config in configs), shared_steps(configs), strict=True))
        done = total = gained = 0.0
        for state in states:
            steps, taken_over, flops_per_step = 1, 0, 1.0
            if config := state.config:
                steps, taken_over = config.n_steps, shared[config.run_id]
                flops_per_step = float(cost(config).flops_per_token * config.batch_tokens)
            steps_done = steps if state.state in WITHOUT_RESULT else state.done * steps
            own = max(steps_done - taken_over, 0.0) * flops_per_step
            gained += own - self.initial.setdefault(state.run_id, own)
            done, total = done + own, total + (steps - taken_over) * flops_per_step
        total *= max(1.0, self.expected / max(1, len(states)))  # of runs at values that tuning has yet to choose
        elapsed, share = time.monotonic() - self.started, done / total if total else 0.0
        if share == 1:
            return share, f"{duration(elapsed)} elapsed"
        is_measured = gained > 0.005 * (total - done)
        left = f"about {duration(elapsed * (total - done) / gained)} left" if is_measured else "estimating"
        return share, f"{duration(elapsed)} elapsed, {left}"

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
                table.add_row(f"  {escape(running_text(state, self._name(state)))}")
        failed = Counter(state.reason for state in states if state.state in FAILED)
        for reason, count in failed.most_common(3):
            table.add_row(f"  [red]failed {count}x[/]: {escape(str(reason))[:150]}")
        objective, complete = self.definition.objective, [state for state in states if state.state == "complete"]
        scored = [(value, state) for state in complete if (value := self._value(state.run_id)) is not None]
        if scored:
            value, state = max(scored, key=lambda pair: quantities.sign(objective) * pair[0])
            table.add_row(f"  best so far: {objective} {value:.4g}, {escape(self._name(state))}")
        return table

    def _value(self, run_id: str) -> float | None:
        """A complete run's objective; None if it has none, or is damaged, which is reported when its record is read."""
        if run_id not in self.summaries:
            try:
                self.summaries[run_id] = read_summary(self.results, run_id)
            except (OSError, ValueError):
                self.summaries[run_id] = {}
        value = self.summaries[run_id].get(self.definition.objective)
        return value if isinstance(value, int | float) else None

    def _name(self, state: RunState) -> str:
        return run_text(varied_fields(self.definition, state.config)) if state.config else state.run_id


def print_header(definition: SweepDefinition, notes: Iterable[str]) -> None:
    print(f"{definition.name}: {definition.question}\nhypothesis: {definition.hypothesis}")
    for note in notes:
        print(visible(note))


def print_failures(states: list[RunState], out: Path) -> None:
    for state in states:
        if state.state == "pruned":
            print(f"run {state.run_id} {state.reason}")
        elif state.state in FAILED:
            log = f"{out}/work/{state.run_id}/log.txt"
            print(f"{state.state}: run {state.run_id}: {state.reason} (log: {log})", file=sys.stderr)


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
    print(f"\n{heading(ranking)}\n{ranking_table(ranking)}")
    folder = quote(str(out))
    advice = f"best {folder} --top 3 --again again.yaml" if definition.is_search else f"recipe {folder}"
    print(f"\nnext:\n  sparsedepth {advice}\n  sparsedepth plot {folder} -o {quote(f'{out}/figure.png')}")
    columns = dict.fromkeys(("run_id", "n_layers", *definition.objectives))
    print(f'  sparsedepth query {folder} "select {", ".join(columns)} from runs"')
