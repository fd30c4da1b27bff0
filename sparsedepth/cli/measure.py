"""`sparsedepth measure` and `evaluate`: layer-effectiveness measures of an existing model, and its scores on tasks."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsedepth.cli import calls, option
from sparsedepth.quantities import LAYERS, PAIRS, with_intervals
from sparsedepth.quantities.record import Column
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.plain_text import wrapped
from sparsedepth.words.table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsedepth.exchange.evaluate import HarnessTask
    from sparsedepth.probe.load import LoadedModel
    from sparsedepth.run.measure_existing_model import MeasurementResult
    from sparsedepth.store.evals import Evaluation, Result


@option.of_call(calls.measure)
def measure(
    given: option.Given,
    format: Annotated[Literal["table", "json"], typer.Option(help="output format")] = "table",
) -> None:
    """Measure a run or a Hugging Face model: Llama, Qwen, Mistral, Gemma, OLMo, Pythia, GPT-2, Mixtral, OLMoE, ..."""
    from sparsedepth.cli.run_progress import print_summary
    from sparsedepth.store.degeneracy import notes_on_run

    result, measures, out = calls.measure(**given), given["measures"], given["out"]
    if format == "table":
        summary, facts = result.measurements.summary, result.loaded.facts
        print(_title(result, given["fit_tokens"]))
        print_summary(summary)
        available = {column.measure for column, _, _ in with_intervals(summary)}
        requested = () if measures in (None, "all") else result.config.measures
        if missing := [name for name in requested if name not in available]:
            print(f"not defined for this model: {', '.join(missing)}; see `sparsedepth metrics` for their requirements")
        row = {"outcome": "ok", "n_layers": facts.n_layers, "vocab_size": facts.vocab_size, **summary}
        print(wrapped(f"note: {note}" for note in notes_on_run(row)), end="")
    else:
        print(json.dumps(_scores(result), indent=1, allow_nan=False))
    if out is not None:
        print(f"written: {out}", file=sys.stdout if format == "table" else sys.stderr)


def _title(result: "MeasurementResult", fit_tokens: Path | None) -> str:
    facts, config = result.loaded.facts, result.config
    sizes = f"{facts.n_layers} layers, d_model {facts.d_model}, {facts.params_total:,} parameters"
    title = f"{result.loaded.source}: {facts.family}, {sizes}"
    if result.given is None:
        return title
    given, length = result.given, config.seq_len
    scored = given.scored[: config.measure_tokens // length]
    n_fit, n_of_loss = len(given.fit[: config.fit_tokens // length]), len(given.scored[: config.val_tokens // length])
    n_scored, n_tokens = scored.n_scored, scored.n_tokens
    positions = "" if n_scored == n_tokens else f" at {n_scored:,} of {n_tokens:,} positions"
    loss = "" if n_of_loss == len(scored) else f", the loss on {n_of_loss}"
    split = "" if fit_tokens else ", of the last half of the file"
    return (
        f"{title}\n{len(scored)} sequences of {length} tokens scored{positions}{loss}; "
        f"maps fitted on {n_fit} others{split}"
    )


def _scores(result: "MeasurementResult") -> list[dict[str, Any]]:
    """An object per score: definition, global value with interval, and values by layer or a matrix of pairs. Missing
    values are null."""
    measured = result.measurements
    scores = [
        _score(result, column, _metric(result, column), value, interval)
        for column, value, interval in with_intervals(measured.summary)
        if not column.part and column.unit != "token"
    ]
    shown = {score["metric"] for score in scores}
    for rows, columns in ((measured.layers, LAYERS), (measured.pairs, PAIRS)):
        by_name = {column.name: column for column in columns}
        metrics = dict.fromkeys(row["metric"] for row in rows if row["metric"] not in shown)
        scores += [_score(result, by_name[metric.partition("@")[0]], metric) for metric in metrics]
        shown |= {*metrics}
    return scores


def _metric(result: "MeasurementResult", column: Column) -> str:
    """The name of a column's values by layer, as `weight_sparsity@0.001`."""
    quantity = column.quantity
    assert quantity
    at = f"@{getattr(result.config, quantity.threshold)[0]:g}" if quantity.threshold else ""
    return quantity.metric + at


