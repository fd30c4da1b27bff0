"""Coordinate check: how large activations and updates are after a few steps, against width and depth.

    activation(l) = rms of x_l,    update(l) = rms of x_l(after the steps) - x_l(before),    l = 1..L; logits too

on the text of the first step, at the run's own lr without warm-up. lr carries from one size to another if neither grows
nor falls with it (2203.03466, appendix D.1; over depth 2505.01618, figure 4): the slope of the logarithm of a quantity,
in the last block, on that of the size is within FLAT of 0. Heads of one size, d_ff and d_expert move with d_model."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.loop import losses
from sparsedepth.train.optimizer import make_optimizer, set_learning_rate

FLAT = 0.25
"""A slope of .25 changes a quantity by 1.4 over four times the size."""
ACTIVATION, UPDATE, LOGITS = "activation", "update", "update of logits"


class Coordinate(NamedTuple):
    axis: str
    size: int
    seed: int
    quantity: str
    place: float
    """l / L; 1 for the logits"""
    value: float


class Slope(NamedTuple):
    axis: str
    quantity: str
    slope: float
    """the power of the size by which it grows"""

    @property
    def is_flat(self) -> bool:
        return abs(self.slope) <= FLAT


def sized(config: RunConfig, axis: str, size: int) -> RunConfig:
    """The run at another width or depth. Raises ValueError for a width that is not of whole heads."""
    values = config.model_dump(mode="json", exclude_unset=True) | {axis: size}
    if axis == "d_model":
        assert config.d_ff is not None
        d_head = config.d_head
        if size % d_head:
            raise ValueError(f"d_model={size} is not a multiple of the heads of {d_head} channels; choose one that is")
        values |= {"n_heads": size // d_head, "d_ff": round(config.d_ff * size / config.d_model), "n_kv_heads": None}
        if config.n_kv_heads != config.n_heads:
            values["n_kv_heads"] = config.n_kv_heads
        if config.d_expert:
            values["d_expert"] = round(config.d_expert * size / config.d_model)
    return build(RunConfig, values, f"{axis}={size}")


def coordinates(
    config: RunConfig,
    sizes: Mapping[str, Sequence[int]],
    batch: Callable[[RunConfig, int], Sequences],
    steps: int = 4,
    n_seeds: int = 2,
) -> Iterator[Coordinate]:
    """Train each size for some steps with each seed. Raises ValueError for what is no width or depth, fewer than two
    sizes, and one that cannot be built."""
    if not sizes or any(axis not in ("d_model", "n_layers") or len({*values}) < 2 for axis, values in sizes.items()):
        given = "; ".join(f"{axis}={','.join(map(str, values))}" for axis, values in sizes.items()) or "none"
        raise ValueError(f"--vary must give two or more d_model or n_layers, as n_layers=3,6,12, and gives {given}")
    for axis, values in sizes.items():
        for one in [sized(config, axis, size) for size in values]:
            for seed in range(n_seeds):
                for place, (quantity, value) in _measured(one, seed, batch, steps):
                    yield Coordinate(axis, getattr(one, axis), seed, quantity, place, value)


def _measured(
    config: RunConfig, seed: int, batch: Callable[[RunConfig, int], Sequences], steps: int
) -> Iterator[tuple[float, tuple[str, float]]]:
    """(depth as a share, (quantity, rms)) of each layer after some steps of training: activations, updates, logits."""
    model = Decoder(config, seed).train()
    optimizer = make_optimizer(model, config)
    set_learning_rate(optimizer, config.lr)
    first_BT = torch.from_numpy(batch(config, 0).inputs)
    before = _states(model, first_BT)
    for step in range(steps):
        read = batch(config, step)
        losses(model, torch.from_numpy(read.inputs), torch.from_numpy(read.targets), config)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    for layer, (old, new) in enumerate(zip(before, _states(model, first_BT), strict=True), start=1):
        place = min(1.0, layer / config.n_layers)
        if layer <= config.n_layers:
            yield place, (ACTIVATION, _rms(new))
        yield place, (UPDATE if layer <= config.n_layers else LOGITS, _rms(new - old))


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@torch.no_grad()
def _states(model: Decoder, tokens_BT: Tensor) -> list[Tensor]:
    """x_l of each block, then the logits, without dropout."""
    model.eval()
    x_BTD = model.embed_tokens(tokens_BT)
    context = model.context(tokens_BT, x_BTD)
    states = []
    for block in model.blocks:
        states.append(x_BTD := block(x_BTD, context))
    model.train()
    return [*states, model.logits(x_BTD)]


def slopes(found: Sequence[Coordinate]) -> list[Slope]:
    """By axis and quantity, over sizes; of the stream that after the last block. Raises ValueError for what is 0 or no
    longer finite: it has no logarithm."""
    if lost := next((one for one in found if one.place == 1 and not 0 < one.value < math.inf), None):
        raise ValueError(
            f"{lost.axis}={lost.size}: the {lost.quantity} is {lost.value:g} after these steps; "
            f"give a {'higher' if lost.value == 0 else 'lower'} lr: --set lr=..."
        )
    result = []
    for axis, quantity in dict.fromkeys((one.axis, one.quantity) for one in found):
        mine = [one for one in found if (one.axis, one.quantity, one.place) == (axis, quantity, 1.0)]
        sizes = sorted({one.size for one in mine})
        means = [fmean(math.log(one.value) for one in mine if one.size == size) for size in sizes]
        result.append(Slope(axis, quantity, float(np.polyfit(np.log(sizes), means, 1)[0])))
    return result
