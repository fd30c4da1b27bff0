"""What the scripts of this folder share: reading results folders, and ending like a command.

Exit code 2 and one line for a user's error; 1, in silence, where the reader of the output has gone.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import pandas as pd

from sparsedepth.store.connection import open_store


def run_script(main: Callable[[list[str]], None]) -> NoReturn:
    """Call `main` with the command's arguments, and exit."""
    status = 0
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        status = 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def read_runs(paths: Sequence[str]) -> pd.DataFrame:
    """The `runs` view of results folders. Raises ValueError where there is none."""
    if not paths:
        raise ValueError("name at least one results folder: python analysis/NAME.py RESULTS_DIR [...]")
    with open_store(*paths) as store:
        return store.frame("select * from runs")
