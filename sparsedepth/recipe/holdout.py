"""The held-out test: the recipe of the shallower depths, judged by the effects at a depth that it did not see.

Every setting is predicted to have the effect of the nearest shallower depth. The recipe is confirmed if it has the
verdict 'better' at the held-out depth too, refuted if 'worse'.
"""

from collections.abc import Mapping

from sparsedepth.effects.effect import Effect
from sparsedepth.recipe.card import Comparison, Holdout, Outcome, Prediction, Recipe, comparison_of
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.evidence import Evidence

OUTCOMES: Mapping[Comparison, Outcome] = {"better": "confirmed", "worse": "refuted", "not shown": "not confirmed"}


def outcome_of(gain: Effect | None) -> Outcome:
    """The outcome for a recipe of its effect on runs that it did not see."""
    if gain is None or gain.estimate is None:
        lost = 0 if gain is None else (gain.diverged or 0) - (gain.diverged_baseline or 0)
        return "refuted" if lost > 1 else "not tested"
    return OUTCOMES[comparison_of(gain)]


def hold_out(found: Evidence, depth: int, recipe: Recipe) -> Holdout:
    """Judge the recipe of the smaller depths at this one; objective and matched cost are those of `recipe`.

    Raises ValueError where the depth has no finished run, or fewer than two smaller depths have.
    """
    fitted_on = tuple(smaller for smaller in found.depths if smaller < depth)
    if depth not in found.depths or len(fitted_on) < 2:
        have = ", ".join(map(str, found.depths)) or "none"
        possible = f"; try --holdout-depth {found.depths[-1]}" if len(found.depths) > 2 else ""
        raise ValueError(
            f"--holdout-depth {depth} needs finished runs there and at two smaller depths; these have n_layers {have}"
            f"{possible}"
        )
    shallower = derive(found.runs, depth, recipe.objective, recipe.matched, found, below=depth)
    gain = found.effect(depth, shallower.effect.setting) if shallower.effect else None
    return Holdout(
        depth=depth,
        fitted_on=fitted_on,
        changes=tuple(change.setting for change in shallower.changes),
        predictions=tuple(
            Prediction(setting=c.setting, predicted=c.effect, measured=found.effect(depth, c.setting))
            for c in shallower.candidates
        ),
        gain=gain,
        outcome=outcome_of(gain),
    )
