"""Build a recipe's card from the rows that it was derived from."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from sparsedepth.recipe.card import Candidate, Card, Recipe
from sparsedepth.recipe.checklist import tests_of
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.evidence import Evidence
from sparsedepth.recipe.holdout import hold_out
from sparsedepth.recipe.provenance import provenance_of
from sparsedepth.recipe.trial import with_trial
from sparsedepth.scaling.speedup import Speedup
from sparsedepth.store.setting import BUDGET


def derive_card(
    runs: pd.DataFrame,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str = "tokens",
    holdout_depth: int | None = None,
    folders: Sequence[Path] = (),
    evidence: Evidence | None = None,
    compute: Mapping[tuple[int, str, int], Speedup] = MappingProxyType({}),
) -> Card:
    """The recipe of the rows of `runs` as a card; tested at `holdout_depth`, and with the verification found next to
    the folders (`trial`). `compute`: what settings are worth (`scaling.speedup`). Raises as `derive` and `hold_out`."""
    found = evidence or Evidence(runs, objective)
    recipe = derive(runs, depth, objective, matched, found)
    recipe = recipe.model_copy(update={"candidates": tuple(_with_compute(recipe, compute))})
    holdout = None if holdout_depth is None else hold_out(found, holdout_depth, recipe)
    used = found.results[found.results["run_id"].isin(recipe.run_ids)]
    card = Card(
        recipe=recipe,
        holdout=holdout,
        tests=tests_of(recipe, holdout, None),
        provenance=provenance_of(runs, used, recipe, folders),
    )
    return with_trial(card, folders)


def _with_compute(recipe: Recipe, compute: Mapping[tuple[int, str, int], Speedup]) -> Iterator[Candidate]:
    for candidate in recipe.candidates:
        assert recipe.baseline is not None
        tokens = candidate.values.get(BUDGET, recipe.baseline.train_tokens)
        worth = compute.get((recipe.shown_at[0], candidate.setting, tokens))
        numbers = None if worth is None else (worth.multiplier, worth.lo, worth.hi)
        yield candidate.model_copy(update={"compute": numbers})
