"""Attention residuals: attention over earlier branch outputs, in place of the residual sum
(2603.15031).

    h_k = sum over s of p_s x_s,   p = softmax over s of q_k . N_k(x_s),     x_t(k) <- x_t(k) + F_k(h_k)

Source x_0 is the embedding; source t(k) = 1 + floor(k N / 2L) sums 2L / N consecutive branches, k =
0 .. 2L - 1. Branch k reads all sources before its own, and its own if a branch has written to it;
the head reads all. Queries start at 0: equal weights. The stream x holds the sources side by side,
0 until written, so a block is still x + a + f with each update at its own source.

Shapes: B sequences, T tokens, S = N + 1 sources, D d_model, W = S D."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import PARTS, Block, Part
from sparsedepth.model.linear import project
from sparsedepth.model.norms import RMSNorm


class Sources(nn.Module):
    """One branch's attention over the sources; `branch` 2L is the head. The buffers [S], not numbers so that compiled
    blocks share one graph, are 1.0 at sources that it does not read, and at the one that it writes to."""

    unseen: Tensor
    own_source: Tensor

    def __init__(self, config: ModelConfig, branch: int):
        super().__init__()
        per_source = 2 * config.n_layers // config.attention_residuals
        self.own = 1 + branch // per_source
        self.has_begun = branch % per_source > 0
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.query_scalar = nn.Parameter(torch.zeros(config.d_model))
        for name in ("unseen", "own_source"):
            self.register_buffer(name, torch.zeros(config.attention_residuals + 1), persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Set the buffers, which are undefined on the meta device."""
        source_S = torch.arange(len(self.own_source))
        self.own_source.copy_(source_S == self.own)
        self.unseen.copy_(source_S >= self.own + self.has_begun)

    def widen(self, x_BTD: Tensor) -> Tensor:
        """x_BTW at the start: the embedding, and empty sources."""
        return F.pad(x_BTD, (0, (len(self.own_source) - 1) * x_BTD.shape[-1]))

    def read(self, x_BTW: Tensor) -> Tensor:
        """h_BTD, the attention-weighted mean of the sources."""
        with torch.autocast(x_BTW.device.type, enabled=False):
            x_BTSD = x_BTW.unflatten(-1, (len(self.own_source), -1))
            z_BTS = project(self.norm(x_BTSD), self.query_scalar.unsqueeze(-2)).squeeze(-1)
            p_BTS = z_BTS.masked_fill(self.unseen.bool(), -torch.inf).softmax(-1)
            return (p_BTS.unsqueeze(-2) @ x_BTSD).squeeze(-2)

    def expand_update(self, update_BTD: Tensor) -> Tensor:
        """The update in the whole stream: 0 except at the branch's own source."""
        return (self.own_source[:, None] * update_BTD.unsqueeze(-2)).flatten(-2)


class SourcesBlock(Block):
    """A block whose branches read sources, and write to their own."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        for index, part in enumerate(PARTS):
            setattr(self, f"{part}_sources", Sources(config, 2 * layer - 2 + index))

    def branch_input(self, part: Part, x_BTD: Tensor) -> Tensor:
        return super().branch_input(part, getattr(self, f"{part}_sources").read(x_BTD))

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        return getattr(self, f"{part}_sources").expand_update(super().finish(part, branch_BTD))
