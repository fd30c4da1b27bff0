"""Scores of lm-evaluation-harness in a results folder: the view `evals`.

    RESULTS/evals/<eval_id>/   evaluation.json  complete

A folder is one task on one model. `eval_id` hashes everything that affects the scores: a changed task, document, model
or harness makes a new one. Like a run's, the folder is written atomically, has checksums, and never changes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import pyarrow as pa
from pydantic import Field

from sparsedepth import quantities
from sparsedepth.config.load import build
from sparsedepth.config.section import Section
from sparsedepth.files import MARKER, WrittenMeanwhile, atomic_folder, digest, parse_json, write_json
from sparsedepth.quantities.quantity import Column, Named
from sparsedepth.store.checksums import DamagedRun, Files, OtherVersion, collecting, files_in, write_marker
from sparsedepth.store.packs import find_groups
from sparsedepth.store.parquet import arrow_schema, rows_table
from sparsedepth.store.run_record import EVALS as FOLDER
from sparsedepth.store.schema import column_type
from sparsedepth.store.small_sample import paired_share_interval

FILE = "evaluation.json"

Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
_OURS = "answer_bits_per_byte is ours: -log2 p(right answer | question) per UTF-8 byte of the answers of all documents"


class EvaluationKey(Section):
    """Everything that affects the scores."""

    run_id: str | None
    """the run, as in runs; NULL for a model that was trained elsewhere"""
    weights_hash: str
    """digest of the weights; of a Hugging Face folder its settings, too"""
    task: str
    """name of the task in the harness, or of the file of questions"""
    task_version: str
    """the task's own version"""
    task_hash: str
    """digest of the task's definition and of the documents scored"""
    n_fewshot: Count
    """worked examples before each question"""
    max_len: Count
    """tokens that the model reads at most; longer texts lose their start"""
    harness: str
    """lm-eval, or sparsedepth for a file of questions, and its version"""
    without: str | None = None
    """layers removed from the model, such as 5-8; NULL = none"""

    @property
    def eval_id(self) -> str:
        names = {name for name in EvaluationKey.model_fields if name != "without" or self.without is not None}
        return digest(self.model_dump(mode="json", include=names))


class Result(Section):
    metric: Annotated[str, Field(description=f"the harness's name; {_OURS}")]
    filter: str
    """how the harness extracted the answers; none = unchanged"""
    value: Finite | None
    """the score; NULL = not finite"""
    stderr: Finite | None
    """its standard error over documents; NULL = none"""
    lo: Finite | None = None
    """lower end of the 95% interval; NULL = none"""
    hi: Finite | None = None
    """upper end of the 95% interval; NULL = none"""
    higher_is_better: bool | None
    """which direction is better; NULL = the task has none"""


class Answers(Section):
    """Which questions were answered correctly, by a metric that is 0 or 1 for each."""

    metric: str
    filter: str
    correct: Annotated[str, Field(pattern="^[01]+$", description="1 or 0 for each document, in the order of the task")]


class Evaluation(EvaluationKey):
    """evaluation.json."""

    model: str
    """the model's name or path, as given"""
    n: Count
    """documents scored"""
    n_documents: Count
    """documents of the task; more than n if a limit was set"""
    n_truncated: Count | None
    """requests that lost their start; NULL = not counted"""
    started: str
    """when it started, ISO 8601"""
    seconds: Finite
    """wall-clock time [s]"""
    results: tuple[Result, ...]
    answers: tuple[Answers, ...] = ()


