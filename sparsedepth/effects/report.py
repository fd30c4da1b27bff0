"""Every effect that a store shows: each knob at each depth on four bases, its interaction with depth, and the chain.

Many comparisons are made at once, so that some stand out by chance. p-values are Holm's, over all contrasts of one
outcome on one basis (over all interactions; over all depth slopes): in at most 5% of stores without any effect is a
single one called 'lower' or 'higher' on that basis. A verdict needs three things: the interval excludes 0, the effect
exceeds the seed noise floor, and Holm's p is at most ALPHA; else it is 'not distinguishable'.

Intervals are Student's, over pairs. A bootstrap over 3 to 8 seeds covers too seldom (see `intervals`); with many pairs
the two agree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from sparsedepth.effects.contrast import (
    BASES,
    Contrast,
    Interaction,
    Verdict,
    contrasts_on_bases,
    interactions,
    unit_of,
)
from sparsedepth.effects.intervals import holm
from sparsedepth.effects.knobs import Knob, chosen_fields, depth_knob, design_of, find_knobs, trained
from sparsedepth.store.query_result import QueryResult

ALPHA = 0.05


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One setting of a knob at one depth on one basis."""

    knob: Knob
    setting: str
    n_layers: int | None
    """None where depth is the knob."""
    outcome: str
    basis: str
    contrast: Contrast | None
    """None: no two runs match on this basis."""
    p_holm: float | None
    """None with too few pairs for a p-value."""

    @property
    def verdict(self) -> Verdict:
        if self.contrast is None or self.p_holm is None or self.p_holm > ALPHA:
            return "not distinguishable"
        return self.contrast.verdict


@dataclass(frozen=True, kw_only=True)
class DepthEffect:
    """What depth does to a setting's effect, among all such."""

    interaction: Interaction
    p_holm: float | None

    @property
    def verdict(self) -> Verdict:
        beyond_chance = self.p_holm is not None and self.p_holm <= ALPHA
        return self.interaction.verdict if beyond_chance else "not distinguishable"


def measure_effects(runs: pd.DataFrame, outcome: str = "val_loss", knob: str | None = None) -> list[Effect]:
    """Every setting of every knob (depth last) at every depth on every basis; of one knob, with a name. All of them
    make up the family that p-values are corrected for.

    Raises ValueError for an outcome that is no number of `runs`, or a knob that these runs do not vary.
    """
    unit_of(outcome)
    runs = needed(runs, outcome)
    family = all_knobs(runs)
    wanted = {one.name for one in _choose(family, knob)}
    design = design_of(runs)
    found = {one.name: contrasts_on_bases(runs, one, outcome, design) for one in family}
    return [
        effect
        for basis in BASES
        for effect in _on_basis([(one, found[one.name]) for one in family], outcome, basis)
        if effect.knob.name in wanted
    ]


def _on_basis(
    family: Sequence[tuple[Knob, dict[str | None, list[Contrast]]]], outcome: str, basis: str
) -> list[Effect]:
    """Every place where any basis, or none, has a pair, with this basis's contrast or None."""
    listed = []
    for knob, found in family:
        here = {(one.n_layers, one.setting): one for one in found[basis]}
        order = list(knob.settings)
        places = {(one.n_layers, one.setting) for contrasts in found.values() for one in contrasts}
        for place in sorted(places, key=lambda place: (place[0] or 0, order.index(place[1]))):
            listed.append((knob, *place, here.get(place)))
    adjusted = corrected([contrast.effect.p if contrast else None for *_, contrast in listed])
    return [
        Effect(knob=knob, setting=setting, n_layers=n_layers, outcome=outcome, basis=basis, contrast=contrast, p_holm=p)
        for (knob, n_layers, setting, contrast), p in zip(listed, adjusted, strict=True)
    ]


def measure_interactions(runs: pd.DataFrame, outcome: str = "val_loss", knob: str | None = None) -> list[DepthEffect]:
    """Every knob x depth interaction, corrected over all knobs; of one knob, with a name. Raises as above."""
    runs = needed(runs, outcome)
    family = find_knobs(runs)
    wanted = {one.name for one in _choose(all_knobs(runs), knob)}
    found = [one for each in family for one in interactions(runs, each, outcome)]
    adjusted = corrected([one.difference.p for one in found])
    both = zip(found, adjusted, strict=True)
    return [DepthEffect(interaction=one, p_holm=p) for one, p in both if one.knob in wanted]


def corrected(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values of those that there are."""
    adjusted = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(adjusted) for p in p_values]


def all_knobs(runs: pd.DataFrame) -> list[Knob]:
    """The knobs, and depth last."""
    depth = depth_knob(runs)
    return [*find_knobs(runs), *([depth] if depth else [])]


def needed(runs: pd.DataFrame, outcome: str) -> pd.DataFrame:
    """The rows and columns that contrasts look at: frames of 200 columns are slow to cut."""
    runs = trained(runs)
    sizes = (
        "n_heads",
        "n_kv_heads",
        "d_model",
        "d_ff",
        "d_expert",
        "n_experts",
        "top_k",
        "n_shared_experts",
        "n_layers",
    )
    facts = ("run_id", "cell_id", "seed", "outcome", "model", "tuning", "tuned_fields")
    names = dict.fromkeys((*facts, outcome, *BASES.values(), *sizes, *chosen_fields(runs)))
    runs = runs[[name for name in names if name in runs.columns]]
    # Arrow's strings are slow to walk one by one, which is what keys and labels do.
    return runs.astype({name: object for name, kind in runs.dtypes.items() if isinstance(kind, pd.StringDtype)})


def _choose(knobs: Sequence[Knob], name: str | None) -> list[Knob]:
    """All knobs, or the one that a field belongs to. Raises ValueError."""
    chosen = [knob for knob in knobs if name is None or name in knob.fields]
    if not chosen:
        known = ", ".join(knob.name for knob in knobs)
        raise ValueError(
            f"no two runs differ in {name} alone; these runs vary: {known}"
            if known
            else "no two runs differ in one field alone: there is no effect to show; run a sweep"
        )
    return chosen


def effects_table(effects: Iterable[Effect]) -> QueryResult:
    """One row per Effect; NULL where there is no matched pair, or too few."""
    columns = ("knob", "setting", "baseline", "n_layers", "basis", "outcome", "verdict", "effect", "lo", "hi", "unit")
    columns += ("p", "p_holm", "noise", "floor", "baseline_mean", "pairs", "seeds", "diverged", "at_edge")
    rows = []
    for one in effects:
        head = (one.knob.name, one.setting, one.knob.baseline, one.n_layers, one.basis, one.outcome)
        found = one.contrast
        if found is None:
            rows.append((*head, "no matched runs", *[None] * 3, unit_of(one.outcome), *[None] * 5, 0, 0, None, None))
            continue
        effect = found.effect
        size = (one.verdict, effect.mean, effect.lo, effect.hi, found.unit, effect.p, one.p_holm)
        counts = (effect.n, found.n_seeds, found.n_diverged, found.n_at_edge)
        rows.append((*head, *size, found.noise, found.floor, found.baseline_mean, *counts))
    return QueryResult(columns=columns, rows=tuple(rows))
