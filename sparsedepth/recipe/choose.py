"""From paired effects to a RunConfig, or to a stated abstention.

For every knob the setting is taken whose paired effect on the objective, averaged over the other knobs' settings, is
distinguishable in the wanted direction: its interval excludes 0, it exceeds the seed noise floor, and its p-value
survives Holm's correction over all settings tested at this depth, so that pure noise yields a recommendation in at
most about 5% of stores. Never the luckiest single run: of several such settings the largest *shrunk* effect is
taken (`predict`). Not taken: a setting that ever diverged; one that spends more than its baseline of what is to be
matched; capacity and data, which are a budget and no recipe. What cannot be distinguished stays at its baseline, and is
listed. A depth that was not run is advised on from the others (interpolation, extrapolation), two at least.

In-sample the grade is C with replicated seeds, D without; `grade` says what earns A and B.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.load import build
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.contrast import Contrast, compare, noise
from sparsedepth.effects.intervals import holm
from sparsedepth.effects.knobs import (
    DERIVED,
    Knob,
    Plain,
    changed,
    chosen_fields,
    find_knobs,
    joint_knob,
    labels,
    plain,
    setting_text,
    tuned_fields,
)
from sparsedepth.effects.pairs import BASES, values_of
from sparsedepth.effects.sentences import counted, estimate_text
from sparsedepth.recipe.predict import measured, predicted, reliability, spread_of_effects, standard_error
from sparsedepth.store.tuning import standing

ALPHA = 0.05
BUDGET = fields_where(RunConfig, lambda role: role.kind in ("capacity", "data"))
"""Knobs that are controls: more of them is no sparser, and losses on other text or tokens do not compare."""
OWN_CONTEXT = ("train_loss", "val_loss", "val_bits_per_byte")
"""Objectives that a longer context changes by itself."""

Place = Literal["inside", "interpolation", "extrapolation"]


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One setting, what it did, and why it is or is not part of the recipe."""

    contrast: Contrast
    p_adjusted: float | None
    """Holm's, over all settings that could have been recommended; None outside that family."""
    reason: str
    """Empty if recommended."""
    knob: Knob
    shrunk: float | None
    """The effect times its reliability, the share of it that is kept; None without an interval, as `reliability`."""
    reliability: float | None

    @property
    def recommended(self) -> bool:
        return not self.reason

    @property
    def fields(self) -> tuple[str, ...]:
        """The RunConfig fields that make up its knob."""
        return self.knob.fields


@dataclass(frozen=True, kw_only=True)
class Recipe:
    depth: int | None
    objective: str
    matched: str
    place: Place
    """Where the depth lies among those that were run."""
    baseline: RunConfig | None
    config: RunConfig | None
    """The recommendation; the baseline where it abstains, None without a run to start from."""
    spread: float | None
    """tau: how far true effects lie from 0, by these estimates; None without one."""
    tested: tuple[Tested, ...]
    reason: str
    """Why it abstains; empty if it does not."""
    stack: str
    """Whether the recommended changes were run together, and what came of it."""
    stack_contrasts: tuple[Contrast, ...]
    domain: dict[str, str]
    run_ids: tuple[str, ...]
    n_diverged: int
    grade: Literal["C", "D"]

    @property
    def abstained(self) -> bool:
        return bool(self.reason)

    @property
    def sign(self) -> int:
        """-1 if a lower objective is better, +1 if a higher one is."""
        return direction(self.objective)

    @property
    def expected_gain(self) -> float | None:
        """The sum of the shrunk effects, as if they added up: in the objective's unit, its sign kept."""
        return sum(one.shrunk or 0.0 for one in self.changes) if self.changes else None

    @property
    def changes(self) -> tuple[Tested, ...]:
        return tuple(one for one in self.tested if one.recommended)


