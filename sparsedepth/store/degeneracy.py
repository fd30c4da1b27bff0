"""Where a score of depth says nothing: which of them are degenerate in these runs, and why.

A score is what a measure says of how much the blocks do: a column of `runs` of which more is better, and that is no
loss. It is degenerate in a run

    - that is at chance, or worse than the bigram table of the text it saw: nothing there needs depth
    - where it is divided by a base loss below SMALL_LOSS: then it calls blocks useful that nothing depends on
    - where one block carries more than LARGEST_SHARE of it: then it says nothing of the others
    - where its interval holds 0, what a model at initialisation has: it knows nothing, so loses nothing by a block

and in all runs of a comparison where it is the same in each. It is degenerate in a comparison where that holds for more
than MOST of the finished runs that have it. What cannot be asked of a run, because a column is missing, is `unknown`.

Of a score that one block carries `_without_first` remains, of a relative one the absolute form: `sound_form`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sparsedepth.config.run import RunConfig
from sparsedepth.quantities import BY_LAYER, BY_PAIR, IN_RUNS, PROFILED, RUNS

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.store.connection import Store

Run = Mapping[str, Any]
"""A row of `runs`; None or NaN is NULL, and so is a column that is not there."""

LARGEST_SHARE = 0.5
"""Of a score, carried by its largest block."""
SMALL_LOSS = 0.1
"""nat/token: there the published threshold of 10% is 0.01 nat/token, a fifth of needed_threshold."""
AT_CHANCE = 0.02
"""A loss within this share of guessing is at chance."""
MOST = 0.5
"""Of the runs."""

SCORES: tuple[str, ...] = tuple(
    name for name, quantity in IN_RUNS.items() if quantity.better == "high" and quantity.measure not in ("", "loss")
)
_CARRIED = {score.rows or score.name: score.name for score in PROFILED}
"""The rows that a score sums up -> the score whose share of the largest block is kept."""
_WITHOUT_LARGEST = ("_without_first", "_deep_half")
_ABSOLUTE = ("affine_loss_added", "affine_loss_added_without_first")
ABSOLUTE_ROWS: Mapping[str, str] = {"affine_loss_increase": "affine_loss_added"}
"""Rows by layer that are divided by the loss -> the same, undivided."""
RELATIVE_ROWS = {name for name, quantity in (BY_LAYER | BY_PAIR).items() if quantity.is_relative}
"""Rows by layer or pair that are divided by the loss."""
BY_BIGRAM, BY_CHANCE = "the model is worse than a bigram table of the text it saw", "the model is at chance"
BY_BLOCK = "one block carries more than half of it"
BY_LOSS = f"it is relative to a loss below {SMALL_LOSS} nat/token"
BY_START = "its interval holds 0, the value of a model at initialisation"
NO_BIGRAM = "whether the model beats a bigram table is not known: no bigram_loss"
NO_ROWS = "which block carries it is not known: no values by block"


@dataclass(frozen=True, kw_only=True)
class Degeneracy:
    """What makes one score say nothing in a comparison."""

    score: str
    n_runs: int
    """Finished runs that have it."""
    constant: float | None
    """Its value, where it is the same in two runs or more and in no other."""
    n_degenerate: int
    reasons: Mapping[str, int]
    """Reason -> runs, the most frequent first."""
    unknown: Mapping[str, int]

    @property
    def is_degenerate(self) -> bool:
        return self.constant is not None or self.n_degenerate > MOST * self.n_runs

    @property
    def reason(self) -> str:
        """The first one."""
        return f"{self.constant:g} in every run" if self.constant is not None else next(iter(self.reasons), "")

    @property
    def grounds(self) -> str:
        """All reasons with their runs, then what is not known; empty where it is degenerate in no run."""
        of_runs = [f"{reason} ({n} of {self.n_runs} runs)" for reason, n in self.reasons.items()]
        if self.constant is not None:
            of_runs.insert(0, self.reason)
        return "; ".join([*of_runs, *self.unknown]) if of_runs else ""

    @property
    def text(self) -> str:
        """'usefulness is degenerate: 0 in every run; ...', or what is not known of it; empty where all is well."""
        if self.grounds:
            return f"{self.score} is degenerate{'' if self.is_degenerate else ' in some runs'}: {self.grounds}"
        return f"{self.score}: {'; '.join(self.unknown)}" if self.unknown else ""


def degeneracy(score: str, runs: Iterable[Run]) -> Degeneracy:
    """How one score is degenerate in the finished runs, if it is. A column that is no score is never degenerate."""
    known = [run for run in runs if run.get("outcome") == "ok" and float_or_none(run.get(score)) is not None]
    if score not in SCORES:
        known = []
    by_run = [reasons_in(score, run) for run in known]
    values = {float_or_none(run.get(score)) for run in known}
    return Degeneracy(
        score=score,
        n_runs=len(known),
        constant=next(iter(values)) if len(known) > 1 and len(values) == 1 else None,
        n_degenerate=sum(map(bool, by_run)),
        reasons=dict(Counter(reason for reasons in by_run for reason in reasons).most_common()),
        unknown=dict(Counter(reason for run in known for reason in unknown_in(score, run)).most_common()),
    )


def reasons_in(score: str, run: Run) -> list[str]:
    """Why a score says nothing in one run; empty where nothing speaks against it."""
    share, lo, hi = (float_or_none(run.get(name)) for name in (_share_column(score), f"{score}_lo", f"{score}_hi"))
    reasons = [weakness] if (weakness := weakness_of_run(run)) else []
    loss = float_or_none(run.get("val_loss"))
    if IN_RUNS[score].is_relative and loss is not None and loss < SMALL_LOSS:
        reasons.append(BY_LOSS)
    if share is not None and share > LARGEST_SHARE:
        reasons.append(BY_BLOCK)
    least, _ = IN_RUNS[score].range
    if least < 0 and lo is not None and hi is not None and lo <= 0 <= hi:
        reasons.append(BY_START)
    return reasons


def unknown_in(score: str, run: Run) -> list[str]:
    """What could not be asked of one run."""
    unknown = []
    if weakness_of_run(run) is None:
        unknown.append(NO_BIGRAM)
    if (column := _share_column(score)) and float_or_none(run.get(column)) is None:
        unknown.append(NO_ROWS)
    return unknown


def weakness_of_run(run: Run) -> str | None:
    """Why nothing that was measured in a model is evidence about depth; '' where it has learned more than a table,
    None where that is not known."""
    loss, bigram, chance = (float_or_none(run.get(name)) for name in ("val_loss", "bigram_loss", "chance_loss"))
    vocab_size = float_or_none(run.get("vocab_size"))
    guessing = chance if chance is not None else math.log(vocab_size) if vocab_size else None
    if loss is None:
        return None
    if guessing is not None and loss >= (1 - AT_CHANCE) * guessing:
        return BY_CHANCE
    if bigram is not None and loss >= bigram:
        return BY_BIGRAM
    return None if bigram is None and chance is None else ""


def common_weakness(runs: Iterable[Run]) -> str:
    """The same of a comparison: the reason that holds in most of its finished runs, else ''."""
    weaknesses = [weakness_of_run(run) for run in runs if run.get("outcome") == "ok"]
    weak = Counter(reason for reason in weaknesses if reason)
    if not weak.total() > MOST * len(weaknesses):
        return ""
    return f"{weak.most_common(1)[0][0]} ({weak.total()} of {len(weaknesses)} runs)"


def sound_form(score: str, runs: Sequence[Run]) -> str | None:
    """The form of a score that is not degenerate in these runs, itself first; None where there is none."""
    return next((form for form in alternative_forms(score) if _is_sound(form, runs)), None)


def alternative_forms(score: str) -> tuple[str, ...]:
    """A score and what can stand in its place, the first that is sound."""
    forms = (score, f"{_shared(score)}_without_first", *_ABSOLUTE)
    return tuple(form for form in dict.fromkeys(forms) if form in SCORES)


def columns_for(score: str) -> tuple[str, ...]:
    """The columns of `runs` that are asked for a score and its other forms."""
    known = {*RunConfig.model_fields, *(column.name for column in RUNS)}
    columns = (
        name for form in alternative_forms(score) for name in (form, f"{form}_lo", f"{form}_hi", _share_column(form))
    )
    needed = ("outcome", "val_loss", "bigram_loss", "chance_loss", "vocab_size", *columns)
    return tuple(name for name in dict.fromkeys(needed) if name in known)


def score_rows(runs: "pd.DataFrame", score: str) -> list[Run]:
    """The rows of a frame as this module reads them."""
    return runs[[name for name in columns_for(score) if name in runs.columns]].to_dict("records")


def read_scores(store: "Store", score: str, condition: str) -> Sequence[Run]:
    """The rows of `runs` that meet an SQL condition, as this module reads them."""
    return store.sql(f"SELECT {', '.join(columns_for(score))} FROM runs WHERE {condition}").records()


def degeneracy_note(score: str, runs: Sequence[Run]) -> str:
    """What to say of a score beside its values, with the form to use instead; empty where all is well."""
    judged = degeneracy(score, runs)
    if not judged.is_degenerate:
        return judged.text
    other = sound_form(score, runs)
    return f"{judged.text}; {f'use {other}' if other else 'no other form of it is sound in these runs'}"


def sound_forms(names: Iterable[str], runs: "pd.DataFrame") -> dict[str, str]:
    """Name of `runs` -> what a figure draws for it: of a degenerate score its sound form, where there is one."""
    known = {name: score_rows(runs, name) for name in names}
    degenerate = {name: rows for name, rows in known.items() if degeneracy(name, rows).is_degenerate}
    return {name: sound_form(name, degenerate[name]) or name if name in degenerate else name for name in known}


def degeneracy_caption(
    scores: Iterable[str], runs: "pd.DataFrame", drawn: Mapping[str, str] = MappingProxyType({})
) -> str:
    """A sentence for a figure's caption: which scores are degenerate, each with its first reason, and what is drawn
    (`sound_forms`) in their place."""
    degeneracies = (degeneracy(score, score_rows(runs, score)) for score in dict.fromkeys(scores))
    marked = {entry.score: f"{entry.score} ({entry.reason})" for entry in degeneracies if entry.is_degenerate}
    text = "".join(
        f" Drawn in place of {marked.pop(name)}, which is degenerate: {form}."
        for name, form in drawn.items()
        if name in marked and form != name
    )
    return text + (f" Degenerate, so no evidence: {', '.join(marked.values())}." if marked else "")


def sound_layer_metrics(metrics: Iterable[str], runs: "pd.DataFrame") -> tuple[dict[str, str], str]:
    """Rows by layer or pair -> what a figure of these runs draws for them, and a sentence on that for its caption:
    where most have a loss below SMALL_LOSS, the absolute form of what is divided by it, if it is among the metrics."""
    names = dict.fromkeys(metrics)
    losses = [loss for value in runs["val_loss"] if (loss := float_or_none(value)) is not None]
    small = bool(losses) and sum(loss < SMALL_LOSS for loss in losses) > MOST * len(losses)
    drawn = {name: name for name in names if name not in ABSOLUTE_ROWS.values()}
    if not small:
        return drawn, ""
    drawn |= {name: form for name, form in ABSOLUTE_ROWS.items() if {name, form} <= {*names}}
    text = "".join(f" Drawn in place of {name} ({BY_LOSS}): {form}." for name, form in drawn.items() if form != name)
    marked = [name for name, form in drawn.items() if form == name and name in RELATIVE_ROWS]
    return drawn, text + (f" No evidence ({BY_LOSS}): {', '.join(marked)}." if marked else "")


def _is_sound(score: str, runs: Sequence[Run]) -> bool:
    judged = degeneracy(score, runs)
    return judged.n_runs > 0 and not judged.is_degenerate


def _shared(score: str) -> str:
    """The score of the same rows that has a profile in depth."""
    return _CARRIED.get(IN_RUNS[score].rows or score, score)


def _share_column(score: str) -> str:
    """The column of `runs` that says what its largest block carries; '' for a form without that block, and for what
    has no profile."""
    if score.endswith(_WITHOUT_LARGEST) or f"{_shared(score)}_largest_share" not in IN_RUNS:
        return ""
    return f"{_shared(score)}_largest_share"


def float_or_none(value: Any) -> float | None:
    """A value of a row or a frame; None where it is missing."""
    return None if value is None or value != value else float(value)
