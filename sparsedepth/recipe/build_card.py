"""Build a recipe's card: its evidence, from the rows that it was derived from.

Evidence levels of the mechanism:

    in-sample            paired effects only
    predicted            a held-out test confirmed the recipe
    intervention-backed  in addition, an *intervention* that sets one quantity of the chain (LNS and the initialisation:
                         residual variance without sparsity; a fixed random mask: sparsity without training effect)
                         moved it, and the objective in the recipe's direction; and every change of the recipe moves
                         that quantity in the same direction

An intervention does not prove that the recipe works through that link alone. The card also has the verdict for each
link of the chain, by the rules of `causal_evidence`, which are about the link and not about the recipe.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.all_effects import slopes_of
from sparsedepth.effects.causal_evidence import INTERVENTIONS, InterventionEffect, chain_evidence
from sparsedepth.effects.chain import cautions
from sparsedepth.effects.knobs import Knob, find_knobs, tuned_fields
from sparsedepth.effects.pairs import BASES
from sparsedepth.recipe.card import (
    Card,
    Divergence,
    HeldOut,
    Holdout,
    LearningRate,
    Mechanism,
    OnBases,
    Outcome,
    Recipe,
    earned_word,
    grade_of,
)
from sparsedepth.recipe.choose import comparison_of, derive, measure_settings, rows_at
from sparsedepth.recipe.comparison_rows import comparison_rows
from sparsedepth.recipe.holdout import hold_out, hold_out_scale
from sparsedepth.recipe.measured import Measured
from sparsedepth.recipe.provenance import provenance_of
from sparsedepth.recipe.trial import with_trial
from sparsedepth.store.packages import version_differences
from sparsedepth.store.tuning_roles import parse_tuned_fields, result_rows


def derive_card(
    runs: pd.DataFrame,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str = "tokens",
    holdout_depth: int | None = None,
    holdout: str | None = None,
    folders: Sequence[Path] = (),
) -> Card:
    """The recipe of the rows of `runs` with its evidence; tested at `holdout_depth`, or at the largest of `holdout`
    (one of SCALES); with the verification found next to the folders (`trial`). Raises as `derive`."""
    recipe = derive(runs, depth, objective, matched)
    if holdout and holdout_depth is not None:
        raise ValueError(f"holdout={holdout!r} and holdout_depth={holdout_depth} are two tests; a card has one")
    held = None if holdout_depth is None else hold_out(runs, holdout_depth, objective, matched)
    if holdout:
        held = hold_out_scale(runs, holdout, recipe.depth, objective, matched)
    return with_trial(build_card(runs, recipe, held, folders), folders)


def build_card(
    runs: pd.DataFrame, recipe: Recipe, holdout: Holdout | None = None, folders: Sequence[Path] = ()
) -> Card:
    """The card of a recipe; `runs` are all rows of the store, tuning's rejected values included."""
    results = result_rows(runs)
    used = results[results["run_id"].isin(recipe.run_ids)]
    baselines = {c.contrast.knob: c.baseline_values[c.contrast.knob] for c in recipe.candidates}
    knobs = {knob.name: knob for knob in (find_knobs(used, baselines) if baselines else ())}
    tested = [knob for knob in knobs.values() if knob.name in baselines]
    held_out = HeldOut(depth_test=holdout, depth_outcome=_outcome_for(recipe, holdout))
    mechanism = mechanism_of(used, tested, recipe, held_out.outcomes)
    diverged = used[used["outcome"] == "diverged"]
    return Card(
        recipe=recipe,
        matched=on_bases(runs, recipe),
        learning_rate=learning_rate_of(runs, used),
        mechanism=mechanism,
        confounds=tuple(confounds_of(used, tested, recipe)),
        held_out=held_out,
        depth_slopes=tuple(slopes_of(results, tested, recipe.objective)),
        diverged=tuple(
            Divergence(run_id=run.run_id, cause=run.diverged_cause if isinstance(run.diverged_cause, str) else None)
            for run in diverged.itertuples()
        ),
        provenance=provenance_of(runs, recipe, folders),
        grade=grade_of(recipe, mechanism.supported_by is not None, held_out.outcomes),
        measured=comparison_rows(results, recipe),
    )


def _outcome_for(recipe: Recipe, holdout: Holdout | None) -> Outcome | None:
    """The outcome of the test at a held-out depth for this recipe, which the shallower runs may not recommend."""
    if holdout is None or not recipe.changes:
        return None
    same = holdout.changes == tuple(change.contrast.setting for change in recipe.changes)
    return holdout.outcome if same else "not confirmed"


