"""A fitted depth law as tables, text and JSON, with the reasons for which its parameters may be unreliable: the output
of `sparsedepth scaling`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.scaling.fit_law import CLUSTER, Bootstrap, ClusterEffect, FittedLaw
from sparsedepth.scaling.law import contributions, fitted_loss
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.small_sample import LEVEL

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


@dataclass(frozen=True, kw_only=True)
class Report:
    """A fit with its checks; checks that were not requested are None."""

    source: str
    fit: FittedLaw
    n_excluded: int
    boot: Bootstrap | None
    of_source: tuple[str, ...] = ()
    """Warnings of the source, beside the fit's own."""

    @property
    def warnings(self) -> list[str]:
        return [*warnings(self.fit), *self.of_source]


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
    fitted_N = fitted_loss(fitted.theta, plan.z)
    points = fitted.points.assign(fitted=fitted_N, residual=plan.y - np.log(fitted_N))
    for term, part_N in zip(fitted.law.terms, contributions(fitted.theta, plan.z)[0], strict=True):
        points[f"{term.name}_part"] = part_N
        points[f"{term.name}_rest"] = points["loss"] - fitted_N + part_N
    return points


def curve_of(fitted: FittedLaw, boot: Bootstrap | None, k: int) -> pd.DataFrame:
    """The k-th term over its column: the fitted one, and the bootstrap's 95% band lo, hi (NaN without one)."""
    term, plan, n_terms = fitted.law.terms[k], fitted.plan, len(fitted.law.terms)
    column_G = np.geomspace(fitted.points[term.column].min(), fitted.points[term.column].max(), 100)
    z_G = np.log(term.factor * column_G) - plan.centre[k]

    def part(theta: np.ndarray) -> np.ndarray:
        return np.exp(theta[..., k, None] - theta[..., n_terms + k, None] * z_G)

    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    lo, hi = np.quantile(part(boot.theta), tails, axis=0) if boot else np.full((2, len(z_G)), np.nan)
    return pd.DataFrame({term.column: column_G, "fitted": part(fitted.theta), "lo": lo, "hi": hi})


def heading(report: Report) -> list[str]:
    """A line each for law, points, clusters and optimum."""
    fit = report.fit
    excluded = f" ({report.n_excluded} highest losses and their ties excluded)" if report.n_excluded else ""
    units = ", ".join(f"{term.symbol}: {term.unit}" for term in fit.law.terms)
    return [
        f"{fit.law.text()}   [{units}]",
        f"{fit.n_points} points of {report.source}{excluded}",
        *([_cluster_text(fit.clusters)] if fit.unit == "clusters" else []),
        f"objective 100 x MSE(ln L) = {fit.objective:.5g}; {fit.n_reached} of {fit.n_starts} starts reached it; "
        f"condition number {fit.condition:.3g}",
        "95% intervals: lo, hi: Student's t, from the curvature at the optimum; bootstrap_: from refits; '-': unknown. "
        "NAME_part: a term's contribution at the points' geometric mean",
    ]


def _cluster_text(clusters: ClusterEffect) -> str:
    share = clusters.between**2 / (clusters.between**2 + clusters.within**2 or 1.0)
    return (
        f"{len(clusters.sizes)} clusters with random effects on ln L: sd {clusters.between:.3g} between, "
        f"{clusters.within:.3g} within ({share:.0%} of the variance is between); clusters are resampled whole"
    )


def closing(report: Report) -> list[str]:
    """Correlations, bootstrap and warnings."""
    lines = [
        f"correlation of log {first} and log {second}: {value:.3f}"
        for (first, second), value in log_correlations(report.fit).items()
    ]
    if report.boot:
        lines.append(f"bootstrap over {report.fit.unit}: {len(report.boot.theta)} refits")
    return [*lines, *(f"warning: {warning}" for warning in report.warnings)]


