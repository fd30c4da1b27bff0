"""Do sparsity, residual variance, effectiveness and loss move together? One rank correlation per link of the chain.

    rho = Pearson(rank x, rank y)    (Spearman 1904; ties share their mean rank)

'pooled' ranks all runs together, so depth itself drives it; 'within depth' ranks the runs of each depth among
themselves, as a share of their number, and correlates what is left. The replicates of a cell are not independent
observations of the chain: the bootstrap draws whole cells with replacement, and its percentiles are the 95% interval.
A link is 'associated' only if that interval excludes 0. Association is not causation; 2603.15389 itself shows a case
(weight decay 1.0 and 3.0) where variance falls and usefulness falls with it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from sparsedepth.effects.intervals import LEVEL

Scope = Literal["pooled", "within depth"]

LINKS: tuple[tuple[str, str], ...] = (
    ("weight_sparsity", "residual_variance_last"),
    ("attention_sparsity", "residual_variance_last"),
    ("attention_sparsity_rel", "residual_variance_last"),
    ("residual_variance_last", "usefulness"),
    ("residual_variance_last", "usefulness_loss_increase"),
    ("residual_variance_last", "causal_score"),
    ("residual_variance_last", "permutation_score"),
    ("usefulness", "val_loss"),
    ("usefulness_loss_increase", "val_loss"),
    ("causal_score", "val_loss"),
    ("permutation_score", "val_loss"),
)

MIN_CELLS = 6
"""Fewer distinct configurations get no interval; from here on, noise is called associated in about 5% of stores."""
RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Link:
    cause: str
    effect: str
    scope: Scope
    rho: float | None
    """None where it is undefined: fewer than three runs, or one of the two does not vary."""
    lo: float | None
    hi: float | None
    n_runs: int
    n_cells: int
    n_missing: int
    """Finished runs left out because one of the two was not measured."""
    n_diverged: int

    @property
    def verdict(self) -> Literal["associated", "not distinguishable"]:
        known = self.lo is not None and self.hi is not None
        return "associated" if known and (self.lo > 0 or self.hi < 0) else "not distinguishable"


def chain(runs: pd.DataFrame, seed: int = 0) -> list[Link]:
    """Every link, pooled and within depth. Deterministic in `seed`, which draws the bootstrap."""
    return [link(runs, cause, effect, scope, seed) for cause, effect in LINKS for scope in ("pooled", "within depth")]


def link(runs: pd.DataFrame, cause: str, effect: str, scope: Scope, seed: int = 0) -> Link:
    """One link over the runs that finished and have both numbers."""
    finished = runs[runs["outcome"] == "ok"]
    usable = finished.dropna(subset=[cause, effect])
    x_N, y_N = usable[cause].to_numpy(dtype=float), usable[effect].to_numpy(dtype=float)
    stratum_N = usable["n_layers"].to_numpy() if scope == "within depth" else np.zeros(len(usable))
    cell_N, names = pd.factorize(usable["cell_id"])
    rho = lo = hi = None
    if len(usable) >= 3:
        rho = _number(spearman(x_N, y_N, stratum_N, cell_N, np.ones((1, len(names))))[0])
    if rho is not None and len(names) >= MIN_CELLS:
        lo, hi = _interval(x_N, y_N, stratum_N, cell_N, seed)
    return Link(
        cause=cause,
        effect=effect,
        scope=scope,
        rho=rho,
        lo=lo,
        hi=hi,
        n_runs=len(usable),
        n_cells=len(names),
        n_missing=len(finished) - len(usable),
        n_diverged=int((runs["outcome"] == "diverged").sum()),
    )


def spearman(
    x_N: np.ndarray, y_N: np.ndarray, stratum_N: np.ndarray, cell_N: np.ndarray, times_BC: np.ndarray
) -> np.ndarray:
    """Rank correlations within strata, one per row of `times_BC`: how often each cell counts. NaN where undefined."""
    weight_BN = times_BC[:, cell_N]
    x_BN, y_BN = (_midranks(values_N, stratum_N, cell_N, times_BC) for values_N in (x_N, y_N))
    xx_B, yy_B, xy_B = (
        (weight_BN * a_BN * b_BN).sum(axis=1) for a_BN, b_BN in ((x_BN, x_BN), (y_BN, y_BN), (x_BN, y_BN))
    )
    norm_B = np.sqrt(xx_B * yy_B)
    return np.divide(xy_B, norm_B, out=np.full_like(norm_B, np.nan), where=norm_B > 1e-12 * len(x_N))


def _midranks(values_N: np.ndarray, stratum_N: np.ndarray, cell_N: np.ndarray, times_BC: np.ndarray) -> np.ndarray:
    """Share of the weight of a run's own stratum that lies below it, its ties counted half, less 1/2 (the mean)."""
    same_NN = stratum_N[:, None] == stratum_N[None, :]
    below_NN = (values_N[:, None] < values_N[None, :]) + 0.5 * (values_N[:, None] == values_N[None, :])
    # A cell counts as a whole, so its rows are summed once: the large product is then (B, C) by (C, N).
    order_N = np.argsort(cell_N, kind="stable")
    starts_C = np.searchsorted(cell_N[order_N], np.arange(times_BC.shape[1]))
    share_BN = times_BC @ np.add.reduceat((below_NN * same_NN)[order_N], starts_C, axis=0)
    strata, code_N = np.unique(stratum_N, return_inverse=True)
    runs_CS = np.zeros((times_BC.shape[1], len(strata)))
    np.add.at(runs_CS, (cell_N, code_N), 1)
    total_BN = (times_BC @ runs_CS)[:, code_N]
    return np.divide(share_BN, total_BN, out=np.full_like(share_BN, 0.5), where=total_BN > 0) - 0.5


def _interval(
    x_N: np.ndarray, y_N: np.ndarray, stratum_N: np.ndarray, cell_N: np.ndarray, seed: int
) -> tuple[float | None, float | None]:
    n_cells = int(cell_N.max()) + 1
    generator = np.random.default_rng(seed)
    times_BC = generator.multinomial(n_cells, np.full(n_cells, 1 / n_cells), size=RESAMPLES).astype(float)
    rho_B = spearman(x_N, y_N, stratum_N, cell_N, times_BC)
    rho_B = rho_B[np.isfinite(rho_B)]
    if len(rho_B) < 0.9 * RESAMPLES:  # most runs agree in one of the two: its rank is decided by very few cells
        return None, None
    tail = (1 - LEVEL) / 2
    lo, hi = np.quantile(rho_B, [tail, 1 - tail])
    return float(lo), float(hi)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
