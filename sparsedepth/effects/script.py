"""What the scripts in `analysis/` share: read results folders, print a verdict per depth, setting and outcome, and exit
with a status, also when the output pipe is closed."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import pandas as pd

from sparsedepth.effects.all_effects import all_knobs, effects_of, slopes_of
from sparsedepth.effects.depth_slope import slope_sentence
from sparsedepth.effects.knobs import find_knob, find_knobs
from sparsedepth.effects.sentences import contrast_sentence
from sparsedepth.store.connection import open_store

NO_ANSWER = 2
"""Exit status where the runs cannot answer the question."""


def run_script(body: Callable[[], int]) -> NoReturn:
    """Exit with the status that `body()` returns; silently with 1 when the output pipe is closed."""
    try:
        status = body()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def answer(
    paths: Sequence[str],
    field: str,
    outcomes: Sequence[str],
    claim: str,
    details: Callable[[pd.DataFrame], Iterable[str]] | None = None,
) -> int:
    """Print a paper's claim about a field and these runs' contrasts, a line each. Returns the exit status: 0, or 2 if
    no two runs differ in that field alone."""
    runs = read_runs(paths)
    if runs is None:
        return NO_ANSWER
    knob = find_knob(runs, field)
    if knob and not knob.is_pure and field != "n_layers":
        print(
            f"{' and '.join(knob.fields)} change only together: no effect can be attributed to {field}", file=sys.stderr
        )
        return NO_ANSWER
    contrasts = []
    if knob:
        family = [contrast for outcome in outcomes for contrast in effects_of(runs, all_knobs(runs), outcome)]
        contrasts = [contrast for contrast in family if contrast.knob == knob.name]
    if knob is None or not contrasts:
        print(f"no two of these {len(runs)} runs differ in {field} alone; run a sweep over {field}", file=sys.stderr)
        return NO_ANSWER
    print(f"Claimed: {claim}\nMeasured, against {knob.baseline} (runs differ in {', '.join(knob.fields)} only):")
    for contrast in contrasts:
        print(f"  {contrast_sentence(contrast)}")
    for slope in (slope for outcome in outcomes for slope in slopes_of(runs, find_knobs(runs), outcome)):
        if slope.knob == knob.name:
            print(f"  {slope_sentence(slope)}")
    for line in details(runs) if details else ():
        print(f"  {line}")
    return 0


def read_runs(paths: Sequence[str]) -> pd.DataFrame | None:
    """The `runs` view of results folders; None, with the reason on stderr, where there is none."""
    if not paths:
        print("name at least one results folder: python analysis/NAME.py RESULTS_DIR [...]", file=sys.stderr)
        return None
    try:
        with open_store(*paths) as store:
            return store.frame("select * from runs")
    except ValueError as error:
        print(error, file=sys.stderr)
        return None
