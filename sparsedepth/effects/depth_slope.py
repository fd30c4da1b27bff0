"""Does a knob change how an outcome depends on depth? Slopes and exponents by setting, paired by seed.

A *line* is a set of runs that differ in n_layers alone (with the fields that it determines), with one seed. Two lines
are a pair if they differ in one knob's setting; both are restricted to the depths that they share, and at which they
agree in tokens, parameters or FLOPs.

    slope    = least-squares slope of the outcome over log2 n_layers: its unit per doubling of depth
    effect   = mean over seeds of slope(setting) - slope(baseline), each the mean over the seed's pairs; 95% interval:
               Student's over seeds, moderated in a family (see `intervals`)
    floor    = t(2 (S - 1), 0.975) noise sqrt(2 / S):  seed noise, `noise` that of a seed's mean slope

The exponent a of  outcome = E_line + c n_layers^-a  (c and a common to a setting's lines, c > 0) is given where four or
more depths identify it: where the profile S(a) <= S_min + t^2 s^2 is bounded on both sides inside A_RANGE, s^2 by how
far depths lie off the curve (`intervals.scatter`). Loss against depth bends little, so few depths rarely identify it.
Lines of several *families* (all but seed and depth alike) may have exponents of their own: the interval then also holds
that of the jackknife of ln a over families, and two families have none. The difference of two exponents has the
jackknife's interval over seeds. Pseudo-values: n d - (n - 1) d_without_i (Tukey, 1958).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.optimize import brentq, minimize_scalar
from scipy.special import stdtrit

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.cells import unit_of
from sparsedepth.effects.contrast import effect_fields, noise_and_floor
from sparsedepth.effects.intervals import MIN_VALUES, Estimate, Judged, estimate, scatter
from sparsedepth.effects.knobs import Knob, design_of, keys, labels
from sparsedepth.effects.pairs import BASES, MATCH_TOLERANCE, average_duplicates, columns_of_side, rounding_sd
from sparsedepth.effects.seed_means import seed_means
from sparsedepth.effects.sentences import (
    detectable_text,
    df_text,
    estimate_text,
    floor_text,
    holm_text,
    number_text,
    verdict_text,
)
from sparsedepth.effects.tuning_error import tuning_of
from sparsedepth.store.tuning_roles import result_rows

MIN_DEPTHS = 4
"""c, a and E fit any three depths exactly."""
A_RANGE = (0.05, 10.0)
"""Below, the curve is logarithmic; above, all depths but the shallowest are equal."""


@dataclass(frozen=True, kw_only=True)
class DepthExponent:
    """a of E + c n_layers^-a; `lo` and `hi` bound its 95% profile interval."""

    value: float
    lo: float
    hi: float


@dataclass(frozen=True, kw_only=True)
class DepthSlope:
    """The slope of an outcome in depth at one setting."""

    setting: str
    slope: Estimate
    """Over lines, per doubling of n_layers."""
    exponent: DepthExponent | None
    depths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SlopeContrast(Judged):
    """A setting's slope in depth minus the baseline's (`effect`), over pairs of lines."""

    knob: str
    outcome: str
    at_setting: DepthSlope
    at_baseline: DepthSlope
    exponent_difference: Estimate | None
    """None unless both exponents are identified, also without each seed in turn."""
    n_seeds: int
    n_diverged: int
    """Diverged runs of these lines: their depths are missing from the slopes."""
    run_ids: tuple[str, ...]


def depth_slopes(runs: pd.DataFrame, knob: Knob, outcome: str = "val_loss") -> list[SlopeContrast]:
    """Every setting of a knob against its baseline, from the rows of `runs`; settings without a pair are absent.

    Raises ValueError for an outcome that is no number of `runs`.
    """
    lines = _lines(runs, knob, outcome)
    baseline = lines[lines["setting"] == knob.baseline]
    slopes = []
    for setting in list(knob.settings)[1:]:
        of_setting = lines[lines["setting"] == setting]
        pairs = of_setting.merge(baseline, on=["match", "n_layers"], suffixes=("", "_baseline"))
        pairs = pairs[_match_on_a_basis(pairs)]
        usable = pairs.dropna(subset=["value", "value_baseline"])
        usable = usable[usable.groupby("match")["n_layers"].transform("nunique") >= 2]
        if len(usable):
            diverged = int(pairs["diverged"].sum() + pairs["diverged_baseline"].sum())
            slopes.append(_contrast(knob, outcome, setting, usable, diverged))
    return slopes


def depth_slope(runs: pd.DataFrame, outcome: str = "val_loss") -> DepthSlope | None:
    """The slope over all lines of `runs`, of any setting; None where no line has two depths."""
    lines = _lines(runs, None, outcome).dropna(subset=["value"])
    lines = lines[lines.groupby("match")["n_layers"].transform("nunique") >= 2]
    return _slope("all runs", lines, "value") if len(lines) else None


def _lines(runs: pd.DataFrame, knob: Knob | None, outcome: str) -> pd.DataFrame:
    """One row per run: `columns_of_side`, BASES, setting, unit, match (key of the line without its setting), family
    (the same without the seed)."""
    runs = result_rows(runs)
    match = [name for name in design_of(runs).beside_depth if knob is None or name not in knob.fields]
    lines = pd.DataFrame(
        {
            "setting": labels(runs, knob) if knob else "",
            "unit": unit_of(outcome, runs),
            "match": keys(runs, match),
            "family": keys(runs, [name for name in match if name != "seed"]),
            **columns_of_side(runs, outcome),
            **{name: pd.to_numeric(runs[column], errors="coerce").astype(float) for name, column in BASES.items()},
        }
    )
    return average_duplicates(lines, ["setting", "match", "n_layers"])


def _match_on_a_basis(pairs: pd.DataFrame) -> pd.Series:
    """Whether each pair agrees on any of BASES; another task with another budget agrees on none."""
    gaps = pd.DataFrame({name: (pairs[name] / pairs[f"{name}_baseline"] - 1).abs() for name in BASES})
    return (gaps <= MATCH_TOLERANCE).any(axis=1)


def _contrast(knob: Knob, outcome: str, setting: str, pairs: pd.DataFrame, n_diverged: int) -> SlopeContrast:
    slopes = _line_slopes(pairs, ["value", "value_baseline"]).reset_index()
    family = slopes["match"].map(pairs.drop_duplicates("match").set_index("match")["family"])
    means = seed_means(slopes[["value", "value_baseline"]], slopes["seed"], family)
    difference = means.by_seed["value"] - means.by_seed["value_baseline"]
    weights = slope_weights(pairs, means.weights.set_axis(slopes["match"]))
    at_setting = _slope(setting, pairs, "value")
    at_baseline = _slope(knob.baseline, pairs, "value_baseline")
    is_identified = at_setting.exponent and at_baseline.exponent
    least_sd = _rounding_sd(outcome, pairs)
    noise, floor = noise_and_floor(means.by_seed, least_sd, means.df)
    return SlopeContrast(
        knob=knob.name,
        outcome=outcome,
        unit=f"{pairs['unit'].iloc[0]} per doubling of n_layers",
        at_setting=at_setting,
        at_baseline=at_baseline,
        **effect_fields(difference, len(slopes), least_sd, tuning_of(pairs, weights), means.df),
        noise=noise,
        floor=floor,
        exponent_difference=_exponent_difference(pairs) if is_identified else None,
        n_seeds=len(means.by_seed),
        n_diverged=n_diverged,
        run_ids=tuple(sorted({*pairs["run_id"], *pairs["run_id_baseline"]})),
    )


def _slope(setting: str, lines: pd.DataFrame, column: str) -> DepthSlope:
    slopes = _line_slopes(lines, [column])[column]
    return DepthSlope(
        setting=setting,
        slope=replace(estimate(slopes.groupby("seed").mean().to_numpy()), n=len(slopes)),
        exponent=_exponent_over_families(lines, column),
        depths=tuple(sorted(set(map(int, lines["n_layers"])))),
    )


def _line_slopes(lines: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The slope of each line, by seed and match."""
    weighted = lines[columns].astype(float).mul(_weights_in_line(lines), axis=0)
    return weighted.groupby([lines["seed"], lines["match"]]).sum()


