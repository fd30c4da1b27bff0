"""Round trips, sizes, and special tokens that stay text."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from sparsedepth.data.tokenizer import ByteTokenizer, FastTokenizer, make_tokenizer, reopen_tokenizer

TEXTS = [f"the cat {i} sat on the mat, the cat {i} sat on the hat; naïve café №{i}\n" for i in range(50)]


def nothing() -> Iterator[str]:
    raise AssertionError("this tokenizer learns nothing")
    yield


@pytest.fixture(scope="module")
def bpe() -> FastTokenizer:
    tokenizer = make_tokenizer("bpe:300", TEXTS, 300)
    assert isinstance(tokenizer, FastTokenizer)
    return tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small tokenizer as Hugging Face saves it, with settings that would spoil a corpus: truncation, padding, BOS."""
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "cat": 3, "mat": 4, "far": 9}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    return tmp_path


def test_bytes_are_ids():
    tokenizer = make_tokenizer("byte", nothing(), 257)
    assert isinstance(tokenizer, ByteTokenizer) and (tokenizer.size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode(["aé", ""]) == [[97, 0xC3, 0xA9], []]
    assert tokenizer.decode([97, 256, 0xC3, 0xA9]) == "aé"
    assert tokenizer.decode([0xC3]) == "\ufffd"


@settings(max_examples=30)
@given(st.lists(st.text(), max_size=4))
def test_every_text_survives_bytes_and_bpe(bpe, texts):
    for tokenizer in (ByteTokenizer(), bpe):
        encoded = tokenizer.encode(texts)
        assert [tokenizer.decode(ids) for ids in encoded] == texts
        assert all(0 <= i < tokenizer.size and i != tokenizer.eod for ids in encoded for i in ids)


def test_bpe_learns_the_text_and_nothing_special(bpe, tmp_path):
    assert (bpe.size, bpe.eod) == (300, 0)
    assert len(bpe.encode(["the cat sat"])[0]) < len("the cat sat") / 2
    assert bpe.eod not in bpe.encode(["a<|endoftext|>b"])[0]
    bpe.save(tmp_path)
    again = reopen_tokenizer(tmp_path, bpe.eod)
    assert again.size == bpe.size
    assert again.encode([*TEXTS, "a<|endoftext|>b"]) == bpe.encode([*TEXTS, "a<|endoftext|>b"])


def test_bpe_is_the_same_in_every_process(bpe, tmp_path):
    bpe.save(tmp_path)
    script = (
        "import sys, pathlib, json\nfrom sparsedepth.data.tokenizer import make_tokenizer\n"
        "make_tokenizer('bpe:300', json.loads(sys.argv[1]), 300).save(pathlib.Path(sys.argv[2]))"
    )
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run([sys.executable, "-c", script, json.dumps(TEXTS), str(other)], check=True, timeout=300)
    assert (other / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_folder_of_hugging_face(folder):
    tokenizer = make_tokenizer(str(folder), nothing(), 10)
    assert (tokenizer.size, tokenizer.eod) == (10, 1)  # the largest id is 9
    assert tokenizer.encode(["cat mat far cat", "mat"]) == [[3, 4, 9, 3], [4]]
    assert tokenizer.encode(["cat</s>mat"]) == [[2]]  # one unknown word, and no end of a document


@pytest.mark.parametrize("name", ["bpe", "bpe:", "bpe:many", "bpe:256", "bpe:-1"])
def test_bpe_needs_a_size(name):
    with pytest.raises(ValueError, match="must be 'bpe:SIZE' with SIZE over 256"):
        make_tokenizer(name, nothing(), 10_000)


def test_a_tokenizer_larger_than_the_embedding_names_both(folder):
    with pytest.raises(ValueError, match="'byte' has 257 tokens and the model vocab_size=256; set vocab_size to at l"):
        make_tokenizer("byte", nothing(), 256)
    with pytest.raises(ValueError, match=r"'bpe:1000' has 1000 tokens and the model vocab_size=264"):
        make_tokenizer("bpe:1000", nothing(), 264)  # before it is trained
    assert make_tokenizer(str(folder), nothing(), 9).size == 10  # only ids that occur in a text matter
