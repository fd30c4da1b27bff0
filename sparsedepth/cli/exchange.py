"""`sparsedepth export` and `evaluate`: convert a run to a Hugging Face model, and score a model on downstream tasks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsedepth.cli import option
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.terminal import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsedepth.exchange.evaluate import HarnessTask
    from sparsedepth.probe.load import LoadedModel
    from sparsedepth.store.evals import Evaluation


def export(
    run: Annotated[Path, typer.Argument(help="folder of a complete run")],
    out: Annotated[Path, typer.Option("-o", "--out", help="new folder")],
) -> None:
    """Export a run as a Hugging Face model (Llama, Mixtral, ...), and check that its logits agree."""
    from sparsedepth.exchange.export import export as export_run

    exported = export_run(run, out)
    print(f"written: {exported.folder}, a {exported.family} model of transformers")
    print(f"logits differ by {', '.join(f'{value:.1e} on {name}' for name, value in exported.parity.items())}")
    for note in exported.notes:
        print(f"note: {note}")


def evaluate(
    model: Annotated[str, typer.Argument(help="run folder, or local Hugging Face folder")],
    tasks: Annotated[
        list[str],
        typer.Option(
            help="NAME,NAME: tasks, groups or tags of lm-evaluation-harness, or of --include-path; repeatable"
        ),
    ],
    include_path: Annotated[
        Path | None,
        typer.Option(help="folder of your own tasks, a YAML file each; it may run Python code: use only trusted ones"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="use only the first N documents per task")] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="results folder for the scores; default the run's own, else not stored"),
    ] = None,
    device: option.Device = "auto",
    against: Annotated[
        str | None, typer.Option(help="second model: also score it, and compare both question by question")
    ] = None,
    without: Annotated[
        str | None, typer.Option(help="also score the model without these layers: 5, or 5-8, or several: 1,2,5-8")
    ] = None,
) -> None:
    """Score a model with lm-evaluation-harness, and store the scores for `query`. Stored scores are reused. With
    --without, also show the score lost per task."""
    from sparsedepth.exchange.evaluate import check_harness, layers_left, load_tasks
    from sparsedepth.probe.load import load_model
    from sparsedepth.train.runtime import find_device, measuring_device

    names = [name.strip() for name in ",".join(tasks).split(",") if name.strip()]
    check_harness()
    place = measuring_device(find_device(device))
    loaded, *other = [load_model(name, device=place, dtype="fp32") for name in (model, against) if name is not None]
    ranges = [] if without is None else [*dict.fromkeys(part.strip() for part in without.split(","))]
    for layers in ranges:
        layers_left(layers, loaded.probed.n_layers)
    loaded_tasks = load_tasks(names, include_path, limit)
    evaluations = _evaluate(loaded, loaded_tasks, ranges, out)
    if other:
        _print_differences(evaluations, _evaluate(other[0], loaded_tasks, [], out))
    if ranges:
        _print_losses(evaluations)


def _evaluate(
    loaded: "LoadedModel", tasks: "Sequence[HarnessTask]", ranges: list[str], out: Path | None
) -> "list[Evaluation]":
    """A model's evaluations, stored or new."""
    from sparsedepth.exchange.evaluate import evaluate as evaluate_task
    from sparsedepth.exchange.evaluate import keys_of
    from sparsedepth.store.evals import eval_folder, is_evaluated, read_evaluation, save_evaluation

    results = loaded.folder.resolve().parent.parent
    if out is None and loaded.config is not None:
        out = results
    evaluations: list[Evaluation] = []
    for task in tasks:
        keys = keys_of(task, loaded, ranges)
        stored = [key for key in keys if out is not None and is_evaluated(out, key)]
        for key in stored:
            assert out is not None
            evaluations.append(read_evaluation(eval_folder(out, key)))
            _print_evaluation(evaluations[-1], "stored")
        for evaluation in evaluate_task(loaded, results / "data", task, keys, stored):
            evaluations.append(evaluation)
            _print_evaluation(evaluation, "" if out is None else f"written: {save_evaluation(out, evaluation)}")
    return evaluations


def _print_differences(evaluations: "list[Evaluation]", others: "list[Evaluation]") -> None:
    from sparsedepth.store.evals import paired_differences

    whole = {evaluation.task: evaluation for evaluation in evaluations if evaluation.without is None}
    rows = [(other.task, *row) for other in others for row in paired_differences(whole[other.task], other)]
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
    for evaluation in (evaluation for evaluation in evaluations if evaluation.without is not None):
        for drop in (result for result in evaluation.results if result.metric.endswith(LOST)):
            metric, task = drop.metric.removesuffix(LOST), evaluation.task_hash
            before, after = (values[task, layers, metric, drop.filter] for layers in (None, evaluation.without))
            name = metric if drop.filter == "none" else f"{metric}, {drop.filter}"
            rows.append((evaluation.task, name, evaluation.without, before, after, drop.value, drop.lo, drop.hi))
    if rows:
        print()
        columns = ("task", "metric", "without", "full", "reduced", "lost", "lo", "hi")
        print(table(QueryResult(columns, tuple(rows))))


def _print_evaluation(evaluation: "Evaluation", note: str) -> None:
    task = f"{evaluation.task} (version {evaluation.task_version})"
    without = "" if evaluation.without is None else f" without layers {evaluation.without}"
    print(f"{task}{without}: {evaluation.n} documents  {note}".rstrip())
    for result in evaluation.results:
        value = "-" if result.value is None else f"{result.value:.4g}"
        error = "" if result.stderr is None else f" +- {result.stderr:.2g}"
        error += "" if result.lo is None or result.hi is None else f"  [{result.lo:.4g}, {result.hi:.4g}]"
        name = result.metric if result.filter == "none" else f"{result.metric}, {result.filter}"
        print(f"  {name:26} {value}{error}")
    if evaluation.n_truncated:
        print(f"  {evaluation.n_truncated} requests exceeded {evaluation.max_len} tokens; their start was cut off")