def _weights_in_line(lines: pd.DataFrame) -> pd.Series:
    """The weight of each row in the slope of its line."""
    x_N, line = np.log2(lines["n_layers"].astype(float)), [lines["seed"], lines["match"]]
    x_N = x_N - x_N.groupby(line).transform("mean")
    return x_N / (x_N**2).groupby(line).transform("sum")


def slope_weights(pairs: pd.DataFrame, weight_of_line: pd.Series) -> pd.Series:
    """The weight of each pair in a mean slope, from the weight of each line's slope by match."""
    return _weights_in_line(pairs) * pairs["match"].map(weight_of_line)


def _rounding_sd(outcome: str, pairs: pd.DataFrame) -> float:
    """Standard deviation of the slopes' difference by rounding alone (`pairs.rounding_sd`), of the worst line."""
    steps = pairs["n_layers"].map(lambda depth: rounding_sd(outcome, depth, depth))
    return math.sqrt(((_weights_in_line(pairs) * steps) ** 2).groupby([pairs["seed"], pairs["match"]]).sum().max())


# Exponents


def _exponent_over_families(lines: pd.DataFrame, column: str) -> DepthExponent | None:
    """The exponent of lines, its interval the hull of the profile's and the jackknife's over families."""
    families, whole = lines["family"].unique(), _exponent(lines, column)
    if whole is None or len(families) == 1:
        return whole
    without = [_exponent(lines[lines["family"] != family], column) for family in families]
    n, logs = len(families), [math.log(exponent.value) for exponent in without if exponent is not None]
    spread = estimate([n * math.log(whole.value) - (n - 1) * log_a for log_a in logs])
    if len(logs) < n or spread.lo is None or spread.hi is None:
        return None
    half = (spread.hi - spread.lo) / 2
    lo, hi = (whole.value * math.exp(sign * half) for sign in (-1, 1))
    return DepthExponent(value=whole.value, lo=min(lo, whole.lo), hi=max(hi, whole.hi))


