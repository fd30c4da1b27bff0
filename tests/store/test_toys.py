"""Teacher-student groups in a results folder: whole, checked, queried beside the runs and never among them."""

import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.connection import open_store
from sparsedepth.store.toys import COLUMNS, SETTINGS, save_toy

CONFIG = {name: None for name, *_ in SETTINGS} | {"n_layers": 3, "target": "kl", "n_steps": 1, "rho": [0.0, 1.0]}


def save(results, run_id="000000000001", **changes):
    students = [
        {"student": k, "rho": rho, "teacher_seed": 7, "temperature": 1.0, "seed": 0, "test_loss": 0.5}
        for k, rho in enumerate(CONFIG["rho"])
    ]
    curves = [{"step": 1, "student": 0, "lr": 0.1, "train_loss": 2.0, "test_loss": None}]
    return save_toy(results, run_id, CONFIG | changes, students, curves, {"device": "cpu"})


def test_students_are_rows_with_their_own_values(tmp_path):
    save(tmp_path)
    with open_store(tmp_path) as store:
        rows = store.sql("select n_layers, rho, teacher_seed, target, d_ff, test_loss from toys order by rho").rows
        assert rows == ((3, 0.0, 7, "kl", None, 0.5), (3, 1.0, 7, "kl", None, 0.5))
        joined = store.sql("select rho, step from toy_curves join toys using (run_id, student) limit 9")
        assert store.sql("select step, train_loss, test_loss from toy_curves").rows == ((1, 2.0, None),)
        assert len(joined.rows) == 1
        assert store.sql("select count(*) from runs").rows == ((0,),)
        explained = {(view, name) for view, name, *_, meaning in store.schema().rows if meaning}
    for view, columns in COLUMNS.items():
        assert {(view, column.name) for column in columns} <= explained


def test_runs_stay_free_of_toys_and_toys_of_runs(tmp_path):
    make_run(tmp_path, config_of(), {"val_loss": 3.0})
    with open_store(tmp_path) as store:
        assert store.sql("select count(*) from toys").rows == ((0,),)
    save(tmp_path)
    for root in (tmp_path, tmp_path / "runs", tmp_path / "toys"):
        with open_store(root, tmp_path) as store:
            assert store.sql("select (select count(*) from runs), (select count(*) from toys)").rows == ((1, 2),)


def test_one_group_can_be_named_and_an_unfinished_one_does_not_count(tmp_path):
    folder, other = save(tmp_path), save(tmp_path, "000000000002", n_layers=4)
    with open_store(folder) as store:
        assert store.sql("select distinct n_layers from toys").rows == ((3,),)
    (other / "complete").unlink()
    with open_store(tmp_path) as store:
        assert store.sql("select distinct n_layers from toys").rows == ((3,),)


@pytest.mark.parametrize("name", ["config.yaml", "students.parquet", "curves.parquet", "summary.json"])
def test_a_changed_file_is_refused_by_name(tmp_path, name):
    path = save(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedRun, match=name):
        open_store(tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save_toy(tmp_path, "000000000001", CONFIG, [], [], {"seconds": float("nan")})
    assert not list((tmp_path / "toys").iterdir())
