"""The data that a model is measured on: held-out text in its own tokenizer, or token arrays from files.

A run is measured on its own corpus or task, unless another text is named. All other models read the documents that a
run on the same corpus holds out (by the hash of their text): models in one table read one text, but of a hub's stream.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsedepth.config.corpus import TEXT, corpus_name, is_learned, kind_of
from sparsedepth.config.load import build
from sparsedepth.config.run import FIT, MeasureOnlyConfig, RunConfig, TextConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.ngram_losses import after_tokens_of_text
from sparsedepth.data.pipeline import Corpus, CorpusSource, prepare
from sparsedepth.data.sequences import Counted, Sequences, Source, after_tokens, next_tokens, open_source
from sparsedepth.data.text import TextSource
from sparsedepth.data.tokenizer import TOKENIZER_FILE, Tokenizer, make_tokenizer
from sparsedepth.files import NotRegularError, digest, open_regular, refuse_empty, sha256, unreadable
from sparsedepth.probe.load import LoadedModel
from sparsedepth.store.run_record import RUNS

MAX_TOKEN_BYTES = 2**40
_BPE_FILES = ("vocab.json", "merges.txt")
_TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", *_BPE_FILES)


@dataclass(frozen=True, eq=False)
class TokenArrays:
    """Token arrays with the interface of a source: `held_out` with skip_tokens returns the fit part."""

    scored: Sequences
    fit: Sequences

    bytes_per_token: None = None
    eod: None = None

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        chosen = self.fit if skip_tokens else self.scored
        assert chosen.inputs.shape[1] == seq_len, "token arrays have one length"
        if n_tokens < seq_len:
            raise ValueError(f"{n_tokens} tokens are less than one sequence of {seq_len}; raise the number of tokens")
        return chosen[: n_tokens // seq_len]

    @property
    def seq_len(self) -> int:
        return self.scored.inputs.shape[1]

    @property
    def data_hash(self) -> str:
        arrays = [array for part in (self.scored, self.fit) for array in (part.inputs, part.targets)]
        return digest([[array.shape, hashlib.sha256(array.tobytes()).hexdigest()] for array in arrays])


def read_token_arrays(scored: Path, fit: Path | None = None, targets: Path | None = None) -> TokenArrays:
    """Sequences from .npy files of integers: token ids [N, T] with `targets` [N, T], -100 where not scored; or only ids
    [N, T + 1], whose targets are the next tokens. Usefulness fits its maps on all tokens of `fit`; without it on the
    last half of the sequences, and the first half is scored. Raises ValueError for other files or shapes, for the same
    sequences in both, and if no position is scored."""
    ids = _read_ids(scored, least=2 if targets else 3)
    whole = next_tokens(ids) if targets is None else Sequences(inputs=ids, targets=_read_ids(targets, least=2))
    if whole.targets.shape != whole.inputs.shape:
        raise ValueError(
            f"{targets} holds {list(whole.targets.shape)} and {scored} holds {list(ids.shape)}: targets need the shape "
            f"of their tokens, {IGNORED} where a position is not scored"
        )
    if fit is None:
        if len(whole) < 2:
            raise ValueError(f"{scored} has 1 sequence, and half are for fitting; give --fit-tokens, or two")
        arrays = halves(whole)
    else:
        ids = _read_ids(fit, least=2 if targets else 3)
        others = Sequences(inputs=ids, targets=np.full_like(ids, IGNORED)) if targets else next_tokens(ids)
        arrays = TokenArrays(whole, others)
        if (length := others.inputs.shape[1]) != arrays.seq_len:
            raise ValueError(
                f"{fit} has sequences of {length} tokens and {scored} of {arrays.seq_len}; give equal ones"
            )
        # Short tasks may repeat a few sequences; of the same ones maps would be judged on what they were fitted on.
        scored_rows, fit_rows = ({row.tobytes() for row in part.inputs} for part in (whole, others))
        if scored_rows <= fit_rows or fit_rows <= scored_rows:
            raise ValueError(
                f"{fit} and {scored} hold the same sequences, and maps must be fitted on other tokens than those that "
                f"they are judged on; give others, or leave --fit-tokens out"
            )
    if not arrays.scored.n_scored:
        raise ValueError(f"{targets}: no target of the scored sequences is scored: all are {IGNORED}")
    return arrays


def halves(whole: Sequences) -> TokenArrays:
    """The first half, to be scored, and the last, for fitting."""
    n_scored = len(whole) - len(whole) // 2
    return TokenArrays(whole[:n_scored], whole[n_scored:])


def check_tokens(tokens: TokenArrays, model: LoadedModel) -> None:
    """Raises ValueError for ids outside the model's vocabulary, and for sequences longer than its context."""
    size = model.facts.vocab_size
    for part in (tokens.scored, tokens.fit):
        for name, ids, fix in (
            ("ids of the token arrays", part.inputs, "tokenise the text with its own tokenizer"),
            ("targets", part.targets[part.targets != IGNORED], f"write {IGNORED} where a position is not scored"),
        ):
            if ids.size and (ids.min() < 0 or ids.max() >= size):
                raise ValueError(
                    f"the {name} are from {ids.min()} to {ids.max()}, and {model.source} has ids from 0 to {size - 1}; "
                    f"{fix}"
                )
    check_length(model, tokens.seq_len, "cut the sequences of the token arrays to that length")


