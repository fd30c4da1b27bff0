"""Text to tokens, once per corpus: documents -> split -> tokenizer -> token files, in ROOT/<data_id>/.

    documents   the corpus, one text or pair at a time         `data.text`, `data.pairs`
    split       each distinct text: training or held out, by its hash
    tokenizer   bytes, a BPE of the training texts, or one by name    `data.tokenizer`

    train.bin, val.bin   ids, little-endian uint16 (uint32 from 65,537 tokens on), the eod id after each document
    tokenizer.json       unless the tokenizer is 'byte'
    manifest.json        their sources, counts and checksums

The folder is written under another name and renamed, so it is complete or absent; a file lock makes others wait."""

import hashlib
import platform
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import ValidationError

from sparsedepth.config.corpus import STDLIB, corpus_name, is_learned
from sparsedepth.config.run import DataConfig, RunConfig, TextConfig
from sparsedepth.config.section import Section
from sparsedepth.data.corpus import chosen_files
from sparsedepth.data.sequences import Counted, Source, after_tokens, data_kind
from sparsedepth.data.tokenizer import TOKENIZER_FILE, Encoder, Tokenizer, reopen_tokenizer
from sparsedepth.files import atomic_folder, digest, local_path, locked, sha256, write_json
from sparsedepth.quantities.quantity import Named, without_none
from sparsedepth.words.plain_text import counted

MANIFEST = "manifest.json"
TRAIN, VAL = "train.bin", "val.bin"
_UNSORTED = "val.unsorted"
CHARACTERS_AT_ONCE = 1_000_000
"""Characters encoded in one call, so that a tokenizer can use every core and memory stays small."""
KEYS = 2**64


class Shard(Section):
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
    """of the folder's copy, which may be written differently"""
    tokenizer_source: str | None = None
    """SHA-256 of the file of a local tokenizer; None in manifests from before 2026-11-28"""
    eod: int
    val_fraction: float
    max_corpus_tokens: int | None
    dtype: str
    train: Shard
    val: Shard
    versions: dict[str, str]
    left_out: list[str] = []
    """files in the folder of the corpus that were not read"""


@dataclass(frozen=True)
class Corpus:
    """Tokenised text: `train` and `val` are read-only memory maps of ids, 1-d each."""

    folder: Path
    manifest: Manifest
    train: np.ndarray
    val: np.ndarray

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the ids, from the folder: needs neither network nor the original tokenizer."""
        return reopen_tokenizer(self.folder, self.manifest.eod)


class CorpusSource(Source):
    """A source that reads token files."""

    corpus: Corpus

    @property
    def eod(self) -> int | None:
        return self.corpus.manifest.eod

    @property
    def data_hash(self) -> str:
        return self.corpus.manifest.data_hash

    @property
    def facts(self) -> Named:
        """What a run records; pairs have two ends of documents in the files."""
        return self.corpus.manifest.model_dump(mode="json")

    def counted(self, config: RunConfig) -> Counted:
        """Each target after its token, over exactly the positions that the run trains on."""
        steps = (self.batch(config, step) for step in range(config.n_steps))
        return after_tokens(self.held_out(config.seq_len, config.val_tokens), steps, config.vocab_size)


class _TokenFile:
    """Documents as ids, appended one after the other."""

    def __init__(self, path: Path, encoder: Encoder) -> None:
        self.path = path
        self.eod = encoder.eod
        self.dtype = np.dtype("<u2" if encoder.size <= 2**16 else "<u4")
        self.documents = self.tokens = self.bytes = 0

    def add(self, file: BinaryIO, text: str, ids: Sequence[int] | np.ndarray) -> None:
        file.write(np.append(np.asarray(ids, dtype=self.dtype), self.dtype.type(self.eod)).tobytes())
        self.documents += 1
        self.tokens += len(ids) + 1
        self.bytes += len(text.encode())

    def shard(self, path: Path) -> Shard:
        """The manifest's entry of the documents in `path`."""
        return Shard(documents=self.documents, tokens=self.tokens, bytes=self.bytes, sha256=sha256(path))


class Document(NamedTuple):
    text: str
    key: int
    """uniform in [0, 2^64)"""
    held_out: bool


