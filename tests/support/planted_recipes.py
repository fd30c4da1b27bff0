"""Runs with planted effects on val_loss, from which recipes are derived."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from support.runs_frame import config_of, grid, runs_frame

from sparsedepth.config.run import RunConfig

AXES = {"depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1, 0.3], "n_kv_heads": [4, 1], "seed": [0, 1, 2]}
WIGGLE = (0.0, 0.0005, -0.0005, 0.001)


def sweep(
    loss: Callable[[RunConfig], float],
    axes: Mapping[str, Iterable[Any]] = AXES,
    sd: float = 0.01,
    seed: int = 0,
    **base: Any,
) -> pd.DataFrame:
    """A grid with val_loss = 3 + loss(config) + normal noise."""
    generator = np.random.default_rng(seed)
    return grid(axes, lambda config: {"val_loss": 3 + loss(config) + sd * generator.normal()}, **base)


def cells(losses: Sequence[tuple[Mapping[str, Any], float]], n_seeds: int = 4) -> pd.DataFrame:
    """Runs of some configurations, each with its loss, and a little noise of seeds."""
    return runs_frame(
        (config_of(seed=seed, **cell), {"val_loss": loss + WIGGLE[(seed + i) % 4]})
        for i, (cell, loss) in enumerate(losses)
        for seed in range(n_seeds)
    )


def planted(config: RunConfig) -> float:
    """LNS gains .05, weight decay of .1 gains .03."""
    return -0.05 * (config.depth_scale == "lns") - 0.03 * (config.weight_decay == 0.1)
