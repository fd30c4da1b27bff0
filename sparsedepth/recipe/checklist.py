"""The tests of a recipe, each passed, failed or not run: in-sample, held-out depth, fresh seeds, several scales, equal
cost. They take the place of a grade.

The held-out test: every setting is predicted to have the effect of the nearest shallower depth, at a depth that it did
not see. The recipe of the shallower depths is confirmed if it has the verdict 'better' there too, refuted if 'worse'.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Literal

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.frame import MATCHED
from sparsedepth.recipe.card import Comparison, Holdout, Outcome, Prediction, Recipe, Test, Verification, comparison_of
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.evidence import Evidence

Answer = tuple[Literal["passed", "failed", "not run"], str]
"""Outcome and text of a test."""
PASSED: Mapping[Outcome, Literal["passed", "not run"]] = {"confirmed": "passed", "not tested": "not run"}
"""Outcome of a recipe on runs that it did not see -> that of the test, if it did not fail."""
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
        have = f"these have n_layers {', '.join(map(str, found.depths)) or 'none'}"
        possible = f"; try --holdout-depth {found.depths[-1]}" if len(found.depths) > 2 else ""
        needs = f"--holdout-depth {depth} needs finished runs there and at two smaller depths"
        raise ValueError(f"{needs}; {have}{possible}")
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


# The list


def tests_of(recipe: Recipe, holdout: Holdout | None, verification: Verification | None) -> tuple[Test, ...]:
    """The tests of what is recommended; none without a recommendation, but for a held-out depth that was asked for."""
    found: dict[str, Answer] = {}
    if recipe.changes:
        found["in-sample with seeds"] = _in_sample(recipe)
    if recipe.changes or holdout:
        found["held-out depth"] = _held_out(recipe, holdout)
    if recipe.changes:
        found["fresh seeds"] = _fresh_seeds(verification)
        found["several scales"] = _scales(recipe)
        found["equal cost"] = _cost(recipe)
    return tuple(Test(name=name, outcome=outcome, text=text) for name, (outcome, text) in found.items())


def _in_sample(recipe: Recipe) -> Answer:
    effect = recipe.effect
    assert effect is not None
    if reason := recipe.weakness or recipe.unknown:
        return "failed", reason
    p = "" if effect.p_adjusted is None else f", adjusted p {effect.p_adjusted:.3g}"
    where = "" if recipe.place == "inside" else f" at {recipe.shown_at[0]} layers, the nearest run"
    return "passed", f"{counted(effect.seeds or 0, 'seed')}{p}{where}"


def _held_out(recipe: Recipe, holdout: Holdout | None) -> Answer:
    if holdout is None:
        return "not run", "--holdout-depth N"
    fitted = f"{', '.join(map(str, holdout.fitted_on))} layers recommend {' and '.join(holdout.changes) or 'no change'}"
    end = f"at {holdout.depth}{_errors_text(holdout)}"
    if not holdout.changes:
        return "failed" if recipe.changes else "not run", f"{fitted} {end}"
    if recipe.changes and {*holdout.changes} != {change.setting for change in recipe.changes}:
        outcome = "not run" if holdout.outcome == "not tested" else "failed"
        return outcome, f"{fitted}, not this recipe; {holdout.outcome} {end}"
    return PASSED.get(holdout.outcome, "failed"), f"{fitted}; {holdout.outcome} {end}"


def _errors_text(holdout: Holdout) -> str:
    """'; mean error of its predictions 0.02, of predicting no effect 0.05'."""
    pairs = [(p.predicted.estimate, p.measured.estimate) for p in holdout.predictions if p.measured]
    known = [(own, there) for own, there in pairs if own is not None and there is not None]
    if not known:
        return ""
    error = fmean(abs(own - there) for own, there in known)
    no_effect = fmean(abs(there) for _, there in known)
    return f"; mean error of its predictions {error:.2g}, of predicting no effect {no_effect:.2g}"


def _fresh_seeds(verification: Verification | None) -> Answer:
    if verification is None:
        return "not run", "recipe verify CARD"
    text = f"{verification.outcome} on seeds {', '.join(map(str, verification.seeds))}"
    return PASSED.get(verification.outcome, "failed"), text


def _scales(recipe: Recipe) -> Answer:
    known = {effect.context: comparison_of(effect) for effect in recipe.scales if effect.lo is not None}
    if not known:
        return "not run", "one width and one budget"
    text = "; ".join(f"{verdict} at {context}" for context, verdict in known.items())
    return "passed" if {*known.values()} == {"better"} else "failed", text


def _cost(recipe: Recipe) -> Answer:
    flops = recipe.effect.flops if recipe.effect else None
    if flops is None:
        return "not run", "FLOPs are not known"
    return "passed" if flops <= 1 + MATCHED else "failed", f"FLOPs x{flops:.3g}"
