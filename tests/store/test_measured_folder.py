"""Records of measured models: whole or absent, and in one table with trained runs."""

import dataclasses
import math
import os
import shutil
import warnings

import pandas as pd
import pytest
from support.made_up_runs import MANIFEST, make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.plots.models import models
from sparsedepth.plots.runs import measured_models
from sparsedepth.recipe.choose import derive
from sparsedepth.store import run_record
from sparsedepth.store.best import best
from sparsedepth.store.checksums import DamagedRun, files_in
from sparsedepth.store.connection import open_store
from sparsedepth.store.run_record import check_place, read_record, read_run, save_measured, verify
from sparsedepth.store.saved_queries import answered
from sparsedepth.store.subject import MeasuredModel
from sparsedepth.words.best import answer

SIZES = {"n_layers": 2, "d_model": 1024, "n_heads": 16, "n_kv_heads": 8, "n_experts": 0, "vocab_size": 151_936}
HASHES = {"weights_hash": "0" * 12, "data_hash": "1" * 12, "seq_len": 128}
NAMES = {"model": "Qwen/Qwen3-0.6B", "family": "qwen3", "dtype": "bfloat16"}
QWEN = MeasuredModel(**NAMES, **SIZES, **HASHES, params_total=596_049_920)
TRAINED = [RunConfig(n_layers=2, weight_decay=decay, seed=seed) for decay in (0.1, 0.3) for seed in (0, 1)]


def profile(scale):
    return [
        {"step": 0, "layer": layer, "metric": metric, "value": scale * layer, "n": 8}
        for layer in (1, 2)
        for metric in ("residual_variance", "causal_effect", "affine_loss_increase")
    ]


def write(place, model=QWEN, loss=2.0):
    save_measured(place, model, {"val_loss": loss, "usefulness": 0.5}, MANIFEST, {"layers": profile(loss), "pairs": []})
    return place


@pytest.fixture
def results(tmp_path):
    for config in TRAINED:
        loss = 3.0 + config.weight_decay + 0.01 * config.seed
        make_run(tmp_path, config, {"val_loss": loss, "usefulness": 0.2}, layers=profile(loss))
    write(tmp_path / "models" / "qwen")
    return tmp_path


def test_needed_layers_of_two_tokenizers_are_compared_at_an_equal_rise(tmp_path):
    """Three blocks add .02, .06 and .2 nat/token, a fourth .5 +- 1. A token has 2 bytes or 10, so that .01 nat/byte are
    .02 or .1 nat/token: two blocks are above the first, one above the second. In nat/token both need three."""
    added = {1: (0.02, 0.01), 2: (0.06, 0.05), 3: (0.2, 0.1), 4: (0.5, -0.5)}
    layers = [
        {"step": 0, "layer": layer, "metric": f"affine_loss_added{end}", "value": value, "n": 8}
        for layer, values in added.items()
        for end, value in zip(("", "_lo"), values, strict=True)
    ]
    for name, length, known in (("short", 2, {}), ("long", 10, {}), ("tokens", 2, {"val_bits_per_byte": None})):
        model = QWEN.model_copy(update={"model": name, "n_layers": 4, "dtype": "float32", "weights_hash": name})
        summary = {"val_loss": 3.0, "needed_layers": 3.0, "val_bits_per_byte": 3 / math.log(2) / length, **known}
        save_measured(tmp_path / "models" / name, model, summary, MANIFEST, {"layers": layers, "pairs": []})
    with open_store(tmp_path) as store:
        found = answered(store, "models")
        drawn = models(store).page()
    assert "2 models. Height: number of blocks" in drawn.get_supxlabel() and "rise: 1." in drawn.get_supxlabel()
    rows = {row["model"]: row for row in found.result.records()}
    assert {name: row["needed_equal_rise"] for name, row in rows.items()} == {"short": 2, "long": 1, "tokens": None}
    assert [*rows] == ["short", "long", "tokens"], "ranked by it, unknown ones last"
    assert {row["needed_equal_rise_lo"] for row in rows.values()} == {None}, "of old records"
    assert {row["needed_layers"] for row in rows.values()} == {3.0}
    assert "more than 0.01 nat/byte" in found.query.explains


def test_models_of_one_last_name_stay_apart_and_none_is_a_baseline(tmp_path):
    sizes = {"params_total": 5}
    for name, layers in (("me/tiny", 2), ("you/tiny", 3), ("you/large", 2)):
        model = QWEN.model_copy(update={"model": name, "n_layers": layers, "weights_hash": name})
        summary = {"val_loss": 2.0 + layers / 10, "needed_layers": 2.0, **sizes}
        place = tmp_path / "models" / name.replace("/", "-")
        save_measured(place, model, summary, MANIFEST, {"layers": profile(1.0), "pairs": []})
        sizes = {"params_total": 10}
    with open_store(tmp_path) as store:
        assert sorted(measured_models(store)["name"]) == ["large", "me/tiny", "you/tiny"]
        texts = {text.get_text() for text in models(store).page().axes[0].texts}
        ranking = best(store)
    assert texts == {"me/tiny, large", "you/tiny"} or texts == {"large, me/tiny", "you/tiny"}
    said, of_one = (" ".join(answer(of).split()) for of in (ranking, dataclasses.replace(ranking, top=1, n_cells=4)))
    assert "baseline" not in said and "params: relative to you/large with 2 layers (10" in said
    assert not any("note" in row and row["note"] for row in ranking.table.records())
    assert "(top 1 and you/large)" in of_one