def _score(
    result: "MeasurementResult", column: Column, metric: str, value: Any = None, interval: tuple[Any, Any] | None = None
) -> dict[str, Any]:
    """A column of `runs` with value, interval and its rows; or a metric with rows only."""
    measured = result.measurements
    layers = [row for row in measured.layers if row["metric"] == metric]
    pairs = [row for row in measured.pairs if row["metric"] == metric]
    error = measured.summary.get(f"{column.name}_se") if column.view == "runs" else None
    return {
        "name": column.name if column.view == "runs" else metric,
        "definition": column.meaning,
        "source": column.source,
        "unit": column.unit,
        "global": value,
        "interval": list(interval) if interval else None,
        "n_tokens": _n_tokens(result, column, [*layers, *pairs]),
        "metric": metric if layers or pairs else None,
        **({} if error is None else {"standard_error": error}),
        **_by_layer(layers),
        **_by_pair(pairs, result.loaded.facts.n_layers),
    }


def _n_tokens(result: "MeasurementResult", column: Column, rows: list[dict[str, Any]]) -> int | None:
    """Number of tokens behind a value; None for measures of the weights."""
    if column.measure == "weights":
        return None
    if column.measure == "loss":
        tokens = result.measurements.summary["val_loss_tokens"]
        return None if tokens is None else int(tokens)
    if rows and column.measure != "attention":  # its rows count attention weights
        return max(row["n"] for row in rows)
    return result.n_tokens


def _by_layer(rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = {row["layer"]: row["value"] for row in rows}
    if not values:
        return {}
    first = min(values)
    return {"first_layer": first, "per_layer": [values.get(layer) for layer in range(first, max(values) + 1)]}


def _by_pair(rows: list[dict[str, Any]], n_layers: int) -> dict[str, Any]:
    values = {(row["layer"], row["other_layer"]): row["value"] for row in rows}
    if not values:
        return {}
    first = min(1, *(layer for layer, _ in values))
    layers = range(first, n_layers + 1)
    return {"matrix_first_layer": first, "matrix": [[values.get((a, b)) for b in layers] for a in layers]}


def evaluate(
    model: Annotated[str, typer.Argument(help="run folder, or local Hugging Face folder")],
    tasks: Annotated[list[str], typer.Option(help="NAME,NAME: tasks, groups or tags of lm-evaluation-harness")],
    include_path: Annotated[
        Path | None, typer.Option(help="folder of your own tasks (YAML), which may run Python code: only trusted ones")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="use only the first N documents per task")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="results folder; default the run's own")] = None,
    device: option.Device = "auto",
    against: Annotated[str | None, typer.Option(help="second model, compared question by question")] = None,
    without: Annotated[str | None, typer.Option(help="also without these layers: 5, or 5-8, or 1,2,5-8")] = None,
) -> None:
    """Score a model with lm-evaluation-harness, and store the scores for `query`. Stored scores are reused. With
    --without, also show the score lost per task."""
    from sparsedepth.exchange.evaluate import check_harness, layers_left, load_tasks
    from sparsedepth.probe.load import load_model
    from sparsedepth.store.records import refuse_pack
    from sparsedepth.train.runtime import find_device, measuring_device

    names = [name.strip() for name in ",".join(tasks).split(",") if name.strip()]
    if not names:
        raise ValueError(f"--tasks {','.join(tasks)!r} names no task of lm-evaluation-harness; name one")
    if out is not None:
        refuse_pack(out)
    check_harness()
    place = measuring_device(find_device(device))
    loaded, *other = [load_model(name, device=place, dtype="fp32") for name in (model, against) if name is not None]
    ranges = [] if without is None else [*dict.fromkeys(part.strip() for part in without.split(","))]
    for layers in ranges:
        layers_left(layers, loaded.probed.n_layers)
    loaded_tasks = load_tasks(names, include_path, limit)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    evaluations = _evaluate(loaded, loaded_tasks, ranges, out)
    if other:
        _print_differences(evaluations, _evaluate(other[0], loaded_tasks, [], out))
    if ranges:
        _print_losses(evaluations)


