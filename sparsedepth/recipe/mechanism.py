"""How a recipe is thought to work, and in which word that may be said.

    associated  the rule of the paired effects alone
    predicts    a held-out test confirmed the recipe
    causes      besides, an *intervention* moved one link of the chain alone (LNS and the initialisation: the residual
                variance, with no sparsity; a fixed random mask: sparsity, with no training effect) and with it the
                objective, in the recipe's direction; and every change of the recipe moves that link the same way

An intervention is no proof that the recipe works through that link alone. The links of the chain stand beside it, each
with the word that it has earned by the rules of `effects.words`, which ask about the link and not about the recipe.
"""

from collections.abc import Sequence
from dataclasses import asdict

import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.causal_evidence import weigh
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.knobs import find_knobs
from sparsedepth.recipe.card import Intervention, Mechanism, Verdict, word_of
from sparsedepth.recipe.choose import Recipe
from sparsedepth.recipe.predict import measured, predicted

INTERVENTIONS = {name: role.moves for name, role in roles(RunConfig).items() if role.moves}
"""Knob -> the link that it moves without the others."""


def mechanism_of(runs: pd.DataFrame, recipe: Recipe, outcomes: Sequence[str | None] = ()) -> Mechanism:
    """The chain's links over these runs, the interventions among them, and the word that they earn with the outcomes of
    the held-out tests."""
    links = dict.fromkeys(INTERVENTIONS.values())
    by_link = {link: _verdicts(runs, recipe, link) for link in links} if recipe.tested else {}
    found = [
        Intervention(
            setting=one.contrast.setting,
            link=INTERVENTIONS[one.knob.name],
            moves_link=by_link[INTERVENTIONS[one.knob.name]].get(one.contrast.setting, "not distinguishable"),
            moves_objective=one.contrast.verdict,
        )
        for one in recipe.tested
        if one.knob.name in INTERVENTIONS and one.knob.is_pure
    ]
    proof = next((one for one in found if recipe.changes and _carries(one, recipe, by_link[one.link])), None)
    why = "no intervention on one link moved that link, and the objective the recipe's way, as every change does"
    if proof:
        why = (
            f"{proof.setting} alone makes {proof.link} {proof.moves_link} and {recipe.objective} "
            f"{proof.moves_objective}, as every change of the recipe does"
        )
    return Mechanism(
        links=[asdict(link) | {"word": one.word} for one in weigh(runs) for link in one.links if link.rho is not None],
        interventions=found,
        word=word_of(proof is not None, outcomes),
        supported=proof is not None,
        why=why if recipe.changes else "nothing is recommended",
    )


def _carries(one: Intervention, recipe: Recipe, verdicts: dict[str, Verdict]) -> bool:
    """Whether an intervention moves link and objective, as every change of the recipe does."""
    better = "higher" if recipe.sign > 0 else "lower"
    if one.moves_link == "not distinguishable" or one.moves_objective != better:
        return False
    return all(verdicts.get(change.contrast.setting) == one.moves_link for change in recipe.changes)


def _verdicts(runs: pd.DataFrame, recipe: Recipe, outcome: str) -> dict[str, Verdict]:
    """Setting -> what it does to a link at the recipe's depth."""
    assert recipe.depth is not None
    estimates = measured if recipe.place == "inside" else predicted
    here = runs[runs["n_layers"] == recipe.depth] if recipe.place == "inside" else runs
    found: Sequence[Contrast] = [
        one for knob in find_knobs(here) for one in estimates(here, knob, outcome, recipe.depth)
    ]
    return {one.setting: one.verdict for one in found}
