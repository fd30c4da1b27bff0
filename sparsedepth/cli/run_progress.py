"""A progress bar for one run."""

import math
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparsedepth.run.scratch import TimeLeft
from sparsedepth.words.plain_text import duration

QUIET_SECONDS = 30.0


@contextmanager
def bar(title: str) -> Generator[Callable[..., None], None, None]:
    """A progress bar on stderr; without a terminal a line at the start and every QUIET_SECONDS, with the time left.
    Yields report(phase, share done, loss=None)."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=1.0)
        printed_at = -math.inf
        time_left = TimeLeft()

        def report(phase: str, done: float, loss: float | None = None) -> None:
            nonlocal printed_at
            text = f"{phase}, loss {loss:.3f}" if loss is not None else phase
            progress.update(task, completed=done, description=text)
            left = time_left(done)
            if not console.is_terminal and time.monotonic() - printed_at > QUIET_SECONDS:
                rest = "" if left is None else f", about {duration(left)} left"
                print(f"{title}: {text}, {done:.0%} done{rest}", file=sys.stderr, flush=True)
                printed_at = time.monotonic()

        yield report
