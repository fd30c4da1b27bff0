"""Does an effect depend on what else is set? Settings crossed with each other: does one make the other superfluous?

    interaction = mean over seeds of d_s(beside) - d_s(alone)

with d_s(beside) the mean over seed s of outcome(setting) - outcome(baseline) where other knobs stand at the settings
named, d_s(alone) where every other knob stands at its baseline; at one depth, both at the same width and budget. A
knob that lowers the loss alone and has an interaction of the same size and the opposite sign is superfluous beside the
others. Two settings have one interaction, whichever of them is seen as the one beside the other. The seed is the unit;
the floor is 0, since seeds are in the interval already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sparsedepth.effects.contrast import Contrast, contrast_of, effect_fields
from sparsedepth.effects.holm import correct
from sparsedepth.effects.intervals import Judged, moderate
from sparsedepth.effects.knobs import ROLES, Design, Knob, design_of, find_knobs, keys, labels
from sparsedepth.effects.pairs import pairs, rounding_sd, unit_of
from sparsedepth.effects.tuning_error import tuning_of
from sparsedepth.store.tuning_roles import result_rows

_Context = tuple[str, ...]
"""The settings of the other knobs away from their baselines, as `Knob` names them."""


@dataclass(frozen=True, kw_only=True)
class SettingInteraction(Judged):
    """The effect of a setting beside other settings, less its effect alone, paired by seed."""

    outcome: str
    n_layers: int
    settings: tuple[str, ...]
    """of the other knobs, those away from their baseline"""
    alone: Contrast
    beside: Contrast

    @property
    def setting(self) -> str:
        """The setting whose effect is compared."""
        return self.alone.setting

    @property
    def text(self) -> str:
        """'depth_scale=lns beside optimizer=muon, n_kv_heads=1'."""
        return f"{self.setting} beside {', '.join(self.settings)}"


def setting_interactions(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> list[SettingInteraction]:
    """The interaction of every setting with what else it was run with, at every depth, judged as one family; of one
    knob, with a name.

    Absent where a setting was not run alone, too, with two of the seeds. Raises ValueError for an outcome that is no
    number of `runs`.
    """
    unit_of(outcome)
    runs = result_rows(runs)
    design = design_of(runs)
    knobs = [each for each in find_knobs(runs) if any(ROLES[name].kind == "knob" for name in each.fields)]
    known: set[tuple[int, frozenset[str]]] = set()
    family = []
    for each in (each for each in knobs if knob is None or knob in each.fields):
        for interaction in _of_knob(runs, each, knobs, outcome, design):
            crossed = (interaction.n_layers, frozenset((interaction.setting, *interaction.settings)))
            is_mirrored = len(interaction.settings) == 1 and crossed in known
            known.add(crossed)
            family += [] if is_mirrored else [interaction]
    return correct(moderate(family))


def _of_knob(
    runs: pd.DataFrame, knob: Knob, knobs: Sequence[Knob], outcome: str, design: Design
) -> list[SettingInteraction]:
    beside_N = _away(runs, [other for other in knobs if other is not knob])
    contexts = list(dict.fromkeys([(), *beside_N]))
    place = {context: nth for nth, context in enumerate(contexts)}
    context_N = pd.Series([place[beside] for beside in beside_N], index=runs["run_id"])
    of_knobs = {name for each in knobs for name in each.fields}
    sizes = [name for name in design.chosen if ROLES[name].kind == "capacity" and name not in of_knobs]
    size_N = keys(runs, sizes).set_axis(runs["run_id"])
    matched = pairs(runs, knob, outcome, design=design)
    matched = matched.assign(nth=matched["run_id_baseline"].map(context_N), size=matched["run_id_baseline"].map(size_N))
    interactions = []
    for n_layers in sorted(matched["n_layers"].unique()):
        for setting in list(knob.settings)[1:]:
            here = matched[(matched["n_layers"] == n_layers) & (matched["setting"] == setting)]
            for nth, context in enumerate(contexts[1:], start=1):
                alone, beside = here[here["nth"] == 0], here[here["nth"] == nth]
                interaction = _interaction(knob, setting, context, alone, beside, outcome)
                interactions += [interaction] if interaction else []
    return interactions


def _interaction(
    knob: Knob, setting: str, context: _Context, alone: pd.DataFrame, beside: pd.DataFrame, outcome: str
) -> SettingInteraction | None:
    """The interaction of a setting with a context; None where fewer than two seeds have both sides."""
    both = beside.merge(alone, on=["seed", "size"], suffixes=("", "_reference"))
    both = both.dropna(subset=["difference", "difference_reference"])
    if both["seed"].nunique() < 2:
        return None
    n_layers = int(beside["n_layers"].iloc[0])
    alone, beside = (rows.merge(both[["seed", "size"]].drop_duplicates()) for rows in (alone, beside))
    change = (both["difference"] - both["difference_reference"]).groupby(both["seed"]).mean()
    tuning = tuning_of(beside).less(tuning_of(alone))
    return SettingInteraction(
        outcome=outcome,
        n_layers=n_layers,
        settings=context,
        alone=contrast_of(alone, knob, setting, outcome, n_layers),
        beside=contrast_of(beside, knob, setting, outcome, n_layers),
        unit=str(both["unit"].iloc[0]),
        **effect_fields(change, len(both), rounding_sd(outcome, *[n_layers] * 4), tuning),
        floor=0.0,
    )


def _away(runs: pd.DataFrame, knobs: Sequence[Knob]) -> list[_Context]:
    """The settings that each run has away from the baselines."""
    columns = []
    for knob in knobs:
        columns.append([() if text == knob.baseline else (text,) for text in labels(runs, knob)])
    return [sum(settings, ()) for settings in zip(*columns, strict=True)] if columns else [()] * len(runs)
