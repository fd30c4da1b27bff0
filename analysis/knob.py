"""What does a knob do to sparsity, residual variance, usefulness and loss? A row per quantity, depth and setting.

    python analysis/knob.py FOLDER KNOB

Verdicts are those of `sparsedepth effects`. A degenerate score is replaced by its sound form (`store.degeneracy`), and
val_loss by the loss that compares the runs (`store.comparable_loss`). Quantities that were not measured have no row.
"""

import argparse
from collections.abc import Mapping
from typing import Any

import pandas as pd
from script import read_runs, run_script

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.effects.listing import of_knob
from sparsedepth.quantities import OF_STAGE
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.degeneracy import usable_forms
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.effects import size_text
from sparsedepth.words.plain_text import wrapped
from sparsedepth.words.table import fitted_table

QUANTITIES = (*OF_STAGE["sparsity"], *OF_STAGE["variance"], "usefulness", "val_loss")
COLUMNS = ("quantity", "n_layers", "effect", "lo", "hi", "seeds", "verdict", "setting")
LEGEND = (
    "effect: setting minus baseline (x: ratio), each at its own lr where that was tuned; lo, hi: 95% interval; "
    "verdict '-': not shown"
)


def effects_of_knob(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """The measured effects of the settings that change a field, on every quantity. Raises ValueError for a field that
    no setting changes."""
    measured = [outcome for outcome in with_loss(loss_of(runs), QUANTITIES) if runs[outcome].notna().any()]
    frames = []
    for outcome, _ in usable_forms(measured, runs).values():
        effects = of_knob(effects_frame(cells := cells_of(runs, outcome)), name, cells)
        effects = effects[effects["question"].isin(["setting", "depth"]) & effects["estimate"].notna()]
        frames.append(effects.assign(outcome=outcome, unit=cells.unit))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def row(effect: Mapping[str, Any]) -> tuple[str | int | None, ...]:
    ends = (effect["estimate"], effect["lo"], effect["hi"])
    sizes = (None if pd.isna(end) else size_text(end, effect["unit"], "+", "x") for end in ends)
    verdict = "-" if effect["verdict"] == "not shown" else effect["verdict"]
    return effect["outcome"], effect["n_layers"], *sizes, effect["seeds"], verdict, effect["setting"]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="knob.py", description="Effects of one knob, all else equal")
    parser.add_argument("folder")
    parser.add_argument("knob", help="a field of a run that varies, such as depth_scale or n_layers")
    options = parser.parse_args(arguments)
    effects = effects_of_knob(read_runs([options.folder]), options.knob)
    if effects.empty:
        raise ValueError(f"no two runs that differ in {options.knob} have a value of {', '.join(QUANTITIES)}")
    print(wrapped([f"{options.knob}: effects against the baseline", LEGEND]), end="")
    print(fitted_table(QueryResult(columns=COLUMNS, rows=tuple(map(row, effects.to_dict("records")))), ("seeds",)).text)


if __name__ == "__main__":
    run_script(main)
