"""Hyper-connections: n residual streams X_1..X_n; each branch F reads and writes them with
per-token coefficients.

    h = sum_i a_i X_i,    X'_j = sum_i R_ij X_i + b_j F(h),    i, j = 1..n          each X_i is d_model wide

Coefficients are a learned bias (`start`), for each branch, plus a scale s times a function of X;
its matrix W starts at 0, and s at 0.01. The embedding is copied to every stream; the head reads
their sum. At the start both kinds are a plain residual sum: branch k reads stream k mod n, F is
added to all streams, and nothing is mixed. Coefficients and streams are computed in fp32 also under
autocast.

Shapes: B sequences, T tokens, n streams (m the second index), D d_model, W = n D; c = n + 2
coefficients of a stream.
"""

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import Block, Part
from sparsedepth.model.linear import TensorPair, project
from sparsedepth.model.norms import RMSNorm

SINKHORN_STEPS = 20
"""Iterations of row and column normalisation (2512.24880)."""


class Coefficients(nn.Module):
    """The coefficients by which one branch reads, mixes and writes the streams."""

    n_sizes, opened, closed, mixed = 2, 1.0, 0.0, 0.0
    """numbers s, and initial biases: of the stream that is read, of the others, of mixing with
    another stream"""
    written, kept = 1.0, 1.0
    """initial biases of b and of a stream's own R_ii"""

    def __init__(self, config: ModelConfig, branch: int, n_rows: int = 1):
        super().__init__()
        self.n, self.branch, self.n_rows = config.n_streams, branch, n_rows
        self.norm = RMSNorm(config.d_model * n_rows, config.norm_eps)
        self.weight = nn.Parameter(torch.zeros(n_rows * (self.n + 2), config.d_model * n_rows))
        self.start_scalar = nn.Parameter(torch.zeros(self.n * (self.n + 2)))
        self.size_scalar = nn.Parameter(torch.zeros(self.n_sizes))

    @torch.no_grad()
    def initialise(self) -> None:
        """Set the initial coefficients: a residual sum that reads from stream branch mod n."""
        start_nc = torch.full((self.n, self.n + 2), self.mixed)
        start_nc[:, 0], start_nc[:, 1] = self.closed, self.written
        start_nc[self.branch % self.n, 0] = self.opened
        start_nc[:, 2:].fill_diagonal_(self.kept)
        self.start_scalar.copy_(start_nc.flatten())
        self.size_scalar.fill_(0.01)

    def function(self, x_BTnD: Tensor, rows: Tensor) -> Tensor:
        """z_BTnc, by some rows of W."""
        return torch.tanh(project(self.norm(x_BTnD), rows))

    def coefficients(self, x_BTnD: Tensor, first: int, last: int) -> Tensor:
        """Coefficients first .. last - 1 of each stream, before manifold's constraints."""
        z_BTnc = self.function(x_BTnD, self.weight[..., first * self.n_rows : last * self.n_rows, :])
        mix = self.size_scalar[..., :1] if self.n_sizes == 2 else self.size_scalar[..., 2:]
        size_c = torch.cat((self.size_scalar[..., :2], *[mix] * self.n), dim=-1)[..., first:last]
        start_nc = self.start_scalar.unflatten(-1, (self.n, -1))[..., first:last]
        return _by_run(z_BTnc, size_c, start_nc)


def _by_run(z_BTnc: Tensor, size_c: Tensor, start_nc: Tensor) -> Tensor:
    """start + s z; in a stack, each run with its own."""
    if start_nc.ndim == 2:
        return start_nc + size_c * z_BTnc
    z_SNnc = z_BTnc.reshape(len(start_nc), -1, *z_BTnc.shape[-2:])
    return (start_nc[:, None] + size_c[:, None, None] * z_SNnc).view_as(z_BTnc)


