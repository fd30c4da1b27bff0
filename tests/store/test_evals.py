"""Evaluations in a results folder: whole, checked, queried beside the runs and never among them."""

import json
import shutil

import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth.config.load import build
from sparsedepth.effects.cells import cells_of
from sparsedepth.store.best import best
from sparsedepth.store.checksums import DamagedRun, is_complete
from sparsedepth.store.connection import open_store
from sparsedepth.store.evals import (
    COLUMNS,
    Evaluation,
    eval_folder,
    paired_differences,
    read_evaluation,
    save_evaluation,
)
from sparsedepth.store.small_sample import paired_share_interval

FACTS = {"run_id": None, "weights_hash": "0123456789ab", "task": "count", "task_version": "1.5"}
FACTS |= {"task_hash": "ba9876543210", "n_fewshot": 0, "max_len": 64, "harness": "lm-eval 0.4.13", "model": "a model"}
FACTS |= {"n": 7, "n_documents": 9, "n_truncated": None, "started": "2026-01-02T03:04:05+00:00", "seconds": 1.5}
RESULTS = [
    {"metric": "acc", "filter": "none", "value": 0.5, "stderr": 0.1, "higher_is_better": True},
    {"metric": "odd", "filter": "a, b", "value": None, "stderr": None, "higher_is_better": None},
]


def evaluation(**fields) -> Evaluation:
    return build(Evaluation, {**FACTS, "results": RESULTS, **fields}, "test")


def test_a_row_for_each_number(tmp_path):
    folder = save_evaluation(tmp_path, evaluation())
    assert folder.parent == tmp_path / "evals" and read_evaluation(folder) == evaluation()
    with open_store(tmp_path) as store:
        named = "eval_id, model, metric, filter, value, higher_is_better"
        assert store.sql(f"select {named} from evals order by metric").rows == (
            (folder.name, "a model", "acc", "none", 0.5, True),
            (folder.name, "a model", "odd", "a, b", None, None),
        )
        assert store.sql("select count(*) from runs").rows == ((0,),)
        types = store.sql("select typeof(value), typeof(n), typeof(higher_is_better) from evals limit 1").rows
        assert types == (("DOUBLE", "BIGINT", "BOOLEAN"),)
        documented = {row[1]: row[4] for row in store.schema().rows if row[0] == "evals"}
    assert list(documented) == [column.name for column in COLUMNS] and all(documented.values())


@pytest.mark.parametrize("name", ["evaluation.json", "complete"])
def test_a_damaged_one_is_left_out_as_a_damaged_run_is(tmp_path, name):
    first, second = (save_evaluation(tmp_path, evaluation(task=task)) for task in ("count", "other"))
    (first / name).write_text("{}")
    with pytest.raises(DamagedRun):
        open_store(tmp_path)
    with pytest.warns(UserWarning, match=first.name), open_store(tmp_path, skip_damaged=True) as store:
        assert store.sql("select distinct eval_id from evals").rows == ((second.name,),)


def test_evaluations_stand_beside_the_runs(tmp_path):
    run = make_run(tmp_path, config_of(), {"val_loss": 2.0})
    save_evaluation(tmp_path, evaluation(run_id=run.name))
    save_evaluation(tmp_path, evaluation(run_id=None))
    with open_store(tmp_path) as store:
        joined = store.sql("select val_loss, value from evals join runs using (run_id) where metric = 'acc'").rows
        assert joined == ((2.0, 0.5),) and store.sql("select count(*) from runs").rows == ((1,),)
        scores = [row[1] for row in store.schema().rows if row[1].startswith("acc:")]
        assert scores == [name for name in store.sql("select * from runs").columns if name.startswith("acc:")] != []
    above = tmp_path.with_name(f"{tmp_path.name}-above")
    shutil.copytree(tmp_path, above / "results")
    for folder in (above, tmp_path / "runs"):  # where runs are found, too
        with open_store(folder) as store:
            assert store.sql("select count(*) from evals").rows == ((4,),)
    shutil.copytree(tmp_path / "evals", tmp_path / "other" / "evals")
    with open_store(tmp_path, tmp_path / "other") as store:
        assert store.sql("select count(*) from evals").rows == ((4,),)  # a copy counts once
    with open_store(next((tmp_path / "evals").iterdir())) as store:
        assert store.sql("select count(*) from evals").rows == ((2,),)


def test_what_decides_the_scores_is_the_name(tmp_path):
    save_evaluation(tmp_path, evaluation())
    same = {"model": "other name", "n": 3, "seconds": 9.0, "results": []}
    assert is_complete(eval_folder(tmp_path, evaluation(**same)))
    for name in ("run_id", "weights_hash", "task", "task_version", "task_hash", "harness"):
        assert not is_complete(eval_folder(tmp_path, evaluation(**{name: "0" * 12}))), name
    for name in ("n_fewshot", "max_len"):
        assert not is_complete(eval_folder(tmp_path, evaluation(**{name: 5}))), name


