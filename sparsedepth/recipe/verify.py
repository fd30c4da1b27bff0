"""A recipe's trial on fresh seeds: which runs it takes, and what they say of the recipe and of each of its changes.

Three kinds of configuration, each with every seed: the baseline, the whole recipe, and the recipe with each change left
out. Pairs share their seed; a difference is judged as everywhere (`effects.contrast`: interval and noise floor).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sparsedepth.config.run import RunConfig
from sparsedepth.effects.contrast import Contrast, compare
from sparsedepth.effects.knobs import Knob, plain, setting_text
from sparsedepth.effects.sentences import counted, estimate_text
from sparsedepth.recipe.card import Card, Ingredient, Need, Outcome, Verification, config_of, grade_of, word_of
from sparsedepth.recipe.choose import direction
from sparsedepth.recipe.holdout import outcome_of


def configurations(card: Card) -> dict[str, RunConfig]:
    """Name -> configuration: 'baseline', 'recipe', and 'without SETTING' for each of two changes or more.

    Raises ValueError for a card that recommends nothing, or a configuration that cannot be built.
    """
    rule = card.rule
    if rule.abstained or not rule.changes or rule.baseline is None or rule.config is None:
        raise ValueError(f"the card recommends nothing, so there is nothing to verify: {rule.abstained or 'no change'}")
    found = {"baseline": config_of(rule.baseline), "recipe": config_of(rule.config)}
    for left_out in rule.changes if len(rule.changes) > 1 else ():
        values = dict(rule.config)
        for change in rule.changes:
            for name in change.values:
                values.pop(name, None)
        # what follows from the changed fields follows anew: sizes that RunConfig fills in
        values = {name: value for name, value in values.items() if name in rule.baseline}
        for change in rule.changes:
            values |= change.baseline_values if change is left_out else change.values
        values = {name: value for name, value in values.items() if value is not None}
        found[f"without {left_out.setting}"] = config_of(values)
    return found


def fresh_seeds(card: Card, n: int) -> list[int]:
    """Seeds that no run of the evidence, nor an earlier trial, has used. Raises ValueError for fewer than three."""
    if n < 3:
        raise ValueError(f"seeds={n}: an interval needs 3 seeds at least")
    used = {*card.provenance.seeds, *(card.held_out.verification.seeds if card.held_out.verification else ())}
    first = max(used, default=-1) + 1
    return list(range(first, first + n))


def differing(configs: Mapping[str, RunConfig], apart: Sequence[str] = ()) -> list[str]:
    """The fields in which the configurations differ, those named `apart` left out."""
    ignored = {"seed", "allow", *apart}
    names = [name for name in RunConfig.model_fields if name not in ignored]
    return [name for name in names if len({repr(getattr(config, name)) for config in configs.values()}) > 1]


def sweep_fields(card: Card, n_seeds: int) -> dict[str, Any]:
    """The trial as a sweep definition: what the configurations share as its base, where they differ as its cells."""
    configs = configurations(card)
    fields = differing(configs, list(card.tune))
    shared = configs["recipe"].model_dump(mode="json", exclude={"seed", *fields, *card.tune}, exclude_none=True)
    allow = sorted({name for config in configs.values() for name in config.allow})
    cells = [config.model_dump(mode="json", include=set(fields)) for config in configs.values()]
    changes = " and ".join(change.setting for change in card.rule.changes)
    gain = card.rule.expected_gain
    size = "" if gain is None else f" by {gain:+.3g} {card.rule.unit}, shrunk"
    return {
        "name": "verify",
        "question": f"Does {changes} hold on fresh seeds, and is each of it needed?",
        "hypothesis": f"The recipe is better than the baseline in {card.rule.objective}{size}.",
        "objectives": [card.rule.objective],
        "base": {**shared, "allow": allow},
        "cells": cells,
        "seeds": fresh_seeds(card, n_seeds),
        **({"tune": card.tune} if card.tune else {}),
    }


def verified(card: Card, runs: pd.DataFrame, seeds: Sequence[int]) -> Card:
    """The card with its trial: held-out field, interactions, provenance and grade. `runs` are the trial's rows."""
    configs = configurations(card)
    fields = differing(configs, list(card.tune))
    runs = runs[runs["seed"].isin(seeds)]
    sign = direction(card.rule.objective)

    def gain_over(rival: str) -> Contrast | None:
        knob = _knob(fields, configs, rival)
        return compare(runs, knob, list(knob.settings)[1], card.rule.objective) if len(runs) else None

    gain = gain_over("baseline")
    ingredients = [
        _ingredient(change.setting, gain_over(f"without {change.setting}"), sign)
        for change in card.rule.changes
        if f"without {change.setting}" in configs
    ]
    trial = Verification(
        seeds=list(seeds),
        run_ids=sorted(runs["run_id"]),
        gain=gain.effect.mean if gain else None,
        gain_text=f"{estimate_text(gain.effect, gain.unit)}, {counted(gain.effect.n, 'seed')}"
        if gain
        else "not compared",
        outcome=outcome_of(gain, sign),
        ingredients=ingredients,
    )
    return _with_trial(card, trial)


def _with_trial(card: Card, trial: Verification) -> Card:
    outcomes = (card.held_out.depth_outcome, trial.outcome)
    supported = card.mechanism.supported
    found = [f"in the trial {one.left_out} is {one.verdict}: {one.gain}" for one in trial.ingredients]
    doubtful = [text for text, one in zip(found, trial.ingredients, strict=True) if one.verdict != "needed"]
    return card.model_copy(
        update={
            "version": card.version + 1,
            "mechanism": card.mechanism.model_copy(update={"word": word_of(supported, outcomes)}),
            "held_out": card.held_out.model_copy(update={"verification": trial}),
            "interactions": card.interactions.model_copy(update={"leave_one_out": trial.ingredients}),
            "negative": [*card.negative, *doubtful],
            "grade": grade_of(card.grade.in_sample, supported, *outcomes),
        }
    )


def _knob(fields: Sequence[str], configs: Mapping[str, RunConfig], rival: str) -> Knob:
    """The choice between a rival and the recipe, all differing fields as one."""
    values = [{name: plain(getattr(configs[one], name)) for name in fields} for one in (rival, "recipe")]
    return Knob(name=fields[0], fields=tuple(fields), settings={setting_text(one): one for one in values})


def _ingredient(setting: str, gain: Contrast | None, sign: int) -> Ingredient:
    words: dict[Outcome, Need] = {
        "confirmed": "needed",
        "refuted": "harmful",
        "not confirmed": "not distinguishable",
        "not tested": "not compared",
    }
    return Ingredient(
        left_out=setting,
        gain=f"{estimate_text(gain.effect, gain.unit)}, {counted(gain.effect.n, 'seed')}" if gain else "not compared",
        verdict=words[outcome_of(gain, sign)],
    )
