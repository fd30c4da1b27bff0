"""`sparsedepth plan`: what does not fit and what would, long times, what is left, runs as well as sweeps."""

import json
import re
import shutil

import pytest
import yaml
from support.made_up_runs import make_run
from support.tiny_sweep import BASE, definition, sparsedepth

from sparsedepth.cli import calls
from sparsedepth.cli.input_file import single_run_sweep, sweep_definition
from sparsedepth.cli.plan import plan
from sparsedepth.config.load import build
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.files import MARKER
from sparsedepth.plan.estimate import FITS
from sparsedepth.plan.price import price, pricing_setup
from sparsedepth.plan.tasks import Plan
from sparsedepth.run.scratch import Scratch, trunk_folder
from sparsedepth.sweep.results_folder import claim
from sparsedepth.sweep.status import remaining_and_trunks
from sparsedepth.words.plain_text import duration
from sparsedepth.words.sweep import plan_notes

LARGE = {"preset": "llama-1b"}


def write(folder, content):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_long_times_are_days_and_years():
    seconds = (12, 185, 3720, 48 * 3600 - 1, 76 * 3600, 4.5 * 365 * 86400, 39443071890 * 3600)
    texts = ["12s", "3m05s", "1h02m", "47h59m", "3d04h", "4.5 years", "4,502,634 years"]
    assert [duration(one) for one in seconds] == texts


