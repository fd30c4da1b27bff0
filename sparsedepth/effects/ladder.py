"""The stacked recipe, one change at a time: what does each rung add, and is it needed in the whole?

The ladder of 2603.15389 (its leading figure: longer context, weight decay, grouped heads, experts) starts from every
knob's baseline at one depth. Each rung varies one knob, while the knobs of lower rungs are at their best setting,
significant or not, as in the paper. Adding changes cannot show interactions; leaving one out of the whole can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.all_effects import judge
from sparsedepth.effects.contrast import Contrast, compare, over_depths
from sparsedepth.effects.knobs import Knob, field_values, find_knobs, joint_knob, labels, setting_text

ORDER = ("seq_len", "weight_decay", "n_kv_heads", "n_experts")
"""The paper's. Other knobs follow, in the order in which `find_knobs` gives them."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    rungs: tuple[Contrast, ...]
    """Every setting of every rung against the rung below; rungs that were not run are absent."""
    last_in: tuple[Contrast, ...]
    """For every knob: the top of the ladder against the top without it."""
    whole: Contrast | None
    """The top of the ladder against its foot; None with fewer than two rungs."""


def ladder(runs: pd.DataFrame, objective: str) -> Ladder:
    """The ladder through runs of one depth.

    Raises ValueError for an objective that is no number of `runs`, or has no better direction.
    """
    sign = quantities.sign(quantities.rankable(objective).name)
    knobs = sorted(find_knobs(runs), key=lambda knob: ORDER.index(knob.name) if knob.name in ORDER else len(ORDER))
    foot = {knob.name: knob.baseline for knob in knobs}
    top, rungs = dict(foot), list[Contrast]()
    for knob in knobs:
        rung = over_depths(_runs_with(runs, knobs, top, knob), knob, objective)
        rungs += rung
        measured = [contrast for contrast in rung if contrast.effect.mean is not None]
        if measured:
            top[knob.name] = max(measured, key=lambda contrast: sign * (contrast.effect.mean or 0.0)).setting
    moved = [knob for knob in knobs if top[knob.name] != foot[knob.name]]
    if len(moved) < 2:
        return Ladder(rungs=tuple(judge(rungs)), last_in=(), whole=None)
    last_in = [compare(_runs_with(runs, knobs, top, knob), knob, top[knob.name], objective) for knob in moved]
    last_in = [contrast for contrast in last_in if contrast is not None]
    joint = joint_knob(runs, knobs, field_values(knobs, foot))
    whole = compare(runs, joint, setting_text(field_values(knobs, top)), objective)
    judged = judge([*rungs, *last_in, *([whole] if whole else [])])
    return Ladder(
        rungs=tuple(judged[: len(rungs)]),
        last_in=tuple(judged[len(rungs) : len(rungs) + len(last_in)]),
        whole=judged[-1] if whole else None,
    )


def _runs_with(runs: pd.DataFrame, knobs: Sequence[Knob], settings: Mapping[str, str], free: Knob) -> pd.DataFrame:
    """The runs with these settings of every knob but `free`."""
    fits = pd.Series(True, index=runs.index)
    for knob in knobs:
        if knob is not free:
            fits &= labels(runs, knob) == settings[knob.name]
    return runs[fits]
