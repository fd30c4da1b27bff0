"""From effects to a RunConfig, or to an abstention with its reason: rows -> contrasts -> candidates -> stack.

Of every knob, the recommended setting has an effect on the objective, all else at the baseline, with the verdict of the
frame (`effects.verdict`), so that pure noise leads to a recommendation in at most about 5% of stores. Of several such
settings, the one with the largest *shrunk* effect is chosen (`predict`), never the best single run. Not recommended:
one that spends more than its baseline of the matched quantity; capacity and data, which are a budget; two that were
never run together. All other knobs stay at their baseline, with the reason listed.
Recommendations for a depth that was not run come from two other depths at least (interpolation, extrapolation).

The in-sample grade is C with replicated seeds, D without; `card.grade_of` has the rules for A and B.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.load import build
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.all_effects import relevant_columns
from sparsedepth.effects.cells import unit_of, values_of
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.knobs import (
    DERIVED,
    Knob,
    Plain,
    changed,
    chosen_fields,
    field_values,
    find_knobs,
    labels,
    plain,
    tuned_fields,
)
from sparsedepth.effects.pairs import BASES
from sparsedepth.quantities.measured import REMOVED_MEASURES
from sparsedepth.recipe.card import Candidate, Comparison, Place, Recipe, Stack, Values
from sparsedepth.recipe.domain import domain_of
from sparsedepth.recipe.measured import NO_BASELINE, Measured, measured
from sparsedepth.recipe.predict import predicted, reliability, spread_of_effects
from sparsedepth.store.comparable_loss import COMMON, has_one_context
from sparsedepth.store.degeneracy import common_weakness, degeneracy, degeneracy_note, score_rows
from sparsedepth.store.imported_run import buildable, import_note, is_imported, unstated
from sparsedepth.store.tuning_roles import result_rows, without_measured_models

BUDGET = fields_where(RunConfig, lambda role: role.kind in ("capacity", "data"))
"""Fields that no recipe recommends: they are a budget, and losses on other data do not compare."""
DATA = fields_where(RunConfig, lambda role: role.kind == "data")
OWN_CONTEXT = ("train_loss", "val_loss", "val_bits_per_byte")
"""Losses at each run's own context length, which improve with a longer context."""


@dataclass(frozen=True, kw_only=True)
class DepthRows:
    """The rows from which a recipe for a depth is derived."""

    runs: pd.DataFrame
    """At that depth if it was run, else at all depths."""
    all_runs: pd.DataFrame
    """At all depths, values that tuning rejected included: other depths contribute to the estimate of noise."""
    knobs: tuple[Knob, ...]
    """Of `runs`."""
    all_knobs: tuple[Knob, ...]
    """Of all depths."""
    depth: int | None
    depths: tuple[int, ...]
    """Depths with finished runs."""
    place: Place


def derive(
    runs: pd.DataFrame,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str = "tokens",
    baselines: Mapping[str, Plain] | None = None,
) -> Recipe:
    """The recipe at one depth (default: the deepest with finished runs) from the rows of `runs`.

    `matched`: the basis of which a setting may spend no more than its baseline; `baselines` overrides knobs' baselines.
    Raises ValueError for an objective without a better direction, an unknown basis, or a baseline that no run has.
    """
    quantities.rankable(objective)
    if matched not in BASES:
        raise ValueError(f"--matched {matched!r} is no basis of comparison; choose one of: {', '.join(BASES)}")
    rows = rows_at(runs, depth, baselines)
    recipe = Recipe(
        depth=rows.depth,
        objective=objective,
        unit=unit_of(objective, rows.runs),
        matched=matched,
        place=rows.place,
        domain=domain_of(rows.runs),
        run_ids=tuple(sorted(rows.runs["run_id"])),
        n_diverged=int((rows.runs["outcome"] == "diverged").sum()),
        weakness=common_weakness(scores := score_rows(rows.runs, objective)),
        unknown=import_note(rows.runs),
        defaulted=unstated(rows.runs),
    )
    if not rows.depths:
        trained = without_measured_models(runs)
        if len(trained) and not len(result_rows(trained)):
            return updated(recipe, abstained=f"only tuning runs are complete so far ({len(trained)})")
        only = len(runs) and not len(trained)
        why = ": models that were only measured, whose training choices are not known" if only else ""
        return updated(recipe, abstained=f"no finished run{why}")
    at = f" at n_layers={rows.depth}" if rows.place == "inside" else ""
    if not values_of(rows.runs, objective).notna().any():
        return updated(recipe, abstained=f"{objective} was measured in no finished run{at}")
    baseline, has_noise = configure(rows, ()), bool(rows.runs.groupby("cell_id")["seed"].nunique().max() > 1)
    grade = "C" if has_noise and not (recipe.weakness or recipe.unknown) else "D"
    recipe = updated(recipe, config=baseline, baseline=baseline, grade=grade)
    if degeneracy(objective, scores).is_degenerate:
        return updated(recipe, abstained=degeneracy_note(objective, scores))
    if rows.place != "inside" and len(rows.depths) < 2:
        one_depth = f"only n_layers={rows.depths[0]} was run, so how effects change with depth is unknown"
        return updated(recipe, abstained=one_depth)
    if not rows.knobs:
        return updated(recipe, abstained=f"all runs{at} have the same configuration: nothing was varied")
    if rows.place == "inside" and rows.depth is not None:
        found = Measured(rows.all_runs, objective, rows.depth)
        if not found.has_baseline:
            return updated(recipe, abstained=NO_BASELINE)
        recipe = updated(recipe, others=found.others())
    candidates, spread = judge_candidates(rows, measure_settings(rows, objective), matched)
    recipe = updated(recipe, candidates=candidates, spread=spread)
    if not has_noise:
        return updated(recipe, abstained="no configuration was run with two seeds: there is no noise floor")
    if all(map(is_data, rows.knobs)):
        fields = [name for knob in rows.knobs for name in knob.fields if name in DATA]
        named = ", ".join((*fields[:3], *(["..."] if len(fields) > 3 else [])))
        return updated(recipe, abstained=f"the runs{at} differ only in their data ({named}), which is not a remedy")
    return with_weakness(rows, check_stack(rows, combine(rows, recipe)))


