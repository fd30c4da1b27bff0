"""Every effect in a store: each knob at each depth on each basis, and its effect on the slope in depth. Where lr was
tuned, each side is at its own tuned lr, and equal lr is a fifth basis.

Every page and script has the same interval and verdict. Variances are moderated over all settings of an outcome at one
depth (`moderated`). P-values are Holm's over all contrasts at one depth, from which a recipe chooses (over all depth
slopes): of depths without any effect, at most 5% have one called 'lower' or 'higher' on a basis. The rules of a verdict
are in `intervals.Judged`; 'not distinguishable' comes with the detectable effect, or with what was uneven in tuning.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pandas as pd

from sparsedepth.config.model import FILLED_FROM
from sparsedepth.config.run import RunConfig
from sparsedepth.config.synonyms import hint
from sparsedepth.effects.cells import unit_of
from sparsedepth.effects.contrast import Contrast, contrasts, contrasts_on_bases, over_depths
from sparsedepth.effects.depth_slope import SlopeContrast, depth_slopes
from sparsedepth.effects.intervals import check_shared_baselines, correct, estimate, moderate, moderate_by_depth
from sparsedepth.effects.knobs import (
    DERIVED,
    Design,
    Knob,
    chosen_fields,
    depth_knob,
    design_of,
    find_knobs,
    tuned_fields,
)
from sparsedepth.effects.pairs import BASES
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.schema import TUNING_COLUMNS
from sparsedepth.store.tuning_roles import result_rows, without_measured_models

DEPTH = "n_layers"


def measure_effects(runs: pd.DataFrame, outcome: str = "val_loss", knob: str | None = None) -> list[Contrast]:
    """Every setting of every knob (depth last), or of one `knob`, at every depth on every basis; p-values are corrected
    over all knobs. A contrast without pairs stands for a basis on which no two runs match.

    Raises ValueError for an outcome that is no number of `runs`, or a knob that these runs do not vary.
    """
    unit_of(outcome)
    runs = relevant_columns(runs, outcome)
    knobs = all_knobs(runs)
    chosen = {each.name for each in choose(knobs, knob)}
    design = design_of(runs)
    by_knob = [(each, contrasts_on_bases(runs, each, outcome, design)) for each in knobs]
    bases = dict.fromkeys(basis for _, by_basis in by_knob for basis in by_basis if basis)
    return [effect for basis in bases for effect in family_of(by_knob, basis) if effect.knob in chosen]


def family_of(by_knob: Sequence[tuple[Knob, Mapping[str | None, Sequence[Contrast]]]], basis: str) -> list[Contrast]:
    """The contrasts on a basis, corrected together: one for every setting and depth with a pair on any basis.

    Pairs that also match with all else equal (None) have that interval. Where a basis has no pair, the contrast with
    all else equal stays in the family, as in a recipe.
    """
    strict = {c.key: c for _, by_basis in by_knob for c in by_basis.get(None, ())}
    on_basis = {c.key: c for _, by_basis in by_knob for c in by_basis.get(basis, ())}
    template: dict[tuple[int | None, str], Contrast] = {}
    for knob, by_basis in by_knob:
        order = list(knob.settings)
        of_knob = {c.key: c for contrasts in by_basis.values() for c in contrasts}
        template |= {key: of_knob[key] for key in sorted(of_knob, key=lambda key: (key[0] or 0, order.index(key[1])))}
    same = {key: c for key, c in strict.items() if key not in on_basis or on_basis[key].run_ids == c.run_ids}
    other = {key: c for key, c in on_basis.items() if key not in same}
    moderated = dict(zip(strict, _moderated(list(strict.values())), strict=True))
    moderated |= zip(other, _moderated(list(other.values()), list(same.values())), strict=True)
    judged = dict(zip(moderated, _corrected(list(moderated.values())), strict=True))
    return [
        replace(judged[key], basis=basis) if key in on_basis else _without_pairs(template[key], basis)
        for key in template
    ]


def judge(family: Sequence[Contrast]) -> list[Contrast]:
    """The same contrasts of one outcome, with moderated errors, and Holm's p over those of each depth."""
    return _corrected(_moderated(family))


def _moderated(family: Sequence[Contrast], lenders: Sequence[Contrast] = ()) -> list[Contrast]:
    """Contrasts of depth itself borrow but do not lend: each is a mean over the settings run at both depths, and less
    noisy than one setting's."""
    lenders = [contrast for contrast in lenders if contrast.knob != DEPTH]
    settings = moderate_by_depth([contrast for contrast in family if contrast.knob != DEPTH], lenders)
    of_settings, lenders = iter(settings), [*settings, *lenders]
    return [
        moderate_by_depth([contrast], lenders)[0] if contrast.knob == DEPTH else next(of_settings)
        for contrast in family
    ]


def _corrected(moderated: Sequence[Contrast]) -> list[Contrast]:
    """Holm's p over the contrasts of each depth; verdicts withheld that a badly tuned baseline may explain."""
    by_depth = defaultdict[int | None, list[Contrast]](list)
    for contrast in moderated:
        by_depth[contrast.n_layers].append(contrast)
    judged = {
        depth: iter(check_shared_baselines(correct(family), [contrast.knob for contrast in family]))
        for depth, family in by_depth.items()
    }
    return [next(judged[contrast.n_layers]) for contrast in moderated]


