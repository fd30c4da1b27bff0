"""The tests of a recipe, each passed, failed or not run: in-sample, held-out depth, fresh seeds, several scales, equal
cost. They take the place of a grade. And the sweeps that test it: on fresh seeds, and two of its settings together.

Held-out depth: every setting is predicted to have the effect of the nearest shallower depth, at a depth that it did not
see. The recipe of the shallower depths is confirmed if it has the verdict 'better' there too, refuted if 'worse'.

Verification: the baseline, the whole recipe, and the recipe without each change, each with every fresh seed. The
effects are those of the frame `effects` on these runs alone. The p-value of the recipe's k-th verification is
multiplied by 2^(k-1): without an effect the k-th confirms it with a probability of at most .025 / 2^(k-1), any of them
with one of at most 5%. The p-values of the changes are adjusted for their number."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pandas as pd

from sparsedepth.config.load import build
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.effects.cells import BASELINE, MATCHED, Cells, cells_of
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.frame import as_records, effects_alone, setting_effects
from sparsedepth.quantities.levels import ALPHA
from sparsedepth.quantities.quantity import Named
from sparsedepth.recipe.card import (
    Candidate,
    Card,
    Comparison,
    Holdout,
    Ingredient,
    Need,
    Outcome,
    Prediction,
    Recipe,
    Test,
    Verification,
    comparison_of,
)
from sparsedepth.recipe.choose import Evidence, changed_config, derive
from sparsedepth.store.schema import plain
from sparsedepth.store.setting import BUDGET
from sparsedepth.words.recipe import held_out_text, in_sample_text

Answer = tuple[Literal["passed", "failed", "not run"], str]
"""Outcome and text of a test."""
PASSED: Mapping[Outcome, Literal["passed", "not run"]] = {"confirmed": "passed", "not tested": "not run"}
"""Outcome of a recipe on runs that it did not see -> that of the test, if it did not fail."""
OUTCOMES: Mapping[Comparison, Outcome] = {"better": "confirmed", "worse": "refuted", "not shown": "not confirmed"}
Configs = dict[str, RunConfig]
LEAST_TUNED = 3
"""Values that a sweep tries of a tuned field, at least."""
NEEDS: Mapping[Comparison, Need] = {"worse": "needed", "better": "harmful", "not shown": "not shown to be needed"}
"""The recipe without a change against the recipe -> whether the change is needed."""


def outcome_of(gain: Effect | None) -> Outcome:
    """The outcome for a recipe of its effect on runs that it did not see."""
    if gain is None or gain.estimate is None:
        lost = 0 if gain is None else (gain.diverged or 0) - (gain.diverged_baseline or 0)
        return "refuted" if lost > 1 else "not tested"
    return OUTCOMES[comparison_of(gain)]


def hold_out(found: Evidence, depth: int, recipe: Recipe) -> Holdout:
    """Judge the recipe of the smaller depths at this one; objective and matched cost are those of `recipe`.

    Raises ValueError where the depth has no finished run, or fewer than two smaller depths have."""
    fitted_on = tuple(smaller for smaller in found.depths if smaller < depth)
    if depth not in found.depths or len(fitted_on) < 2:
        have = f"these have n_layers {', '.join(map(str, found.depths)) or 'none'}"
        possible = f"; try --holdout-depth {found.depths[-1]}" if len(found.depths) > 2 else ""
        needs = f"--holdout-depth {depth} needs finished runs there and at two smaller depths"
        raise ValueError(f"{needs}; {have}{possible}")
    shallower = derive(found.runs, depth, recipe.objective, recipe.matched, found, below=depth)
    measured = found.settings(depth)
    gain = measured.get(shallower.effect.setting) if shallower.effect else None
    pairs = [(candidate.effect, measured.get(candidate.setting)) for candidate in shallower.candidates]
    return Holdout(
        depth=depth, fitted_on=fitted_on, changes=tuple(change.setting for change in shallower.changes),
        predictions=tuple(Prediction(setting=own.setting, predicted=own, measured=there) for own, there in pairs),
        gain=gain, outcome=outcome_of(gain),
    )  # fmt: skip


def tests_of(recipe: Recipe, holdout: Holdout | None, verification: Verification | None) -> tuple[Test, ...]:
    """The tests of what is recommended; none without a recommendation, but for a held-out depth that was asked for."""
    found: dict[str, Answer] = {}
    if recipe.effect:
        reason = recipe.weakness or recipe.unknown
        in_sample = ("failed", reason) if reason else ("passed", in_sample_text(recipe, recipe.effect))
        found["in-sample with seeds"] = in_sample
    if recipe.effect or holdout:
        found["held-out depth"] = _held_out(recipe, holdout)
    if recipe.effect:
        found["fresh seeds"] = _fresh_seeds(verification)
        found["several scales"] = _scales(recipe)
        found["equal cost"] = _cost(recipe.effect.flops)
    return tuple(Test(name=name, outcome=outcome, text=text) for name, (outcome, text) in found.items())


def _held_out(recipe: Recipe, holdout: Holdout | None) -> Answer:
    if holdout is None:
        return "not run", "--holdout-depth N"
    is_other = {*holdout.changes} != {change.setting for change in recipe.changes}
    text = held_out_text(holdout, is_other and bool(recipe.changes and holdout.changes))
    if is_other:
        is_open = not recipe.changes if not holdout.changes else holdout.outcome == "not tested"
        return "not run" if is_open else "failed", text
    return PASSED.get(holdout.outcome, "failed"), text


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


def _cost(flops: float | None) -> Answer:
    if flops is None:
        return "not run", "FLOPs are not known"
    return "passed" if flops <= 1 + MATCHED else "failed", f"FLOPs x{flops:.3g}"


# Sweeps


def configurations(card: Card) -> Configs:
    """'baseline', 'recipe', and 'without SETTING' for each of two changes or more.

    Raises ValueError for a card that recommends nothing, or a configuration that cannot be built."""
    recipe = card.recipe
    if not recipe.changes or recipe.baseline is None or recipe.config is None:
        why = recipe.abstained or "no change"
        raise ValueError(f"the card recommends nothing, so there is nothing to verify: {why}")
    configs = {"baseline": recipe.baseline, "recipe": recipe.config}
    for left_out in _left_out(card):
        others = [change.values for change in recipe.changes if change is not left_out]
        configs[f"without {left_out.setting}"] = changed_config(recipe.config, left_out.baseline_values, *others)
    return configs


def _left_out(card: Card) -> tuple[Candidate, ...]:
    return card.recipe.changes if len(card.recipe.changes) > 1 else ()


def fresh_seeds(card: Card, n: int) -> list[int]:
    """Seeds that neither the evidence nor an earlier test has used. Raises ValueError for fewer than three."""
    if n < 3:
        raise ValueError(f"seeds={n}: an interval needs 3 seeds at least")
    used = {*card.provenance.seeds, *(card.verification.seeds if card.verification else ())}
    first = max(used, default=-1) + 1
    return list(range(first, first + n))


def _differing(configs: Configs, tuned: Container[str]) -> list[str]:
    """The fields in which the configurations differ, without those that are tuned again."""
    names = [name for name in CELL_FIELDS if name not in tuned]
    return [name for name in names if len({repr(getattr(config, name)) for config in configs.values()}) > 1]


def verification_fields(card: Card, n_seeds: int) -> Named:
    changes = " and ".join(change.setting for change in card.recipe.changes)
    question = f"Does {changes} hold on fresh seeds, and is each of it needed?"
    return _sweep_fields(card, configurations(card), "verify", question, n_seeds)


def pair_fields(card: Card) -> Named:
    """The sweep that tests two settings together which were better one by one, for `sparsedepth sweep`."""
    baseline, pair = card.recipe.baseline, card.recipe.untested
    assert baseline is not None and pair is not None
    values = {candidate.setting: candidate.values for candidate in card.recipe.candidates}
    alone = {setting: changed_config(baseline, values[setting]) for setting in pair}
    both = changed_config(baseline, *(values[setting] for setting in pair))
    configs = {"baseline": baseline, **alone, "both": both}
    question = f"Are {' and '.join(pair)} better together than either alone?"
    fields = _sweep_fields(card, configs, "pair", question, n_seeds=3)
    build(SweepDefinition, fields, "the sweep of the pair")
    return fields


def _sweep_fields(card: Card, configs: Configs, name: str, question: str, n_seeds: int) -> Named:
    """Shared fields as the sweep's base, differing fields as its cells; lr is tuned again if it was."""
    tune = _tuned_again(card)
    fields = _differing(configs, tune)
    first = next(iter(configs.values()))
    shared = first.model_dump(mode="json", exclude={"seed", "allow", *fields, *tune}, exclude_none=True)
    allow = sorted({name for config in configs.values() for name in config.allow})
    # Tokens that were solved for are equal in FLOPs, those of two settings together about so.
    matched = {"matched": "flops", "tolerance": 0.1} if BUDGET in fields else {}
    return {
        "name": name,
        "question": question,
        "hypothesis": f"The changes are better than the baseline in {card.recipe.objective}.",
        "objectives": [card.recipe.objective],
        "base": {**shared, "allow": allow},
        "cells": [config.model_dump(mode="json", include=set(fields)) for config in configs.values()],
        "seeds": fresh_seeds(card, n_seeds),
        **matched,
        **({"tune": tune, "tuning_seeds": [1000 + seed for seed in fresh_seeds(card, 3)]} if tune else {}),
    }