def derive(
    runs: pd.DataFrame,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str = "tokens",
    baselines: Mapping[str, Plain] | None = None,
) -> Recipe:
    """The recipe at one depth (default: the deepest that has finished runs) from the rows of `runs`.

    `matched` names the basis of which a setting may spend no more than its baseline; `baselines` overrides a knob's
    baseline. Raises ValueError for an objective without a better direction, an unknown basis, or a baseline that
    no run has.
    """
    direction(objective)
    if matched not in BASES:
        raise ValueError(f"matched={matched!r} is no basis of comparison; choose one of: {', '.join(BASES)}")
    if depth is not None and depth < 1:
        raise ValueError(f"depth={depth} must be a number of layers, 1 or more")
    known = standing(runs)
    depths = sorted(set(map(int, known.loc[known["outcome"] == "ok", "n_layers"])))
    if depth is None and depths:
        depth = depths[-1]
    place = _place(depth, depths)
    here = known[known["n_layers"] == depth] if place == "inside" else known
    draft = _draft(here, depth, objective, matched, place)
    if not depths:
        only = len(runs) and not len(known)
        why = ": models that were only measured, whose training choices are not known" if only else ""
        return replace(draft, reason=f"no finished run{why}")
    return _advise(here, depths, find_knobs(here, baselines), draft)


def _draft(here: pd.DataFrame, depth: int | None, objective: str, matched: str, place: Place) -> Recipe:
    """A recipe that recommends nothing yet."""
    return Recipe(
        depth=depth,
        objective=objective,
        matched=matched,
        place=place,
        baseline=None,
        config=None,
        spread=None,
        tested=(),
        reason="",
        stack="no change recommended, so none to stack",
        stack_contrasts=(),
        domain=domain_of(here),
        run_ids=tuple(sorted(here["run_id"])),
        n_diverged=int((here["outcome"] == "diverged").sum()),
        grade="D",
    )


def _advise(here: pd.DataFrame, depths: Sequence[int], knobs: Sequence[Knob], draft: Recipe) -> Recipe:
    at = f" at n_layers={draft.depth}" if draft.place == "inside" else ""
    if not values_of(here, draft.objective).notna().any():
        return replace(draft, reason=f"{draft.objective} was measured in no finished run{at}")
    baseline = _configure(here, knobs, (), draft)
    draft = replace(draft, config=baseline, baseline=baseline)
    if draft.place != "inside" and len(depths) < 2:
        alone = f"n_layers={depths[0]} alone was run, so how effects change with depth is not known"
        return replace(draft, reason=alone)
    if not knobs:
        return replace(draft, reason=f"all runs{at} have the same configuration: nothing was varied")
    tested, spread = _test(here, knobs, draft)
    draft = replace(draft, tested=tested, spread=spread)
    if noise(here, draft.objective)[0] is None:
        return replace(draft, reason="no configuration was run with two seeds: there is no noise floor")
    return _stacked(here, knobs, *_combine(here, knobs, tested, draft), replace(draft, grade="C"))


def _place(depth: int | None, depths: Sequence[int]) -> Place:
    if depth is None or not depths or depth in depths:
        return "inside"
    return "interpolation" if depths[0] < depth < depths[-1] else "extrapolation"


def direction(objective: str) -> int:
    """-1 if lower is better, +1 if higher is."""
    return quantities.sign(quantities.rankable(objective).name)


def _test(runs: pd.DataFrame, knobs: Sequence[Knob], draft: Recipe) -> tuple[tuple[Tested, ...], float | None]:
    """Every setting of every knob, the reasons against it first come first served; and the spread of their effects."""
    assert draft.depth is not None
    estimates = measured if draft.place == "inside" else predicted
    found = [(knob, one) for knob in knobs for one in estimates(runs, knob, draft.objective, draft.depth)]
    family = [one for _, one in found if one.effect.p is not None and one.knob not in BUDGET]
    adjusted = dict(zip(map(id, family), holm([one.effect.p or 0.0 for one in family]), strict=True))
    spent = 1 if draft.place == "inside" else 2  # degrees of freedom that the mean, or the line, takes
    errors = {id(one): standard_error(one.effect, one.effect.n - spent) or 0.0 for one in family}
    tau = spread_of_effects([one.effect.mean or 0.0 for one in family], list(errors.values())) if family else None
    tested = []
    for knob, contrast in found:
        p = adjusted.get(id(contrast))
        kept = reliability(tau, errors[id(contrast)]) if tau is not None and id(contrast) in errors else None
        tested.append(
            Tested(
                contrast=contrast,
                p_adjusted=p,
                reason=_against(contrast, p, draft),
                knob=knob,
                shrunk=None if kept is None else kept * (contrast.effect.mean or 0.0),
                reliability=kept,
            )
        )
    return _best_of_each(tested, draft.sign), tau


