"""Training from a model's weights on prompts and answers: the loss by hand, before and after, resumed, and refused."""

import json
import os
import signal
import time

import pytest
import torch
import yaml
from reference import answer_loss
from safetensors.torch import load_file
from support.run_folders import break_weights, loud_run
from support.tiny_sweep import CPU, sparsedepth, start

from sparsedepth.config.load import build
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.data.sequences import open_source
from sparsedepth.data.tokenizer import ByteTokenizer
from sparsedepth.exchange.export import export
from sparsedepth.exchange.start import open_start
from sparsedepth.model.decoder import Decoder
from sparsedepth.run.execute import execute
from sparsedepth.run.train_and_measure import Options
from sparsedepth.store.connection import open_store
from sparsedepth.store.run_record import read_run
from sparsedepth.train.loop import Interrupted

PAIRS = [{"prompt": f"{n} + {n}?", "answer": f"{2 * n}"} for n in range(60)]
TUNING = {
    "seq_len": 32, "batch_tokens": 128, "train_tokens": 128 * 12, "lr": 3e-3, "val_fraction": 0.2, "val_tokens": 64,
    "measure_tokens": 64, "fit_tokens": 64, "precision": "fp32", "measures": ["loss", "causal"], "log_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run to start from, and pairs."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return folder, loud_run(folder, depth_scale="lns", seq_len=32)


def tuned(place, **fields):
    """The start, and the config of a run that starts there."""
    folder, run = place
    begin = open_start(str(run))
    values = begin.values({**TUNING, "corpus": f"sft:{folder / 'pairs.jsonl'}", **fields})
    return begin, build(RunConfig, values, "test")


def test_the_first_loss_is_that_of_each_pair_by_itself(place, tmp_path):
    begin, config = tuned(place)
    made = read_run(execute(config, tmp_path / "results", Options(runtime=CPU, start=begin)))
    model = Decoder(config)
    begin.load_into(model)
    batch = open_source(config, tmp_path / "results" / "data").batch(config, 0)
    inside = _inside(batch.inputs)
    assert sum(len(answer) for _, answer in inside) == batch.n_scored
    assert made.tables["curves"]["train_loss"][0].as_py() == pytest.approx(answer_loss(model, inside), rel=1e-5)


def _inside(inputs):
    """The pairs that stand in some row."""
    known = [ByteTokenizer().encode([pair["prompt"], " " + pair["answer"]]) for pair in PAIRS]
    return [(one, [*other, 256]) for one, other in known if any(_holds(row.tolist(), one, other) for row in inputs)]


def _holds(row, prompt, answer):
    """Whether a row holds this document, from its beginning or behind another's end."""
    ids = [*prompt, *answer]
    places = [place for place in range(len(row) - len(ids) + 1) if row[place : place + len(ids)] == ids]
    return any(place == 0 or row[place - 1] == 256 for place in places)


def test_before_and_after_stand_in_one_store(place, tmp_path):
    begin, config = tuned(place)
    results = tmp_path / "results"
    made = read_run(execute(config, results, Options(runtime=CPU, start=begin)))
    with open_store(results) as store:
        (before,), (after,) = (
            store.sql(f"select val_loss, causal_score, run_id from runs where model is {known} null").rows
            for known in ("not", "")
        )
        steps = store.sql(f"select distinct step from layers where run_id = '{before[2]}'").rows
    assert after[0] < before[0] and after[1] != before[1] and steps == ((0,),)
    untouched = Decoder(config)
    begin.load_into(untouched)
    held_out = open_source(config, results / "data").held_out(32, 64)
    assert before[0] == pytest.approx(answer_loss(untouched, _inside(held_out.inputs)), rel=1e-4)
    assert made.manifest["start"] == {
        "model": str(place[1]), "family": "sparsedepth", "run_id": place[1].name,
        "weights_hash": begin.loaded.weights_hash,
    }  # fmt: skip
    exported = export(made.folder, tmp_path / "exported")
    assert exported.family == "llama" and any("one at a time" in note for note in exported.notes)


def test_training_begins_with_the_weights_of_its_start_and_a_stopped_run_ends_bit_equal(place, tmp_path):
    begin, config = tuned(place, lr=1e-12, train_tokens=256, measures=["loss"], weight_decay=0.0)
    made = execute(config, tmp_path / "still", Options(runtime=CPU, start=begin))
    start_weights = load_file(place[1] / "model.safetensors")
    for name, weight in load_file(made / "model.safetensors").items():
        assert torch.allclose(weight, start_weights[name], atol=1e-9), name
    begin, config = tuned(place, measures=["loss"])
    whole = execute(config, tmp_path / "whole", Options(runtime=CPU, start=begin))
    phases = []
    asked = {"report": lambda phase, *_: phases.append(phase), "stop": lambda: phases.count("training") == 5}
    with pytest.raises(Interrupted):
        execute(config, tmp_path / "parts", Options(runtime=CPU, start=begin, **asked))
    assert list((tmp_path / "parts" / "work").glob("*/checkpoints/step-*.json"))
    parts = execute(config, tmp_path / "parts", Options(runtime=CPU, start=begin))
    weights = load_file(whole / "model.safetensors")
    assert all(torch.equal(weight, weights[name]) for name, weight in load_file(parts / "model.safetensors").items())


def test_a_tokenizer_that_the_start_learned_goes_with_it(tmp_path):
    run = loud_run(tmp_path, seq_len=32, tokenizer="bpe:270", vocab_size=270)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    begin, config = tuned((tmp_path, run), measures=["loss"])
    folder = execute(config, tmp_path / "tuned", Options(runtime=CPU, start=begin))
    assert (config.tokenizer, config.eod) == ("bpe:270", 0)
    (ours,) = (tmp_path / "tuned" / "data").glob("*/tokenizer.json")
    (theirs,) = (tmp_path / "results" / "data").glob("*/tokenizer.json")
    assert ours.read_bytes() == theirs.read_bytes()
    again = open_start(str(folder))  # a start of its own
    assert again.learned is not None and again.tokenizer_name == "bpe:270"
    ours.parent.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"learned by the model .* the data folder that held it is gone"):
        open_start(str(folder))


