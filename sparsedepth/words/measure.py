"""The numbers of one model: what `train`, `measure` and `evaluate` print."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparsedepth.quantities import with_intervals
from sparsedepth.quantities.quantity import Row
from sparsedepth.words.effects import unit_text
from sparsedepth.words.plain_text import duration, wrapped
from sparsedepth.words.price import size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sparsedepth.config.run import MeasureOnlyConfig
    from sparsedepth.probe.text import TokenArrays
    from sparsedepth.run.measure_existing_model import MeasurementResult
    from sparsedepth.store.evals import Evaluation, Result


def summary_text(summary: Row) -> str:
    """A line per quantity: name, value, unit, interval."""
    rows = list(with_intervals(summary))
    width = max((len(column.name) for column, _, _ in rows), default=0)
    text = ""
    for column, value, ends in rows:
        interval = "  [{:.4g}, {:.4g}]".format(*ends) if ends else ""
        number = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        text += f"  {column.name:{width}}  {number}{unit_text(column.unit)}{interval}\n"
    return text


def notes_text(notes: "Iterable[str]") -> str:
    """What weakens a run's numbers, a paragraph each."""
    return wrapped(f"note: {note}" for note in notes)


def model_text(result: "MeasurementResult") -> str:
    """'models/llama: llama, 12 layers, d_model 256, 9,000,000 parameters'."""
    facts = result.loaded.facts
    return (
        f"{result.loaded.source}: {facts.family}, {facts.n_layers} layers, d_model {facts.d_model}, "
        f"{facts.params_total:,} parameters"
    )


def tokens_text(given: "TokenArrays", config: "MeasureOnlyConfig", *, is_halved: bool) -> str:
    """What was scored of the given tokens, in sequences and positions, and on what the maps were fitted: `is_halved`,
    on the last half of the file."""
    length = config.seq_len
    scored = given.scored[: config.measure_tokens // length]
    n_of_loss = len(given.scored[: config.val_tokens // length])
    positions = f" at {scored.n_scored:,} of {scored.n_tokens:,} positions" if scored.n_scored < scored.n_tokens else ""
    loss = f", the loss on {n_of_loss}" if n_of_loss != len(scored) else ""
    return (
        f"{len(scored)} sequences of {length} tokens scored{positions}{loss}; maps fitted and n-grams counted on "
        f"{len(given.fit[: config.fit_tokens // length])} others{', of the last half of the file' * is_halved}"
    )


def evaluation_text(evaluation: "Evaluation", note: str) -> str:
    """The scores of a task with their errors; `note` says where they are stored."""
    without = "" if evaluation.without is None else f" without layers {evaluation.without}"
    text = f"{evaluation.task} (version {evaluation.task_version}){without}: {evaluation.n} documents  {note}".rstrip()
    for result in evaluation.results:
        value = "-" if result.value is None else f"{result.value:.4g}"
        error = "" if result.stderr is None else f" +- {result.stderr:.2g}"
        error += "" if result.lo is None or result.hi is None else f"  [{result.lo:.4g}, {result.hi:.4g}]"
        text += f"\n  {metric_name(result):26} {value}{error}"
    if evaluation.n_truncated:
        text += f"\n  {evaluation.n_truncated} requests exceeded {evaluation.max_len} tokens; their start was cut off"
    return text


def metric_name(result: "Result", metric: str | None = None) -> str:
    """'acc', or with a filter of its answers 'exact_match, strict'."""
    return (metric or result.metric) + ("" if result.filter == "none" else f", {result.filter}")


def told_text(name: str, known: "Mapping[str, Any]", left: int) -> str:
    """'step1000: 2.1 s, 1.2 GB; 38 left, about 80 s and 46 GB': what a model cost, and the price of those left."""
    if reason := known["reason"]:
        return f"{name}: not measured: {reason}"
    equal = f", the weights of {known['equal_to']}" if known["equal_to"] else ""
    seconds, n_bytes = known["seconds"], known["bytes"]
    price = f"; {left} left, about {duration(left * seconds)} and {size(left * n_bytes)}" if left else ""
    return f"{name}: {seconds:.2g} s, {size(n_bytes)}{equal}{price}"
