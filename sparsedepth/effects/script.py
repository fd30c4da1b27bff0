"""The end of the scripts in `analysis/`: an exit status, also where the reader of a pipe has gone."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_script(body: Callable[[], int]) -> NoReturn:
    """Exit with the status that `body()` returns; 1, in silence, once nobody reads what it prints."""
    try:
        status = body()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
