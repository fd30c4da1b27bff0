"""The reasons for which the parameters of a fit may be unreliable, in words."""

import itertools
from collections.abc import Iterator

import numpy as np

from sparsedepth.scaling.fit import CLUSTER, Fit, Parameter

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


def log_correlations(fitted: Fit) -> dict[tuple[str, str], float]:
    """(term, term) -> correlation of the logarithms of their predictors."""
    return {
        (first.name, second.name): float(np.corrcoef(fitted.plan.z[i], fitted.plan.z[j])[0, 1])
        for (i, first), (j, second) in itertools.combinations(enumerate(fitted.law.terms), 2)
    }


def warnings(fitted: Fit) -> list[str]:
    """Everything that limits what the fit shows."""
    return [*fitted.dropped, *_of_points(fitted), *_of_optimum(fitted), *_of_parameters(fitted)]


def _of_points(fitted: Fit) -> Iterator[str]:
    clusters = fitted.clusters
    if clusters and len(clusters.sizes) < FEW_CLUSTERS:
        yield (
            f"{len(clusters.sizes)} clusters are fewer than {FEW_CLUSTERS}: bootstrap intervals are too narrow; lo and "
            f"hi have Student's t with {fitted.df} degrees of freedom"
        )
    predictors = [name for name in fitted.points.columns if name not in ("loss", "model_size", CLUSTER)]
    n_shapes = len(fitted.points.drop_duplicates(predictors))
    if clusters is None and n_shapes < fitted.n_points:
        hint = " (--cluster d_model,n_layers)" if {"d_model", "n_layers"} <= {*predictors} else ""
        yield (
            f"{fitted.n_points} points have {n_shapes} shapes and budgets: if all seeds of one deviate from the law "
            f"together, intervals are too narrow{hint}"
        )


def _of_optimum(fitted: Fit) -> Iterator[str]:
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
        yield (
            f"the Jacobian's condition number is {fitted.condition:.2g}, above {CONDITION:g}: some terms cannot be "
            f"separated"
        )


def _of_parameters(fitted: Fit) -> Iterator[str]:
    for parameter in fitted.parameters():
        if parameter.name.startswith("a_") and parameter.name not in fitted.law.fixed:
            yield from _of_exponent(parameter)
        is_part = parameter.name == "E" or parameter.name.endswith("_part")
        if is_part and parameter.value < NEGLIGIBLE_PART:
            yield f"{parameter.name} is at its bound, 0: the points do not need it"


def _of_exponent(exponent: Parameter) -> Iterator[str]:
    name, lo, hi = exponent.name, exponent.lo, exponent.hi
    if lo is None or hi is None:
        yield f"{name} has no standard error: these points do not identify it"
    elif lo <= 0:
        yield f"{name} = {exponent.value:.3g} is not distinguishable from 0: 95% interval {lo:.3g} to {hi:.3g}"
    elif hi / lo > FACTOR:
        yield (
            f"{name} is weakly constrained: its 95% interval {lo:.3g} to {hi:.3g} spans a factor of {hi / lo:.1f} "
            f"(more than {FACTOR:g})"
        )
