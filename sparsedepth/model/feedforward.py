"""The dense feed-forward part of a block, with or without a gate; `moe` has the mixture of experts.

    gated      W_down ( a(W_gate x) * W_up x )     swiglu: a = silu, geglu: gelu, reglu: relu      (2002.05202)
    ungated    W_down a(W_up x)                    gelu; relu; relu2: a = relu^2                   (2109.08668)

gelu is the exact form, x Phi(x). relu, reglu and relu2 give exact zeros (`measure.sparsity`).

Shapes: B sequences, T tokens, D d_model, F hidden units.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.linear import Linear, project_together

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "reglu": F.relu,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""`activation` -> the function a."""


class RouterLoss:
    """(balance, z) of one MoE layer: one per layer, so that compiled layers share a graph. Not a
    list: FSDP hands copies of lists to its modules."""

    value: Tensor | None = None


class FeedForward(nn.Module):
    """The dense feed-forward part; `width` defaults to d_ff."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        super().__init__()
        width = width or config.d_ff
        assert width is not None
        self.dropout = config.ffn_dropout
        self.activation = ACTIVATIONS[config.activation]
        self.gate = Linear(config.d_model, width) if config.is_gated else None
        self.up = Linear(config.d_model, width)
        self.down = Linear(width, config.d_model)

    def hidden(self, x_BTD: Tensor) -> Tensor:
        """h_BTF, the hidden units: input of the down projection."""
        if self.gate is None:
            return self.activation(self.up(x_BTD))
        gate_BTF, up_BTF = project_together(x_BTD, self.gate, self.up)
        return self.activation(gate_BTF) * up_BTF

    def forward(self, x_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        hidden_BTF = self.hidden(x_BTD)
        return self.down(F.dropout(hidden_BTF, self.dropout, self.training) if self.dropout else hidden_BTF)
