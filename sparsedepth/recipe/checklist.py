"""The tests of a recipe, each passed, failed or not run: in-sample, held-out depth, fresh seeds, several scales, equal
cost. They take the place of a grade.

The held-out test: every setting is predicted to have the effect of the nearest shallower depth, at a depth that it did
not see. The recipe of the shallower depths is confirmed if it has the verdict 'better' there too, refuted if 'worse'.
"""

from collections.abc import Mapping

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.frame import MATCHED
from sparsedepth.recipe.card import (
    Comparison,
    Holdout,
    Outcome,
    Prediction,
    Recipe,
    Test,
    Verification,
    comparison_of,
)  # fmt: skip
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


# The list


def tests_of(recipe: Recipe, holdout: Holdout | None, verification: Verification | None) -> tuple[Test, ...]:
    """The tests of what is recommended; none without a recommendation, but for a held-out depth that was asked for."""
    if recipe.changes:
        held_out = _held_out(recipe, holdout)
        return (_in_sample(recipe), held_out, _fresh_seeds(verification), _scales(recipe), _cost(recipe))
    return (_held_out(recipe, holdout),) if holdout else ()


def _in_sample(recipe: Recipe) -> Test:
    name, effect = "in-sample with seeds", recipe.effect
    assert effect is not None
    if reason := recipe.weakness or recipe.unknown:
        return Test(name=name, outcome="failed", text=reason)
    p = "" if effect.p_adjusted is None else f", adjusted p {effect.p_adjusted:.3g}"
    where = "" if recipe.place == "inside" else f" at {recipe.shown_at[0]} layers, the nearest run"
    return Test(name=name, outcome="passed", text=f"{counted(effect.seeds or 0, 'seed')}{p}{where}")


def _held_out(recipe: Recipe, holdout: Holdout | None) -> Test:
    name = "held-out depth"
    if holdout is None:
        return Test(name=name, outcome="not run", text="--holdout-depth N")
    fitted = f"{', '.join(map(str, holdout.fitted_on))} layers recommend {' and '.join(holdout.changes) or 'no change'}"
    if not holdout.changes:
        outcome = "failed" if recipe.changes else "not run"
        return Test(name=name, outcome=outcome, text=f"{fitted} at {holdout.depth}{_errors_text(holdout)}")
    is_other = bool(recipe.changes) and {*holdout.changes} != {change.setting for change in recipe.changes}
    is_passed = holdout.outcome == "confirmed" and not is_other
    outcome = "passed" if is_passed else "not run" if holdout.outcome == "not tested" else "failed"
    other = ", not this recipe" if is_other else ""
    text = f"{fitted}{other}; {holdout.outcome} at {holdout.depth}{_errors_text(holdout)}"
    return Test(name=name, outcome=outcome, text=text)


def _errors_text(holdout: Holdout) -> str:
    """'; mean error of its predictions 0.02, of predicting no effect 0.05'."""
    pairs = [(p.predicted.estimate, p.measured.estimate) for p in holdout.predictions if p.measured]
    known = [(own, there) for own, there in pairs if own is not None and there is not None]
    if not known:
        return ""
    error = sum(abs(own - there) for own, there in known) / len(known)
    no_effect = sum(abs(there) for _, there in known) / len(known)
    return f"; mean error of its predictions {error:.2g}, of predicting no effect {no_effect:.2g}"


def _fresh_seeds(verification: Verification | None) -> Test:
    name = "fresh seeds"
    if verification is None:
        return Test(name=name, outcome="not run", text="recipe verify CARD")
    outcome = {"confirmed": "passed", "not tested": "not run"}.get(verification.outcome, "failed")
    text = f"{verification.outcome} on seeds {', '.join(map(str, verification.seeds))}"
    return Test.model_validate({"name": name, "outcome": outcome, "text": text})


def _scales(recipe: Recipe) -> Test:
    name, known = "several scales", [effect for effect in recipe.scales if effect.lo is not None]
    if not known:
        return Test(name=name, outcome="not run", text="one width and one budget")
    at = {effect.context: comparison_of(effect) for effect in known}
    text = "; ".join(f"{verdict} at {context}" for context, verdict in at.items())
    return Test(name=name, outcome="passed" if {*at.values()} == {"better"} else "failed", text=text)


def _cost(recipe: Recipe) -> Test:
    name, flops = "equal cost", recipe.effect.flops if recipe.effect else None
    if flops is None:
        return Test(name=name, outcome="not run", text="FLOPs are not known")
    return Test(name=name, outcome="passed" if flops <= 1 + MATCHED else "failed", text=f"FLOPs x{flops:.3g}")
