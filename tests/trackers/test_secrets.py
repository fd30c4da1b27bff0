"""No password and no variable of the environment is in what is written for others: models, packs, pages, trackers."""

import sys
from types import SimpleNamespace

import pytest
from support.made_up_runs import MANIFEST
from support.optional_packages import install
from support.run_folders import loud_run

from sparsedepth.run.publish import provenance
from sparsedepth.store import run_record
from sparsedepth.words.plain_text import without_password

ADDRESS = "postgresql://me_myself:hunter2@host/d"
RUN = SimpleNamespace(info=SimpleNamespace(run_id="1"))


@pytest.mark.parametrize("address", [ADDRESS, "http://me_myself:hunter2@x@host/d", f"a {ADDRESS}?password=hunter2&b=c"])
def test_an_address_is_shown_without_user_and_password(address):
    shown = without_password(address)
    assert "hunter2" not in shown and "me_myself" not in shown and "host/d" in shown


class Client(SimpleNamespace):
    """The client of a tracking server, which remembers what it is told."""

    told: list[str] = []

    def get_experiment_by_name(self, name):
        return None

    def search_runs(self, *given, **named):
        return type("NoRuns", (list,), {"token": ""})()

    def __getattr__(self, name):
        return lambda *given, **named: self.told.append(repr((name, given, named))) or RUN


def test_nothing_that_is_written_has_a_secret(tmp_path, command, monkeypatch):
    for name in ("SPARSEDEPTH_STORAGE", "PGPASSWORD", "HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, ADDRESS)
    run = loud_run(tmp_path)
    (run / "complete").unlink()
    run_record.write_manifest(run, {**MANIFEST, **provenance(run.name, "0" * 12)})
    run_record.finish(run)
    results = tmp_path / "results"
    install(monkeypatch, "mlflow.entities", Metric=lambda *given: given, Param=lambda *given: given, Run=object)
    install(monkeypatch, "mlflow.exceptions", MlflowException=OSError)
    install(monkeypatch, "mlflow.tracking", MlflowClient=Client)
    monkeypatch.delitem(sys.modules, "sparsedepth.trackers.mlflow", raising=False)
    said = [*command("export", run, "-o", tmp_path / "model"), *command("pack", results)]
    said += command("report", results, "-o", tmp_path / "page.html")
    said += [*command("sync", results, "--to", "mlflow", "--at", ADDRESS), *Client.told]
    assert any("log_batch" in text and "n_layers" in text for text in said)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"page.html", "model.safetensors", "sent-mlflow.json"} <= {path.name for path in written}
    for content in [*(path.read_bytes() for path in written), *map(str.encode, said)]:
        assert b"hunter2" not in content and b"me_myself" not in content
