"""The regime of the models: do layers compose, follow one smooth path, or average the same small step?

2602.05970 distinguishes them by how the layers act on the residual stream as depth L grows. Runs that differ in depth
and seed alone are a *family*, with a verdict of its own, from these signatures (SIGNATURES has the thresholds):

    turn    b of  mean middle angle ~ L^-b, by least squares of ln angle on ln L over runs, seeds as replicates;
            Student's 95% interval, by how far depths lie off the line (`intervals.scatter`)
    early   the same for layers 2 to half the shallowest depth, which every depth has
    update  angle of neighbouring updates at the deepest depth: across (near pi/2) or aligned (near 0)
    even    share of tokens whose angles are spread evenly over the middle layers, at the deepest depth
    stop    share of tokens whose angles have the shape of an early stop, at the deepest depth
    loss    a of  loss = E + c L^-a  (`depth_slope`)

    verdict             turn           early          update   even  stop  loss
    compositional       does not fall  any            any      any   any   any             more layers, more work
      or                any            does not fall  any      any   most  any             some work, the rest idles
    procedural          as 1/L         falls, or ?    aligned  most  any   steeper, or ?   one path in smaller steps
    ensemble averaging  as 1/L         falls, or ?    across   most  any   as 1/L, or ?    the same step, averaged

A mean angle that falls as 1/L may come from layers that each do less, or from the same few layers and more idle ones:
`early`, `even` and `stop` distinguish these. '?': unclear or unknown is accepted, since few sweeps identify the loss's
exponent (1 for averaging, 3 for a converged smooth path). Any other combination is undecided, and a signature whose
interval crosses its threshold is unclear. The intervals of update, even and stop are hulls of the deepest runs' own
bootstrap intervals: all of these runs must be on the same side. So are those of turn, early and loss over all families,
hulls of the families' own: each may have its own exponent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from sparsedepth.effects.depth_slope import DepthExponent, depth_slope
from sparsedepth.effects.intervals import scatter
from sparsedepth.effects.knobs import design_of, plain
from sparsedepth.effects.pairs import values_of
from sparsedepth.store.tuning_roles import result_rows

Regime = Literal["compositional", "procedural", "ensemble averaging", "undecided"]
Signature = Literal["turn", "early", "update", "even", "stop", "loss"]

ANGLE = "angular_distance_middle"
UNCLEAR = "unclear"
UNKNOWN = "unknown"

_FALL = {"does not fall": (-math.inf, 0.5), "falls as 1/depth": (0.5, 1.5), "falls faster": (1.5, math.inf)}
_SHARE = {"few": (0.0, 0.5), "most": (0.5, 1.0)}
SIGNATURES: dict[Signature, dict[str, tuple[float, float]]] = {
    "turn": _FALL,
    "early": _FALL,
    "update": {"aligned": (0.0, math.pi / 4), "across": (math.pi / 3, math.pi)},
    "even": _SHARE,
    "stop": _SHARE,
    "loss": {"near 1/depth": (0.0, 2.0), "steeper": (2.0, math.inf)},
}
"""Reading of a signature -> the range that must hold its whole interval. Thresholds are halfway between the regimes'
predictions: b is 0 or 1, a is 1 or 3; a share is below or above half; cos(update angle) above 0.7 or below half."""

REQUIREMENTS: dict[Signature, str] = {
    "turn": "needs two depths with 'geometry'",
    "early": "needs the layers of two depths with 'geometry'",
    "update": "needs 'geometry' in every run of the deepest depth",
    "even": "needs 'trajectories' in every run of the deepest depth",
    "stop": "needs 'trajectories' in every run of the deepest depth",
    "loss": "needs four depths, and a loss that bends",
}
"""Signature -> what it needs; printed where it is unknown."""

_EACH_LESS: dict[Signature, tuple[str, ...]] = {
    "turn": ("falls as 1/depth",),
    "early": ("falls as 1/depth", "falls faster", UNCLEAR, UNKNOWN),
    "even": ("most",),
}
RULES: tuple[tuple[Regime, dict[Signature, tuple[str, ...]]], ...] = (
    ("compositional", {"turn": ("does not fall",)}),
    ("compositional", {"early": ("does not fall",), "stop": ("most",)}),
    ("procedural", {**_EACH_LESS, "update": ("aligned",), "loss": ("steeper", UNCLEAR, UNKNOWN)}),
    ("ensemble averaging", {**_EACH_LESS, "update": ("across",), "loss": ("near 1/depth", UNCLEAR, UNKNOWN)}),
)
"""Verdict -> the readings that it requires; other signatures may have any."""


@dataclass(frozen=True, kw_only=True)
class SignatureReading:
    signature: Signature
    meaning: str
    value: float | None
    lo: float | None
    hi: float | None
    reading: str
    """One of the signature's readings in SIGNATURES, 'unclear' or 'unknown'."""


