"""The verdict on an effect: one rule, in `verdict_of`. The effects of a family are judged together (`judged`).

The family: the settings that are compared with one baseline at one depth. Dunnett's test, step-down: effects that share
a baseline are correlated, r_ij = l_i l_j with l_i^2 = var(baseline) / var(effect i), so that with z_i = the normal
quantile of p_i

    P(a p_j of the remaining <= p_i) = 1 - int phi(x) prod_j [Phi((z_i - l_j x) / m_j) - Phi((-z_i - l_j x) / m_j)] dx

with m_j^2 = 1 - l_j^2 (Dunnett 1955; step-down: Naik 1975). With l = 0 this is Holm's correction in Sidak's form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import ndtr, ndtri, stdtr

from sparsedepth.quantities.levels import ALPHA, POWER
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.effects import at_lrs, beyond, more_diverged

BISECTIONS = 14
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(41)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True)
class Distribution:
    """What the runs say of one number: a mixture of Student's distributions (normal ones: df of inf)."""

    mean_G: np.ndarray
    sd_G: np.ndarray
    df_G: np.ndarray
    weight_G: np.ndarray
    seeds_share: float
    """The part of the variance that seeds alone explain; the rest is the choice of lr."""

    @classmethod
    def mean_of(cls, parts: "Sequence[Distribution]") -> "Distribution":
        """Of the mean of numbers of one fit that move together, weighted by their precision: its standard deviation is
        the mean of theirs."""
        weights = [1 / part.sd**2 for part in parts]
        means = (
            np.average([getattr(part, name) for part in parts], axis=0, weights=weights)
            for name in ("mean_G", "sd_G", "df_G")
        )
        return cls(*means, parts[0].weight_G, seeds_share=1.0)

    def widened(self, sd: float) -> "Distribution":
        """With an independent error of this standard deviation; the degrees of freedom stay, which is cautious."""
        share = self.seeds_share * self.sd**2 / (self.sd**2 + sd**2)
        return replace(self, sd_G=np.hypot(self.sd_G, sd), seeds_share=share)

    def below(self, x_X: np.ndarray) -> np.ndarray:
        """The probability of less than each x."""
        z_XG = (x_X[:, None] - self.mean_G) / self.sd_G
        return (ndtr(z_XG) if np.isinf(self.df_G[0]) else stdtr(self.df_G, z_XG)) @ self.weight_G

    @property
    def estimate(self) -> float:
        return float(self.weight_G @ self.mean_G)

    @property
    def sd(self) -> float:
        spread_G = self.sd_G**2 + (self.mean_G - self.estimate) ** 2
        return float(np.sqrt(self.weight_G @ spread_G))

    @property
    def p(self) -> float:
        """Two-sided."""
        (low,) = self.below(np.zeros(1)).tolist()
        return 2 * min(low, 1 - low)

    @property
    def df(self) -> float:
        """Typical degrees of freedom."""
        return float(self.weight_G @ np.minimum(self.df_G, 200.0))

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95% interval."""
        lo, hi = self.quantiles([ALPHA / 2, 1 - ALPHA / 2])
        return lo, hi

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """By bisection and a secant, to 1e-7 standard errors."""
        share_K, half = np.array(shares), 8 * (self.weight_G @ self.sd_G)
        low_K = high_K = np.full(len(share_K), self.estimate)
        while (self.below(low_K) >= share_K).any() or (self.below(high_K) <= share_K).any():
            low_K, high_K, half = low_K - half, high_K + half, 4 * half
        for _ in range(BISECTIONS):
            middle_K = (low_K + high_K) / 2
            is_low_K = self.below(middle_K) < share_K
            low_K, high_K = np.where(is_low_K, middle_K, low_K), np.where(is_low_K, high_K, middle_K)
        below_K, above_K = self.below(low_K), self.below(high_K)
        return (low_K + (high_K - low_K) * (share_K - below_K) / (above_K - below_K)).tolist()


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is known of one side of an effect, beside its value."""

    name: str
    """'the setting' or 'the baseline'."""
    edge: str = ""
    """'lr 0.003 is the lowest', of a chosen value that is the lowest or highest tried."""
    outside: float = 0.0
    """The probability that the optimum lies beyond the values tried."""
    diverged: int = 0


@dataclass(kw_only=True)
class Row:
    """A row of the frame `effects` in the making."""

    fields: Named
    contrast: Distribution | None = None
    """None where there is no interval."""
    own: Distribution | None = None
    """The contrast with each side at its own lr, beside one at equal lr."""
    level: float = ALPHA
    """The p of a single effect below which its family is significant."""
    shared: float = 0.0
    """The baseline's share of the effect's variance."""
    sides: tuple[Side, Side] | None = None
    ends: list[Distribution] = field(default_factory=list)
    """At the lr of the baseline and of the setting, where the effect is at equal lr; one where these are the same."""
    ends_at: list[str] = field(default_factory=list)
    """'lr 0.003', of each of `ends`."""
    unit: str = ""
    sign: int = -1
    """1 where a higher outcome is better."""


