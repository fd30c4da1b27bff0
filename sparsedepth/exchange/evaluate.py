"""lm-evaluation-harness on a run or a Hugging Face folder: tasks by name, one evaluation each, kept in the store.

Tasks are those of the harness, and of a folder that the user names. A task of that folder is a YAML file, and may name
Python functions beside it (`!function`), which run: name only a folder that is trusted. Nothing of the *model's* folder
is ever run. A group of tasks is evaluated task by task. Seeds of few-shot examples are the harness's own.

Beside the harness's metrics, tasks with a right answer get

    answer_bits_per_byte = -sum log2 p(right answer | question) / sum bytes(right answer)

over all documents, which moves long before accuracy does, and compares across tokenizers.

Without some layers a model is asked the same documents, and each metric that is right or wrong of a document gets

    metric_lost = metric with all layers - metric without them

with a 95% interval that pairs the documents (`store.small_sample.paired_share_interval`).
"""

import difflib
import json
import logging
import math
import random
import re
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparsedepth.config.load import build
from sparsedepth.files import digest
from sparsedepth.probe.hf_adapter import ProbedHfModel
from sparsedepth.probe.load import LoadedModel
from sparsedepth.store.evals import Evaluation, EvaluationKey
from sparsedepth.store.small_sample import paired_share_interval

ANSWER_BITS = "answer_bits_per_byte"
LOST = "_lost"
"""Ends the name of what a metric loses without layers."""
FEWSHOT_SEED = 1234
"""The harness's default, as are those below."""
N_BOOTSTRAP = 100_000


def check_harness() -> None:
    """Raises ValueError, with the command that fixes it, without lm-evaluation-harness."""
    if find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed; pip install 'sparsedepth[eval]'")


Hits = Mapping[tuple[str, str], Mapping[int, bool]]
"""By metric and filter: of each document, whether it was answered rightly."""


@dataclass(frozen=True, kw_only=True)
class EvaluationScores:
    """What a task says of a model."""

    rows: list[dict[str, Any]]
    """of an evaluation's `results`"""
    hits: Hits
    """of the metrics that are right or wrong"""
    n: int
    n_documents: int
    n_truncated: int | None


class Asked(Protocol):
    """What a model is evaluated on: tasks of lm-evaluation-harness, or a file of questions."""

    def key(self, model: LoadedModel) -> EvaluationKey:
        """The identity of an evaluation: all that its scores on the whole model depend on."""
        ...

    def score(self, model: LoadedModel, data: Path, layers: list[int] | None) -> EvaluationScores:
        """Evaluate the model, or its `layers` alone where they are given; `data` is the data folder of its results."""
        ...


def keys_of(asked: Asked, model: LoadedModel, without: Sequence[str]) -> list[EvaluationKey]:
    """Of the whole model, then of the model without each range of layers."""
    whole = asked.key(model)
    return [whole, *(whole.model_copy(update={"without": layers}) for layers in without)]


def evaluate(
    model: LoadedModel, data: Path, asked: Asked, keys: Sequence[EvaluationKey], kept: Container[EvaluationKey] = ()
) -> Iterator[Evaluation]:
    """The evaluations of `keys_of` that are not `kept`.

    A drop is of pairs of answers, so the whole model is asked again where its evaluation alone is kept.
    """
    wanted = [key for key in keys if key not in kept]
    whole: EvaluationScores | None = None
    for key in [keys[0], *(key for key in wanted if key.without is not None)] if wanted else []:
        started, clock = datetime.now(UTC), time.perf_counter()
        layers = None if key.without is None else layers_left(key.without, model.probed.n_layers)
        with model.probed.exact():
            scored = asked.score(model, data, layers)
        whole = whole or scored
        if key in wanted:
            facts = {
                **key.model_dump(mode="json"),
                "model": model.source,
                "n": scored.n,
                "n_documents": scored.n_documents,
                "n_truncated": scored.n_truncated,
                "started": started.isoformat(timespec="seconds"),
                "seconds": round(time.perf_counter() - clock, 3),
                "results": [*scored.rows, *([] if key.without is None else lost(whole.hits, scored.hits))],
            }
            yield build(Evaluation, facts, key.task)


def layers_left(without: str, n_layers: int) -> list[int]:
    """The layers of a model without '5', or without '5-8'. Raises ValueError for what is no range of its layers."""
    if ends := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", without):
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if 1 <= first <= last <= n_layers:
            return [layer for layer in range(1, n_layers + 1) if not first <= layer <= last]
    raise ValueError(f"--without {without!r} is no layer or range of the {n_layers} layers; write 5, or 5-8, from 1")


