"""Held-out text in a model's own tokenizer, of folders and of runs; and tokens as they are given."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from reference import run_config
from safetensors.torch import save_file
from support.hf_families import WORDS, save_tokenizer, tiny_folder
from support.tiny_sweep import corpus

from sparsedepth.config.run import RunConfig
from sparsedepth.data.ngram_losses import losses_of
from sparsedepth.data.pipeline import prepare
from sparsedepth.data.text import TextSource
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.load import load_model
from sparsedepth.probe.text import (
    check_length,
    check_tokens,
    measure_source,
    read_token_arrays,
    tokenizer_of,
    tokens_to_measure,
)
from sparsedepth.run.measure_existing_model import measuring_config


@pytest.fixture
def model(tmp_path) -> Path:
    """A Hugging Face folder with a tokenizer of 34 words."""
    return tiny_folder(tmp_path / "model")


@pytest.fixture
def run(tmp_path):
    def make(**fields) -> Path:
        config = run_config(**{"corpus": str(corpus(tmp_path)), "val_fraction": 0.2, "vocab_size": 320, **fields})
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        weights = {name: weight.detach() for name, weight in Decoder(config).named_parameters()}
        save_file(weights, folder / "model.safetensors")
        return folder

    return make


def test_a_folder_reads_text_in_its_own_tokenizer(model, tmp_path, monkeypatch):
    """Without a run's configuration, which it does not have."""
    monkeypatch.setattr(RunConfig, "_check_run", None)
    loaded = load_model(model)
    text = measure_source(loaded, str(corpus(tmp_path)), 16, 320, tmp_path / "data")
    assert isinstance(text, TextSource)
    windows = text.held_out(16, 320, 32)
    assert windows.inputs.shape == (20, 16) and windows.inputs.dtype == np.int64 and windows.inputs.max() < 34
    assert np.array_equal(windows.inputs[0], text.corpus.val[32:48])
    assert np.array_equal(windows.targets[0], text.corpus.val[33:49])
    words = tokenizer_of(loaded, tmp_path / "data").decode(text.corpus.val[:40].tolist()).split()
    assert set(words) <= set(WORDS) and {"times", "is"} <= set(words)
    assert text.bytes_per_token == text.corpus.manifest.val.bytes / len(text.corpus.val)


def test_another_tokenizer_at_the_same_place_is_another_text(model, tmp_path):
    texts = str(corpus(tmp_path))
    before = measure_source(load_model(model), texts, 16, 320, tmp_path / "data")
    save_tokenizer(model, {word: 33 - index for word, index in WORDS.items()})
    after = measure_source(load_model(model), texts, 16, 320, tmp_path / "data")
    assert np.array_equal(33 - after.held_out(16, 320).inputs, before.held_out(16, 320).inputs)


def test_a_run_reads_its_own_text_and_reuses_its_tokens(run, tmp_path):
    loaded = load_model(run(tokenizer="bpe:300"))
    assert loaded.config is not None
    trained_on = prepare(loaded.config, tmp_path / "data")
    text = measure_source(loaded, None, 16, 160, tmp_path / "data")
    assert text.corpus.folder == trained_on.folder and text.data_hash == trained_on.manifest.data_hash
    tokenizer = tokenizer_of(loaded, tmp_path / "data")
    assert tokenizer.decode(tokenizer.encode(["3 times 4 is 12."])[0]) == "3 times 4 is 12."
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match=r"'bpe:300' of the run was learned on"):
        measure_source(loaded, str(other), 16, 160, tmp_path / "data")


def test_a_byte_run_reads_any_text(run, tmp_path):
    loaded = load_model(run())
    other = tmp_path / "other"
    other.mkdir()
    for index in range(20):
        (other / f"{index}.txt").write_text(f"another text {index} " * 40)
    text = measure_source(loaded, str(other), 16, 160, tmp_path / "data")
    assert bytes(text.corpus.val[:12].tolist()) == b"another text"
    assert tokenizer_of(loaded, tmp_path / "data").eod == 256


def test_what_cannot_be_read_is_one_line(model, tmp_path):
    loaded, texts = load_model(model), str(corpus(tmp_path))
    with pytest.raises(ValueError, match=r"longer than the 64 positions of .*; choose a length up to that"):
        check_length(loaded, 65)
    with pytest.raises(ValueError, match=r"held-out part .* and 1,000,000 are needed"):
        measure_source(loaded, texts, 16, 1_000_000, tmp_path / "data")


