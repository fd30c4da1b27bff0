"""lm-evaluation-harness on a run or a Hugging Face folder: tasks by name, one evaluation each, kept in the store.

Tasks are those of the harness, and of a folder that the user names. A task of that folder is a YAML file, and may name
Python functions beside it (`!function`), which run: name only a folder that is trusted. Nothing of the *model's* folder
is ever run. A group of tasks is evaluated task by task. Seeds of few-shot examples are the harness's own.

Beside the harness's metrics, tasks with a right answer get

    answer_bits_per_byte = -sum log2 p(right answer | question) / sum bytes(right answer)

over all documents, which moves long before accuracy does, and compares across tokenizers.
"""

import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sparsedepth.config.load import build
from sparsedepth.files import digest
from sparsedepth.probe.load import Loaded, weights_hash
from sparsedepth.store.evals import Evaluation, EvaluationKey

ANSWER_BITS = "answer_bits_per_byte"
FEWSHOT_SEED = 1234
"""The harness's default, as are those below."""
N_BOOTSTRAP = 100_000


def check_harness() -> None:
    """Raises ValueError, with the command that fixes it, without lm-evaluation-harness."""
    if find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed; pip install 'sparsedepth[eval]'")


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    name: str
    loaded: Any
    """the harness's own object"""


def load_tasks(names: Sequence[str], include_path: Path | None = None) -> list[Task]:
    """The tasks behind the names of tasks, groups and tags. Raises ValueError for a name that is not known, and where a
    task's documents cannot be had."""
    check_harness()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a line for each default that a task leaves as it is
    from datasets import disable_progress_bars
    from lm_eval.tasks import TaskManager

    disable_progress_bars()
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"{str(include_path)!r} is no folder; name the one that holds the tasks' YAML files")
    random.seed(0)
    np.random.seed(FEWSHOT_SEED)
    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    if not set(names) <= set(manager.all_tasks):  # reading all of the harness's thousands takes seconds
        manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:  # the harness would also take a path here
            raise ValueError(f"task {name!r} is not known to lm-eval {version('lm-eval')}; {_near(name, manager)}")
    try:
        tasks = manager.load(list(names))["tasks"]
    except Exception as error:  # data sets, YAML and functions of tasks each raise their own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{', '.join(names)} cannot be loaded ({type(error).__name__}: {reason})") from None
    for task in tasks.values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return [Task(name=name, loaded=task) for name, task in tasks.items()]


def _near(name: str, manager: Any) -> str:
    import difflib

    near = difflib.get_close_matches(name, manager.all_tasks, n=1)
    return f"did you mean {near[0]!r}?" if near else "name one of its tasks, or give --include-path"


def task_key(model: Loaded, task: Task, limit: int | None) -> EvaluationKey:
    """What decides the scores of a task on a model."""
    documents = list(task.loaded.eval_docs)[:limit]
    definition = json.dumps([task.loaded.dump_config(), documents], sort_keys=True, default=str)
    return model_key(
        model,
        task=task.name,
        task_version=str(task.loaded.VERSION),
        task_hash=digest(definition),
        n_fewshot=task.loaded.get_config("num_fewshot"),
        harness=f"lm-eval {version('lm-eval')}",
    )


def model_key(model: Loaded, **task: Any) -> EvaluationKey:
    """What decides the scores: of the model, and of the task as it is given."""
    max_len = model.facts.max_len if model.config is None else model.config.seq_len
    run_id = None if model.config is None else model.config.run_id
    return EvaluationKey(run_id=run_id, weights_hash=weights_hash(model.folder), max_len=max_len or 0, **task)


def evaluate(
    model: Loaded,
    data: Path,
    tasks: Iterable[tuple[EvaluationKey, Task]],
    limit: int | None,
    done: Callable[[Evaluation], None],
) -> None:
    """Run each task, on its first `limit` documents, and hand over its evaluation as soon as it is there; `data` is the
    data folder of a run's results."""
    from sparsedepth.exchange.harness import DecoderLM, harness_model

    lm = harness_model(model, data)
    for key, task in tasks:
        started, clock = datetime.now(UTC), time.perf_counter()
        before = lm.n_truncated if isinstance(lm, DecoderLM) else 0
        with model.stack.exact():
            answer = _run(lm, task, limit)
        facts = {
            **key.model_dump(mode="json"),
            "model": model.source,
            "n": answer["n-samples"][task.name]["effective"],
            "n_documents": answer["n-samples"][task.name]["original"],
            "n_truncated": lm.n_truncated - before if isinstance(lm, DecoderLM) else None,
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - clock, 3),
            "results": [*_results(answer, task.name), *_answer_bits(task, answer["samples"][task.name])],
        }
        done(build(Evaluation, facts, task.name))


def _run(lm: Any, task: Task, limit: int | None) -> dict[str, Any]:
    from lm_eval import evaluator

    loaded = {"tasks": {task.name: task.loaded}, "groups": {}, "group_map": {}}
    return evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=N_BOOTSTRAP, log_samples=True)


def _results(answer: dict[str, Any], task: str) -> list[dict[str, Any]]:
    """The harness's 'metric,filter' and 'metric_stderr,filter' entries."""
    scores = answer["results"][task]
    rows = []
    for key, value in scores.items():
        metric, comma, filter = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            better = answer["higher_is_better"][task].get(metric)
            stderr = _number(scores.get(f"{metric}_stderr,{filter}"))
            rows.append(_row(metric, filter, _number(value), stderr, better))
    return rows


def _row(metric: str, filter: str, value: float | None, stderr: float | None, better: bool | None) -> dict[str, Any]:
    return {"metric": metric, "filter": filter, "value": value, "stderr": stderr, "higher_is_better": better}


def _number(value: Any) -> float | None:
    """A finite number; None for NaN, Inf, and for the harness's 'N/A'."""
    is_number = isinstance(value, int | float | np.number)
    return float(value) if is_number and math.isfinite(value) else None


def _answer_bits(task: Task, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row where every document has one right answer whose likelihood was asked for, else none."""
    answers: list[tuple[float, int]] = []
    for sample in samples:
        right = {"multiple_choice": sample["target"], "loglikelihood": 0}.get(task.loaded.get_config("output_type"))
        if not isinstance(right, int) or not 0 <= right < len(sample["arguments"]):
            return []
        if sample["filter"] == samples[0]["filter"]:
            bits = -sample["resps"][right][0][0] / math.log(2)
            answers.append((bits, len(sample["arguments"][right][1].encode())))
    return answer_bits(answers)


def answer_bits(answers: list[tuple[float, int]]) -> list[dict[str, Any]]:
    """The row of bits and bytes of right answers; none without any.

    The standard error is that of a ratio b / m of sums over n documents: sqrt(n / (n - 1) sum (b_i - r m_i)^2) / sum m.
    """
    if not answers:
        return []
    bits_N, bytes_N = np.array(answers).T
    ratio, n = bits_N.sum() / bytes_N.sum(), len(answers)
    stderr = np.sqrt(n / (n - 1) * np.square(bits_N - ratio * bytes_N).sum()) / bytes_N.sum() if n > 1 else None
    return [_row(ANSWER_BITS, "none", _number(ratio), _number(stderr), False)]
