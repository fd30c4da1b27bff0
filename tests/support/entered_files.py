"""Which files of the package a call enters."""

from collections.abc import Callable

from support.walks import walk


def entered_files(call: Callable[[], object]) -> set[str]:
    """The files whose functions are called; what a file does while it is imported does not count."""
    return {*walk(call).rooms}
