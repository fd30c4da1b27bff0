"""The losses of a baseline and of a setting at their budgets: what a multiplier is estimated from.

Shapes: S seeds, N cells (side, budget)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsedepth.scaling.points import blocks_of
from sparsedepth.store.search import MATCHED

MIN_BUDGETS = 3
"""Of the baseline."""
Losses = Mapping[float, Mapping[int, float]]
"""Budget [FLOPs] -> seed -> loss [nat/token]."""
Cell = tuple[bool, float]
"""Whether it is the setting's, and its budget [FLOPs]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ladder:
    """Of the seeds that all cells have."""

    C_N: np.ndarray
    """Budgets [FLOPs]."""
    is_setting_N: np.ndarray
    log_loss_SN: np.ndarray
    lr_sd_N: np.ndarray
    """Of ln L, by the choice of lr; of a cell with a `base`, of its difference from that."""
    base_N: np.ndarray
    """The baseline's cell at the same budget; the cell itself without."""

    @property
    def n_seeds(self) -> int:
        return len(self.log_loss_SN)

    @property
    def mean_N(self) -> np.ndarray:
        return self.log_loss_SN.mean(axis=0)

    def rows(self, values: np.ndarray) -> np.ndarray:
        """What a law is fitted to, from ln L of the cells, (..., N): that of the baseline, and at its budgets the
        setting's difference from it."""
        return values - values[..., self.base_N] * (self.base_N != np.arange(len(self.base_N)))

    @cached_property
    def middle(self) -> float:
        """ln C, on average over the baseline's budgets."""
        return np.log(self.C_N[~self.is_setting_N]).mean()

    @property
    def x_N(self) -> np.ndarray:
        """ln C, from the middle."""
        return np.log(self.C_N) - self.middle

    def only(self, cells: Sequence[int]) -> "Ladder":
        """Of these cells: the setting's is the last one, and its base is the first."""
        base_N = np.arange(len(cells))
        base_N[-1] = 0 if self.base_N[cells[-1]] == cells[0] else base_N[-1]
        names = ("C_N", "is_setting_N", "log_loss_SN", "lr_sd_N")
        return Ladder(base_N=base_N, **{name: getattr(self, name)[..., [*cells]] for name in names})


def ladder_of(losses: Mapping[Cell, Mapping[int, float]], lr_variance: Mapping[Cell, float]) -> Ladder | None:
    """From (is the setting, FLOPs) -> seed -> loss, and -> the variance by the choice of lr. Of seeds that have all
    cells: most cells, for at most a third of the seeds. Where no two seeds are in three budgets of the baseline and one
    of the setting, every cell is one run, its mean over seeds; None for fewer cells."""
    n_seeds = [len(of) for of in losses.values() if of]
    if not n_seeds or np.median(n_seeds) <= 1:
        losses = {cell: {0: np.mean([*of.values()])} for cell, of in losses.items() if of}
    blocks = [block for block in blocks_of(losses) if _is_enough(block[1])]
    if not blocks:
        return None
    most = max(len(seeds) for seeds, _ in blocks)
    enough = [block for block in blocks if 3 * len(block[0]) >= 2 * most]
    seeds, cells = max(enough, key=lambda block: (len(block[1]), len(block[0]), block))
    loss_SN = np.array([[losses[cell][seed] for cell in cells] for seed in seeds])
    if (loss_SN <= 0).any():
        raise ValueError(f"a loss of {loss_SN.min():g}: its law is of ln loss, and so of losses above 0")
    is_setting_N, C_N = (np.array(column) for column in zip(*cells, strict=True))
    near_NN = ~is_setting_N & (np.abs(C_N[:, None] / C_N - 1) < MATCHED) & is_setting_N[:, None]
    return Ladder(
        C_N=C_N, is_setting_N=is_setting_N, log_loss_SN=np.log(loss_SN),
        lr_sd_N=np.sqrt([lr_variance.get(cell, 0.0) for cell in cells]) / loss_SN.mean(axis=0),
        base_N=np.where(near_NN.any(axis=1), near_NN.argmax(axis=1), np.arange(len(cells))),
    )  # fmt: skip


def _is_enough(cells: Sequence[Cell]) -> bool:
    n_setting = sum(is_setting for is_setting, _ in cells)
    return n_setting > 0 and len(cells) - n_setting >= MIN_BUDGETS