def _read_ids(path: Path, least: int) -> np.ndarray:
    refuse_empty(path)
    try:
        with open_regular(
            path, MAX_TOKEN_BYTES, path.parent
        ) as file:  # np.load would also open archives and, were it allowed, pickles
            ids = np.lib.format.read_array(file, allow_pickle=False)
    except NotRegularError as error:
        raise unreadable(path, error) from None
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise ValueError(f"{path} cannot be read as a .npy array: {' '.join(str(error).split())[:200]}") from None
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 2 or ids.shape[1] < least or not len(ids):
        raise ValueError(
            f"{path} holds {ids.dtype} {list(ids.shape)}; token ids are integers "
            f"[sequences, {'length + 1' if least == 3 else 'length'}], with at least {least} columns"
        )
    return ids.astype(np.int64)


def check_length(model: LoadedModel, seq_len: int, fix: str = "choose a length up to that (--seq-len)") -> None:
    """Raises ValueError, with the `fix`, for sequences longer than the model's context."""
    if (longest := model.facts.max_len) is not None and seq_len > longest:
        raise ValueError(f"seq_len={seq_len} is longer than the {longest:,} positions of {model.source}; {fix}")


@dataclass(frozen=True, eq=False)
class MeasuredTokens:
    source: Source | TokenArrays
    counted: Callable[[], Counted]
    """for unigram, bigram and chance loss: what a run was trained on, another text's training part, given fit tokens"""


@contextmanager
def tokens_to_measure(
    model: LoadedModel,
    config: MeasureOnlyConfig,
    corpus: str | None = None,
    given: TokenArrays | None = None,
    begin: Callable[[], None] = lambda: None,
    root: Path | None = None,
) -> Generator[MeasuredTokens]:
    """The given tokens, or held-out text of `corpus`; without either a run's own held-out text or task, else the
    default text. `begin` is called before a text is read; its tokens are kept under `root`, if given. Raises
    ValueError for ids outside the vocabulary, for unusable text or tokenizers, and too few tokens."""
    if given is not None:
        check_tokens(given, model)
        size, numbers = model.facts.vocab_size, (config.seq_len, config.val_tokens)
        yield MeasuredTokens(given, lambda: after_tokens(given.held_out(*numbers), [given.fit], size))
        return
    check_length(model, config.seq_len)
    begin()
    with tempfile.TemporaryDirectory() as scratch:
        runs = model.folder.resolve().parent
        own = runs.parent / "data"
        is_own = model.config and runs.name == RUNS and (own.is_dir() or os.access(runs.parent, os.W_OK))
        root = own if is_own else root or Path(scratch)
        n_tokens = config.measure_tokens + config.fit_tokens * (not FIT.isdisjoint(config.measures))
        source = measure_source(model, corpus, config.seq_len, n_tokens, root, config.val_tokens)
        yield MeasuredTokens(source, lambda: _counted(model, config, corpus, source))


def _counted(model: LoadedModel, config: MeasureOnlyConfig, corpus: str | None, source: Source) -> Counted:
    if run := _own_run(model, corpus):
        if not isinstance(source, CorpusSource):  # a task is drawn at any length
            return source.counted(run.model_copy(update={"seq_len": config.seq_len, "val_tokens": config.val_tokens}))
        # The steps on text were of the run's own length, and the held-out text is of this one.
        own = run.model_copy(update={"val_tokens": max(config.val_tokens, run.seq_len)})
        return source.counted(own)._replace(held_out=source.held_out(config.seq_len, config.val_tokens))
    assert isinstance(source, TextSource), "only a run has a task or pairs"
    held_out = source.held_out(config.seq_len, config.val_tokens)
    return after_tokens_of_text(held_out, source.corpus.train, model.facts.vocab_size)


