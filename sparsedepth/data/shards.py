"""Token files, with a manifest of their contents.

    DIR/
        train.bin, val.bin   ids, little-endian uint16 (uint32 from 65,537 tokens on), the eod id after each document
        tokenizer.json       unless the tokenizer is 'byte'
        manifest.json        their sources, counts and checksums

Training documents are in the order of the corpus (batches shuffle them), held-out documents in the order of their hash,
so that the first tokens of val.bin are a random sample of all held-out text.
"""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from pydantic import ValidationError

from sparsedepth.config.section import Section
from sparsedepth.data.split import Document
from sparsedepth.data.tokenizer import TOKENIZER_FILE, Tokenizer, reopen_tokenizer
from sparsedepth.files import sha256

MANIFEST = "manifest.json"
TRAIN, VAL = "train.bin", "val.bin"
_UNSORTED = "val.unsorted"
_CHARACTERS_AT_ONCE = 1_000_000
"""Characters encoded in one call, so that a tokenizer can use every core and memory stays small."""


class Shard(Section):
    """One token file."""

    documents: int
    tokens: int
    """ends of documents included"""
    bytes: int
    """UTF-8 bytes of the text, ends of documents excluded"""
    sha256: str


class Manifest(Section):
    data_id: str
    data_hash: str
    """12 hex digits of both shards' checksums: equal if and only if the tokens are."""
    corpus: str
    fingerprint: str | None
    text_field: str
    tokenizer: str
    tokenizer_size: int
    tokenizer_sha256: str | None
    eod: int
    val_fraction: float
    max_corpus_tokens: int | None
    dtype: str
    train: Shard
    val: Shard
    versions: dict[str, str]


@dataclass(frozen=True)
class Corpus:
    """Tokenised text: `train` and `val` are read-only memory maps of ids, 1-d each."""

    folder: Path
    manifest: Manifest
    train: np.ndarray
    val: np.ndarray

    @property
    def data_hash(self) -> str:
        return self.manifest.data_hash

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the ids, from the folder: needs neither network nor the original tokenizer."""
        return reopen_tokenizer(self.folder, self.manifest.eod)


class CorpusSource:
    """Facts about the corpus, for all sources that read token files."""

    corpus: Corpus

    @property
    def eod(self) -> int | None:
        return self.corpus.manifest.eod

    @property
    def data_hash(self) -> str:
        return self.corpus.data_hash

    @property
    def facts(self) -> dict[str, Any]:
        """What a run records; documents of prompt and answer have two ends in the files."""
        return self.corpus.manifest.model_dump(mode="json")


class TokenFile:
    """Documents as ids, appended one after the other."""

    def __init__(self, file: BinaryIO, dtype: np.dtype, eod: int) -> None:
        self._file, self.dtype, self._eod = file, dtype, eod
        self.documents = self.tokens = self.bytes = 0

    def add(self, ids: Sequence[int] | np.ndarray, n_bytes: int) -> None:
        self._file.write(np.append(np.asarray(ids, dtype=self.dtype), self.dtype.type(self._eod)).tobytes())
        self.documents += 1
        self.tokens += len(ids) + 1
        self.bytes += n_bytes

    def flush(self) -> None:
        self._file.flush()

    def shard(self, path: Path) -> Shard:
        """The manifest's entry of the documents in `path`."""
        return Shard(documents=self.documents, tokens=self.tokens, bytes=self.bytes, sha256=sha256(path))


class Encoder(Protocol):
    """A tokenizer, as far as it is used here."""

    size: int
    eod: int

    def encode(self, texts: list[str]) -> Sequence[Sequence[int] | np.ndarray]: ...


