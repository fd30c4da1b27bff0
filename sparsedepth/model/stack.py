"""The models of S runs of one shape as one model (`stacked`), whose step launches as many kernels as that of one run:
kernel launches dominate the time of a small decoder.

Each run's parameters are views of the stack's, so its optimizer, checkpoints, observations and measures work unchanged.
"""

from collections.abc import Sequence

import torch
from torch import nn

from sparsedepth.model.decoder import Decoder


class StackedDecoder(nn.Module):
    """One model of several runs with different weights; `depth_scale` may differ between 'none' and one other value.

    The parameters of the runs' models become views of this module's.
    """

    def __init__(self, runs: Sequence[Decoder]):
        super().__init__()
        config = runs[0].config
        with torch.device("meta"):
            self.decoder = Decoder(config).train()
        self.own_parameters = [dict(run.named_parameters()) for run in runs]
        for name, meta in dict(self.decoder.named_parameters()).items():
            own = [parameters[name] for parameters in self.own_parameters]
            stacked = nn.Parameter(torch.stack([parameter.detach() for parameter in own]))
            _replace(self.decoder, meta, stacked)
            for parameter, view in zip(own, stacked.detach().unbind(), strict=True):
                parameter.data = view
        places = {run.config.depth_scale for run in runs} - {"none"}
        assert len(places) <= 1
        for block, *own in zip(self.decoder.blocks, *(run.blocks for run in runs), strict=True):
            factors = [
                run_block.depth_factor if run_block.depth_scale in places else torch.ones_like(run_block.depth_factor)
                for run_block in own
            ]
            block.depth_factor, block.depth_scale = torch.stack(factors)[:, None], next(iter(places), "none")

    def hand_out_gradients(self) -> None:
        """Move the gradients of the stack to the runs' parameters."""
        for name, stacked in self.decoder.named_parameters():
            assert stacked.grad is not None
            for parameters, grad in zip(self.own_parameters, stacked.grad.unbind(), strict=True):
                parameters[name].grad = grad
            stacked.grad = None


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter everywhere in the module; a tied one occurs twice."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(part, name, new)