def test_what_is_written_is_read(tmp_path):
    place = write(tmp_path / "models" / "any name")
    read = read_record(place)
    assert read.subject == QWEN
    assert read.run_id == QWEN.run_id == files_in(place).marker.run_id
    assert read.summary["params_total"] == QWEN.params_total and read.summary["outcome"] == "ok"
    assert read.tables["layers"].num_rows == 6 and read.tables["pairs"].num_rows == 0
    assert sorted(os.listdir(place.parent)) == ["any name"]
    verify(place)
    with pytest.raises(ValueError, match="measured model, not a run"):
        read_run(place)


def test_the_name_of_the_record_hangs_on_every_fact():
    for change in ({"weights_hash": "2" * 12}, {"data_hash": "2" * 12}, {"seq_len": 64}, {"model": "x"}):
        assert QWEN.model_copy(update=change).run_id != QWEN.run_id


def test_a_store_that_mixes_them(results):
    with open_store(results) as store:
        assert store.sql("SELECT count(*), count(model), count(lr), count(seed) FROM runs").rows == ((5, 1, 4, 4),)
        known = "n_layers, d_model, n_heads, n_kv_heads, n_experts, vocab_size, seq_len, params_total, outcome, top_k"
        answer = store.sql(f"SELECT {known} FROM runs WHERE model = 'Qwen/Qwen3-0.6B' AND cell_id = 'c-' || run_id")
        assert answer.rows == ((2, 1024, 16, 8, 0, 151_936, 128, 596_049_920, "ok", None),)
        assert store.sql("SELECT weight_eps FROM runs WHERE model IS NOT NULL").rows == (("[0.001, 0.0001, 0.01]",),)
        rows = store.sql("SELECT count(*) FROM layers JOIN runs USING (run_id) WHERE model LIKE 'Qwen%'").rows
        assert rows == ((6,),)


def test_it_is_a_cell_of_its_own(results):
    with open_store(results) as store:
        table = best(store).table
        assert table.columns[:3] == ("rank", "cell_id", "model")
        assert table.columns[-4:] == ("val_loss", "lo", "hi", "note")
        assert "weight_decay" in table.columns and "lr" not in table.columns  # lr varies in no trained run
        assert [row[2] for row in table.rows] == [QWEN.model, None, None]
        assert [row[-4] for row in table.rows] == pytest.approx([2.0, 3.105, 3.305])
        assert [row[-5] for row in table.rows] == [1, 2, 2]
        only = best(store, where="model IS NULL").table
        assert "model" not in only.columns and len(only.rows) == 2


def test_models_measured_on_different_tokens_are_told(tmp_path):
    """Also in one folder; equal tokens, and a model whose record does not state them, say nothing."""
    for name, data_hash in {"a": "1" * 12, "b": "1" * 12, "c": "2" * 12, "unknown": None}.items():
        model = QWEN.model_copy(update={"model": name})
        save_measured(tmp_path / name, model, {"val_loss": 2.0}, {**MANIFEST, "data_hash": data_hash}, {})
    with warnings.catch_warnings(action="error"):
        open_store(*(tmp_path / name for name in ("a", "b", "unknown"))).close()
    with pytest.warns(UserWarning, match=r"different tokens, such as a \(\S*/a\) and c \(\S*/c\): "):
        open_store(tmp_path).close()


def test_it_changes_no_effect_and_no_recipe(results):
    with open_store(results) as store:
        mixed = store.frame("SELECT * FROM runs ORDER BY run_id")
        alone = store.frame("SELECT * FROM runs WHERE model IS NULL ORDER BY run_id")
    of_mixed, of_alone = (effects_frame(cells_of(runs, "val_loss")) for runs in (mixed, alone))
    pd.testing.assert_frame_equal(of_mixed, of_alone)
    assert of_alone["setting"].nunique() == 1
    assert derive(mixed) == derive(alone)
    (tested,) = derive(mixed).candidates
    assert tested.effect.seeds == 2 and tested.effect.estimate == pytest.approx(0.2)


def test_a_store_of_measured_models_alone(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", QWEN.model_copy(update={"model": "other"}), 2.5)
    with open_store(tmp_path) as store:
        ranking = best(store)
        assert [row[2] for row in ranking.table.rows] == [QWEN.model, "other"]
        assert "effects" not in answer(ranking) and "recipe" not in answer(ranking)  # both would refuse
        recipe = derive(store.frame("SELECT * FROM runs"))
    assert recipe.abstained and "no finished run" in recipe.abstained


@pytest.mark.parametrize("name", ["model.json", "summary.json", "layers.parquet"])
def test_damage_is_noticed(results, name):
    place = results / "models" / "qwen"
    content = (place / name).read_bytes()
    (place / name).write_bytes(content.replace(content[40:41], bytes([content[40] ^ 1]), 1))
    with pytest.raises(DamagedRun, match=name.replace(".", r"\.")):
        open_store(results)


def test_a_record_is_of_one_thing(results):
    place = results / "models" / "qwen"
    (place / "complete").unlink()
    shutil.copy(run_record.run_folder(results, TRAINED[0].run_id) / "config.yaml", place)
    with pytest.raises(ValueError, match="a record has one of these"):
        run_record.finish(place)


def test_a_crash_leaves_nothing_and_a_failure_says_why(tmp_path, monkeypatch):
    def crash(folder, place):
        raise KeyboardInterrupt

    place = tmp_path / "models" / "m"
    place.mkdir(parents=True)  # an empty folder may be filled
    with monkeypatch.context() as patched:
        patched.setattr(run_record, "finish", crash)
        with pytest.raises(KeyboardInterrupt):
            write(place)
    assert os.listdir(place.parent) == ["m"] and os.listdir(place) == []
    write(place)
    with pytest.raises(ValueError, match="not an empty folder"):
        check_place(place)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "link", tmp_path / "file", tmp_path / "file" / "m", tmp_path / "runs" / "m"):
        with pytest.raises(ValueError, match="name a") as caught:
            check_place(bad)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "nowhere").exists()
