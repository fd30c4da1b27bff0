"""From the frame `effects` to a recommendation at one depth, or to an abstention with its reason.

All else is at the baseline. A setting with the verdict 'better' (`effects.verdict`) is recommended unless it is a
budget (width, data), or spends more than the baseline of the matched cost. Two such settings are recommended together
only if they were run together, and are then better than the first alone; else the pair is named (`Recipe.untested`).
At a depth that was not run a setting is recommended if it is better at both neighbouring depths; outside of those run,
at the two nearest."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.load import build
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig, known_measures
from sparsedepth.effects.cells import BASELINE, MATCHED, Cells, cells_of, distinct
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.fit import Changes
from sparsedepth.effects.frame import BASES, as_records, compared, effects_frame
from sparsedepth.effects.second_look import with_second_looks
from sparsedepth.once import once
from sparsedepth.plan.forecast import tokens_needed
from sparsedepth.quantities.quantity import Named, Row, without_none
from sparsedepth.recipe.card import Candidate, Place, Recipe, comparison_of
from sparsedepth.store.comparable_loss import COMMON, has_one_context
from sparsedepth.store.degeneracy import common_weakness, degeneracy, score_rows, usable_form
from sparsedepth.store.schema import plain
from sparsedepth.store.subject import buildable, imported_among, is_imported, unstated
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.degeneracy import caution, stronger, weakness_text
from sparsedepth.words.differences import baseline_text
from sparsedepth.words.effects import budget_text, measured_nowhere, no_baseline
from sparsedepth.words.recipe import domain_text, nothing_finished, nothing_recommended
from sparsedepth.words.runs import import_note

DATA = fields_where(RunConfig, lambda role: role.kind == "data")
BUDGET = fields_where(RunConfig, lambda role: role.kind in ("capacity", "data"))
"""Fields that no recipe recommends: they are a budget, and losses on other data do not compare."""
OWN_CONTEXT = ("train_loss", "val_loss", "val_bits_per_byte", "val_accuracy")
"""Scores at each run's own context length, which improve with a longer context."""