def test_the_shapes_of_six_knobs_are_one_table_of_a_terminals_width(tmp_path, capsys, monkeypatch):
    """Each shape by what it has, but for what every shape with experts has alike."""
    monkeypatch.setenv("COLUMNS", "100")
    space = {"n_layers": [2, 3], "n_kv_heads": [2, 1], "seq_len": [16, 32]}
    plan(definition(tmp_path, space=space, variants=[{}, {"n_experts": 4, "top_k": 2}]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and sum(line.startswith("--") for line in lines) == 1
    assert "n_kv_heads=1, seq_len=32, n_experts=4" in " ".join(" ".join(lines).split())
    assert not any("top_k" in line for line in lines)


def test_of_many_fields_a_shape_names_those_in_which_it_is_not_like_most(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    own = [
        {"loops": 2},
        {"gated_attention": "head"},
        {"window_pattern": "SL", "sliding_window": 8},
        {"stream_skips": True},
    ]
    plan(definition(tmp_path, space={"n_layers": [4]}, variants=[{}, *own]))
    rows = [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    named = {"-", "loops=2", "gated_attention=head", "sliding_window=8, window_pattern=SL", "stream_skips=True"}
    assert named <= {*rows}, rows


def test_the_folder_of_another_sweep_is_refused_as_sweep_refuses_it(tmp_path):
    """Also with --dry-run; a run may go into any sweep's folder, as with `train`."""
    path = definition(tmp_path)
    content = yaml.safe_load(path.read_text())
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({**content, "base": {**content["base"], "lr": 0.5}}))
    refused = {
        sparsedepth(*words, "--out", tmp_path, code=2)
        for words in (("plan", path), ("sweep", path), ("sweep", path, "--dry-run"))
    }
    ((out, err),) = refused
    assert not out and "holds another sweep (base differs in lr), not 'tiny'; keep its base and vary lr under" in err
    assert "(best, plot, effects and recipe read several folders at once: best A B)" in err and err.count("\n") == 1
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({**content, "name": "other"}))
    _, err = sparsedepth("plan", path, "--out", tmp_path, code=2)
    assert "holds another sweep ('other'), not 'tiny'; choose another --out (best" in err
    (tmp_path / "sweep.yaml").write_text(
        yaml.safe_dump({**content, "base": {**content["base"], "jacobian_probes": None}})
    )
    with pytest.raises(ValueError, match="base differs in jacobian_probes"):  # null is a value
        plan(path, out=tmp_path)
    plan(write(tmp_path, BASE), out=tmp_path)


def test_what_fsdp_cannot_shard_is_refused_before_anything_is_priced(tmp_path):
    path = write(tmp_path, {**LARGE, "optimizer": "muon"})
    with pytest.raises(ValueError, match=r"optimizer=.*; use parallel='ddp'"):
        plan(path, on="h100", runtime=["parallel=fsdp"])


@pytest.mark.parametrize(
    ("setting", "reason"), [("attention_kernel=flash", "needs a CUDA device"), ("threads=999", "1 and")]
)
def test_what_a_cpu_does_not_have_is_refused_before_anything_starts(tmp_path, setting, reason):
    path, out = write(tmp_path, {"n_layers": 2}), tmp_path / "out"
    with pytest.raises(ValueError, match=f"{setting.partition('=')[0]}=.*{reason}"):
        plan(path, runtime=[setting], device="cpu")
    with pytest.raises(ValueError, match=f"{setting.partition('=')[0]}=.*{reason}"):
        calls.sweep(base=path, vary=["n_layers=1,2"], out=out, runtime=[setting], device="cpu")
    assert not out.exists()


def test_a_run_beyond_the_memory_of_the_device_names_the_largest_micro_batch_that_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path = write(tmp_path, LARGE)
    plan(path, on="h100", format="json")
    found = json.loads(capsys.readouterr().out)
    size = found["kinds"][0]["micro_batch"]
    sweep = single_run_sweep(path)

    def peak(micro_batch):
        runtime = build(RuntimeConfig, {"micro_batch": micro_batch}, "t")
        return price(Plan(sweep), pricing_setup(runtime, device="h100", workers=1)).memory_bytes

    assert found["shortage"] is None and peak(size) <= FITS * 80e9 < peak(2 * size)
    plan(path, on="h100", workers=2, format="json")
    shared = json.loads(capsys.readouterr().out)
    assert shared["kinds"][0]["micro_batch"] < size and shared["setup"]["place"]["sharing"] == 2
    plan(path, on="h100")
    assert re.search(rf" micro_batch .*\n.*\n.* {size} ", capsys.readouterr().out)
    plan(path, on="h100", runtime=[f"micro_batch={4 * size}"], format="json")
    shortage = json.loads(capsys.readouterr().out)["shortage"]
    assert f"does not fit into 80 GB: use --runtime micro_batch={size}, or leave it out" in shortage
    plan(path, on="h100", runtime=[f"micro_batch={size}"])
    assert "does not fit" not in capsys.readouterr().out
    plan(write(tmp_path, {**LARGE, "n_layers": 300}), on="h100")
    assert "does not fit into 80 GB: even micro_batch=1 does not" in capsys.readouterr().out


def test_workers_are_of_each_gpu(tmp_path, capsys):
    path = definition(tmp_path)
    for options, text in (
        ({}, "on 1 x h100, 2 runs at a time on each"),
        ({"workers": 1}, "on 1 x h100"),
        ({"workers": 8}, "on 1 x h100, 8 runs at a time on each"),
        ({"workers": 2, "gpus": "4"}, "on 4 x h100, 2 runs at a time on each"),
        ({"gpus": "4", "gpus_per_run": 2}, "on 2 x h100, 2 devices per run, 2 runs at a time on each"),
    ):
        plan(path, on="h100", **options)
        assert text + "\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--gpus '0-3' with --on h100 must be how many there are, at least 1"):
        plan(path, on="h100", gpus="0-3")
    with pytest.raises(ValueError, match="--on h100 and --device cpu both name a device"):
        plan(path, on="h100", device="cpu")


def test_what_is_left_is_priced(tmp_path, capsys):
    path = definition(tmp_path)
    sweep, results = sweep_definition(path), tmp_path / "out"
    runs = remaining_and_trunks(Plan(sweep), results)[0]
    assert len(runs) == 4
    for config in runs[:3]:
        make_run(results, config, {"outcome": "ok", "val_loss": 2.0})
    assert (results / "runs" / runs[0].run_id / MARKER).exists()
    assert [run.run_id for run in remaining_and_trunks(Plan(sweep), results)[0]] == [runs[3].run_id]
    plan(path, on="h100", out=results)
    out = capsys.readouterr().out
    assert "total: 4 runs" in out and "remaining: 1 run," in out
    make_run(results, runs[3], {"outcome": "ok", "val_loss": 2.0})
    plan(path, on="h100", out=results)
    assert f"remaining: nothing; every run in {results}" in capsys.readouterr().out


def test_a_longer_run_is_priced_whole_once_its_trunk_is_gone(tmp_path):
    """A finished sweep has deleted it; one that was stopped has not."""
    fields = {"base": {"schedule": "wsd", "warmup_tokens": 128}, "matched": "params_total", "seeds": [0]}
    path = definition(tmp_path, **fields, space={"n_layers": [2], "train_tokens": [128 * 30, 128 * 60]})
    sweep, results = sweep_definition(path), tmp_path / "out"
    claim(results, sweep)
    long, short = remaining_and_trunks(Plan(sweep), results)[0]
    make_run(results, short, {"val_loss": 2.0})
    assert calls.plan(path, out=results).priced.remaining.tokens == long.train_tokens
    trunk_folder(results, long).mkdir(parents=True)
    shared = short.stable_steps * short.batch_tokens
    assert calls.plan(path, out=results).priced.remaining.tokens == long.train_tokens - shared


def test_an_extended_grid_leaves_its_runs_and_the_results_after_them(tmp_path):
    """The lowest of three learning rates is best: two runs at a lower one, and two results where tuning will end."""
    fields = {"space": {"n_layers": [2]}, "tune": {"lr": [0.001, 0.002, 0.004]}, "tuning_seeds": [7, 8]}
    sweep, results = sweep_definition(definition(tmp_path, **fields)), tmp_path / "out"
    for config in remaining_and_trunks(Plan(sweep), results)[0][:6]:
        make_run(results, config, {"val_loss": config.lr})
    left = remaining_and_trunks(Plan(sweep), results)[0]
    assert [(run.lr, run.seed) for run in left[:2]] == [(0.0005, 7), (0.0005, 8)]
    assert [run.seed for run in left[2:]] == [0, 1]


def test_a_task_has_no_text_on_disk(tmp_path, capsys):
    for corpus, told in ((tmp_path, True), ("task:k_hop", False)):
        plan(write(tmp_path, {"n_layers": 2, "corpus": str(corpus)}), on="h100")
        assert (
            "disk: excludes the tokenised text, at most about 4 bytes per byte of it" in capsys.readouterr().out
        ) is told


def test_of_a_search_as_many_runs_are_left_as_are_not_there(tmp_path, capsys):
    searched = {"sampler": "tpe", "n_trials": 3, "space": {"lr": {"low": 1e-3, "high": 1e-2}}}
    sweep = sweep_definition(definition(tmp_path, **searched))
    runs = remaining_and_trunks(Plan(sweep), tmp_path / "out")[0]
    assert len(runs) == 6
    make_run(tmp_path / "out", runs[0], {"outcome": "ok", "val_loss": 2.0})
    assert len(remaining_and_trunks(Plan(sweep), tmp_path / "out")[0]) == 5
    scratch = Scratch(tmp_path / "out", runs[1].run_id)
    scratch.folder.mkdir(parents=True)
    scratch.set_infeasible("too large")
    assert len(remaining_and_trunks(Plan(sweep), tmp_path / "out")[0]) == 4
    plan(tmp_path / "tiny.yaml", out=tmp_path / "out")
    assert "remaining: at most 4 runs," in capsys.readouterr().out


def test_a_window_that_hides_nothing_is_no_setting(tmp_path):
    sweep = sweep_definition(definition(tmp_path, space={"sliding_window": [None, 8, 10_000]}))
    with pytest.raises(ValueError, match=r"sliding_window=10000 hides nothing of seq_len=\d+: .* use null"):
        Plan(sweep)


def test_a_search_passes_over_what_it_excludes_or_cannot_build(tmp_path):
    """The first point has three heads of 16 channels."""
    space = {"n_heads": [3, 2], "lr": {"low": 1e-3, "high": 1e-2}}
    searched = {"sampler": "tpe", "n_trials": 3, "space": space}
    for excluded in ([{"n_heads": 3}], []):
        found = Plan(sweep_definition(definition(tmp_path, **searched, exclude=excluded)))
        assert found.expected == 6 and {config.n_heads for config in found.expected_runs()} == {2}
    searched["space"] = {**space, "n_heads": [3, 5]}
    with pytest.raises(ValueError, match="n_heads=3"):
        Plan(sweep_definition(definition(tmp_path, **searched)))


def test_objectives_are_checked_before_anything_is_priced(tmp_path):
    with pytest.raises(ValueError, match="'steps' has no better direction"):
        plan(definition(tmp_path, objectives=["steps"]), on="h100")


def test_a_run_has_a_price(tmp_path, capsys):
    path = write(tmp_path, {**BASE, "n_layers": 2, "seed": 7})
    plan(path, on="h100")
    priced = capsys.readouterr().out
    assert "total: 1 run," in priced and str(path) in priced
    with pytest.raises(ValueError, match="is a run; --scale"):
        plan(path, scale="micro")
    with pytest.raises(ValueError, match="--on 'abacus' is not one of"):
        plan(path, on="abacus")


def test_plan_says_what_a_sweep_can_detect(tmp_path, capsys):
    """The noise of a pilot, or an assumed one; as a table and as JSON; and what is no design to ask it of."""
    path = definition(tmp_path, space={"depth_scale": ["none", "lns"]}, seeds=[0, 1, 2])
    plan(path, seed_sd=0.05, effect=0.1)
    shown = " ".join(capsys.readouterr().out.split())  # the lines end at the width of the terminal
    assert "noise (standard deviation): 0.05 nat/token between the runs of a setting (assumed)" in shown
    assert "seeds wanted: for an effect of 0.1 nat/token" in shown
    plan(path, seed_sd=0.05, format="json")
    (power,) = json.loads(capsys.readouterr().out)["power"]
    assert (power["setting"], power["n_seeds"], power["n_seeds_wanted"]) == ("depth_scale=lns", 3, None)
    assert 0.18 < power["detectable"] < 0.25  # one setting of three seeds: t (4.30 + 1.06) x .041
    for options, why in (
        ({"effect": 0.1}, "needs the noise between seeds"),
        ({"effect": -0.1, "seed_sd": 0.05}, "must be a size above 0"),
        ({"seed_sd": 0.05, "pilot": tmp_path}, "give one"),
        ({"seed_sd": 0.0}, "must be above 0"),
    ):
        with pytest.raises(ValueError, match=why):
            plan(path, **options)
    with pytest.raises(ValueError, match="is a run; --pilot"):
        plan(write(tmp_path, LARGE), seed_sd=0.05)


def test_a_pilot_tells_the_noise_of_a_sweep(tmp_path, capsys):
    """Losses 1, 2 and 3, 6 of two seeds: less both means +-.5 is left, so 1 with one degree of freedom."""
    path = definition(tmp_path, space={"depth_scale": ["none", "lns"]}, seeds=[0, 1])
    losses = {("none", 0): 1.0, ("none", 1): 2.0, ("lns", 0): 3.0, ("lns", 1): 6.0}
    for config in Plan(sweep_definition(path)).expected_runs():
        make_run(tmp_path / "pilot", config, {"val_loss": losses[config.depth_scale, config.seed]})
    plan(path, pilot=tmp_path / "pilot")
    shown = "".join(capsys.readouterr().out.split())  # a long path has a line of its own
    assert f"1nat/tokenbetweentherunsofasetting(of{tmp_path / 'pilot'},1df" in shown


@pytest.mark.parametrize("corpus", ["missing.txt", "sft:missing.jsonl"])
def test_a_corpus_that_is_not_here_is_refused_as_by_sweep_but_for_another_machine(tmp_path, monkeypatch, corpus):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, {"n_layers": 2, "corpus": corpus})
    with pytest.raises(ValueError, match="correct the path"):
        plan(file)
    with pytest.raises(ValueError, match="correct the path"):
        plan(file, out=tmp_path / "new")
    plan(file, on="h100")


