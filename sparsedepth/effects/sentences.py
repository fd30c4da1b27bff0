"""Effects as sentences: direction, size, interval, sample, noise floor, matched quantities."""

import math

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.chain import Link
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.intervals import POWER, Estimate, Judged
from sparsedepth.effects.pairs import BASES

UNEVEN = "uneven tuning"


def contrast_sentence(contrast: Contrast) -> str:
    """'n_layers=24, n_kv_heads=1 vs n_kv_heads=4: val_loss lower: ... Matched: tokens'."""
    depth = "" if contrast.n_layers is None else f"n_layers={contrast.n_layers}, "
    basis = f". {basis_text(contrast)}" if contrast.effect.n else ""
    return f"{depth}{contrast.setting} vs {contrast.baseline}: {effect_text(contrast)}{basis}"


def effect_text(contrast: Contrast) -> str:
    """Outcome, verdict, size with interval, pairs, seeds, degrees of freedom, floor, Holm's p; the detectable effect if
    not significant; divergences and missing values, if any."""
    parts = [f"{contrast.outcome} unknown"]
    if contrast.effect.n:
        size = estimate_text(contrast.effect, contrast.unit)
        sample = f"{counted(contrast.effect.n, 'pair')}, {counted(contrast.n_seeds, 'seed')}{df_text(contrast)}"
        parts = [
            f"{contrast.outcome} {verdict_text(contrast)}: {size}{detectable_text(contrast)}",
            *([contrast.tuned] if contrast.tuned else []),
            f"{sample}, {floor_text(contrast.floor, contrast.unit)}{holm_text(contrast.p_holm)}",
        ]
    if contrast.n_diverged or contrast.n_baseline_diverged:
        parts.append(f"diverged: {contrast.n_diverged} of the setting, {contrast.n_baseline_diverged} of the baseline")
    if contrast.verdict_blocked_by:
        parts.append(contrast.verdict_blocked_by)
    elif contrast.n_at_edge:
        parts.append(f"tuned to the edge of the values tried in {counted(contrast.n_at_edge, 'pair')}")
    if contrast.n_missing:
        parts.append(f"not measured in {counted(contrast.n_missing, 'pair')}")
    return "; ".join(parts)


def estimate_text(effect: Estimate, unit: str) -> str:
    """'-0.021 nat/token (95% interval -0.031 to -0.011)', or a ratio 'x0.43 (...)' for logarithms."""
    if effect.mean is None:
        return "no pair with a value"

    def number(value: float) -> str:
        return size_text(value if abs(value) > 1e-12 else 0.0, unit, "+")

    mean = number(effect.mean) if unit in ("ln ratio", "1", "") else f"{number(effect.mean)} {unit}"
    if effect.lo is None or effect.hi is None:
        return f"{mean} ({'no interval: seeds do not differ' if effect.lacks_spread else 'too few for an interval'})"
    return f"{mean} (95% interval {number(effect.lo)} to {number(effect.hi)})"


def verdict_text(judged: Judged) -> str:
    """The verdict, or that uneven tuning alone withholds 'lower' or 'higher'."""
    is_withheld = judged.verdict_ignoring_tuning != judged.verdict
    return f"verdict withheld ({UNEVEN})" if is_withheld else judged.verdict


def detectable_text(judged: Judged) -> str:
    """'; effects above 0.05 would have been detected (80% power)', where the effect is not significant; else ''."""
    if judged.verdict_ignoring_tuning != "not distinguishable":
        return ""
    if judged.effect.lacks_spread:
        return ""
    if judged.detectable is None:
        return "; too few seeds to detect any effect"
    return f"; effects above {size_text(judged.detectable, judged.unit)} would have been detected ({POWER:.0%} power)"


def df_text(judged: Judged) -> str:
    """', 11.2 df (9.2 borrowed)': of the interval; nothing without one."""
    if judged.effect.df is None:
        return ""
    borrowed = judged.effect.df - judged.own_df
    return f", {judged.effect.df:.3g} df" + (
        f" ({borrowed:.2g} borrowed)" if borrowed > 0.05 and not judged.extra_variances else ""
    )


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
    ratios = [f"{basis} {ratio_text(contrast.ratios[basis])}" for basis in BASES if basis not in matched]
    unmatched = f"; setting / baseline: {', '.join(ratios)}" if ratios else ""
    return f"Matched: {', '.join(matched) or 'nothing'}{unmatched}"


def ratio_text(ratio: tuple[float, float] | None) -> str:
    """'0.9', or '0.9 to 1.2' where the pairs differ."""
    return "unknown" if ratio is None else " to ".join(dict.fromkeys(f"{end:.3g}" for end in ratio))


def link_text(link: Link) -> str:
    """'within depth: associated: rho -0.61 (...), Holm p 0.02; 24 runs of 8 combinations'."""
    noun = "setting" if link.knob or link.scope == "between knobs" else "combination"
    rho = "rho undefined (too few runs, or one side is constant)" if link.rho is None else f"rho {link.rho:+.2f}"
    if link.lo is not None and link.hi is not None:
        rho += f" (95% interval {link.lo:+.2f} to {link.hi:+.2f}){holm_text(link.p_holm)}"
    elif link.rho is not None:
        rho += f" (too few {noun}s for an interval)"
    excluded = f"; excluded: {link.n_missing} not measured, {link.n_diverged} diverged"
    return (
        f"{link.scope}: {link.verdict}: {rho}; {counted(link.n_runs, 'run')} of "
        f"{counted(link.n_units, noun)}{excluded if link.n_missing or link.n_diverged else ''}"
    )
