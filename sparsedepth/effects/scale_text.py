"""Effects across scale, in sentences and as a table."""

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from sparsedepth.effects.intervals import Estimate
from sparsedepth.effects.scale import AXES, Decision, Transfer, Trend, decision_accuracy, transfers, trends
from sparsedepth.effects.sentences import counted
from sparsedepth.store.query_result import QueryResult

EXPLAINED = (
    "Effects at one depth against the size of the baseline's runs; slopes per doubling, the wider of the intervals "
    "over seeds and over scales; a prediction is for one more scale. A width or a budget alone has no trend. Words are "
    "corrected by Holm's procedure over the settings of a depth and axis."
)


def scale_lines(runs: pd.DataFrame, outcome: str, knob: str | None, at: Mapping[str, float]) -> Iterator[str]:
    """Trends of every setting, decision accuracy against compute, and what transferring the lr costs."""
    yield EXPLAINED
    by_setting = trends(runs, outcome, knob, at)
    if not by_setting:
        yield "too few scales: no setting was run at two sizes or budgets of one depth"
    for trend in by_setting:
        yield trend_text(trend)
    decided = decision_accuracy(runs, outcome)
    if decided:
        yield "\nDo small runs order configurations as the largest do? (pairs of configurations, a tie counted half)"
    yield from map(_decision_text, decided)
    moved = transfers(runs, outcome)
    if moved:
        yield (
            f"\nThe best lr by width and depth, and the regret: how much more {outcome} the best lr of the smallest "
            "runs (by parameters x tokens) leaves there"
        )
    yield from map(_transfer_text, moved)


def trend_text(trend: Trend) -> str:
    """'  n_layers=12, depth_scale=lns vs depth_scale=none, over parameters: persists: val_loss ...'."""
    by_scale = ", ".join(
        f"{effect:+.3g} at {scale:.3g}" for effect, scale in zip(trend.effects, trend.scales, strict=True)
    )
    unit = f" [{trend.unit}]" if trend.unit not in ("", "1") else ""
    head = (
        f"  n_layers={trend.n_layers}, {trend.setting} vs {trend.baseline}, over {trend.axis}: {trend.word}: "
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


def _transfer_text(transfer: Transfer) -> str:
    edge = ", the edge of the values tried" if transfer.at_edge else ""
    smooth = (
        ""
        if transfer.optimum is None
        else f"; smooth optimum {transfer.optimum:.3g} ({transfer.lo:.3g} to {transfer.hi:.3g})"
    )
    regret = "not tried there" if transfer.regret is None else f"regret {transfer.regret:.3g}"
    return (
        f"  d_model={transfer.d_model}, n_layers={transfer.n_layers}, {transfer.params:.3g} parameters, "
        f"{transfer.tokens:.3g} tokens: best lr "
        f"{transfer.best:.3g}{edge}{smooth}; at {transfer.moved:.3g}: {regret}"
    )


def scale_table(by_setting: Sequence[Trend]) -> QueryResult:
    """One row per setting, depth and axis."""
    ends = [f"{name}{part}" for name in ("slope", "smallest", "largest", "predicted") for part in ("", "_lo", "_hi")]
    place = ("knob", "setting", "baseline", "n_layers", "axis", "word", "tested", "scales", "pairs", "seeds")
    columns = (*place, *ends, "at", "unit")
    rows = []
    for trend in by_setting:
        where = (trend.knob, trend.setting, trend.baseline, trend.n_layers, trend.axis, trend.word, trend.n_tested)
        parts = (trend.slope, trend.smallest, trend.largest, trend.predicted)
        numbers = [getattr(part, name, None) for part in parts for name in ("mean", "lo", "hi")]
        rows.append((*where, len(trend.scales), trend.n_pairs, trend.n_seeds, *numbers, trend.at, trend.unit))
    return QueryResult(columns=columns, rows=tuple(rows))


def wanted(texts: Sequence[str]) -> dict[str, float]:
    """'parameters=1e9' -> {'parameters': 1e9}. Raises ValueError."""
    sizes = {}
    for text in texts:
        name, size = named_number(text)
        if name not in AXES or size is None or not size > 0:
            raise ValueError(f"--at {text!r} must be a size, such as parameters=1e9; of {', '.join(AXES)}")
        sizes[name] = size
    return sizes


def named_number(text: str) -> tuple[str, float | None]:
    """'a_l=1' -> ('a_l', 1.0); None for what is no number."""
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        return name, None
