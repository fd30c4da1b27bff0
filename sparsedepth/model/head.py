"""The head: logits of the normed stream, and cross-entropy in chunks within a memory budget.

    z = adjust(x W'),   loss = mean over the scored targets n of ( logsumexp_v(z_nv) - z_n,target(n) )
    dloss/dz = (softmax(z) - onehot(target)) / (number of scored targets)

Targets of IGNORED are not scored. `adjust` is the only place that changes logits, for training, measuring and the check
of an export alike: the identity, or with `logit_soft_cap` = c (2408.00118, section 2)

    adjust(z) = c tanh(z / c),   between -c and c

Parametrisation mup or completep first divides z by d_model / base_width (2203.03466, table 8).

z exists for at most LOGITS_BYTES of tokens at a time. The gradient of a chunk needs only its logits, so it is computed
in the forward pass, and the backward pass scales it: no product is computed twice. (PyTorch's `linear_cross_entropy`,
from 2.13 on, does the same, but has no byte budget and returns autocast's dtype.) Under bf16 the softmax first copies z
to fp32, within the budget: PyTorch's kernel with a wider output dtype takes fp16 only. Where blocks are compiled, so is
what lies between the products of a chunk.

Shapes: N tokens in all, n of one chunk, D d_model, V vocabulary; B sequences of T tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.config.runtime import LOGITS_BYTES
from sparsedepth.config.task import IGNORED
from sparsedepth.model.products import product_dtype
from sparsedepth.model.stacked import by_run

Chunk = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Head(nn.Linear):
    """logits = adjust(x W') after the final norm; no bias."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.soft_cap, self.width_multiplier = config.logit_soft_cap, config.width_multiplier
        self.chunk: Chunk | None = None
        """compiled `loss_and_change`; None: eager operations"""

    def compile_loss(self) -> None:
        """Compile what is between the products of the cross-entropy; with adjusted logits nothing is compiled."""
        if not self.soft_cap and self.width_multiplier == 1:
            self.chunk = torch.compile(loss_and_change, dynamic=False)

    def adjust(self, z_NV: Tensor) -> Tensor:
        """Logits from the products x W'; elementwise."""
        if self.width_multiplier != 1:
            z_NV = z_NV / self.width_multiplier
        return self.soft_cap * torch.tanh(z_NV / self.soft_cap) if self.soft_cap else z_NV

    def forward(self, input: Tensor) -> Tensor:
        return self.adjust(super().forward(input))

    def cross_entropy(self, x_BTD: Tensor, target_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The differentiable mean over scored targets, and loss_BT. In a stack one mean per run, computed one after the
        other: these are the largest products of the model, and few calls."""
        if self.weight.ndim == 2:
            tokens = x_BTD.flatten(0, 1), self.weight, target_BT.flatten()
            mean, loss_N = cross_entropy(*tokens, adjust=self.adjust, chunk=self.chunk)
            return mean, loss_N.view_as(target_BT)
        runs = zip(by_run(x_BTD, self.weight), self.weight, target_BT.view(len(self.weight), -1), strict=True)
        mean_S, loss_SN = zip(*(cross_entropy(*run, adjust=self.adjust, chunk=self.chunk) for run in runs), strict=True)
        return torch.stack(mean_S), torch.cat(loss_SN).view_as(target_BT)


def identity(z_NV: Tensor) -> Tensor:
    return z_NV


def loss_and_change(z_nV: Tensor, target_n1: Tensor, is_scored_n1: Tensor) -> tuple[Tensor, Tensor]:
    """loss_n1 and softmax(z) - onehot(target) in the dtype of z, both 0 where not scored: compiled, two passes over z
    instead of eight."""
    wide_nV = z_nV.float()
    total_n1 = wide_nV.logsumexp(-1, keepdim=True)
    is_target_nV = torch.arange(z_nV.shape[1], device=z_nV.device) == target_n1
    change_nV = torch.where(is_scored_n1, (wide_nV - total_n1).exp() - is_target_nV.float(), 0.0)
    loss_n1 = torch.where(is_scored_n1, total_n1 - wide_nV.gather(1, target_n1), 0.0)
    return loss_n1, change_nV.to(z_nV.dtype)


def cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    budget: int = LOGITS_BYTES,
    adjust: Callable[[Tensor], Tensor] = identity,
    chunk: Chunk | None = None,
) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy in nat/token over scored targets (0 if none), and loss_N, 0 where not scored.

    Both are fp32; logits adjust(x W') take at most `budget` bytes. Products are in autocast's dtype if enabled, sums
    and the softmax in fp32. The mean is differentiable once, loss_N is not.
    """
    rows = max(1, budget // (4 * len(weight_VD)))
    gradients = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    return _CrossEntropy.apply(x_ND, weight_VD, target_N, adjust, rows, product_dtype(x_ND), gradients, chunk)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, weight_VD, target_N, adjust, rows, dtype, gradients, chunk):
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        loss_N = torch.empty(len(x_ND), dtype=torch.float32, device=x_ND.device)
        scored_N1 = (target_N != IGNORED)[:, None]
        grad_x_ND = torch.empty_like(x_ND, dtype=dtype) if gradients else x_ND
        grad_weight_VD = torch.zeros_like(weight_VD if gradients else weight_VD[:0], dtype=torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            cast_VD = weight_VD.to(dtype)
            columns = (x_ND.to(dtype), target_N[:, None], scored_N1, loss_N[:, None], grad_x_ND)
            for x_nD, target_n1, scored_n1, loss_n1, grad_nD in zip(*(x.split(rows) for x in columns), strict=True):
                target_n1 = target_n1 * scored_n1  # any valid index where not scored
                if chunk and gradients:
                    loss, change_nV = chunk(x_nD @ cast_VD.T, target_n1, scored_n1)
                    loss_n1.copy_(loss)
                    total += loss_n1.sum()
                    torch.mm(change_nV, cast_VD, out=grad_nD)
                    _add_product(grad_weight_VD, change_nV.T, x_nD)
                    del change_nV
                    continue
                log_p_nV, before_adjust = _log_softmax(x_nD @ cast_VD.T, adjust, gradients)
                loss_n1.copy_(-log_p_nV.gather(1, target_n1) * scored_n1)
                total += loss_n1.sum()
                if gradients:
                    minus_one = torch.full_like(target_n1, -1, dtype=torch.float32)
                    change_nV = before_adjust(log_p_nV.exp_().scatter_add_(1, target_n1, minus_one)).to(dtype)
                    torch.mm(change_nV, cast_VD, out=grad_nD)
                    grad_nD *= scored_n1
                    _add_product(grad_weight_VD, change_nV.T, x_nD * scored_n1)
                    del change_nV
                del log_p_nV, before_adjust  # before the next chunk's logits
        n_scored = scored_N1.sum().clamp(min=1)
        if gradients:
            ctx.save_for_backward(grad_x_ND, grad_weight_VD, n_scored)
            ctx.dtypes = x_ND.dtype, weight_VD.dtype
        ctx.mark_non_differentiable(loss_N)
        return total / n_scored, loss_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        grad_x_ND, grad_weight_VD, n_scored = ctx.saved_tensors
        scale = grad / n_scored
        x_dtype, weight_dtype = ctx.dtypes
        return (grad_x_ND * scale).to(x_dtype), (grad_weight_VD * scale).to(weight_dtype), *[None] * 6


def _log_softmax(
    z_nV: Tensor, adjust: Callable[[Tensor], Tensor], gradients: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """log softmax(adjust(z)) in fp32, and the function from gradients of adjusted logits to gradients of z."""
    with torch.set_grad_enabled(gradients):
        adjusted_nV = adjust(z_nV.requires_grad_(gradients))
    log_p_nV = F.log_softmax(adjusted_nV.detach(), dim=-1, dtype=torch.float32)
    if adjusted_nV is z_nV:  # the logits are freed here
        return log_p_nV, identity
    return log_p_nV, lambda change_nV: torch.autograd.grad(adjusted_nV, z_nV, change_nV.to(adjusted_nV.dtype))[0]


def _add_product(sum_VD: Tensor, left_Vn: Tensor, right_nD: Tensor) -> None:
    """sum += left right, accumulated in the sum's fp32 whatever the dtype of the product."""
    if left_Vn.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_Vn, right_nD)
    else:
        sum_VD += left_Vn @ right_nD
