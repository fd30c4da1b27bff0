"""Every effect in a store: each knob at each depth on each basis, and its effect on the slope in depth. Where lr was
tuned, each side is at its own tuned lr, and equal lr is a fifth basis.

Every page and script has the same interval and verdict. Variances are moderated over all settings of an outcome at one
depth (`moderated`). P-values are Holm's over all contrasts at one depth, from which a recipe chooses (over all depth
slopes): of depths without any effect, at most 5% have one called 'lower' or 'higher' on a basis. The rules of a verdict
are in `intervals.Judged`; 'not distinguishable' comes with the detectable effect, or with what was uneven in tuning.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pandas as pd

from sparsedepth.config.model import FILLED_FROM
from sparsedepth.config.run import RunConfig
from sparsedepth.config.synonyms import hint
from sparsedepth.effects.contrast import Contrast, contrasts, over_depths
from sparsedepth.effects.depth_slope import SlopeContrast, depth_slopes
from sparsedepth.effects.intervals import check_shared_baselines, correct, moderate, moderate_by_depth
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
from sparsedepth.store.schema import TUNING_COLUMNS
from sparsedepth.store.tuning_roles import result_rows, without_measured_models

DEPTH = "n_layers"


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