def _best_of_each(tested: Sequence[Tested], sign: int) -> tuple[Tested, ...]:
    """Of a knob's good settings the best stays."""
    best: dict[str, Tested] = {}
    for one in tested:
        rival = best.get(one.contrast.knob)
        if one.recommended and (rival is None or _gain(one, sign) > _gain(rival, sign)):
            best[one.contrast.knob] = one
    return tuple(
        replace(one, reason=f"{best[one.contrast.knob].contrast.setting} does better")
        if one.recommended and one is not best[one.contrast.knob]
        else one
        for one in tested
    )


def _against(contrast: Contrast, p_adjusted: float | None, draft: Recipe) -> str:
    if contrast.knob in BUDGET:
        return "a budget, no recipe"
    if contrast.knob == "seq_len" and contrast.outcome in OWN_CONTEXT:
        return f"{contrast.outcome} is scored at each run's own seq_len; ask for val_loss_common"
    if contrast.n_diverged:
        return f"{contrast.n_diverged} of its runs diverged"
    if p_adjusted is None:
        return f"too few pairs for an interval ({contrast.effect.n})"
    if contrast.verdict == "not distinguishable":
        return "not distinguishable from the baseline"
    if p_adjusted > ALPHA:
        return f"not distinguishable among so many settings tested (Holm p = {p_adjusted:.2g})"
    if (contrast.verdict == "higher") != (draft.sign > 0):
        return f"worse: {contrast.outcome} {contrast.verdict}"
    if not contrast.costs_no_more(draft.matched):
        return f"it spends more {draft.matched} than the baseline"
    return ""


def _gain(tested: Tested, sign: int) -> float:
    assert tested.shrunk is not None
    return sign * tested.shrunk


def _configure(runs: pd.DataFrame, knobs: Sequence[Knob], chosen: Sequence[Tested], draft: Recipe) -> RunConfig:
    """The run nearest to the baseline, with every knob at its baseline or chosen setting; of several depths the nearest
    run below. A tuned field takes its best value at the run nearest to what was chosen. Raises ValueError."""
    wanted = {one.contrast.knob: one.contrast.setting for one in chosen}
    depths = runs["n_layers"].astype(int)
    nearest = max((one for one in depths if one <= (draft.depth or 0)), default=depths.min())
    wanted_depth = runs[depths == nearest]
    row = wanted_depth.loc[changed(wanted_depth, knobs).map(len).idxmin()]
    follows = {name for name in DERIVED if runs[name].nunique(dropna=False) > 1} - set(chosen_fields(runs))
    values = {name: plain(row[name]) for name in RunConfig.model_fields if name not in {"seed", *follows}}
    values["n_layers"] = draft.depth
    for knob in knobs:
        values.update(knob.settings[wanted.get(knob.name, knob.baseline)])
    away = [labels(wanted_depth, knob) != wanted.get(knob.name, knob.baseline) for knob in knobs]
    tuned_at = wanted_depth.loc[sum(away, start=pd.Series(0, wanted_depth.index)).idxmin()]
    values |= {name: plain(tuned_at[name]) for name in tuned_fields(runs)}
    # A combination that some run asked for by name is asked for here too; build refuses it otherwise.
    values["allow"] = tuple(sorted({name for allow in runs["allow"].map(plain) for name in allow}))
    with warnings.catch_warnings(action="ignore"):
        return build(RunConfig, {name: value for name, value in values.items() if value is not None}, "recipe")


def _combine(
    runs: pd.DataFrame, knobs: Sequence[Knob], tested: tuple[Tested, ...], draft: Recipe
) -> tuple[tuple[Tested, ...], RunConfig]:
    """Stack the recommended changes, the surest first, and leave out what cannot be built together with those."""
    order = sorted((one for one in tested if one.recommended), key=lambda one: one.p_adjusted or 0.0)
    kept: list[Tested] = []
    refused: dict[str, str] = {}
    config = _configure(runs, knobs, (), draft)
    for one in order:
        try:
            config = _configure(runs, knobs, [*kept, one], draft)
            kept.append(one)
        except ValueError as error:
            refused[one.contrast.setting] = f"cannot be combined with the other changes: {error}"
    return tuple(replace(one, reason=refused.get(one.contrast.setting, one.reason)) for one in tested), config