def test_a_start_without_its_model(place, tmp_path):
    begin, config = tuned(place)
    for options in (Options(runtime=CPU), Options(runtime=CPU, start=begin)):
        named = config if options.start is None else config.model_copy(update={"start_weights": None})
        with pytest.raises(ValueError, match=r"use `train RUN\.yaml --from MODEL`"):
            execute(named, tmp_path / "results", options)


def test_starts_that_differ_by_seed_make_replicates_and_starts_of_two_knobs_a_pair(place, tmp_path):
    """Two knobs of a start's model, two seeds each: of the tuned runs the knob alone differs, seed by seed."""

    def tuned_from(value, given=None, **fields):
        run = loud_run(tmp_path, seq_len=32, **fields)
        break_weights(run, value)
        return tuned((place[0], run), **(given or {}))[1]

    first, again, other = tuned_from(0.1), tuned_from(0.2, seed=1), tuned_from(0.3, depth_scale="lns", seed=1)
    assert (first.seed, again.seed) == (0, 1) and first.start_weights != again.start_weights
    assert first.cell_id == again.cell_id != other.cell_id and first.run_id != again.run_id
    assert [name for name in CELL_FIELDS if getattr(again, name) != getattr(other, name)] == ["depth_scale"]
    assert tuned_from(0.4, lr=1e-2).start_cell != first.start_cell == tuned_from(0.5, measures=["loss"]).start_cell
    assert tuned_from(0.6, {"seed": 4}, seed=2).seed == 4


def test_a_sweep_has_no_start(place):
    asked = {"name": "x", "question": "?", "hypothesis": "!", "seeds": [0], "base": {"start_weights": "0123456789ab"}}
    with pytest.raises(ValueError, match=r"train each run with `train RUN\.yaml --from MODEL`"):
        build(SweepDefinition, asked, "test").run_config({}, 0)


@pytest.mark.slow
def test_a_killed_command_continues_and_a_mistake_is_one_line(place, tmp_path):
    folder, run = place
    asked = {**TUNING, "corpus": f"sft:{folder / 'pairs.jsonl'}", "train_tokens": 128 * 150, "measures": ["loss"]}
    file, results = tmp_path / "run.yaml", tmp_path / "results"
    file.write_text(yaml.safe_dump(asked))
    words = ("train", file, "--from", run, "--device", "cpu", "--threads", "1", "--runtime", "checkpoint_seconds=0.1")
    process = start(*words, "-o", results)
    while not list(results.glob("work/*/checkpoints/step-*.json")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    sparsedepth(*words, "-o", results)
    sparsedepth(*words, "-o", tmp_path / "whole")
    (one,), (other,) = ([*(place / "runs").glob("*/model.safetensors")] for place in (results, tmp_path / "whole"))
    assert one.read_bytes() == other.read_bytes()
    assert len([*results.glob("models/*/complete")]) == 1
    _, err = sparsedepth("train", file, "--from", tmp_path, "-o", tmp_path / "no", code=2)
    assert err.count("\n") == 1 and "is neither the folder of a run" in err
    _, err = sparsedepth("train", file, "--from", run, "-o", tmp_path / "no", "--set", "n_layers=7", code=2)
    assert err.count("\n") == 1 and "n_layers=7, and the model of --from" in err
    assert not (tmp_path / "no").exists()
