"""The tables of a card: the configurations measured, the settings tested, the predictions of a held-out test."""

from collections.abc import Iterable

from sparsedepth import quantities
from sparsedepth.effects.intervals import Estimate
from sparsedepth.effects.sentences import size_text
from sparsedepth.effects.summary import (
    LEGEND,
    averaging_text,
    baselines_text,
    effect_cells,
    minus,
    ratio_cell,
    short_setting,
    table_page,
    title,
    tuned_text,
    tuning_notes,
    verdict_cell,
)
from sparsedepth.recipe.card import Card, Holdout, MeasuredConfiguration
from sparsedepth.recipe.conclusion import better_but_diverged, part_of
from sparsedepth.store import terminal
from sparsedepth.store.query_result import QueryResult

COSTS = {"params": "params_total", "flops": "flops"}
"""Column -> basis of comparison."""
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
    if any(better_but_diverged(candidate.contrast) for candidate in card.recipe.candidates):
        notes.append("best measured: of the configurations without a diverged run")
    if cut := cut_text(card.measured, card.recipe.objective):
        notes.append(f"lo, hi: 95% interval over seeds{cut}")
    table = terminal.fit(measured_table(card), ("params", "seeds", "flops"), width).text
    return f"{table}\n{terminal.wrapped(notes, width)}"


def settings_text(card: Card, width: int) -> str:
    """The effect and the cost of each setting tested, with notes on uneven tuning and on significant settings that are
    not recommended; '' where none was tested."""
    candidates = [candidate for candidate in card.recipe.candidates if candidate.contrast.has_pairs]
    if not candidates:
        return ""
    contrasts = [candidate.contrast for candidate in candidates]
    first, seconds = contrasts[0], {matched.setting: matched.wall_clock for matched in card.matched}
    head = (
        f"{title(first.outcome, first.unit)}; effect: setting {minus(first.unit)} baseline, in pairs with all "
        f"else equal{averaging_text(contrasts)}{tuned_text(contrasts)}",
        baselines_text(contrasts),
    )
    names = ("effect", "lo", "hi", "detectable", "seeds", "diverged", *COSTS, "time", "verdict", "setting")
    rows = [
        (
            *effect_cells(contrast),
            contrast.n_seeds,
            contrast.n_diverged or None,
            *(ratio_cell(contrast.ratios[basis]) for basis in COSTS.values()),
            seconds.get(contrast.setting),
            verdict_cell(contrast),
            short_setting(contrast.setting),
        )
        for contrast in contrasts
    ]
    cost = "params (stored), flops, time (of training; measured time is noisy): relative to the baseline"
    notes = tuning_notes((contrast.setting, contrast) for contrast in contrasts)
    notes += [
        f"not recommended: {candidate.contrast.setting}: {candidate.refused}"
        for candidate in candidates
        if candidate.refused and candidate.contrast.verdict != "not distinguishable"
    ]
    optional = ("detectable", "seeds", "time", "params")
    return f"Settings tested:\n{table_page(head, names, rows, optional, notes, width, LEGEND | {'flops': cost})}\n"


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
