"""sparsedepth: which kinds of sparsity make the deep layers of a language model worth their cost?

    import sparsedepth as sd

The commands are calls, listed below; `help(sd.best)` tells their options. `sd.watch` measures a model in your own
training loop, with `sd.TrainerCallback` and `sd.LightningCallback` beside it; `sd.scale_norms` puts LNS into a model of
another library; `sd.open_store` answers SQL. Each is imported when it is first used. Packages of these names can be
called, too."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsedepth.cli.calls import (
        ask,
        best,
        effects,
        evaluate,
        export,
        import_runs,
        judge,
        measure,
        pack,
        plan,
        plot,
        query,
        recipe,
        report,
        scaling,
        status,
        sweep,
        train,
    )
    from sparsedepth.store.connection import open_store
    from sparsedepth.watch.scale_norms import scale_norms
    from sparsedepth.watch.trainer import TrainerCallback
    from sparsedepth.watch.watching import watch

__version__ = "0.3.0"
__all__ = ["TrainerCallback", "ask", "best", "effects", "evaluate", "export", "import_runs", "judge", "measure"]
__all__ += ["open_store", "pack", "plan", "plot", "query", "recipe", "report", "scale_norms", "scaling", "status"]
__all__ += ["sweep", "train", "watch"]
_ELSEWHERE = {
    "open_store": "store.connection",
    "watch": "watch.watching",
    "scale_norms": "watch.scale_norms",
    "TrainerCallback": "watch.trainer",
    "LightningCallback": "watch.lightning",
}
"""Name -> module, of what is no command; the last is there where Lightning is."""

_PACKAGES = ("effects", "measure", "plan", "recipe", "report", "scaling", "sweep", "train", "watch")


def _call(name: str) -> Callable[..., Any]:
    call = getattr(importlib.import_module(f"sparsedepth.{_ELSEWHERE.get(name, 'cli.calls')}"), name)
    call.__name__ = name  # as help() shows it
    return call


def _head(name: str) -> str:
    """'watch(model, tokens, ...)'"""
    import inspect

    return f"{name}{inspect.signature(_call(name))}"


class _Library(ModuleType):
    """This module, whose help lists its calls."""

    @property
    def __doc__(self) -> str:  # ty: ignore[incompatible-property-override]
        return "\n\n    ".join([vars(self)["__doc__"], *(f"sd.{_head(name)}" for name in __all__ if name.islower())])


class _CallablePackage(ModuleType):
    # A package that stands in place of the call of its name, whichever of the two was asked for first.

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The call, whose signature is also the package's."""
        return _call(self.__name__.rpartition(".")[2])

    @property
    def __doc__(self) -> str:  # ty: ignore[incompatible-property-override]
        return f"{_head(self.__name__.rpartition('.')[2])}\n\n{self.__wrapped__.__doc__}"

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.__wrapped__(*given, **named)


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


sys.modules[__name__].__class__ = _Library


def __dir__() -> list[str]:
    return [*__all__, "LightningCallback", "__version__"]
