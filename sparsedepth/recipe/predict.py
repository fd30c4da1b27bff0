"""What each setting does at a depth: measured there or predicted from other depths, then shrunk towards no effect.

Measured: the paired contrast of that depth (`effects.contrast`). Predicted, from pairs i = 1..n at depths L_i,

    d_i = a + b ln L_i + error,  least squares;        effect(L) = a + b ln L,  n - 2 degrees of freedom
    se(L)^2 = s^2 h,  h = 1/n + (ln L - m)^2 / sum_i (ln L_i - m)^2,  m = mean_i ln L_i

so that the interval widens with the distance from the depths that were run. b is the interaction of knob and depth: it
cannot be known from one depth, from which nothing is predicted.

Shrunk (empirical Bayes): the true effects of a store's settings are taken as draws from N(0, tau^2); an effect e_j with
standard error se_j is multiplied by its reliability,

    shrunk_j = e_j tau^2 / (tau^2 + se_j^2),     tau^2: sum_j e_j^2 / (tau^2 + se_j^2) = number of settings, or 0

(Paule and Mandel 1982; Morris 1983). What is noisy counts little, whatever its luckiest run says.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from sparsedepth.effects.contrast import Contrast, compare, contrasts
from sparsedepth.effects.intervals import MIN_PAIRS, Estimate, student, t_critical, verdict_of
from sparsedepth.effects.knobs import Knob
from sparsedepth.effects.pairs import pairs


def measured(runs: pd.DataFrame, knob: Knob, objective: str, depth: int) -> list[Contrast]:
    """The contrasts of the runs at one depth."""
    return contrasts(runs[runs["n_layers"] == depth], knob, objective)


def predicted(runs: pd.DataFrame, knob: Knob, objective: str, depth: int) -> list[Contrast]:
    """Each setting's effect at a depth, from the runs at others; ratios, noise and counts are over all their pairs.

    Its interval is None where its pairs stand at one depth only, or are fewer than four.
    """
    rows = pairs(runs, knob, objective)
    predictions = []
    for setting in list(knob.settings)[1:]:
        contrast = compare(runs, knob, setting, objective)
        if contrast is None:
            continue
        usable = rows[rows["setting"] == setting].dropna(subset=["difference"])
        effect, leverage = line(usable["n_layers"].to_numpy(float), usable["difference"].to_numpy(float), depth)
        floor = None
        if contrast.floor is not None and leverage is not None:
            floor = contrast.floor * math.sqrt(effect.n * leverage)
        predictions.append(
            replace(contrast, n_layers=depth, effect=effect, floor=floor, verdict=verdict_of(effect, floor))
        )
    return predictions


def line(depth_N: np.ndarray, difference_N: np.ndarray, depth: int) -> tuple[Estimate, float | None]:
    """The regression on ln depth, at a depth, and its leverage h; no number where one depth alone was run."""
    n = len(depth_N)
    if len(np.unique(depth_N)) < 2 or n < MIN_PAIRS + 1:
        return Estimate(mean=None, lo=None, hi=None, p=None, n=n), None
    x_N = np.log(depth_N) - np.log(depth_N).mean()
    at = math.log(depth) - float(np.log(depth_N).mean())
    spread = float(x_N @ x_N)
    slope = float(x_N @ difference_N) / spread
    mean = float(difference_N.mean()) + slope * at
    rest_N = difference_N - difference_N.mean() - slope * x_N
    leverage = 1 / n + at**2 / spread
    return student(mean, math.sqrt(float(rest_N @ rest_N) / (n - 2) * leverage), n - 2, n), leverage


def standard_error(effect: Estimate, df: int) -> float | None:
    """What the half-width of a 95% interval implies; None without one."""
    return None if effect.hi is None or effect.lo is None else (effect.hi - effect.lo) / 2 / t_critical(df)


def spread_of_effects(effects: Sequence[float], errors: Sequence[float]) -> float:
    """tau: the standard deviation of true effects around 0 that the estimates call for; 0 if noise explains them."""
    square_J, error_J = np.asarray(effects, float) ** 2, np.asarray(errors, float) ** 2

    def excess(tau2: float) -> float:
        total_J = tau2 + error_J
        return float(np.divide(square_J, total_J, out=np.where(square_J > 0, np.inf, 0.0), where=total_J > 0).sum())

    if not len(square_J) or excess(0.0) <= len(square_J):
        return 0.0
    low, high = 0.0, float(square_J.sum())  # excess(high) <= number of settings
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > len(square_J) else (low, middle)
    return math.sqrt(high)


def reliability(tau: float, error: float) -> float:
    """The share of an estimate that is kept."""
    return tau**2 / (tau**2 + error**2) if tau else 0.0
