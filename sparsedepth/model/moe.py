"""A mixture of experts in place of the dense feed-forward part: router, its two losses, routed and shared experts.

Dropless, top-k; each expert is a SwiGLU, and `moe_kernels` computes their products. Gates are the softmax over all
experts at the chosen k, renormalised to sum 1 or left as they are. Losses of one layer:

    balance = E sum_e f_e P_e,   f_e the share of the choices, P_e the mean gate probability    (2101.03961, eq. 4-6)
    z       = mean logsumexp(logits)^2                                                          (2202.08906, eq. 5)

balance, over k choices, is 1 when balanced and up to E / k when all tokens choose the same k. Deviates: per layer, then
averaged over layers; pooling the layers first (as transformers does) lets them cancel.
Shared experts (2401.06066, eq. 9) are added as they are, with no gate (Qwen-MoE has one); n of them, each d_expert
wide, are one SwiGLU n times as wide.

Shapes: B sequences, T tokens of one sequence, N = B T tokens, D d_model, F d_expert, E experts, C of them chosen for a
token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import kernels, moe_kernels
from sparsedepth.model.feedforward import FeedForward, RouterLoss
from sparsedepth.model.linear import without_masked_gradient

VECTOR = 16
"""Numbers of fp32 in the widest register of a CPU."""


def _single_device_mean(share_E: Tensor) -> Tensor:
    """The mean over devices, of one device."""
    return share_E


def router_softmax(logits_NE: Tensor) -> Tensor:
    """Over experts. Rows shorter than its vectors take PyTorch on a CPU five times as long as columns."""
    by_columns = logits_NE.device.type == "cpu" and logits_NE.shape[1] < VECTOR and not torch.compiler.is_compiling()
    if by_columns:
        return logits_NE.t().contiguous().softmax(0).t().contiguous()
    return logits_NE.softmax(-1)


class Experts(nn.Module):
    """Router, routed experts, and those that every token shares."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.top_k is not None and config.d_expert is not None
        self.top_k, self.renormalise, self.is_masked = config.top_k, config.renormalise_gates, config.weight_density < 1
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.gate_up_E2FD = nn.Parameter(torch.empty(config.n_experts, 2 * config.d_expert, config.d_model))
        self.down_EDF = nn.Parameter(torch.empty(config.n_experts, config.d_model, config.d_expert))
        self.shared = (
            FeedForward(config, config.n_shared_experts * config.d_expert) if config.n_shared_experts else None
        )
        self.mean_over_devices: Callable[[Tensor], Tensor] = _single_device_mean
        here = kernels.setting(config, torch.device("cpu"), torch.float32)
        self.kernel = kernels.choose("experts", "auto", here).kernel

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logits_NE, probability_NE, gate_NC and choice_NC; the softmax in fp32."""
        logits_NE = self.router(x_ND).float()
        probability_NE = router_softmax(logits_NE)
        gate_NC, choice_NC = probability_NE.topk(self.top_k, dim=-1)
        if self.renormalise:
            gate_NC = gate_NC / gate_NC.sum(-1, keepdim=True)
        return logits_NE, probability_NE, gate_NC, choice_NC

    def forward(self, x_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        logits_NE, probability_NE, gate_NC, choice_NC = self.route(x_ND)
        if router_loss is not None:
            n_experts = logits_NE.shape[1]
            # Not bincount, for which the host would wait for the device.
            is_choice_NCE = choice_NC[..., None] == torch.arange(n_experts, device=x_ND.device)
            share_E = self.mean_over_devices(is_choice_NCE.float().mean((0, 1)))
            balance = n_experts * (share_E * probability_NE.mean(0)).sum()
            router_loss.value = torch.stack((balance, logits_NE.logsumexp(-1).pow(2).mean()))
        gate_up_E2FD, down_EDF = self.gate_up_E2FD, self.down_EDF
        if self.is_masked:
            gate_up_E2FD, down_EDF = without_masked_gradient(gate_up_E2FD), without_masked_gradient(down_EDF)
        kernel = moe_kernels.KERNELS[self.kernel]
        out_BTD = kernel(x_ND, gate_NC.to(x_ND.dtype), choice_NC, gate_up_E2FD, down_EDF).view_as(x_BTD)
        return out_BTD if self.shared is None else out_BTD + self.shared(x_BTD)
