"""A fitted depth law as tables, text and JSON: the output of `sparsedepth scaling`."""

from dataclasses import dataclass
from typing import Any

from sparsedepth.scaling.clusters import ClusterEffect
from sparsedepth.scaling.fit import Fit
from sparsedepth.scaling.reliability import log_correlations, warnings
from sparsedepth.scaling.uncertainty import Bootstrap
from sparsedepth.store.query_result import QueryResult


@dataclass(frozen=True, kw_only=True)
class Report:
    """A fit with its checks; checks that were not requested are None."""

    source: str
    fit: Fit
    n_excluded: int
    boot: Bootstrap | None
    warnings: tuple[str, ...] = ()
    """Of the source, beside the fit's own."""

    @property
    def all_warnings(self) -> list[str]:
        return [*warnings(self.fit), *self.warnings]


def parameter_table(report: Report) -> QueryResult:
    """One row per parameter; lo and hi are Student's interval from the Jacobian."""
    rows = []
    for number in report.fit.parameters():
        boot = report.boot.intervals.get(number.name, (None, None)) if report.boot else (None, None)
        rows.append((number.name, number.value, number.stderr, number.lo, number.hi, *boot, number.unit))
    return QueryResult(
        columns=("name", "value", "stderr", "lo", "hi", "bootstrap_lo", "bootstrap_hi", "unit"), rows=tuple(rows)
    )


def heading(report: Report) -> list[str]:
    """A line each for law, points, clusters and optimum."""
    fit = report.fit
    excluded = f" ({report.n_excluded} highest losses and their ties excluded)" if report.n_excluded else ""
    units = ", ".join(f"{term.symbol}: {term.unit}" for term in fit.law.terms)
    clusters = [_cluster_text(fit.clusters)] if fit.clusters else []
    return [
        f"{fit.law.text()}   [{units}]",
        f"{fit.n_points} points of {report.source}{excluded}",
        *clusters,
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
    return [*lines, *(f"warning: {warning}" for warning in report.all_warnings)]


def as_object(report: Report) -> dict[str, Any]:
    """The report in JSON's types; a missing value is None."""
    fit, boot = report.fit, report.boot
    return {
        "law": fit.law.text(),
        "units": {term.symbol: term.unit for term in fit.law.terms},
        "source": report.source,
        "n_points": fit.n_points,
        "n_clusters": fit.clusters and len(fit.clusters.sizes),
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
        "warnings": report.all_warnings,
    }
