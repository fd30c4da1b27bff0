"""Build a recipe's card from the rows that it was derived from."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from sparsedepth.recipe.card import Card
from sparsedepth.recipe.checklist import tests_of
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.evidence import Evidence
from sparsedepth.recipe.holdout import hold_out
from sparsedepth.recipe.provenance import provenance_of
from sparsedepth.recipe.trial import with_trial


def derive_card(
    runs: pd.DataFrame,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str = "tokens",
    holdout_depth: int | None = None,
    folders: Sequence[Path] = (),
    evidence: Evidence | None = None,
) -> Card:
    """The recipe of the rows of `runs` as a card; tested at `holdout_depth`, and with the verification found next to
    the folders (`trial`). Raises as `derive` and `hold_out`."""
    found = evidence or Evidence(runs, objective)
    recipe = derive(runs, depth, objective, matched, found)
    holdout = None if holdout_depth is None else hold_out(found, holdout_depth, recipe)
    used = found.results[found.results["run_id"].isin(recipe.run_ids)]
    card = Card(
        recipe=recipe,
        holdout=holdout,
        tests=tests_of(recipe, holdout, None),
        provenance=provenance_of(runs, used, recipe, folders),
    )
    return with_trial(card, folders)