COLUMNS: tuple[Column, ...] = (
    Column(view="evals", name="eval_id", type="VARCHAR", meaning="the hash of all that decides the scores"),
    *(
        Column(view="evals", name=name, type=column_type(field.annotation), meaning=field.description or "")
        for section in (Evaluation, Result)
        for name, field in section.model_fields.items()
        if name not in ("results", "answers")
    ),
)
"""The columns of the view, in order: one row per evaluation, metric and filter."""
TASK_SCORES = f"""
CREATE TABLE task_scores AS PIVOT (
    FROM (
        SELECT run_id, eval_id, nullif(regexp_replace(task, '[^A-Z]', '', 'g'), '') AS capitals, value,
            '{quantities.TASK_SCORE}' || task || if(min(task) OVER alike = max(task) OVER alike, '',
                ' (capitals: ' || coalesce(capitals, 'none') || ')') AS score,
            row(n, -n_fewshot, task_hash, harness, max_len) AS way,
            row(count(*) OVER (PARTITION BY task, way), way) AS rank
        FROM evals WHERE run_id IS NOT NULL AND without IS NULL AND metric = 'acc' AND filter = 'none'
        WINDOW alike AS (PARTITION BY lower(task))
    ) SELECT run_id, score, value, eval_id QUALIFY rank = max(rank) OVER (PARTITION BY score)
) ON score USING arg_max(value, eval_id) GROUP BY run_id
"""
"""The column 'acc:TASK' of each task for `runs`, by run_id. Of a task that was scored in several ways (documents,
examples, harness), the one that most runs share, then that of the most documents. SQL takes names that differ in case
alone as one: such list their capitals, as 'acc:ARC (capitals: ARC)' and 'acc:arc (capitals: none)'."""


def eval_folder(results: Path, key: EvaluationKey) -> Path:
    return results / FOLDER / key.eval_id


def save_evaluation(results: Path, evaluation: Evaluation) -> Path:
    """Write the evaluation's folder atomically, and return it."""
    folder = eval_folder(results, evaluation)
    try:
        with atomic_folder(folder) as aside:
            write_json(aside / FILE, evaluation.model_dump(mode="json"))
            write_marker(aside, evaluation.eval_id, (FILE,))
    except WrittenMeanwhile:  # the same scores, at another time
        read_evaluation(folder)
    return folder


def read_evaluation(folder: Path) -> Evaluation:
    """The evaluation in a folder. Raises DamagedRun if its checksums differ."""
    return _parse(files_in(folder))


def _parse(files: Files) -> Evaluation:
    folder, marker = files.folder, files.marker
    if set(marker.files) != {FILE}:
        raise DamagedRun(folder, MARKER, f"does not list exactly {FILE}")
    content = files.read(FILE)
    try:
        evaluation = build(Evaluation, parse_json(content), FILE)
    except ValueError as error:
        raise OtherVersion(folder, FILE, f"says what this version does not know ({str(error)[:200]})") from None
    if evaluation.eval_id != marker.run_id:
        raise DamagedRun(folder, MARKER, f"is of evaluation {marker.run_id}, and {FILE} is {evaluation.eval_id}")
    return evaluation


def read_evals(roots: Iterable[Path], damaged: list[DamagedRun] | None) -> pa.Table:
    """The rows of the view, of all complete evaluations in results folders; copies count once. Raises DamagedRun, or
    adds it to the list if given."""
    evaluations: dict[str, Evaluation] = {}
    for files in (files for root in roots for files in find_groups(root, FOLDER, damaged)):
        with collecting(damaged):
            evaluation = _parse(files)
            evaluations.setdefault(evaluation.eval_id, evaluation)
    rows: list[Named] = []
    for eval_id, evaluation in evaluations.items():
        shared = {"eval_id": eval_id, **evaluation.model_dump(mode="json", exclude={"results", "answers"})}
        rows += [{**shared, **result.model_dump(mode="json")} for result in evaluation.results]
    return rows_table(rows, arrow_schema(COLUMNS))


def paired_differences(first: Evaluation, second: Evaluation) -> list[tuple[str, str, float, float, float, int]]:
    """Metric, filter, share of the second minus that of the first, its 95% interval paired by question, and questions;
    none where no right or wrong answers are stored. Raises ValueError for other tasks or documents."""
    if (first.task, first.task_hash, first.n) != (second.task, second.task_hash, second.n):
        raise ValueError(f"{first.task} of {first.model} and {second.task} of {second.model} are other questions")
    before = {(one.metric, one.filter): one.correct for one in first.answers}
    rows = []
    for one in second.answers:
        pairs = [*zip(before.get((one.metric, one.filter), ""), one.correct, strict=False)]
        if pairs:
            lost = pairs.count(("1", "0"))
            gained = pairs.count(("0", "1"))
            lo, hi = paired_share_interval(gained, lost, len(pairs))
            rows.append((one.metric, one.filter, (gained - lost) / len(pairs), lo, hi, len(pairs)))
    return rows
