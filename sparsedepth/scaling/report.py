"""A fitted depth law as tables, text and JSON, with the reasons for which its parameters may be unreliable: the output
of `sparsedepth scaling`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.scaling.fit_law import CLUSTER, TAILS, Bootstrap, FittedLaw, Parameter
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.scaling import law_text, law_warnings

FEW_CLUSTERS = 20
"""With fewer, a cluster bootstrap's percentile intervals are too narrow (Cameron, Gelbach, Miller 2008)."""
FACTOR = 2.0
"""An exponent whose 95% interval spans more than this factor is weakly constrained."""
COLLINEAR = 0.9
"""Predictors whose logarithms correlate more than this trade against each other."""
CONDITION = 1e3
"""With a larger condition number of the Jacobian (columns of length 1), some combination of parameters is uncertain."""
STATIONARY = 1e-3
"""With a larger cosine between residual and Jacobian, the cost can still fall by more than its square."""
NEGLIGIBLE_PART = 1e-3
"""A term's contribution below this many nat/token, at the points' geometric mean, counts as 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """A fit with its checks; checks that were not requested are None."""

    source: str
    fit: FittedLaw
    n_excluded: int
    boot: Bootstrap | None
    of_source: tuple[str, ...] = ()
    """Warnings of the source, beside the fit's own."""

    @cached_property
    def doubts(self) -> "Doubts":
        return doubts(self.fit)

    def frame(self) -> pd.DataFrame:
        """A row for each parameter of the law."""
        return parameter_table(self).frame()


def parameter_table(report: Report) -> QueryResult:
    """One row per parameter; lo and hi are Student's interval from the Jacobian."""
    columns = ("name", "value", "stderr", "lo", "hi", "bootstrap_lo", "bootstrap_hi", "unit")
    intervals = report.boot.intervals if report.boot else {}
    rows = [
        (one.name, one.value, one.stderr, one.lo, one.hi, *intervals.get(one.name, (None, None)), one.unit)
        for one in report.fit.parameters.values()
    ]
    return QueryResult(columns=columns, rows=tuple(rows))


def law_points(fitted: FittedLaw) -> pd.DataFrame:
    """d_model, n_layers, num_tokens, loss, fitted, residual (of ln loss), and per term NAME_part (fitted) and NAME_rest
    (loss minus E and the other terms), in nat/token."""
    plan = fitted.plan
    log_N, by_NP = plan.at(fitted.theta)
    fitted_N = np.exp(log_N)
    points = fitted.points.assign(fitted=fitted_N, residual=plan.y - log_N)
    for number, term in enumerate(fitted.law.terms, 1):
        part_N = by_NP[:, number] * fitted_N  # d ln L / d g
        points[f"{term.name}_part"] = part_N
        points[f"{term.name}_rest"] = points["loss"] - fitted_N + part_N
    return points


def curve_of(fitted: FittedLaw, boot: Bootstrap | None, k: int) -> pd.DataFrame:
    """The k-th term over its column: the fitted one, and the bootstrap's 95% band lo, hi (NaN without one)."""
    term, own = fitted.law.terms[k], [1 + k, 1 + len(fitted.law.terms) + k]
    column_G = np.geomspace(*fitted.points[term.column].agg(["min", "max"]), 100)
    z_G = np.log(term.factor * column_G) - fitted.plan.centre[k]

    def part(theta: np.ndarray) -> np.ndarray:
        g, a = np.moveaxis(theta[..., own, None], -2, 0)
        return np.exp(g - a * z_G)

    lo, hi = np.quantile(part(boot.theta), TAILS, axis=0) if boot else np.full((2, len(z_G)), np.nan)
    return pd.DataFrame({term.column: column_G, "fitted": part(fitted.theta), "lo": lo, "hi": hi})


def as_object(report: Report) -> dict[str, Any]:
    """The report in JSON's types; a missing value is None."""
    fit, boot = report.fit, report.boot
    return {
        "law": law_text(fit.law),
        "units": {term.symbol: term.unit for term in fit.law.terms},
        "source": report.source,
        "n_points": fit.n_points,
        "n_clusters": len(fit.clusters.sizes) if fit.has_clusters else None,
        "n_excluded": report.n_excluded,
        "objective": fit.objective,
        "convergence": {
            "n_starts": fit.n_starts,
            "n_reached": fit.n_reached,
            "condition": fit.condition,
            "bootstrap_replicates": boot and len(boot.theta),
        },
        "parameters": parameter_table(report).records(),
        "log_correlations": [
            {"terms": list(names), "value": value} for names, value in report.doubts.correlations.items()
        ],
        "warnings": law_warnings(report),
    }


def log_correlations(fitted: FittedLaw) -> dict[tuple[str, str], float]:
    """(term, term) -> correlation of the logarithms of their predictors."""
    pairs = itertools.combinations(zip(fitted.law.terms, fitted.plan.z, strict=True), 2)
    return {(a.name, b.name): np.corrcoef(z_a, z_b)[0, 1] for (a, z_a), (b, z_b) in pairs}


class ParameterDoubt(NamedTuple):
    parameter: Parameter
    kind: Literal["not needed", "not identified", "near 0", "weak"]


@dataclass(frozen=True, kw_only=True)
class Doubts:
    """What limits the conclusions from a fit; None, or empty, where all is well."""

    n_clusters: int | None
    """Too few for a bootstrap."""
    n_shapes: int | None
    """Fewer than points that are taken as independent."""
    names_cluster: bool
    """Whether the shapes could name the clusters."""
    gradient: float | None
    condition: float | None
    correlations: dict[tuple[str, str], float]
    """`log_correlations`, of which those above `collinear_above` are a doubt."""
    parameters: tuple[ParameterDoubt, ...]
    few_clusters: int = FEW_CLUSTERS
    collinear_above: float = COLLINEAR
    condition_above: float = CONDITION
    factor: float = FACTOR


def doubts(fitted: FittedLaw) -> Doubts:
    """What limits a fit: few or shared clusters, a flat cost, terms that trade against each other, weak exponents."""
    n_clusters = len(fitted.clusters.sizes)
    predictors = [name for name in fitted.points.columns if name not in ("loss", "model_size", CLUSTER)]
    n_shapes = len(fitted.points.drop_duplicates(predictors))
    is_independent = not fitted.has_clusters or n_clusters == fitted.n_points
    return Doubts(
        n_clusters=n_clusters if fitted.has_clusters and n_clusters < FEW_CLUSTERS else None,
        n_shapes=n_shapes if is_independent and n_shapes < fitted.n_points else None,
        names_cluster={"d_model", "n_layers"} <= {*predictors},
        gradient=fitted.gradient if fitted.gradient > STATIONARY else None,
        condition=fitted.condition if fitted.condition > CONDITION else None,
        correlations=log_correlations(fitted),
        parameters=tuple(_parameter_doubts(fitted)),
    )


def _parameter_doubts(fitted: FittedLaw) -> Iterator[ParameterDoubt]:
    for one in fitted.parameters.values():
        if (one.name == "E" or one.name.endswith("_part")) and one.value < NEGLIGIBLE_PART:
            yield ParameterDoubt(one, "not needed")
        if not one.name.startswith("a_") or one.name in fitted.law.fixed:
            continue
        if one.lo is None or one.hi is None:
            yield ParameterDoubt(one, "not identified")
        elif one.lo <= 0:
            yield ParameterDoubt(one, "near 0")
        elif one.hi / one.lo > FACTOR:
            yield ParameterDoubt(one, "weak")
