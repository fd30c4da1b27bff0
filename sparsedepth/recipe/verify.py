"""Verification of a recipe on fresh seeds: the runs needed, and the outcome for the recipe and for each change.

Three kinds of configuration, each with every seed: the baseline, the whole recipe, and the recipe without each change.
Pairs share their seed; verdicts are those of `effects.contrast` (interval and noise floor), for the changes with Holm's
correction over them. The p-value of the recipe's k-th verification is multiplied by 2^(k-1): without an effect the k-th
confirms it with a probability of at most .025 / 2^(k-1), and any of them with one of at most 5%.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from sparsedepth.config.load import build
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.effects.contrast import Contrast, compare
from sparsedepth.effects.intervals import correct, moderate
from sparsedepth.effects.knobs import Knob, plain, setting_text
from sparsedepth.recipe.card import Card, Comparison, Ingredient, Need, Verification
from sparsedepth.recipe.choose import comparison_of
from sparsedepth.recipe.holdout import OUTCOMES

NEEDS: dict[Comparison, Need] = {
    "better": "needed",
    "worse": "harmful",
    "not distinguishable": "not distinguishable",
    "not compared": "not compared",
}
"""The recipe against the recipe without a change -> whether the change is needed."""


def configurations(card: Card) -> dict[str, RunConfig]:
    """Name -> configuration: 'baseline', 'recipe', and 'without SETTING' for each of two changes or more.

    Raises ValueError for a card that recommends nothing, or a configuration that cannot be built.
    """
    recipe = card.recipe
    if recipe.abstained or not recipe.changes or recipe.baseline is None or recipe.config is None:
        why = recipe.abstained or "no change"
        raise ValueError(f"the card recommends nothing, so there is nothing to verify: {why}")
    configs = {"baseline": recipe.baseline, "recipe": recipe.config}
    baseline, whole = (config.model_dump(mode="json", exclude_none=True) for config in configs.values())
    changed = {name for change in recipe.changes for name in change.values}
    for left_out in recipe.changes if len(recipe.changes) > 1 else ():
        # sizes that RunConfig derives from the changed fields are derived again
        values = {name: value for name, value in whole.items() if name in baseline and name not in changed}
        for change in recipe.changes:
            values |= change.baseline_values if change is left_out else change.values
        values = {name: value for name, value in values.items() if value is not None}
        configs[f"without {left_out.contrast.setting}"] = build(RunConfig, values, "the card's configuration")
    return configs


def fresh_seeds(card: Card, n: int) -> list[int]:
    """Seeds that neither the evidence nor an earlier test has used. Raises ValueError for fewer than three."""
    if n < 3:
        raise ValueError(f"seeds={n}: an interval needs 3 seeds at least")
    used = {*card.provenance.seeds, *(card.held_out.verification.seeds if card.held_out.verification else ())}
    first = max(used, default=-1) + 1
    return list(range(first, first + n))


def differing(configs: Mapping[str, RunConfig], excluded: Sequence[str] = ()) -> list[str]:
    """The fields in which the configurations differ, without those `excluded`."""
    names = [name for name in CELL_FIELDS if name not in excluded]
    return [name for name in names if len({repr(getattr(config, name)) for config in configs.values()}) > 1]


def sweep_fields(card: Card, n_seeds: int) -> dict[str, Any]:
    """The verification as a sweep: shared fields as its base, differing fields as its cells."""
    configs, tune = configurations(card), card.learning_rate.tried
    fields = differing(configs, list(tune))
    shared = configs["recipe"].model_dump(mode="json", exclude={"seed", *fields, *tune}, exclude_none=True)
    allow = sorted({name for config in configs.values() for name in config.allow})
    cells = [config.model_dump(mode="json", include=set(fields)) for config in configs.values()]
    changes = " and ".join(change.contrast.setting for change in card.recipe.changes)
    gain = card.recipe.expected_gain
    size = "" if gain is None else f" by {gain:+.3g} {card.recipe.unit}, shrunk"
    return {
        "name": "verify",
        "question": f"Does {changes} hold on fresh seeds, and is each of it needed?",
        "hypothesis": f"The recipe is better than the baseline in {card.recipe.objective}{size}.",
        "objectives": [card.recipe.objective],
        "base": {**shared, "allow": allow},
        "cells": cells,
        "seeds": fresh_seeds(card, n_seeds),
        **({"tune": tune, "tuning_seeds": [1000 + seed for seed in fresh_seeds(card, 3)]} if tune else {}),
    }


def verified(card: Card, runs: pd.DataFrame, seeds: Sequence[int]) -> Card:
    """The card with its verification, evidence level and grade. `runs`: the rows of the verification."""
    configs = configurations(card)
    fields = differing(configs, list(card.learning_rate.tried))
    runs = runs[runs["seed"].isin(seeds)]

    def gain_over(rival: str) -> Contrast | None:
        knob = _knob(fields, configs, rival)
        return compare(runs, knob, list(knob.settings)[1], card.recipe.objective) if len(runs) else None

    settings = [change.contrast.setting for change in card.recipe.changes if len(card.recipe.changes) > 1]
    raw = {rival: gain_over(rival) for rival in ("baseline", *(f"without {setting}" for setting in settings))}
    compared = {rival: contrast for rival, contrast in raw.items() if contrast is not None}
    moderated = dict(zip(compared, moderate([*compared.values()]), strict=True))
    gain = _corrected_for(card.version - 1, moderated.pop("baseline", None))
    corrected = dict(zip(moderated, correct([*moderated.values()]), strict=True))
    gains = {setting: corrected.get(f"without {setting}") for setting in settings}
    verification = Verification(
        seeds=tuple(seeds),
        run_ids=tuple(sorted(runs["run_id"])),
        gain=gain,
        outcome=OUTCOMES["worse" if gain and gain.n_diverged > gain.n_baseline_diverged else comparison_of(gain)],
        ingredients=tuple(
            Ingredient(left_out=setting, gain=gain, verdict=NEEDS[comparison_of(gain)])
            for setting, gain in gains.items()
        ),
    )
    return card.with_verification(verification)


def _corrected_for(n_earlier: int, gain: Contrast | None) -> Contrast | None:
    """The recipe's gain, corrected for earlier verifications."""
    if gain is None or gain.effect.p is None or not n_earlier:
        return gain
    return replace(gain, p_holm=min(1.0, gain.effect.p * 2**n_earlier), n_tested=2**n_earlier)


def _knob(fields: Sequence[str], configs: Mapping[str, RunConfig], rival: str) -> Knob:
    """The choice between a rival and the recipe as a knob of all differing fields."""
    settings = [{name: plain(getattr(configs[side], name)) for name in fields} for side in (rival, "recipe")]
    return Knob(name=fields[0], fields=tuple(fields), settings={setting_text(values): values for values in settings})