def on_bases(runs: pd.DataFrame, recipe: Recipe) -> tuple[OnBases, ...]:
    """Every candidate's contrast, on each basis that both sides agree in; and its training time."""
    if recipe.place != "inside" or recipe.depth is None:
        return ()
    found = Measured(runs, recipe.objective, recipe.depth)
    return tuple(
        OnBases(
            setting=candidate.contrast.setting,
            equal={basis: candidate.contrast if candidate.contrast.matches(basis) else None for basis in BASES},
            wall_clock=found.seconds(candidate.values),
        )
        for candidate in recipe.candidates
    )


def learning_rate_of(runs: pd.DataFrame, used: pd.DataFrame) -> LearningRate:
    """The values tried in tuning, in all rows, and those of the recipe's runs."""
    tuned = runs[runs["tuned_fields"].notna()] if "tuned_fields" in runs.columns else runs[:0]
    names = sorted({name for text in tuned.get("tuned_fields", ()) for name in parse_tuned_fields(text)})
    rates = used[["lr", "weight_decay"]].dropna()  # may be unknown for imported runs
    return LearningRate(
        tried={name: _distinct(tuned[name]) for name in names},
        best={name: _distinct(used[name].dropna()) for name in names},
        n_at_edge=int((used["tuning"] == "edge").sum()) if names else 0,
        n_runs=len(used),
        used=sorted({(float(rate), float(decay)) for rate, decay in rates.to_numpy(dtype=float)}),
    )


def _distinct(values: Iterable[float]) -> list[float]:
    return sorted({float(value) for value in values})


def confounds_of(used: pd.DataFrame, tested: Sequence[Knob], recipe: Recipe) -> list[str]:
    """Other possible explanations of the effects of the settings tested."""
    names = {knob.name for knob in tested}
    lines = [role.confound for name, role in roles(RunConfig).items() if role.confound and name in names]
    lines += [
        f"{' and '.join(knob.fields)} change only together: no effect can be attributed to one of them."
        for knob in tested
        if not knob.is_pure
    ]
    lines.append("Rescaling the residual stream alone lowers its variance: LNS and initialisations are the controls.")
    if recipe.objective == "usefulness" and recipe.depth:
        lines.append(
            f"usefulness moves in steps of 1/n_layers = {1 / recipe.depth:.4g}; usefulness_loss_increase does not"
        )
    for name in sorted(tuned_fields(used)):
        values = [f"{value:g}" for value in _distinct(used[name])]
        if len(values) > 1:
            lines.append(
                f"{name} was tuned for each configuration, to {', '.join(values)}: an effect compares tuned values and "
                f"includes the effect of changing {name}, above all on residual variance."
            )
    if "packages" in used.columns and (packages := version_differences(used["packages"].dropna())):
        lines.append(f"{packages}: numbers may depend on them.")
    return [*lines, *cautions(used)]


# Mechanism


def mechanism_of(
    used: pd.DataFrame, tested: Sequence[Knob], recipe: Recipe, outcomes: Sequence[str | None]
) -> Mechanism:
    """The links of the chain and the interventions in these runs, and the evidence level, given the outcomes of the
    held-out tests."""
    rows = rows_at(used, recipe.depth) if recipe.candidates else None
    causes = dict.fromkeys(intervention.moves for intervention in INTERVENTIONS)
    moved = {cause: {c.setting: c for c in measure_settings(rows, cause)} for cause in causes} if rows else {}
    pure = {knob.name for knob in tested if knob.is_pure}
    interventions = [
        InterventionEffect(
            intervention=intervention, moved=moved[intervention.moves][setting], controls=(), effect=candidate.contrast
        )
        for candidate in recipe.candidates
        for intervention in INTERVENTIONS
        if intervention.field == candidate.contrast.knob in pure
        and (setting := candidate.contrast.setting) in moved[intervention.moves]
    ]
    support = next((each for each in interventions if recipe.changes and _supports(each, recipe, moved)), None)
    return Mechanism(
        chain=tuple(link for link in chain_evidence(used) if any(scope.rho is not None for scope in link.links)),
        interventions=tuple(interventions),
        supported_by=support.effect.setting if support else None,
        word=earned_word(recipe, support is not None, outcomes),
    )


def _supports(intervention: InterventionEffect, recipe: Recipe, moved: Mapping[str, Mapping]) -> bool:
    """Whether an intervention improves the objective and moves its cause, as every change of the recipe does."""
    verdict = intervention.moved.verdict
    if verdict == "not distinguishable" or comparison_of(intervention.effect) != "better":
        return False
    by_setting = moved[intervention.intervention.moves]
    changes = [by_setting.get(change.contrast.setting) for change in recipe.changes]
    return all(change is not None and change.verdict == verdict for change in changes)
