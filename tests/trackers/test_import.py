"""Runs come in from a tracker as they were sent, and only whole. The real trackers need `pip install .[trackers]`."""

import hashlib
import os
import shutil
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth.quantities import IN_RUNS
from sparsedepth.store.connection import open_store
from sparsedepth.store.table_map import SETTABLE
from sparsedepth.trackers.runs import PLACES, LoggedRun, open_tracker, read_source, sync

MAP = {"source": "us", "fields": {"n_layers": "config.n_layers", "val_loss": "metrics.val_loss"}}
WHOLE = LoggedRun(id="a", status="finished", config={"n_layers": 2}, metrics={"val_loss": 2.5})
CUT = LoggedRun(id="b", status="unfinished", config={"n_layers": 4}, metrics={"val_loss": 9.0})


@pytest.fixture
def imported(command, tmp_path):
    """What `import` says of a source; its exit code must be `code`."""

    def call(source: str, table_map: dict, code: int = 0) -> str:
        (tmp_path / "map.yaml").write_text(yaml.safe_dump(table_map))
        out, err = command("import", source, "--map", tmp_path / "map.yaml", "-o", tmp_path / "theirs", code=code)
        assert code == 0 or err.count("\n") == 1
        return err or out

    return call


def rows_of(source: str, table_map: dict) -> list[dict]:
    """What the runs behind TRACKER:PLACE have."""
    rows = read_source(source, list, table_map).columns.to_pylist()
    return [{name: text for name, text in row.items() if text is not None or "." not in name} for row in rows]


def frame_of(results: Path):
    with open_store(results) as store:
        return store.frame("select * from runs order by seed, n_layers")


@pytest.fixture
def tracker(monkeypatch):
    """Sets the runs of `wandb:...`, whose package need not be there."""

    def hold(*runs):
        monkeypatch.setitem(sys.modules, "sparsedepth.trackers.wandb", SimpleNamespace(read=lambda place: iter(runs)))

    return hold


def test_a_run_is_a_row_of_texts_without_secrets(tracker):
    config = {"model": {"n_layers": 2, "tied": True}, "lr": 1e-3, "train_tokens": 7, "tokenizer": "byte", "_wandb": 1}
    secrets = {"api_key": "k1", "WANDB_API_KEY": "k2", "hf_token": "k3", "db": {"password": "k4"}, "aws": {"secret": 5}}
    metrics = {"val_loss": 2.5, "worst": float("nan"), "flops_per_token": 8, "picture": {"_type": "image-file"}}
    tracker(LoggedRun(id="a", name="first", config=config | secrets, metrics=metrics))
    (row,) = rows_of("wandb:runs", MAP)
    assert row == {
        **{"id": "a", "name": "first", "status": None, "project": None, "config.model.n_layers": "2"},
        **{"config.model.tied": "true", "config.lr": "0.001", "config.train_tokens": "7", "config.tokenizer": "byte"},
        **{"metrics.val_loss": "2.5", "metrics.worst": "NaN", "metrics.flops_per_token": "8"},
    }


def test_runs_are_imported_through_a_map_as_a_table_is(tracker, tmp_path, imported):
    tracker(WHOLE, LoggedRun(id="c", status="finished", config={"n_layers": 4}, metrics={"val_loss": 2.25}))
    said = imported("wandb:some/runs", {**MAP, "cluster": "id"})
    runs = frame_of(tmp_path / "theirs")
    assert "2 runs in 2 clusters, from 2 rows" in said
    assert runs["val_loss"].tolist() == [2.5, 2.25] and runs["cluster"].tolist() == ["a", "c"]


def test_a_name_with_a_blank_at_its_end_keeps_its_values(tracker):
    tracker(LoggedRun(id="a", config={"n_layers": 2}, metrics={"val_loss ": 2.5}))
    assert rows_of("wandb:runs", MAP)[0]["metrics.val_loss"] == "2.5"


