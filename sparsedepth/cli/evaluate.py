"""`sparsedepth evaluate`: a model's scores on tasks of lm-evaluation-harness."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from sparsedepth.cli import option
from sparsedepth.cli.option import Device, Folder, ModelName, NameList
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.measure import evaluation_text, metric_name
from sparsedepth.words.table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsedepth.exchange.evaluate import HarnessTask
    from sparsedepth.probe.load import LoadedModel
    from sparsedepth.store.evals import Evaluation


class Evaluated(NamedTuple):
    own: "list[Evaluation]"
    """Of the model: of each task whole, then without layers."""
    against: "list[Evaluation]"
    """Of the second model."""


Tell = Callable[["Evaluation", str], None]
"""Gets each evaluation as soon as it is there, and where it is stored."""


@dataclass(frozen=True)
class EvaluateCommand:
    """A model's scores on tasks of lm-evaluation-harness, which are stored for `query`; stored ones are reused.

    Raises ValueError for an unknown task, and a model that cannot be read."""

    model: Annotated[ModelName, Argument(help="run folder, or local Hugging Face folder")]
    _: KW_ONLY
    tasks: Annotated[NameList, Option(help="NAME,NAME: tasks, groups or tags of lm-evaluation-harness")]
    include_path: Annotated[
        Folder | None,
        Option(help="folder of your own tasks (YAML), which may run Python code: only trusted ones"),
    ] = None
    limit: Annotated[int | None, Option(min=1, help="use only the first N documents per task")] = None
    out: Annotated[Folder | None, Option("-o", "--out", help="results folder; default the run's own")] = None
    device: Device = "auto"
    against: Annotated[ModelName | None, Option(help="second model, compared question by question")] = None
    without: Annotated[str | None, Option(help="also without layers: 5, or 5-8, or 1,2,5-8, or all")] = None

    def compute(self, tell: Tell = lambda evaluation, note: None) -> Evaluated:
        from sparsedepth.exchange.evaluate import check_harness, layers_left, load_tasks
        from sparsedepth.probe.load import load_model
        from sparsedepth.store.packs import refuse_pack
        from sparsedepth.train.runtime import find_device, measuring_device

        tasks = self.tasks if isinstance(self.tasks, str) else ",".join(self.tasks)
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        if not names:
            raise ValueError(f"--tasks {tasks!r} names no task of lm-evaluation-harness; name one")
        out = option.path_of_file(self.out)
        if out is not None:
            refuse_pack(out)
        check_harness()
        place = measuring_device(find_device(self.device))
        models = [str(name) for name in (self.model, self.against) if name is not None]
        loaded, *other = [load_model(name, device=place, dtype="fp32") for name in models]
        n_layers = loaded.probed.n_layers
        ranges = [] if self.without is None else [*dict.fromkeys(map(str.strip, self.without.split(",")))]
        ranges = [*map(str, range(1, n_layers + 1))] if ranges == ["all"] else ranges
        for layers in ranges:
            layers_left(layers, n_layers)
        loaded_tasks = load_tasks(names, None if self.include_path is None else Path(self.include_path), self.limit)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        own = _evaluate(loaded, loaded_tasks, ranges, out, tell)
        return Evaluated(own, _evaluate(other[0], loaded_tasks, [], out, tell) if other else [])


@option.command
def evaluate(given: EvaluateCommand) -> None:
    """Score a model with lm-evaluation-harness, and store the scores for `query`. Stored scores are reused. With
    --without, also show the score lost per task."""
    found = given.compute(lambda evaluation, note: print(evaluation_text(evaluation, note)))
    if given.against is not None:
        _print_differences(found.own, found.against)
    if given.without is not None:
        _print_losses(found.own)


def _evaluate(
    loaded: "LoadedModel", tasks: "Sequence[HarnessTask]", ranges: list[str], out: Path | None, tell: Tell
) -> "list[Evaluation]":
    """A model's evaluations, stored or new; each is told as soon as it is there."""
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
            tell(evaluations[-1], "stored")
        for evaluation in evaluate_task(loaded, results / "data", task, keys, stored):
            evaluations.append(evaluation)
            note = "" if out is None else f"written: {save_evaluation(out, evaluation)}"
            tell(evaluation, note)
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
    """What each task loses without layers, beside its score with and without them."""
    from sparsedepth.exchange.evaluate import LOST

    found = [(evaluation, result) for evaluation in evaluations for result in evaluation.results]
    values = {(of.task_hash, of.without, result.metric, result.filter): result.value for of, result in found}
    rows = []
    for of, drop in found:
        if of.without is not None and drop.metric.endswith(LOST):
            metric = drop.metric.removesuffix(LOST)
            both = [values[of.task_hash, layers, metric, drop.filter] for layers in (None, of.without)]
            rows.append((of.task, metric_name(drop, metric), of.without, *both, drop.value, drop.lo, drop.hi))
    if rows:
        columns = ("task", "metric", "without", "full", "reduced", "lost", "lo", "hi")
        print(f"\n{table(QueryResult(columns, tuple(rows)))}")