class ShardWriter:
    """Encodes documents in batches, and appends each to the token file of its side."""

    def __init__(
        self, folder: Path, tokenizer: Encoder, train: TokenFile, val: TokenFile, max_train_tokens: int
    ) -> None:
        self._folder, self._tokenizer, self._max_train_tokens = folder, tokenizer, max_train_tokens
        self.train, self.val = train, val
        self._spans: list[tuple[int, int, int]] = []  # key, first token, end of each held-out document
        self._batch: list[Document] = []
        self._n_characters = 0

    @property
    def is_full(self) -> bool:
        """Whether the requested number of training tokens is written."""
        return self.train.tokens >= self._max_train_tokens

    def add(self, document: Document) -> None:
        self._batch.append(document)
        self._n_characters += len(document.text)
        if self._n_characters >= _CHARACTERS_AT_ONCE:
            self._write_batch()

    def _write_batch(self) -> None:
        encoded = self._tokenizer.encode([document.text for document in self._batch])
        for document, ids in zip(self._batch, encoded, strict=True):
            if document.held_out:
                self._spans.append((document.key, self.val.tokens, self.val.tokens + len(ids) + 1))
                self.val.add(ids, len(document.text.encode()))
            elif not self.is_full:
                self.train.add(ids, len(document.text.encode()))
        self._batch, self._n_characters = [], 0

    def finish(self) -> tuple[Shard, Shard]:
        """Write the last batch and sort the held-out documents; the manifest's entries of both files."""
        self._write_batch()
        self.train.flush()
        self.val.flush()
        unsorted = self._folder / _UNSORTED
        ids = np.memmap(unsorted, dtype=self.val.dtype, mode="r")
        with open(self._folder / VAL, "wb") as file:
            for _, start, end in sorted(self._spans):
                file.write(ids[start:end].tobytes())
        unsorted.unlink()
        return self.train.shard(self._folder / TRAIN), self.val.shard(self._folder / VAL)


@contextmanager
def shard_writer(folder: Path, tokenizer: Encoder, max_train_tokens: int | None = None) -> Generator[ShardWriter]:
    """A writer for the token files of `folder`: add documents, then finish."""
    dtype, eod = np.dtype("<u2" if tokenizer.size <= 2**16 else "<u4"), tokenizer.eod
    with open(folder / TRAIN, "wb") as train, open(folder / _UNSORTED, "wb") as val:
        files = TokenFile(train, dtype, eod), TokenFile(val, dtype, eod)
        yield ShardWriter(folder, tokenizer, *files, max_train_tokens or sys.maxsize)


def open_shards(folder: Path) -> Corpus:
    """The corpus in `folder`. Raises ValueError, with the fix, unless all files match their manifest."""
    fix = remedy(folder)
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        reason = "missing" if isinstance(error, OSError) else "damaged"
        raise ValueError(f"{folder / MANIFEST} is {reason}; {fix}") from None
    width = np.dtype(manifest.dtype).itemsize
    for name, shard in ((TRAIN, manifest.train), (VAL, manifest.val)):
        _check_file(folder / name, shard.sha256, shard.tokens * width, fix)
    if manifest.tokenizer_sha256 is not None:
        _check_file(folder / TOKENIZER_FILE, manifest.tokenizer_sha256, None, fix)
    train, val = (np.memmap(folder / name, dtype=manifest.dtype, mode="r") for name in (TRAIN, VAL))
    return Corpus(folder=folder, manifest=manifest, train=train, val=val)


def remedy(folder: Path) -> str:
    """The fix for unusable token files."""
    return f"delete the folder {folder} and run again to tokenise the corpus"


def _check_file(path: Path, checksum: str, size: int | None, fix: str) -> None:
    try:
        n_bytes = path.stat().st_size
    except OSError:
        raise ValueError(f"{path} is missing; {fix}") from None
    if size is not None and n_bytes != size:
        raise ValueError(f"{path} has {n_bytes:,} bytes where its manifest says {size:,}; {fix}")
    if sha256(path) != checksum:
        raise ValueError(f"{path} is damaged: its checksum is not that of its manifest; {fix}")
