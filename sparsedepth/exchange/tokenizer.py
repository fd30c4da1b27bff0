"""Export of a run's tokenizer as a PreTrainedTokenizerFast that gives every text the same ids.

Bytes become a BPE without merges on the byte-level alphabet, id = byte. As in training, no token is added to a text,
and special tokens written in a text are ordinary text.
"""

import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sparsedepth.data.tokenizer import TOKENIZER_FILE
from sparsedepth.data.tokenizer import Tokenizer as OurTokenizer
from sparsedepth.files import write_json
from sparsedepth.probe.folder import read_json

ODD = "a\x00b\r\n\r\n  can't\tnaïve 東京 \u2028 🙂👩\u200d👧 <|endoftext|></s>\ufffd \x7f"
"""Difficult text for tokenizers: control characters, line ends, joined emoji, special tokens in a text."""

_CONFIG = "tokenizer_config.json"


def save_tokenizer(tokenizer: OurTokenizer, folder: Path, max_len: int, sample: str) -> None:
    """Write the tokenizer's files. Raises ValueError if the ids of `sample`, read back, are not the run's."""
    backend = _backend(tokenizer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=backend.id_to_token(tokenizer.eod),
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=max_len,
    ).save_pretrained(folder)
    # The class name that every release of transformers knows; version 5 writes its own.
    write_json(folder / _CONFIG, {**read_json(folder / _CONFIG), "tokenizer_class": "PreTrainedTokenizerFast"})
    exported: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    exported.model_max_length = int(1e30)  # avoids a warning for long samples
    for text in (ODD, sample):
        if exported(text)["input_ids"] != tokenizer.encode([text])[0]:
            raise ValueError(
                f"the exported tokenizer gives other ids than the run's for {text[:40]!r}...; use the run's own"
            )


def _backend(tokenizer: OurTokenizer) -> Tokenizer:
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save(Path(scratch))
        saved = Path(scratch) / TOKENIZER_FILE
        if saved.exists():
            backend = Tokenizer.from_file(str(saved))
            # No token was added in training. A processor that adds none may still be needed, for offsets.
            if backend.num_special_tokens_to_add(False):
                backend.post_processor = None
            return backend
    assert tokenizer.size == tokenizer.eod + 1 == 257, "only bytes save nothing"
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return backend
