"""Initial weights: a function of (config, seed) only, with a random generator per parameter name.

    w ~ N(0, init_std^2) c,  c = 1 except with
      scaled        1/sqrt(2 L)     the two output projections of every block    (GPT-2; 2502.05795, Table 6)
      depth_scaled  1/sqrt(2 l)     those of block l, l = 1..L                   (1908.11365; outputs alone: OLMo)
      zero_outputs  0               the two output projections                   (Fixup, 1901.09321)
      mup, completep  m_N^(-1/2)    every matrix of the blocks, m_N = d_model / base_width   (2203.03466; 2505.01618)
      n_streams     0               the matrices of the streams' coefficients    (`variants.streams`)
      deepnorm      (8 L)^(-1/4)    value, output and FFN matrices               (2203.00555, decoder only)

Configurations with the same seed share all weights of equal name and shape: comparisons are paired.

Deviates: 1908.11365 scales every matrix of block l by 1/sqrt(l); OLMo's rule, used by later papers
under the same name, scales outputs. 2203.00555 starts from Xavier weights, here from init_std, so
that `norm` changes one thing."""

import hashlib
import math

import torch
from torch import nn

from sparsedepth.config.model import ModelConfig

OUTPUTS = ("attention.output.weight", "down.weight", "down_EDF")
"""Name endings of a block's output projections."""

SHRUNK_BY_DEEPNORM = (*OUTPUTS, "value.weight", "gate.weight", "up.weight", "gate_up_E2FD")


def generator(seed: int, name: str) -> torch.Generator:
    """A random generator that is a function of (seed, name)."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # 63 bits: a seed is a signed number
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)


@torch.no_grad()
def draw(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set every parameter: matrices as above, vectors by VECTORS."""
    for name, weight in model.named_parameters():
        if weight.ndim <= 1:
            weight.fill_(_initial_vector(name, config))
            continue
        weight.copy_(torch.randn(weight.shape, generator=generator(seed, name)) * _std(name, config))


VECTORS = {
    "weight": 1.0,
    "bias": 0.0,
    "stream_scalar": 1.0,
    "first_scalar": 0.0,
    "gpas_scalar": 0.0,
    "skip_scalar": 1.0,
    "query_scalar": 0.0,
    "value_scalar": 0.5,
    "first_value_scalar": 0.5,
    "start_scalar": 1.0,
    "size_scalar": 1.0,
}
"""Initial values of vectors by name ending; gates start as `residual_gate` says, and the last two, of
`variants.streams.Coefficients`, are set by its `initialise` afterwards."""


def _initial_vector(name: str, config: ModelConfig) -> float:
    if name.endswith("_gate"):
        return {"layerscale": config.gate_init, "skipinit": 0.0, "admin": 1.0}[config.residual_gate]
    ending = name.rpartition(".")[2]
    if config.scalars_start == "falling" and ending in ("stream_scalar", "first_scalar"):
        depth = int(name.split(".")[1]) / max(config.n_blocks - 1, 1)
        return 1.15 - 0.1 * depth if ending == "stream_scalar" else 0.2 - 0.15 * depth
    assert ending in VECTORS, f"{name} has no initial value: add it to VECTORS"
    return VECTORS[ending]


def _std(name: str, config: ModelConfig) -> float:
    """Initial standard deviation of a matrix."""
    if name.endswith("_streams.weight"):
        return 0.0
    shrink = 1.0
    is_block = name.startswith("blocks.")
    if is_block and name.endswith(OUTPUTS):
        if config.init == "zero_outputs":
            return 0.0
        layer = int(name.split(".")[1]) + 1
        shrink = math.sqrt({"scaled": 2 * config.n_layers, "depth_scaled": 2 * layer}.get(config.init, 1))
    if is_block:
        shrink *= math.sqrt(config.width_multiplier)
    if is_block and config.norm == "deepnorm" and name.endswith(SHRUNK_BY_DEEPNORM):
        shrink *= (8 * config.n_layers) ** 0.25
    return config.init_std / shrink
