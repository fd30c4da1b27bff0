"""Degenerate scores of depth: those that carry no information in a set of runs, and why.

A score measures how much the blocks do: a measured column of `runs` of which more is better. It is degenerate in a run

    - at chance level, or worse than the bigram table of its training text: the model uses no depth
    - if it is divided by a loss below SMALL_LOSS: it would count blocks as useful that nothing depends on
    - if one block carries more than LARGEST_SHARE of it: it says nothing about the others
    - if it is 0, or its interval contains 0, its value at initialisation (scores that start elsewhere, such as
      `causal_score`, have the first reason instead: an untrained model is at chance)
    - if all runs of the comparison have the same value

It is degenerate in a comparison if it is in more than MOST of the finished runs that have it. That all runs of a depth
have the same value is a reason of these runs, but does not count there: they may differ by depth. `sound_form` takes
its place: of a score carried by one block the form `_without_first`, of a relative one the absolute form."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
LOSSES = ("val_loss", "bigram_loss", "chance_loss")
MOST = 0.5
"""Share of the runs."""

SCORES: tuple[str, ...] = tuple(
    name for name, quantity in IN_RUNS.items() if quantity.better == "high" and quantity.measure not in ("", "loss")
)
_CARRIED = {score.metric: score.name for score in PROFILED}
"""Metric by layer or pair -> the score that averages it and has a depth profile."""
_WITHOUT_LARGEST = ("_without_first", "_deep_half")
_ABSOLUTE = ("affine_loss_added", "affine_loss_added_without_first")
ABSOLUTE_ROWS: Mapping[str, str] = {"affine_loss_increase": "affine_loss_added"}
"""Metrics by layer that are divided by the loss -> their absolute form."""
RELATIVE_ROWS = {name for name, quantity in (BY_LAYER | BY_PAIR).items() if quantity.is_relative}
"""Metrics by layer or pair that are divided by the loss."""
BY_BIGRAM, BY_CHANCE = "the model is worse than a bigram table of its training text", "the model is at chance"
BY_BLOCK = "one block carries more than half of it"
BY_LOSS = f"it is relative to a loss below {SMALL_LOSS} nat/token"
BY_START = "its interval contains 0, the value at initialisation"
BY_ZERO = "it is 0, the value at initialisation"
NO_BIGRAM = "unknown whether the model beats a bigram table: no bigram_loss"
NO_ROWS = "unknown which block carries it: no values by block"
NO_WEIGHT = "no block carries it: none has a weight above 0"


@dataclass(frozen=True, kw_only=True)
class Degeneracy:
    """Why one score is degenerate in a comparison, if it is."""

    score: str
    n_runs: int
    """Finished runs that have it."""
    is_degenerate: bool
    reasons: Mapping[str, int]
    """Reason -> runs, the most frequent first."""
    unknown: Mapping[str, int]
    """Check that was not possible, for lack of a column -> runs."""

    @property
    def reason(self) -> str:
        """The main reason; empty without one."""
        return next(iter(self.reasons), "")

    @property
    def grounds(self) -> str:
        """All reasons with the number of runs, then what is unknown; empty where it is degenerate in no run."""
        reasons = [f"{reason} ({n} of {self.n_runs} runs)" for reason, n in self.reasons.items()]
        return "; ".join([*reasons, *self.unknown]) if reasons else ""

    @property
    def text(self) -> str:
        """'usefulness is degenerate: 0 in every run (9 of 9 runs); ...', or what is unknown; empty if all is well."""
        if self.grounds:
            return f"{self.score} is degenerate{'' if self.is_degenerate else ' in some runs'}: {self.grounds}"
        return f"{self.score}: {'; '.join(self.unknown)}" if self.unknown else ""


def degeneracy(score: str, runs: Iterable[Run]) -> Degeneracy:
    """The degeneracy of one score in the finished runs. A column that is no score is never degenerate."""
    scored = [run for run in runs if score in SCORES and _has_value(score, run)]
    constant, own = _constant(score, scored), [reasons_in(score, run) for run in scored]
    reasons = ((*_shared_reason(constant, run), *of_run) for run, of_run in zip(scored, own, strict=True))
    return Degeneracy(
        score=score,
        n_runs=len(scored),
        is_degenerate=None in constant or sum(map(bool, own)) > MOST * len(scored),
        reasons=dict(Counter(chain.from_iterable(reasons)).most_common()),
        unknown=dict(Counter(reason for run in scored for reason in unknown_in(score, run)).most_common()),
    )


def reasons_by_run(score: str, runs: Sequence[Run]) -> list[list[str]]:
    """Why a score is degenerate in each run of a comparison; empty where it is not, or the run has no value."""
    constant = _constant(score, [run for run in runs if _has_value(score, run)])
    return [[*_shared_reason(constant, run), *reasons_in(score, run)] if _has_value(score, run) else [] for run in runs]


def _shared_reason(constant: Mapping[float | None, str], run: Run) -> list[str]:
    """What a run shares with all runs, or with those of its depth (`_constant`)."""
    reason = constant.get(None) or constant.get(float_or_none(run.get("n_layers")))
    return [reason] if reason else []


def _constant(score: str, scored: Sequence[Run]) -> dict[float | None, str]:
    """n_layers (None: all) -> the reason that these runs, at least two, have the same value."""
    values_at = defaultdict[float | None, list[float]](list)
    for run in scored:
        for depth in {None, float_or_none(run.get("n_layers"))}:
            values_at[depth].append(float(run[score]))
    return {
        depth: f"{values[0]:g} in every run" + ("" if depth is None else f" at {depth:g} layers")
        for depth, values in values_at.items()
        if len(values) > 1 and len({*values}) == 1
    }


def _has_value(score: str, run: Run) -> bool:
    return run.get("outcome") == "ok" and float_or_none(run.get(score)) is not None


def reasons_in(score: str, run: Run) -> list[str]:
    """Why a score is degenerate in a run by itself; empty where it is not."""
    share, lo, hi = (float_or_none(run.get(name)) for name in (_share_column(score), f"{score}_lo", f"{score}_hi"))
    value, loss = float_or_none(run.get(score)), float_or_none(run.get("val_loss"))
    least, _ = IN_RUNS[score].range
    holds = {
        weakness_of_run(run): True,
        BY_LOSS: IN_RUNS[score].is_relative and loss is not None and loss < SMALL_LOSS,
        BY_BLOCK: share is not None and share > LARGEST_SHARE,
        BY_ZERO: value == 0,
        BY_START: value != 0 and least < 0 and lo is not None and hi is not None and lo <= 0 <= hi,
    }
    return [reason for reason, is_true in holds.items() if reason and is_true]


def unknown_in(score: str, run: Run) -> list[str]:
    """The checks that one run lacks the columns for."""
    unknown = []
    if weakness_of_run(run) is None:
        unknown.append(NO_BIGRAM)
    if (column := _share_column(score)) and float_or_none(run.get(column)) is None:
        has_rows = float_or_none(run.get(f"{_shared(score)}_without_first")) is not None
        unknown.append(NO_WEIGHT if has_rows else NO_ROWS)
    return unknown


def weakness_of_run(run: Run) -> str | None:
    """Why no score is evidence about depth; '' where a bigram table knows less, None if unknown."""
    loss, bigram, chance = (float_or_none(run.get(name)) for name in LOSSES)
    guessing = _guessing(run)
    if loss is None:
        return None
    if guessing is not None and loss >= (1 - AT_CHANCE) * guessing:
        return BY_CHANCE
    if bigram is not None and loss >= bigram:
        return BY_BIGRAM
    return None if bigram is None and chance is None else ""


def _guessing(run: Run) -> float | None:
    """The loss of a model at chance."""
    chance, vocab_size = (float_or_none(run.get(name)) for name in ("chance_loss", "vocab_size"))
    return chance if chance is not None else math.log(vocab_size) if vocab_size else None


def common_weakness(runs: Iterable[Run]) -> str:
    """The weakness of most finished runs, with their loss and that of the table or chance; else ''."""
    finished = [(weakness_of_run(run), run) for run in runs if run.get("outcome") == "ok"]
    weak = Counter(reason for reason, _ in finished if reason)
    if not weak.total() > MOST * len(finished):
        return ""
    reason, n = weak.most_common(1)[0]
    having = [run for own, run in finished if own == reason]
    loss = sum(float(run["val_loss"]) for run in having) / n
    other = sum((_guessing(run) or 0.0) if reason == BY_CHANCE else float(run["bigram_loss"]) for run in having) / n
    return f"{reason} ({weak.total()} of {len(finished)} runs; val_loss {loss:.4g} against {other:.4g} nat/token)"


def notes_on_run(run: Run) -> list[str]:
    """Why scores of a finished run are degenerate; the reason of a weak model concerns all."""
    if not (scores := [score for score in SCORES if _has_value(score, run)]):
        return []
    weakness = weakness_of_run(run)
    named = defaultdict[str, list[str]](list)
    for score in scores:
        for reason in reasons_in(score, run):
            named[reason].append(score)
    notes = [f"degenerate ({reason}): {', '.join(of)}" for reason, of in named.items() if reason != weakness]
    return [f"{weakness}, so no score of depth is evidence", *notes] if weakness else notes


def sound_form(score: str, runs: Sequence[Run]) -> str | None:
    """The first form of a score that as many runs have and that is sound in them; None without one."""
    least = max(1, sum(_has_value(score, run) for run in runs))
    verdicts = (degeneracy(form, runs) for form in alternative_forms(score))
    return next((verdict.score for verdict in verdicts if verdict.n_runs >= least and not verdict.is_degenerate), None)


def alternative_forms(score: str) -> tuple[str, ...]:
    """A score and its possible replacements, in order of preference."""
    forms = (score, f"{_shared(score)}_without_first", *_ABSOLUTE)
    return tuple(form for form in dict.fromkeys(forms) if form in SCORES)


def columns_for(score: str) -> tuple[str, ...]:
    """The columns of `runs` needed to judge a score and its other forms."""
    columns = (
        name for form in alternative_forms(score) for name in (form, f"{form}_lo", f"{form}_hi", _share_column(form))
    )
    known = {column.name for column in RUNS}
    return ("outcome", "n_layers", *LOSSES, "vocab_size", *(name for name in dict.fromkeys(columns) if name in known))


def score_rows(runs: "pd.DataFrame", score: str) -> list[Run]:
    """The rows of a frame, with the columns needed to judge a score."""
    return runs[[name for name in columns_for(score) if name in runs.columns]].to_dict("records")


def usable_form(score: str, runs: Sequence[Run], advice: str = "use") -> tuple[str, str]:
    """The score, or where it is degenerate its sound form, if it has one; and a warning, empty where all is well."""
    verdict = degeneracy(score, runs)
    if not verdict.is_degenerate:
        return score, verdict.text
    form = sound_form(score, runs)
    remedy = f"{advice} {form}" if form else "no other form of it is sound in these runs"
    return form or score, f"{verdict.text}; {remedy}"


def sound_forms(names: Iterable[str], runs: "pd.DataFrame") -> dict[str, str]:
    """Column of `runs` -> the column that a figure draws for it: the sound form of a degenerate score, if any."""
    return {name: usable_form(name, score_rows(runs, name))[0] for name in names}


def degeneracy_caption(
    scores: Iterable[str], runs: "pd.DataFrame", drawn: Mapping[str, str] = MappingProxyType({})
) -> str:
    """A sentence for a caption: degenerate scores, their main reasons, and what is drawn instead."""
    verdicts = (degeneracy(score, score_rows(runs, score)) for score in dict.fromkeys(scores))
    marked = {verdict.score: f"{verdict.score} ({verdict.reason})" for verdict in verdicts if verdict.is_degenerate}
    text = "".join(
        f" Drawn in place of {marked.pop(name)}, which is degenerate: {form}."
        for name, form in drawn.items()
        if name in marked and form != name
    )
    return text + (f" Degenerate, so no evidence: {', '.join(marked.values())}." if marked else "")


def sound_layer_metrics(metrics: Iterable[str], runs: "pd.DataFrame") -> tuple[dict[str, str], str]:
    """Metric by layer or pair -> the metric that a figure draws for it, and a sentence for its caption. Where most runs
    have a loss below SMALL_LOSS, metrics divided by it give way to their absolute form, if that is among `metrics`."""
    names, losses = dict.fromkeys(metrics), runs["val_loss"].dropna()
    small = (losses < SMALL_LOSS).sum() > MOST * len(losses)
    drawn = {name: name for name in names if name not in ABSOLUTE_ROWS.values()}
    if not small:
        return drawn, ""
    drawn |= {name: form for name, form in ABSOLUTE_ROWS.items() if {name, form} <= {*names}}
    text = "".join(f" Drawn in place of {name} ({BY_LOSS}): {form}." for name, form in drawn.items() if form != name)
    marked = [name for name, form in drawn.items() if form == name and name in RELATIVE_ROWS]
    return drawn, text + (f" No evidence ({BY_LOSS}): {', '.join(marked)}." if marked else "")


def _shared(score: str) -> str:
    """The score over the same rows that has a depth profile."""
    return _CARRIED.get(IN_RUNS[score].metric, score)


def _share_column(score: str) -> str:
    """The column of the share of its largest block; '' for forms without that block and scores without a profile."""
    column = f"{_shared(score)}_largest_share"
    return column if column in IN_RUNS and not score.endswith(_WITHOUT_LARGEST) else ""


def float_or_none(value: Any) -> float | None:
    """A value of a row or a frame; None where it is missing."""
    return None if value is None or value != value else float(value)
