"""A fitted depth law as tables, text and JSON: the output of `sparsedepth scaling`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsedepth.scaling.fit import Fit, log_correlations
from sparsedepth.scaling.law import ClusterEffect
from sparsedepth.scaling.optimum import Optimum
from sparsedepth.scaling.uncertainty import Bootstrap, HeldOutFit, Profile
from sparsedepth.store.query_result import QueryResult


@dataclass(frozen=True, kw_only=True)
class Report:
    """A fit with its checks; checks that were not requested are None or empty."""

    source: str
    fit: Fit
    n_excluded: int
    boot: Bootstrap | None
    profiles: Mapping[str, Profile]
    held_out: HeldOutFit | None
    scan: Sequence[tuple[int, Fit]]


def parameter_table(report: Report) -> QueryResult:
    """One row per parameter; lo and hi are Student's interval from the Jacobian."""
    unknown = (None, None)
    rows = []
    for number in report.fit.parameters():
        boot = report.boot.intervals.get(number.name, unknown) if report.boot else unknown
        profile = report.profiles.get(number.name)
        sides = (profile.lo, profile.hi) if profile else unknown
        rows.append((number.name, number.value, number.stderr, number.lo, number.hi, *boot, *sides, number.unit))
    intervals = ("lo", "hi", "bootstrap_lo", "bootstrap_hi", "profile_lo", "profile_hi")
    return QueryResult(columns=("name", "value", "stderr", *intervals, "unit"), rows=tuple(rows))


def scan_table(scan: Sequence[tuple[int, Fit]]) -> QueryResult:
    """One row per number of excluded losses: points, exponents with standard errors, E, objective."""
    names = sorted({name for _, fit in scan for name in fit.law.names if name.startswith("a_")})
    rows = []
    for n_excluded, fit in scan:
        by_name = {parameter.name: parameter for parameter in fit.parameters()}
        exponents = [getattr(by_name.get(name), part, None) for name in names for part in ("value", "stderr")]
        rows.append((n_excluded, fit.n_points, *exponents, by_name["E"].value, fit.objective))
    columns = [column for name in names for column in (name, f"{name}_stderr")]
    return QueryResult(columns=("excluded", "points", *columns, "E", "objective"), rows=tuple(rows))


def heading(report: Report) -> list[str]:
    """A line each for law, points, optimum and convergence."""
    fit = report.fit
    excluded = f" ({report.n_excluded} highest losses and their ties excluded)" if report.n_excluded else ""
    units = ", ".join(f"{term.symbol}: {term.unit}" for term in fit.law.terms)
    clusters = [_cluster_text(fit.plan.shared)] if fit.plan.shared else []
    return [
        f"{fit.law.text()}   [{units}]",
        f"{fit.n_points} points of {report.source}{excluded}",
        *clusters,
        f"objective 100 x MSE(ln L) = {fit.objective:.5g}; {fit.n_reached} of {fit.n_starts} starts reached it; "
        f"gradient cosine {fit.gradient:.0e}; condition number {fit.condition:.3g}",
        "95% intervals: lo, hi: Student's t, from the curvature at the optimum; bootstrap_: from refits; profile_: "
        "from the profile of an exponent; '-': unknown. NAME_part: a term's contribution at the points' geometric mean",
    ]


def _cluster_text(clusters: ClusterEffect) -> str:
    share = clusters.between**2 / (clusters.between**2 + clusters.within**2 or 1.0)
    return (
        f"{clusters.n_clusters} clusters with random effects on ln L: sd {clusters.between:.3g} between, "
        f"{clusters.within:.3g} within ({share:.0%} of the variance is between); clusters are resampled whole"
    )


def closing(report: Report) -> list[str]:
    """Correlations, bootstrap, held-out error and warnings."""
    lines = [
        f"correlation of log {first} and log {second}: {value:.3f}"
        for (first, second), value in log_correlations(report.fit.plan).items()
    ]
    if report.boot:
        boot = report.boot
        lines.append(
            f"bootstrap over {report.fit.plan.units}: {boot.n_converged} of {boot.n_replicates} refits converged, "
            f"{boot.n_moved} of them found a lower minimum away from the fit"
        )
    if report.held_out:
        error = report.held_out
        lines.append(
            f"held out ({error.n_folds} folds): RMSE of ln L {error.rmse:.4g}, against {error.rmse_fitted:.4g} at the "
            f"fitted points; mean relative error {error.mean_abs:.2%}"
        )
    return [*lines, *(f"warning: {warning}" for warning in report.fit.warnings)]


def as_object(report: Report) -> dict[str, Any]:
    """The report in JSON's types; a missing value is None."""
    fit, boot, error = report.fit, report.boot, report.held_out
    correlations = log_correlations(fit.plan).items()
    return {
        "law": fit.law.text(),
        "units": {term.symbol: term.unit for term in fit.law.terms},
        "source": report.source,
        "n_points": fit.n_points,
        "n_clusters": fit.plan.shared and fit.plan.shared.n_clusters,
        "n_excluded": report.n_excluded,
        "objective": fit.objective,
        "convergence": {
            "gradient_cosine": fit.gradient,
            "n_starts": fit.n_starts,
            "n_reached": fit.n_reached,
            "condition": fit.condition,
            "bootstrap_replicates": boot and boot.n_replicates,
            "bootstrap_converged": boot and boot.n_converged,
        },
        "parameters": parameter_table(report).records(),
        "log_correlations": [{"terms": list(names), "value": value} for names, value in correlations],
        "held_out": error and {"n_folds": error.n_folds, "rmse": error.rmse, "rmse_fitted": error.rmse_fitted},
        "exclusion_scan": scan_table(report.scan).records() if report.scan else None,
        "warnings": list(fit.warnings),
    }


def optimum_table(shape: Optimum) -> QueryResult:
    """Width, depth and loss at the budget, with bootstrap intervals."""
    d_model, n_layers, loss = (
        interval or (None, None) for interval in (shape.d_model_interval, shape.n_layers_interval, shape.loss_interval)
    )
    return QueryResult(
        columns=("name", "value", "bootstrap_lo", "bootstrap_hi", "rounded", "unit"),
        rows=(
            ("d_model", shape.d_model, *d_model, shape.d_model_rounded, ""),
            ("n_layers", shape.n_layers, *n_layers, shape.n_layers_rounded, ""),
            ("loss", shape.loss, *loss, None, "nat/token, at the rounded shape"),
        ),
    )
