"""The table of a block's variants: which config chooses which class.

Where several apply, they wrap each other in the order of the table, the first outermost: dropout
acts on a branch's output first, then the norm after it, a gate, a depth scale, completep's factor;
on the sum a depth scale, then a norm."""

from collections.abc import Callable

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.attention import composed
from sparsedepth.model.block import Block, FusedBlock, is_supported
from sparsedepth.model.variants import factors, placement
from sparsedepth.model.variants.sources import SourcesBlock
from sparsedepth.model.variants.streams import StreamsBlock

VARIANTS: tuple[tuple[type[Block], Callable[[ModelConfig, int], bool]], ...] = (
    (SourcesBlock, lambda c, layer: c.attention_residuals > 0),
    (StreamsBlock, lambda c, layer: c.n_streams > 1),
    (factors.Gpas, lambda c, layer: c.gpas),
    (factors.StreamSkips, lambda c, layer: c.stream_skips),
    (factors.ResidualScalars, lambda c, layer: c.residual_scalars),
    (factors.CompleteP, lambda c, layer: c.depth_multiplier != 1),
    (factors.AfterBranch, lambda c, layer: c.depth_scale in ("after_branch", "after_attention", "after_ffn")),
    (factors.BranchGate, lambda c, layer: c.residual_gate in ("layerscale", "skipinit")),
    (placement.Sandwich, lambda c, layer: c.norm in ("sandwich", "peri")),
    (placement.DeepNorm, lambda c, layer: c.norm == "deepnorm"),
    (placement.PostNorm, lambda c, layer: c.norm in ("post", "mix") and layer <= c.n_post_layers),
    (placement.Keel, lambda c, layer: c.norm == "keel"),
    (factors.AfterResidual, lambda c, layer: c.depth_scale == "after_residual"),
    (factors.Admin, lambda c, layer: c.residual_gate == "admin"),
    (factors.BeforeNorm, lambda c, layer: c.depth_scale == "before_norm"),
    (factors.ResidualDropout, lambda c, layer: c.residual_dropout > 0),
    (FusedBlock, lambda c, layer: is_supported("attention", c) or is_supported("ffn", c)),
)


def make_block(config: ModelConfig, layer: int) -> Block:
    return composed(Block, *(kind for kind, applies in VARIANTS if applies(config, layer)))(config, layer)
