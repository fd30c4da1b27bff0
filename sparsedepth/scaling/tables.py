"""A fitted depth law as rows and lines: what `sparsedepth scaling` prints, for people and for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsedepth.scaling.fit import Fit, log_correlations
from sparsedepth.scaling.optimum import Optimum
from sparsedepth.scaling.uncertainty import Bootstrap, HeldOut, Profile
from sparsedepth.store.query_result import QueryResult


@dataclass(frozen=True, kw_only=True)
class Report:
    """A fit with everything that says how far to believe it; what was not asked for is None or empty."""

    source: str
    fit: Fit
    n_excluded: int
    boot: Bootstrap | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    held_out: HeldOut | None = None
    scan: Sequence[tuple[int, Fit]] = ()
    warnings: tuple[str, ...] = ()


def parameter_table(report: Report) -> QueryResult:
    """One row per parameter; lo and hi are Student's interval from the Jacobian."""
    rows = []
    for one in report.fit.parameters():
        boot = report.boot.intervals.get(one.name, (None, None)) if report.boot else (None, None)
        profile = report.profiles.get(one.name)
        sides = (profile.lo, profile.hi) if profile else (None, None)
        rows.append((one.name, one.value, one.stderr, one.lo, one.hi, *boot, *sides, one.unit))
    intervals = ("lo", "hi", "bootstrap_lo", "bootstrap_hi", "profile_lo", "profile_hi")
    return QueryResult(columns=("name", "value", "stderr", *intervals, "unit"), rows=tuple(rows))


def scan_table(scan: Sequence[tuple[int, Fit]]) -> QueryResult:
    """One row per number of excluded losses: points, exponents with standard errors, E, objective."""
    names = sorted({name for _, one in scan for name in one.law.names if name.startswith("a_")})
    rows = []
    for n_excluded, one in scan:
        known = {parameter.name: parameter for parameter in one.parameters()}
        values = [value for name in names for value in _pair(known.get(name))]
        rows.append((n_excluded, one.n_points, *values, known["E"].value, one.objective))
    columns = [column for name in names for column in (name, f"{name}_stderr")]
    return QueryResult(columns=("excluded", "points", *columns, "E", "objective"), rows=tuple(rows))


def _pair(parameter: Any) -> tuple[float | None, float | None]:
    return (None, None) if parameter is None else (parameter.value, parameter.stderr)


def heading(report: Report) -> list[str]:
    """The law, the points, the optimum and its convergence, in a line each."""
    found = report.fit
    left_out = f" ({report.n_excluded} highest losses and their ties left out)" if report.n_excluded else ""
    units = ", ".join(f"{term.symbol}: {term.unit}" for term in found.law.terms)
    return [
        f"{found.law.text()}   [{units}]",
        f"{found.n_points} points of {report.source}{left_out}",
        f"objective 100 x MSE(ln L) = {found.objective:.5g}; {found.n_reached} of {found.n_starts} starts reached it; "
        f"gradient cosine {found.gradient:.0e}; condition number {found.condition:.3g}",
    ]


def closing(report: Report) -> list[str]:
    """What else was found out about the fit, and every warning."""
    lines = [
        f"correlation of log {one} and log {other}: {value:.3f}"
        for (one, other), value in log_correlations(report.fit.plan).items()
    ]
    if report.boot:
        boot = report.boot
        lines.append(
            f"bootstrap over points: {boot.n_converged} of {boot.n_replicates} refits converged, {boot.n_moved} of "
            f"them to a better optimum than the one next to the fit"
        )
    if report.held_out:
        one = report.held_out
        lines.append(
            f"held out ({one.n_folds} folds): rmse of ln L {one.rmse:.4g}, against {one.rmse_fitted:.4g} at the points "
            f"of the fit; mean relative error {one.mean_abs:.2%}"
        )
    return [*lines, *(f"warning: {warning}" for warning in report.warnings)]


def as_object(report: Report) -> dict[str, Any]:
    """The report in JSON's types; a missing value is None."""
    found, one = report.fit, report.held_out
    parameters, scan = parameter_table(report), scan_table(report.scan) if report.scan else None
    return {
        "law": found.law.text(),
        "units": {term.symbol: term.unit for term in found.law.terms},
        "source": report.source,
        "n_points": found.n_points,
        "n_excluded": report.n_excluded,
        "objective": found.objective,
        "convergence": {
            "gradient_cosine": found.gradient,
            "n_starts": found.n_starts,
            "n_reached": found.n_reached,
            "condition": found.condition,
            "bootstrap_replicates": report.boot.n_replicates if report.boot else None,
            "bootstrap_converged": report.boot.n_converged if report.boot else None,
        },
        "parameters": [dict(zip(parameters.columns, row, strict=True)) for row in parameters.rows],
        "log_correlations": [
            {"terms": list(names), "value": value} for names, value in log_correlations(found.plan).items()
        ],
        "held_out": one and {"n_folds": one.n_folds, "rmse": one.rmse, "rmse_fitted": one.rmse_fitted},
        "exclusion_scan": scan and [dict(zip(scan.columns, row, strict=True)) for row in scan.rows],
        "warnings": list(report.warnings),
    }


def optimum_table(found: Optimum) -> QueryResult:
    """Width, depth and loss at the budget, with bootstrap intervals."""

    def row(name: str, value: float | None, ends: tuple[float, float] | None, rounded: int | None, unit: str) -> tuple:
        return (name, value, *(ends or (None, None)), rounded, unit)

    return QueryResult(
        columns=("name", "value", "bootstrap_lo", "bootstrap_hi", "rounded", "unit"),
        rows=(
            row("d_model", found.d_model, found.d_model_interval, found.d_model_rounded, ""),
            row("n_layers", found.n_layers, found.n_layers_interval, found.n_layers_rounded, ""),
            row("loss", found.loss, found.loss_interval, None, "nat/token, at the rounded shape"),
        ),
    )