class Evidence:
    """The cells of a store and their effects on one objective, the rows of the frame `effects`, a depth at a time, with
    second looks where these are to be told; and the runs behind them."""

    def __init__(self, cells: Cells, has_looks: bool = True) -> None:
        self.cells, self.runs, self.has_looks = cells, cells.runs, has_looks
        self.results = result_rows(cells.runs)
        self.depths = tuple(sorted(set(map(int, self.results.loc[self.results["outcome"] == "ok", "n_layers"]))))
        self.changes = self.cells.changes

    @property
    def tried(self) -> dict[str, list[float]]:
        """Tuned field -> values tried."""
        runs = self.runs
        tuned = {name: runs.loc[runs["tuned_fields"].notna(), name].dropna() for name in sorted(self.cells.tuned)}
        return {name: sorted({*values.astype(float)}) for name, values in tuned.items()}

    @once
    def effects(self, depth: int) -> list[Effect]:
        """The effects at one depth, in the order of the frame."""
        cells = replace(self.cells, rows=self.cells.rows[self.cells.rows["n_layers"] == depth])
        frame = effects_frame(cells)
        return as_records(with_second_looks(frame, cells) if self.has_looks else frame)

    @once
    def settings(self, depth: int) -> dict[str, Effect]:
        """Setting -> its effect at the baseline of a depth."""
        return {effect.setting: effect for effect in self.effects(depth) if effect.question == "setting"}

    def beside(self, depth: int, setting: str, context: str) -> Effect | None:
        """The effect of a setting beside another one."""
        wanted = ("beside", setting, context)
        return next((e for e in self.effects(depth) if (e.question, e.setting, e.context) == wanted), None)

    def matched(self, depth: int) -> str:
        """The cost that most settings of a depth share with their baseline: tokens, or training FLOPs."""
        effects = self.settings(depth).values()
        shared = {name: [getattr(effect, name) or 0.0 for effect in effects] for name in ("tokens", "flops")}
        return max(shared, key=lambda name: sum(abs(ratio - 1) <= MATCHED for ratio in shared[name]))

    def why_no_baseline(self, depth: int) -> str:
        """Why the baseline of a depth has no run to compare with; '' where it has."""
        rows = self.cells.rows
        if not self.runs_of(BASELINE, depth).empty:
            return ""
        if ((rows["n_layers"] == depth) & (rows["setting"] == BASELINE)).any():
            return "the baseline of this depth has only tuning runs so far"
        return no_baseline(self.cells.outcome, was_run=False, other_scoring=depth in self.cells.other_scoring)

    def label(self, depth: int, changes: Changes) -> str | None:
        """The setting with these changes; None if it was not run at this depth."""
        return next((name for name in self.settings(depth) if self.changes[name] == changes), None)

    @once
    def runs_of(self, setting: str, depth: int, lr: float | None = None) -> pd.DataFrame:
        """The results of a setting at a depth: at one value of the tuned field, by default the one that is compared."""
        rows = self.cells.rows
        ids = rows.loc[(rows["n_layers"] == depth) & (rows["setting"] == setting), "run_id"]
        found = self.results[self.results["run_id"].isin(ids)].sort_values("run_id")
        field = self.cells.field
        if not field or found.empty:
            return found
        lr_N = found[field].astype(float)
        chosen = [at.cells[setting].lr for at in self.cells.depths if at.depth == depth and setting in at.cells]
        lr = next((value for value in (lr, *chosen, lr_N.mode().min()) if (lr_N == value).any()), None)
        return found if lr is None else found[lr_N == lr]

    def config(self, setting: str, depth: int, n_layers: int, lr: float | None = None) -> RunConfig:
        """The configuration of a setting as it was run at `depth`, with another number of layers. Raises ValueError for
        one that cannot be built."""
        runs = self.runs_of(setting, depth, lr)
        row = runs.iloc[int(np.argmax((runs["outcome"] == "ok").to_numpy()))]
        values = {name: plain(row[name]) for name in RunConfig.model_fields if name != "seed" and name in row}
        values = without_none(values) | {"n_layers": n_layers}
        if isinstance(measures := values.get("measures"), tuple):
            values["measures"] = known_measures(measures)
        with warnings.catch_warnings(action="ignore"):
            return build(RunConfig, buildable(values) if is_imported(runs) else values, "recipe")


def changed_config(config: RunConfig, *changes: Row) -> RunConfig:
    """A configuration with other values of some fields; sizes that are None follow from the others. Raises
    ValueError."""
    values = config.model_dump(mode="json")
    for change in changes:
        values |= change
    return build(RunConfig, without_none(values), "the recipe's configuration")


def differing_values(config: RunConfig, baseline: RunConfig, tuned: Row) -> tuple[Named, ...]:
    """The fields in which two configurations differ, with the values of either; tuned ones left out."""
    own, other = (each.model_dump(mode="json", exclude={"seed", "allow", *tuned}) for each in (config, baseline))
    names = [name for name in own if own[name] != other[name]]
    return {name: own[name] for name in names}, {name: other[name] for name in names}


