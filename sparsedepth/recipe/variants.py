"""Effects of variants on the baseline's loss, from runs at one budget without tuned fields.

    y(cell, seed) = a_c + block(seed) + e,     Var e = s_c^2

The blocks are free where runs are paired by seed; else all runs are one block. Least squares, weighted by the noise of
the baseline and that of the variants. The variances s_c^2, of d_c degrees of freedom (sums of 1 - leverage), are

    variants    drawn to a prior (d0, s0^2), fitted to their logarithms (limma: Smyth 2004, section 6.2)
    baseline    its own; where it is not clearly above s0^2 (ALIKE), drawn to it by a few degrees of freedom

An effect has the variance s_c^2 / n_c + s_b^2 / n_b, and Satterthwaite's degrees of freedom.

Shapes: N runs, C cells (0: the baseline), V variants, S seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sparsedepth.effects.verdict import Distribution
from sparsedepth.scaling.multiplier import prior_of

MAX_SIZE = 5_000_000
"""Cells times cells, or seeds."""
ALIKE = 2.5
"""The baseline's variance over that of the variants, at most."""
LENT = 0.25, 4.0
"""The degrees of freedom of the baseline's prior: this share of those that the variants have beyond it, and at most."""


class VariantEffect(NamedTuple):
    estimate: float
    distribution: Distribution | None
    """None where no two runs of a cell differ."""
    shared: float
    """The baseline's share of the variance."""


def variant_effects(losses: Sequence[Mapping[int, float]], is_paired: bool) -> list[VariantEffect]:
    """Of every variant after the first, which is the baseline; from seed -> loss. Raises ValueError for too many."""
    n_C = np.array([len(each) for each in losses])
    cell_N = np.repeat(np.arange(len(n_C)), n_C)
    seed_N = np.concatenate([[*each] for each in losses]) if is_paired else np.zeros(len(cell_N))
    y_N = np.concatenate([[*each.values()] for each in losses])
    seed_N, weight_C = np.unique(seed_N, return_inverse=True)[1], np.ones(len(n_C))
    for _ in range(2):  # equal weights, then by the noise that these find
        effect_C, variance_C, square_C, df_C = _two_way(cell_N, seed_N, y_N - y_N.mean(), weight_C)
        if not square_C.sum() > 1e-20 * np.ptp(y_N) ** 2 * df_C.sum():
            return [VariantEffect(effect, None, 0.0) for effect in effect_C[1:].tolist()]
        means_C = 1 / (weight_C * n_C)
        apart_C = variance_C / (means_C + means_C[0])  # the variance of an effect over that of a difference of means
        s02, s2_C, total_C = _moderated(square_C, df_C)
        weight_C[0] = np.clip(s02 / s2_C[0], 0.01, 100)
    base_V, own_V = apart_C[1:] * s2_C[0] / n_C[0], (apart_C * s2_C / n_C)[1:]
    df_V = (base_V + own_V) ** 2 / (base_V**2 / total_C[0] + own_V**2 / total_C[1:])
    return [
        VariantEffect(effect, Distribution(*np.array([[effect], [math.sqrt(variance)], [df], [1.0]]), 1.0), shared)
        for effect, variance, df, shared in zip(
            effect_C[1:].tolist(), base_V + own_V, df_V, np.round(base_V / (base_V + own_V), 2).tolist(), strict=True
        )
    ]


def _moderated(square_C: np.ndarray, df_C: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """s0^2, and the variances with their degrees of freedom. Cells without any have the prior alone."""
    own_C = square_C / np.maximum(df_C, 1e-9)
    own_C = np.maximum(own_C, 1e-5 * square_C.sum() / df_C.sum())  # agreement by chance is not certainty
    known_C = df_C > 0
    known_C[0] &= not known_C[1:].any()
    d0, s02 = prior_of(own_C[known_C], df_C[known_C])
    df = df_C[known_C].sum()
    is_alike = not df_C[0] or own_C[0] < ALIKE * s02
    lent_C = np.full(len(df_C), d0)
    lent_C[0] = np.clip(LENT[0] * (df - df_C[0]), 0.0, LENT[1]) if is_alike else 0.0
    total_C = lent_C + df_C
    s2_C = (lent_C * s02 + df_C * own_C) / total_C
    total_C[1:] = np.minimum(total_C[1:], df)
    return s02, s2_C, total_C


def _two_way(cell_N: np.ndarray, seed_N: np.ndarray, y_N: np.ndarray, weight_C: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of each cell the effect on the baseline's level, its variance in units of a run of weight 1, the sum of squared
    residuals, and its degrees of freedom."""
    n_cells, n_seeds = len(weight_C), int(seed_N.max()) + 1
    if n_cells * max(n_cells, n_seeds) > MAX_SIZE:
        size = f"{n_cells - 1:,} variants and {n_seeds:,} seeds at one budget"
        raise ValueError(f"{size} are too many to compare, 2,000 variants or fewer can be; leave some out")
    weight_N = weight_C[cell_N]
    weight_CS = np.bincount(cell_N * n_seeds + seed_N, weight_N, n_cells * n_seeds).reshape(n_cells, n_seeds)
    total_S, sum_S = weight_CS.sum(axis=0), np.bincount(seed_N, weight_N * y_N)
    share_CS = weight_CS / total_S
    precision_CC = np.diag(weight_CS.sum(axis=1)) - share_CS @ weight_CS.T
    cov_CC = np.zeros_like(precision_CC)  # of effects: that of the baseline is 0
    cov_CC[1:, 1:] = np.linalg.inv(precision_CC[1:, 1:])
    effect_C = cov_CC @ (np.bincount(cell_N, weight_N * y_N) - share_CS @ sum_S)
    residual_N = y_N - effect_C[cell_N] - ((sum_S - effect_C @ weight_CS) / total_S)[seed_N]
    cross_CS, variance_C = cov_CC @ share_CS, np.diag(cov_CC)
    block_S = 1 / total_S + (cross_CS * share_CS).sum(axis=0)
    leverage_N = weight_N * (variance_C[cell_N] + block_S[seed_N] - 2 * cross_CS[cell_N, seed_N])
    df_C = np.bincount(cell_N, 1 - leverage_N)
    df_C[df_C < 0.2] = 0.0
    return effect_C, variance_C, np.bincount(cell_N, residual_N**2) * (df_C > 0), df_C
