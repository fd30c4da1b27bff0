"""What a model's scores are measured on: held-out text in its own tokenizer, or exactly the tokens that are given.

A run is measured on its own corpus unless another is named. Every other model reads the documents that a run on the
same corpus holds out (they are chosen by the hash of their text), so that models stand in one table on one text.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.data.batches import held_out
from sparsedepth.data.corpus import HUB
from sparsedepth.data.pipeline import Report, prepare
from sparsedepth.data.shards import Corpus
from sparsedepth.data.tokenizer import TOKENIZER_FILE, Tokenizer, make_tokenizer
from sparsedepth.files import digest, sha256
from sparsedepth.probe.load import Loaded

GIVEN_DTYPES = ("i", "u")
"""Kinds of NumPy array that hold token ids."""

_BPE_FILES = ("vocab.json", "merges.txt")
_TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", *_BPE_FILES)


@dataclass(frozen=True, eq=False)
class HeldOutText:
    """Call it as the suite does: text(seq_len, n_tokens, skip_tokens) -> int64 [N, seq_len + 1]."""

    corpus: Corpus

    def __call__(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> np.ndarray:
        return held_out(self.corpus, seq_len, n_tokens, skip_tokens)

    @property
    def bytes_per_token(self) -> float:
        return self.corpus.val_bytes_per_token

    @property
    def eod(self) -> int:
        return self.corpus.manifest.eod

    @property
    def data_hash(self) -> str:
        return self.corpus.data_hash


@dataclass(frozen=True, eq=False)
class GivenTokens:
    """The tokens of two arrays, called as the suite does: what is asked for after the scored tokens is the fit part."""

    scored: np.ndarray
    """scored_NS, int64 [N, T + 1]"""
    fit: np.ndarray
    """fit_NS"""

    bytes_per_token: None = None
    eod: None = None

    def __call__(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> np.ndarray:
        found = self.fit if skip_tokens else self.scored
        assert found.shape[1] == seq_len + 1, "given tokens have one length"
        if n_tokens < seq_len:
            raise ValueError(f"{n_tokens} tokens are less than one sequence of the given {seq_len}; ask for more")
        return found[: n_tokens // seq_len]

    @property
    def seq_len(self) -> int:
        return self.scored.shape[1] - 1

    @property
    def n_scored(self) -> int:
        return len(self.scored) * self.seq_len

    @property
    def n_fit(self) -> int:
        return len(self.fit) * self.seq_len

    @property
    def data_hash(self) -> str:
        parts = [[part.shape, hashlib.sha256(part.tobytes()).hexdigest()] for part in (self.scored, self.fit)]
        return digest(parts)


def given_tokens(scored: Path, fit: Path | None = None) -> GivenTokens:
    """Token ids from .npy files: [N, T + 1] integers, the last column being the last target.

    Without `fit`, usefulness fits its maps on the last half of the sequences, and the first half is scored. Raises
    ValueError, one line, for another file, and where the two have not the same number of columns.
    """
    scored_NS = _read_tokens(scored)
    if fit is None:
        if len(scored_NS) < 2:
            raise ValueError(f"{scored} has 1 sequence, and half of them are to fit on; give --fit-tokens, or two")
        half = len(scored_NS) // 2
        return GivenTokens(scored_NS[:-half], scored_NS[-half:])
    fit_NS = _read_tokens(fit)
    if fit_NS.shape[1] != scored_NS.shape[1]:
        raise ValueError(f"{fit} has {fit_NS.shape[1]} columns and {scored} has {scored_NS.shape[1]}; give equal ones")
    return GivenTokens(scored_NS, fit_NS)


def check_tokens(tokens: GivenTokens, model: Loaded) -> None:
    """Raises ValueError for ids outside the model's vocabulary, and for sequences that are longer than it can read."""
    facts = model.facts
    for part in (tokens.scored, tokens.fit):
        if part.min() < 0 or part.max() >= facts.vocab_size:
            raise ValueError(
                f"the given tokens have ids from {part.min()} to {part.max()}, and {model.source} has ids from 0 to "
                f"{facts.vocab_size - 1}; tokenise the text with its own tokenizer"
            )
    _check_length(model, tokens.seq_len)


