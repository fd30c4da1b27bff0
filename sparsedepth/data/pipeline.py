"""Text to tokens, once per corpus: documents -> split -> tokenizer -> shards, in ROOT/<data_id>/.

    documents   the corpus, one text, pair or image at a time         `data.text`, `data.pairs`, `data.images`
    split       each distinct text: training or held out              `data.split`
    tokenizer   bytes, a BPE of the training texts, or one by name    `data.tokenizer`
    shards      the ids of each side, in a file                       `data.shards`

The folder is written under another name, flushed to disk and renamed, so it is complete or absent. A file lock makes
other processes wait and reuse it.
"""

import platform
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparsedepth.config.corpus import STDLIB, corpus_name
from sparsedepth.config.run import RunConfig, TextConfig
from sparsedepth.config.tokenizer import is_learned
from sparsedepth.data.shards import MANIFEST, Corpus, Manifest, open_shards, write_shards
from sparsedepth.data.source import data_kind
from sparsedepth.data.tokenizer import TOKENIZER_FILE, Tokenizer
from sparsedepth.files import atomic_folder, digest, locked, sha256, write_json

FORMAT = 1
"""Increased when the same configuration would give other tokens than before."""


def _kind(config: RunConfig | TextConfig) -> Any:
    """How texts of the config's corpus become ids, with the functions of `data.text.TextKind`."""
    return data_kind(config.corpus)


def data_id(config: RunConfig | TextConfig) -> str:
    """12 hex digits that identify the tokens: a hash of the fields that change them."""
    fields = ("corpus", "tokenizer", "val_fraction", "max_corpus_tokens")
    chosen = {name: getattr(config, name) for name in (*fields, *_kind(config).own_fields)}
    if config.corpus != STDLIB:
        chosen["text_field"] = config.text_field
    if _has_own_tokenizer(config):
        chosen["start_weights"] = config.start_weights
    return digest({"format": FORMAT, **chosen})


def _has_own_tokenizer(config: RunConfig | TextConfig) -> bool:
    """Whether the tokenizer was learned by the model from which training starts."""
    return config.start_weights is not None and is_learned(config.tokenizer)


def prepare(config: RunConfig | TextConfig, root: Path, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus of `config` under `root`, tokenised if needed, and verified by checksum.

    `tokenizer` is that of the model from which training starts, if that model learned it. Any number of processes may
    call this at once. Raises ValueError for an unusable corpus or tokenizer, a tokenizer with another `eod`, a damaged
    shard, and local text that changed after tokenisation.
    """
    folder = root / data_id(config)
    if not folder.exists():
        name = corpus_name(config.corpus)
        if not name.place:
            raise ValueError(f"corpus={config.corpus!r} names no file; write the path after it: '{config.corpus}PATH'")
        if name.origin == "files" and root.resolve().is_relative_to(Path(name.place).expanduser().resolve()):
            raise ValueError(
                f"corpus={config.corpus!r} holds the output folder {root} and would read its own output; move one"
            )
        with locked(root / f".{folder.name}.lock"):
            if not folder.exists():
                _make_folder(config, folder, tokenizer)
    corpus = open_shards(folder)
    _check_fits(config, corpus)
    return corpus


def _make_folder(config: RunConfig | TextConfig, folder: Path, tokenizer: Tokenizer | None) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):  # of processes that died, since we hold the lock
        shutil.rmtree(leftover)
    with atomic_folder(folder) as unfinished:
        manifest = _tokenise(config, unfinished, tokenizer or _tokenizer(config))
        write_json(unfinished / MANIFEST, manifest.model_dump(mode="json"))


def _tokenizer(config: RunConfig | TextConfig) -> Any:
    """The tokenizer of the config; a learned one reads the corpus."""
    if _has_own_tokenizer(config):
        raise ValueError(
            f"tokenizer={config.tokenizer!r} was learned by the model {config.start_weights} that training started "
            f"from, and the run's data folder, which held it, is gone: copy it back, or use `train --from`"
        )
    return _kind(config).tokenizer(config)


def _tokenise(config: RunConfig | TextConfig, folder: Path, tokenizer: Any) -> Manifest:
    kind = _kind(config)
    before = kind.fingerprint(config.corpus)  # before reading, so that an edit meanwhile is detected
    tokenizer.save(folder)
    encoder, texts = kind.encoder(tokenizer), kind.texts(config)
    with _progress(config.corpus) as show:
        train, val, dtype = write_shards(folder, encoder, texts, config.val_fraction, config.max_corpus_tokens, show)
    saved = folder / TOKENIZER_FILE
    return Manifest(
        data_id=data_id(config),
        data_hash=digest([train.sha256, val.sha256]),
        corpus=config.corpus,
        fingerprint=before,
        text_field=config.text_field,
        tokenizer=config.tokenizer,
        tokenizer_size=tokenizer.size,
        tokenizer_sha256=sha256(saved) if saved.exists() else None,
        eod=tokenizer.eod,
        val_fraction=config.val_fraction,
        max_corpus_tokens=config.max_corpus_tokens,
        dtype=dtype,
        train=train,
        val=val,
        versions=_versions(config),
    )


def _versions(config: RunConfig | TextConfig) -> dict[str, str]:
    """Versions of the packages that determine the tokens."""
    reading = ["datasets"] if corpus_name(config.corpus).origin == "hub" else []
    packages = ["sparsedepth", *reading, *_kind(config).packages(config)]
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


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


def _check_fits(config: RunConfig | TextConfig, corpus: Corpus) -> None:
    """Raises ValueError for a tokenizer that does not fit the run's fields, and for text that has changed."""
    manifest = corpus.manifest
    _kind(config).check_fits(config, corpus)
    now = _kind(config).fingerprint(config.corpus)
    if now is not None and manifest.fingerprint not in (now, None):
        raise ValueError(
            f"corpus={config.corpus!r} has changed since {corpus.folder} was made from it: runs on the two texts "
            "cannot be compared; restore the text, or choose another results folder"
        )
    if isinstance(config, RunConfig) and config.mask_documents and config.eod != manifest.eod:
        raise ValueError(
            f"eod={config.eod}, and tokenizer={config.tokenizer!r} ends a document with {manifest.eod}; "
            f"set eod={manifest.eod}"
        )
