"""A power law with an offset, L = L_inf + A C^-alpha, from the losses of the same seeds at several budgets C.

At a given L_inf the law is a line for each seed s, whose slope is its exponent and whose curvature is 0 at the right
L_inf, positive below and negative above:

    ln(L_s - L_inf) = ln A_s - alpha_s ln C + q_s (ln C)^2

The estimate of L_inf has mean q_s = 0. The data allow every L_inf from 0 at which Student's test over seeds does not
reject that. Seeds are the unit: branches of one trunk share its seed, and the law is of each seed's own curve.

Shapes: S seeds, B budgets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsedepth.config.plain_text import counted
from sparsedepth.store.small_sample import t_critical

MIN_BUDGETS = 3
N_GRID = 400
NEAREST = 1e-4
"""The highest L_inf tried lies below the lowest loss by this share of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PowerLaw:
    C: np.ndarray
    """Budgets, ascending, (B,)."""
    loss: np.ndarray
    """[nat/token], (S, B)."""
    seeds: tuple[int, ...]

    @cached_property
    def L_inf(self) -> float:  # noqa: N802 - the symbol of the formula
        """nat/token; 0 where a law with L_inf = 0 is still too straight."""
        from scipy.optimize import brentq  # slow to import, and recipes of one budget do without

        highest = float(self.loss.min()) * (1 - NEAREST)
        ends = [float(self._curvature(end).mean()) for end in (0.0, highest)]
        if ends[0] <= 0:
            return 0.0
        return highest if ends[1] > 0 else float(brentq(lambda end: self._curvature(end).mean(), 0.0, highest))

    @property
    def alpha(self) -> float:
        return float(self.alphas(self.L_inf).mean())

    @cached_property
    def allowed(self) -> np.ndarray:
        """Values of L_inf that the data allow, ascending, the estimate included."""
        n = len(self.seeds)
        if n < 2:
            return np.array([self.L_inf])
        grid = float(self.loss.min()) * (1 - np.geomspace(1, NEAREST, N_GRID))
        q_GS = np.array([self._curvature(L_inf) for L_inf in grid])
        half_G = t_critical(n - 1) * q_GS.std(axis=1, ddof=1) / np.sqrt(n)
        refused = grid[np.abs(q_GS.mean(axis=1)) > half_G]
        # The nearest ones: close to the lowest loss one seed's curvature is too uncertain to refuse anything.
        least = refused[refused < self.L_inf].max(initial=-1.0)
        most = refused[refused > self.L_inf].min(initial=np.inf)
        return np.unique([self.L_inf, *grid[(least < grid) & (grid < most)]])

    @property
    def is_identified(self) -> bool:
        """Whether the data bound L_inf on both sides."""
        return self.allowed[0] > 0 and self.allowed[-1] < self.loss.min() * (1 - 2 * NEAREST)

    def alphas(self, L_inf: float) -> np.ndarray:
        """The exponent of each seed at an L_inf, (S,)."""
        return -np.log(self.loss - L_inf) @ self._x / (self._x @ self._x)

    def _curvature(self, L_inf: float) -> np.ndarray:
        square = self._x**2 - (self._x**2).mean()
        square = square - self._x * (self._x @ square) / (self._x @ self._x)  # without what is linear in ln C
        return np.log(self.loss - L_inf) @ square / (square @ square)

    @cached_property
    def _x(self) -> np.ndarray:
        """ln C less its mean, (B,)."""
        return np.log(self.C) - np.log(self.C).mean()


def power_law(losses: Mapping[float, Mapping[int, float]]) -> PowerLaw:
    """The law from budget -> seed -> loss [nat/token], of the seeds that have most budgets in common. Raises ValueError
    for fewer than three budgets, and for a loss that rises with the budget."""
    blocks = []
    for seeds in {frozenset(by_seed) for by_seed in losses.values()}:
        budgets = sorted(budget for budget, by_seed in losses.items() if seeds <= set(by_seed))
        if seeds and len(budgets) >= MIN_BUDGETS:
            blocks.append((sorted(seeds), budgets))
    if not blocks:
        needed = f"{counted(len(losses), 'budget')}, and {MIN_BUDGETS} of one seed are needed"
        raise ValueError(f"{needed}; schedule: wsd with branch_at: [0.25, 0.5] gives three from one run")
    seeds, budgets = max(blocks, key=lambda block: (len(block[0]) * len(block[1]), block))
    loss_SB = np.array([[losses[budget][seed] for budget in budgets] for seed in seeds])
    if not (loss_SB > 0).all() or budgets[0] <= 0:
        raise ValueError("a budget or a loss that is not positive")
    first, last = loss_SB[:, 0].mean(), loss_SB[:, -1].mean()
    if last >= first:
        at_ends = f"{first:.4g} at {budgets[0]:.3g} FLOPs, {last:.4g} at {budgets[-1]:.3g}"
        raise ValueError(f"a loss that does not fall with the budget ({at_ends}); tune lr at each budget")
    return PowerLaw(C=np.array(budgets), loss=loss_SB, seeds=tuple(seeds))
