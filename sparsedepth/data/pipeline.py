"""Text to tokens, once per corpus: documents -> split -> tokenizer -> shards, in ROOT/<data_id>/.

    documents   the corpus, one text, pair or image at a time         `data.text`, `data.pairs`, `data.images`
    split       each distinct text: training or held out              `data.shards`
    tokenizer   bytes, a BPE of the training texts, or one by name    `data.tokenizer`
    shards      the ids of each side, in a file                       `data.shards`

The folder is written under another name and renamed, so it is complete or absent; a file lock makes others wait.
"""

import platform
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparsedepth.config.corpus import STDLIB, corpus_name, is_learned
from sparsedepth.config.run import DataConfig, RunConfig, TextConfig
from sparsedepth.data.shards import MANIFEST, Corpus, Manifest, open_shards, write_shards
from sparsedepth.data.source import data_kind
from sparsedepth.data.tokenizer import TOKENIZER_FILE, Tokenizer
from sparsedepth.files import atomic_folder, digest, locked, sha256, write_json

FORMAT = 1
"""Increased when the same configuration would give other tokens than before."""


def data_id(config: RunConfig | TextConfig) -> str:
    """12 hex digits: a hash of the fields that change the tokens."""
    fields = ["corpus", "tokenizer", "val_fraction", "max_corpus_tokens", *data_kind(config.corpus).own_fields]
    fields += ["text_field"] if config.corpus != STDLIB else []
    fields += ["start_weights"] if _has_own_tokenizer(config) else []
    return digest({"format": FORMAT, **{name: getattr(config, name) for name in fields}})


def _has_own_tokenizer(config: RunConfig | TextConfig) -> bool:
    """Whether the tokenizer was learned by the model from which training starts."""
    return config.start_weights is not None and is_learned(config.tokenizer)


def prepare(config: RunConfig | TextConfig, root: Path, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus of `config` under `root`, tokenised if needed, and verified by checksum; `tokenizer` is that of the
    model from which training starts, if that model learned it. Raises ValueError for an unusable corpus or tokenizer,
    one with another `eod`, a damaged shard, and local text that changed after tokenisation."""
    folder = root / data_id(config)
    if not folder.exists():
        name = corpus_name(config.corpus)
        if not name.place:
            raise ValueError(f"corpus={config.corpus!r} names no file; write the path after it: '{config.corpus}PATH'")
        if name.origin == "files" and root.resolve().is_relative_to(Path(name.place).expanduser().resolve()):
            told = f"corpus={config.corpus!r} holds the output folder {root} and would read its own output"
            raise ValueError(f"{told}; move one")
        with locked(root / f".{folder.name}.lock"):
            if not folder.exists():
                _make_folder(config, folder, tokenizer)
    corpus = open_shards(folder)
    _check_fits(config, corpus)
    return corpus


def _make_folder(config: RunConfig | TextConfig, folder: Path, tokenizer: Any) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):  # of processes that died, since we hold the lock
        shutil.rmtree(leftover)
    if tokenizer is None and _has_own_tokenizer(config):
        told = f"tokenizer={config.tokenizer!r} was learned by the model {config.start_weights} that training started"
        raise ValueError(f"{told} from, and the data folder that held it is gone: copy it back, or use `train --from`")
    kind = data_kind(config.corpus)
    with atomic_folder(folder) as unfinished:
        tokenizer = tokenizer or kind.tokenizer(config)
        before = kind.fingerprint(config.corpus)  # before reading, so that an edit meanwhile is detected
        tokenizer.save(unfinished)
        with _progress(config.corpus) as show:
            encoder, texts = kind.encoder(tokenizer), kind.texts(config)
            train, val, dtype = write_shards(unfinished, encoder, texts, config, show)
        saved = unfinished / TOKENIZER_FILE
        packages = ["datasets"] if corpus_name(config.corpus).origin == "hub" else []
        manifest = Manifest(
            data_id=folder.name,
            data_hash=digest([train.sha256, val.sha256]),
            fingerprint=before,
            **{name: getattr(config, name) for name in DataConfig.model_fields if name in Manifest.model_fields},
            tokenizer_size=tokenizer.size,
            tokenizer_sha256=sha256(saved) if saved.exists() else None,
            eod=tokenizer.eod,
            dtype=dtype,
            train=train,
            val=val,
            versions={"python": platform.python_version()}
            | {name: version(name) for name in ("sparsedepth", *packages, *kind.packages(config))},
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


def _check_fits(config: RunConfig | TextConfig, corpus: Corpus) -> None:
    """Raises ValueError for a tokenizer that does not fit the run's fields, and for text that has changed."""
    kind, eod = data_kind(config.corpus), corpus.manifest.eod
    kind.check_fits(config, corpus)
    now = kind.fingerprint(config.corpus)
    if now is not None and corpus.manifest.fingerprint not in (now, None):
        told = f"corpus={config.corpus!r} has changed since {corpus.folder} was made from it, and runs on two texts"
        raise ValueError(f"{told} cannot be compared; restore it, or name another results folder")
    if isinstance(config, RunConfig) and config.mask_documents and config.eod != eod:
        told = f"eod={config.eod}, and tokenizer={config.tokenizer!r} ends a document with {eod}"
        raise ValueError(f"{told}; set eod={eod}")
