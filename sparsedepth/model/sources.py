"""Attention over what earlier branches made, in place of its sum (attention residuals, 2603.15031).

    h_k = sum over s of p_s x_s,   p = softmax over s of q_k . N_k(x_s),     x_t(k) <- x_t(k) + F_k(h_k)

x_0 is the embedding; source t(k) = 1 + floor(k N / 2L) sums what 2L / N consecutive branches add, k = 0 .. 2L - 1.
Branch k reads the sources before its own, and its own once that was written. With N = 2L each output is a source
(full), with fewer they are sums (block). The head reads all, by a query of its own. Queries start at 0: all sources
weigh alike.

The stream x is the sources side by side, 0 until they are written, so that a block is x + a + f with summands at its
own source. Softmax and sums are in fp32 also under autocast.

Shapes: B sequences, T tokens, S = N + 1 sources, D d_model, W = S D.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.norms import RMSNorm


class Sources(nn.Module):
    """What a branch reads of the sources, and where it writes; `branch` 2L is the head."""

    unseen: Tensor
    """of the S sources, 1.0 where the branch does not look"""
    own_source: Tensor
    """1.0 at the source that it writes to"""

    def __init__(self, config: ModelConfig, branch: int):
        super().__init__()
        per_source = 2 * config.n_layers // config.attention_residuals
        self.own, self.has_begun = 1 + branch // per_source, branch % per_source > 0
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.query_scalar = nn.Parameter(torch.zeros(config.d_model))
        # Buffers, not numbers: compiled blocks then share one graph. Not saved: the config says them.
        for name in ("unseen", "own_source"):
            self.register_buffer(name, torch.zeros(config.attention_residuals + 1), persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Set the buffers, whose values the meta device does not hold."""
        for source in range(len(self.own_source)):
            self.own_source[source] = float(source == self.own)
            self.unseen[source] = float(source >= self.own + self.has_begun)

    def read(self, x_BTW: Tensor) -> Tensor:
        """h_BTD, the average of the sources that the branch attends to."""
        with torch.autocast(x_BTW.device.type, enabled=False):
            x_BTSD = x_BTW.unflatten(-1, (len(self.own_source), -1))
            z_BTS = F.linear(self.norm(x_BTSD), self.query_scalar[None]).squeeze(-1)
            p_BTS = z_BTS.masked_fill(self.unseen.bool(), -torch.inf).softmax(-1)
            return (p_BTS.unsqueeze(-2) @ x_BTSD).squeeze(-2)

    def placed(self, added_BTD: Tensor) -> Tensor:
        """The summand of the whole stream: what the branch adds, at its own source."""
        return (self.own_source[:, None] * added_BTD.unsqueeze(-2)).flatten(-2)
