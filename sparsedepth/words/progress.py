"""The course of a sweep: what its command prints before, during and after it."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sparsedepth.words.plain_text import duration, visible
from sparsedepth.words.status import running_text

if TYPE_CHECKING:
    from sparsedepth.cli.progress import Progress
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.sweep.status import RunState

BAR = 30


def header_text(definition: "SweepDefinition", notes: Iterable[str]) -> str:
    """The question, the hypothesis, and what is to be known before the sweep starts."""
    asked = f"{definition.name}: {definition.question}\nhypothesis: {definition.hypothesis}"
    return "\n".join([asked, *map(visible, notes)])


def next_text(folder: str, is_search: bool) -> str:
    """The commands that answer what a sweep was run for."""
    questions = {
        f"recipe {folder}": "what should I train?",
        f"query {folder} --ask variance": "what lowers residual variance, or raises sparsity or usefulness?",
        f"query {folder} --ask depth": "do deeper layers earn their cost?",
    }
    if is_search:
        questions = {f"best {folder} --top 3 --again again.yaml": "do the best stay best with new seeds?"}
    width = max(map(len, questions))
    lines = [f"  sparsedepth {command:<{width}}  # {question}" for command, question in questions.items()]
    return "\n".join(["\nnext:", *lines])


def time_text(progress: "Progress") -> str:
    """'3m05s elapsed, about 1h02m left'."""
    elapsed = f"{duration(progress.elapsed)} elapsed"
    if progress.share == 1:
        return elapsed
    return f"{elapsed}, " + ("estimating" if progress.left is None else f"about {duration(progress.left)} left")


def share_text(progress: "Progress") -> str:
    """Above the lines of the running runs, where there is no terminal."""
    return f"[{progress.complete}/{progress.expected}] {progress.share:.0%} done  ({time_text(progress)})"


def complete_text(progress: "Progress", state: "RunState") -> str:
    """A line about a run that has just become complete."""
    value = progress.value(state)
    result = ""
    if value is not None:
        result = f", {progress.definition.objective} {value:.4g}"
    elif progress.is_diverged(state):
        result = ", diverged"
    name = progress.name(state)
    return f"[{progress.complete}/{progress.expected}] complete: {name}{result}  ({time_text(progress)})"


def running_lines(progress: "Progress") -> list[str]:
    """A line per running run."""
    running = [state for state in progress.states if state.state == "running"]
    return [f"  {running_text(state, progress.name(state))}" for state in running]


def progress_lines(progress: "Progress") -> list[str]:
    """A bar, the running runs, why runs failed, and the best so far: the display of a terminal."""
    filled = round(BAR * progress.share)
    causes = Counter(str(state.reason) for state in progress.failed).most_common(3)
    failed = [f"  failed {count}x: {visible(reason)[:150]}" for reason, count in causes]
    best = progress.best
    found = [f"  best so far: {progress.definition.objective} {best[0]:.4g}, {progress.name(best[1])}"] if best else []
    return [
        f"{progress.definition.name} {'━' * filled}{'╌' * (BAR - filled)} {progress.share:4.0%}  "
        f"{progress.complete}/{progress.expected} runs, {len(progress.failed)} failed  {time_text(progress)}",
        *running_lines(progress),
        *failed,
        *found,
    ]
