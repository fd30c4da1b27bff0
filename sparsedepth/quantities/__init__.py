"""All quantities, each defined once: formula, unit, source, and everything derived from these.

A name is the key of a record in `measure`, the column or `metric` value in the store, and the label in a plot. Layers
count from 1 to n_layers; layer 0 is the embedding's output. Metrics by layer and head with a threshold include it:
`weight_sparsity@0.001`, `attention_sparsity_rel@0.1`; the column of `runs` is at the first threshold of the config
field. Those that measures make are in `measured.py`, those of training (how a run ended, its cost, its curves) here."""

import difflib
from collections import UserDict
from collections.abc import Container, Iterator
from typing import Any, get_args

from sparsedepth.quantities.measured import MEASURED
from sparsedepth.quantities.quantity import Column, Quantity, Row, Stage, Table

# fmt: off
_RUN = (
    Quantity("outcome", "ok, or diverged (see diverged_step and diverged_cause)", "", type="VARCHAR"),
    Quantity("diverged_step", "step at which the run was found to have diverged", "step", type="BIGINT"),
    Quantity("diverged_cause", "why it counts as diverged", "", type="VARCHAR"),
    Quantity("params_total", "all parameters, embeddings and every expert included", "parameters",
             better="low", type="BIGINT"),
    Quantity("params_active", "parameters that touch one token: top_k of n_experts", "parameters",
             better="low", type="BIGINT"),
    Quantity("flops_per_token", "forward pass: 2 per multiply-add of every matrix product, full T x T attention", "FLOP"),
    Quantity("train_flops", "3 x flops_per_token x tokens_trained (backward = 2 x forward)", "FLOP",
             better="low", label="training cost"),
    Quantity("steps", "optimiser steps taken", "step", type="BIGINT"),
    Quantity("tokens_trained", "tokens trained on", "token", type="BIGINT"),
    Quantity("tokens_per_param", "tokens_trained / params_total; about 20 is compute-optimal (2203.15556)", "token",
             scale="log", is_ratio=True),
    Quantity("train_loss", "mean training cross-entropy over the last 10% of the logged steps", "nat/token", better="low"),
    Quantity("unigram_loss", "held-out loss of add-one counts of the very tokens trained on; NULL for a task", "nat/token"),
    Quantity("bigram_loss", "held-out loss of their counts by the token before, interpolated with the unigram; a model "
             "above it knows less than pairs of tokens tell; NULL for a task", "nat/token"),
    Quantity("chance_loss", "held-out loss of a task's answers guessed from position and difficulty alone; NULL for text", "nat/token"),
)

_CURVES = (
    Quantity("step", "optimiser steps done", "step", tables=("curves",), type="BIGINT"),
    Quantity("tokens", "tokens trained on so far", "token", tables=("curves",), type="BIGINT"),
    Quantity("train_loss", "cross-entropy of the step's batch, without the router losses", "nat/token", tables=("curves",)),
    Quantity("balance_loss", "load-balance loss, mean over layers; 1 = balanced; NULL without experts", tables=("curves",)),
    Quantity("lr", "learning rate of the step", tables=("curves",)),
    Quantity("grad_norm", "global gradient norm before clipping", tables=("curves",)),
    Quantity("gradient_norm", "norm of the training loss's gradient by the block's parameters, before clipping, along "
             "training; where gradients are measured", tables=("layers",), scale="log"),
    Quantity("tokens_per_second", "training speed since the last row", "token/s", tables=("curves",)),
)
# fmt: on

QUANTITIES = (*_RUN, *_CURVES, *MEASURED)

ALL = tuple(column for quantity in QUANTITIES for column in quantity.columns())

RUNS, CURVES, LAYERS, HEADS, PAIRS, TOKENS, DIFFICULTY = (
    tuple(column for column in ALL if column.view == view) for view in get_args(Table)
)
"""Columns of the wide tables and metrics of the long ones (layers, heads, pairs), in display order."""

TASK_SCORE = "acc:"


class RunQuantities(UserDict[str, Quantity]):
    """Also knows 'acc:TASK', a task's accuracy by `sparsedepth evaluate`: a column of stores that hold its scores."""

    def __missing__(self, key: str) -> Quantity:
        if key not in self:
            raise KeyError(key)
        formula = f"share of the questions of {key.removeprefix(TASK_SCORE)} answered correctly (evaluate)"
        return Quantity(key, formula, "share", better="high", label=key)

    def __contains__(self, key: object) -> bool:
        is_score = isinstance(key, str) and key.startswith(TASK_SCORE) and key != TASK_SCORE
        return is_score or super().__contains__(key)


IN_RUNS, BY_LAYER, BY_PAIR = (
    RunQuantities({column.name: column.quantity for column in columns if column.quantity and not column.part})
    for columns in (RUNS, LAYERS, PAIRS)
)
"""The quantities that are columns of `runs`, metrics of `layers`, and metrics of `pairs`."""
RANKABLE = tuple(name for name, quantity in IN_RUNS.items() if quantity.better)
"""Columns of `runs` with a better direction."""

PROFILED = tuple(quantity for quantity in QUANTITIES if quantity.carried_by)
"""Scores with a depth profile."""


OF_STAGE = {
    stage: tuple(quantity.name for quantity in QUANTITIES if quantity.stage == stage) for stage in get_args(Stage)
}
"""Names of the quantities by their place in the chain."""


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


def unit_of(outcome: str, columns: Container[str] | None = None) -> str:
    """The unit of a difference in this outcome. Raises ValueError for an outcome that is no
    number of `runs`."""
    quantity = IN_RUNS.get(outcome)
    if quantity is None or quantity.type == "VARCHAR":
        names = [name for name, other in IN_RUNS.items() if other.type == "DOUBLE"]
        near = ", ".join(difflib.get_close_matches(outcome, names, n=3))
        hint = f"the nearest: {near}" if near else "see `sparsedepth metrics`"
        raise ValueError(f"outcome {outcome!r} is not a measured number of a run; {hint}")
    if columns is not None:
        check_scored(outcome, columns)
    return "ln ratio" if quantity.is_ratio else quantity.unit


def is_ratio(outcome: str) -> bool:
    """Whether runs are compared by the ratio of this outcome, as a difference of logarithms."""
    return outcome in IN_RUNS and IN_RUNS[outcome].is_ratio


def quantity(name: str) -> Quantity:
    """The quantity of a column of `runs` or of a metric by layer."""
    return IN_RUNS.get(name) or BY_LAYER[name]


def quantity_of_map(name: str) -> Quantity:
    """The quantity of a metric by pair of layers, or by layer and position."""
    return BY_PAIR.get(name) or BY_LAYER[name]


def axis_label(name: str) -> str:
    """The axis label of a column of `runs` or of a metric by layer."""
    return quantity(name).axis_label


def with_intervals(summary: Row) -> Iterator[tuple[Column, Any, tuple[Any, Any] | None]]:
    """(column, value, interval or None) for the columns of `runs` with a value, except interval ends."""
    for column in RUNS:
        value = summary.get(column.name)
        if value is not None and column.part not in ("lo", "hi"):
            low = summary.get(f"{column.name}_lo")
            high = summary.get(f"{column.name}_hi")
            yield column, value, None if low is None or high is None else (low, high)
