"""What the scripts in `analysis/` share: read results folders, print a verdict per depth, setting and outcome, and exit
with a status: 2 and one line on stderr if the runs cannot answer, 1 in silence if the output pipe is closed."""

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


class NoAnswer(Exception):
    """The runs cannot answer the question, for this reason."""


def run_script(main: Callable[[list[str]], None]) -> NoReturn:
    """Call `main` with the command's arguments, and exit."""
    status = 0
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except NoAnswer as reason:
        print(reason, file=sys.stderr)
        status = 2
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
) -> None:
    """Print a paper's claim about a field and these runs' contrasts, a line each. Raises NoAnswer if no two runs differ
    in that field alone."""
    runs = read_runs(paths)
    knob = find_knob(runs, field)
    if knob and not knob.is_pure and field != "n_layers":
        raise NoAnswer(f"{' and '.join(knob.fields)} change only together: no effect can be attributed to {field}")
    contrasts = []
    if knob:
        family = [contrast for outcome in outcomes for contrast in effects_of(runs, all_knobs(runs), outcome)]
        contrasts = [contrast for contrast in family if contrast.knob == knob.name]
    if knob is None or not contrasts:
        raise NoAnswer(f"no two of these {len(runs)} runs differ in {field} alone; run a sweep over {field}")
    print(f"Claimed: {claim}\nMeasured, against {knob.baseline} (runs differ in {', '.join(knob.fields)} only):")
    for contrast in contrasts:
        print(f"  {contrast_sentence(contrast)}")
    for slope in (slope for outcome in outcomes for slope in slopes_of(runs, find_knobs(runs), outcome)):
        if slope.knob == knob.name:
            print(f"  {slope_sentence(slope)}")
    for line in details(runs) if details else ():
        print(f"  {line}")


def read_runs(paths: Sequence[str]) -> pd.DataFrame:
    """The `runs` view of results folders. Raises NoAnswer where there is none."""
    if not paths:
        raise NoAnswer("name at least one results folder: python analysis/NAME.py RESULTS_DIR [...]")
    try:
        with open_store(*paths) as store:
            return store.frame("select * from runs")
    except ValueError as error:
        raise NoAnswer(error) from None