def _own_run(model: LoadedModel, corpus: str | None) -> RunConfig | None:
    """The run that the model is of, where its own corpus is read."""
    return model.config if model.config and corpus in (None, model.config.corpus) else None


def measure_source(
    model: LoadedModel, corpus: str | None, seq_len: int, n_tokens: int, root: Path, n_read: int = 0
) -> Source:
    """Held-out text of `corpus`, tokenised once under `root`; if None, a run's own held-out text or task. `root` is the
    data folder of the run's results, if any, with its learned BPE. Raises ValueError for unusable text or tokenizers,
    and unless there are `n_tokens` tokens in windows of `seq_len`; of an endless stream `n_read` are asked for."""
    if run := _own_run(model, corpus):
        source = open_source(run, root)
    elif corpus is not None and kind_of(corpus) is not TEXT:
        raise ValueError(f"{model.source} was not trained on {corpus!r}; give its sequences by --tokens and --targets")
    else:
        source = TextSource(_other_text(model, corpus, max(n_read, n_tokens), root))
    if not isinstance(source, TextSource):
        return source  # with any number of tokens
    available, needed = len(source.corpus.val) - 1, max(n_tokens, seq_len)
    if available < needed:
        raise ValueError(
            f"the held-out part of corpus={source.corpus.manifest.corpus!r} has {available:,} tokens in the tokenizer "
            f"of {model.source}, and {needed:,} are needed; lower measure_tokens or fit_tokens, or use a longer corpus"
        )
    return source


def tokenizer_of(model: LoadedModel, root: Path) -> Tokenizer:
    """The model's own tokenizer; one learned by a run is read from the run's data under `root`. Raises ValueError for a
    run on a task, whose tokens are not text."""
    run = model.config
    if run is None:
        return make_tokenizer(tokenizer_folder(model.folder), (), model.facts.vocab_size)
    check_reads_text(model.source, run)
    if is_learned(run.tokenizer):
        return prepare(run, root).tokenizer()
    return make_tokenizer(run.tokenizer, (), run.vocab_size)


def check_reads_text(source: str, run: RunConfig, fix: str = "name a run on text") -> None:
    """Raises ValueError, with the fix, for a run on a task."""
    if not kind_of(run.corpus).is_tokenised:
        raise ValueError(f"{source} was trained on corpus={run.corpus!r}: its tokens are not text; {fix}")


def _other_text(model: LoadedModel, corpus: str | None, n_tokens: int, root: Path) -> Corpus:
    """Text that the model was not trained on here, in its tokenizer; ids of tokenizers from files are kept apart."""
    named = {} if corpus is None else {"corpus": corpus}
    if (run := model.config) is None:
        fields = {"tokenizer": tokenizer_folder(model.folder), "vocab_size": model.facts.vocab_size}
        config = build(TextConfig, fields | named, model.source)
        if corpus_name(config.corpus).origin == "hub":  # an endless stream: read twice the needed tokens
            config = config.model_copy(update={"max_corpus_tokens": int(2 * n_tokens / config.val_fraction)})
        files = [model.folder / name for name in _TOKENIZER_FILES]
        hashes = {file.name: sha256(file) for file in files if file.exists()}
        return prepare(config, root / f"tokenizer-{digest(hashes)}")
    check_reads_text(model.source, run)
    if is_learned(run.tokenizer):
        raise ValueError(
            f"tokenizer={run.tokenizer!r} of the run was learned on corpus={run.corpus!r} and not on {corpus!r}; "
            "measure the run on its own corpus, or on token arrays"
        )
    kept = run.model_dump(include={"tokenizer", "vocab_size", "val_fraction", "max_corpus_tokens"})
    return prepare(build(TextConfig, kept | named, "run"), root)


def tokenizer_folder(folder: Path) -> str:
    """The folder, resolved. Raises ValueError without a tokenizer, where transformers would invent an empty one."""
    if not (folder / TOKENIZER_FILE).exists() and not all((folder / name).exists() for name in _BPE_FILES):
        raise ValueError(f"{folder} has no {TOKENIZER_FILE}; copy the model's there, or measure on --tokens")
    return str(folder.resolve())
