"""What does a knob do to sparsity, residual variance, usefulness and loss? A row per quantity, depth and setting.

    python analysis/knob.py FOLDER KNOB

Verdicts are those of `sparsedepth effects`. A degenerate score is replaced by its sound form (`store.degeneracy`), and
val_loss by the loss that compares the runs (`store.comparable_loss`). Quantities that were not measured have no row.
"""

import argparse

import pandas as pd
from script import read_runs, run_script

from sparsedepth.effects.all_effects import all_knobs, effects_of, relevant_columns
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.knobs import Knob, find_knob
from sparsedepth.effects.sentences import size_text
from sparsedepth.quantities import of_stage
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.degeneracy import sound_forms
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.terminal import fit, wrapped

QUANTITIES = (*of_stage("sparsity"), *of_stage("variance"), "usefulness", "val_loss")
COLUMNS = ("quantity", "n_layers", "effect", "lo", "hi", "seeds", "verdict", "setting")
LEGEND = (
    "effect: setting minus baseline (x: ratio), in pairs of runs that differ in nothing else; lo, hi: 95% interval "
    "over seeds; verdict '-': not distinguishable, or tuned unevenly"
)


def effects_of_knob(runs: pd.DataFrame, name: str) -> tuple[Knob, list[Contrast]]:
    """The knob that a field belongs to, and its measured effects on every quantity. Raises ValueError for a field that
    does not vary by itself."""
    measured = [outcome for outcome in with_loss(loss_of(runs), QUANTITIES) if runs[outcome].notna().any()]
    outcomes = [*sound_forms(measured, runs).values()]
    runs = relevant_columns(runs, *outcomes)
    knobs = all_knobs(runs)
    knob = find_knob(runs, name)
    if knob is None:
        varied = ", ".join(knob.name for knob in knobs) or "none"
        raise ValueError(f"no two of these {len(runs)} runs differ in {name!r} alone; knobs that they vary: {varied}")
    if not knob.is_pure and name != "n_layers":
        raise ValueError(f"{' and '.join(knob.fields)} change only together: no effect can be attributed to {name}")
    effects = [effect for outcome in outcomes for effect in effects_of(runs, knobs, outcome)]
    return knob, [effect for effect in effects if effect.knob == knob.name and effect.effect.n]


def row(contrast: Contrast) -> tuple[str | int | None, ...]:
    ends = (contrast.effect.mean, contrast.effect.lo, contrast.effect.hi)
    sizes = (None if end is None else size_text(end, contrast.unit, "+") for end in ends)
    verdict = "-" if contrast.verdict == "not distinguishable" else contrast.verdict
    return contrast.outcome, contrast.n_layers, *sizes, contrast.n_seeds, verdict, contrast.setting


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="knob.py", description="Effects of one knob, all else equal")
    parser.add_argument("folder")
    parser.add_argument("knob", help="a field of a run that varies, such as depth_scale or n_layers")
    options = parser.parse_args(arguments)
    knob, effects = effects_of_knob(read_runs([options.folder]), options.knob)
    if not effects:
        raise ValueError(f"no pair of runs that differ in {knob.name} alone has a value of {', '.join(QUANTITIES)}")
    print(wrapped([f"{knob.name}: effects against {knob.baseline}", LEGEND]), end="")
    print(fit(QueryResult(columns=COLUMNS, rows=tuple(map(row, effects))), ("seeds",)).text)


if __name__ == "__main__":
    run_script(main)