def split(texts: Iterable[str], val_fraction: float, part: Callable[[str], str] = str) -> Iterator[Document]:
    """Each distinct text with its side, which follows from `part` of it: all, or of a pair the prompt, so that answers
    to one prompt are on one side. If all were on one side, the text nearest the border changes sides.

        key(d) = first 64 bits of SHA-256(part of d);   d is held out  <=>  key(d) < val_fraction * 2^64

    Memory: one document, and 8-byte keys in a set (about 0.1 GB per million documents). Raises ValueError for fewer
    than two distinct documents."""
    border = int(val_fraction * KEYS)
    seen: set[int] = set()
    one_sided = True
    spare: Document | None = None  # nearest the border, while all are on one side
    for text in texts:
        whole, key = (int.from_bytes(hashlib.sha256(s.encode()).digest()[:8], "big") for s in (text, part(text)))
        if whole in seen:
            continue
        seen.add(whole)
        document = Document(text, key, key < border)
        if not one_sided:
            yield document
        elif spare is None:
            spare = document
        elif spare.held_out == document.held_out:
            near, far = sorted((spare, document), key=lambda document: abs(document.key - border))
            spare = near
            yield far
        else:
            one_sided = False
            yield from (spare, document)
    if len(seen) < 2:
        raise ValueError(
            f"the corpus holds {len(seen)} distinct document(s), and one must be held out; "
            "use a corpus of at least two documents (a file each, a row each, or a .txt file with blank lines in it)"
        )
    if one_sided:
        assert spare is not None
        yield spare._replace(held_out=not spare.held_out)