def derive(
    runs: pd.DataFrame,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str | None = None,
    evidence: Evidence | None = None,
    below: int | None = None,
) -> Recipe:
    """The recipe at one depth (default: the deepest with finished runs) from the rows of `runs`, tuning included.

    `matched`: the cost of which a setting may spend no more than its baseline, by default that which most settings
    share with it; `evidence`: that of these runs, if already computed; `below`: only depths below this one count.
    Raises ValueError for an objective without a better direction, or an unknown cost."""
    quantities.rankable(objective)
    if matched is not None and matched not in BASES:
        raise ValueError(f"--matched {matched!r} is no basis of comparison; choose one of: {', '.join(BASES)}")
    if depth is not None and depth < 1:
        raise ValueError(f"--depth {depth} must be a number of layers, 1 or more")
    found = evidence or Evidence(cells_of(runs, objective))
    depths = tuple(d for d in found.depths if below is None or d < below)
    depth = depths[-1] if depth is None and depths else depth
    place, shown_at = _place(depth, depths)
    matched = matched or (found.matched(shown_at[0]) if shown_at else "tokens")
    used = compared(found.cells)
    used = used[used["n_layers"].isin(shown_at or depths)]
    origins = zip(used["origin"], used["unknown_fields"], strict=True) if is_imported(used) else ()
    recipe = Recipe(
        depth=depth, objective=objective, unit=found.cells.unit, matched=matched, place=place, shown_at=shown_at,
        seen_on=_seen_on(used), run_ids=tuple(sorted(used["run_id"])), left_out=budget_text(found.cells),
        unknown=import_note(imported_among(origins)),
        defaulted=unstated(used), tried=found.tried, shared_lr=found.cells.shared_lr,
    )  # fmt: skip
    if not shown_at:
        n_tuning = len(found.runs) * found.results.empty
        n_diverged = len(runs) * (runs["outcome"] == "diverged").all()
        return _with(recipe, abstained=nothing_finished(n_tuning, n_diverged, len(runs) > len(found.runs) == 0))
    if used[objective].isna().all():
        return _with(recipe, abstained=measured_nowhere(objective))
    if reason := found.why_no_baseline(shown_at[0]):
        return _with(recipe, abstained=reason)
    return _judged(found, recipe, score_rows(used, objective))


def _judged(found: Evidence, recipe: Recipe, scores: Sequence[Row]) -> Recipe:
    """The recipe from the effects of its depth, which has a baseline; `scores` are those of all runs used."""
    assert recipe.depth is not None
    nearest, settings = recipe.shown_at[0], found.cells.settings
    try:
        baseline = found.config(BASELINE, nearest, recipe.depth)
    except ValueError as error:  # of a program with other rules
        return _with(recipe, abstained=f"its baseline cannot be built: {error}")
    weak = common_weakness(scores)
    recipe = _with(
        recipe,
        baseline=baseline,
        config=baseline,
        baseline_text=baseline_text(settings).removeprefix("baseline: ") if settings else "",
        baseline_seeds=found.runs_of(BASELINE, nearest)["seed"].fillna(-1).nunique(),
        weakness=weakness_text(weak),
    )
    if weak:
        more = max(tokens_needed(baseline), 2 * baseline.train_tokens)
        return _with(recipe, abstained=stronger(weak.kind, more))
    if degeneracy(recipe.objective, scores).is_degenerate:
        return _with(recipe, abstained=caution(usable_form(recipe.objective, scores)))
    if recipe.place != "inside" and len(recipe.shown_at) < 2:
        return _with(
            recipe, abstained=f"{recipe.depth} layers were never run, and one other depth, {nearest}, tells no trend"
        )
    recipe = _with(recipe, candidates=tuple(_candidates(found, recipe)))
    return _weak(found, _decide(found, _with(recipe, others=tuple(_others(found, recipe)))))


def _with(recipe: Recipe, **fields: object) -> Recipe:
    return recipe.model_copy(update=fields)


def _place(depth: int | None, depths: Sequence[int]) -> tuple[Place, tuple[int, ...]]:
    """Where a depth lies, and the depths whose effects count for it, the nearest first (of neighbours the lower)."""
    if depth is None or not depths:
        return "inside", ()
    if depth in depths:
        return "inside", (depth,)
    below, above = [d for d in depths if d < depth], [d for d in depths if d > depth]
    if below and above:
        return "interpolation", (below[-1], above[0])
    return "extrapolation", tuple(below[:-3:-1] or above[:2])


def _seen_on(runs: pd.DataFrame) -> str:
    """Data, sizes and devices of the runs: beyond them they are no evidence."""
    names = {"d_model": "width {}", "params_total": "{} parameters", "tokens_trained": "{} tokens"}
    columns = {text: pd.to_numeric(runs[name], errors="coerce").dropna() for name, text in names.items()}
    sizes = {text: (values.min(), values.max()) for text, values in columns.items() if len(values)}
    return domain_text(distinct(runs, "corpus"), distinct(runs, "task_group"), sizes, distinct(runs, "device"))


