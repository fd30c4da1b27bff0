"""Words of power before running: the noise that was assumed, and what a table of detectable effects means."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparsedepth.quantities.levels import ALPHA, POWER

if TYPE_CHECKING:
    from sparsedepth.effects.power import PilotNoise


def power_text(
    noise: "PilotNoise", source: str, outcome: str, unit: str, tuned: Sequence[str], effect: float | None
) -> str:
    """Above the table: its explanation, and the noise that was assumed."""
    fields = " and ".join(tuned)
    df = f", {noise.df:.3g} df, its uncertainty included" if noise.df else ""
    parts = [f"{noise.own:.3g} {unit} between the runs of a setting ({source}{df})"]
    if tuned and noise.choice:
        parts.append(f"{noise.choice:.3g} from choosing {fields}")
    elif tuned:
        parts.append(f"none assumed from choosing {fields}, which a pilot with tuning would measure")
    needed = "" if effect is None else f"; seeds wanted: for an effect of {size_in_unit(effect, unit)}"
    return (
        f"power: detectable: the effect on {outcome} that such a sweep detects with {POWER:.0%} power (adjusted p "
        f"below {ALPHA} over the settings at a depth, as in `effects`){needed}\n"
        f"noise (standard deviation): {'; '.join(parts)}"
    )


def size_in_unit(value: float, unit: str) -> str:
    """Two digits, the precision of the draws."""
    return f"x{math.exp(value):.2g}" if unit == "ln ratio" else f"{value:.2g} {unit}"
