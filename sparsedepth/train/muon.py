"""`torch.optim.Muon` with matrices of one shape in one batch, where kernel launches and not
arithmetic limit a step.

    M <- momentum M + (1 - momentum) G;   w <- (1 - lr lambda) w - lr 0.2 sqrt(max(rows, columns)) O(Nesterov's M)
    O: five times X <- a X + (b S + c S^2) X with S = X X', from X = M / |M|, in bf16                  (2502.16982)

All layers have matrices of the same shapes: the number of operations does not grow with layers,
where it was 290 each. Elsewhere than on CUDA PyTorch's own step is taken.
"""

import math
from typing import Any

import torch
from torch import Tensor

BATCH_BYTES = 2**28
"""Limit of one batch of bf16 matrices; its products take about three times as much."""


def orthogonalised(update_nRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """O of each of n matrices of R rows and C columns, in bf16."""
    a, b, c = coefficients
    is_tall = update_nRC.shape[1] > update_nRC.shape[2]
    x_nRC = update_nRC.bfloat16()
    x_nRC = x_nRC.mT if is_tall else x_nRC
    x_nRC = x_nRC / x_nRC.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram_nRR = torch.bmm(x_nRC, x_nRC.mT)
        x_nRC = torch.baddbmm(x_nRC, torch.baddbmm(gram_nRR, gram_nRR, gram_nRR, beta=b, alpha=c), x_nRC, beta=a)
    return x_nRC.mT if is_tall else x_nRC


class BatchedMuon(torch.optim.Muon):
    """Muon that orthogonalises all matrices of one shape together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        if self.param_groups[0]["params"][0].device.type != "cuda":
            super().step()
            return
        for group in self.param_groups:
            self.step_group(group)

    @torch.no_grad()
    def step_group(self, group: dict[str, Any]) -> None:
        weights: list[Tensor] = []
        grads: list[Tensor] = []
        momenta: list[Tensor] = []
        self._init_group(group, weights, grads, momenta)
        if not weights:
            return
        assert group["nesterov"] and group["adjust_lr_fn"] == "match_rms_adamw"
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for weight, update in zip(weights, updates, strict=True):
            by_shape.setdefault(weight.shape, []).append((weight, update))
        for shape, pairs in by_shape.items():
            lr = 0.2 * math.sqrt(max(shape)) * group["lr"]
            per_batch = max(1, BATCH_BYTES // (2 * shape.numel()))
            for start in range(0, len(pairs), per_batch):
                some_weights, some_updates = zip(*pairs[start : start + per_batch], strict=True)
                update_nRC = torch.stack(some_updates)
                ortho_nRC = orthogonalised(update_nRC, group["ns_coefficients"], group["ns_steps"], group["eps"])
                torch._foreach_add_(some_weights, ortho_nRC.to(update_nRC.dtype).unbind(), alpha=-lr)
