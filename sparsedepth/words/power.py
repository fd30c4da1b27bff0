"""Words of power before running: the noise that was assumed, and what a table of detectable effects means."""

import math
from typing import TYPE_CHECKING

from sparsedepth.quantities.levels import ALPHA, POWER

if TYPE_CHECKING:
    from sparsedepth.cli.plan import DetectableEffects


def power_text(found: "DetectableEffects") -> str:
    """Above the table: its explanation, and the noise that was assumed; or what is needed to make it."""
    noise, unit = found.noise, found.unit
    if noise is None:
        return (
            "power: one run at each budget; --pilot RESULTS (an earlier ladder with a setting, or a public one by "
            "`import`) tells its noise, and so which multiplier this one would show"
        )
    fields = " and ".join(found.tuned)
    df = f", {noise.df:.3g} df, its uncertainty included" if noise.df else ""
    of = "of ln loss" if found.is_ladder else unit
    choice = ""
    if found.tuned:
        known = f"; {noise.choice:.3g} from choosing {fields}"
        unknown = f"; none assumed from choosing {fields}, which a pilot with tuning would measure"
        choice = known if noise.choice else unknown
    needed = "" if found.effect is None else f"; seeds wanted: for an effect of {size_in_unit(found.effect, unit)}"
    seen = (
        f"what a setting is worth in compute, the same at every size, that such a ladder shows with {POWER:.0%} power "
        f"(adjusted p below {ALPHA} over its settings, as in `judge`)"
        if found.is_ladder
        else f"the effect on {found.objective} that such a sweep detects with {POWER:.0%} power (adjusted p "
        f"below {ALPHA} over the settings at a depth, as in `effects`){needed}"
    )
    size = f"{noise.own:.3g} {of} between the runs of a setting ({found.source}{df}){choice}"
    return f"power: detectable: {seen}\nnoise (standard deviation): {size}"


def size_in_unit(value: float, unit: str) -> str:
    """Two digits, the precision of the draws; of a ratio three."""
    return f"x{math.exp(value):.3g}" if unit == "ln ratio" else f"{value:.2g} {unit}"