def test_what_is_left_is_priced_though_the_text_is_gone(tmp_path, capsys):
    """The folder has its tokens."""
    file, results = definition(tmp_path), tmp_path / "out"
    results.mkdir()
    plan(file, out=results)
    assert "forecast of val_loss" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "text")
    plan(file, out=results)
    out = capsys.readouterr().out
    assert "remaining: 4 runs," in out and "forecast" not in out


def test_what_a_definition_asks_for_in_vain_is_said(tmp_path, capsys):
    """Of depths 2 and 3 none is 7: nothing is left out, and the axis kept to 7 is varied nowhere. What does leave out a
    cell is not named; 50 draws of two points are two cells."""
    space = {"n_layers": [2, 3], "n_kv_heads": [1, 2]}
    some = {"space": space, "exclude": [{"n_layers": 7}, {"n_layers": 2, "n_kv_heads": 1}]}
    plan(definition(tmp_path, **some))
    said = capsys.readouterr()
    assert said.err == "note: exclude {'n_layers': 7}: no cell has this, so nothing is left out\n" and said.out
    plan(definition(tmp_path, space=space, only={"n_kv_heads": {"n_layers": 7}}))
    assert "only.n_kv_heads {'n_layers': 7}: no cell has this, so n_kv_heads is varied" in capsys.readouterr().err
    met = definition(tmp_path, space=space, only={"n_kv_heads": {"n_layers": 3}})
    assert not [*plan_notes(Plan(sweep_definition(met)))]
    plan(definition(tmp_path, sampler="random", n_trials=50, space={"n_layers": [2, 3]}))
    assert "n_trials=50 gives 2 cells; the others are repeats or excluded" in capsys.readouterr().err
    plan(definition(tmp_path, space=space, constraints={"params_total": 18_000}))
    assert "skipped: {'n_kv_heads': 2, 'n_layers': 3}: params_total is 3.0% above 18000" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "reason"), [(b" \n", "contains no text"), (b"caf\xe9 \n", "is not UTF-8 text")])
