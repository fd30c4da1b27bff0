"""Hyper-connections: n residual streams X_1..X_n; each branch F reads and writes them with per-token coefficients.

    h = sum_i a_i X_i,    X'_j = sum_i R_ij X_i + b_j F(h),    i, j = 1..n          each X_i is d_model wide

Coefficients are a learned bias (`start`), for each branch, plus a scale s times a function of X; its matrix W starts
at 0:

    plain     (a_i, b_i, R_i.) = start_i + s tanh(W N(X_i)),      N over one stream       (2409.19606)
    manifold  a = sigmoid(z), b = 2 sigmoid(z), R = Sinkhorn(exp z),  z = start + s W N(X),  N over all channels: R is
              doubly stochastic, so mixing never amplifies the streams                    (2512.24880)

The embedding is copied to every stream; the head reads their sum. s starts at 0.01: one number for b and one for a and
R (plain), or one for each (manifold). At the start both are a plain residual sum: branch k reads stream k mod n, F is
added to all streams, and nothing is mixed; for manifold approximately, with logits of 4 and -8, since its paper does
not give the initial values. Coefficients and streams are computed in fp32 also under autocast.

Shapes: B sequences, T tokens, n streams (m the second index), D d_model, W = n D; c = n + 2 coefficients of a stream.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.norms import RMSNorm

SINKHORN_STEPS = 20
"""Iterations of row and column normalisation (2512.24880)."""

OPEN, CLOSED = 4.0, -8.0
"""Initial logits with manifold: of the stream that is read, and of mixing between streams; -OPEN for streams not
read."""


def sinkhorn(z: Tensor) -> Tensor:
    """A matrix [..., n, n] with positive entries whose rows and columns sum to 1, near exp(z)."""
    # Tokens last, so that a CPU adds whole rows of them: 3.5 times as fast as sums over n neighbours.
    matrix = torch.softmax(z, dim=-1).movedim((-2, -1), (0, 1)).contiguous()
    for _ in range(SINKHORN_STEPS):
        matrix = matrix / matrix.sum(0, keepdim=True)
        matrix = matrix / matrix.sum(1, keepdim=True)
    return matrix.movedim((0, 1), (-2, -1))


class Streams(nn.Module):
    """Reading from and writing to the streams, for one branch."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n, self.is_manifold = config.n_streams, config.stream_mixing == "manifold"
        self.n_rows = self.n if self.is_manifold else 1  # rows of the matrix per coefficient
        width = config.d_model * self.n_rows
        self.norm = RMSNorm(width, config.norm_eps)
        self.weight = nn.Parameter(torch.zeros(self.n_rows * (self.n + 2), width))
        self.start_scalar = nn.Parameter(torch.zeros(self.n * (self.n + 2)))
        self.size_scalar = nn.Parameter(torch.zeros(3 if self.is_manifold else 2))

    @torch.no_grad()
    def initialise(self, branch: int) -> None:
        """Set the initial coefficients of branch 0, 1, ...: a residual sum that reads from stream branch mod n."""
        start_nc = torch.zeros(self.n, self.n + 2)
        start_nc[:, 0] = -OPEN if self.is_manifold else 0.0
        start_nc[branch % self.n, 0] = OPEN if self.is_manifold else 1.0
        start_nc[:, 1] = 0.0 if self.is_manifold else 1.0
        start_nc[:, 2:] = CLOSED * (1 - torch.eye(self.n)) if self.is_manifold else torch.eye(self.n)
        self.start_scalar.copy_(start_nc.flatten())
        self.size_scalar.fill_(0.01)

    def _coefficients(self, x_BTnD: Tensor, first: int, last: int) -> Tensor:
        """z_BTnc, coefficients first .. last - 1 of each stream, before manifold's constraints."""
        rows = self.weight[first * self.n_rows : last * self.n_rows]
        z = F.linear(self.norm(x_BTnD.flatten(-2) if self.is_manifold else x_BTnD), rows)
        z = z.unflatten(-1, (-1, self.n)).mT if self.is_manifold else torch.tanh(z)
        mix = self.size_scalar[2 if self.is_manifold else 0]
        size_c = torch.cat((self.size_scalar[:2], mix.expand(self.n)))[first:last]
        return self.start_scalar.view(self.n, -1)[:, first:last] + size_c * z

    def read(self, x_BTW: Tensor) -> Tensor:
        """h_BTD, the branch's input."""
        with torch.autocast(x_BTW.device.type, enabled=False):
            x_BTnD = x_BTW.unflatten(-1, (self.n, -1))
            a_BTn1 = self._coefficients(x_BTnD, 0, 1)
            return ((torch.sigmoid(a_BTn1) if self.is_manifold else a_BTn1) * x_BTnD).sum(-2)

    def residual_map(self, x_BTnD: Tensor) -> tuple[Tensor, Tensor]:
        """R^T as map_BTmn, with which X' = R^T X + b F, and b_BTn1."""
        z_BTnc = self._coefficients(x_BTnD, 1, self.n + 2)
        b_BTn1, mix_BTnm = z_BTnc[..., :1], z_BTnc[..., 1:]
        if self.is_manifold:
            b_BTn1, mix_BTnm = 2 * torch.sigmoid(b_BTn1), sinkhorn(mix_BTnm)
        return mix_BTnm.mT, b_BTn1

    def add_update(self, x_BTW: Tensor, update_BTD: Tensor) -> Tensor:
        """The mixed streams plus the branch's update."""
        with torch.autocast(x_BTW.device.type, enabled=False):
            x_BTnD = x_BTW.unflatten(-1, (self.n, -1))
            map_BTmn, b_BTn1 = self.residual_map(x_BTnD)
            return (map_BTmn @ x_BTnD + b_BTn1 * update_BTD.to(x_BTW.dtype).unsqueeze(-2)).flatten(-2)
