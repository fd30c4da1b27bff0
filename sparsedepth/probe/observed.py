"""A module whose blocks read more than one stream, such as x_0, earlier blocks or the tokens, by its own passes alone.

    x_0, x_1 .. x_L   what the first block is given, and what each block returns
    loss              cross-entropy of the logits that the module returns

Measures that follow the stream read these states. No block is skipped, swapped or replaced, which `block` refuses: what
the module computes between and beside its blocks would be of another pass. It runs in its own dtype.

Shapes: V words."""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.probe.any_module import ProbedModule, first_of, own_pass, tensors_of
from sparsedepth.probe.fork import probing

OBSERVED = frozenset({"loss", "weights", "variance", "geometry", "trajectories", "participation"})
"""The measures that need no more."""


class ObservedModule(ProbedModule):
    """`tokens_BT` are an example; logits have `n_words` words or more. Raises ValueError, with the list's `name`, where
    the module cannot be run on these tokens, or its blocks do not run once each, in order."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], tokens_BT: Tensor, name: str, n_words: int):
        super().__init__(model, layers)
        self._name, self._n_words = name, n_words
        self._states: list[Tensor] = []
        self._logits_BTV: Tensor | None = None
        with probing(self):
            self.stream_width = self.embed(tokens_BT).shape[-1]
        self.vocab_size = n_words

    @property
    def has_loss(self) -> bool:
        return self._logits_BTV is not None

    def embed(self, tokens_BT: Tensor) -> Tensor:
        seen, returned = own_pass(self, tokens_BT, self._name)
        self._states = [seen[0][0].float(), *(first_of(out).float() for _, out in seen)]
        given = (x for x in tensors_of(returned) if x.ndim == 3 and x.shape[-1] >= self._n_words)
        self._logits_BTV = next((x for x in given if x.shape[:2] == tokens_BT.shape), None)
        return self._states[0]

    def block(self, layer: int, x_BTD: Tensor) -> Tensor:
        if x_BTD is not self._states[layer - 1]:
            raise ValueError(
                f"block {layer} of {self._name!r} reads more than the stream; it cannot be called by itself"
            )
        return self._states[layer]

    def own_losses(self, x_FBTD: Tensor, targets_BT: Tensor) -> Tensor | None:
        """loss_1B of the tokens embedded last, all of whose positions are scored."""
        assert len(x_FBTD) == 1
        assert self._logits_BTV is not None
        loss_BT = F.cross_entropy(self._logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="none")
        return loss_BT.view(targets_BT.shape).mean(-1)[None]