@dataclass(frozen=True, kw_only=True)
class TurnLaw:
    """ln angle = intercept - b ln L."""

    b: float
    lo: float | None
    hi: float | None
    """95% interval of b; None without a degree of freedom."""
    intercept: float

    def __call__(self, depth: np.ndarray) -> np.ndarray:
        """The fitted angle, rad."""
        return np.exp(self.intercept) * depth**-self.b


@dataclass(frozen=True, kw_only=True)
class FamilyRegime:
    """The verdict on the runs that differ in depth and seed alone, or on all of them."""

    family: str
    verdict: Regime
    evidence: tuple[SignatureReading, ...]
    depths: tuple[int, ...]
    n_runs: int
    run_ids: tuple[str, ...]


def regimes(runs: pd.DataFrame, layers: pd.DataFrame | None = None) -> list[FamilyRegime]:
    """A verdict per family with two depths, and one on all together if there are several.
    `runs`: rows of that view; `layers`: those with metric 'angular_distance' (columns run_id, layer, value). Models
    that were only measured belong to no family."""
    finished = angles_by_depth(runs)
    families = [_verdict(str(name), members, layers) for name, members in finished.groupby("family", sort=False)]
    return families if len(families) < 2 else [*families, _verdict("all families", finished, layers)]


def angles_by_depth(runs: pd.DataFrame) -> pd.DataFrame:
    """The finished runs of every family with two depths, with a column `family` ('all runs' if there is but one)."""
    results = result_rows(runs)
    fields = [name for name in design_of(results).beside_depth if name != "seed"]
    results = results.copy()  # defragments the store's frame
    results["family"] = _names(results, fields)
    finished = results[results["outcome"] == "ok"]
    n_depths = finished.groupby("family")["n_layers"].transform("nunique")
    return finished[n_depths >= 2].astype({"n_layers": int})


def turn_law(runs: pd.DataFrame, angle: pd.Series | None = None) -> TurnLaw | None:
    """The fit over a family's rows of `angles_by_depth` with an angle above 0; None without two depths. `angle`: of
    each row, by default the mean middle angle."""
    angle = values_of(runs, ANGLE) if angle is None else angle
    runs, angle = runs[angle > 0], angle[angle > 0]
    depth_N = runs["n_layers"].to_numpy(float)
    n, n_depths = len(runs), len(set(depth_N))
    if n_depths < 2:
        return None
    x, y = np.log(depth_N), np.log(angle.to_numpy(float))
    sxx = float(((x - x.mean()) ** 2).sum())
    slope = float((x - x.mean()) @ y) / sxx
    intercept, half = float(y.mean() - slope * x.mean()), None
    if n > 2:
        variance, df = scatter(y - intercept - slope * x, depth_N, n - 2, n_depths - 2)
        half = float(stdtrit(df, 0.975)) * math.sqrt(variance / sxx)
    return TurnLaw(
        b=-slope,
        lo=None if half is None else -slope - half,
        hi=None if half is None else -slope + half,
        intercept=intercept,
    )


