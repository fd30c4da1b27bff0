"""S decoders of one shape as one (`stacked`), whose step costs as many calls as that of one: what a small decoder
spends its time on.

Each decoder's own parameters are views of the stack's: its optimizer, checkpoints, observations and measures work on
them as if it stood alone.
"""

from collections.abc import Sequence

import torch
from torch import nn

from sparsedepth.model.decoder import Decoder


class Stack(nn.Module):
    """Decoders that differ in their weights, and in whether `depth_scale` is 'none' or one other place.

    Their parameters become views of this module's, which share the memory: to change one is to change the other.
    """

    def __init__(self, decoders: Sequence[Decoder]):
        super().__init__()
        first = decoders[0]
        with torch.device("meta"):
            self.decoder = Decoder(first.config).train()
        self.own_parameters = [dict(decoder.named_parameters()) for decoder in decoders]
        for name, meta in dict(self.decoder.named_parameters()).items():
            own = [parameters[name] for parameters in self.own_parameters]
            stacked = nn.Parameter(torch.stack([parameter.detach() for parameter in own]))
            _replace(self.decoder, meta, stacked)
            for parameter, view in zip(own, stacked.detach().unbind(), strict=True):
                parameter.data = view
        places = {decoder.config.depth_scale for decoder in decoders} - {"none"}
        assert len(places) <= 1
        for block, *own in zip(self.decoder.blocks, *(decoder.blocks for decoder in decoders), strict=True):
            factors = [
                each.depth_factor if each.depth_scale in places else torch.ones_like(each.depth_factor) for each in own
            ]
            block.depth_factor, block.depth_scale = torch.stack(factors)[:, None], next(iter(places), "none")

    def hand_out_gradients(self) -> None:
        """Move the gradients of the stack to the decoders' own parameters."""
        for name, stacked in self.decoder.named_parameters():
            assert stacked.grad is not None
            for parameters, grad in zip(self.own_parameters, stacked.grad.unbind(), strict=True):
                parameters[name].grad = grad
            stacked.grad = None


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in the place of another wherever that is: a tied one is in two."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(part, name, new)