def lost(whole: Hits, left: Hits) -> list[dict[str, Any]]:
    """Rows of what each metric loses, over the documents that both were asked."""
    rows = []
    for (metric, filter), hits in left.items():
        pairs = [(whole[metric, filter][document], hit) for document, hit in hits.items()]
        n_lost, n_gained, n = pairs.count((True, False)), pairs.count((False, True)), len(pairs)
        lo, hi = paired_share_interval(n_lost, n_gained, n)
        rows.append(row(metric + LOST, filter, (n_lost - n_gained) / n, None, False) | {"lo": lo, "hi": hi})
    return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class HarnessTask:
    name: str
    loaded: Any
    """the harness's own object"""
    limit: int | None = None
    """documents, from the first; None = all"""

    def key(self, model: LoadedModel) -> EvaluationKey:
        documents = list(self.loaded.eval_docs)[: self.limit]
        definition = json.dumps([self.loaded.dump_config(), documents], sort_keys=True, default=str)
        return model_key(
            model,
            task=self.name,
            task_version=str(self.loaded.VERSION),
            task_hash=digest(definition),
            n_fewshot=self.loaded.get_config("num_fewshot"),
            harness=f"lm-eval {version('lm-eval')}",
        )

    def score(self, model: LoadedModel, data: Path, layers: list[int] | None) -> EvaluationScores:
        from lm_eval import evaluator

        from sparsedepth.exchange.harness import DecoderLM, harness_model

        lm = harness_model(model, data, layers)
        out = [] if layers is None else [*({*range(1, model.probed.n_layers + 1)} - {*layers})]
        with model.probed.without_layers(out) if isinstance(model.probed, ProbedHfModel) and out else nullcontext():
            loaded = {"tasks": {self.name: self.loaded}, "groups": {}, "group_map": {}}
            answer = evaluator.evaluate(lm, loaded, limit=self.limit, bootstrap_iters=N_BOOTSTRAP, log_samples=True)
        samples = answer["samples"][self.name]
        return EvaluationScores(
            rows=[*_results(answer, self.name), *_answer_bits(self, samples)],
            hits=_hits(samples),
            n=answer["n-samples"][self.name]["effective"],
            n_documents=answer["n-samples"][self.name]["original"],
            n_truncated=lm.n_truncated if isinstance(lm, DecoderLM) else None,
        )


def load_tasks(names: Sequence[str], include_path: Path | None = None, limit: int | None = None) -> list[HarnessTask]:
    """The tasks behind the names of tasks, groups and tags, its first `limit` documents each. Raises ValueError for a
    name that is not known, and where a task's documents cannot be had."""
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
    return [HarnessTask(name=name, loaded=task, limit=limit) for name, task in tasks.items()]


def _near(name: str, manager: Any) -> str:
    near = difflib.get_close_matches(name, manager.all_tasks, n=1)
    return f"did you mean {near[0]!r}?" if near else "name one of its tasks, or give --include-path"


def model_key(model: LoadedModel, **task: Any) -> EvaluationKey:
    """The identity of an evaluation, from the model and the fields of its task."""
    run_id = None if model.config is None else model.config.run_id
    return EvaluationKey(run_id=run_id, weights_hash=model.weights_hash, max_len=context_of(model) or 0, **task)


def context_of(model: LoadedModel) -> int | None:
    """Tokens that it reads at most; None where its config does not say."""
    return model.facts.max_len if model.config is None else model.config.seq_len


def _hits(samples: list[dict[str, Any]]) -> Hits:
    """Of every metric that is 0 or 1 of each document."""
    values: dict[tuple[str, str], dict[int, float | None]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            values.setdefault((metric, sample["filter"]), {})[sample["doc_id"]] = _number(sample[metric])
    return {
        name: {document: value == 1 for document, value in of_documents.items()}
        for name, of_documents in values.items()
        if {*of_documents.values()} <= {0.0, 1.0}
    }


def _results(answer: dict[str, Any], task: str) -> list[dict[str, Any]]:
    """The harness's 'metric,filter' and 'metric_stderr,filter' entries."""
    scores = answer["results"][task]
    rows = []
    for key, value in scores.items():
        metric, comma, filter = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            better = answer["higher_is_better"][task].get(metric)
            stderr = _number(scores.get(f"{metric}_stderr,{filter}"))
            rows.append(row(metric, filter, _number(value), stderr, better))
    return rows


def row(metric: str, filter: str, value: float | None, stderr: float | None, better: bool | None) -> dict[str, Any]:
    """Of an evaluation's `results`."""
    return {"metric": metric, "filter": filter, "value": value, "stderr": stderr, "higher_is_better": better}


def _number(value: Any) -> float | None:
    """A finite number; None for NaN, Inf, and for the harness's 'N/A'."""
    is_number = isinstance(value, int | float | np.number)
    return float(value) if is_number and math.isfinite(value) else None


def _answer_bits(task: HarnessTask, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
    return [row(ANSWER_BITS, "none", _number(ratio), _number(stderr), False)]