def updated(recipe: Recipe, **fields: object) -> Recipe:
    return recipe.model_copy(update=fields)


# Rows


def rows_at(runs: pd.DataFrame, depth: int | None, baselines: Mapping[str, Plain] | None = None) -> DepthRows:
    """The rows of a depth, or of all depths if it was not run."""
    if depth is not None and depth < 1:
        raise ValueError(f"--depth {depth} must be a number of layers, 1 or more")
    results = result_rows(runs)
    depths = sorted(set(map(int, results.loc[results["outcome"] == "ok", "n_layers"])))
    depth = depths[-1] if depth is None and depths else depth
    place: Place = "inside"
    if depth is not None and depths and depth not in depths:
        place = "interpolation" if depths[0] < depth < depths[-1] else "extrapolation"
    used = results[results["n_layers"] == depth] if depths and place == "inside" else results
    knobs, all_knobs = (tuple(find_knobs(rows, baselines)) if depths else () for rows in (used, results))
    return DepthRows(
        runs=used,
        all_runs=without_measured_models(runs),
        knobs=knobs,
        all_knobs=all_knobs,
        depth=depth,
        depths=tuple(depths),
        place=place,
    )


# Contrasts


def measure_settings(rows: DepthRows, outcome: str) -> list[Contrast]:
    """Every setting's effect at the depth of the rows, measured there or predicted from other depths."""
    assert rows.depth is not None
    runs = relevant_columns(rows.all_runs, outcome)
    if rows.place == "inside":
        return measured(rows.all_runs, rows.knobs, outcome, rows.depth)
    return predicted(runs, rows.knobs, outcome, rows.depth)


# Candidates


def judge_candidates(
    rows: DepthRows, contrasts: Sequence[Contrast], matched: str
) -> tuple[tuple[Candidate, ...], float | None]:
    """Every setting with the first reason against it, if any; and the spread of their true effects. Data are left out:
    an easier task is not a remedy."""
    knobs = {knob.name: knob for knob in rows.knobs if not is_data(knob)}
    contrasts = [contrast for contrast in contrasts if contrast.knob in knobs]
    family = [c for c in contrasts if c.effect.p is not None and c.knob not in BUDGET]
    errors = [c.effect.error or 0.0 for c in family]
    tau = spread_of_effects([c.effect.mean or 0.0 for c in family], errors) if family else None
    reliabilities = {c.setting: reliability(tau or 0.0, error) for c, error in zip(family, errors, strict=True)}
    own_context = OWN_CONTEXT if has_one_context(rows.runs[rows.runs["outcome"] == "ok"]) else (*OWN_CONTEXT, COMMON)
    candidates = []
    for contrast in contrasts:
        share, settings = reliabilities.get(contrast.setting), knobs[contrast.knob].settings
        candidate = Candidate(
            contrast=contrast,
            values=_jsonable(settings[contrast.setting]),
            baseline_values=_jsonable(settings[contrast.baseline]),
            shrunk=None if share is None else share * (contrast.effect.mean or 0.0),
            reliability=share,
            refused=reason_against(contrast, matched, own_context),
        )
        candidates.append(candidate)
    return best_of_each(candidates), tau