def _exponent(lines: pd.DataFrame, column: str) -> DepthExponent | None:
    """The exponent of lines with common c and a, each with its own E; None where they do not identify it."""
    n_free = lines["match"].nunique() + 2
    if lines["n_layers"].nunique() < MIN_DEPTHS or len(lines) <= n_free:
        return None
    depth_N, line_N = lines["n_layers"].to_numpy(dtype=float), pd.factorize(lines["match"])[0]
    counts = np.bincount(line_N)

    def centred(values_N: np.ndarray) -> np.ndarray:
        return values_N - (np.bincount(line_N, values_N) / counts)[line_N]

    y_N = centred(lines[column].to_numpy(dtype=float))

    def residuals(log_a: float) -> np.ndarray:
        """By least squares over E and c >= 0 at one exponent."""
        x_N = centred((depth_N / depth_N.min()) ** -math.exp(log_a))
        c = max(float(x_N @ y_N) / float(x_N @ x_N), 0.0)
        return y_N - c * x_N

    def cost(log_a: float) -> float:
        return float((residuals(log_a) ** 2).sum())

    grid_G = np.linspace(*np.log(A_RANGE), 60)
    cost_G = np.array([cost(log_a) for log_a in grid_G])
    best = int(cost_G.argmin())
    if not 0 < best < len(grid_G) - 1 or cost_G[best] >= float(y_N @ y_N):
        return None
    best_fit = minimize_scalar(
        cost, bounds=(grid_G[best - 1], grid_G[best + 1]), method="bounded", options={"xatol": 1e-9}
    )
    variance, df = scatter(residuals(best_fit.x), depth_N, len(lines) - n_free, lines["n_layers"].nunique() - 3)
    limit = max(cost(best_fit.x) + float(stdtrit(df, 0.975)) ** 2 * variance, 1e-20)
    lo, hi = (_crossing(cost, float(best_fit.x), edge, limit) for edge in (grid_G[0], grid_G[-1]))
    if lo is None or hi is None:
        return None
    return DepthExponent(value=math.exp(best_fit.x), lo=math.exp(lo), hi=math.exp(hi))