def _candidates(found: Evidence, recipe: Recipe) -> Iterator[Candidate]:
    """Every setting at the nearest depth, with the reason why it does not count as better or worse. Other data are left
    out: an easier task is not a remedy."""
    nearest, *others = recipe.shown_at
    effects = found.settings(nearest)
    at_depth = {found.changes[setting] for setting in effects}
    used = found.results[found.results["n_layers"].isin(recipe.shown_at)]
    own_context = OWN_CONTEXT if has_one_context(used[used["outcome"] == "ok"]) else (*OWN_CONTEXT, COMMON)
    for setting, effect in effects.items():
        changes = found.changes[setting]
        fields = {name for name, _ in changes}
        if found.runs_of(setting, nearest).empty:
            continue
        values, baseline_values, unbuilt = _built(found, effect, recipe)
        if {*fields, *values} & {*DATA}:
            continue
        shown = comparison_of(effect)
        elsewhere = [d for d in others if comparison_of(found.settings(d).get(setting)) != shown]
        sizes = sorted({name for name in values if None not in (values[name], baseline_values[name])} & {*BUDGET})
        against = {
            "it is a budget, which no recipe recommends": bool(fields & {*BUDGET}),
            unbuilt: bool(unbuilt),
            **(_objections(effect, fields, sizes, recipe.matched, own_context) if shown == "better" else {}),
            f"not shown to {'help' if shown == 'better' else 'hurt'} at {(*elsewhere, '')[0]} layers": bool(elsewhere),
        }
        yield Candidate(
            effect=effect,
            values=values,
            baseline_values=baseline_values,
            is_combination=any(part < changes and changes - part in at_depth for part in at_depth),
            refused=next((why for why, holds in against.items() if holds and shown != "not shown"), ""),
        )


def _built(found: Evidence, effect: Effect, recipe: Recipe) -> tuple[Named, Named, str]:
    """The values of a setting and of the baseline, where they differ; and why the setting cannot be built."""
    assert recipe.baseline is not None and recipe.depth is not None
    try:
        config = found.config(effect.setting, recipe.shown_at[0], recipe.depth, effect.lr)
        values, baseline_values = differing_values(config, recipe.baseline, recipe.tried)
        return values, baseline_values, ""
    except ValueError as error:
        values = dict(found.changes[effect.setting])
        baseline_values = {name: getattr(recipe.baseline, name, None) for name in values}
        return values, baseline_values, f"it cannot be built: {error}"


def _objections(
    effect: Effect, fields: set[str], sizes: Sequence[str], matched: str, own_context: Sequence[str]
) -> dict[str, bool]:
    """Why a better setting is no remedy -> whether that holds. `sizes`: those that differ too, without being part of
    the setting, as a size solved for equal cost does."""
    costs = (effect.flops, effect.params_total, effect.params_active)
    differ = sizes and not any(cost is not None and abs(cost - 1) <= MATCHED for cost in costs)
    ratio = getattr(effect, matched)
    own = f"{effect.outcome} is scored at each run's own seq_len; use {COMMON}, with one eval_seq_len for all runs"
    return {
        f"{' and '.join(sizes)} differ{'s' * (len(sizes) == 1)} too, a budget that no recipe recommends": bool(differ),
        own: "seq_len" in fields and effect.outcome in own_context,
        f"its {matched} are not known": ratio is None,
        f"it spends more {matched} than the baseline": ratio is not None and ratio > 1 + MATCHED,
    }


