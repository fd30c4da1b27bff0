"""What a function made of an object is kept while that object lives: a report asks for the same a dozen times."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

Given = ParamSpec("Given")
Result = TypeVar("Result")


def once(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, computed once for its first argument and each combination of the others. What it returns is
    shared: nobody may change it; nor may it hold that argument, which would then live for ever."""
    kept: WeakKeyDictionary[Any, dict[Any, Result]] = WeakKeyDictionary()

    @wraps(function)
    def of_object(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        known = kept.setdefault(args[0], {})
        others = args[1:], *kwargs.items()
        if others not in known:
            known[others] = function(*args, **kwargs)
        return known[others]

    return of_object