def write_shards(
    folder: Path, encoder: Encoder, kind: Any, config: DataConfig, show: Callable[[int, int], None]
) -> tuple[Shard, Shard, str]:
    """Split the corpus's texts and write both token files: their entries in the manifest, and the type of the ids.
    Training documents are in the order of the corpus, held-out ones in that of their keys, so that the first tokens of
    val.bin are a random sample of all held-out text. `show` gets the documents and tokens so far."""
    most = config.max_corpus_tokens or sys.maxsize
    train = _TokenFile(folder / TRAIN, encoder)
    val = _TokenFile(folder / _UNSORTED, encoder)
    spans: list[tuple[int, int, int]] = []  # key, first token, end of each held-out document
    # Stop before the split, so that it can still choose a document to hold out.
    texts = takewhile(lambda _: train.tokens < most, kind.texts(config))
    documents = split(texts, config.val_fraction, kind.decides_side)
    with open(train.path, "wb") as train_file, open(val.path, "wb") as val_file:
        for batch in _batches(documents):
            encoded = encoder.encode([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                if document.held_out:
                    spans.append((document.key, val.tokens, val.tokens + len(ids) + 1))
                    val.add(val_file, document.text, ids)
                elif train.tokens < most:
                    train.add(train_file, document.text, ids)
            show(train.documents + val.documents, train.tokens + val.tokens)
    ids = np.memmap(val.path, dtype=val.dtype, mode="r")
    with open(folder / VAL, "wb") as file:
        for _, start, end in sorted(spans):
            file.write(ids[start:end].tobytes())
    val.path.unlink()
    return train.shard(train.path), val.shard(folder / VAL), train.dtype.str


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents with CHARACTERS_AT_ONCE characters together."""
    batch = []
    n_characters = 0
    for document in documents:
        batch.append(document)
        n_characters += len(document.text)
        if n_characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch = []
            n_characters = 0
    if batch:
        yield batch


def open_shards(folder: Path) -> Corpus:
    """The corpus in `folder`. Raises ValueError, with the fix, unless all files match their manifest."""
    fix = f"delete the folder {folder} and run again to tokenise the corpus"
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        reason = "missing" if isinstance(error, OSError) else "damaged"
        raise ValueError(f"{folder / MANIFEST} is {reason}; {fix}") from None
    checksums = {TRAIN: manifest.train.sha256, VAL: manifest.val.sha256, TOKENIZER_FILE: manifest.tokenizer_sha256}
    for name, checksum in without_none(checksums).items():
        if not (path := folder / name).is_file():
            raise ValueError(f"{path} is missing; {fix}")
        if sha256(path) != checksum:
            raise ValueError(f"{path} is damaged: its checksum is not that of its manifest; {fix}")
    train, val = (np.memmap(folder / name, dtype=manifest.dtype, mode="r") for name in (TRAIN, VAL))
    return Corpus(folder=folder, manifest=manifest, train=train, val=val)


def nothing_left(what: str, n_tokens: int, skip_tokens: int, has: str) -> ValueError:
    """The error for a held-out part that is too short."""
    return ValueError(
        f"no {what} is left: {n_tokens:,} held-out tokens are needed after the first {skip_tokens:,}, "
        f"and {has}; lower measure_tokens, raise val_fraction, or use a longer corpus"
    )


def data_id(config: RunConfig | TextConfig, kind: Any) -> str:
    """12 hex digits: a hash of the fields that change the tokens."""
    fields = ["corpus", "tokenizer", "val_fraction", "max_corpus_tokens"]
    if config.corpus != STDLIB:
        fields.append("text_field")
    if _has_own_tokenizer(config):
        fields.append("start_weights")
    return digest({"format": kind.format, **{name: getattr(config, name) for name in fields}})


def _has_own_tokenizer(config: RunConfig | TextConfig) -> bool:
    """Whether the tokenizer was learned by the model from which training starts."""
    return config.start_weights is not None and is_learned(config.tokenizer)


def prepare(config: RunConfig | TextConfig, root: Path, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus of `config` under `root`, tokenised if needed, and verified by checksum; `tokenizer` is that of the
    model from which training starts, if that model learned it. Raises ValueError for an unusable corpus or tokenizer,
    one with another `eod`, a damaged shard, and local text that changed after tokenisation."""
    name = corpus_name(config.corpus)
    kind = data_kind(config.corpus)
    folder = root / data_id(config, kind)
    if not folder.exists():
        if name.origin == "hub" and not name.place.partition(":")[0]:
            raise ValueError(f"corpus={config.corpus!r} names no data set; write 'hub:NAME' or 'hub:NAME:CONFIG'")
        if not name.place:
            raise ValueError(f"corpus={config.corpus!r} names no file; write the path after it: '{config.corpus}PATH'")
        if name.origin == "files" and root.resolve().is_relative_to(local_path(name.place).resolve()):
            raise ValueError(
                f"corpus={config.corpus!r} holds the output folder {root} and would read its own output; move one"
            )
        with locked(root / f".{folder.name}.lock"):
            if not folder.exists():
                _make_folder(config, kind, folder, tokenizer)
    corpus = open_shards(folder)
    _check_fits(config, kind, corpus)
    return corpus


def _make_folder(config: RunConfig | TextConfig, kind: Any, folder: Path, tokenizer: Any) -> None:
    """Reads a corpus into shards and their manifest; the folder appears whole or not at all."""
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):  # of processes that died, since we hold the lock
        shutil.rmtree(leftover)
    if tokenizer is None and _has_own_tokenizer(config):
        raise ValueError(
            f"tokenizer={config.tokenizer!r} was learned by the model {config.start_weights} that training started "
            "from, and the data folder that held it is gone: copy it back, or use `train --from`"
        )
    with atomic_folder(folder) as unfinished:
        tokenizer = tokenizer or kind.tokenizer(config)
        before = kind.fingerprint(config.corpus)  # before reading, so that an edit meanwhile is detected
        tokenizer.save(unfinished)
        with _progress(config.corpus) as show:
            train, val, dtype = write_shards(unfinished, kind.encoder(tokenizer), kind, config, show)
        saved = unfinished / TOKENIZER_FILE
        files, rest = chosen_files(config.corpus) if corpus_name(config.corpus).origin == "files" else ([], [])
        if rest:
            told = f"read {train.documents + val.documents:,} documents in {counted(len(files), 'file')}"
            print(f"{told}; left out: {', '.join(rest)}", file=sys.stderr)
        manifest = Manifest(
            data_id=folder.name,
            data_hash=digest([train.sha256, val.sha256]),
            fingerprint=before,
            **{name: getattr(config, name) for name in DataConfig.model_fields if name in Manifest.model_fields},
            tokenizer_size=tokenizer.size,
            tokenizer_sha256=sha256(saved) if saved.exists() else None,
            tokenizer_source=_source_of_tokenizer(config),
            eod=tokenizer.eod,
            dtype=dtype,
            train=train,
            val=val,
            versions={"python": platform.python_version()}
            | {name: version(name) for name in ("sparsedepth", *kind.packages(config))},
            left_out=rest,
        )
        write_json(unfinished / MANIFEST, manifest.model_dump(mode="json"))


@contextmanager
def _progress(corpus: str) -> Generator[Callable[[int, int], None]]:
    """A progress line with documents and tokens; nothing if standard error is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    counts = "{task.description} {task.fields[documents]:,} documents, {task.completed:,} tokens"
    columns = (SpinnerColumn(), TextColumn(counts, markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"tokenising {corpus}:", total=None, documents=0)
        yield lambda documents, tokens: progress.update(task, documents=documents, completed=tokens)


def _source_of_tokenizer(config: RunConfig | TextConfig) -> str | None:
    """The checksum of a local tokenizer's file; None for another one, and where the file is not at hand."""
    file = local_path(config.tokenizer) / TOKENIZER_FILE
    return sha256(file) if file.is_file() else None


def _check_fits(config: RunConfig | TextConfig, kind: Any, corpus: Corpus) -> None:
    """Raises ValueError for a tokenizer that does not fit the run's fields, and for a tokenizer or files of text (by
    their names and sizes) that have changed."""
    eod = corpus.manifest.eod
    kind.check_fits(config, corpus)
    text = kind.fingerprint(config.corpus), corpus.manifest.fingerprint
    ids = _source_of_tokenizer(config), corpus.manifest.tokenizer_source
    for name, (now, before) in {"corpus": text, "tokenizer": ids}.items():
        if None not in (now, before) and now != before:
            raise ValueError(
                f"{name}={getattr(config, name)!r} has changed since {corpus.folder} was made from it, and runs on "
                "two texts cannot be compared; restore it, or name another results folder"
            )
    if isinstance(config, RunConfig) and config.mask_documents and config.eod != eod:
        raise ValueError(
            f"eod={config.eod}, and tokenizer={config.tokenizer!r} ends a document with {eod}; set eod={eod}"
        )