def saved(path: Path, ids: np.ndarray) -> Path:
    np.save(path, ids)
    return path


def test_given_tokens_are_halved_or_named(tmp_path):
    ids = np.arange(5 * 9, dtype=np.int32).reshape(5, 9)
    both = saved(tmp_path / "both.npy", ids)
    halves = read_token_arrays(both)
    assert (halves.seq_len, halves.scored.n_tokens, halves.fit.n_tokens) == (8, 24, 16)
    assert np.array_equal(halves.held_out(8, 24).inputs, ids[:3, :-1])
    assert np.array_equal(halves.held_out(8, 24).targets, ids[:3, 1:])
    assert np.array_equal(halves.held_out(8, 16, 24).inputs, ids[3:, :-1])
    assert halves.held_out(8, 17).inputs.shape == (2, 8) and halves.held_out(8, 24).inputs.dtype == np.int64
    named = read_token_arrays(saved(tmp_path / "a.npy", ids[:3]), saved(tmp_path / "b.npy", ids[3:].astype(np.uint8)))
    assert np.array_equal(named.held_out(8, 24).targets, ids[:3, 1:])
    assert np.array_equal(named.held_out(8, 16, 1).targets, ids[3:, 1:])
    assert named.data_hash == halves.data_hash != read_token_arrays(tmp_path / "b.npy", tmp_path / "a.npy").data_hash
    with pytest.raises(ValueError, match="less than one sequence of 8"):
        named.held_out(8, 7)


def test_maps_are_not_fitted_on_the_scored_sequences(tmp_path):
    ids = np.arange(5 * 9).reshape(5, 9)
    scored = saved(tmp_path / "scored.npy", ids[:3])
    for same in (ids[:3], ids[2::-1].astype(np.uint8), ids, ids[:1]):
        with pytest.raises(ValueError, match="hold the same sequences, and maps must be fitted on other tokens"):
            read_token_arrays(scored, saved(tmp_path / "fit.npy", same))
    read_token_arrays(scored, saved(tmp_path / "fit.npy", ids[2:]))  # a task may repeat a sequence


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.zeros((2, 9)), r"holds float64 \[2, 9\]"),
        (np.zeros(9, dtype=int), r"holds int64 \[9\]"),
        (np.zeros((2, 1), dtype=int), "at least 3 columns"),
        (np.zeros((0, 9), dtype=int), r"\[0, 9\]"),
        (np.zeros((1, 9), dtype=int), "give --fit-tokens, or two"),
        (np.array([[{"id": 1}] * 9] * 2), "cannot be read as a .npy array: Object arrays"),
    ],
)
def test_what_is_no_array_of_ids_is_one_line(tmp_path, ids, says):
    np.save(tmp_path / "ids.npy", ids, allow_pickle=True)
    with pytest.raises(ValueError, match=says) as caught:
        read_token_arrays(tmp_path / "ids.npy")
    assert "\n" not in str(caught.value)


def test_given_files_must_be_arrays_of_one_length(tmp_path):
    np.savez(tmp_path / "ids.npz", a=np.zeros((2, 9), dtype=int))
    (tmp_path / "text.npy").write_text("0 1 2")
    for name in ("ids.npz", "text.npy", "absent.npy"):
        with pytest.raises(ValueError, match=r"cannot be read as a \.npy array"):
            read_token_arrays(tmp_path / name)
    (tmp_path / "empty.npy").touch()
    with pytest.raises(ValueError, match=r"empty.npy is empty \(0 bytes\)"):
        read_token_arrays(tmp_path / "empty.npy")
    first, other = (saved(tmp_path / f"{n}.npy", np.zeros((2, n), dtype=int)) for n in (9, 8))
    with pytest.raises(ValueError, match="has sequences of 7 tokens and"):
        read_token_arrays(first, other)


