"""sparsedepth: which kinds of sparsity make the deep layers of a language model worth their cost?

    import sparsedepth as sd

`sd.sweep`, `sd.train`, `sd.measure`, `sd.best`, `sd.recipe` and `sd.plot` are the commands of these names as calls, in
`cli.calls`; `sd.open_store` is `store.connection.open_store`. Each is imported when it is first used. The first three
and `recipe` are packages, too, and can be called: `help(sd.cli.calls)`."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect

    from sparsedepth.cli.calls import best, measure, plot, recipe, sweep, train
    from sparsedepth.store.connection import open_store

__version__ = "0.2.0"
__all__ = ["best", "measure", "open_store", "plot", "recipe", "sweep", "train"]

_PACKAGES = ("measure", "recipe", "sweep", "train")


def _call(name: str) -> Callable[..., Any]:
    module = "store.connection" if name == "open_store" else "cli.calls"
    return getattr(importlib.import_module(f"sparsedepth.{module}"), name)


class _CallablePackage(ModuleType):
    """A package that stands in place of the call of its name, whichever of the two was asked for first."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return _call(self.__name__.rpartition(".")[2])(*given, **named)

    @property
    def __signature__(self) -> "inspect.Signature":
        import inspect

        return inspect.signature(_call(self.__name__.rpartition(".")[2]))


def make_callable(package: str) -> None:
    """Give a package of this library, while it is imported, the call of its name."""
    sys.modules[package].__class__ = _CallablePackage


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sparsedepth' has no attribute {name!r}")
    return importlib.import_module(f"sparsedepth.{name}") if name in _PACKAGES else _call(name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
