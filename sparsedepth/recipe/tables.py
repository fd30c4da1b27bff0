"""The tables of a card: what was measured beside the recipe, the settings tried, what a held-out test predicted."""

from collections.abc import Iterable

from sparsedepth import quantities
from sparsedepth.effects.intervals import Estimate
from sparsedepth.effects.sentences import size_text
from sparsedepth.effects.summary import (
    LEGEND,
    against,
    laid_out,
    one_ratio,
    pooled,
    shown_setting,
    shown_value,
    title,
    uneven_notes,
    verdict_word,
)
from sparsedepth.recipe.card import Candidate, Card, Holdout, MeasuredConfiguration
from sparsedepth.recipe.conclusion import part_of
from sparsedepth.store import render
from sparsedepth.store.query_result import QueryResult

COSTS = {"params": "params_total", "flops": "flops"}
"""Column -> basis of comparison."""
BEST_MEASURED = "the best of all means at this depth; luck is in it, so it is no recommendation"


def measured_table(card: Card) -> QueryResult:
    """The recommended configuration, the baseline and the best that was measured, in this order."""
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


def measured_text(card: Card, width: int | None = None) -> str:
    """The same for a terminal, and what the best measured is where it is another one; '' where nothing was measured."""
    if not card.measured:
        return ""
    picked = any(row.parts == ("best measured",) for row in card.measured)
    notes = [f"best measured: {BEST_MEASURED}"] if picked else []
    if cut := cut_text(card.measured, card.recipe.objective):
        notes.append(f"lo, hi: 95% interval over seeds{cut}")
    table = render.compact(measured_table(card), ("params", "seeds", "flops"), width)
    return f"{table}\n{render.wrapped(notes, width)}"


def settings_text(card: Card, width: int | None = None) -> str:
    """The effect and the cost of each setting tried; under it what of the tuning was uneven, and why one that can be
    told apart was not taken. '' where nothing was tried."""
    settings = [candidate for candidate in card.recipe.candidates if candidate.contrast.has_pairs]
    if not settings:
        return ""
    seconds = {each.setting: each.wall_clock for each in card.matched}
    rows = tuple(_setting_row(candidate, seconds.get(candidate.contrast.setting)) for candidate in settings)
    names = ("effect", "lo", "hi", "detectable", "seeds", "diverged", *COSTS, "time", "verdict", "setting")
    cost = "params (stored), flops, time (of training, measured: as noisy as the machine was): over the baseline's"
    optional = ("detectable", "seeds", "time", "params")
    page = laid_out(_settings_head(settings), names, rows, optional, _notes(settings), width, LEGEND | {"flops": cost})
    return f"Settings tried:\n{page}\n"


def _setting_row(candidate: Candidate, seconds: float | None) -> tuple:
    contrast, effect = candidate.contrast, candidate.contrast.effect
    sizes = (shown_value(value, contrast.unit) for value in (effect.mean, effect.lo, effect.hi, contrast.detectable))
    return (
        *sizes,
        contrast.n_seeds,
        contrast.n_diverged or None,
        *(one_ratio(contrast.ratios[basis]) for basis in COSTS.values()),
        seconds,
        verdict_word(contrast),
        shown_setting(contrast.setting),
    )


def _settings_head(settings: list[Candidate]) -> tuple[str, ...]:
    contrast = settings[0].contrast
    own = ", each at its own tuned value" if any(c.contrast.tuned.startswith("each") for c in settings) else ""
    return (
        f"{title(contrast.outcome, contrast.unit)}; effect: setting {against(contrast.unit)} baseline, all else equal"
        f"{pooled(c.contrast for c in settings)}{own}",
        f"baseline: {', '.join(dict.fromkeys(candidate.contrast.baseline for candidate in settings))}",
    )


def _notes(settings: list[Candidate]) -> list[str]:
    """What of the tuning was uneven, whether or not it changes a verdict; why a setting told apart was not taken."""
    told_apart = [c for c in settings if c.refused and c.contrast.verdict != "not distinguishable"]
    return [
        *uneven_notes((candidate.contrast.setting, candidate.contrast) for candidate in settings),
        *(f"not recommended: {candidate.contrast.setting}: {candidate.refused}" for candidate in told_apart),
    ]


def holdout_table(holdout: Holdout) -> QueryResult:
    """Each setting's effect as fitted on the smaller depths, as predicted (shrunk), and as measured."""
    rows = []
    for prediction in holdout.predictions:
        fitted, measured = prediction.candidate.contrast, prediction.measured
        unit, shrunk = fitted.unit, prediction.candidate.shrunk
        predicted = None if shrunk is None else size_text(shrunk, unit, "+")
        seen = None if measured is None else _with_interval(measured.effect, unit)
        rows.append((_with_interval(fitted.effect, unit), predicted, seen, fitted.setting))
    return QueryResult(columns=("fitted", "predicted", "measured", "setting"), rows=tuple(rows))


def _with_interval(effect: Estimate, unit: str) -> str | None:
    if effect.mean is None:
        return None
    mean = size_text(effect.mean, unit, "+")
    if effect.lo is None or effect.hi is None:
        return mean
    return f"{mean} ({size_text(effect.lo, unit, '+')} to {size_text(effect.hi, unit, '+')})"
