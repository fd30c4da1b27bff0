"""`TrainerCallback`: `watch` in the Trainer of transformers, of accelerate and of trl."""

from typing import Any

import transformers

from sparsedepth.watch.watching import Watch, watch


class TrainerCallback(transformers.TrainerCallback):
    """`Trainer(..., callbacks=[sparsedepth.TrainerCallback(tokens, every=..., out=..., ...)])`: the keywords of
    `watch`, whose mistakes are told before the first step. The last step is measured, too."""

    watch: Watch
    """from the start of the training on"""

    def __init__(self, tokens: Any, **options: Any):
        self.tokens, self.options = tokens, options

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        self.watch = watch(model, self.tokens, **self.options)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.watch(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.watch(state.global_step, now=True)
        self.watch.close()
