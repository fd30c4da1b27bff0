"""`analysis/depth_over_training.py`: its table by hand, and a training of four steps that goes on where it ended."""

import math

import depth_over_training
import pandas as pd
import pytest

import sparsedepth as sd


def test_the_table_pairs_seeds_and_compares_variance_as_a_ratio():
    """Three seeds at one step: needed layers differ by -2, -4 and -3, with 95% +- 4.303 / sqrt 3; variance by the
    factors 1/4, 1/16 and 1/8."""
    runs = pd.DataFrame(
        {
            "steps": 25, "depth_scale": ["none", "lns"] * 3, "seed": [0, 0, 1, 1, 2, 2], "val_loss": 2.0,
            "usefulness": 0.0, "causal_score": 0.5, "needed_layers": [8.0, 6.0, 10.0, 6.0, 9.0, 6.0],
            "residual_variance_last": [4.0, 1.0, 16.0, 1.0, 8.0, 1.0],
        }
    )  # fmt: skip
    lonely = runs.iloc[:1].assign(seed=3, needed_layers=99.0)  # no LNS at this seed
    rows = depth_over_training.table(pd.concat([runs, lonely]))
    found = rows.set_index("score")
    needed = found.loc["needed_layers"]
    assert (needed["baseline"], needed["lns"], needed["effect"], needed["seeds"]) == (9.0, 6.0, -3.0, 3)
    assert needed["lo"] == pytest.approx(-3 - 4.303 / 3**0.5, abs=1e-3)
    variance = found.loc["residual_variance_last"]
    assert math.isclose(variance["effect"], 1 / 8) and math.isclose(variance["baseline"], 8)
    assert [*found.index] == [*depth_over_training.SCORES]
    (row,) = depth_over_training.shown(rows).to_dict("records")
    assert row["needed_layers"] == "9" and row["LNS: needed_layers"] == "-3 (-5.5 to -0.52)"
    assert row["LNS: residual_variance_last"].startswith("x0.1") and row["LNS: val_loss"] == "+0 in each"


def test_a_training_is_watched_at_its_steps_and_measured_once(tmp_path, monkeypatch, capsys):
    small = {
        "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "seq_len": 32, "batch_tokens": 64,
        "train_tokens": 256, "warmup_tokens": 64, "observe_every": 2, "corpus": str(tmp_path / "text.txt"),
    }  # fmt: skip
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} times {n} is {n * n}, as one can see." for n in range(2000)))
    monkeypatch.setattr(depth_over_training, "BASE", depth_over_training.BASE | small)
    monkeypatch.setattr(depth_over_training, "STEPS", (2, 4))
    monkeypatch.setattr(depth_over_training, "HELD_OUT", 16)
    for _ in range(2):
        depth_over_training.main([str(tmp_path / "out"), "--seeds", "0"])
    assert capsys.readouterr().out.count("step 2 of 4") == 2  # of both settings, once each
    with sd.open_store(tmp_path / "out") as store:
        rows = store.sql("select depth_scale, seed, steps, tokens_trained, lr from runs order by all").rows
    assert rows == tuple((scale, 0, step, 64 * step, 0.0015) for scale in ("lns", "none") for step in (2, 4))


def test_a_folder_without_points_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no complete run"):
        depth_over_training.main([str(tmp_path), "--only-read"])