def _tuned_again(card: Card) -> dict[str, list[float]]:
    """Tuned fields with their values, where these are enough to tune again; others stay as chosen."""
    return {name: values for name, values in card.recipe.tried.items() if len(values) >= LEAST_TUNED}


def verified(card: Card, runs: pd.DataFrame, seeds: Sequence[int]) -> Card:
    """The card with its verification. `runs`: the rows of the verification, tuning included."""
    tuning = runs["tuning"].isin(["tuning", "rejected"]) if "tuning" in runs.columns else False
    runs = runs[runs["seed"].isin(seeds) | tuning]
    cells = cells_of(runs, card.recipe.objective)
    gain = _judged_alone(_effects(card, cells, "baseline").get("recipe"), n_earlier=card.version - 1)
    against_recipe = _effects(card, cells, "recipe", left_out=("baseline",))
    effects = [(change.setting, against_recipe.get(f"without {change.setting}")) for change in _left_out(card)]
    verification = Verification(
        seeds=tuple(seeds), run_ids=tuple(sorted(runs["run_id"])), gain=gain, outcome=outcome_of(gain),
        ingredients=tuple(Ingredient(left_out=x, effect=e, verdict=NEEDS[comparison_of(e)]) for x, e in effects),
    )  # fmt: skip
    return with_verification(card, verification)


