"""Compute multipliers and the budgets from which depths are worth their cost, as lines for a terminal and as tables."""

from collections.abc import Sequence
from dataclasses import asdict, fields

import pandas as pd

from sparsedepth.scaling.budgets import flops_text
from sparsedepth.scaling.crossover import Crossover
from sparsedepth.scaling.speedup import sentence
from sparsedepth.store import terminal
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.setting import BUDGET

SHOWN = ("n_layers", BUDGET, "train_flops", "multiplier", "lo", "hi", "time_multiplier", "seeds", "setting")


def speedup_lines(table: pd.DataFrame) -> list[str]:
    """The table of `speedup.speedups`, and a sentence for each setting and depth at its largest budget."""
    lines = [
        "compute multiplier: compute of the baseline at the same loss / compute of the setting; lo, hi: 95% interval "
        "over seeds, a trunk and its branches being one, and over every L_inf that the data allow",
        terminal.fit(QueryResult.of_frame(table[[*SHOWN]]), ("seeds", "train_flops")).text,
    ]
    largest = table.groupby(["n_layers", "setting"], sort=False).tail(1)
    lines += [sentence(row) for row in largest.to_dict("records")]
    return [*lines, *(f"left out: {reason}" for reason in table.attrs["refused"])]


def crossover_text(one: Crossover) -> str:
    """'n_layers=16: worth its cost from 2e12 FLOPs (1e12 to 5e12); compared from 1e12 to 2e13 FLOPs, 5 seeds'"""
    text = f"n_layers={one.n_layers}{'' if one.setting == 'baseline' else f', {one.setting}'}: {one.text}"
    if one.smallest is None or one.largest is None:
        return text
    return f"{text}; compared from {flops_text(one.smallest)} to {flops_text(one.largest)} FLOPs, {one.seeds} seeds"


def crossover_lines(found: Sequence[Crossover]) -> list[str]:
    """A sentence for each depth and setting."""
    head = "worth its cost: less loss than every shallower depth at equal training FLOPs (95%, seeds as units)"
    return [head, *map(crossover_text, found)]


def crossover_table(found: Sequence[Crossover]) -> QueryResult:
    """A row for each depth and setting."""
    names = tuple(field.name for field in fields(Crossover))
    return QueryResult(columns=names, rows=tuple(tuple(asdict(one).values()) for one in found))
