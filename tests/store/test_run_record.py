import json
import math
import os
import random
import shutil

import pytest
from hypothesis import given, settings, strategies as st
from support.made_up_runs import make_run

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig, stored_config
from sparsedepth.files import write_json
from sparsedepth.store import checksums, run_record
from sparsedepth.store.checksums import DamagedRun, write_marker
from sparsedepth.store.connection import open_store
from sparsedepth.store.schema import TABLES

CONFIG = RunConfig(n_layers=2, lr=1e-5, seed=3, weight_eps=(0.5, 0.25))
LAYERS = [
    {"step": 10, "layer": 1, "metric": "residual_variance", "value": 1.5, "n": 64},
    {"step": 10, "layer": 2, "metric": "weight_sparsity@0.001", "value": 0.25},
]


@pytest.fixture
def run(tmp_path):
    return make_run(
        tmp_path,
        CONFIG,
        {"val_loss": 3.25, "steps": 10},
        layers=LAYERS,
        curves=[{"step": 0, "train_loss": 5.5}, {"step": 10, "train_loss": math.nan, "lr": math.inf}],
        heads=[{"step": 10, "layer": 1, "head": 2, "metric": "attention_sparsity@0.001", "value": 0.5, "n": 8}],
        pairs=[{"step": 10, "layer": 1, "other_layer": 2, "metric": "causal_effect", "value": 0.125, "n": 8}],
    )


def test_what_is_written_is_read(run):
    read = run_record.read_run(run)
    assert read.run_id == CONFIG.run_id == run.name
    assert read.config == CONFIG
    assert read.summary["val_loss"] == 3.25 and read.summary["outcome"] == "ok"
    assert set(read.summary) == {quantity.name for quantity in quantities.RUNS}
    assert read.tables["layers"].to_pylist() == [LAYERS[0], {**LAYERS[1], "n": None}]
    assert read.tables["pairs"].num_rows == read.tables["heads"].num_rows == 1
    run_record.verify(run)


def test_missing_nan_and_infinite_values_are_null(run, tmp_path):
    last = run_record.read_run(run).tables["curves"].to_pylist()[1]
    assert last["step"] == 10 and all(value is None for name, value in last.items() if name != "step")
    facts = {"seconds": math.inf, "deep": [{"x": -math.inf}]}
    other = make_run(tmp_path / "other", CONFIG, {"val_loss": math.nan}, manifest=facts)
    assert json.loads((other / "summary.json").read_text())["val_loss"] is None
    assert run_record.read_run(other).manifest == {"seconds": None, "deep": [{"x": None}]}


def test_a_run_without_tables_has_empty_ones(tmp_path):
    read = run_record.read_run(make_run(tmp_path, CONFIG, {"outcome": "diverged"}))
    assert {name: len(rows) for name, rows in read.tables.items()} == dict.fromkeys(TABLES, 0)


def test_the_same_run_is_the_same_bytes(tmp_path):
    first, second = (make_run(tmp_path / name, CONFIG, {"val_loss": 3.0}, layers=LAYERS) for name in "ab")
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


def test_a_complete_folder_never_changes(run):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for write in (
        lambda: run_record.write_config(run, CONFIG),
        lambda: run_record.write_manifest(run, {}),
        lambda: run_record.write_summary(run, {"outcome": "ok"}),
        lambda: run_record.write_table(run, "layers", LAYERS),
        lambda: run_record.finish(run),
    ):
        with pytest.raises(ValueError, match="complete and never changes"):
            write()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_finish_needs_every_file_and_the_right_name(tmp_path):
    folder = run_record.run_folder(tmp_path, "0123456789ab")
    folder.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"without config\.yaml"):
        run_record.finish(folder)
    run_record.write_config(folder, CONFIG)
    run_record.write_manifest(folder, {})
    run_record.write_summary(folder, {"outcome": "ok"})
    with pytest.raises(ValueError, match=f"is run {CONFIG.run_id}"):
        run_record.finish(folder)
    assert not run_record.is_complete(folder)
    with pytest.raises(ValueError, match="no complete run"):
        run_record.read_run(folder)


def test_every_file_is_on_disk_before_the_marker_says_so(run, monkeypatch):
    """Else a machine that loses power could leave a marker beside files that were never written."""
    order = []
    monkeypatch.setattr(checksums, "sync", lambda path: order.append(path.name))
    monkeypatch.setattr(checksums, "write_bytes", lambda path, content: order.append(path.name))
    names = {path.name for path in run.iterdir()} - {"complete"}
    write_marker(run, CONFIG.run_id, run_record.FILES)
    *flushed, last = order
    assert last == "complete" and {*flushed} == {*names, run.name} and flushed[-1] == run.name