def test_damage_is_named(tmp_path):
    folder = save_evaluation(tmp_path, evaluation())
    content = (folder / "evaluation.json").read_text()
    (folder / "evaluation.json").write_text(content.replace("0.5", "0.6"))
    with pytest.raises(DamagedRun, match="checksum"):
        open_store(tmp_path)
    (folder / "evaluation.json").write_text(content)
    marker = json.loads((folder / "complete").read_text())
    (folder / "complete").write_text(json.dumps({**marker, "run_id": "0" * 12}))
    with pytest.raises(DamagedRun, match="is of evaluation 0"):
        open_store(tmp_path)
    (folder / "complete").write_text(json.dumps({**marker, "files": {}}))
    with pytest.raises(DamagedRun, match="does not list"):
        open_store(tmp_path)
    (folder / "complete").unlink()
    with pytest.raises(ValueError, match="no complete run"):
        open_store(tmp_path)


def test_accuracies_are_quantities_of_runs(tmp_path):
    """A run is ranked by the way of scoring that most runs share: 7 documents here, of which the third run has none."""
    of = [config_of(seed=seed, lr=lr) for lr in (1e-3, 2e-3) for seed in (0, 1)]
    runs = [make_run(tmp_path, config, {"val_loss": 2.0}) for config in of]
    for run, share in zip(runs[:3], (0.25, 0.5, 0.75), strict=True):
        results = [{"metric": "acc", "filter": "none", "value": share, "stderr": 0.1, "higher_is_better": True}]
        save_evaluation(tmp_path, evaluation(run_id=run.name, results=results))
        save_evaluation(tmp_path, evaluation(run_id=run.name, without="2", results=results))
    save_evaluation(tmp_path, evaluation(run_id=runs[3].name, n=2, task_hash="ffffffffffff"))
    with open_store(tmp_path) as store:
        scored = dict(store.sql('select run_id, "acc:count" from runs').rows)
        assert [scored[run.name] for run in runs] == [0.25, 0.5, 0.75, None]
        table = best(store, by="acc:count").table.records()
        assert [(row["lr"], row["acc:count"], row["seeds"]) for row in table] == [(2e-3, 0.75, 1), (1e-3, 0.375, 2)]
        cells = cells_of(store.frame("select * from runs"), "acc:count")
        assert cells.unit == "share" and sorted(cells.rows["value"].dropna()) == [0.25, 0.5, 0.75]
        refused = "no run here has acc:other; score runs first: sparsedepth evaluate"
        with pytest.raises(ValueError, match=refused):
            best(store, by="acc:other")
        with pytest.raises(ValueError, match=refused):
            cells_of(store.frame("select * from runs"), "acc:other")


def test_tasks_that_differ_in_case_alone_have_columns_that_say_which(tmp_path):
    run = make_run(tmp_path, config_of(), {"val_loss": 2.0})
    for share, task in ((0.25, "ARC"), (0.5, "arc"), (0.75, "other")):
        results = [{"metric": "acc", "filter": "none", "value": share, "stderr": 0.1, "higher_is_better": True}]
        save_evaluation(tmp_path, evaluation(run_id=run.name, task=task, results=results))
    with open_store(tmp_path) as store:
        (record,) = store.sql("select * from runs").records()
    scores = {name: value for name, value in record.items() if name.startswith("acc:")}
    assert scores == {"acc:ARC (capitals: ARC)": 0.25, "acc:arc (capitals: none)": 0.5, "acc:other": 0.75}


def test_two_models_are_compared_question_by_question():
    """Of 10 questions the second model gains 4 and loses 1: .3, with the interval of Agresti and Min."""
    answers = [{"metric": "acc", "filter": "none", "correct": correct} for correct in ("1110000000", "1101111000")]
    first, second = (evaluation(n=10, weights_hash=hash, answers=[answers[i]]) for i, hash in enumerate("ab"))
    ((metric, filter, difference, lo, hi, n),) = paired_differences(first, second)
    assert (metric, filter, n) == ("acc", "none", 10) and difference == pytest.approx(0.3)
    assert (lo, hi) == paired_share_interval(4, 1, 10) and lo < 0 < hi
    with pytest.raises(ValueError, match="are other questions"):
        paired_differences(first, evaluation(n=9, answers=[answers[0]]))
    assert paired_differences(evaluation(n=10), second) == []  # of old scores, or of a task without right answers
