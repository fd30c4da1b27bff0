"""Words of scaling: the depth law and its doubts, the budget from which a depth is worth its cost, and what a setting
is worth in compute."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sparsedepth.quantities.levels import ALPHA
from sparsedepth.quantities.quantity import Row
from sparsedepth.words.effects import interval_text
from sparsedepth.words.plain_text import commas, counted, interval
from sparsedepth.words.table import fitted_table
from sparsedepth.words.values import assignment

if TYPE_CHECKING:
    from sparsedepth.scaling.aspect import Best, Doubling
    from sparsedepth.scaling.carry import Carried
    from sparsedepth.scaling.crossover import Crossover
    from sparsedepth.scaling.fit_law import FittedLaw
    from sparsedepth.scaling.law import Law
    from sparsedepth.scaling.report import Doubts, ParameterDoubt, Report
    from sparsedepth.scaling.shapes import ShapesAnswer
    from sparsedepth.scaling.speedup import Multipliers
    from sparsedepth.train.coordinates import Slope


def flops_text(flops: float, digits: int = 2) -> str:
    """'2.7e12'"""
    return f"{flops:.{digits}g}".replace("e+0", "e").replace("e+", "e")


def carry_lines(found: "Sequence[Carried]", at: Row) -> Iterator[str]:
    """What carrying lr costs each setting, the line of a definition that states it, and where it is not known."""
    shape = commas(assignment(*each) for each in at.items())
    for one in found:
        mean, lo, hi = one.regret
        known = [each for each in one.shapes if each.regret is not None]
        counts = commas([counted(one.n_seeds, "seed"), counted(len(known), "shape")])
        told = f"{one.setting}: carrying lr from {shape} adds {mean:.3g} nat/token"
        if diverged := [each.shape for each in known if each.regret == math.inf]:
            lr = f"lr={known[0].lr:g}, the best at {shape}"
            yield f"{one.setting}: {lr}, diverged at {'; '.join(diverged)}: do not carry it there"
        elif math.isinf(one.rms):
            yield f"{told} ({counts}): one seed has no interval, and states no carry_regret"
        else:
            ends = f"{lo:.3g} to {hi:.3g}, {counts}"
            yield f"{told} ({ends}); rms over shapes, for a definition: carry_regret: {one.rms:.3g}"
    for one in found:
        for each in one.shapes:
            if each.regret is None:
                yield f"{one.setting}: left out: {each.shape}, where lr={each.lr:g}, the best at {shape}, was not run"
            elif each.edge:
                beyond = f"is the {each.edge} tried: a better one may lie beyond, and the regret be larger"
                yield f"{one.setting}: at {each.shape} the best lr, {each.best:g}, {beyond}"
    yield (
        "regret: expected loss at the carried lr minus the least of the shape's curve in log lr; interval: the wider "
        "of the curves' and the shapes'"
    )


def check_lines(found: "Sequence[Slope]", rule: str) -> Iterator[str]:
    """Which sizes lr can be carried over, with the powers by which activations and updates grow."""
    for axis in dict.fromkeys(one.axis for one in found):
        mine = [one for one in found if one.axis == axis]
        powers = commas(f"{one.quantity} {axis}^{one.slope:+.2f}" for one in mine)
        bad = commas(one.quantity for one in mine if not one.is_flat)
        told = f"not flat ({bad}): do not carry lr" if bad else "flat: lr may be carried"
        yield f"parametrisation={rule}, {told} over {axis}. In the last block and the head: {powers}"


# The law


def law_text(law: "Law") -> str:
    """L = c_m m^-a_m + c_l l^-a_l + E, with a_l = 1."""
    parts = [f"c_{term.symbol} {term.symbol}^-a_{term.symbol}" for term in law.terms]
    fixed = commas(f"{name} = {value:g}" for name, value in law.fixed.items())
    return f"L = {' + '.join(parts)} + E{f', with {fixed}' if fixed else ''}"


def law_heading(report: "Report") -> Iterator[str]:
    """A line each for law, points, clusters and optimum."""
    fit = report.fit
    excluded = f" ({report.n_excluded} highest losses and their ties excluded)" if report.n_excluded else ""
    units = commas(f"{term.symbol}: {term.unit}" for term in fit.law.terms)
    yield f"{law_text(fit.law)}   [{units}]"
    yield f"{fit.n_points} points of {report.source}{excluded}"
    if fit.has_clusters:
        clusters = fit.clusters
        share = clusters.between**2 / (clusters.between**2 + clusters.within**2 or 1.0)
        yield (
            f"{len(clusters.sizes)} clusters with random effects on ln L: sd {clusters.between:.3g} between, "
            f"{clusters.within:.3g} within ({share:.0%} of the variance is between); clusters are resampled whole"
        )
    yield (
        f"objective 100 x MSE(ln L) = {fit.objective:.5g}; {fit.n_reached} of {fit.n_starts} starts reached it; "
        f"condition number {fit.condition:.3g}"
    )
    yield (
        "95% intervals: lo, hi: Student's t, from the curvature at the optimum; bootstrap_: from refits; '-': unknown. "
        "NAME_part: a term's contribution at the points' geometric mean"
    )


def units_text(fit: "FittedLaw") -> str:
    """What is independent."""
    return "clusters" if fit.has_clusters else "points"


def law_closing(report: "Report") -> Iterator[str]:
    """Correlations, bootstrap and warnings."""
    for (first, second), value in report.doubts.correlations.items():
        yield f"correlation of log {first} and log {second}: {value:.3f}"
    if report.boot:
        yield f"bootstrap over {units_text(report.fit)}: {len(report.boot.theta)} refits"
    yield from (f"warning: {warning}" for warning in law_warnings(report))


def law_warnings(report: "Report") -> list[str]:
    """Everything that limits what the fit shows, and what its source says."""
    doubts = report.doubts
    of_parameters = [_of_parameter(doubt, doubts.factor) for doubt in doubts.parameters]
    return [*report.fit.dropped, *_of_fit(report.fit, doubts), *of_parameters, *report.of_source]


def _of_fit(fit: "FittedLaw", doubts: "Doubts") -> Iterator[str]:
    """Doubts about the fit as a whole."""
    if doubts.n_clusters is not None:
        yield (
            f"{doubts.n_clusters} clusters are fewer than {doubts.few_clusters}: bootstrap intervals are too narrow; "
            f"lo and hi have Student's t with {fit.df} degrees of freedom"
        )
    if doubts.n_shapes is not None:
        hint = " (--cluster d_model,n_layers)" if doubts.names_cluster else ""
        yield (
            f"{fit.n_points} points have {doubts.n_shapes} shapes and budgets: if all seeds of one deviate from the "
            f"law together, intervals are too narrow{hint}"
        )
    if doubts.gradient is not None:
        yield f"the best optimum is not stationary (gradient cosine {doubts.gradient:.1e}): the cost is flat"
    if fit.n_reached < 2:
        yield f"one of {fit.n_starts} starts reached the best optimum: a better one may exist"
    for (first, second), value in doubts.correlations.items():
        if abs(value) > doubts.collinear_above:
            yield (
                f"log {first} and log {second} correlate at {value:.2f} (above {doubts.collinear_above}): their terms "
                f"trade against each other, and each exponent depends on the law's form"
            )
    if doubts.condition is not None:
        yield (
            f"the Jacobian's condition number is {doubts.condition:.2g}, above {doubts.condition_above:g}: "
            "some terms cannot be separated"
        )


def _of_parameter(doubt: "ParameterDoubt", factor: float) -> str:
    name, _, value, _, lo, hi = doubt.parameter
    if doubt.kind == "not needed":
        return f"{name} is at its bound, 0: the points do not need it"
    if lo is None or hi is None:
        return f"{name} has no standard error: these points do not identify it"
    interval = f"95% interval {lo:.3g} to {hi:.3g}"
    if doubt.kind == "near 0":
        return f"{name} = {value:.3g} is not distinguishable from 0: {interval}"
    return f"{name} is weakly constrained: its {interval} spans a factor of {hi / lo:.1f} (more than {factor:g})"


# A depth


def crossover_text(one: "Crossover") -> str:
    """'worth its cost from 2e12 FLOPs: at 8e12 FLOPs -0.1 nat/token (...) against 4 layers', 'not known'."""
    if one.verdict == "not known" or one.budget is None:
        return f"not known ({one.reason})" if one.reason else "not known"
    if one.verdict == "not worth it":
        return f"not worth its cost: {at_largest(one)}"
    alone = ", the only budget" if one.has_one_budget else ", the smallest budget" * (one.budget == one.smallest)
    return f"worth its cost from {flops_text(one.budget)} FLOPs{alone}: {at_largest(one)}"


def at_largest(one: "Crossover") -> str:
    """'at 8e12 FLOPs -0.1 nat/token (-0.15 to -0.05) against 4 layers'"""
    assert one.largest is not None
    return f"at {flops_text(one.largest)} FLOPs {in_nats(one)} against {one.against} layers"


def in_nats(one: "Crossover | Doubling") -> str:
    """'-0.1 nat/token (-0.15 to -0.05)'"""
    return interval_text(one._asdict() | {"unit": "nat/token"})


def not_worth(one: "Crossover") -> str:
    return f"{one.n_layers} layers are not worth their cost: {at_largest(one)}"


def no_depth_shown(against: int, lower: Sequence[str], budget: float) -> str:
    """Why a depth is neither worth its cost nor shown not to be; `lower`: the depths that it is lower than."""
    deepest = f" to {against} layers" if lower else ""
    others = f", only to {commas(lower)}" if lower else ""
    return f"no difference{deepest} is shown at {flops_text(budget)} FLOPs{others}"


def crossover_sentence(one: "Crossover") -> str:
    """'n_layers=16: worth its cost from 2e12 FLOPs: at 2e13 FLOPs ...; compared from 1e12 to 2e13 FLOPs, 5 seeds'"""
    text = f"n_layers={one.n_layers}{'' if one.setting == 'baseline' else f', {one.setting}'}: {crossover_text(one)}"
    if one.smallest is None or one.largest is None:
        return text
    ends = "at" if one.has_one_budget else f"from {flops_text(one.smallest)} to"
    return f"{text}; compared {ends} {flops_text(one.largest)} FLOPs, {one.seeds} seeds"


def crossover_lines(found: Sequence["Crossover"]) -> list[str]:
    """A sentence for each depth and setting."""
    head = (
        "worth its cost: less loss than every shallower depth at equal training FLOPs (judged at the largest budget in "
        "common, p adjusted over depths; 95% intervals)"
    )
    return [head, *map(crossover_sentence, found)]


# A ladder of shapes


def shapes_lines(found: "ShapesAnswer") -> list[str]:
    """The best depth per width at each budget, whether it moves, and what twice the depth per width changes."""
    if found.law is None:
        return [f"depth per width: not known ({found.reason})"]
    runs, law = found.law.runs, found.law
    ends = " to ".join(flops_text(end) for end in (runs["flops"].min(), runs["flops"].max()))
    notes = [
        "lr and batch at their fitted optimum" if found.n_optima else "",
        "" if found.is_counted else "FLOPs taken as 6 x parameters x tokens",
        f"{found.n_left_out} runs of other settings left out" if found.n_left_out else "",
    ]
    head = (
        f"depth per width at equal FLOPs: {len(runs)} points of {runs['cluster'].nunique()} shapes, {ends} FLOPs, by "
        f"one law in size, tokens and aspect (n_layers per 64 of d_model), clustered by shape"
    )
    bounded = [one for one in found.best if (one.lo, one.hi) != (None, None)]
    best = commas(f"{_aspect_text(one)} at {flops_text(one.flops)} FLOPs" for one in bounded)
    moves = "it moves with the budget" if law.moves else "a move with the budget is not shown"
    nothing = "not known; the loss is not shown to rise on both sides of one"
    return [
        "; ".join(filter(None, [head, *notes])),
        f"best aspect: {f'{best}; {moves} (p {law.p_move:.2g})' if best else nothing}",
        f"twice the layers per width, at {flops_text(math.exp(law.middle))} FLOPs:",
        *map(_doubling_text, found.doublings),
    ]


def _aspect_text(one: "Best") -> str:
    assert one.estimate is not None
    lo, hi = (None if end is None else f"{2**end:.3g}" for end in (one.lo, one.hi))
    ends = f"{lo} to {hi}" if lo and hi else f"{lo} or more" if lo else f"{hi} or less"
    beyond = "" if one.is_within else ", beyond those run"
    return f"{2**one.estimate:.3g} ({ends}{beyond})"


def _doubling_text(one: "Doubling") -> str:
    verdict = "not shown" if one.p >= ALPHA else "lower" if one.estimate < 0 else "higher"
    return f"  {2.0**one.aspect:g} to {2.0 ** (one.aspect + 1):g}: {in_nats(one)}, {verdict}"


# A setting

NO_TIMES = "times are not compared: speeds are unknown, of other hours or devices, or of CPUs with other work"


def law_rejected(p: float | None) -> str:
    """Why a multiplier is not that of one law."""
    return f"no one law fits the runs (p {p:.2g}): by the slope to the next budget"


def beyond_law(times: float) -> str:
    """Why there is no multiplier."""
    return f"the law of the baseline does not reach its loss within {times:g} times its budgets"


def multiplier_text(multiplier: float, lo: float | None, hi: float | None, of: str = "") -> str:
    """'1.13 times the compute (1.05 to 1.21)'"""
    return f"{multiplier:.3g}{of}{interval(lo, hi)}"


def drift_word(first: float, last: float) -> str:
    """'fading' where the multiplier at the largest budget is nearer to 1 than at the smallest, else 'growing'."""
    return "fading" if abs(math.log(last)) < abs(math.log(first)) else "growing"


def at_depth(record: Row) -> str:
    """'n_layers=24, '; '' of one law over all depths."""
    return "" if record.get("n_layers") is None else f"n_layers={record['n_layers']}, "


def worth_sentence(first: Row, last: Row) -> str:
    """'n_layers=24, depth_scale=lns: worth 1.13 times the compute (1.05 to 1.21), 1.07 times the time (...)', from the
    rows of the smallest and the largest budget."""
    text = f"{at_depth(last)}{last['setting']}: "
    if last["multiplier"] is None:
        return f"{text}not known what it is worth in compute: {last['reason']}"
    text += f"worth {_worth_text(last, ' times the compute')}"
    if last["time_multiplier"] is not None:
        text += f", {multiplier_text(last['time_multiplier'], last['time_lo'], last['time_hi'], ' times the time')}"
    smallest, largest = (flops_text(row["train_flops"]) for row in (first, last))
    text += f" at {largest} FLOPs"
    if last["law"].endswith("drift") and first["multiplier"] is not None:
        word = drift_word(first["multiplier"], last["multiplier"])
        text += f", {word} from {_worth_text(first)} at {smallest} (p {last['p_drift']:.2g})"
    elif last["p_drift"] is not None and not last["reason"]:
        text += f", the same from {smallest} on (drift not shown)"
    return "; ".join(filter(None, (text, last["reason"])))


def _worth_text(row: Row, of: str = "") -> str:
    return multiplier_text(row["multiplier"], row["lo"], row["hi"], of)


def speedup_lines(found: "Multipliers") -> list[str]:
    """The table of multipliers, and a sentence for each setting and depth."""
    return [
        "compute multiplier: compute of the baseline at the same loss / compute of the setting, by one law of loss "
        "against compute for both at all budgets; lo, hi: 95% interval over seeds, a trunk and its branches being one, "
        "and of the choice of lr where it was tuned",
        fitted_table(found.table, ("seeds", "train_flops")).text,
        *(worth_sentence(*ends) for ends in found.at_ends),
        *dict.fromkeys(last["time_reason"] for _, last in found.at_ends if last["time_reason"]),
        *(f"left out: {reason}" for reason in found.refused),
    ]
