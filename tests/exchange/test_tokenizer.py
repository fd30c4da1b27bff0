"""The exported tokenizer gives every text the ids that the run gave it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_sweep import corpus
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparsedepth.data.tokenizer import ByteTokenizer, make_tokenizer
from sparsedepth.exchange.tokenizer import ODD, save_tokenizer

TEXTS = [ODD, "", " ", "<|endoftext|>", "a" * 500, "\r\n" * 3, "".join(map(chr, range(0x250)))]


def _texts(folder):
    return [path.read_text() for path in sorted(corpus(folder).iterdir())]


@pytest.fixture(scope="module", params=["byte", "bpe:300", "folder"])
def both(request, tmp_path_factory):
    """A run's tokenizer, and what transformers reads of it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    name = request.param
    if name == "folder":  # of a stranger, who puts a token before every text
        make_tokenizer("bpe:290", _texts(folder), 300).save(folder)
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens(["<s>"])
        start = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
        name = str(folder / "theirs")
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<s>").save_pretrained(
            name
        )
        assert AutoTokenizer.from_pretrained(name)("a")["input_ids"][0] == start
    ours = make_tokenizer(name, _texts(folder), 300)
    out = folder / "exported"
    out.mkdir()
    save_tokenizer(ours, out, 64, "3 times 4 is 12.")
    theirs = AutoTokenizer.from_pretrained(out, local_files_only=True, trust_remote_code=False)
    theirs.model_max_length = 10**9
    return ours, theirs


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_are_ours_and_texts_come_back(both, text):
    ours, theirs = both
    ids = ours.encode([text])[0]
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.eos_token_id == ours.eod and len(theirs) <= 300


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=100)
def test_any_text(both, text):
    ours, theirs = both
    assert theirs(text)["input_ids"] == ours.encode([text])[0]


def test_other_ids_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, texts: [[*text.encode(), 7] for text in texts])
    with pytest.raises(ValueError, match="other ids than the run's"):
        save_tokenizer(ByteTokenizer(), tmp_path, 64, "text")
