"""The head: logits of the normed stream, and cross-entropy in chunks within a memory budget.

    z = x W',   loss = mean over the scored targets n of ( logsumexp_v(z_nv) - z_n,target(n) )
    dloss/dz = (softmax(z) - onehot(target)) / (number of scored targets)

Targets of IGNORED are not scored. Parametrisation mup or completep first divides x by d_model /
base_width (2203.03466, table 8).

z exists for a part of the tokens at a time (`logits_bytes`). The gradient of a chunk needs only its
logits, so it is computed in the forward pass, and the backward pass scales it: no product is
computed twice. (PyTorch's `linear_cross_entropy`, from 2.13 on, has no byte budget and returns
autocast's dtype.) Where blocks are compiled, so is what lies between the products of a chunk.

Shapes: N tokens in all, n of one chunk, D d_model, V vocabulary; B sequences of T tokens."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.config.runtime import LOGITS_BYTES, LOGITS_SHARE
from sparsedepth.config.task import IGNORED
from sparsedepth.model.linear import TensorPair, by_run, product_dtype

TILE = 256
"""Rows that a GPU's product computes together, or a multiple of them."""

Chunk = Callable[[Tensor, Tensor, Tensor], TensorPair]


class Head(nn.Linear):
    """The output projection: logits = x W' after the final norm; no bias."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.width_multiplier = config.width_multiplier
        self.chunk: Chunk | None = None
        """compiled `loss_and_change`; None: eager operations"""

    def compile_loss(self) -> None:
        """Compile what is between the products of the cross-entropy."""
        self.chunk = torch.compile(loss_and_change, dynamic=False)

    def _scaled(self, x_BTD: Tensor) -> Tensor:
        return x_BTD if self.width_multiplier == 1 else x_BTD / self.width_multiplier

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self._scaled(input))

    def cross_entropy(self, x_BTD: Tensor, target_BT: Tensor) -> TensorPair:
        """The differentiable mean over scored targets, and loss_BT. In a stack one mean per run,
        computed one after the other: these are the largest products of the model, and few calls."""
        x_BTD = self._scaled(x_BTD)
        if self.weight.ndim == 2:
            mean, loss_N = cross_entropy(x_BTD.flatten(0, 1), self.weight, target_BT.flatten(), chunk=self.chunk)
            return mean, loss_N.view_as(target_BT)
        runs = zip(by_run(x_BTD, self.weight), self.weight, target_BT.view(len(self.weight), -1), strict=True)
        mean_S, loss_SN = zip(*(cross_entropy(*run, chunk=self.chunk) for run in runs), strict=True)
        return torch.stack(mean_S), torch.cat(loss_SN).view_as(target_BT)


def loss_and_change(z_nV: Tensor, target_n1: Tensor, is_scored_n1: Tensor) -> TensorPair:
    """loss_n1 and softmax(z) - onehot(target), 0 where not scored: compiled, two passes over z, not
    eight."""
    wide_nV = z_nV.float()
    total_n1 = wide_nV.logsumexp(-1, keepdim=True)
    is_target_nV = torch.arange(z_nV.shape[1], device=z_nV.device) == target_n1
    change_nV = torch.where(is_scored_n1, (wide_nV - total_n1).exp() - is_target_nV.float(), 0.0)
    loss_n1 = torch.where(is_scored_n1, total_n1 - wide_nV.gather(1, target_n1), 0.0)
    return loss_n1, change_nV.to(z_nV.dtype)


def _eager(z_nV: Tensor, target_n1: Tensor, is_scored_n1: Tensor, gradients: bool) -> TensorPair:
    """loss_n1, 0 where not scored, and if needed the change of every row, scored or not."""
    log_p_nV = F.log_softmax(z_nV, dim=-1, dtype=torch.float32)
    loss_n1 = -log_p_nV.gather(1, target_n1) * is_scored_n1
    if gradients:
        minus_one = torch.full_like(target_n1, -1, dtype=torch.float32)
        log_p_nV = log_p_nV.exp_().scatter_add_(1, target_n1, minus_one).to(z_nV.dtype)
    return loss_n1, log_p_nV


def cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, budget: int | None = None, chunk: Chunk | None = None
) -> TensorPair:
    """The mean cross-entropy in nat/token over scored targets (0 if none), differentiable once, and
    loss_N, 0 where not scored: both in fp32, as the softmax, also where autocast changes products.
    Logits take at most `budget` bytes, in whole tiles of a product where one fits."""
    rows = max(1, (budget or logits_bytes(x_ND.device)) // (4 * len(weight_VD)))
    rows -= rows % TILE if rows > TILE else 0
    gradients = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    return _CrossEntropy.apply(x_ND, weight_VD, target_N, rows, product_dtype(x_ND), gradients, chunk)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, weight_VD, target_N, rows, dtype, gradients, chunk):
        """The losses, and the gradients by states and weights, a chunk of positions at a time."""
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        loss_N = torch.empty(len(x_ND), dtype=torch.float32, device=x_ND.device)
        scored_N1 = (target_N != IGNORED)[:, None]
        grad_x_ND = torch.empty_like(x_ND, dtype=dtype) if gradients else x_ND
        grad_weight_VD = torch.zeros_like(weight_VD if gradients else weight_VD[:0], dtype=torch.float32)
        compute = chunk if chunk and gradients else functools.partial(_eager, gradients=gradients)
        with torch.autocast(x_ND.device.type, enabled=False):
            cast_VD = weight_VD.to(dtype)
            columns = (x_ND.to(dtype), target_N[:, None], scored_N1, loss_N[:, None], grad_x_ND)
            for x_nD, target_n1, scored_n1, loss_n1, grad_nD in zip(*(x.split(rows) for x in columns), strict=True):
                target_n1 = target_n1 * scored_n1  # any valid index where not scored
                loss, change_nV = compute(x_nD @ cast_VD.T, target_n1, scored_n1)
                loss_n1.copy_(loss)
                total += loss_n1.sum()
                if gradients:
                    torch.mm(change_nV, cast_VD, out=grad_nD)
                    grad_nD *= scored_n1
                    _add_product(grad_weight_VD, change_nV.T, x_nD * scored_n1)
                del change_nV  # before the next chunk's logits
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
        return (grad_x_ND * scale).to(x_dtype), (grad_weight_VD * scale).to(weight_dtype), *[None] * 5


@functools.cache
def logits_bytes(device: torch.device) -> int:
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(LOGITS_BYTES, int(LOGITS_SHARE * memory))


@functools.cache
def can_add_to_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product of such factors can be added to an fp32 sum without being rounded: on CUDA."""
    part = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(part.float(), part, part, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


def _add_product(sum_VD: Tensor, left_Vn: Tensor, right_nD: Tensor) -> None:
    """sum += left right, accumulated in the sum's fp32 whatever the dtype of the product."""
    if left_Vn.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_Vn, right_nD)
    elif can_add_to_fp32(left_Vn.dtype, left_Vn.device):
        torch.addmm(sum_VD, left_Vn, right_nD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += left_Vn @ right_nD