def is_data(knob: Knob) -> bool:
    """Whether its settings change the data, among other fields."""
    return any(name in DATA for name in knob.fields)


def _jsonable(setting: Mapping[str, Plain]) -> Values:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in setting.items()}


def reason_against(contrast: Contrast, matched: str, own_context: Sequence[str] = OWN_CONTEXT) -> str:
    """Why a setting is not recommended; empty if it is. `own_context`: the losses at each run's own seq_len."""
    if contrast.knob in BUDGET:
        return "a budget, no recipe"
    if contrast.knob == "seq_len" and contrast.outcome in own_context:
        return (
            f"{contrast.outcome} is scored at each run's own seq_len; use {COMMON}, with one eval_seq_len for all runs"
        )
    if contrast.p_holm is None:
        return f"too few seeds for an interval ({contrast.n_seeds})"
    if contrast.verdict_uncorrected == "not distinguishable":
        return "not distinguishable from the baseline"
    if contrast.verdict_ignoring_tuning == "not distinguishable":
        return f"not distinguishable after correction for the settings tested (adjusted p = {contrast.p_holm:.2g})"
    if contrast.verdict_blocked_by:
        return f"uneven tuning: {contrast.verdict_blocked_by}"
    if comparison_of(contrast) == "worse":
        return f"worse: {contrast.outcome} {contrast.verdict}"
    if not contrast.costs_no_more(matched):
        return f"it spends more {matched} than the baseline"
    return ""