def judged(rows: list[Row]) -> list[Row]:
    """The same rows, a family, with adjusted p-values and verdicts."""
    with_contrast = [(row, row.contrast) for row in rows if row.contrast is not None]
    if not with_contrast:
        return rows
    shared_J = np.array([row.shared for row, _ in with_contrast])
    # At equal lr an effect is shown if it is so on the whole and at each side's lr: the largest p is that of all.
    ends_J = [[*row.ends, contrast] for row, contrast in with_contrast]
    p_J = np.array([max(end.p for end in ends) for ends in ends_J])
    least_J = np.array([min(1.0, len(ends) * min(end.p for end in ends)) for ends in ends_J])
    adjusted_J, level = adjusted(p_J, shared_J), level_of(shared_J)
    shown_J = adjusted(least_J, shared_J) < ALPHA
    for (row, contrast), ends, p, adjusted_p, is_shown in zip(
        with_contrast, ends_J, p_J, adjusted_J.tolist(), shown_J, strict=True
    ):
        row.level = level
        verdict, reason = verdict_of(contrast.estimate, adjusted_p, row.sides, row.sign)
        differ = len({*np.sign([end.estimate for end in ends])}) > 1
        if row.ends and is_shown and (differ or not adjusted_p < ALPHA):
            verdict, reason = "lr decides", at_lrs([end.estimate for end in row.ends], row.ends_at, row.unit)
        row.fields |= {"estimate": contrast.estimate, "df": contrast.df, "p": p, "p_adjusted": adjusted_p}
        row.fields |= {"verdict": verdict, "reason": reason}
    return rows


def with_intervals(rows: Sequence[Row]) -> list[Named]:
    """The fields of judged rows, with their intervals and the effects that would have been seen."""
    for row in rows:
        if row.own is not None:
            row.fields["lo_own_lr"], row.fields["hi_own_lr"] = row.own.interval
        if row.contrast is not None:
            lo, hi, detectable = interval_and_detectable(row.contrast, row.level)
            if row.ends:
                detectable = max(detectable, *(interval_and_detectable(end, row.level)[2] for end in row.ends))
            row.fields |= {"lo": lo, "hi": hi, "detectable": detectable}
            row.fields["seeds_part"] = (hi - lo) / 2 * math.sqrt(row.contrast.seeds_share)
            row.fields["lr_part"] = (hi - lo) / 2 * math.sqrt(1 - row.contrast.seeds_share)
    return [row.fields for row in rows]


def interval_and_detectable(contrast: Distribution, level: float) -> tuple[float, float, float]:
    """The ends of the 95% interval, and the effect that would have been seen with probability POWER at this level of a
    single effect."""
    shares = [ALPHA / 2, 1 - ALPHA / 2, level / 2, 1 - level / 2, 1 - POWER, POWER]
    lo, hi, low, high, below, above = contrast.quantiles(shares)
    return lo, hi, (high - low + above - below) / 2


def verdict_of(estimate: float, p: float, sides: tuple[Side, Side] | None, sign: int = -1) -> tuple[str, str]:
    """The verdict and the reason, from the adjusted p. `sides`: the setting and the baseline. `sign`: 1 where a higher
    outcome is better."""
    if not p < ALPHA:
        return "not shown", ""
    if sides and (reason := withheld(estimate, sides, sign)):
        return "not shown", reason
    return ("lower" if estimate < 0 else "higher"), ""


def withheld(estimate: float, sides: tuple[Side, Side], sign: int = -1) -> str:
    """Why a difference of this sign is not shown, whatever its p: the losing side may have lost for its lr alone, or
    more runs of the winning one diverged; '' without a reason."""
    winner, loser = sides if estimate * sign > 0 else sides[::-1]
    if loser.edge or loser.outside > 0.5:
        return beyond(loser)
    return more_diverged(winner, loser) if winner.diverged > loser.diverged + 1 else ""


def adjusted(p_J: np.ndarray, shared_J: np.ndarray) -> np.ndarray:
    """The adjusted p-values of a family. `shared_J`: l_j^2, the baseline's share of each effect's variance."""
    shared_L, level_J, n_L = np.unique(shared_J, return_inverse=True, return_counts=True)
    adjusted_J = np.ones(len(p_J))
    least = 0.0
    for j in np.argsort(p_J, kind="stable"):
        least = max(least, _chance(p_J[j], shared_L, n_L))
        adjusted_J[j] = least
        n_L[level_J[j]] -= 1  # those that remain
    return adjusted_J


def level_of(shared_J: np.ndarray) -> float:
    """The p of a single effect below which a family of this size is significant."""
    low, high = ALPHA / len(shared_J), ALPHA
    levels = np.unique(shared_J, return_counts=True)
    for _ in range(24 if len(shared_J) > 1 else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if _chance(middle, *levels) > ALPHA else (middle, high)
    return high


def _chance(p: float, shared_L: np.ndarray, n_L: np.ndarray) -> float:
    """The probability that the least of p-values is at most p, without any effect; `n_L`: how many have each share."""
    n = n_L.sum()
    if n == 1:
        return p
    if p < 1e-8:  # beyond what the quadrature resolves
        return min(p * n, 1.0)
    z = -ndtri(p / 2)
    load_L = np.sqrt(shared_L)
    rest_L = np.sqrt(1 - np.minimum(shared_L, 0.999))
    upper_LX, lower_LX = (ndtr((side - load_L[:, None] * _NODES) / rest_L[:, None]) for side in (z, -z))
    inside_LX = (upper_LX - lower_LX) ** n_L[:, None]
    return np.clip(1 - inside_LX.prod(axis=0) @ _WEIGHTS, p, min(p * n, 1.0))