class Streams(Coefficients):
    """Hyper-connections (plain): (a_i, b_i, R_i.) = start_i + s tanh(W N(X_i)), N over one stream,
    s one number for b and one for a and R (2409.19606)."""

    def weights(self, x_BTnD: Tensor) -> Tensor:
        """a_BTn1."""
        return self.coefficients(x_BTnD, 0, 1)

    def residual_map(self, x_BTnD: Tensor) -> TensorPair:
        """R^T as map_BTmn, with which X' = R^T X + b F, and b_BTn1."""
        z_BTnc = self.coefficients(x_BTnD, 1, self.n + 2)
        return z_BTnc[..., 1:].mT, z_BTnc[..., :1]

    def read(self, x_BTW: Tensor) -> Tensor:
        """h_BTD, the branch's input."""
        with torch.autocast(x_BTW.device.type, enabled=False):
            x_BTnD = x_BTW.unflatten(-1, (self.n, -1))
            return (self.weights(x_BTnD) * x_BTnD).sum(-2)

    def add_update(self, x_BTW: Tensor, update_BTD: Tensor) -> Tensor:
        """The mixed streams plus the branch's update."""
        with torch.autocast(x_BTW.device.type, enabled=False):
            x_BTnD = x_BTW.unflatten(-1, (self.n, -1))
            map_BTmn, b_BTn1 = self.residual_map(x_BTnD)
            return (map_BTmn @ x_BTnD + b_BTn1 * update_BTD.to(x_BTW.dtype).unsqueeze(-2)).flatten(-2)


class ManifoldStreams(Streams):
    """Hyper-connections with doubly stochastic mixing (manifold): a = sigmoid(z), b = 2 sigmoid(z),
    R = Sinkhorn(exp z), z = start + s W N(X), N over all channels, an s for each: R is doubly
    stochastic, so mixing never amplifies the streams (2512.24880). Initial logits of 4 and -8 stand
    for 1 and 0, since the paper does not give them."""

    n_sizes, opened, closed, mixed = 3, 4.0, -4.0, -8.0
    written, kept = 0.0, -0.0  # -0.0: bit-equal to the first version

    def __init__(self, config: ModelConfig, branch: int):
        super().__init__(config, branch, n_rows=config.n_streams)

    def function(self, x_BTnD: Tensor, rows: Tensor) -> Tensor:
        return project(self.norm(x_BTnD.flatten(-2)), rows).unflatten(-1, (-1, self.n)).mT

    def weights(self, x_BTnD: Tensor) -> Tensor:
        return torch.sigmoid(super().weights(x_BTnD))

    def residual_map(self, x_BTnD: Tensor) -> TensorPair:
        z_BTmn, b_BTn1 = super().residual_map(x_BTnD)
        return sinkhorn(z_BTmn.mT).mT, 2 * torch.sigmoid(b_BTn1)


def sinkhorn(z: Tensor) -> Tensor:
    """A matrix [..., n, n] with positive entries whose rows and columns sum to 1, near exp(z)."""
    # In logarithms a normalisation is one kernel, and its gradient another: with sums and quotients
    # a step takes four times as long. Tokens last, so that a CPU takes whole rows of them at once.
    log_matrix = z.movedim((-2, -1), (0, 1)).contiguous().log_softmax(1)
    for _ in range(SINKHORN_STEPS):
        log_matrix = log_matrix.log_softmax(0).log_softmax(1)
    # Contiguous: else a product on a CPU copies each token's matrix.
    return log_matrix.movedim((0, 1), (-2, -1)).exp().contiguous()


class StreamsBlock(Block):
    """A block whose branches read, mix and write streams."""

    is_sum = False

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        kind = ManifoldStreams if config.stream_mixing == "manifold" else Streams
        self.attention_streams, self.ffn_streams = kind(config, 2 * layer - 2), kind(config, 2 * layer - 1)

    def branch_input(self, part: Part, x_BTD: Tensor) -> Tensor:
        return super().branch_input(part, getattr(self, f"{part}_streams").read(x_BTD))

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        return getattr(self, f"{part}_streams").add_update(x_BTD, update_BTD)


class SumOfStreams(nn.Module):
    """The ends of the streams: copies of the embedding, and their sum for the head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n = config.n_streams

    def widen(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.repeat(1, 1, self.n)

    def read(self, x_BTW: Tensor) -> Tensor:
        return x_BTW.unflatten(-1, (self.n, -1)).sum(-2)
