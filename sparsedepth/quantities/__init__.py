"""All quantities, each defined once: formula, unit, source, and everything derived from these.

A name is the key of a record in `measure`, the column or `metric` value in the store, and the label in a plot. Layers
count from 1 to n_layers; layer 0 is the embedding's output. Metrics by layer and head with a threshold include it:
`weight_sparsity@0.001`, `attention_sparsity_rel@0.1`; the column of `runs` is at the first threshold of the config
field. Measured quantities are in `measured.py`, those of training in `training.py`.
"""

import difflib
from collections.abc import Container, Iterator, Mapping
from typing import Any, get_args

from sparsedepth.quantities.measured import MEASURED
from sparsedepth.quantities.record import Column, Quantity, Stage, Table
from sparsedepth.quantities.training import CURVES as TRAINING_CURVES
from sparsedepth.quantities.training import RUN

QUANTITIES: tuple[Quantity, ...] = (*RUN, *TRAINING_CURVES, *MEASURED)

ALL: tuple[Column, ...] = tuple(column for quantity in QUANTITIES for column in quantity.columns())

RUNS, CURVES, LAYERS, HEADS, PAIRS, TOKENS, DIFFICULTY = (
    tuple(column for column in ALL if column.view == view) for view in get_args(Table)
)
"""Columns of the wide tables and metrics of the long ones (layers, heads, pairs), in display order."""

TASK_SCORE = "acc:"


class RunQuantities(dict[str, Quantity]):
    """Also knows 'acc:TASK', a task's accuracy by `sparsedepth evaluate`: a column of stores that hold its scores."""

    def __missing__(self, name: str) -> Quantity:
        if name not in self:
            raise KeyError(name)
        formula = f"share of the questions of {name.removeprefix(TASK_SCORE)} answered correctly (evaluate)"
        return Quantity(name, formula, "share", better="high", label=name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and name.startswith(TASK_SCORE) and name != TASK_SCORE
        )

    def get(self, name: Any, default: Any = None, /) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this is get


IN_RUNS, BY_LAYER, BY_PAIR = (
    RunQuantities({column.name: column.quantity for column in columns if column.quantity and not column.part})
    for columns in (RUNS, LAYERS, PAIRS)
)
"""The quantities that are columns of `runs`, metrics of `layers`, and metrics of `pairs`."""
RANKABLE: tuple[str, ...] = tuple(name for name, quantity in IN_RUNS.items() if quantity.better)
"""Columns of `runs` with a better direction."""

PROFILED: tuple[Quantity, ...] = tuple(quantity for quantity in QUANTITIES if quantity.carried_by)
"""Scores with a depth profile."""


def of_stage(stage: Stage) -> tuple[str, ...]:
    """The quantities at one stage of the chain."""
    return tuple(quantity.name for quantity in QUANTITIES if quantity.stage == stage)


def rankable(name: str) -> Quantity:
    """The quantity of a column of `runs` with a better direction. Raises ValueError for another name."""
    if name not in IN_RUNS:
        near = difflib.get_close_matches(name, RANKABLE, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "`sparsedepth metrics` lists them"
        raise ValueError(f"there is no measured quantity {name!r}; {hint}")
    quantity = IN_RUNS[name]
    if not quantity.better:
        raise ValueError(f"{name!r} has no better direction ({quantity.formula}); choose one of {', '.join(RANKABLE)}")
    return quantity


def check_scored(name: str, columns: Container[str]) -> None:
    """Raises ValueError for the accuracy of a task that is no column of these runs."""
    if name.startswith(TASK_SCORE) and name not in columns:
        raise ValueError(f"no run here has {name}; score runs first: sparsedepth evaluate RUN --tasks TASK")


def sign(name: str) -> int:
    """1 if more of a column of `runs` is better, else -1: sign x value is to be maximised."""
    return 1 if name in IN_RUNS and IN_RUNS[name].better == "high" else -1


def quantity(name: str) -> Quantity:
    """The quantity of a column of `runs` or of a metric by layer."""
    return IN_RUNS.get(name) or BY_LAYER[name]


def axis_label(name: str) -> str:
    """The axis label of a column of `runs` or of a metric by layer."""
    return quantity(name).axis_label


def with_intervals(summary: Mapping[str, Any]) -> Iterator[tuple[Column, Any, tuple[Any, Any] | None]]:
    """(column, value, interval or None) for the columns of `runs` with a value, except interval ends."""
    for column in RUNS:
        value = summary.get(column.name)
        if value is not None and column.part not in ("lo", "hi"):
            low, high = summary.get(f"{column.name}_lo"), summary.get(f"{column.name}_hi")
            yield column, value, None if low is None or high is None else (low, high)