def effects_of(runs: pd.DataFrame, knobs: Iterable[Knob], outcome: str) -> list[Contrast]:
    """Every setting of these knobs at every depth, all else equal, judged as one family; settings without a pair are
    absent. Raises ValueError for an outcome that is no number of `runs`."""
    design = design_of(runs)
    return judge([contrast for knob in knobs for contrast in contrasts(runs, knob, outcome, design)])


def effects_over_depths(runs: pd.DataFrame, knobs: Iterable[Knob], outcome: str, design: Design) -> list[Contrast]:
    """Every setting of these knobs over all depths together, judged as one family; settings without a pair are absent.
    `design`: `design_of(runs)`."""
    return judge([contrast for knob in knobs for contrast in over_depths(runs, knob, outcome, design)])


def _without_pairs(contrast: Contrast, basis: str) -> Contrast:
    """The same setting at the same depth on a basis on which no two runs match."""
    none: dict[str, Any] = dict.fromkeys(("n_seeds", "n_diverged", "n_baseline_diverged", "n_at_edge", "n_missing"), 0)
    none |= dict.fromkeys(("by_seed", "extra_variances", "run_ids"), ()) | dict.fromkeys(("tuned", "tuning_flaw"), "")
    none |= dict.fromkeys(("baseline_mean", "noise", "floor", "p_holm"))
    return replace(contrast, basis=basis, effect=estimate([]), ratios=dict.fromkeys(BASES), expected_regret=0.0, **none)


def measure_slopes(runs: pd.DataFrame, outcome: str = "val_loss", knob: str | None = None) -> list[SlopeContrast]:
    """Every setting's slope in depth against its baseline's (of one `knob`), corrected over all knobs. Raises as
    `measure_effects`."""
    runs = relevant_columns(runs, outcome)
    chosen = {each.name for each in choose(all_knobs(runs), knob)}
    return [slope for slope in slopes_of(runs, find_knobs(runs), outcome) if slope.knob in chosen]


def slopes_of(runs: pd.DataFrame, knobs: Iterable[Knob], outcome: str) -> list[SlopeContrast]:
    """Every setting's slope in depth against its baseline's, judged as one family."""
    return correct(moderate([slope for knob in knobs for slope in depth_slopes(runs, knob, outcome)]))


def all_knobs(runs: pd.DataFrame) -> list[Knob]:
    """The knobs, and depth last."""
    depth = depth_knob(runs)
    return [*find_knobs(runs), *([depth] if depth else [])]


def relevant_columns(runs: pd.DataFrame, *outcomes: str) -> pd.DataFrame:
    """The trained runs, with only the columns that contrasts of these outcomes use: slicing 350 columns is slow."""
    runs = without_measured_models(runs)
    sizes = ("n_layers", *FILLED_FROM, *DERIVED)
    facts = ("run_id", "cell_id", "seed", "outcome", "model", "corpus", *(column.name for column in TUNING_COLUMNS))
    names = dict.fromkeys(
        (*facts, *outcomes, *BASES.values(), *sizes, *tuned_fields(result_rows(runs)), *chosen_fields(runs))
    )
    runs = runs[[name for name in names if name in runs.columns]]
    # Iterating over Arrow strings, as `keys` and `labels` do, is slow.
    return runs.astype({name: object for name, kind in runs.dtypes.items() if isinstance(kind, pd.StringDtype)})


def choose(knobs: Sequence[Knob], name: str | None) -> list[Knob]:
    """All knobs, or the one that a field belongs to. Raises ValueError."""
    chosen = [knob for knob in knobs if name is None or name in knob.fields]
    if not chosen:
        names = ", ".join(knob.name for knob in knobs)
        if name is not None and name not in RunConfig.model_fields:
            near = hint(name, RunConfig.model_fields) or f"these runs vary: {names}"
            raise ValueError(f"--knob {name!r} is no field of a run; {near}")
        raise ValueError(
            f"no two runs differ in {name} alone; these runs vary: {names}"
            if names
            else "no two runs differ in one field alone: there is no effect to show; run a sweep"
        )
    return chosen


_COLUMNS = {
    **{name: name for name in ("knob", "setting", "baseline", "n_layers", "basis", "outcome", "verdict")},
    **{"effect": "effect.mean", "lo": "effect.lo", "hi": "effect.hi", "unit": "unit", "p": "effect.p"},
    **{"p_holm": "p_holm", "df": "effect.df", "detectable": "detectable", "noise": "noise", "floor": "floor"},
    **{"baseline_mean": "baseline_mean", "pairs": "effect.n", "seeds": "n_seeds", "diverged": "n_diverged"},
    **{"at_edge": "n_at_edge", "tuning_flaw": "verdict_blocked_by"},
}
"""Column -> attribute of a contrast."""


def effects_table(effects: Iterable[Contrast]) -> QueryResult:
    """One row per effect; NULL where there is no matched pair, or too few."""
    rows = []
    for contrast in effects:
        row = dict(zip(_COLUMNS, attrgetter(*_COLUMNS.values())(contrast), strict=True))
        if not contrast.has_pairs:
            row |= {"verdict": "no matched runs", "diverged": None, "at_edge": None}
        rows.append(tuple((row | {"tuning_flaw": row["tuning_flaw"] or None}).values()))
    return QueryResult(columns=tuple(_COLUMNS), rows=tuple(rows))