def _crossing(cost: Callable[[float], float], best: float, edge: float, limit: float) -> float | None:
    """ln a at which the cost passes the limit between the optimum and an edge of the range; None if it stays below."""
    if cost(edge) <= limit:
        return None
    return float(brentq(lambda log_a: cost(log_a) - limit, best, edge)) if cost(best) < limit else best


def _exponent_difference(pairs: pd.DataFrame) -> Estimate | None:
    def difference(rows: pd.DataFrame) -> float | None:
        setting, baseline = _exponent(rows, "value"), _exponent(rows, "value_baseline")
        return None if setting is None or baseline is None else setting.value - baseline.value

    seeds = sorted(set(pairs["seed"]))
    n, whole = len(seeds), difference(pairs)
    without = [difference(pairs[pairs["seed"] != seed]) for seed in seeds] if n >= MIN_VALUES else [None]
    if whole is None or any(value is None for value in without):
        return None
    return estimate([n * whole - (n - 1) * value for value in without if value is not None])


# Sentences


def slope_sentence(contrast: SlopeContrast) -> str:
    """'n_kv_heads=1 vs n_kv_heads=4: depth slope of val_loss not distinguishable: -0.02 nat/token per doubling ...'."""
    setting, baseline = contrast.at_setting, contrast.at_baseline
    parts = [
        f"{setting.setting} vs {baseline.setting}: depth slope of {contrast.outcome} {verdict_text(contrast)}: "
        f"{estimate_text(contrast.effect, contrast.unit)}{detectable_text(contrast)}",
        f"{counted(contrast.effect.n, 'pair')} of lines over n_layers {', '.join(map(str, setting.depths))}, "
        f"{counted(contrast.n_seeds, 'seed')}{df_text(contrast)}, {floor_text(contrast.floor, contrast.unit)}"
        f"{holm_text(contrast.p_holm)}",
        _both_sides("slope", number_text(setting.slope.mean), number_text(baseline.slope.mean)),
        _both_sides("exponent", exponent_text(setting), exponent_text(baseline)),
    ]
    if contrast.exponent_difference is not None:
        parts.append(f"difference of exponents {estimate_text(contrast.exponent_difference, '1')}")
    if contrast.verdict_blocked_by:
        parts.append(contrast.verdict_blocked_by)
    if contrast.n_diverged:
        parts.append(f"{counted(contrast.n_diverged, 'run')} diverged, excluded with the paired run")
    return "; ".join(parts)


def _both_sides(noun: str, setting: str, baseline: str) -> str:
    return f"{noun}: " + (f"both {setting}" if setting == baseline else f"setting {setting}, baseline {baseline}")


def exponent_text(slope: DepthSlope) -> str:
    """'1.2 (0.8 to 1.9)', or why there is none."""
    if slope.exponent is not None:
        return f"{slope.exponent.value:.2f} (95% interval {slope.exponent.lo:.2f} to {slope.exponent.hi:.2f})"
    n_depths = len(slope.depths)
    reason = f"{n_depths} depths, {MIN_DEPTHS} needed" if n_depths < MIN_DEPTHS else "no bounded interval"
    return f"not identified ({reason})"
