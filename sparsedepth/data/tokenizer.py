"""Text to token ids and back: bytes, a BPE trained on the corpus, or any fast tokenizer of Hugging Face.

    'byte'      id = byte (0..255); 256 ends a document. Every text, no dependency, never out of vocabulary
    'bpe:SIZE'  byte-level BPE of at most SIZE tokens, trained on the training documents; 0 ends a document
    other       a folder's or a hub name's tokenizer.json as it is; the end-of-sequence token of its settings ends one

Special tokens in a text are not recognised: '<|endoftext|>' in a document is ordinary text. But a word or piece model
may contain the same string, as T5's contains '</s>': pairs with it are refused (`data.pairs`)."""

import socket
import sys
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sparsedepth.config.corpus import BYTE_SIZE, check_size, is_learned, known_size
from sparsedepth.files import local_path, parse_json, read_regular, repository_of
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import one_line

if TYPE_CHECKING:
    import tokenizers

BPE_CHARACTERS = 100_000_000
"""Maximum text that a BPE learns from: merges hardly change beyond, and training holds all words in memory."""

TOKENIZER_FILE = "tokenizer.json"
CONFIG = "config.json"
_FILES = [TOKENIZER_FILE, CONFIG, "tokenizer_config.json", "special_tokens_map.json"]
_FILES += ["vocab.json", "merges.txt", "*.model", "vocab.txt"]
MAX_JSON_BYTES, MAX_TOKENIZER_BYTES = 10_000_000, 500_000_000
UNREACHABLE = "the hub does not answer, and its local cache has no such tokenizer"
_END = "<|endoftext|>"
_SAMPLE = "the cat sat on the mat"
"""A text of which a tokenizer knows a part."""


class Encoder(Protocol):
    size: int
    """Ids are below it: the minimum number of rows of the embedding."""
    eod: int
    """Id that ends a document."""

    def encode(self, texts: list[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """Ids of each text, without special tokens."""


class ByteTokenizer:
    size = BYTE_SIZE
    eod = 256

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without ends of documents; broken UTF-8 sequences become U+FFFD."""
        return bytes(i for i in ids if i < self.eod).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write what `reopen_tokenizer` needs into `folder`: nothing was learned."""


class FastTokenizer:
    """A `tokenizers.Tokenizer` and the id that ends a document."""

    def __init__(self, backend: "tokenizers.Tokenizer", eod: int) -> None:
        backend.no_truncation()  # a setting for batches of a model; here every token of the text counts
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self.eod = eod
        self.size = max(backend.get_vocab(with_added_tokens=True).values()) + 1  # ids may have holes

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids if i != self.eod], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        self._backend.save(str(folder / TOKENIZER_FILE))


Tokenizer = ByteTokenizer | FastTokenizer


def make_tokenizer(name: str, training_texts: Iterable[str], max_size: int) -> Tokenizer:
    """The tokenizer of this name; only 'bpe:SIZE' reads `training_texts`. Raises ValueError for one that cannot be
    loaded, or is made here with more than `max_size` tokens; of others only ids that occur in a text matter."""
    size = known_size(name)
    if size is None:
        return _load(name)
    check_size(name, size, max_size)  # before a BPE is trained
    return _train_bpe(training_texts, size) if is_learned(name) else ByteTokenizer()


def reopen_tokenizer(folder: Path, eod: int) -> Tokenizer:
    """The tokenizer saved in `folder`, or the byte tokenizer, which saves nothing."""
    if not (folder / TOKENIZER_FILE).exists():
        return ByteTokenizer()
    import tokenizers

    return FastTokenizer(tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE)), eod)


def _train_bpe(texts: Iterable[str], size: int) -> FastTokenizer:
    from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that every text can be encoded
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(_first_characters(texts), trainer)
    eod = backend.token_to_id(_END)
    assert eod is not None
    return FastTokenizer(backend, eod)


def _first_characters(texts: Iterable[str]) -> Iterator[str]:
    read = 0
    for text in texts:
        yield text
        read += len(text)
        if read >= BPE_CHARACTERS:
            return


