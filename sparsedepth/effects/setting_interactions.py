"""Does an effect depend on the other settings? The interaction of a setting with others, paired by seed.

    interaction = mean over seeds of d_s(combined) - d_s(alone)

with d_s(combined) the mean over seed s of outcome(setting) - outcome(baseline) where other knobs have the settings
named, d_s(alone) where every other knob is at its baseline; at one depth, both at the same width and budget. A knob
that lowers the loss alone and has an interaction of the same size and the opposite sign is redundant once the others
are set. The interaction of two settings is symmetric, and reported once. The seed is the unit; the floor is 0, since
the interval already covers the noise of seeds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from sparsedepth.effects.cells import unit_of
from sparsedepth.effects.contrast import Contrast, contrast_of, effect_fields
from sparsedepth.effects.intervals import Judged, correct, moderate_by_depth
from sparsedepth.effects.knobs import ROLES, Design, Knob, changed, design_of, find_knobs, keys
from sparsedepth.effects.pairs import pairs, rounding_sd
from sparsedepth.effects.tuning_error import tuning_of
from sparsedepth.store.tuning_roles import result_rows

_Context = tuple[str, ...]
"""The settings of the other knobs that differ from their baselines, as `Knob` names them."""


@dataclass(frozen=True, kw_only=True)
class SettingInteraction(Judged):
    """The effect of a setting combined with other settings minus its effect alone, paired by seed."""

    outcome: str
    n_layers: int
    settings: tuple[str, ...]
    """The other settings, without those at their baseline."""
    alone: Contrast
    combined: Contrast

    @property
    def noise_depth(self) -> int:
        return self.n_layers

    @property
    def setting(self) -> str:
        """The setting whose effect is compared."""
        return self.alone.setting

    @property
    def text(self) -> str:
        """'depth_scale=lns with optimizer=muon, n_kv_heads=1'."""
        return f"{self.setting} with {', '.join(self.settings)}"


def setting_interactions(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> list[SettingInteraction]:
    """The interaction of every setting (of one `knob`) with the other settings it was run with, at every depth, judged
    as one family. A setting that was not also run alone, with two of the same seeds, is absent.

    Raises ValueError for an outcome that is no number of `runs`.
    """
    unit_of(outcome)
    runs = result_rows(runs)
    design = design_of(runs)
    knobs = [each for each in find_knobs(runs) if any(ROLES[name].kind == "knob" for name in each.fields)]
    reported: set[tuple[int, frozenset[str]]] = set()
    family = []
    for each in (each for each in knobs if knob is None or knob in each.fields):
        for interaction in _interactions_of_knob(runs, each, knobs, outcome, design):
            key = (interaction.n_layers, frozenset((interaction.setting, *interaction.settings)))
            if len(interaction.settings) > 1 or key not in reported:
                family.append(interaction)
            reported.add(key)
    effects = {each.run_ids: each for interaction in family for each in (interaction.alone, interaction.combined)}
    moderated = dict(zip(effects, moderate_by_depth([*effects.values()]), strict=True))
    return [
        replace(each, alone=moderated[each.alone.run_ids], combined=moderated[each.combined.run_ids])
        for each in correct(moderate_by_depth(family))
    ]


def _interactions_of_knob(
    runs: pd.DataFrame, knob: Knob, knobs: Sequence[Knob], outcome: str, design: Design
) -> Iterator[SettingInteraction]:
    others = changed(runs, [other for other in knobs if other is not knob])
    context_N = others.map(lambda settings: tuple(settings.values())).set_axis(runs["run_id"])
    knob_fields = {name for each in knobs for name in each.fields}
    sizes = [name for name in design.chosen if ROLES[name].kind == "capacity" and name not in knob_fields]
    size_N = keys(runs, sizes).set_axis(runs["run_id"])
    matched = pairs(runs, knob, outcome, design=design)
    baseline = matched["run_id_baseline"]
    matched = matched.assign(context=baseline.map(context_N), size=baseline.map(size_N))
    for n_layers in sorted(matched["n_layers"].unique()):
        for setting in list(knob.settings)[1:]:
            rows = matched[(matched["n_layers"] == n_layers) & (matched["setting"] == setting)]
            by_context = dict(list(rows.groupby("context", sort=False)))
            alone = by_context.pop((), rows[:0])
            for context in (context for context in dict.fromkeys(context_N) if context in by_context):
                if interaction := _interaction(knob, setting, context, alone, by_context[context], outcome):
                    yield interaction


def _interaction(
    knob: Knob, setting: str, context: _Context, alone: pd.DataFrame, combined: pd.DataFrame, outcome: str
) -> SettingInteraction | None:
    """The interaction of a setting with a context; None where fewer than two seeds have both sides."""
    both = combined.merge(alone, on=["seed", "size"], suffixes=("", "_alone"))
    both = both.dropna(subset=["difference", "difference_alone"])
    if both["seed"].nunique() < 2:
        return None
    n_layers = int(combined["n_layers"].iloc[0])
    alone, combined = (rows.merge(both[["seed", "size"]].drop_duplicates()) for rows in (alone, combined))
    change = (both["difference"] - both["difference_alone"]).groupby(both["seed"]).mean()
    tuning = tuning_of(combined).minus(tuning_of(alone))
    return SettingInteraction(
        outcome=outcome,
        n_layers=n_layers,
        settings=context,
        alone=contrast_of(alone, knob, setting, outcome, n_layers),
        combined=contrast_of(combined, knob, setting, outcome, n_layers),
        unit=str(both["unit"].iloc[0]),
        **effect_fields(change, len(both), rounding_sd(outcome, *[n_layers] * 4), tuning),
        floor=0.0,
    )
