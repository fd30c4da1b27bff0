"""x_0 and v_1, the embedding and the first block's values, which every later block can read.

    residual_scalars   block l reads a_l x + b_l x_0;  a and b start at 1 and 0               (nanochat; modded-nanogpt)
    value_residual     attention uses c_l v_l + d_l v_1 in place of its values v_l, l > 1;  c and d start at 1/2
                       (2410.17897, Learnable-ResFormer over all layers)

Skipping, swapping or replacing a block does not change x_0 and v_1.

Shapes: B sequences, T tokens, D stream width, G key/value heads, K head width.
"""

from torch import Tensor


class StreamStart:
    """x_0 and v_1. Not a tuple: FSDP hands copies of tuples to its modules."""

    def __init__(self, x_BTD: Tensor, value_BGTK: Tensor | None = None):
        self.x_BTD = x_BTD
        """x_0"""
        self.value_BGTK = value_BGTK
        """v_1; with `value_residual` set by block 1"""

    def repeated(self, copies: int) -> "StreamStart":
        """Repeated for several copies of the batch, one after the other."""
        v_BGTK = self.value_BGTK
        return StreamStart(self.x_BTD.repeat(copies, 1, 1), None if v_BGTK is None else v_BGTK.repeat(copies, 1, 1, 1))
