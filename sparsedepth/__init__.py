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
    from sparsedepth.watch.scale_norms import scale_norms
    from sparsedepth.watch.trainer import TrainerCallback
    from sparsedepth.watch.watching import watch

__version__ = "0.2.0"
__all__ = ["TrainerCallback", "best", "measure", "open_store", "plot", "recipe"]
__all__ += ["scale_norms", "sweep", "train", "watch"]
_ELSEWHERE = {
    "open_store": "store.connection",
    "watch": "watch.watching",
    "scale_norms": "watch.scale_norms",
    "TrainerCallback": "watch.trainer",
    "LightningCallback": "watch.lightning",
}
"""Name -> module, of what is no command; the last is there where Lightning is."""

_PACKAGES = ("measure", "recipe", "sweep", "train", "watch")


def _call(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"sparsedepth.{_ELSEWHERE.get(name, 'cli.calls')}"), name)


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
    if name not in __dir__():
        raise AttributeError(f"module 'sparsedepth' has no attribute {name!r}")
    try:
        return importlib.import_module(f"sparsedepth.{name}") if name in _PACKAGES else _call(name)
    except ImportError as error:  # so that `help(sparsedepth)` goes on without it
        raise AttributeError(f"sparsedepth.{name}: {error}") from error


def __dir__() -> list[str]:
    return [*__all__, "LightningCallback", "__version__"]
