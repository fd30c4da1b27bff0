"""lm-evaluation-harness on a run or a Hugging Face folder, one evaluation per task, kept in the store.

Tasks are the harness's, or those of a folder that the user names: a YAML file each, which may name Python functions
beside it (`!function`), which are executed: name only trusted folders. Nothing in the *model's* folder ever is.

In addition to the harness's metrics, tasks with a right answer get, over all documents,

    answer_bits_per_byte = -sum log2 p(right answer | question) / sum bytes(right answer)

which improves long before accuracy does, and is comparable across tokenizers. A metric that is 0 or 1 per document gets
Wilson's 95% interval over documents; and, of a model without some layers, METRIC_lost: the whole model's minus its own,
on the same documents, with an interval paired by document (`store.small_sample`)."""

import json
import logging
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsedepth.config.load import build
from sparsedepth.files import digest, sha256
from sparsedepth.probe.hf_adapter import ProbedHfModel
from sparsedepth.probe.load import LoadedModel
from sparsedepth.quantities.quantity import Named
from sparsedepth.store.evals import Evaluation, EvaluationKey
from sparsedepth.store.small_sample import paired_share_interval, share_interval
from sparsedepth.words.plain_text import did_you_mean, one_line

if TYPE_CHECKING:
    from lm_eval.api.model import LM

LOST = "_lost"
"""Name suffix of a metric's decrease without layers."""
FEWSHOT_SEED = 1234
"""The harness's default, as are those below."""
N_BOOTSTRAP = 100_000


def check_harness() -> None:
    """Raises ValueError, with the fix, without lm-evaluation-harness."""
    if find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed; pip install '.[eval]'")


Hits = Mapping[tuple[str, str], Mapping[int, bool]]
"""By metric and filter: whether each document was answered correctly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HarnessTask:
    name: str
    loaded: Any
    """the harness's own object"""
    limit: int | None = None
    """documents, from the first; None = all"""

    def keys(self, model: LoadedModel, without: Sequence[str] = ()) -> list[EvaluationKey]:
        """Everything that the whole model's scores depend on, then the same without each range of layers."""
        content = [self.loaded.dump_config(), list(self.loaded.eval_docs)[: self.limit]]
        # Without the addresses of functions, which are others in each process.
        definition = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(content, sort_keys=True, default=str))
        run = model.config
        settings = sorted(model.folder.glob("*.json")) if run is None else []
        whole = EvaluationKey(
            run_id=None if run is None else run.run_id,
            weights_hash=digest([model.weights_hash, *map(sha256, settings)]) if settings else model.weights_hash,
            max_len=(model.facts.max_len if run is None else run.seq_len) or 0,
            task=self.name,
            task_version=str(self.loaded.VERSION),
            task_hash=digest(definition),
            n_fewshot=self.loaded.get_config("num_fewshot"),
            harness=f"lm-eval {version('lm-eval')}",
        )
        return [whole, *(whole.model_copy(update={"without": layers}) for layers in without)]

    def score(self, model: LoadedModel, data: Path, layers: list[int] | None) -> tuple[Named, Hits]:
        """What an evaluation says about the scores of the model, or of only its `layers` if given; and its hits.
        `data` is the data folder of its results."""
        from sparsedepth.exchange.harness import harness_model

        self.loaded.set_fewshot_seed(seed=FEWSHOT_SEED)  # again: every model gets the same examples
        skipping = nullcontext()
        if layers is not None and isinstance(model.probed, ProbedHfModel):
            skipping = model.probed.without_layers({*range(1, model.probed.n_layers + 1)} - {*layers})
        with skipping:
            output = self._output(lambda: harness_model(model, data, layers))
        samples = output["samples"][self.name]
        n = output["n-samples"][self.name]
        hits = _hits(samples)
        return {
            "n": n["effective"],
            "n_documents": n["original"],
            "n_truncated": output["n_truncated"],
            "results": [*_results(output, self.name, hits), *_answer_bits(self, samples)],
            "answers": [
                {"metric": metric, "filter": filter, "correct": "".join("01"[by_id[id]] for id in sorted(by_id))}
                for (metric, filter), by_id in hits.items()
            ],
        }, hits

    def _output(self, new_model: Callable[[], "LM"]) -> dict[str, Any]:
        """What the harness says; a metric that it cannot compute is left out, with a warning. Raises ValueError where
        others fail, too."""
        from lm_eval import evaluator

        def output() -> dict[str, Any]:
            loaded = {"tasks": {self.name: self.loaded}, "groups": {}, "group_map": {}}
            lm = new_model()
            found = evaluator.evaluate(lm, loaded, limit=self.limit, bootstrap_iters=N_BOOTSTRAP, log_samples=True)
            return {**found, "n_truncated": getattr(lm, "n_truncated", None)}

        try:
            return output()
        except (OSError, MemoryError):
            raise
        except Exception as error:  # metrics, filters and functions of tasks each raise their own
            told = f"task {self.name!r}: lm-eval {version('lm-eval')} cannot score"
            reason = f"({type(error).__name__}: {one_line(error)})"
            metrics = getattr(self.loaded, "_metric_fn_list", {})
            for name in metrics if len(metrics) > 1 else ():
                self.loaded._metric_fn_list = {other: metrics[other] for other in metrics if other != name}
                with suppress(Exception):
                    found = output()
                    warnings.warn(f"{told} {name} {reason}: it is left out", stacklevel=2)
                    return found
            raise ValueError(
                f"{told} it {reason}; its metrics are {', '.join(metrics)}: leave out in its YAML what does not fit"
            ) from error


