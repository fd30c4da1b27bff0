"""Which files of the package a call enters."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import sparsedepth

PACKAGE = Path(sparsedepth.__file__).parent


def entered_files(call: Callable[[], object]) -> set[str]:
    """The files whose functions are called; what a file does while it is imported does not count."""
    entered: set[str] = set()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        is_imported = caller is None or caller.f_code.co_name == "<module>" or code.co_name.startswith("<")
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and not is_imported:
            entered.add(str(Path(code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered
