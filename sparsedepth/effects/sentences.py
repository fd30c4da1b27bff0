"""Effects as sentences that say no more than was measured: direction, size, unit, interval, sample, noise floor, basis.

`answer` is the body of the scripts in `analysis/`: results folders in, one verdict per depth, setting and outcome out.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from sparsedepth.effects.chain import Link
from sparsedepth.effects.contrast import Contrast, Interaction, contrasts, interactions
from sparsedepth.effects.intervals import Estimate
from sparsedepth.effects.knobs import find_knob
from sparsedepth.effects.pairs import BASES
from sparsedepth.store.connection import open_store

NOTHING = 2
"""Exit status of a question that these runs cannot answer."""


def contrast_sentence(contrast: Contrast) -> str:
    """'n_layers=24, n_kv_heads=1 vs n_kv_heads=4: val_loss lower by ...; on what the two were matched."""
    depth = "" if contrast.n_layers is None else f"n_layers={contrast.n_layers}, "
    basis = f". {basis_text(contrast)}" if contrast.effect.n else ""
    return f"{depth}{contrast.setting} vs {contrast.baseline}: {effect_text(contrast)}{basis}"


def effect_text(contrast: Contrast, verdict: str | None = None) -> str:
    """Outcome, verdict, size with interval, pairs, seeds, floor; divergences and missing values where there are any.
    `verdict` stands in place of the contrast's own."""
    parts = [f"{contrast.outcome} unknown"]
    if contrast.effect.n:
        size = estimate_text(contrast.effect, contrast.unit)
        floor = floor_text(contrast.floor, contrast.unit)
        parts = [
            f"{contrast.outcome} {verdict or contrast.verdict}: {size}",
            f"{counted(contrast.effect.n, 'pair')}, {counted(contrast.n_seeds, 'seed')}, {floor}",
        ]
    if contrast.n_diverged or contrast.n_baseline_diverged:
        parts.append(f"diverged: {contrast.n_diverged} of the setting, {contrast.n_baseline_diverged} of the baseline")
    if contrast.n_at_edge:
        parts.append(f"tuned to the edge of the values tried in {counted(contrast.n_at_edge, 'pair')}")
    if contrast.n_missing:
        parts.append(f"not measured in {counted(contrast.n_missing, 'pair')}")
    return "; ".join(parts)


def estimate_text(effect: Estimate, unit: str) -> str:
    """'-0.021 nat/token (95% interval -0.031 to -0.011)', or a ratio 'x0.43 (...)' for logarithms."""
    if effect.mean is None:
        return "no pair with the number"

    def number(value: float) -> str:
        return size_text(value if abs(value) > 1e-12 else 0.0, unit, "+")

    shown = number(effect.mean) if unit in ("ln ratio", "1", "") else f"{number(effect.mean)} {unit}"
    if effect.lo is None or effect.hi is None:
        return f"{shown} (no interval from so few)"
    return f"{shown} (95% interval {number(effect.lo)} to {number(effect.hi)})"


def size_text(value: float, unit: str, sign: str = "", times: str = "x") -> str:
    """A difference to three digits, or the ratio whose logarithm it is."""
    return f"{times}{math.exp(value):.3g}" if unit == "ln ratio" else f"{value:{sign}.3g}"


def number_text(value: float | None, sign: str = "+") -> str:
    return "unknown" if value is None else f"{value:{sign}.3g}"


def floor_text(floor: float | None, unit: str) -> str:
    return "no noise floor (one seed)" if floor is None else f"noise floor {size_text(floor, unit)}"


def holm_text(p_holm: float | None) -> str:
    return "" if p_holm is None else f", Holm p {p_holm:.2g}"


def basis_text(contrast: Contrast) -> str:
    """'Matched: tokens, flops; setting / baseline: params_total 0.93'."""
    matched = [basis for basis in BASES if contrast.matches(basis)]
    others = [f"{basis} {ratio_text(contrast.ratios[basis])}" for basis in BASES if basis not in matched]
    apart = f"; setting / baseline: {', '.join(others)}" if others else ""
    return f"Matched: {', '.join(matched) or 'nothing'}{apart}"


def ratio_text(ratio: tuple[float, float] | None) -> str:
    """'0.9', or '0.9 to 1.2' where the pairs differ."""
    return "unknown" if ratio is None else " to ".join(dict.fromkeys(f"{end:.3g}" for end in ratio))


def interaction_sentence(interaction: Interaction) -> str:
    """How the effect at the deepest depth differs from that at the shallowest."""
    return (
        f"{interaction.setting} vs {interaction.baseline}, effect at n_layers={interaction.deep} less that at "
        f"n_layers={interaction.shallow}: {interaction.outcome} {interaction.verdict}: "
        f"{estimate_text(interaction.effect, interaction.unit)}; {counted(interaction.effect.n, 'pair')} of pairs"
    )


def link_text(link: Link) -> str:
    """'within depth: associated: rho -0.61 (...); 24 runs in 8 cells'."""
    rho = "rho undefined (too few runs, or one side is constant)" if link.rho is None else f"rho {link.rho:+.2f}"
    if link.lo is not None and link.hi is not None:
        rho += f" (95% interval {link.lo:+.2f} to {link.hi:+.2f})"
    elif link.rho is not None:
        rho += " (no interval from so few configurations)"
    out = f"; left out: {link.n_missing} not measured, {link.n_diverged} diverged"
    return (
        f"{link.scope}: {link.verdict}: {rho}; {counted(link.n_runs, 'run')} in "
        f"{counted(link.n_cells, 'cell')}{out if link.n_missing or link.n_diverged else ''}"
    )


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def chance_text(n: int) -> str:
    return f"{n} contrasts at 95% each: chance alone makes about {0.05 * n:.1f} of them stand out"


def answer(
    paths: Sequence[str],
    field: str,
    outcomes: Sequence[str],
    claim: str,
    details: Callable[[pd.DataFrame], Iterable[str]] | None = None,
) -> int:
    """Print what the paper claims about a field and what these runs say, one line per contrast.
    Returns the exit status: 0, or 2 where no two runs differ in that field alone."""
    runs = read_runs(paths)
    if runs is None:
        return NOTHING
    knob = find_knob(runs, field)
    if knob and not knob.is_pure and field != "n_layers":
        print(
            f"{' and '.join(knob.fields)} change only together: no effect can be ascribed to {field}", file=sys.stderr
        )
        return NOTHING
    measured = [contrast for outcome in outcomes for contrast in contrasts(runs, knob, outcome)] if knob else []
    if knob is None or not measured:
        print(f"no two of these {len(runs)} runs differ in {field} alone; run a sweep over {field}", file=sys.stderr)
        return NOTHING
    print(f"Claimed: {claim}\nMeasured, against {knob.baseline} ({', '.join(knob.fields)} differ, nothing else):")
    for contrast in measured:
        print(f"  {contrast_sentence(contrast)}")
    for interaction in (each for outcome in outcomes for each in interactions(runs, knob, outcome)):
        print(f"  {interaction_sentence(interaction)}")
    for line in details(runs) if details else ():
        print(f"  {line}")
    if len(measured) > 1:
        print(chance_text(len(measured)))
    return 0


def read_runs(paths: Sequence[str]) -> pd.DataFrame | None:
    """The `runs` view of results folders; None, with the reason on stderr, where there is none."""
    if not paths:
        print("name at least one results folder: python analysis/NAME.py RESULTS_DIR [...]", file=sys.stderr)
        return None
    try:
        with open_store(*paths) as store:
            return store.frame("select * from runs")
    except ValueError as error:
        print(error, file=sys.stderr)
        return None
