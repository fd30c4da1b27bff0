"""Held-out text in a model's own tokenizer, of folders and of runs; and tokens as they are given."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import yaml
from families import tiny
from reference import run_config
from safetensors.torch import save_file
from tiny import corpus

from sparsedepth.data.pipeline import prepare
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.load import load_stack
from sparsedepth.probe.text import check_tokens, given_tokens, measure_source, tokenizer_of

WORDS = {word: index for index, word in enumerate(["</s>", "<unk>", "times", "is", *map(str, range(30))])}


@pytest.fixture
def model(tmp_path) -> Path:
    """A Hugging Face folder with a tokenizer of 34 words."""
    folder = tmp_path / "model"
    tiny("qwen3").save_pretrained(folder)
    save_tokenizer(folder, WORDS)
    return folder


def save_tokenizer(folder: Path, words: dict[str, int]) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


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


def test_a_folder_reads_text_in_its_own_tokenizer(model, tmp_path):
    loaded = load_stack(model)
    text = measure_source(loaded, str(corpus(tmp_path)), 16, 320, tmp_path / "data")
    windows = text(16, 320, 32)
    assert windows.shape == (20, 17) and windows.dtype == np.int64 and windows.max() < 34
    assert np.array_equal(windows[0], text.corpus.val[32:49])
    words = tokenizer_of(loaded, tmp_path / "data").decode(text.corpus.val[:40].tolist()).split()
    assert set(words) <= set(WORDS) and {"times", "is"} <= set(words)
    assert text.bytes_per_token == text.corpus.manifest.val.bytes / text.corpus.n_val_tokens


def test_another_tokenizer_at_the_same_place_is_another_text(model, tmp_path):
    texts = str(corpus(tmp_path))
    before = measure_source(load_stack(model), texts, 16, 320, tmp_path / "data")
    save_tokenizer(model, {word: 33 - index for word, index in WORDS.items()})
    after = measure_source(load_stack(model), texts, 16, 320, tmp_path / "data")
    assert np.array_equal(33 - after(16, 320, 0), before(16, 320, 0))


def test_a_run_reads_its_own_text_and_reuses_its_tokens(run, tmp_path):
    loaded = load_stack(run(tokenizer="bpe:300"))
    assert loaded.config is not None
    trained_on = prepare(loaded.config, tmp_path / "data")
    text = measure_source(loaded, None, 16, 160, tmp_path / "data")
    assert text.corpus.folder == trained_on.folder and text.data_hash == trained_on.data_hash
    tokenizer = tokenizer_of(loaded, tmp_path / "data")
    assert tokenizer.decode(tokenizer.encode(["3 times 4 is 12."])[0]) == "3 times 4 is 12."
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match=r"'bpe:300' of the run was learned on"):
        measure_source(loaded, str(other), 16, 160, tmp_path / "data")


def test_a_byte_run_reads_any_text(run, tmp_path):
    loaded = load_stack(run())
    other = tmp_path / "other"
    other.mkdir()
    for index in range(20):
        (other / f"{index}.txt").write_text(f"another text {index} " * 40)
    text = measure_source(loaded, str(other), 16, 160, tmp_path / "data")
    assert bytes(text.corpus.val[:12].tolist()) == b"another text"
    assert tokenizer_of(loaded, tmp_path / "data").eod == 256


def test_what_cannot_be_read_is_one_line(model, tmp_path):
    loaded, texts = load_stack(model), str(corpus(tmp_path))
    with pytest.raises(ValueError, match=r"longer than the 64 positions"):
        measure_source(loaded, texts, 65, 320, tmp_path / "data")
    with pytest.raises(ValueError, match=r"held-out part .* and 1,000,000 are asked for"):
        measure_source(loaded, texts, 16, 1_000_000, tmp_path / "data")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        measure_source(load_stack(model), texts, 16, 320, tmp_path / "data")


def saved(path: Path, ids: np.ndarray) -> Path:
    np.save(path, ids)
    return path


def test_given_tokens_are_halved_or_named(tmp_path):
    ids = np.arange(5 * 9, dtype=np.int32).reshape(5, 9)
    both = saved(tmp_path / "both.npy", ids)
    halves = given_tokens(both)
    assert (halves.seq_len, halves.n_scored, halves.n_fit) == (8, 24, 16)
    assert np.array_equal(halves(8, 24), ids[:3]) and np.array_equal(halves(8, 16, 24), ids[3:])
    assert halves(8, 17).shape == (2, 9) and halves(8, 24).dtype == np.int64
    named = given_tokens(saved(tmp_path / "a.npy", ids[:3]), saved(tmp_path / "b.npy", ids[3:].astype(np.uint8)))
    assert np.array_equal(named(8, 24), ids[:3]) and np.array_equal(named(8, 16, 1), ids[3:])
    assert named.data_hash == halves.data_hash != given_tokens(tmp_path / "a.npy", tmp_path / "a.npy").data_hash
    with pytest.raises(ValueError, match="less than one sequence of the given 8"):
        named(8, 7)


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
        given_tokens(tmp_path / "ids.npy")
    assert "\n" not in str(caught.value)


def test_given_files_must_be_arrays_of_one_length(tmp_path):
    np.savez(tmp_path / "ids.npz", a=np.zeros((2, 9), dtype=int))
    (tmp_path / "text.npy").write_text("0 1 2")
    for name in ("ids.npz", "text.npy", "absent.npy"):
        with pytest.raises(ValueError, match=r"cannot be read as a \.npy array"):
            given_tokens(tmp_path / name)
    first, other = (saved(tmp_path / f"{n}.npy", np.zeros((2, n), dtype=int)) for n in (9, 8))
    with pytest.raises(ValueError, match="has 8 columns and"):
        given_tokens(first, other)


def test_given_ids_are_the_models(model, tmp_path):
    loaded = load_stack(model)  # 40 ids, 64 positions
    ids = np.full((2, 65), 39)
    check_tokens(given_tokens(saved(tmp_path / "good.npy", ids)), loaded)
    for wrong in (40, -1):
        bad = given_tokens(saved(tmp_path / "bad.npy", np.where(np.arange(65) == 3, wrong, ids)))
        with pytest.raises(ValueError, match="has ids from 0 to 39"):
            check_tokens(bad, loaded)
    with pytest.raises(ValueError, match="longer than the 64 positions"):
        check_tokens(given_tokens(saved(tmp_path / "long.npy", np.zeros((2, 66), dtype=int))), loaded)
