"""The tests of a recipe, each passed, failed or not run: in-sample, held-out depth, fresh seeds, several scales, equal
cost. They take the place of a grade."""

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.frame import MATCHED
from sparsedepth.recipe.card import Holdout, Recipe, Test, Verification, comparison_of


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
    is_same = set(holdout.changes) == {change.setting for change in recipe.changes}
    is_passed = holdout.outcome == "confirmed" and (is_same or not recipe.changes)
    other = "" if is_same or not recipe.changes else ", not this recipe"
    outcome = "passed" if is_passed else "not run" if holdout.outcome == "not tested" else "failed"
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