def _read_tokens(path: Path) -> np.ndarray:
    try:
        with open(path, "rb") as file:  # np.load would also open archives and, were it allowed, pickles
            ids_NS = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a .npy array: {' '.join(str(error).split())[:200]}") from None
    if ids_NS.dtype.kind not in GIVEN_DTYPES or ids_NS.ndim != 2 or ids_NS.shape[1] < 3 or not len(ids_NS):
        raise ValueError(
            f"{path} holds {ids_NS.dtype} {list(ids_NS.shape)}; token ids are integers [sequences, length + 1], "
            f"with at least 3 columns"
        )
    return ids_NS.astype(np.int64)


def _check_length(model: Loaded, seq_len: int) -> None:
    if model.facts.max_len is not None and seq_len > model.facts.max_len:
        raise ValueError(f"seq_len={seq_len} is longer than the {model.facts.max_len:,} positions of {model.source}")


def measure_source(
    model: Loaded,
    corpus: str | None,
    seq_len: int,
    n_tokens: int,
    root: Path,
    *,
    text_field: str = "text",
    report: Report | None = None,
) -> HeldOutText:
    """Held-out text of `corpus` (of the run's own if None), tokenised once under `root`.

    `root` is the data folder of the run's results where there is one: a BPE that the run learned lies there. Raises
    ValueError for text or a tokenizer that cannot be used, and if not `n_tokens` tokens in windows of `seq_len` exist.
    """
    _check_length(model, seq_len)
    if model.config is None:
        config = _config(model, corpus, text_field, n_tokens)
        root = root / f"tokenizer-{_fingerprint(model.folder)}"
    else:
        config = _config_of_run(model.config, corpus, text_field)
    text = HeldOutText(prepare(config, root, report))
    available = text.corpus.n_val_tokens - 1
    if available < max(n_tokens, seq_len):
        raise ValueError(
            f"the held-out part of corpus={config.corpus!r} has {available:,} tokens in the tokenizer of "
            f"{model.source}, and {max(n_tokens, seq_len):,} are asked for; ask for fewer, or use a longer corpus"
        )
    return text


def tokenizer_of(model: Loaded, root: Path) -> Tokenizer:
    """The model's own tokenizer; one that a run learned is read from the run's data under `root`."""
    if model.config is None:
        return make_tokenizer(_tokenizer_folder(model.folder), (), model.facts.vocab_size)
    if model.config.tokenizer.startswith("bpe:"):
        return prepare(model.config, root).tokenizer()
    return make_tokenizer(model.config.tokenizer, (), model.config.vocab_size)


def _config(model: Loaded, corpus: str | None, text_field: str, n_tokens: int) -> RunConfig:
    """A run's config as far as the data package reads it."""
    fields = {
        "tokenizer": _tokenizer_folder(model.folder),
        "vocab_size": model.facts.vocab_size,
        "text_field": text_field,
    }
    if corpus is not None:
        fields["corpus"] = corpus
    config = build(RunConfig, fields, model.source)
    if config.corpus.startswith(HUB):  # a stream without end: read what holds twice the tokens that are wanted
        config = config.model_copy(update={"max_corpus_tokens": int(2 * n_tokens / config.val_fraction)})
    return config


def _config_of_run(config: RunConfig, corpus: str | None, text_field: str) -> RunConfig:
    if corpus in (None, config.corpus):
        return config
    if config.tokenizer.startswith("bpe:"):
        raise ValueError(
            f"tokenizer={config.tokenizer!r} of the run was learned on corpus={config.corpus!r} and cannot be learned "
            f"on {corpus!r} again; measure the run on its own corpus, or on given tokens"
        )
    return build(RunConfig, {**config.model_dump(mode="json"), "corpus": corpus, "text_field": text_field}, "run")


def _tokenizer_folder(folder: Path) -> str:
    """Raises ValueError for a folder without a tokenizer: transformers would make up an empty one."""
    if not (folder / TOKENIZER_FILE).exists() and not all((folder / name).exists() for name in _BPE_FILES):
        raise ValueError(f"{folder} has no {TOKENIZER_FILE}; copy the model's there, or measure on given tokens")
    return str(folder.resolve())


def _fingerprint(folder: Path) -> str:
    """12 hex digits of a folder's tokenizer: ids made by another one at the same place are not taken for its own."""
    return digest({name: sha256(folder / name) for name in _TOKENIZER_FILES if (folder / name).exists()})