def test_finish_refuses_a_link(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    run = make_run(tmp_path, CONFIG, {})
    (run / "complete").unlink()
    (run / "model.safetensors").symlink_to(secret)
    with pytest.raises(ValueError, match="is a link"):
        run_record.finish(run)


def test_rows_that_cannot_be_meant_fail_at_once(tmp_path):
    row = LAYERS[0]
    for rows, says in (
        ([{**row, "valeu": 1}], "no column 'valeu'"),
        ([{**row, "metric": "weight_sparsty@0.1"}], "did you mean 'weight_sparsity'"),
        ([row, row], "two rows at"),
        ([{**row, "step": None}], "must be complete"),
    ):
        with pytest.raises(AssertionError, match=says):
            run_record.write_table(tmp_path, "layers", rows)
    with pytest.raises(AssertionError, match="did you mean 'val_loss'"):
        run_record.write_summary(tmp_path, {"outcome": "ok", "val_los": 1.0})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run_id", ["../../etc", "/etc/passwd", "a" * 4096, "0123456789a\0", "", "0123456789AB"])
def test_a_run_id_is_no_path(tmp_path, run_id):
    with pytest.raises(ValueError, match="12 hex digits"):
        run_record.run_folder(tmp_path, run_id)


def test_absent_weights_are_no_damage_and_changed_ones_are(tmp_path):
    run = make_run(tmp_path, CONFIG, {})
    (run / "complete").unlink()
    (run / "model.safetensors").write_bytes(b"weights")
    run_record.finish(run)
    run_record.verify(run)
    (run / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(DamagedRun, match=r"model\.safetensors"):
        run_record.verify(run)
    (run / "model.safetensors").unlink()
    run_record.verify(run)
    run_record.read_run(run)


def test_damage_names_folder_file_and_fix(run):
    (run / "summary.json").write_text("{}")
    with pytest.raises(DamagedRun, match=rf"{run.name}.*summary\.json.*copy the folder again") as caught:
        run_record.read_run(run)
    assert (caught.value.folder, caught.value.name) == (run, "summary.json")


def test_added_removed_and_linked_files_are_damage(run, tmp_path):
    heads, elsewhere = run / "heads.parquet", tmp_path / "elsewhere"
    shutil.move(heads, elsewhere)
    with pytest.raises(DamagedRun, match="is missing"):
        run_record.verify(run)
    heads.symlink_to(elsewhere)  # the same bytes, from outside the folder
    for check in (run_record.verify, run_record.read_run):
        with pytest.raises(DamagedRun, match=r"heads\.parquet"):
            check(run)
    heads.unlink()
    shutil.move(elsewhere, heads)
    run_record.verify(run)
    (run / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedRun, match="was added"):
        run_record.verify(run)


def test_a_renamed_folder_is_noticed(run):
    with pytest.raises(DamagedRun, match=r"holds run [0-9a-f']{14} under another name; rename it to that"):
        run_record.read_run(run.rename(run.with_name("ba9876543210")))


def test_every_flipped_bit_and_every_truncation_is_detected(run):
    choose = random.Random(0)
    names = sorted(path.name for path in run.iterdir())
    for trial in range(200):
        path = run / choose.choice(names)
        whole = path.read_bytes()
        place = choose.randrange(len(whole))
        flipped = whole[:place] + bytes([whole[place] ^ 1 << choose.randrange(8)]) + whole[place + 1 :]
        path.write_bytes(whole[:place] if trial % 2 else flipped)
        with pytest.raises(DamagedRun):
            run_record.read_run(run)
        path.write_bytes(whole)
    run_record.verify(run)


@pytest.mark.parametrize(
    "marker",
    ["", "[]", "{}", '{"files": 3}', '{"files": {"../../x": {"sha256": "", "bytes": 1}}}', "[" * 100_000, "\x00"],
)
def test_a_foreign_marker_is_damage(run, marker):
    (run / "complete").write_text(marker)
    with pytest.raises(DamagedRun, match="complete"):
        run_record.read_run(run)


def test_a_fifo_in_place_of_a_file_does_not_hang(run):
    (run / "summary.json").unlink()
    os.mkfifo(run / "summary.json")
    for check in (run_record.verify, run_record.read_run):
        with pytest.raises(DamagedRun, match=r"summary\.json"):
            check(run)


@settings(max_examples=30)
@given(
    lr=st.floats(1e-12, 1e3),
    eps=st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=3, unique_by=lambda value: f"{value:.6g}"),
    corpus=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
)
def test_any_config_survives_its_yaml(tmp_path_factory, lr, eps, corpus):
    config = RunConfig(lr=lr, weight_eps=tuple(eps), corpus=corpus)
    run = make_run(tmp_path_factory.mktemp("results"), config, {})
    assert run_record.read_run(run).config == config


def test_a_run_with_a_measure_of_an_earlier_version_is_read(tmp_path):
    """Its id is the one that version gave it. A new run cannot name the measure."""
    values = {"measures": ["loss", "erasure", "causal_maximum", "weight_updates"], "n_kv_heads": 4, "seed": 0}
    config = stored_config(values, "config.yaml")
    assert config.run_id == "428ef65475a4" and "erasure" in config.measures
    folder = run_record.run_folder(tmp_path, config.run_id)
    folder.mkdir(parents=True)
    run_record.write_config(folder, config)
    run_record.write_manifest(folder, {"device": "cpu"})
    write_json(folder / "summary.json", {"outcome": "ok", "val_loss": 3.0, "erasure_effect": 0.2})
    write_marker(folder, config.run_id, run_record.FILES)
    assert run_record.read_run(folder).config == config
    with open_store(tmp_path) as store:
        assert store.sql("select run_id, val_loss from runs").rows == (("428ef65475a4", 3.0),)
    with pytest.raises(ValueError, match="released_code"):
        RunConfig(measures=("erasure",))
    of_plugin = stored_config({"measures": ["loss", "measure_of_a_plugin"]}, "config.yaml")
    assert of_plugin.measures == ("loss", "measure_of_a_plugin")
    for measures in ([["loss"]], ["loss", 1], []):
        with pytest.raises(ValueError, match="measures"):
            stored_config({"measures": measures}, "config.yaml")
