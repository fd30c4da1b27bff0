"""Which files of the package a call passes: the length of the way from rows to a printed number.

    PYTHONPATH=tests python tests/support/trace_files.py RESULTS_DIR

prints the files and functions entered from the rows of `runs` to the table of `effects`. Imports do not count, nor does
`config/`: its records validate the default run once.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd

import sparsedepth
from sparsedepth.effects import cells, frame, text
from sparsedepth.store.connection import open_store

PACKAGE = Path(sparsedepth.__file__).parent


def entered(call: Callable[[], object]) -> dict[str, set[str]]:
    """File -> its functions that the call enters."""
    found: dict[str, set[str]] = {}

    def see(caller: FrameType, event: str, argument: Any) -> None:
        code = caller.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and code.co_name != "<module>":
            file = Path(code.co_filename).relative_to(PACKAGE)
            if file.parts[0] != "config":
                found.setdefault(str(file), set()).add(code.co_qualname)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def from_rows_to_table(runs: pd.DataFrame, outcome: str) -> dict[str, set[str]]:
    """What the table of effects on an outcome passes."""

    def show() -> str:
        of_runs = cells.cells_of(runs, outcome)
        return text.effects_text(frame.effects_frame(of_runs), of_runs)

    return entered(show)


if __name__ == "__main__":
    with open_store(*sys.argv[1:]) as store:
        rows = store.frame("select * from runs")
    passed = from_rows_to_table(rows, "val_loss")
    for file, functions in sorted(passed.items()):
        print(f"{file}: {len(functions)}")
    print(f"{len(passed)} files, {sum(map(len, passed.values()))} functions")
