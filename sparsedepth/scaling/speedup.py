"""What a change is worth in compute: how much more the baseline would need to reach the changed model's loss.

    L_base(C) = L_inf + A C^-alpha                                                    (`power_law`, seeds as clusters)
    compute multiplier = ((L_base - L_inf) / (L_setting - L_inf))^(1 / alpha)
    wall-clock multiplier = compute multiplier x tokens per second / the baseline's

Losses are paired by seed: the estimate is the mean over pairs of the logarithm, its interval Student's over pairs, with
the variance of the curve's bootstrap added. Where the curve's points do not identify L_inf, the range of multipliers
over the curves that they allow is given in place of an interval; where a curve that they allow lies above a loss of the
setting, nothing is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from sparsedepth.scaling.power_law import PowerLaw, fit_power_law

MIN_BUDGETS = 3
LEVEL = 0.95
MOST_ABOVE = 0.05
"""Share of the curve's replicates whose L_inf may reach a loss of the setting."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    multiplier: float | None
    """compute of the baseline at the same loss / compute of the setting; None: withheld, see `reason`"""
    lo: float | None = None
    hi: float | None = None
    """95% interval, or the range over the curves that the points allow if `is_range`"""
    is_range: bool = False
    n_pairs: int = 0
    reason: str = ""

    def times(self, speed: float) -> "Speedup":
        """The wall-clock multiplier: `speed` is tokens per second / the baseline's."""
        if self.multiplier is None or self.lo is None or self.hi is None:
            return self
        return replace(self, multiplier=self.multiplier * speed, lo=self.lo * speed, hi=self.hi * speed)


def baseline_curve(compute: Mapping[float, Mapping[int, float]], n_replicates: int = 200) -> PowerLaw:
    """The baseline's law from compute [FLOPs] -> seed -> loss [nat/token]. Raises ValueError for fewer than three
    budgets, and for a loss that rises with compute."""
    budgets = sorted(compute)
    if len(budgets) < MIN_BUDGETS:
        raise ValueError(
            f"a compute multiplier needs the baseline at {MIN_BUDGETS} budgets or more, and it has {len(budgets)}; "
            f"train it for other train_tokens too (schedule: wsd with branch_at: [0.25, 0.5] gives three)"
        )
    means = [float(np.mean([*compute[budget].values()])) for budget in budgets]
    if means[-1] >= means[0]:
        raise ValueError(
            f"the baseline's loss does not fall with compute ({means[0]:.4g} at {budgets[0]:.3g} FLOPs, "
            f"{means[-1]:.4g} at {budgets[-1]:.3g}): no compute multiplier; tune lr at each budget"
        )
    points = [(budget, loss, seed) for budget in budgets for seed, loss in compute[budget].items()]
    C, losses, seeds = zip(*points, strict=True)
    several = len(set(seeds)) > 1
    return fit_power_law(C, losses, cluster=seeds if several else None, n_replicates=n_replicates)


def speedup(curve: PowerLaw, baseline: Mapping[int, float], setting: Mapping[int, float]) -> Speedup:
    """The compute multiplier of a setting at one budget, from seed -> loss [nat/token] of both sides."""
    seeds = sorted(set(baseline) & set(setting))
    if not seeds:
        return Speedup(multiplier=None, reason="no seed in common with the baseline")
    pairs_S2 = np.array([(baseline[seed], setting[seed]) for seed in seeds])
    curves_R2 = curve.replicates[:, [0, 2]]
    lowest = pairs_S2.min()
    usable_R2 = curves_R2[(curves_R2[:, 0] < lowest) & (curves_R2[:, 1] > 0)]
    if curve.L_inf >= lowest or len(usable_R2) < (1 - MOST_ABOVE) * len(curves_R2):
        reason = f"the curve's L_inf {curve.L_inf:.4g} is not shown to lie below the loss {lowest:.4g}"
        return Speedup(multiplier=None, n_pairs=len(seeds), reason=reason)
    log_S = _log_multiplier(pairs_S2, curve.L_inf, curve.alpha)
    log_R = np.array([_log_multiplier(pairs_S2, L_inf, alpha).mean() for L_inf, alpha in usable_R2])
    multiplier = math.exp(log_S.mean())
    if curve.student_intervals["L_inf"][0] is None:
        lo, hi = np.exp(np.quantile(log_R, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)))
        reason = "L_inf is not identified: the range over the curves that the points allow"
        return Speedup(multiplier=multiplier, lo=lo, hi=hi, is_range=True, n_pairs=len(seeds), reason=reason)
    if len(seeds) < 2:
        return Speedup(multiplier=multiplier, n_pairs=1, reason="one seed: no interval")
    of_seeds, of_curve = log_S.var(ddof=1) / len(seeds), log_R.var(ddof=1)
    total = of_seeds + of_curve
    df = (len(seeds) - 1) * (total / of_seeds) ** 2 if of_seeds > 0 else 1e6  # Satterthwaite; the curve's has many
    half = float(stdtrit(df, (1 + LEVEL) / 2)) * math.sqrt(total)
    return Speedup(
        multiplier=multiplier,
        lo=math.exp(log_S.mean() - half),
        hi=math.exp(log_S.mean() + half),
        n_pairs=len(seeds),
    )


def _log_multiplier(pairs_S2: np.ndarray, L_inf: float, alpha: float) -> np.ndarray:
    """Of each pair (baseline, setting), (S,)."""
    base_S, setting_S = (pairs_S2 - L_inf).T
    return np.log(base_S / setting_S) / alpha
