"""`LightningCallback`: `watch` in the Trainer of Lightning, which is imported when the class is first asked for."""

import functools
import importlib
from typing import Any

from sparsedepth.watch.adapt import original
from sparsedepth.watch.watching import Watch, watch


def _callback_class() -> Any:
    """Lightning's, under either of its package names. Raises ImportError where neither is installed."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", "pytorch_lightning"):
                raise
    raise ImportError("Lightning is not installed; pip install lightning")


class _Watching:
    """`Trainer(callbacks=[sparsedepth.LightningCallback(tokens, model="model", every=..., ...)])`: the keywords of
    `watch`, and `model`, the dotted path of the model in the LightningModule ('' for itself)."""

    watch: Watch
    """from the start of the training on"""

    def __init__(self, tokens: Any, *, model: str = "model", **options: Any):
        super().__init__()
        self.tokens, self.path, self.options = tokens, model, options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        module = original(pl_module)
        try:
            module = module.get_submodule(self.path)
        except AttributeError:
            near = ", ".join(name for name, _ in module.named_children())
            raise ValueError(f"model={self.path!r} is no module of {type(module).__name__}; it has {near}") from None
        self.watch = watch(module, self.tokens, **self.options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.watch(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch(trainer.global_step, now=True)
        self.watch.close()


@functools.cache
def __getattr__(name: str) -> Any:
    if name != "LightningCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type("LightningCallback", (_Watching, _callback_class()), {"__doc__": _Watching.__doc__})
