"""Trends of effects with scale, in sentences and as a table."""

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.intervals import Estimate
from sparsedepth.effects.lr_transfer import transfer_page, transfers
from sparsedepth.effects.scale import AXES, Decision, Trend, decision_accuracy, trends
from sparsedepth.store.query_result import QueryResult

EXPLAINED = (
    "Trends of effects with scale: effects at one depth against the size of the baseline's runs. Slopes are per "
    "doubling, with the wider of the intervals over seeds and over scales; a predicted effect has the prediction "
    "interval of a new scale. Verdicts are Holm-corrected over the settings at one depth on one axis."
)

TOO_FEW = "too few scales: no setting was run at two widths or token budgets of one depth"


def scale_lines(runs: pd.DataFrame, outcome: str, knob: str | None, at: Mapping[str, float]) -> Iterator[str]:
    """Trends of every setting, decision accuracy against compute, and the regret of transferring lr. Raises ValueError
    if the runs have none of them."""
    by_setting, decisions = trends(runs, outcome, knob, at), decision_accuracy(runs, outcome)
    lr_transfers = transfers(runs, outcome)
    if not (by_setting or decisions or lr_transfers):
        raise ValueError(f"{TOO_FEW}; sweep d_model or train_tokens, too")
    yield EXPLAINED
    yield from map(trend_text, by_setting) if by_setting else (TOO_FEW,)
    if decisions:
        yield "\nDo small runs rank configurations as the largest do? (pairs in the same order; a tie counts half)"
    yield from map(_decision_text, decisions)
    if lr_transfers:
        yield f"\n{transfer_page(lr_transfers, outcome, runs)}"


def trend_text(trend: Trend) -> str:
    """'  n_layers=12, depth_scale=lns vs depth_scale=none, over parameters: persists: val_loss ...'."""
    by_scale = ", ".join(
        f"{effect:+.3g} at {scale:.3g}" for effect, scale in zip(trend.effects, trend.scales, strict=True)
    )
    unit = f" [{trend.unit}]" if trend.unit not in ("", "1") else ""
    head = (
        f"  n_layers={trend.n_layers}, {trend.setting} vs {trend.baseline}, over {trend.axis}: {trend.verdict}: "
        f"{trend.outcome}{unit} {by_scale}; {trend.n_pairs} pairs, {trend.n_seeds} seeds"
    )
    if trend.slope.mean is None:
        return head
    head += f"; {counted(trend.n_tested, 'setting')} tested"
    text = f"{head}; {_estimate(trend.slope)} per doubling; at the largest {_estimate(trend.largest)}"
    return text if trend.predicted is None else f"{text}; predicted at {trend.at:.3g}: {_estimate(trend.predicted)}"


def _estimate(estimate: Estimate) -> str:
    return f"{estimate.mean:+.3g} (95% interval {estimate.lo:+.3g} to {estimate.hi:+.3g})"


def _decision_text(decision: Decision) -> str:
    return (
        f"  n_layers={decision.n_layers}, {decision.params:.3g} parameters, {decision.tokens:.3g} tokens "
        f"({decision.compute:.2%} of the compute): {decision.accuracy:.0%} of {decision.n} pairs"
    )


def scale_table(by_setting: Sequence[Trend]) -> QueryResult:
    """One row per setting, depth and axis; `word` is the verdict."""
    ends = [f"{name}{end}" for name in ("slope", "smallest", "largest", "predicted") for end in ("", "_lo", "_hi")]
    head = ("knob", "setting", "baseline", "n_layers", "axis", "word", "tested", "scales", "pairs", "seeds")
    rows = []
    for trend in by_setting:
        setting = (trend.knob, trend.setting, trend.baseline, trend.n_layers, trend.axis, trend.verdict, trend.n_tested)
        estimates = (trend.slope, trend.smallest, trend.largest, trend.predicted)
        numbers = [getattr(estimate, end, None) for estimate in estimates for end in ("mean", "lo", "hi")]
        rows.append((*setting, len(trend.scales), trend.n_pairs, trend.n_seeds, *numbers, trend.at, trend.unit))
    return QueryResult(columns=(*head, *ends, "at", "unit"), rows=tuple(rows))


def prediction_sizes(texts: Sequence[str]) -> dict[str, float]:
    """The values of --at: 'parameters=1e9' -> {'parameters': 1e9}. Raises ValueError."""
    sizes = {}
    for text in texts:
        name, size = named_number(text)
        if name not in AXES or size is None or not size > 0:
            raise ValueError(f"--at {text!r} must be NAME=SIZE, such as parameters=1e9; NAME: {', '.join(AXES)}")
        sizes[name] = size
    return sizes


def named_number(text: str) -> tuple[str, float | None]:
    """'a_l=1' -> ('a_l', 1.0); None for a value that is not a number."""
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        return name, None
