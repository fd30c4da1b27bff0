"""`loops`: layers that share weights. With r loops the L layers are r passes through L / r blocks.

Layer l has the weights of block (l - 1) mod (L / r) + 1, initialised as at its first layer; s_l and
mix depend on l. Each pass is a layer for `depth_scale` and for all measures: skipping, swapping or
replacing affects one layer, not all passes of its block. With `value_residual`, all layers with
block 1's weights use only their own values.
"""

import torch

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import Block
from sparsedepth.model.variants.table import make_block


def make_blocks(config: ModelConfig) -> list[Block]:
    """The layers of a decoder."""
    blocks = [make_block(config, layer) for layer in range(1, config.n_blocks + 1)]
    for layer in range(config.n_blocks + 1, config.n_layers + 1):
        blocks.append(tied_copy(blocks[layer - 1 - config.n_blocks], config, layer))
    return blocks


def tied_copy(block: Block, config: ModelConfig, layer: int) -> Block:
    """A later layer with this block's weights."""
    with torch.device("meta"):
        copy = make_block(config, layer)
    for name, part in (*block.named_children(), *block.named_parameters(recurse=False)):
        setattr(copy, name, part)
    # The copy was built on the meta device, where the buffer has no memory; `Block.initialise` sets it.
    copy.depth_factor = torch.empty_like(block.depth_factor)
    return copy