def evaluate(
    model: LoadedModel,
    data: Path,
    task: HarnessTask,
    keys: Sequence[EvaluationKey],
    stored: Container[EvaluationKey] = (),
) -> Iterator[Evaluation]:
    """The evaluations of the task's `keys` that are not `stored`. Losses are paired by document, so the whole model is
    evaluated again even if its evaluation is stored."""
    missing = [key for key in keys if key not in stored]
    whole: Hits | None = None
    for key in [keys[0], *(key for key in missing if key.without is not None)] if missing else []:
        started = datetime.now(UTC)
        clock = time.perf_counter()
        layers = None if key.without is None else layers_left(key.without, model.probed.n_layers)
        with model.probed.exact():
            facts, hits = task.score(model, data, layers)
        whole = hits if whole is None else whole
        if key.without is not None:
            facts["results"] += metric_losses(whole, hits)
        if key in missing:
            yield build(
                Evaluation,
                {
                    **key.model_dump(mode="json"),
                    "model": model.source,
                    **facts,
                    "started": started.isoformat(timespec="seconds"),
                    "seconds": round(time.perf_counter() - clock, 3),
                },
                key.task,
            )


def layers_left(without: str, n_layers: int) -> list[int]:
    """The layers of a model without '5', or without '5-8'. Raises ValueError for other texts or layers."""
    if ends := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", without):
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if 1 <= first <= last <= n_layers:
            return [layer for layer in range(1, n_layers + 1) if not first <= layer <= last]
    raise ValueError(f"--without {without!r} is no range of the {n_layers} layers; write 5, or 5-8, from 1, or all")


def metric_losses(whole: Hits, without: Hits) -> list[Named]:
    """Rows of each metric's decrease, over the documents that both evaluated."""
    rows = []
    for (metric, filter), hits in without.items():
        hits_of_whole = whole.get((metric, filter), {})  # none if the metric is a share there, as F1 can be
        pairs = [(hits_of_whole[document], hit) for document, hit in hits.items() if document in hits_of_whole]
        if not pairs:
            continue
        n_lost = pairs.count((True, False))
        n_gained = pairs.count((False, True))
        n = len(pairs)
        lo, hi = paired_share_interval(n_lost, n_gained, n)
        rows.append(row(metric + LOST, filter, (n_lost - n_gained) / n, None, False) | {"lo": lo, "hi": hi})
    return rows