def hub_answers() -> bool:
    """Whether the hub can be reached; assumed behind a proxy."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        if not urllib.request.getproxies().get(url.scheme):
            socket.create_connection((url.hostname or "", url.port or 443), timeout=3.0).close()
    except OSError:
        return False
    return True


def check_reachable(name: str) -> None:
    """Raises ValueError for a hub tokenizer that is not cached while the hub does not answer; checked before
    transformers is imported."""
    if name == "byte" or is_learned(name) or local_path(name).exists():
        return
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if not cached.exists() and not hub_answers():
        raise _not_loadable(name, UNREACHABLE)


def _not_loadable(name: str, reason: str) -> ValueError:
    return ValueError(
        f"tokenizer={name!r} cannot be loaded ({reason}); name 'byte', 'bpe:SIZE', a folder with a {TOKENIZER_FILE}, "
        "or a tokenizer of the hub that can be reached"
    )


def _load(name: str) -> FastTokenizer:
    """The tokenizer of a folder, or of the hub, as its tokenizer.json has it: a class that its configuration names
    could replace parts of it. Only special tokens are the configuration's."""
    folder = local_path(name) if local_path(name).exists() else _snapshot(name)
    if not (folder / TOKENIZER_FILE).exists():
        return _converted(name, folder)
    root = repository_of(folder)

    def read(file: str) -> Named:
        try:
            content = parse_json(read_regular(folder / file, MAX_JSON_BYTES, root)) if (folder / file).exists() else {}
        except (OSError, ValueError) as error:
            raise _not_loadable(name, f"{file}: {one_line(error)}") from None
        if not isinstance(content, dict):
            raise _not_loadable(name, f"{file} is no JSON object")
        return content

    import tokenizers

    try:
        content = read_regular(folder / TOKENIZER_FILE, MAX_TOKENIZER_BYTES, root)
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library has one kind for all
        raise _not_loadable(name, f"tokenizers {tokenizers.__version__}: {one_line(error)}") from None
    settings = {**read("special_tokens_map.json"), **read("tokenizer_config.json")}
    return FastTokenizer(backend, _end_of(name, backend, settings, read(CONFIG)))


def _end_of(name: str, backend: "tokenizers.Tokenizer", settings: Named, config: Named) -> int:
    """The id of the token that ends a document: `eos_token` of the tokenizer's configuration, else `eos_token_id` of
    the model's if it is a special token. One that tokenizer.json lacks is added, at the id that is given."""
    from tokenizers import AddedToken

    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        ids = config.get("eos_token_id")
        known = {id: added.content for id, added in backend.get_added_tokens_decoder().items() if added.special}
        ids = [id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int)]
        token = next((known[id] for id in ids if id in known), None)
    if not isinstance(token, str):
        raise ValueError(
            f"tokenizer={name!r} has no end-of-sequence token, which must end a document; "
            "set eos_token in its tokenizer_config.json, or name another"
        )
    if (id := backend.token_to_id(token)) is None:
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        id = backend.token_to_id(token)
        added = settings.get("added_tokens_decoder")
        entries = added.items() if isinstance(added, dict) else ()
        given = [number for number, entry in entries if isinstance(entry, dict) and entry.get("content") == token]
        if given and given != [str(id)]:
            raise _not_loadable(name, f"eos_token={token!r} has the id {given[0]}, and {TOKENIZER_FILE} ends at {id}")
    assert id is not None
    return id


def _snapshot(name: str) -> Path:
    """The folder of a hub's tokenizer in the cache."""
    from huggingface_hub import snapshot_download

    is_local = not hub_answers()  # the hub's client would try again for a minute
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=is_local))
    except Exception as error:  # the hub and its cache each raise their own
        reason = UNREACHABLE if is_local else f"huggingface_hub, {type(error).__name__}: {one_line(error)}"
        raise _not_loadable(name, reason) from None


def _converted(name: str, folder: Path) -> FastTokenizer:
    """A tokenizer of older files, which transformers converts by the class that the configuration names: with a
    warning, and refused where that class does not read these files, which transformers does not tell."""
    from transformers import AutoTokenizer, __version__
    from transformers.utils import logging

    auto: Any = AutoTokenizer
    place, verbosity = str(folder), logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    loaded: Any = None
    ids = set[int]()
    try:
        loaded = auto.from_pretrained(place, use_fast=True, trust_remote_code=False, local_files_only=True)
        ids = {*loaded.backend_tokenizer.encode(_SAMPLE, add_special_tokens=False).ids} - {loaded.unk_token_id}
    except Exception:  # each kind of file raises its own
        pass
    finally:
        logging.set_verbosity(verbosity)
    if not ids:
        told = f"tokenizer={name!r} has no {TOKENIZER_FILE}, and transformers cannot make it of the other files"
        fix = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ValueError(f"{told}; put the model's there, or make it where the tokenizer works: {fix}")
    by = f"transformers {__version__} made it as {type(loaded).__name__}"
    warnings.warn(f"tokenizer={name!r} has no {TOKENIZER_FILE}: {by}; other versions may make another", stacklevel=2)
    backend = loaded.backend_tokenizer
    return FastTokenizer(backend, _end_of(name, backend, {"eos_token": loaded.eos_token}, {}))
