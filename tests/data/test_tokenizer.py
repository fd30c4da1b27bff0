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


CLASSES = (
    *("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast"),
    *("LlamaTokenizer", "LlamaTokenizerFast", "GPTNeoXTokenizerFast", "GemmaTokenizerFast", "TokenizersBackend"),
    *("CodeLlamaTokenizer", "BertTokenizerFast", "T5TokenizerFast", None),
)
TYPES = ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma2", "mistral", "smollm3", "olmo2", None)
TEXT = "Naïve Café 12345 + 6,789 = 19134\r\n\tIT'S 'quoted'  twice </s> 東京 ﬁne e\u0301"


def raw_tokenizers() -> dict[str, tokenizers.Tokenizer]:
    """Ten that classes of transformers would build otherwise: digits in threes, normalisers, prefix spaces, pieces."""
    from tokenizers import Regex, Tokenizer, models, normalizers as norm, pre_tokenizers as pre, trainers

    alphabet = pre.ByteLevel.alphabet()
    digits = pre.Split(Regex(r"\\d{1,3}"), "isolated")
    kinds = {
        "bytes": (models.BPE(), None, pre.ByteLevel(add_prefix_space=False)),
        "prefix": (models.BPE(), None, pre.ByteLevel(add_prefix_space=True)),
        "no pattern": (models.BPE(), None, pre.ByteLevel(add_prefix_space=False, use_regex=False)),
        "digits": (models.BPE(), None, pre.Sequence([digits, pre.ByteLevel(add_prefix_space=False)])),
        "each digit": (models.BPE(), None, pre.Sequence([pre.Digits(True), pre.ByteLevel(add_prefix_space=False)])),
        "nfc": (models.BPE(), norm.NFC(), pre.ByteLevel(add_prefix_space=False)),
        "nfkc": (models.BPE(), norm.NFKC(), pre.ByteLevel(add_prefix_space=False)),
        "lower": (models.BPE(), norm.Lowercase(), pre.ByteLevel(add_prefix_space=False)),
        "metaspace": (models.BPE(unk_token="</s>"), None, pre.Metaspace()),
        "words": (models.WordLevel(unk_token="</s>"), norm.Strip(), pre.Whitespace()),
    }
    made = {}
    for name, (model, normalizer, pre_tokenizer) in kinds.items():
        backend = Tokenizer(model)
        if normalizer:
            backend.normalizer = normalizer
        backend.pre_tokenizer = pre_tokenizer
        trainer = trainers.WordLevelTrainer if name == "words" else trainers.BpeTrainer
        own = {} if name in ("words", "metaspace") else {"initial_alphabet": alphabet}
        backend.train_from_iterator(
            [*TEXTS, TEXT], trainer(vocab_size=400, special_tokens=["</s>"], show_progress=False, **own)
        )
        made[name] = backend
    return made


@pytest.mark.parametrize("kind", raw_tokenizers())
def test_ids_are_those_of_tokenizer_json_whatever_class_and_type_the_configuration_names(tmp_path, kind):
    """Ten tokenizers by fourteen classes by ten model types; no release of transformers takes part."""
    raw_tokenizers()[kind].save(str(tmp_path / "tokenizer.json"))
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.encode_special_tokens = True
    wanted = raw.encode(TEXT, add_special_tokens=False).ids
    for name in CLASSES:
        for model_type in TYPES:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
            settings = {"tokenizer_class": name, "add_bos_token": True, "add_prefix_space": True, "legacy": False}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "</s>"}))
            tokenizer = make_tokenizer(str(tmp_path), nothing(), 400)
            assert (tokenizer.encode([TEXT]), tokenizer.eod) == ([wanted], 0), (name, model_type)


@pytest.mark.parametrize(
    ("files", "eod"),
    [
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>", "lstrip": False}}}, 1),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "</s>"}}, 1),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": [1, 3]}}, 1),
        ({"tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": {"6": {"content": "<end>"}}}}, 6),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": 3}}, "no end-of-sequence token"),
        ({"tokenizer_config.json": {"eos_token": "<e>", "added_tokens_decoder": {"77": {"content": "<e>"}}}}, "id 77"),
    ],
)
def test_the_end_of_a_document_is_the_configurations(folder, files, eod):
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    if isinstance(eod, str):
        with pytest.raises(ValueError, match=eod):
            make_tokenizer(str(folder), nothing(), 20)
        return
    tokenizer = make_tokenizer(str(folder), nothing(), 20)
    assert tokenizer.eod == eod and tokenizer.encode(["cat"]) == [[3]]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("GPT2Tokenizer", "made it as GPT2Tokenizer"),
        ("LlamaTokenizer", None),
        ("BertTokenizer", None),
        ("ByT5Tokenizer", None),
        (None, None),
    ],
)
def test_a_folder_without_tokenizer_json_is_told_of_or_refused_in_one_line(bpe, tmp_path, kind, told):
    """Files of GPT-2 under classes of others: transformers makes tokenizers that know no word, and says nothing."""
    bpe._backend.model.save(str(tmp_path))
    settings = {"tokenizer_class": kind, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: each for key, each in settings.items() if each}))
    if told is None:
        fix = r"put the model's there, or make it where the tokenizer works: AutoTokenizer\.from_pretrained"
        with pytest.raises(ValueError, match=rf"has no tokenizer.json, and .*; {fix}"):
            make_tokenizer(str(tmp_path), nothing(), 300)
        return
    with pytest.warns(UserWarning, match=rf"has no tokenizer.json: transformers \d.* {told}"):
        made = make_tokenizer(str(tmp_path), nothing(), 300)
    assert (made.encode(TEXTS[:3]), made.eod) == (bpe.encode(TEXTS[:3]), bpe.eod)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_a_file_that_is_no_json_object_is_named(folder, file):
    (folder / file).write_text("[1]")
    with pytest.raises(ValueError, match=f"cannot be loaded \\({file} is no JSON object\\)"):
        make_tokenizer(str(folder), nothing(), 10)


def test_ends_of_a_document_of_other_types_are_none(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text('{"eos_token_id": [[1], {}]}')
    with pytest.raises(ValueError, match="has no end-of-sequence token"):
        make_tokenizer(str(folder), nothing(), 10)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>", "added_tokens_decoder": [1]}')
    assert make_tokenizer(str(folder), nothing(), 20).eod == 6


def test_a_folder_of_settings_alone_is_no_tokenizer(tmp_path):
    """Of which transformers makes one that knows nothing but [UNK]."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}')
    with pytest.raises(ValueError, match=r"has no tokenizer.json, and"):
        make_tokenizer(str(tmp_path), nothing(), 300)
