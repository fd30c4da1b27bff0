"""The same sweep on a real PostgreSQL server, under kills, with workers of two commands: the same record."""

import random
import threading
from collections import Counter

import optuna
import pytest
from support.interrupted_sweep import Pace, Sweep, at_the_end, kill_at_random, record_of
from support.queue_workers import take
from support.sweep_processes import all_ended, markers, processes, until
from support.tiny_sweep import definition, sparsedepth, start

from sparsedepth.sweep.storage import open_storage

ONE = ("--workers", 1, "--runtime", "threads=1")


@pytest.mark.chaos
@pytest.mark.parametrize(("runs", "workers", "kills"), [(6, 2, 3), (40, 4, 20)], ids=["short", "long"])
def test_kills_on_postgresql(folder, undisturbed, tmp_path, monkeypatch, database, runs, workers, kills):
    """Half of the workers are another command's, as on a second machine that shares the folder."""
    expected = undisturbed(runs)
    results, pace = tmp_path / "results", Pace(tmp_path, monkeypatch)
    driver = start(*Sweep(folder, runs).arguments(results, workers // 2, "--storage", database.url))
    until(lambda: processes(results, "run") or driver.poll() is not None)
    helper = start("work", results, "--storage", database.url, "--workers", workers // 2, "--max-attempts", 1000)
    killed = kill_at_random(results, kills, lambda: driver.poll() is not None, random.Random(kills), pace, runs)
    out, err = at_the_end(driver, results)
    assert driver.returncode == 0, out + err
    assert killed.total() == kills, "the sweep ended before it had been disturbed enough"
    _, helped = at_the_end(helper, results)
    assert helper.returncode == 0, helped
    all_ended(results)
    assert record_of(results) == expected
    assert not (results / "study.journal").exists()
    storage = open_storage(database.url, results)
    (study,) = optuna.study.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).trials
    states = Counter(trial.state.name for trial in trials)
    assert not states["RUNNING"] and not states["WAITING"], states
    said = [path for path in results.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert not said, "the password of the database was written down"
    print(f"\n{runs} runs on PostgreSQL, {workers} workers of two commands, killed: {dict(killed)}")
    optuna.delete_study(study_name=study.study_name, storage=storage)


@pytest.mark.chaos
def test_a_server_that_is_restarted_under_a_sweep(folder, undisturbed, tmp_path, monkeypatch, database):
    """It is away while runs end: they are told afterwards, and none is lost or repeated."""
    runs = 8
    expected = undisturbed(runs)
    results, pace = tmp_path / "results", Pace(tmp_path, monkeypatch)
    alone = ("--storage", database.url, "--runtime", "stack=1")
    driver = start(*Sweep(folder, runs).arguments(results, 2, *alone))
    said: list[str] = []
    listener = threading.Thread(target=lambda: said.extend(iter(driver.stderr.readline, "")))
    listener.start()
    for ended in (2, 4):
        until(lambda ended=ended: len([*results.glob("work/*/config.yaml")]) == ended or driver.poll() is not None)
        database.stop()
        pace.allow(ended)
        until(lambda ended=ended: len(markers(results)) == ended or driver.poll() is not None)
        until(lambda ended=ended: len(lost(said)) == ended / 2 or driver.poll() is not None)
        database.start()
    pace.open()
    driver.wait(300)
    listener.join(300)
    err = "".join(said)
    assert driver.returncode == 0, err
    assert len(lost(said)) == 2 and "Traceback" not in err
    assert record_of(results) == expected


def lost(said: list[str]) -> list[str]:
    """The lines that say that the database is away."""
    return [line for line in said if "retrying for" in line]


@pytest.mark.chaos
@pytest.mark.parametrize("sampler", ["tpe"])
def test_two_folders_on_one_database_have_a_sweep_each(tmp_path, database, sampler):
    space = {"lr": {"low": 1e-3, "high": 1e-2, "log": True}}
    path = definition(
        tmp_path, sampler=sampler, n_trials=3, seeds=[0], space=space, base={"measures": ["loss"], "n_layers": 2}
    )
    for name in ("a", "b"):
        sparsedepth("sweep", path, "--out", tmp_path / name, "--storage", database.url, *ONE)
    assert set(record_of(tmp_path / "a")) == set(record_of(tmp_path / "b")) and len(record_of(tmp_path / "a")) == 3


@pytest.mark.parametrize("processes", [2, pytest.param(8, marks=pytest.mark.chaos)], ids=["short", "long"])
def test_many_open_a_fresh_database_at_one_moment(tmp_path, database, processes):
    """The first makes the tables, and the others wait for it."""
    storage = open_storage(database.url, tmp_path)
    for study in optuna.study.get_all_study_summaries(storage):
        optuna.delete_study(study_name=study.study_name, storage=storage)
    optuna.storages._rdb.models.BaseModel.metadata.drop_all(storage.engine)
    with storage.engine.begin() as connection:
        connection.exec_driver_sql("drop table if exists alembic_version")
    assert take(processes, tmp_path, database.url) == [""] * processes


def test_a_database_that_is_not_there_is_one_line_without_its_password(folder, tmp_path):
    url = "postgresql://sweep:secret@127.0.0.1:1/none"
    path = Sweep(folder, 1).arguments(tmp_path, 1)[1]
    _, err = sparsedepth("sweep", path, "--out", tmp_path / "results", "--storage", url, code=2)
    assert "--storage postgresql://127.0.0.1/none cannot be used" in err
    assert "secret" not in err and err.count("sparsedepth: error") == 1
