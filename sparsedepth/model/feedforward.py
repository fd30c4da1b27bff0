"""The feed-forward part of a block: dense, with or without a gate, or a mixture of experts.

    gated      W_down ( a(W_gate x) * W_up x )     swiglu: a = silu, geglu: gelu, reglu: relu      (2002.05202)
    ungated    W_down a(W_up x)                    gelu; relu; relu2: a = relu^2                   (2109.08668)

gelu is the exact form, x Phi(x). relu, reglu and relu2 give exact zeros (`measure.sparsity`).

Experts are dropless and top-k, each a SwiGLU (`moe_kernels`). Gates are the softmax over all
experts at the k chosen ones, optionally renormalised to sum 1. Losses of one layer:

    balance = E sum_e f_e P_e,   f_e share of the choices, P_e mean gate probability            (2101.03961, eq. 4-6)
    z       = mean logsumexp(logits)^2                                                          (2202.08906, eq. 5)

balance is 1 for uniform load and up to E / k when all tokens choose the same k. Deviates: per
layer, then averaged over layers; transformers pools layers first, which lets imbalances cancel.
Shared experts (2401.06066, eq. 9) are added without a gate (Qwen-MoE has one); n of them, each
d_expert wide, are one SwiGLU n times as wide.

In a stack of R runs (`products`) expert e of run r is number r E + e of R E, whose tokens are its
run's alone; each run has its own losses, over its own tokens.

Shapes: B sequences, T tokens, N = B T, D d_model, F hidden units (d_expert), E experts, C experts
chosen per token; in a stack R runs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import kernels, moe_kernels
from sparsedepth.model.linear import Linear, number_by_run, project, project_together, token_mean

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


class Experts(nn.Module):
    """The mixture of experts: router, routed experts and shared experts."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.top_k is not None and config.d_expert is not None
        self.top_k = config.top_k
        self.renormalise = config.renormalise_gates
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.gate_up_E2FD = nn.Parameter(torch.empty(config.n_experts, 2 * config.d_expert, config.d_model))
        self.down_EDF = nn.Parameter(torch.empty(config.n_experts, config.d_model, config.d_expert))
        shared_width = config.n_shared_experts * config.d_expert
        self.shared = FeedForward(config, shared_width) if shared_width else None
        self.mean_over_devices: Callable[[Tensor], Tensor] = lambda share_E: share_E
        setting = kernels.facts_of(config, torch.device("cpu"), torch.float32)
        self.kernel = kernels.choose("experts", "auto", setting).kernel

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logits_NE, probability_NE, gate_NC and choice_NC, in fp32: in bf16 experts would tie."""
        weight = self.router.weight
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = project(x_ND.to(weight.dtype), weight).float()
        probability_NE = logits_NE.softmax(-1)
        gate_NC, choice_NC = probability_NE.topk(self.top_k, dim=-1)
        if self.renormalise:
            gate_NC = gate_NC / gate_NC.sum(-1, keepdim=True)
        return logits_NE, probability_NE, gate_NC, choice_NC

    def forward(self, x_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        logits_NE, probability_NE, gate_NC, choice_NC = self.route(x_ND)
        if router_loss is not None:
            router_loss.value = self._losses(logits_NE, probability_NE, choice_NC)
        gate_up_E2FD = self.gate_up_E2FD
        down_EDF = self.down_EDF
        if down_EDF.ndim == 4:
            choice_NC = number_by_run(choice_NC, *down_EDF.shape[:2])
            gate_up_E2FD = gate_up_E2FD.flatten(0, 1)
            down_EDF = down_EDF.flatten(0, 1)
        kernel = moe_kernels.KERNELS[self.kernel]
        out_BTD = kernel(x_ND, gate_NC.to(x_ND.dtype), choice_NC, gate_up_E2FD, down_EDF).view_as(x_BTD)
        return out_BTD if self.shared is None else out_BTD + self.shared(x_BTD)

    def _losses(self, logits_NE: Tensor, probability_NE: Tensor, choice_NC: Tensor) -> Tensor:
        """(balance, z); in a stack [2, R]."""
        weight = self.router.weight
        n_experts = logits_NE.shape[1]
        is_choice_NCE = choice_NC[..., None] == torch.arange(n_experts, device=logits_NE.device)  # bincount waits
        share_E = self.mean_over_devices(token_mean(is_choice_NCE.float().mean(1), weight))
        balance = n_experts * (share_E * token_mean(probability_NE, weight)).sum(-1)
        z = token_mean(logits_NE.logsumexp(-1, keepdim=True).pow(2), weight).squeeze(-1)
        return torch.stack((balance, z))
