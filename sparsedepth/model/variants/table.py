"""The table of a block's variants: which config chooses which class.

Where several apply, they wrap each other in the order of the table, the first outermost: dropout
acts on a branch's output first, then the norm after it, a gate, a depth scale, completep's factor;
on the sum a depth scale, then a norm.
"""

from collections.abc import Callable
from functools import cache

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import Block
from sparsedepth.model.fused_block import FusedBlock, is_supported
from sparsedepth.model.variants.gates import Admin, BranchGate
from sparsedepth.model.variants.placement import DeepNorm, Keel, PostNorm, Sandwich
from sparsedepth.model.variants.scalars import Gpas, ResidualScalars
from sparsedepth.model.variants.scales import AfterBranch, AfterResidual, BeforeNorm, CompleteP, ResidualDropout
from sparsedepth.model.variants.sources import SourcesBlock

VARIANTS: tuple[tuple[type[Block], Callable[[ModelConfig, int], bool]], ...] = (
    (SourcesBlock, lambda c, layer: c.attention_residuals > 0),
    (Gpas, lambda c, layer: c.gpas),
    (ResidualScalars, lambda c, layer: c.residual_scalars),
    (CompleteP, lambda c, layer: c.depth_multiplier != 1),
    (AfterBranch, lambda c, layer: c.depth_scale in ("after_branch", "after_attention", "after_ffn")),
    (BranchGate, lambda c, layer: c.residual_gate in ("layerscale", "skipinit")),
    (Sandwich, lambda c, layer: c.norm in ("sandwich", "peri")),
    (DeepNorm, lambda c, layer: c.norm == "deepnorm"),
    (PostNorm, lambda c, layer: c.norm in ("post", "mix") and layer <= c.n_post_layers),
    (Keel, lambda c, layer: c.norm == "keel"),
    (AfterResidual, lambda c, layer: c.depth_scale == "after_residual"),
    (Admin, lambda c, layer: c.residual_gate == "admin"),
    (BeforeNorm, lambda c, layer: c.depth_scale == "before_norm"),
    (ResidualDropout, lambda c, layer: c.residual_dropout > 0),
    (FusedBlock, lambda c, layer: is_supported("attention", c) or is_supported("ffn", c)),
)


def make_block(config: ModelConfig, layer: int) -> Block:
    """The block of layer 1..L."""
    return _composed(tuple(kind for kind, applies in VARIANTS if applies(config, layer)))(config, layer)


@cache
def _composed(variants: tuple[type[Block], ...]) -> type[Block]:
    """One class of several variants; blocks of one class share compiled code."""
    return type("".join(kind.__name__ for kind in variants) or "Block", (*variants, Block), {}) if variants else Block
