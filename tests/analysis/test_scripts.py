"""Every script in analysis/ answers on a store that has its rows, and says in one line when it has none."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from script import run_script
from support import forked_commands
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth.config.run import RunConfig

FOLDER = Path(__file__).parents[2] / "analysis"
SCRIPTS = sorted(
    {path.name for path in FOLDER.glob("*.py")}
    - {"toy.py", "script.py", "estimate.py", "findings.py", "fine_tuning.py", "depth_over_training.py"}
)

CELLS = [
    *({}, {"n_layers": 4}, {"weight_decay": 0.3}, {"seq_len": 128}, {"seq_len": 128, "weight_decay": 0.3}),
    *({"n_kv_heads": 1}, {"n_experts": 8, "top_k": 2}, {"d_ff": 704}, {"depth_scale": "lns"}),
]

EXPECTED = {
    "knob.py": "val_loss_common 2 -0.3 -0.3",
    "depth_exponent.py": "val_loss_common of the baseline -0.1 (95% interval ",
    "calibration.py": "needed_layers: follows (follows in 1 of 1, does not in 0)\n    hops, 4 layers: follows; tau +1 ",
    "depth_knobs.py": "-0.8000 -0.8020 -0.7980 0.1111 nothing",
    "theorems.py": "3 runs, over layers 1 to 4: slope +1.01 (95% interval +0.985 to +1.03) over 3 seeds",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One cell after the other with a loss 0.1 lower and everything else moving along; three seeds each, whose
    scatter differs by cell."""
    folder = tmp_path_factory.mktemp("results")
    for i, cell in enumerate(CELLS):
        for seed in range(3):
            quality = i + 0.001 * (seed - 1) * (1 + i)
            summary = dict.fromkeys(("val_loss", "val_loss_common"), 3 - 0.1 * quality)
            summary |= {"usefulness": 0.1 + 0.1 * quality, "residual_variance_last": 100 / (1 + quality)}
            summary |= {"weight_sparsity": 0.05 * quality, "tokens_trained": 2_097_152}
            config = config_of(**{"n_layers": 2, "seq_len": 64, "eval_seq_len": 64, **cell}, seed=seed)
            place = {"step": config.n_steps, "metric": "residual_variance", "n": 10}
            layers = [
                {**place, "layer": layer, "value": 2.0 * layer ** (1 + 0.01 * seed)}
                for layer in range(1, config.n_layers + 1)
            ]
            make_run(folder, config, summary, layers=layers)
    names = ("comparison", "n_layers", "seed", "need", "accuracy", "run_id", "score", "value")
    rows = [("hops", 4, seed, need, 1.0, f"r{seed}", "needed_layers", need) for seed in range(3) for need in (2, 3, 4)]
    pq.write_table(pa.table(dict(zip(names, zip(*rows, strict=True), strict=True))), folder / "by_need.parquet")
    return folder


@pytest.fixture(scope="module")
def nothing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nothing")
    make_run(folder, RunConfig(), {"val_loss": 3.0})
    return folder


def run(script, *arguments):
    """Its exit code, output and errors."""
    knob = ["seq_len"] if script == "knob.py" else []
    return forked_commands.call([*map(str, arguments), *knob], os.environ, program=str(FOLDER / script))


def test_every_script_is_tried():
    assert set(SCRIPTS) == set(EXPECTED)
    by_hand = [name for name in SCRIPTS if "run_script(" not in (FOLDER / name).read_text()]
    assert not by_hand, "these die of a pipe whose reader has gone"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_answers(script, results):
    code, out, err = run(script, results)
    assert (code, err) == (0, "")
    assert out.startswith(("Claimed: ", "seq_len: effects against the baseline"))
    assert " ".join(EXPECTED[script].split()) in " ".join(out.split())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_rows_says_so_in_one_line(script, nothing):
    code, out, err = run(script, nothing)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "runs" in err


def test_a_closed_pipe_is_silent(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", os.fdopen(writer, "w"))
    with pytest.raises(SystemExit, match="1"):
        run_script(lambda paths: print("x\n" * 100_000))
    assert not capsys.readouterr().err