def after(card: Card, earlier: Card, seeds: Sequence[int]) -> Card:
    """The card for a verification on these seeds. More seeds than an earlier one began with make another one."""
    test = earlier.verification
    if test is None or test.seeds[0] != seeds[0]:
        return card
    return card.model_copy(update={"version": earlier.version - (len(test.seeds) >= len(seeds))})


def with_verification(card: Card, verification: Verification) -> Card:
    tests = tests_of(card.recipe, card.holdout, verification)
    return card.model_copy(update={"version": card.version + 1, "verification": verification, "tests": tests})


def _effects(card: Card, cells: Cells, reference: str, left_out: Sequence[str] = ()) -> dict[str, Effect]:
    """Name -> effect of its configuration against that of `reference`."""
    configs = configurations(card)
    fields = _differing(configs, _tuned_again(card))
    names = {tuple(plain(getattr(config, f)) for f in fields): name for name, config in configs.items()}
    runs = cells.runs.loc[cells.rows.index, fields]
    values = [tuple(map(plain, row)) for row in runs.itertuples(index=False)]
    setting = pd.Series(map(names.get, values), runs.index, dtype=object)
    rows = cells.rows.assign(
        setting=setting.replace(reference, BASELINE),
        changes=[frozenset() if name == reference else frozenset({("name", name)}) for name in setting],
    )
    cells = replace(cells, rows=rows[setting.notna() & ~setting.isin(left_out)])
    found = effects_alone(cells) if reference == "baseline" else setting_effects(cells)
    return {effect.setting: effect for effect in as_records(found)}


def _judged_alone(gain: Effect | None, n_earlier: int) -> Effect | None:
    """The recipe's gain, the one question of its verification: adjusted for earlier verifications alone."""
    if gain is None or gain.p is None or gain.estimate is None:
        return gain
    p = min(1.0, gain.p * 2**n_earlier)
    return gain.model_copy(update={"p_adjusted": p, "verdict": gain.verdict if p < ALPHA else "not shown"})