def test_a_column_with_a_dot_stands_in_backticks_in_an_expression(tracker, tmp_path, imported):
    tracker(WHOLE)
    fields = {**MAP["fields"], "n_layers": "config.n_layers * 2"}
    said = imported("wandb:runs", {**MAP, "fields": fields}, code=2)
    assert "the column 'config.n_layers' must stand in backticks: `config.n_layers`" in said
    fields["n_layers"] = "`config.n_layers` * 2"
    imported("wandb:runs", {**MAP, "fields": fields})
    assert frame_of(tmp_path / "theirs")["n_layers"].tolist() == [4]


def test_a_run_that_did_not_finish_comes_in_only_if_the_map_looks_at_status(tracker, tmp_path, imported):
    tracker(WHOLE, CUT)
    assert "1 of 2 runs did not finish, such as b (unfinished)" in imported("wandb:runs", MAP, code=2)
    said = imported("wandb:runs", {**MAP, "where": "status == 'finished'"})
    assert "1 run in 1 cluster, from 2 rows; 1 excluded by where" in said
    assert (
        len(rows_of("wandb:runs", {"fields": {"outcome": {"of": "status", "values": {"unfinished": "diverged"}}}})) == 2
    )
    tracker(LoggedRun(id="a"), CUT)
    with pytest.raises(ValueError, match="such as where: status is null"):
        rows_of("wandb:runs", MAP)


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ([], "wandb:runs has no runs; give a .wandb file, a run's folder, or a folder of them"),
        ([WHOLE, WHOLE], "wandb:runs has two runs with the id 'a'; move one of them away"),
        ([WHOLE, LoggedRun(id="c", config={"n_layers": 4})], "val_loss has no value in 1 row, first in row 2 (c)"),
        ([LoggedRun(id="c", config={"depth": 4})], "fields.n_layers: no column 'config.n_layers'; fields.v"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_imported(tracker, tmp_path, imported, runs, told):
    tracker(*runs)
    said = imported("wandb:runs", MAP, code=2)
    assert told in said and "/tmp" not in said.replace(str(tmp_path), "")
    assert not (tmp_path / "theirs").exists()


def test_what_a_package_raises_is_one_line_without_a_password(monkeypatch, tmp_path, imported):
    def read(place):
        raise KeyError(f"no such column\nat {place}")
        yield

    monkeypatch.setitem(sys.modules, "sparsedepth.trackers.mlflow", SimpleNamespace(read=read))
    said = imported("mlflow:http://me:s3cret@host/db", MAP, code=2)
    assert "s3cret" not in said
    assert said.startswith("sparsedepth: error: mlflow:http://host/db cannot be read: ")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb", "trackio"])
def test_a_package_that_is_missing_is_one_line(monkeypatch, tmp_path, imported, name):
    for module in (name, f"{name}.sqlite_storage"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"sparsedepth.trackers.{name}", raising=False)
    assert f": pip install {name}" in imported(f"{name}:{tmp_path}", MAP, code=2)
    assert not (tmp_path / "theirs").exists()


def test_trackio_is_read_from_its_database_without_the_package(tmp_path):
    """By hand: the last value of each metric by step; a run without metrics; a newer version."""
    with sqlite3.connect(tmp_path / "mine.db") as database:
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_id, run_name, step, metrics)")
        database.execute("CREATE TABLE configs (run_id, run_name, config)")
        logged = [("x", "one", 20, '{"val_loss": 2.0}'), ("x", "one", 10, '{"val_loss": 3.0, "lr": 0.5}')]
        database.executemany("INSERT INTO metrics (run_id, run_name, step, metrics) VALUES (?, ?, ?, ?)", logged)
        configs = [("x", "one", '{"n_layers": 2, "_Username": "me"}'), ("y", "two", "{}")]
        database.executemany("INSERT INTO configs VALUES (?, ?, ?)", configs)
    one, two = rows_of(f"trackio:{tmp_path / 'mine.db'}", MAP)
    assert one == {"id": "x", "name": "one", "status": None, "project": "mine", "config.n_layers": "2"} | {
        "metrics.val_loss": "2.0",
        "metrics.lr": "0.5",
    }
    assert two == {"id": "y", "name": "two", "status": None, "project": "mine"}
    with sqlite3.connect(tmp_path / "mine.db") as database:  # MLflow's has such
        database.execute("CREATE TRIGGER kept BEFORE UPDATE ON metrics BEGIN SELECT RAISE(ABORT, 'kept'); END")
    assert rows_of(f"trackio:{tmp_path / 'mine.db'}", MAP) == [one, two]
    with sqlite3.connect(tmp_path / "mine.db") as database:
        database.execute("PRAGMA user_version = 3")
    with pytest.raises(ValueError, match="version 3; up to 2"):
        rows_of(f"trackio:{tmp_path / 'mine.db'}", MAP)


