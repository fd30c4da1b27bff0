"""Which incomplete runs have ended without a result, so that a sweep does not compute them again and tuning continues
without them: one rule for the driver, its workers, `status`, `plan` and Slurm.

    pruned      while the definition prunes
    infeasible  out of memory
    failed      as many failures as a run may have (`--max-attempts`); with fewer it is computed again

The sweep writes its number of attempts into the folder, for readers that are not told.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from sparsedepth import files
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.run.scratch import Scratch

ATTEMPTS = "attempts.json"

EndState = Literal["failed", "infeasible", "pruned"]


class RunEnd(NamedTuple):
    state: EndState
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndRule:
    max_attempts: int
    prunes: bool

    def __call__(self, scratch: Scratch) -> RunEnd | None:
        """How the run of a scratch folder ended without a result; None if it is to be computed."""
        if self.prunes and (pruned := scratch.pruned()):
            return RunEnd("pruned", pruned.reason)
        if shortage := scratch.infeasible():
            return RunEnd("infeasible", shortage)
        failures = scratch.failures()
        return RunEnd("failed", failures[-1]) if len(failures) >= self.max_attempts else None


def end_rule(results: Path, definition: SweepDefinition | None, max_attempts: int | None = None) -> EndRule:
    """The rule of a sweep (None: of `train`, or unknown) with its number of attempts; default the one in the folder, or
    1 where none is: `train` tries once."""
    prunes = definition is None or definition.prune is not None
    return EndRule(max_attempts=max_attempts or _read_attempts(results), prunes=prunes)


def write_attempts(results: Path, max_attempts: int) -> None:
    path = results / "work" / ATTEMPTS
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {"max_attempts": max_attempts})


def _read_attempts(results: Path) -> int:
    try:
        content = files.parse_json(files.read_regular(results / "work" / ATTEMPTS))
    except (OSError, ValueError):
        return 1
    attempts = content.get("max_attempts") if isinstance(content, dict) else None
    return attempts if isinstance(attempts, int) and attempts > 0 else 1
