"""From paired effects to a RunConfig, with its evidence attached; or to a stated abstention.

For every knob the setting is taken whose paired effect on the objective, averaged over the other knobs' settings, is
distinguishable in the wanted direction: its interval excludes 0, it exceeds the seed noise floor, and its p-value
survives Holm's correction over all settings tested at this depth, so that pure noise yields a recommendation in at
most about 5% of stores. Never the luckiest single run. Not taken: a setting that ever diverged; one that spends more
than its baseline of what is to be matched; capacity and data, which are a budget and no recipe. What cannot be
distinguished stays at its baseline, and is listed.

The evidence is in-sample: grade C with replicated seeds, D without. Grades A and B need runs at depths that the
recipe has not seen, and are never claimed here.
"""

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pandas as pd
import yaml

from sparsedepth import glossary
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.contrast import BASES, Contrast, compare, contrasts, noise, values_of
from sparsedepth.effects.intervals import holm
from sparsedepth.effects.knobs import (
    DERIVED,
    Knob,
    Plain,
    changed,
    chosen_fields,
    find_knobs,
    joint_knob,
    plain,
    setting_text,
    trained,
)
from sparsedepth.effects.verdict import basis_text, counted, effect_text, estimate_text
from sparsedepth.files import write_text

ALPHA = 0.05
BUDGET = ("d_model", "d_ff", "vocab_size", "train_tokens", "corpus", "text_field", "tokenizer", "val_fraction")
"""Knobs that are controls: more of them is no sparser, and losses on other text or tokens do not compare."""
OWN_CONTEXT = ("train_loss", "val_loss", "val_bits_per_byte")
"""Objectives that a longer context changes by itself."""


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One setting, what it did, and why it is or is not part of the recipe."""

    contrast: Contrast
    p_adjusted: float | None
    """Holm's, over all settings that could have been recommended; None outside that family."""
    reason: str
    """Empty if recommended."""
    fields: tuple[str, ...]
    """The RunConfig fields that make up its knob."""

    @property
    def recommended(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class Recipe:
    depth: int | None
    objective: str
    matched: str
    config: RunConfig | None
    """The recommendation; the baseline where it abstains, None without a run to start from."""
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
    sign = _direction(objective)
    if matched not in BASES:
        raise ValueError(f"matched={matched!r} is no basis of comparison; choose one of: {', '.join(BASES)}")
    runs = trained(runs)
    finished = runs[runs["outcome"] == "ok"]
    if depth is None and len(finished):
        depth = int(finished["n_layers"].max())
    here = runs[runs["n_layers"] == depth]
    draft = Recipe(
        depth=depth,
        objective=objective,
        matched=matched,
        config=None,
        tested=(),
        reason="",
        stack="no change recommended, so none to stack",
        stack_contrasts=(),
        domain=_domain(here),
        run_ids=tuple(sorted(here["run_id"])),
        n_diverged=int((here["outcome"] == "diverged").sum()),
        grade="D",
    )
    if (here["outcome"] == "ok").any() and not values_of(here, objective).notna().any():
        return replace(draft, reason=f"{objective} was measured in no finished run at n_layers={depth}")
    if not (here["outcome"] == "ok").any():
        depths = ", ".join(str(found) for found in sorted(set(finished["n_layers"]))) or "none"
        return replace(draft, reason=f"no finished run at n_layers={depth}; depths with finished runs: {depths}")
    knobs = find_knobs(here, baselines)
    draft = replace(draft, config=_configure(here, knobs, ()))
    if not knobs:
        return replace(draft, reason=f"all runs at n_layers={depth} have the same configuration: nothing was varied")
    tested = _test(here, knobs, objective, sign, matched)
    if noise(here, objective)[0] is None:
        return replace(draft, tested=tested, reason="no configuration was run with two seeds: there is no noise floor")
    draft = replace(draft, grade="C")
    return _stacked(here, knobs, *_combine(here, knobs, tested), sign, draft)


def _direction(objective: str) -> int:
    """-1 if lower is better, +1 if higher is."""
    quantity = glossary.run_quantity(objective)
    if quantity is None or not quantity.better:
        known = ", ".join(q.name for q in glossary.RUNS if q.better)
        raise ValueError(f"objective {objective!r} has no better direction; choose one of: {known}")
    return 1 if quantity.better == "high" else -1


def _test(runs: pd.DataFrame, knobs: Sequence[Knob], objective: str, sign: int, matched: str) -> tuple[Tested, ...]:
    """Every setting of every knob, the reasons against it first come first served."""
    fields = {knob.name: knob.fields for knob in knobs}
    found = [contrast for knob in knobs for contrast in contrasts(runs, knob, objective)]
    family = [one for one in found if one.effect.p is not None and one.knob not in BUDGET]
    adjusted = dict(zip(map(id, family), holm([one.effect.p or 0.0 for one in family]), strict=True))
    tested = []
    for contrast in found:
        p = adjusted.get(id(contrast))
        reason = _against(contrast, p, sign, matched)
        tested.append(Tested(contrast=contrast, p_adjusted=p, reason=reason, fields=fields[contrast.knob]))
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


def _against(contrast: Contrast, p_adjusted: float | None, sign: int, matched: str) -> str:
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
    if (contrast.verdict == "higher") != (sign > 0):
        return f"worse: {contrast.outcome} {contrast.verdict}"
    if not contrast.costs_no_more(matched):
        return f"it spends more {matched} than the baseline"
    return ""


def _gain(tested: Tested, sign: int) -> float:
    mean = tested.contrast.effect.mean
    assert mean is not None
    return sign * mean


def _configure(runs: pd.DataFrame, knobs: Sequence[Knob], chosen: Sequence[Tested]) -> RunConfig:
    """The run nearest to the baseline, with every knob at its baseline or chosen setting. Raises ValueError."""
    wanted = {one.contrast.knob: one.contrast.setting for one in chosen}
    away = changed(runs, knobs).map(len)
    row = runs.loc[away.idxmin()]
    follows = {name for name in DERIVED if runs[name].nunique(dropna=False) > 1} - set(chosen_fields(runs))
    values = {name: plain(row[name]) for name in RunConfig.model_fields if name not in {"seed", *follows}}
    for knob in knobs:
        values.update(knob.settings[wanted.get(knob.name, knob.baseline)])
    # A combination that some run asked for by name is asked for here too; build refuses it otherwise.
    values["allow"] = tuple(sorted({name for allow in runs["allow"].map(plain) for name in allow}))
    with warnings.catch_warnings(action="ignore"):
        return build(RunConfig, {name: value for name, value in values.items() if value is not None}, "recipe")


def _combine(
    runs: pd.DataFrame, knobs: Sequence[Knob], tested: tuple[Tested, ...]
) -> tuple[tuple[Tested, ...], RunConfig]:
    """Stack the recommended changes, the surest first, and leave out what cannot be built together with those."""
    order = sorted((one for one in tested if one.recommended), key=lambda one: one.p_adjusted or 0.0)
    kept: list[Tested] = []
    refused: dict[str, str] = {}
    config = _configure(runs, knobs, ())
    for one in order:
        try:
            config = _configure(runs, knobs, [*kept, one])
            kept.append(one)
        except ValueError as error:
            refused[one.contrast.setting] = f"cannot be combined with the other changes: {error}"
    return tuple(replace(one, reason=refused.get(one.contrast.setting, one.reason)) for one in tested), config


def _stacked(
    runs: pd.DataFrame, knobs: Sequence[Knob], tested: tuple[Tested, ...], config: RunConfig, sign: int, draft: Recipe
) -> Recipe:
    """The finished recipe: what is known of the changes together decides whether they stand."""
    recipe = replace(draft, tested=tested, config=config)
    changes = recipe.changes
    if not changes:
        return replace(recipe, reason=f"no setting is distinguishably better in {draft.objective} than its baseline")
    if len(changes) == 1:
        return replace(recipe, stack="one change: nothing to stack")
    best = max(changes, key=lambda one: _gain(one, sign))
    against_baseline = _compare_cells(runs, knobs, (), changes, draft.objective)
    against_best = _compare_cells(runs, knobs, (best,), changes, draft.objective)
    if against_baseline is None and against_best is None:
        return replace(recipe, stack="stack not run: the changes were tested one by one and may interact")
    rivals = (("the baseline", against_baseline), (f"the best single change, {best.contrast.setting},", against_best))
    said = [f"against {rival} {_judge(found, sign)}" for rival, found in rivals]
    known = tuple(found for _, found in rivals if found is not None)
    recipe = replace(recipe, stack=f"stack run: {'; '.join(said)}", stack_contrasts=known)
    if _judge(against_baseline, sign).startswith("worse"):
        rest = _reject(tested, changes, "the changes together are worse than the baseline")
        return replace(recipe, config=draft.config, tested=rest, reason=f"the effects do not add up: {recipe.stack}")
    if _judge(against_best, sign).startswith("worse"):
        others = [one for one in changes if one is not best]
        rest = _reject(tested, others, f"worse together with {best.contrast.setting} than that alone")
        return replace(recipe, config=_configure(runs, knobs, (best,)), tested=rest)
    return recipe


def _reject(tested: tuple[Tested, ...], losers: Sequence[Tested], reason: str) -> tuple[Tested, ...]:
    return tuple(replace(one, reason=reason) if one in losers else one for one in tested)


def _compare_cells(
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


def _judge(contrast: Contrast | None, sign: int) -> str:
    """The changes together against a rival, in words that begin with the verdict."""
    if contrast is None:
        return "not compared (it has no run with the same seed)"
    if contrast.n_diverged:
        return f"worse ({contrast.n_diverged} of the runs diverged)"
    size = f"{estimate_text(contrast.effect, contrast.unit)}, {counted(contrast.effect.n, 'pair')}"
    if contrast.verdict == "not distinguishable":
        return f"not distinguishable: {size}"
    return f"{'better' if (contrast.verdict == 'higher') == (sign > 0) else 'worse'}: {size}"


def _domain(runs: pd.DataFrame) -> dict[str, str]:
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


# Output


def rule(recipe: Recipe) -> str:
    """The recipe in one sentence."""
    if recipe.abstained:
        return f"At n_layers={recipe.depth}: no recommendation: {recipe.reason}."
    changes = " and ".join(f"{one.contrast.setting} instead of {one.contrast.baseline}" for one in recipe.changes)
    better = f"better {recipe.objective} in these runs"
    return f"At n_layers={recipe.depth}, matched in {recipe.matched}: use {changes}; associated with {better}."


def evidence(recipe: Recipe) -> list[str]:
    """The card, one line per statement: rule, domain, effects, what was not taken and why, stack, grade, runs."""
    lines = [rule(recipe), f"Objective: {recipe.objective}; matched: {recipe.matched}"]
    lines += [f"Domain: {', '.join(f'{name} {value}' for name, value in recipe.domain.items())}"]
    n_tested = sum(one.p_adjusted is not None for one in recipe.tested)
    for heading, wanted in (("Recommended", True), ("Not recommended", False)):
        for one in recipe.tested:
            if one.recommended == wanted:
                contrast = one.contrast
                why = "" if wanted else f" ({one.reason})"
                p = "none" if one.p_adjusted is None else f"{max(one.p_adjusted, 1e-12):.2g}"
                lines.append(
                    f"{heading}: {contrast.setting} vs {contrast.baseline}{why}: {effect_text(contrast)}; "
                    f"Holm p {p} over {counted(n_tested, 'setting')}. {basis_text(contrast)}"
                )
    lines += [f"Together: {recipe.stack}", f"Diverged: {counted(recipe.n_diverged, 'run')} of {len(recipe.run_ids)}"]
    meaning = "in-sample, several seeds" if recipe.grade == "C" else "no replicates"
    lines.append(f"Grade {recipe.grade}: {meaning}. Grades A and B need a test on held-out depths; none was made.")
    lines.append(f"Runs: {' '.join(recipe.run_ids) or 'none'}")
    return lines


def to_yaml(recipe: Recipe) -> str:
    """The RunConfig as YAML, its evidence as comments above it. The seed is left to the reader.

    Raises ValueError for a recipe with no run to start from.
    """
    if recipe.config is None:
        raise ValueError(f"there is no configuration to write: {recipe.reason}")
    comments = [
        line
        for statement in evidence(recipe)
        # split() also ends lines at U+0085 and U+2028, which YAML takes for line breaks: a comment stays one.
        for line in textwrap.wrap(" ".join(statement.split()), 110, subsequent_indent="  ", break_on_hyphens=False)
    ]
    values = recipe.config.model_dump(mode="json", exclude={"seed"})
    first = {"n_layers", *(name for one in recipe.changes for name in one.fields)}
    values = dict(sorted(values.items(), key=lambda item: item[0] not in first))
    return "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(values, sort_keys=False)


def write(recipe: Recipe, path: Path) -> None:
    """Write `to_yaml` to a file, whole or not at all."""
    write_text(path, to_yaml(recipe))