def test_two_values_of_one_name_are_refused_and_deep_keys_are_read(tracker):
    """A key with a dot, and 990 keys below one another."""
    tracker(LoggedRun(id="a", config={"model.n_layers": 2, "model": {"n_layers": 4}}))
    with pytest.raises(ValueError, match=r"the name 'config.model.n_layers' is twice in one run"):
        rows_of("wandb:runs", MAP)
    deep: dict = {"x": 1}
    for _ in range(990):
        deep = {"x": deep}
    tracker(LoggedRun(id="a", config=deep, metrics={"val_loss": 1.0}))
    (row,) = rows_of("wandb:runs", MAP)
    assert row["config." + ".".join("x" * 991)] == "1"


def test_a_tracker_without_an_end_ends_in_a_line(monkeypatch, tmp_path, imported):
    def read(place):
        number = 0
        while True:
            number += 1
            yield LoggedRun(id=f"{number}", config={"note": "x" * 10**6})

    monkeypatch.setattr("sparsedepth.outside.ANSWER", 20_000_000)
    monkeypatch.setitem(sys.modules, "sparsedepth.trackers.wandb", SimpleNamespace(read=read))
    assert "wandb:runs cannot be read: it has more than 20 MB" in imported("wandb:runs", MAP, code=2)


def test_a_view_in_a_database_is_refused_before_it_is_asked(tmp_path):
    """An endless one, in place of the metrics; a pipe and a link in place of the file."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    with sqlite3.connect(tmp_path / "mine.db") as database:
        database.execute(
            f"CREATE VIEW metrics AS {endless} SELECT i AS run_id, i AS run_name, '{{}}' AS metrics FROM n"
        )
        database.execute("CREATE TABLE configs (run_id, run_name, config)")
    with pytest.raises(ValueError, match="has the view 'metrics', and a tracker's database has tables alone"):
        rows_of(f"trackio:{tmp_path / 'mine.db'}", MAP)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link.db").symlink_to(tmp_path / "mine.db")
    os.mkfifo(tmp_path / "folder" / "pipe.db")
    for name, told in (("link", "link"), ("pipe", "does not exist|pipe")):
        with pytest.raises(ValueError, match=told):
            rows_of(f"trackio:{tmp_path / 'folder' / name}.db", MAP)


# Real trackers


@pytest.fixture
def sent(tmp_path, monkeypatch, request):
    """A results folder of two runs that was sent to a real tracker, and the source that names them there."""
    name, results = request.param, tmp_path / "results"
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(results / "trackers" / "trackio"))
    for module in [module for module in sys.modules if module.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # it reads TRACKIO_DIR when it is imported
    pytest.importorskip(name)
    curves = [{"step": 10, "train_loss": 3.0, "lr": 1e-3}, {"step": 20, "train_loss": 2.75, "lr": 5e-4}]
    for seed in (0, 1):
        summary = {"val_loss": 2.123456789 + seed, "params_total": 123_456_789, "steps": 20, "usefulness": 1 / 3}
        make_run(results, config_of(n_layers=2, seed=seed, lr=3e-4, qk_norm=True), summary, curves=curves)
    assert len([*sync(results, name, open_tracker(name, results))]) == 2
    place = {
        "tensorboard": results / "trackers" / "tensorboard",
        "mlflow": f"sqlite:///{results / 'trackers' / 'mlflow.db'}",
        "trackio": results / "trackers" / "trackio" / "results.db",
        "wandb": results / "trackers",
    }[name]
    return name, results, f"{name}:{place}"


def contents(folder: Path) -> dict[Path, str]:
    transient = (".lock", "-shm", "-wal")  # of SQLite, also for readers
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(transient))
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("sent", PLACES, indirect=True)
def test_what_was_sent_comes_back_equal(sent, tmp_path, imported):
    """Every choice and every measured quantity. TensorBoard keeps 7 digits of a quantity."""
    name, results, source = sent
    ours, before = frame_of(results), contents(results)
    known = [column for column in ours.columns if ours[column].notna().all()]
    choices = [column for column in known if column in SETTABLE and not str(ours[column][0]).startswith("[")]
    measured = [column for column in known if column in IN_RUNS and ours[column].dtype.kind in "fi"]
    assert len(choices) > 50 and {"val_loss", "params_total", "usefulness"} <= {*measured}
    prefix = "metrics.summary/" if name == "tensorboard" else "metrics."
    fields = {column: f"config.{column}" for column in choices} | {column: prefix + column for column in measured}
    imported(source, {"source": "us", "fields": fields})
    theirs = frame_of(tmp_path / "theirs")
    assert theirs[choices].to_dict("records") == ours[choices].to_dict("records")
    digits = 1e-7 if name == "tensorboard" else 0
    for column in measured:
        assert theirs[column].tolist() == pytest.approx(ours[column].tolist(), rel=digits, abs=0), column
    assert contents(results) == before, "the tracker's files are only read"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])


def _of_another_version(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:6] + b"\x07" + path.read_bytes()[7:])


def _again_in_its_folder(path: Path) -> None:
    shutil.copy(path, path.with_name(f"{path.name}.2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "pattern", "change", "told"),
    [
        ("wandb", "run-*.wandb", _cut, "1 of 2 runs did not finish"),
        ("wandb", "run-*.wandb", _damage, "is damaged at byte"),
        ("wandb", "run-*.wandb", _of_another_version, "is not a .wandb file of version 0"),
        ("tensorboard", "*tfevents*", _cut, "1 of 2 runs did not finish"),
        ("tensorboard", "*tfevents*", _damage, "failed event crc32 check"),
        ("tensorboard", "*tfevents*", _again_in_its_folder, "has two runs: curves/train_loss begins again"),
        ("mlflow", "mlflow.db", _cut, "malformed"),
        ("trackio", "results.db", _cut, "malformed"),
    ],
    indirect=["sent"],
)
def test_files_that_are_not_whole_are_refused(sent, tmp_path, imported, pattern, change, told):
    _, results, source = sent
    change(sorted((results / "trackers").rglob(pattern))[0])
    assert told in imported(source, MAP, code=2)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.slow
def test_the_file_store_of_mlflow_is_read_and_half_a_run_refused(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "mlruns"
    client = tracking.MlflowClient(tracking_uri=str(store))
    for seed, status in enumerate(("FINISHED", "KILLED")):
        run = client.create_run("0", run_name=f"s{seed}").info.run_id
        client.log_param(run, "seed", seed)
        for step, value in ((3, 2.5), (1, 9.0)):  # the last step counts, not what came last
            client.log_metric(run, "val/loss", value, step=step)
        client.set_terminated(run, status)
    before = contents(tmp_path)
    rows = sorted(rows_of(f"mlflow:{store}", {"where": "status == 'finished'"}), key=lambda row: row["name"])
    assert [(row["status"], row["config.seed"], row["metrics.val/loss"]) for row in rows] == [
        ("finished", "0", "2.5"),
        ("failed", "1", "2.5"),
    ]
    assert contents(tmp_path) == before
    metric = store / "0" / run / "metrics" / "val" / "loss"
    metric.write_text(metric.read_text()[:-8])
    with pytest.raises(ValueError, match=f"the run .*{run} is half written"):
        rows_of(f"mlflow:{store}", {})


@pytest.mark.slow
def test_databases_of_another_version_are_refused_and_left_alone(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    database = tmp_path / "mlflow.db"
    tracking.MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    before = contents(tmp_path)
    for place, told in ((f"sqlite:///{database}", "found version ffffffffffff"), ("postgresql://h/db", "http://")):
        with pytest.raises(ValueError, match=told):
            rows_of(f"mlflow:{place}", MAP)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_the_folder_of_a_run_that_wandb_logged_online(tmp_path):
    """config.yaml of both versions that are about, and a run whose summary is not there yet."""
    pytest.importorskip("wandb")
    for id, text in (("a", "wandb_version: 1\nlr:\n  desc: null\n  value: 0.001\n"), ("b", "lr:\n  value: 0.5\n")):
        files = tmp_path / f"run-20260102_030405-{id}" / "files"
        files.mkdir(parents=True)
        (files / "config.yaml").write_text(f"{text}_wandb:\n  value: {{cli_version: 0.18.3}}\n")
        (files / "wandb-summary.json").write_text('{"val_loss": 2.5, "_step": 3, "loss": {"min": 2.25}}')
    rows = rows_of(f"wandb:{tmp_path}", MAP)
    assert [(row["id"], row["config.lr"], row["metrics.loss.min"]) for row in rows] == [
        ("a", "0.001", "2.25"),
        ("b", "0.5", "2.25"),
    ]
    (files / "wandb-summary.json").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 runs did not finish, such as b"):
        rows_of(f"wandb:{tmp_path}", MAP)
    (files / "config.yaml").write_text("wandb_version: 2\n")
    with pytest.raises(ValueError, match="is not of version 1"):
        rows_of(f"wandb:{tmp_path}", MAP)


@pytest.mark.slow
def test_hyperparameters_that_torch_wrote_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_hparams({"n_layers": 2, "norm": "pre", "qk_norm": True}, {"val_loss": 2.5}, run_name="first")
    rows = {row["id"]: row for row in rows_of(f"tensorboard:{tmp_path}", MAP)}
    first = {"name": None, "status": "finished", "project": None, "config.n_layers": "2.0", "config.norm": "pre"}
    assert rows["first"] == {"id": "first", **first, "config.qk_norm": "1.0", "metrics.val_loss": "2.5"}


@pytest.mark.slow
def test_a_long_run_of_wandb_with_a_secret_in_its_configuration(tmp_path):
    """Three blocks of the file; a nested name, a late choice, and the least loss as the summary of loss."""
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(silent=True, console="off")
    config = {"model": {"n_layers": 2}, "wandb_api_key": "0123456789abcdef"}
    run = wandb.init(project="p", id="long", dir=tmp_path, mode="offline", config=config, settings=settings)
    run.define_metric("loss", summary="min")
    for step in range(300):
        run.log({"loss": 1.75 if step == 299 else 5.0 - step / 100, "note": "x" * 300})
    run.config.update({"late": 7})
    run.finish()
    assert next(tmp_path.rglob("*.wandb")).stat().st_size > 3 * 32768
    (row,) = rows_of(f"wandb:{tmp_path}", MAP)
    assert row.pop("metrics.note") == "x" * 300
    known = {"config.model.n_layers": "2", "config.late": "7", "metrics.loss.min": "1.75"}
    assert row == {"id": "long", "name": None, "status": "finished", "project": "p"} | known