def _stacked(
    runs: pd.DataFrame, knobs: Sequence[Knob], tested: tuple[Tested, ...], config: RunConfig, draft: Recipe
) -> Recipe:
    """The finished recipe: what is known of the changes together decides whether they stand."""
    recipe = replace(draft, tested=tested, config=config)
    changes, sign = recipe.changes, recipe.sign
    if not changes:
        return replace(recipe, reason=f"no setting is distinguishably better in {draft.objective} than its baseline")
    if len(changes) == 1:
        return replace(recipe, stack="one change: nothing to stack")
    best = max(changes, key=lambda one: _gain(one, sign))
    against_baseline = compare_cells(runs, knobs, (), changes, draft.objective)
    against_best = compare_cells(runs, knobs, (best,), changes, draft.objective)
    if against_baseline is None and against_best is None:
        return replace(recipe, stack="stack not run: the changes were tested one by one and may interact")
    rivals = (("the baseline", against_baseline), (f"the best single change, {best.contrast.setting},", against_best))
    said = [f"against {rival} {judge(found, sign)}" for rival, found in rivals]
    known = tuple(found for _, found in rivals if found is not None)
    recipe = replace(recipe, stack=f"stack run: {'; '.join(said)}", stack_contrasts=known)
    if judge(against_baseline, sign).startswith("worse"):
        rest = _reject(tested, changes, "the changes together are worse than the baseline")
        return replace(recipe, config=draft.config, tested=rest, reason=f"the effects do not add up: {recipe.stack}")
    if judge(against_best, sign).startswith("worse"):
        others = [one for one in changes if one is not best]
        rest = _reject(tested, others, f"worse together with {best.contrast.setting} than that alone")
        return replace(recipe, config=_configure(runs, knobs, (best,), draft), tested=rest)
    return recipe


def _reject(tested: tuple[Tested, ...], losers: Sequence[Tested], reason: str) -> tuple[Tested, ...]:
    return tuple(replace(one, reason=reason) if one in losers else one for one in tested)


def compare_cells(
    runs: pd.DataFrame, knobs: Sequence[Knob], before: Sequence[Tested], after: Sequence[Tested], objective: str
) -> Contrast | None:
    """Two whole configurations against each other, paired by seed: all knobs as one. None if they share no seed."""

    def setting(changes: Sequence[Tested]) -> dict[str, Plain]:
        wanted = {one.contrast.knob: one.contrast.setting for one in changes}
        chosen = [knob.settings[wanted.get(knob.name, knob.baseline)] for knob in knobs]
        return {name: value for values in chosen for name, value in values.items()}

    try:
        whole = joint_knob(runs, knobs, setting(before))
    except ValueError:  # the rival was not run
        return None
    return compare(runs, whole, setting_text(setting(after)), objective)


def judge(contrast: Contrast | None, sign: int) -> str:
    """The changes together against a rival, in words that begin with the verdict."""
    if contrast is None:
        return "not compared (it has no run with the same seed)"
    if contrast.n_diverged:
        return f"worse ({contrast.n_diverged} of the runs diverged)"
    size = f"{estimate_text(contrast.effect, contrast.unit)}, {counted(contrast.effect.n, 'pair')}"
    if contrast.verdict == "not distinguishable":
        return f"not distinguishable: {size}"
    return f"{'better' if (contrast.verdict == 'higher') == (sign > 0) else 'worse'}: {size}"


def domain_of(runs: pd.DataFrame) -> dict[str, str]:
    """Where the evidence lies: the values or the range of what decides whether a reader's model is inside it."""
    names = ("n_layers", "d_model", "seq_len", "params_total", "params_active", "tokens_trained", "lr", "batch_tokens")
    ranges = {name: pd.to_numeric(runs[name], errors="coerce").dropna() for name in names}
    domain = {
        name: " to ".join(f"{end:,}" for end in dict.fromkeys(map(plain, (values.min(), values.max()))))
        for name, values in ranges.items()
        if len(values)
    }
    for name in ("corpus", "tokenizer", "norm", "init", "precision", "seed"):
        domain[name] = ", ".join(sorted({str(plain(value)) for value in runs[name]}))
    return domain
