"""Rules that a record must keep: what is wrong with it, and the sentence that says so. Imports no pydantic."""

from collections.abc import Callable, Iterable
from typing import Any

Rule = tuple[Callable[[Any], Any], str]
"""What is wrong with a record, if anything, and the mistake: a template of the record `c` and of what was found."""


def refuse_first(rules: Iterable[Rule], record: object) -> None:
    """Raises ValueError for the first rule that a record breaks."""
    for find, told in rules:
        if found := find(record):
            raise ValueError(told.format(c=record, found=found))