def best_of_each(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates, of each knob with only the best recommended setting."""
    best: dict[str, Candidate] = {}
    for candidate in sorted((each for each in candidates if each.recommended), key=_gain, reverse=True):
        best.setdefault(candidate.contrast.knob, candidate)
    return tuple(
        refuse(candidate, f"{best[candidate.contrast.knob].contrast.setting} does better")
        if candidate.recommended and candidate is not best[candidate.contrast.knob]
        else candidate
        for candidate in candidates
    )


def refuse(candidate: Candidate, reason: str) -> Candidate:
    return candidate.model_copy(update={"refused": reason})


def _gain(candidate: Candidate) -> float:
    assert candidate.shrunk is not None
    return quantities.sign(candidate.contrast.outcome) * candidate.shrunk


def with_weakness(rows: DepthRows, recipe: Recipe) -> Recipe:
    """The recipe, of grade D if most runs of its baseline, or of a setting that it recommends, are no evidence about
    depth; most of all runs may be."""
    if recipe.weakness:
        return recipe
    knobs = {knob.name: knob for knob in rows.knobs}
    compared = {"at the baseline": changed(rows.runs, rows.knobs).map(len) == 0} | {
        f"with {c.setting}": labels(rows.runs, knobs[c.knob]) == c.setting
        for c in (change.contrast for change in recipe.changes)
    }
    for name, of_setting in compared.items():
        weakness = common_weakness(score_rows(rows.runs[of_setting], recipe.objective))
        if weakness:
            return updated(recipe, weakness=f"{name}, {weakness}", grade="D")
    return recipe


# Stack


def combine(rows: DepthRows, recipe: Recipe) -> Recipe:
    """The recipe with its changes stacked, the most significant first; a change that cannot be built with those is
    refused."""
    stacked: list[Candidate] = []
    refused: dict[str, str] = {}
    config = recipe.config
    for change in sorted(recipe.changes, key=lambda change: change.contrast.p_holm or 0.0):
        try:
            config = configure(rows, [*stacked, change])
            stacked.append(change)
        except ValueError as error:
            refused[change.contrast.setting] = f"cannot be combined with the other changes: {error}"
    return updated(_refusing(recipe, refused), config=config)


def check_stack(rows: DepthRows, recipe: Recipe) -> Recipe:
    """The finished recipe, without changes that are worse together than the baseline or the best change alone."""
    changes = recipe.changes
    if not changes:
        better = [candidate for candidate in recipe.candidates if comparison_of(candidate.contrast) == "better"]
        reasons = "; ".join(f"{candidate.contrast.setting}: {candidate.refused}" for candidate in better)
        none_better = f"no setting is significantly better in {recipe.objective} than its baseline"
        return updated(recipe, abstained=reasons or none_better)
    if len(changes) == 1:
        return recipe
    best = max(changes, key=_gain)
    compared: list[Contrast | None] = [None, None]
    if rows.place == "inside" and rows.depth is not None:
        pairs = (((), changes), ((best,), changes))
        compared = [compare_cells(rows.all_runs, rows.knobs, rows.depth, pair, recipe.objective) for pair in pairs]
    stack = Stack(best=best.contrast.setting, against_baseline=compared[0], against_best=compared[1])
    if rows.place == "inside" and stack.against_baseline is None:
        others = [change for change in changes if change is not best]
        refused = {
            change.contrast.setting: f"not run together with {stack.best}: two changes that were tested apart are no "
            "recipe"
            for change in others
        }
        return updated(_refusing(recipe, refused), config=configure(rows, (best,)))
    recipe = updated(recipe, stack=stack)
    if comparison_of(stack.against_baseline) == "worse":
        refused = {change.contrast.setting: "the changes together are worse than the baseline" for change in changes}
        abstained = "the effects do not add up: the changes together are worse than the baseline"
        return updated(_refusing(recipe, refused), config=recipe.baseline, abstained=abstained)
    if comparison_of(stack.against_best) == "worse":
        reason = f"worse combined with {stack.best} than {stack.best} alone"
        refused = {change.contrast.setting: reason for change in changes if change is not best}
        return updated(_refusing(recipe, refused), config=configure(rows, (best,)))
    return recipe


def _refusing(recipe: Recipe, refused: Mapping[str, str]) -> Recipe:
    """The same recipe with the candidates of these settings refused."""
    candidates = tuple(refuse(c, refused.get(c.contrast.setting, c.refused)) for c in recipe.candidates)
    return updated(recipe, candidates=candidates)


def settings_with(knobs: Sequence[Knob], changes: Iterable[Candidate]) -> dict[str, str]:
    """Every knob's setting in a configuration with these changes: the change's, or the baseline."""
    by_knob = {change.contrast.knob: change.contrast.setting for change in changes}
    return {knob.name: by_knob.get(knob.name, knob.baseline) for knob in knobs}


def configure(rows: DepthRows, changes: Sequence[Candidate]) -> RunConfig:
    """The run nearest to the baseline (at the depth, else at the nearest depth below), with every knob at its baseline
    or changed setting. A tuned field has its best value of the run nearest to these settings. Raises ValueError."""
    settings = settings_with(rows.knobs, changes)
    runs, depths = rows.runs, rows.runs["n_layers"].astype(int)
    nearest = max((depth for depth in depths if depth <= (rows.depth or 0)), default=depths.min())
    at_depth = runs[depths == nearest]
    row = at_depth.loc[changed(at_depth, rows.knobs).map(len).idxmin()]
    derived = {name for name in DERIVED if runs[name].nunique(dropna=False) > 1} - set(chosen_fields(runs))
    values = {name: plain(row[name]) for name in RunConfig.model_fields if name not in {"seed", *derived}}
    values |= {"n_layers": rows.depth, **field_values(rows.knobs, settings)}
    differs = [labels(at_depth, knob) != settings[knob.name] for knob in rows.knobs]
    nearest_run = at_depth.loc[sum(differs, start=pd.Series(0, at_depth.index)).idxmin()]
    values |= {name: plain(nearest_run[name]) for name in tuned_fields(runs)}
    # Combinations that a run allowed explicitly are allowed here too; else `build` refuses them.
    values["allow"] = tuple(sorted({name for allow in runs["allow"].map(plain) for name in allow or ()}))
    values = {name: value for name, value in values.items() if value is not None}
    if isinstance(measures := values.get("measures"), tuple):
        values["measures"] = tuple(name for name in measures if name not in REMOVED_MEASURES) or ("loss",)
    with warnings.catch_warnings(action="ignore"):
        return build(RunConfig, buildable(values) if is_imported(runs) else values, "recipe")


def compare_cells(
    runs: pd.DataFrame, knobs: Sequence[Knob], depth: int, changes: tuple[Sequence[Candidate], ...], objective: str
) -> Contrast | None:
    """One whole configuration against another, `changes` being those of both, the compared one last; None if either
    was not run at this depth."""
    before, after = (field_values(knobs, settings_with(knobs, each)) for each in changes)
    return Measured(runs, objective, depth).contrast(knobs[0].name, after, before)


def comparison_of(contrast: Contrast | None) -> Comparison:
    """Whether the setting is better than the baseline, by a contrast on an objective."""
    if contrast is None or contrast.effect.mean is None:
        return "worse" if contrast is not None and contrast.n_diverged else "not compared"  # all its runs diverged
    if contrast.verdict == "not distinguishable":
        return "not distinguishable"
    return "better" if (contrast.verdict == "higher") == (quantities.sign(contrast.outcome) > 0) else "worse"