def _verdict(family: str, runs: pd.DataFrame, layers: pd.DataFrame | None) -> FamilyRegime:
    shallowest, depth = int(runs["n_layers"].min()), int(runs["n_layers"].max())
    deepest = runs[runs["n_layers"] == depth]
    last_early = max(2, shallowest // 2)
    families = [members for _, members in runs.groupby("family", sort=False)]
    turn = [turn_law(each) for each in families]
    early = [None if layers is None else turn_law(each, _early_angle(each, layers, last_early)) for each in families]
    slopes = [depth_slope(each) for each in families]
    loss = [slope.exponent if slope else None for slope in slopes]
    evidence = (
        _reading("turn", "b of mean middle angle ~ n_layers^-b", _exponent(turn)),
        _reading("early", f"b of mean angle of layers 2 to {last_early} ~ n_layers^-b", _exponent(early)),
        _reading(
            "update", f"angle of neighbouring updates at n_layers={depth} (rad)", _bounds(deepest, "update_angle")
        ),
        _reading("even", f"share of tokens that turn evenly at n_layers={depth}", _bounds(deepest, "even_share")),
        _reading("stop", f"share of tokens that stop early at n_layers={depth}", _bounds(deepest, "early_stop_share")),
        _reading("loss", "a of val_loss = E + c n_layers^-a", _exponent(loss)),
    )
    return FamilyRegime(
        family=family,
        verdict=decide({each.signature: each.reading for each in evidence}),
        evidence=evidence,
        depths=tuple(sorted(set(map(int, runs["n_layers"])))),
        n_runs=len(runs),
        run_ids=tuple(sorted(runs["run_id"])),
    )


def decide(readings: dict[Signature, str]) -> Regime:
    """The regime whose rules the readings meet; undecided for none or two."""
    regimes = {regime for regime, rule in RULES if all(readings[name] in allowed for name, allowed in rule.items())}
    return regimes.pop() if len(regimes) == 1 else "undecided"


def _early_angle(runs: pd.DataFrame, layers: pd.DataFrame, last: int) -> pd.Series:
    """Mean angle of layers 2 to `last` of each run, rad; NaN where one is missing."""
    rows = layers[layers["layer"].between(2, last)].dropna(subset=["value"])
    by_run = rows.groupby("run_id")["value"].agg(["mean", "count"])
    return runs["run_id"].map(by_run["mean"].where(by_run["count"] == last - 1)).astype(float)


Interval = tuple[float | None, float | None, float | None]
"""Value, lo, hi."""


def _exponent(by_family: Sequence[TurnLaw | DepthExponent | None]) -> Interval:
    laws = [law for law in by_family if law is not None]
    ends = [[law.b if isinstance(law, TurnLaw) else law.value, law.lo, law.hi] for law in laws]
    return _hull(pd.DataFrame(ends if len(ends) == len(by_family) else [[None] * 3], dtype=float))


def _reading(signature: Signature, meaning: str, interval: Interval) -> SignatureReading:
    value, lo, hi = interval
    reading = UNKNOWN if value is None else UNCLEAR
    if lo is not None and hi is not None:
        inside = [name for name, (low, high) in SIGNATURES[signature].items() if low <= lo and hi <= high]
        reading = inside[0] if inside else UNCLEAR
    return SignatureReading(signature=signature, meaning=meaning, value=value, lo=lo, hi=hi, reading=reading)


def _bounds(runs: pd.DataFrame, name: str) -> Interval:
    ends = [pd.to_numeric(runs[f"{name}{end}"], errors="coerce") for end in ("", "_lo", "_hi")]
    return _hull(pd.concat(ends, axis=1))


def _hull(intervals: pd.DataFrame) -> Interval:
    """Mean of the values, and the smallest interval that holds all (a row each: value, lo, hi); None unless all have
    one."""
    is_missing = intervals.isna().any().to_numpy()
    if is_missing[0]:
        return None, None, None
    value, lo, hi = intervals.iloc[:, 0].mean(), intervals.iloc[:, 1].min(), intervals.iloc[:, 2].max()
    return (float(value), None, None) if is_missing.any() else (float(value), float(lo), float(hi))


def _names(runs: pd.DataFrame, fields: Sequence[str]) -> pd.Series:
    """'depth_scale=lns, n_kv_heads=1' of each run; 'all runs' where no field varies."""
    columns = [[f"{name}={plain(value)}" for value in runs[name]] for name in fields]
    rows = [", ".join(row) for row in zip(*columns, strict=True)] if columns else ["all runs"] * len(runs)
    return pd.Series(rows, index=runs.index, dtype=object)


# Sentences


def regime_lines(family: FamilyRegime) -> list[str]:
    """The verdict, and a line per piece of evidence."""
    depths = ", ".join(map(str, family.depths))
    lines = [f"{family.family}: {family.verdict} ({family.n_runs} runs, n_layers {depths})"]
    return lines + [f"  {each.signature} {each.reading}: {each.meaning}: {_value(each)}" for each in family.evidence]


def _value(signature: SignatureReading) -> str:
    if signature.value is None:
        return REQUIREMENTS[signature.signature]
    if signature.lo is None or signature.hi is None:
        return f"{signature.value:.3g} (too few for an interval)"
    return f"{signature.value:.3g} (95% interval {signature.lo:.3g} to {signature.hi:.3g})"