def as_object(report: Report) -> dict[str, Any]:
    """The report in JSON's types; a missing value is None."""
    fit, boot = report.fit, report.boot
    return {
        "law": fit.law.text(),
        "units": {term.symbol: term.unit for term in fit.law.terms},
        "source": report.source,
        "n_points": fit.n_points,
        "n_clusters": len(fit.clusters.sizes) if fit.unit == "clusters" else None,
        "n_excluded": report.n_excluded,
        "objective": fit.objective,
        "convergence": {
            "n_starts": fit.n_starts,
            "n_reached": fit.n_reached,
            "condition": fit.condition,
            "bootstrap_replicates": boot and len(boot.theta),
        },
        "parameters": parameter_table(report).records(),
        "log_correlations": [{"terms": list(names), "value": value} for names, value in log_correlations(fit).items()],
        "warnings": report.warnings,
    }


def log_correlations(fitted: FittedLaw) -> dict[tuple[str, str], float]:
    """(term, term) -> correlation of the logarithms of their predictors."""
    pairs = itertools.combinations(zip(fitted.law.terms, fitted.plan.z, strict=True), 2)
    return {(a.name, b.name): float(np.corrcoef(z_a, z_b)[0, 1]) for (a, z_a), (b, z_b) in pairs}


def warnings(fitted: FittedLaw) -> list[str]:
    """Everything that limits what the fit shows."""
    return [*fitted.dropped, *_of_fit(fitted), *_of_parameters(fitted)]


def _of_fit(fitted: FittedLaw) -> Iterator[str]:
    has_clusters, n_clusters = fitted.unit == "clusters", len(fitted.clusters.sizes)
    if has_clusters and n_clusters < FEW_CLUSTERS:
        yield (
            f"{n_clusters} clusters are fewer than {FEW_CLUSTERS}: bootstrap intervals are too narrow; lo and "
            f"hi have Student's t with {fitted.df} degrees of freedom"
        )
    predictors = [name for name in fitted.points.columns if name not in ("loss", "model_size", CLUSTER)]
    n_shapes = len(fitted.points.drop_duplicates(predictors))
    if (not has_clusters or n_clusters == fitted.n_points) and n_shapes < fitted.n_points:
        hint = " (--cluster d_model,n_layers)" if {"d_model", "n_layers"} <= {*predictors} else ""
        yield (
            f"{fitted.n_points} points have {n_shapes} shapes and budgets: if all seeds of one deviate from the law "
            f"together, intervals are too narrow{hint}"
        )
    if fitted.gradient > STATIONARY:
        yield f"the best optimum is not stationary (gradient cosine {fitted.gradient:.1e}): the cost is flat"
    if fitted.n_reached < 2:
        yield f"one of {fitted.n_starts} starts reached the best optimum: a better one may exist"
    for (first, second), value in log_correlations(fitted).items():
        if abs(value) > COLLINEAR:
            yield (
                f"log {first} and log {second} correlate at {value:.2f} (above {COLLINEAR}): their terms trade against "
                f"each other, and each exponent depends on the law's form"
            )
    if fitted.condition > CONDITION:
        condition = f"the Jacobian's condition number is {fitted.condition:.2g}, above {CONDITION:g}"
        yield f"{condition}: some terms cannot be separated"


def _of_parameters(fitted: FittedLaw) -> Iterator[str]:
    for name, _, value, _, lo, hi in fitted.parameters.values():
        if (name == "E" or name.endswith("_part")) and value < NEGLIGIBLE_PART:
            yield f"{name} is at its bound, 0: the points do not need it"
        if not name.startswith("a_") or name in fitted.law.fixed:
            continue
        if lo is None or hi is None:
            yield f"{name} has no standard error: these points do not identify it"
            continue
        interval = f"95% interval {lo:.3g} to {hi:.3g}"
        if lo <= 0:
            yield f"{name} = {value:.3g} is not distinguishable from 0: {interval}"
        elif hi / lo > FACTOR:
            spans = f"spans a factor of {hi / lo:.1f} (more than {FACTOR:g})"
            yield f"{name} is weakly constrained: its {interval} {spans}"
