"""The tables of a card: the configurations measured, the settings tested, the predictions of a held-out test."""

from collections.abc import Iterable

from sparsedepth import quantities
from sparsedepth.config.plain_text import counted
from sparsedepth.effects.intervals import Estimate
from sparsedepth.effects.sentences import size_text
from sparsedepth.effects.text import title
from sparsedepth.recipe.card import Candidate, Card, Holdout, MeasuredConfiguration
from sparsedepth.recipe.choose import comparison_of
from sparsedepth.recipe.conclusion import part_of
from sparsedepth.store import terminal
from sparsedepth.store.query_result import QueryResult

BEST_MEASURED = "the best of several means, so optimistic (selection bias); not a recommendation"


def measured_table(card: Card) -> QueryResult:
    """The recommended configuration, the baseline and the best measured one, in this order."""
    baseline = part_of(card, "baseline")
    rows = []
    for row in card.measured:
        lr = None if row.lr is None else f"{row.lr:g}"
        params = row.params / baseline.params if row.params and baseline and baseline.params else None
        accuracy = None if card.recipe.objective == "val_accuracy" else row.accuracy
        rows.append(
            (", ".join(row.parts), lr, row.n_seeds, row.mean, row.lo, row.hi, accuracy, params, row.flops, row.setting)
        )
    names = ("configuration", "lr", "seeds", card.recipe.objective, "lo", "hi", "accuracy", "params", "flops")
    names += ("setting",)
    return QueryResult(columns=names, rows=tuple(rows))


def cut_text(rows: Iterable[MeasuredConfiguration], objective: str) -> str:
    """', cut at 0' where an interval of the objective was."""
    return quantities.IN_RUNS[objective].cut_at(*((row.lo, row.hi) for row in rows))


def measured_text(card: Card, width: int) -> str:
    """The same for a terminal, with notes; '' where nothing was measured."""
    if not card.measured:
        return ""
    has_best = any(row.parts == ("best measured",) for row in card.measured)
    notes = [f"best measured: {BEST_MEASURED}"] if has_best else []
    if cut := cut_text(card.measured, card.recipe.objective):
        notes.append(f"lo, hi: 95% interval over seeds{cut}")
    table = terminal.fit(measured_table(card), ("params", "seeds", "flops"), width).text
    return f"{table}\n{terminal.wrapped(notes, width)}"


LISTS = {
    "better": "Do (shown to help)",
    "worse": "Don't (shown to hurt)",
    "not distinguishable": "Not shown",
}
"""Comparison with the baseline -> heading of its list."""


def settings_text(card: Card, width: int) -> str:
    """Three lists of the settings tested: do, don't, not shown; and what depends on another setting. '' where none was
    tested."""
    candidates = [candidate for candidate in card.recipe.candidates if candidate.contrast.has_pairs]
    if not candidates:
        return ""
    first = candidates[0].contrast
    seconds = {matched.setting: matched.wall_clock for matched in card.matched}
    over = "over" if first.unit == "ln ratio" else "minus"
    lines = [
        f"{title(first.outcome, first.unit)}; setting {over} baseline, 95% interval of seeds and of the choice of lr; "
        "FLOPs, parameters and time relative to the baseline"
    ]
    for comparison, heading in LISTS.items():
        of_list = [each for each in candidates if comparison_of(each.contrast) == comparison]
        lines.append(f"{heading}:{'' if of_list else ' nothing'}")
        lines += [f"  {candidate_text(each, seconds.get(each.contrast.setting))}" for each in of_list]
    unknown = [each for each in candidates if comparison_of(each.contrast) == "not compared"]
    lines += [f"No effect known: {each.contrast.setting}: {each.refused}" for each in unknown]
    if card.recipe.others:
        lines += ["Beside other settings, and together:", *(f"  {text}" for text in card.recipe.others)]
    return terminal.wrapped(lines, width)


def candidate_text(candidate: Candidate, seconds: float | None = None) -> str:
    """'depth_scale=lns: +0.034 (+0.018 to +0.051), 5 seeds; FLOPs x1; ...' and why it is not recommended."""
    contrast = candidate.contrast
    parts = [f"{contrast.setting} instead of {contrast.baseline}: {_with_interval(contrast.effect, contrast.unit)}"]
    ratios = {"FLOPs": contrast.ratios["flops"], "parameters": contrast.ratios["params_total"]}
    costs = [f"{noun} x{ratio[0]:.3g}" for noun, ratio in ratios.items() if ratio]
    costs += [f"time x{seconds:.3g}"] if seconds else []
    parts += [f"{counted(contrast.n_seeds, 'seed')}; {', '.join(costs) or 'cost unknown'}"]
    if contrast.verdict == "not distinguishable" and contrast.detectable is not None:
        parts.append(f"an effect of {size_text(contrast.detectable, contrast.unit)} would have been seen")
    if contrast.n_diverged:
        parts.append(f"{counted(contrast.n_diverged, 'run')} diverged")
    if contrast.verdict_blocked_by:
        parts.append(contrast.verdict_blocked_by)
    elif candidate.refused and comparison_of(contrast) == "better":
        parts.append(f"not recommended: {candidate.refused}")
    return "; ".join(parts)


def holdout_table(holdout: Holdout) -> QueryResult:
    """Each setting's effect as fitted on the smaller depths, as predicted (shrunk), and as measured."""
    rows = []
    for prediction in holdout.predictions:
        fitted, measured = prediction.candidate.contrast, prediction.measured
        unit, shrunk = fitted.unit, prediction.candidate.shrunk
        predicted = None if shrunk is None else size_text(shrunk, unit, "+")
        observed = None if measured is None else _with_interval(measured.effect, unit)
        rows.append((_with_interval(fitted.effect, unit), predicted, observed, fitted.setting))
    return QueryResult(columns=("fitted", "predicted", "measured", "setting"), rows=tuple(rows))


def _with_interval(effect: Estimate, unit: str) -> str | None:
    if effect.mean is None:
        return None
    mean = size_text(effect.mean, unit, "+")
    if effect.lo is None or effect.hi is None:
        return mean
    return f"{mean} ({size_text(effect.lo, unit, '+')} to {size_text(effect.hi, unit, '+')})"