def test_a_text_that_sweep_cannot_read_is_refused(tmp_path, content, reason):
    path = definition(tmp_path, base={"corpus": str(tmp_path / "own.txt")})
    (tmp_path / "own.txt").write_bytes(content)
    for command in (("plan", path), ("sweep", path, "-o", tmp_path / "out")):
        _, err = sparsedepth(*command, code=2)
        assert reason in err and err.count("\n") == 1


def test_a_folder_of_models_is_no_place_for_a_sweep(tmp_path):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "models" / "llama" / "model.safetensors").write_bytes(b"")
    for command in ("sweep", "plan"):
        _, err = sparsedepth(command, definition(tmp_path), "-o", tmp_path / "models", code=2)
        assert "models holds a model (llama/model.safetensors), and no sweep; name a new --out" in err
    assert [*(tmp_path / "models").iterdir()] == [tmp_path / "models" / "llama"]


def test_help_promises_only_what_a_command_takes(command):
    """`sweep` refuses --on h100, and `init sweep` --corpus with --like."""
    texts = {name: " ".join(command(*name.split(), "--help")[0].split()) for name in ("sweep", "plan", "init sweep")}
    assert "--on h100" not in texts["sweep"] and "--on h100: how many" in texts["plan"]
    assert "not with --like" in texts["init sweep"]
