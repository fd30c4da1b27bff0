"""MLflow: each run is a run of an experiment, identified by its tag TAG."""

import os
import re
import shlex
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported

from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from sparsedepth import files
from sparsedepth.trackers.runs import LoggedRun, TrackedRun, open_database
from sparsedepth.words.plain_text import cause_of, without_password

TAG = "sparsedepth.run_id"
AT_ONCE = {"params": 100, "metrics": 1000}
"""in one request"""
STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "failed"}


class Tracker:
    """An experiment of a tracking server or of a local database."""

    def __init__(self, folder: Path, at: str | None, experiment: str) -> None:
        """`at`: a tracking URI (default: MLFLOW_TRACKING_URI, else a SQLite file in the results folder). Raises
        ValueError if MLflow cannot use it."""
        database = folder.resolve() / "mlflow.db"
        own = f"sqlite:///{database}"
        self.uri = at or os.environ.get("MLFLOW_TRACKING_URI") or own
        self.shown = without_password(self.uri)
        self.place = f"{self.shown} {experiment}"
        self.view_command = f"mlflow ui --backend-store-uri {shlex.quote(self.shown)}"
        folder.mkdir(exist_ok=True)
        try:
            if self.uri == own:
                _make(database)
            self.client = MlflowClient(tracking_uri=self.uri)
            existing = self.client.get_experiment_by_name(experiment)
            if existing is not None and existing.lifecycle_stage != "active":
                raise ValueError(f"experiment {experiment!r} is deleted; restore it, or give another --project")
            self.experiment = existing.experiment_id if existing else self.client.create_experiment(experiment)
        except (MlflowException, SQLAlchemyError) as error:
            fix = f"; if nothing else uses it, delete {database} and run the same command again"
            is_ours = self.uri == own and database.exists() and "INVALID_PARAMETER" not in str(error)
            raise ValueError(f"MLflow cannot use {self.shown}: {cause_of(error)}{fix * is_ours}") from None

    def held(self) -> set[str]:
        return {run.data.tags[TAG] for run in _runs(self.client, [self.experiment]) if TAG in run.data.tags}

    def discard(self, run_id: str) -> None:
        for run in [*_runs(self.client, [self.experiment], f"tags.`{TAG}` = '{run_id}'")]:
            self.client.delete_run(run.info.run_id)

    def send(self, run: TrackedRun) -> None:
        tags = {TAG: run.run_id} | {f"sparsedepth.{name}": value for name, value in run.tags.items()}
        created = self.client.create_run(
            self.experiment, start_time=round(1000 * run.started), tags=tags, run_name=run.run_id
        )
        params = [Param(name, str(value)) for name, value in run.params.items()]
        metrics = [
            Metric(name, value, round(1000 * run.time_at(step)), step)
            for step, values in (*run.curves, (run.last_step + 1, run.summary))  # of one step the larger value is shown
            for name, value in values.items()
        ]
        mlflow_id = created.info.run_id
        for kind, values in (("params", params), ("metrics", metrics)):
            for start in range(0, len(values), AT_ONCE[kind]):
                self.client.log_batch(mlflow_id, **{kind: values[start : start + AT_ONCE[kind]]})
        status = "FAILED" if run.tags.get("outcome") == "diverged" else "FINISHED"
        self.client.set_terminated(mlflow_id, status, round(1000 * run.time_at(run.last_step)))


def _runs(client: MlflowClient, experiments: list[str], filter: str = "") -> Iterator[Run]:
    token = None
    while token != "":
        page = client.search_runs(experiments, filter, max_results=1000, page_token=token)
        yield from page
        token = page.token or ""


def read(uri: str) -> Iterator[LoggedRun]:
    """The runs of all experiments of a tracking URI, or of a folder of MLflow's file store."""
    with tempfile.TemporaryDirectory() as folder:
        client = MlflowClient(tracking_uri=_copied(uri, Path(folder)))
        names = {one.experiment_id: one.name for one in client.search_experiments()}
        for run in _runs(client, [*names]):
            yield LoggedRun(
                id=run.info.run_id,
                name=run.info.run_name,
                status=STATUS.get(run.info.status, "unfinished"),
                project=names[run.info.experiment_id],
                config=run.data.params,
                metrics=run.data.metrics,
            )


def _copied(uri: str, folder: Path) -> str:
    """The URI of a copy of local runs: MLflow makes what is not there, and migrates a database of an older version in
    place. Raises ValueError for another database, and where there are no runs, or half of one."""
    if uri.startswith(("http://", "https://")):
        return uri
    local = uri.removeprefix("sqlite:///").removeprefix("file://")
    if "://" in local:
        raise ValueError("give a file, a folder, or the http:// address of an MLflow server on that database")
    if (path := Path(local)).is_file():
        copy = folder / "mlflow.db"
        with open_database(path) as source, closing(sqlite3.connect(copy)) as target:
            tables = {name for (name,) in source.execute("SELECT name FROM sqlite_master")}
            if not {"runs", "experiments", "alembic_version"} <= tables:
                raise ValueError(f"{path} is not a database of MLflow's runs")
            source.backup(target)
        return f"sqlite:///{copy}"
    experiments = [meta.parent for meta in path.glob("*/meta.yaml")]
    if not experiments:
        raise ValueError(f"{path} is neither a database nor a file store of MLflow")
    if odd := [each for each in path.rglob("*") if each.is_symlink() or not (each.is_file() or each.is_dir())]:
        raise ValueError(f"{odd[0]} is a link, a pipe or a device, and a store has files alone; put the file there")
    for run in chain.from_iterable(experiment.iterdir() for experiment in experiments):
        texts = [run / "meta.yaml", *(path for path in run.glob("metrics/**/*") if path.is_file())]
        are_whole = (text.is_file() and text.read_bytes().endswith(b"\n") for text in texts)
        if re.fullmatch("[0-9a-f]{32}", run.name) and not all(are_whole):
            raise ValueError(f"the run {run} is half written; move it away")
    shutil.copytree(path, folder / "mlruns", ignore=shutil.ignore_patterns("artifacts", "models"))
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # its former format, which MLflow reads on request
    return (folder / "mlruns").as_uri()


def _make(database: Path) -> None:
    """Make MLflow's tables aside, and rename: MLflow never mends a database whose making was killed, or that two
    processes made at once."""
    with files.locked(database.with_name(".mlflow.lock")):
        if not database.exists():
            with files.atomic_file(database) as temporary:
                MlflowClient(tracking_uri=f"sqlite:///{temporary}").search_experiments()