def load_tasks(names: Sequence[str], include_path: Path | None, limit: int | None = None) -> list[HarnessTask]:
    """The tasks of these names, groups and tags, with their first `limit` documents each. Raises ValueError for an
    unknown name, and for a task that cannot be loaded."""
    check_harness()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it logs every default
    from datasets import disable_progress_bars
    from lm_eval.tasks import TaskManager

    disable_progress_bars()
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"{str(include_path)!r} is no folder; name the one that holds the tasks' YAML files")
    random.seed(0)
    np.random.seed(FEWSHOT_SEED)
    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    if not set(names) <= set(manager.all_tasks):  # reading the harness's thousands of tasks takes seconds
        manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:  # the harness would also take a path here
            hint = did_you_mean(name, manager.all_tasks, "name one of its tasks, or give --include-path")
            raise ValueError(f"task {name!r} is not known to lm-eval {version('lm-eval')}; {hint}")
    try:
        tasks = manager.load(list(names))["tasks"]
    except Exception as error:  # data sets, YAML and functions of tasks each raise their own
        raise ValueError(
            f"{', '.join(names)} cannot be loaded (lm-eval {version('lm-eval')}, {type(error).__name__}: "
            f"{one_line(error)})"
        ) from None
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return [HarnessTask(name=name, loaded=task, limit=limit) for name, task in tasks.items()]


def _hits(samples: list[Named]) -> Hits:
    """Hits by document of all metrics that are 0 or 1 per document."""
    values: dict[tuple[str, str], dict[int, float | None]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            values.setdefault((metric, sample["filter"]), {})[sample["doc_id"]] = _number(sample[metric])
    return {
        name: {document: value == 1 for document, value in by_document.items()}
        for name, by_document in values.items()
        if {*by_document.values()} <= {0.0, 1.0}
    }


def _results(answer: Named, task: str, hits: Hits) -> list[Named]:
    """The harness's 'metric,filter' and 'metric_stderr,filter' entries, with an interval for a share of hits."""
    scores = answer["results"][task]
    rows = []
    for key, value in scores.items():
        metric, comma, filter = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            better = answer["higher_is_better"][task].get(metric)
            stderr = _number(scores.get(f"{metric}_stderr,{filter}"))
            rows.append(row(metric, filter, _number(value), stderr, better))
            if (of_metric := hits.get((metric, filter))) and value == sum(of_metric.values()) / len(of_metric):
                lo, hi = share_interval(value, len(of_metric))
                rows[-1] |= {"lo": lo, "hi": hi}
    return rows


def row(metric: str, filter: str, value: float | None, stderr: float | None, better: bool | None) -> Named:
    return {"metric": metric, "filter": filter, "value": value, "stderr": stderr, "higher_is_better": better}


def _number(value: Any) -> float | None:
    """A finite number; None for NaN, Inf, and for the harness's 'N/A'."""
    return float(value) if isinstance(value, int | float | np.number) and math.isfinite(value) else None


def _answer_bits(task: HarnessTask, samples: list[Named]) -> list[Named]:
    """One row if every document has one right answer with a likelihood, else none. The standard error is that of a
    ratio b / m of sums over n documents: sqrt(n / (n - 1) sum (b_i - r m_i)^2) / sum m."""
    answers: list[tuple[float, int]] = []
    for sample in samples:
        right = {"multiple_choice": sample["target"], "loglikelihood": 0}.get(task.loaded.get_config("output_type"))
        if not isinstance(right, int) or not 0 <= right < len(sample["arguments"]):
            return []
        if sample["filter"] == samples[0]["filter"]:
            bits = -sample["resps"][right][0][0] / math.log(2)
            answers.append((bits, len(sample["arguments"][right][1].encode())))
    if not answers:
        return []
    bits_N, bytes_N = np.array(answers).T
    ratio = bits_N.sum() / bytes_N.sum()
    n = len(answers)
    stderr = np.sqrt(n / (n - 1) * np.square(bits_N - ratio * bytes_N).sum()) / bytes_N.sum() if n > 1 else None
    return [row("answer_bits_per_byte", "none", _number(ratio), _number(stderr), False)]
