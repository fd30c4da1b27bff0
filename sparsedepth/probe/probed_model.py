"""The interface that measures use: a language model, as blocks on a residual stream.

    x_0 = embed(tokens),   x_l = block(l, x_(l-1)),   logits = logits(x_L),   l = 1..L

Adapters call the model's own modules; they never re-implement one, and never change a weight."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsedepth.model import kernels
from sparsedepth.model.attention import Attention, GatedAttention
from sparsedepth.model.block import Block
from sparsedepth.model.context import Context
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.feedforward import Experts, FeedForward
from sparsedepth.model.linear import TensorPair

AttentionInputs = tuple[Tensor, Tensor, Context]
"""q_BHTK, k_BGTK, and what they see."""


class ProbedModel(Protocol):
    """Layers are numbered 1 to n_layers. The residual stream is passed in and out as fp32 on `device`."""

    model: Any
    """The module itself: `probing` sets its mode and restores it."""

    @property
    def device(self) -> torch.device: ...

    n_layers: int
    vocab_size: int
    """width of the logits"""
    stream_width: int
    """D, of all sources"""

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """x_0 as x_BTD: the input of the first block."""

    def block(self, layer: int, x_BTD: Tensor) -> Tensor:
        """x_l from x_(l-1): the whole residual block."""

    def logits(self, x_BTD: Tensor) -> Tensor:
        """logits_BTV of x_L: final norm, then head. Position by position."""

    def final_norm(self, x_BTD: Tensor) -> Tensor:
        """The final norm of x_L, which the head reads."""

    def attention_inputs(self, layer: int, x_BTD: Tensor) -> AttentionInputs | None:
        """q_BHTK and k_BGTK of a block given its input x_(l-1), as its kernel gets them; head h reads group
        h // (H / G). The weights follow from them, and the context's window, documents and cap (`attention_rows`). None
        of a block without attention, or whose weights these do not give (sinks)."""

    def matrices(self, layer: int) -> Mapping[str, Tensor]:
        """Of a block by name: query, key, value, output, and those of the feed-forward part or of each expert."""

    def branches(self, layer: int, x_BTD: Tensor) -> TensorPair | None:
        """a_BTD and f_BTD, the updates by attention and feed-forward part: x_l = x_(l-1) + a + f, from x_(l-1). None if
        the block is no such sum (a norm on the stream itself), or the adapter cannot tell."""
        return None

    def hidden_units(self, layer: int, x_BTD: Tensor) -> Tensor | None:
        """h_BTF, the input of the down projection of a dense feed-forward part, from x_(l-1); None for experts."""
        return None

    def routing(self, layer: int, x_BTD: Tensor) -> TensorPair | None:
        """probability_BTE of the router's softmax over all experts, and choice_BTC, the experts chosen, from x_(l-1).
        None for a block without experts."""
        return None

    def exact(self) -> AbstractContextManager[None]:
        """Context in which the model uses kernels that compute in fp32; the previous ones are restored."""


class ProbedDecoder:
    """`Decoder` as a `ProbedModel`. With `n_streams` D counts all streams side by side; with `loops` each pass through
    a block is a layer, skipped or swapped by itself. With `attention_residuals` D counts all sources, 0 until written;
    a block adds at its own. Calls `Block.forward` directly, not its compiled version: forks come in many batch sizes,
    each a recompilation. A block may also read documents (`mask_documents`), x_0 (`residual_scalars`) and block 1's
    values (`value_residual`), of the tokens embedded last; x may hold several copies of them one after the other, as
    forks do.
    """

    def __init__(self, model: Decoder):
        self.model, self.n_layers = model, len(model.blocks)
        self.vocab_size, self.stream_width = model.config.vocab_size, model.config.stream_width
        self._contexts: dict[int, Context] = {}  # of the tokens embedded last, by number of copies
        self._positions: tuple[tuple[int, torch.device], Context] | None = None  # of the last length, for other tokens

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    def embed(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.model.embed_tokens(tokens_BT)
        self._contexts = {1: self.model.context(tokens_BT, x_BTD, in_order=False)}
        return x_BTD

    def _context(self, x_BTD: Tensor) -> Context:
        """What a block reads beside the stream."""
        context = self._contexts.get(1)
        embedded = None if context is None else context.document_BT if context.first_BTD is None else context.first_BTD
        if embedded is None:  # nothing but positions, the same for any tokens
            key = (x_BTD.shape[1], x_BTD.device)
            if self._positions is None or self._positions[0] != key:
                with torch.inference_mode(False):  # they may be reused where a block is differentiated
                    self._positions = key, self.model.positions(x_BTD.shape[1])
            return self._positions[1]
        copies, remainder = divmod(len(x_BTD), len(embedded))
        assert not remainder and x_BTD.shape[1] == embedded.shape[1], "the stream is not of the tokens embedded last"
        if copies not in self._contexts:
            self._contexts[copies] = self._contexts[1].repeated(copies)
        return self._contexts[copies]

    def _block(self, layer: int) -> Block:
        return self.model.blocks[layer - 1]

    def block(self, layer: int, x_BTD: Tensor) -> Tensor:
        return self._block(layer).forward(x_BTD, self._context(x_BTD))

    def logits(self, x_BTD: Tensor) -> Tensor:
        return self.model.logits(x_BTD)

    def final_norm(self, x_BTD: Tensor) -> Tensor:
        return self.model.final_norm(x_BTD)

    def attention_inputs(self, layer: int, x_BTD: Tensor) -> AttentionInputs:
        block, context = self._block(layer), self._context(x_BTD)
        input_BTD = block.branch_input("attention", block.mix_with_start(x_BTD, context))
        return *block.attention.kernel_inputs(input_BTD, context), block.attention.seen(context)

    def matrices(self, layer: int) -> Mapping[str, Tensor]:
        """Without the router, which transforms nothing."""
        block = self._block(layer)
        attention, ffn = block.attention, block.ffn
        names = ("query", "key", "value", "output", *["gating"] * isinstance(attention, GatedAttention))
        weights = {name: getattr(attention, name).weight for name in names}
        if isinstance(ffn, FeedForward):
            return weights | _weights(ffn)
        for index, (gate_up, down) in enumerate(zip(ffn.gate_up_E2FD, ffn.down_EDF, strict=True)):
            gate, up = gate_up.chunk(2)
            weights |= {f"expert{index}.gate": gate, f"expert{index}.up": up, f"expert{index}.down": down}
        if ffn.shared is not None:
            weights |= {f"shared.{name}": weight for name, weight in _weights(ffn.shared).items()}
        return weights

    def branches(self, layer: int, x_BTD: Tensor) -> TensorPair | None:
        block = self._block(layer)
        if not block.is_sum:
            return None
        attention_BTD = block.attention_update(x_BTD, self._context(x_BTD))
        return attention_BTD, block.ffn_update(x_BTD + attention_BTD)

    def hidden_units(self, layer: int, x_BTD: Tensor) -> Tensor | None:
        block = self._block(layer)
        if not isinstance(block.ffn, FeedForward):
            return None
        u_BTD = block.after_attention(x_BTD, self._context(x_BTD))
        return block.ffn.hidden(block.branch_input("ffn", u_BTD))

    def routing(self, layer: int, x_BTD: Tensor) -> TensorPair | None:
        block = self._block(layer)
        if not isinstance(block.ffn, Experts):
            return None
        u_BTD = block.after_attention(x_BTD, self._context(x_BTD))
        # The router reads the normed stream, as the experts do.
        _, probability_NE, _, choice_NC = block.ffn.route(block.branch_input("ffn", u_BTD).flatten(0, 1))
        shape = x_BTD.shape[:2]
        return probability_NE.unflatten(0, shape), choice_NC.unflatten(0, shape)

    @contextmanager
    def exact(self) -> Generator[None]:
        parts = [module for module in self.model.modules() if isinstance(module, Attention | Experts)]
        kernels_before = [part.kernel for part in parts]
        setting = kernels.facts_of(self.model.config, self.device, torch.float32, may_wait=True)
        self.model.use_kernels(attention="sdpa", experts=kernels.choose("experts", "auto", setting).kernel)
        try:
            yield
        finally:
            for part, kernel in zip(parts, kernels_before, strict=True):
                part.kernel = kernel


def _weights(ffn: FeedForward) -> dict[str, Tensor]:
    """Without the gate if it has none."""
    parts = {name: getattr(ffn, name) for name in ("gate", "up", "down")}
    return {name: part.weight for name, part in parts.items() if part is not None}
