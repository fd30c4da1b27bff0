"""Degenerate scores of depth: those that carry no information in a set of runs, and why (`words.degeneracy` says it).

A score measures how much the blocks do: a measured column of `runs` of which more is better. It is degenerate in a run

    bigram, chance   worse than the bigram table of the text, or at chance level: the model uses no depth
    overfit          the same, with a training loss below OVERFITS of that table, or of guessing
    loss             divided by a loss below SMALL_LOSS: it would count blocks as useful that nothing depends on
    block            one block carries more than LARGEST_SHARE of it: it says nothing about the others
    zero, start      0, or its interval contains 0, its value at initialisation (scores that start elsewhere, such as
                     `causal_score`, have the first reason instead: an untrained model is at chance)
    constant         all runs of the comparison, or of the depth, have the same value

It is degenerate in a comparison if it is in more than MOST of the finished runs that have it. That all runs of a depth
have the same value does not count there: they may differ by depth. `sound_form` takes its place: of a score carried by
one block the form `_without_first`, of a relative one the absolute form."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sparsedepth.quantities import BY_LAYER, BY_PAIR, IN_RUNS, PROFILED, RUNS

if TYPE_CHECKING:
    import pandas as pd

Run = Mapping[str, Any]
"""A row of `runs`; None, NaN or an absent column is NULL."""

LARGEST_SHARE = 0.5
"""Of a score, in its largest block."""
SMALL_LOSS = 0.1
"""nat/token: there the published threshold of 10% is 0.01 nat/token, a fifth of needed_threshold."""
AT_CHANCE = 0.02
"""A loss within this share of the loss of guessing is at chance."""
OVERFITS = 0.9
LOSSES = ("val_loss", "train_loss", "bigram_loss", "chance_loss")
MOST = 0.5
"""Share of the runs."""

SCORES: tuple[str, ...] = tuple(
    name for name, quantity in IN_RUNS.items() if quantity.better == "high" and quantity.measure not in ("", "loss")
)
_CARRIED = {score.metric: score.name for score in PROFILED}
"""Metric by layer or pair -> the score that averages it and has a depth profile."""
_PROFILED = {score: _CARRIED.get(IN_RUNS[score].metric, score) for score in SCORES}
"""Score -> the score over the same rows that has a depth profile."""
FORMS = {
    score: [
        form
        for form in (score, f"{of}_without_first", "affine_loss_added", "affine_loss_added_without_first")
        if form in SCORES
    ]
    for score, of in _PROFILED.items()
}
"""A score and its possible replacements, in order of preference."""
_SHARES = {
    score: f"{of}_largest_share"
    for score, of in _PROFILED.items()
    if f"{of}_largest_share" in IN_RUNS and not score.endswith(("_without_first", "_deep_half"))
}
"""Score -> the column of the share of its largest block; not of forms without that block, or without a profile."""
ABSOLUTE_ROWS: Mapping[str, str] = {"affine_loss_increase": "affine_loss_added"}
"""Metrics by layer that are divided by the loss -> their absolute form."""
RELATIVE_ROWS = {name for name, quantity in (BY_LAYER | BY_PAIR).items() if quantity.is_relative}
"""Metrics by layer or pair that are divided by the loss."""

Weakness = Literal["bigram", "chance", "overfit", "unknown"]
"""Why no score of a run is evidence about depth; unknown: it has no bigram_loss."""
Unknown = Literal["bigram", "rows", "weight"]
"""What a check lacks: a bigram_loss, values by block, or a block with a weight above 0."""


class Reason(NamedTuple):
    """Why a score is degenerate in a run."""

    kind: Literal["bigram", "chance", "overfit", "loss", "block", "zero", "start", "constant"]
    value: float | None = None
    """Of the score where it is constant, else the limit."""
    n_layers: float | None = None
    """Where it is constant; None = everywhere."""


@dataclass(frozen=True, kw_only=True)
class Degeneracy:
    """Why one score is degenerate in a comparison, if it is."""

    score: str
    n_runs: int
    """Finished runs that have it."""
    is_degenerate: bool
    reasons: Mapping[Reason, int]
    """Reason -> runs, the most frequent first."""
    unknown: Mapping[Unknown, int]
    """Check that was not possible -> runs."""


class UsableForm(NamedTuple):
    """The score, or where it is degenerate its sound form, if it has one."""

    form: str
    judged: Degeneracy
    """Of the score itself."""


def degeneracy(score: str, runs: Iterable[Run]) -> Degeneracy:
    """The degeneracy of one score in the finished runs. A column that is no score is never degenerate."""
    scored = [run for run in runs if score in SCORES and _has_value(score, run)]
    reasons = reasons_by_run(score, scored)
    of_run_or_all = (any(each.kind != "constant" or each.n_layers is None for each in of_run) for of_run in reasons)
    return Degeneracy(
        score=score,
        n_runs=len(scored),
        is_degenerate=sum(of_run_or_all) > MOST * len(scored),
        reasons=dict(Counter(chain.from_iterable(reasons)).most_common()),
        unknown=dict(Counter(check for run in scored for check in unknown_in(score, run)).most_common()),
    )


def reasons_by_run(score: str, runs: Sequence[Run]) -> list[list[Reason]]:
    """Why a score is degenerate in each run of a comparison; empty where it is not, or the run has no value. The first
    may be that all of the runs, two at least, have the same value, or all of its depth."""
    values_at = defaultdict[float | None, list[float]](list)
    for run in runs:
        if _has_value(score, run):
            for depth in {None, float_or_none(run.get("n_layers"))}:
                values_at[depth].append(float(run[score]))

    alike = {depth: values for depth, values in values_at.items() if len(values) > 1 == len({*values})}
    constant = {depth: Reason("constant", values[0], depth) for depth, values in alike.items()}

    def reasons(run: Run) -> Iterator[Reason]:
        if _has_value(score, run):
            if shared := constant.get(None) or constant.get(float_or_none(run.get("n_layers"))):
                yield shared
            yield from reasons_in(score, run)

    return [[*reasons(run)] for run in runs]


def _has_value(score: str, run: Run) -> bool:
    return run.get("outcome") == "ok" and float_or_none(run.get(score)) is not None


def reasons_in(score: str, run: Run) -> list[Reason]:
    """Why a score is degenerate in a run by itself; empty where it is not."""
    value, lo, hi, share, loss = _numbers(run, score, f"{score}_lo", f"{score}_hi", _SHARES.get(score, ""), "val_loss")
    quantity = IN_RUNS[score]
    weakness = weakness_of_run(run)
    reasons = [Reason(weakness)] if weakness and weakness != "unknown" else []
    if quantity.is_relative and loss is not None and loss < SMALL_LOSS:
        reasons.append(Reason("loss", SMALL_LOSS))
    if share is not None and share > LARGEST_SHARE:
        reasons.append(Reason("block"))
    if value == 0:
        reasons.append(Reason("zero"))
    elif quantity.range[0] < 0 and lo is not None and hi is not None and lo <= 0 <= hi:
        reasons.append(Reason("start"))
    return reasons


def unknown_in(score: str, run: Run) -> list[Unknown]:
    """The checks that one run lacks the columns for."""
    unknown: list[Unknown] = ["bigram"] if weakness_of_run(run) == "unknown" else []
    if score in _SHARES:
        share, without_first = _numbers(run, _SHARES[score], f"{_PROFILED[score]}_without_first")
        if share is None:
            unknown.append("rows" if without_first is None else "weight")
    return unknown


def weakness_of_run(run: Run) -> Weakness | None:
    """Why no score is evidence about depth; None where a bigram table knows less."""
    loss, train_loss, bigram, chance = _numbers(run, *LOSSES)
    guessing = _guessing(run)
    if loss is None:
        return "unknown"
    is_at_chance = guessing is not None and loss >= (1 - AT_CHANCE) * guessing
    if is_at_chance or (bigram is not None and loss >= bigram):
        table = min(each for each in (bigram, guessing) if each is not None)
        if train_loss is not None and train_loss < OVERFITS * table:
            return "overfit"
        return "chance" if is_at_chance else "bigram"
    return "unknown" if bigram is None and chance is None else None


def _guessing(run: Run) -> float | None:
    """The loss of a model at chance."""
    chance, vocab_size = _numbers(run, "chance_loss", "vocab_size")
    return chance if chance is not None else math.log(vocab_size) if vocab_size else None


class CommonWeakness(NamedTuple):
    """Of the finished runs, most of which are weak: the most frequent kind, and the means of its runs."""

    kind: Weakness
    n_alike: int
    n_finished: int
    loss: float
    other: float
    """The loss of the table, of guessing or, of runs that overfit, of training."""


def common_weakness(runs: Iterable[Run]) -> CommonWeakness | None:
    finished = [(weakness_of_run(run), run) for run in runs if run.get("outcome") == "ok"]
    weak = Counter(kind for kind, _ in finished if kind and kind != "unknown")
    if not weak.total() > MOST * len(finished):
        return None
    ((kind, n),) = weak.most_common(1)
    having = [run for own, run in finished if own == kind]
    loss = sum(float(run["val_loss"]) for run in having) / n
    others = {"bigram": "bigram_loss", "overfit": "train_loss"}
    other = sum(float(run[others[kind]]) if kind in others else _guessing(run) or 0.0 for run in having) / n
    return CommonWeakness(kind, n, len(finished), loss, other)


def reasons_of_run(run: Run) -> dict[Reason, list[str]]:
    """Reason -> the scores of a finished run that are degenerate for it."""
    named = defaultdict[Reason, list[str]](list)
    for score in SCORES:
        for reason in reasons_in(score, run) if _has_value(score, run) else ():
            named[reason].append(score)
    return named


def sound_form(score: str, runs: Sequence[Run]) -> str | None:
    """The first form of a score that as many runs have and that is sound in them; None without one."""
    least = max(1, sum(_has_value(score, run) for run in runs))
    verdicts = (degeneracy(form, runs) for form in FORMS.get(score, ()))
    return next((verdict.score for verdict in verdicts if verdict.n_runs >= least and not verdict.is_degenerate), None)


def columns_for(score: str) -> list[str]:
    """The columns of `runs` needed to judge a score and its other forms."""
    forms = ((form, f"{form}_lo", f"{form}_hi", _SHARES.get(form)) for form in FORMS.get(score, ()))
    known = {column.name for column in RUNS}
    columns = dict.fromkeys(chain.from_iterable(forms))
    return ["outcome", "n_layers", *LOSSES, "vocab_size", *(name for name in columns if name in known)]


def score_rows(runs: "pd.DataFrame", score: str) -> list[Run]:
    """The rows of a frame, with the columns needed to judge a score."""
    return runs[[name for name in columns_for(score) if name in runs.columns]].to_dict("records")


def usable_form(score: str, runs: Sequence[Run]) -> UsableForm:
    judged = degeneracy(score, runs)
    return UsableForm((sound_form(score, runs) if judged.is_degenerate else None) or score, judged)


def usable_forms(names: Iterable[str], runs: "pd.DataFrame", *, may_replace: bool = True) -> dict[str, UsableForm]:
    """Column of `runs` -> the column that a figure draws for it, itself unless it may be replaced."""
    rows = {name: score_rows(runs, name) for name in names}
    judge = usable_form if may_replace else lambda name, runs: UsableForm(name, degeneracy(name, runs))
    return {name: judge(name, of_score) for name, of_score in rows.items()}


class LayerMetrics(NamedTuple):
    drawn: dict[str, str]
    """Metric by layer or pair -> the metric that a figure draws for it."""
    unsound: list[str]
    """Those drawn without being evidence, since they are divided by a small loss."""


def sound_layer_metrics(metrics: Iterable[str], runs: "pd.DataFrame") -> LayerMetrics:
    """Where most runs have a loss below SMALL_LOSS, metrics divided by it give way to their absolute form, if that is
    among `metrics`."""
    names = dict.fromkeys(metrics)
    losses = runs["val_loss"].dropna()
    drawn = {name: name for name in names if name not in ABSOLUTE_ROWS.values()}
    if not (losses < SMALL_LOSS).sum() > MOST * len(losses):
        return LayerMetrics(drawn, [])
    drawn |= {name: form for name, form in ABSOLUTE_ROWS.items() if {name, form} <= {*names}}
    return LayerMetrics(drawn, [name for name, form in drawn.items() if form == name and name in RELATIVE_ROWS])


def _numbers(run: Run, *names: str) -> Iterator[float | None]:
    return (float_or_none(run.get(name)) for name in names)


def float_or_none(value: Any) -> float | None:
    """A value of a row or a frame; None where it is missing."""
    return None if value is None or value != value else float(value)