def _evaluate(
    loaded: "LoadedModel", tasks: "Sequence[HarnessTask]", ranges: list[str], out: Path | None
) -> "list[Evaluation]":
    """A model's evaluations, stored or new; each is printed as soon as it is there."""
    from sparsedepth.exchange.evaluate import evaluate as evaluate_task
    from sparsedepth.store.checksums import is_complete
    from sparsedepth.store.evals import eval_folder, read_evaluation, save_evaluation
    from sparsedepth.store.run_record import RUNS

    results = loaded.folder.resolve().parent.parent
    if out is None and loaded.config is not None and loaded.folder.resolve().parent.name == RUNS:
        out = results
    evaluations: list[Evaluation] = []
    for task in tasks:
        keys = task.keys(loaded, ranges)
        folders = {} if out is None else {key: eval_folder(out, key) for key in keys}
        stored = {key: folder for key, folder in folders.items() if is_complete(folder)}
        for folder in stored.values():
            evaluations.append(read_evaluation(folder))
            _print_evaluation(evaluations[-1], "stored")
        for evaluation in evaluate_task(loaded, results / "data", task, keys, stored):
            evaluations.append(evaluation)
            _print_evaluation(evaluation, "" if out is None else f"written: {save_evaluation(out, evaluation)}")
    return evaluations


def _print_differences(evaluations: "list[Evaluation]", others: "list[Evaluation]") -> None:
    from sparsedepth.store.evals import paired_differences

    whole = {evaluation.task: evaluation for evaluation in evaluations if evaluation.without is None}
    rows = [(other.task, *row) for other in others for row in paired_differences(whole[other.task], other)]
    if not rows:
        return print("\nno right or wrong answers are stored; of old scores delete evals/ to evaluate again")
    print("\nthe second model minus the first, paired by question:")
    print(table(QueryResult(("task", "metric", "filter", "difference", "lo", "hi", "questions"), tuple(rows))))


def _print_losses(evaluations: "list[Evaluation]") -> None:
    from sparsedepth.exchange.evaluate import LOST

    values = {
        (evaluation.task_hash, evaluation.without, result.metric, result.filter): result.value
        for evaluation in evaluations
        for result in evaluation.results
    }
    rows = []
    for evaluation in evaluations:
        for drop in evaluation.results:
            if evaluation.without is None or not drop.metric.endswith(LOST):
                continue
            metric, without = drop.metric.removesuffix(LOST), evaluation.without
            before, after = (values[evaluation.task_hash, layers, metric, drop.filter] for layers in (None, without))
            rows.append((evaluation.task, _name(metric, drop), without, before, after, drop.value, drop.lo, drop.hi))
    if rows:
        columns = ("task", "metric", "without", "full", "reduced", "lost", "lo", "hi")
        print(f"\n{table(QueryResult(columns, tuple(rows)))}")


def _name(metric: str, result: "Result") -> str:
    return metric if result.filter == "none" else f"{metric}, {result.filter}"


def _print_evaluation(evaluation: "Evaluation", note: str) -> None:
    task = f"{evaluation.task} (version {evaluation.task_version})"
    without = "" if evaluation.without is None else f" without layers {evaluation.without}"
    print(f"{task}{without}: {evaluation.n} documents  {note}".rstrip())
    for result in evaluation.results:
        value = "-" if result.value is None else f"{result.value:.4g}"
        error = "" if result.stderr is None else f" +- {result.stderr:.2g}"
        error += "" if result.lo is None or result.hi is None else f"  [{result.lo:.4g}, {result.hi:.4g}]"
        print(f"  {_name(result.metric, result):26} {value}{error}")
    if evaluation.n_truncated:
        print(f"  {evaluation.n_truncated} requests exceeded {evaluation.max_len} tokens; their start was cut off")