def test_given_ids_are_the_models(model, tmp_path):
    loaded = load_model(model)  # 40 ids, 64 positions
    ids = np.full((2, 65), 39)
    check_tokens(read_token_arrays(saved(tmp_path / "good.npy", ids)), loaded)
    for wrong in (40, -1):
        bad = read_token_arrays(saved(tmp_path / "bad.npy", np.where(np.arange(65) == 3, wrong, ids)))
        with pytest.raises(ValueError, match="has ids from 0 to 39"):
            check_tokens(bad, loaded)
    with pytest.raises(ValueError, match=r"longer than the 64 positions of .*; cut the sequences of the token"):
        check_tokens(read_token_arrays(saved(tmp_path / "long.npy", np.zeros((2, 66), dtype=int))), loaded)


def test_targets_stand_beside_their_tokens(model, tmp_path):
    ids, targets = np.arange(4 * 6).reshape(4, 6), np.full((4, 6), -100)
    targets[0, 3], targets[3, 1] = 5, 7
    tokens, beside = saved(tmp_path / "ids.npy", ids), saved(tmp_path / "targets.npy", targets)
    given = read_token_arrays(tokens, targets=beside)
    assert (given.seq_len, given.scored.n_tokens, given.scored.n_scored, len(given.fit)) == (6, 12, 1, 2)
    assert np.array_equal(given.held_out(6, 12).targets, targets[:2])
    others = saved(tmp_path / "others.npy", ids + 1)
    named = read_token_arrays(tokens, others, beside)
    assert len(named.fit) == len(named.scored) == 4 and named.data_hash != given.data_hash
    check_tokens(named, load_model(model))
    for place, says in ((40, "targets are from 5 to 40"), (-1, "targets are from -1 to 7")):
        wrong = np.where(targets == (7 if place == 40 else 5), place, targets)
        with pytest.raises(ValueError, match=says):
            check_tokens(read_token_arrays(tokens, others, saved(tmp_path / "bad.npy", wrong)), load_model(model))
    with pytest.raises(ValueError, match=r"holds \[4, 5\] and .* holds \[4, 6\]"):
        read_token_arrays(tokens, targets=saved(tmp_path / "short.npy", targets[:, 1:]))
    with pytest.raises(ValueError, match="no target of the scored"):
        read_token_arrays(tokens, targets=saved(tmp_path / "none.npy", np.full((4, 6), -100)))
    with pytest.raises(ValueError, match="has sequences of 5 tokens and"):
        read_token_arrays(tokens, saved(tmp_path / "five.npy", ids[:, 1:]), beside)


def test_chance_is_that_of_the_length_that_is_measured(run):
    """Longer sequences of k-hop induction have fewer answers that are 'none'; nothing is written beside a run that lies
    in no results folder."""
    fields = {"corpus": "task:k_hop", "seq_len": 32, "val_tokens": 2048, "measures": ["loss"], "val_fraction": 0.05}
    folder = run(**fields, letters=4, max_hops=2)
    loaded = load_model(folder)
    chance = {}
    for seq_len in (16, 64):
        config = measuring_config(loaded, {"seq_len": seq_len})
        with tokens_to_measure(loaded, config) as tokens:
            chance[seq_len] = losses_of(tokens.counted())["chance_loss"]
            own = tokens.source.counted(loaded.config.model_copy(update={"seq_len": seq_len}))
        assert chance[seq_len] == losses_of(own)["chance_loss"]
    assert chance[16] != chance[64]
    assert not (folder.parent.parent / "data").exists()


def test_a_run_on_a_task_reads_its_task(run, tmp_path):
    """No file is read or written, and its tokens are no text."""
    fields = {"corpus": "task:state_tracking", "n_operations": 4, "seq_len": 16, "val_fraction": 0.05}
    loaded = load_model(run(**fields))
    source = measure_source(loaded, None, 16, 160, tmp_path / "nowhere")
    assert source.held_out(16, 160).difficulty.max() == 15 and source.bytes_per_token is None
    assert not (tmp_path / "nowhere").exists()
    for read in (lambda: tokenizer_of(loaded, tmp_path), lambda: measure_source(loaded, "stdlib", 16, 160, tmp_path)):
        with pytest.raises(ValueError, match="its tokens are not text; name a run on text"):
            read()
    with pytest.raises(ValueError, match="was not trained on 'task:k_hop'"):
        measure_source(loaded, "task:k_hop", 16, 160, tmp_path)
