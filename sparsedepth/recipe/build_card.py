"""Build a recipe's card from the rows that it was derived from."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.recipe.card import Card, Divergence, Recipe
from sparsedepth.recipe.checklist import tests_of
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.evidence import Evidence
from sparsedepth.recipe.holdout import hold_out
from sparsedepth.recipe.provenance import provenance_of
from sparsedepth.recipe.trial import with_trial
from sparsedepth.store.packages import version_differences


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
        confounds=tuple(_confounds(used, recipe)),
        diverged=tuple(_divergences(found, used)),
        provenance=provenance_of(runs, used, recipe, folders),
    )
    return with_trial(card, folders)


def _confounds(used: pd.DataFrame, recipe: Recipe) -> Iterator[str]:
    """Other possible explanations of the effects of the settings tested."""
    names = {name for candidate in recipe.candidates for name in candidate.values}
    yield from (role.confound for name, role in roles(RunConfig).items() if role.confound and name in names)
    if "packages" in used.columns and (packages := version_differences(used["packages"].dropna())):
        yield f"{packages}: numbers may depend on them."


def _divergences(found: Evidence, used: pd.DataFrame) -> Iterator[Divergence]:
    setting = dict(zip(found.cells.rows["run_id"], found.cells.rows["setting"], strict=True))
    for run in used[used["outcome"] == "diverged"].itertuples():
        cause = run.diverged_cause if isinstance(run.diverged_cause, str) else None
        yield Divergence(run_id=str(run.run_id), setting=setting.get(run.run_id, "baseline"), cause=cause)
