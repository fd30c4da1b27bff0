"""The three loops of `analysis/loops`: their last point is what `measure` finds in the checkpoint that they save."""

import importlib.util
import runpy
from pathlib import Path

import pytest

import sparsedepth as sd

LOOPS = Path(__file__).parents[2] / "analysis" / "loops"
SCORES = ("causal_score", "usefulness_loss_increase", "affine_loss_added", "residual_variance_last", "needed_layers")
pytestmark = pytest.mark.filterwarnings("ignore")


def run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len((LOOPS / f"{name}.py").read_text().splitlines()) <= 25
    runpy.run_path(str(LOOPS / f"{name}.py"))
    with sd.open_store("results/mine") as store:
        points = store.sql("select steps, tokens_trained from runs order by steps").rows
        (last,) = store.sql(f"select {', '.join(SCORES)} from runs order by steps desc limit 1").records()
    assert points == tuple((step, 512 * step) for step in (10, 20, 30))
    measured = sd.measure(
        "checkpoint", tokens="held_out.npy", measures=["variance", "usefulness", "causal"], device="cpu"
    ).measurements.summary
    assert {name: last[name] for name in SCORES} == pytest.approx({name: measured[name] for name in SCORES}, rel=1e-6)
    assert last["affine_loss_added"] != 0


def test_a_plain_loop(tmp_path, monkeypatch):
    run("plain", tmp_path, monkeypatch)


def test_the_trainer_of_transformers(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    run("trainer", tmp_path, monkeypatch)


def test_the_trainer_of_lightning(tmp_path, monkeypatch):
    if not importlib.util.find_spec("lightning"):
        pytest.skip("Lightning is not installed: pip install --no-deps lightning lightning-utilities torchmetrics")
    run("lightning_trainer", tmp_path, monkeypatch)


def test_the_example_of_a_vit_prints_variance_with_and_without_lns(tmp_path, monkeypatch, capsys):
    path = str(LOOPS / "vit.py")
    monkeypatch.setattr("sys.argv", [path, "--steps", "4", "--layers", "3", "--out", str(tmp_path / "vit")])
    runpy.run_path(path, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["none", "lns"]
    printed = [[float(value) for value in line.split()[1:]] for line in lines]
    with sd.open_store(tmp_path / "vit") as store:
        sql = "select value from layers join runs using (run_id) where metric = 'residual_variance' and step = 4"
        for scale, values in zip(("none", "lns"), printed, strict=True):
            rows = store.sql(f"{sql} and depth_scale = '{scale}' and layer > 0 order by layer").rows
            assert values == pytest.approx([value for (value,) in rows], rel=1e-2) and len(values) == 3
        assert store.sql("select count(*), count(needed_layers), count(d_model) from runs").rows == ((8, 8, 8),)
    assert len(Path(path).read_text().splitlines()) <= 60