def _decide(found: Evidence, recipe: Recipe) -> Recipe:
    """The recipe with its settings: those shown to be better at the nearest depth, together where that was run."""
    nearest, depth = recipe.shown_at[0], recipe.depth
    good = [candidate for candidate in recipe.candidates if candidate.comparison == "better" and not candidate.refused]
    if not good:
        data = found.cells.settings.data if found.cells.settings else ()
        elsewhere = [
            at
            for at in found.depths
            if not recipe.candidates
            and at != nearest
            and any(effect.estimate is not None for effect in found.settings(at).values())
        ]
        return _with(recipe, abstained=nothing_recommended(recipe, data, elsewhere))
    ranked = sorted(good, key=lambda candidate: _gain(candidate.effect), reverse=True)
    ranked = [candidate for candidate in ranked if not candidate.is_combination] or ranked[:1]
    setting, refused, untested = _together(found, recipe, ranked)
    effect = found.settings(nearest)[setting]
    assert depth is not None
    recommended = {candidate.setting for candidate in ranked} - {*refused}
    candidates = []
    for each in recipe.candidates:
        update = {"recommended": each.setting in recommended, "refused": refused.get(each.setting, each.refused)}
        candidates.append(each.model_copy(update=update))
    settings = found.settings(nearest)
    scales = [name for name in settings if {field for field, _ in found.changes[name]} <= {*BUDGET} - {*DATA}]
    beside = (found.beside(nearest, setting, scale) for scale in scales)
    return _with(
        recipe, candidates=tuple(candidates), config=found.config(setting, nearest, depth, effect.lr), effect=effect,
        untested=untested, scales=tuple(filter(None, beside)),
    )  # fmt: skip


def _together(
    found: Evidence, recipe: Recipe, ranked: Sequence[Candidate]
) -> tuple[str, dict[str, str], tuple[str, str] | None]:
    """The first setting, with every other one that was run together with it and is better so; why each of the others is
    left out; and the first pair that was not run together."""
    depth, setting = recipe.shown_at[0], ranked[0].setting
    values = {candidate.setting: candidate.values for candidate in recipe.candidates}
    refused: dict[str, str] = {}
    untested = None
    for other in (candidate.setting for candidate in ranked[1:]):
        so_far, own = found.changes[setting], found.changes[other]
        if {name for name, _ in so_far} & {name for name, _ in own}:
            refused[other] = f"{setting} does better"
        elif (union := found.label(depth, so_far | own)) is None:
            assert recipe.baseline is not None
            try:
                changed_config(recipe.baseline, values[setting], values[other])
            except ValueError as error:
                refused[other] = f"cannot be combined with {setting}: {error}"
            else:
                refused[other] = f"not run together with {setting}"
                untested = untested or (setting, other)
        elif _adds(found, depth, union, other, setting):
            setting = union
        else:
            refused[other] = f"no better together with {setting} than {setting} alone"
    return setting, refused, untested


def _adds(found: Evidence, depth: int, union: str, setting: str, context: str) -> bool:
    """Whether a setting beside another is better than that alone: both against the baseline, and not worse beside."""
    both, alone = (found.settings(depth)[name] for name in (union, context))
    is_worse = comparison_of(found.beside(depth, setting, context)) == "worse"
    return comparison_of(both) == "better" and not is_worse and _gain(both) > _gain(alone)


def _gain(effect: Effect) -> float:
    return quantities.sign(effect.outcome) * (effect.estimate or 0.0)


def _others(found: Evidence, recipe: Recipe) -> Iterator[Effect]:
    """The effects beside another setting whose verdict is not that of the setting alone, and interactions shown."""
    alone = {candidate.setting: candidate.effect.verdict for candidate in recipe.candidates}
    for effect in found.effects(recipe.shown_at[0]):
        is_beside = effect.question in ("beside", "interaction") and {effect.setting, effect.context} <= {*alone}
        differs = effect.question == "interaction" or effect.verdict != alone.get(effect.setting)
        if effect.is_shown and is_beside and differs:
            yield effect


def _weak(found: Evidence, recipe: Recipe) -> Recipe:
    """The recipe with its weakness, where most runs of the baseline or of a recommended setting are no evidence about
    depth."""
    if recipe.weakness:
        return recipe
    named: Mapping[str, str] = {BASELINE: "at the baseline"} | {c.setting: f"with {c.setting}" for c in recipe.changes}
    for setting, name in named.items():
        rows = score_rows(found.runs_of(setting, recipe.shown_at[0]), recipe.objective)
        weakness = weakness_text(common_weakness(rows))
        if weakness:
            return _with(recipe, weakness=f"{name}, {weakness}")
    return recipe
