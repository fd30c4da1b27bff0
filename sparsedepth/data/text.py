"""Running text: the target is the next token, and every position is scored.

The training tokens are cut into chunks of chunk_len (plus one token, the last target). Epoch e visits chunk

    p_(seed, e)(0), p_(seed, e)(1), ...      p_(seed, e) a permutation of all chunks (`data.sequences`)

and step t takes the next batch_tokens / chunk_len of them, across epochs if needed. Each chunk is cut into windows of
seq_len. So no state is carried from step to step, and runs that differ only in seq_len, at one chunk_len, predict
exactly the same tokens in each step. Windows may span several documents, separated by the end-of-document id.

Shapes: B windows, K chunks of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsedepth.config.corpus import check_size, corpus_name, is_learned, known_size
from sparsedepth.config.run import RunConfig, TextConfig
from sparsedepth.data.corpus import check_text, documents, fingerprint
from sparsedepth.data.pipeline import Corpus, CorpusSource, nothing_left, prepare, split
from sparsedepth.data.sequences import Sequences, Source, check_one_sequence, next_tokens, step_indices
from sparsedepth.data.tokenizer import Encoder, Tokenizer, make_tokenizer


@dataclass(eq=False)
class TextSource(CorpusSource):
    corpus: Corpus

    @property
    def bytes_per_token(self) -> float:
        """Of held-out text; bits per byte = nats per token / ln 2 / this."""
        return self.corpus.manifest.val.bytes / self.corpus.manifest.val.tokens

    def batch(self, config: RunConfig, step: int) -> Sequences:
        n_tokens = len(self.corpus.train)
        chunk_len = config.chunk_len or config.seq_len
        n_chunks = (n_tokens - 1) // chunk_len
        per_step = config.batch_tokens // chunk_len
        if n_chunks < per_step:
            raise ValueError(
                f"the training text has {n_tokens:,} tokens: {n_chunks:,} chunks of {chunk_len:,} (and one), "
                f"and a step of batch_tokens={config.batch_tokens:,} reads {per_step:,}; "
                "use a longer corpus or a smaller batch_tokens"
            )
        chunk_K = step_indices(n_chunks, per_step, config.seed, step)
        start_B = (chunk_K[:, None] * chunk_len + np.arange(0, chunk_len, config.seq_len)).reshape(-1)
        return _windows(self.corpus.train, start_B, config.seq_len)

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        assert skip_tokens >= 0
        check_one_sequence(n_tokens, seq_len)
        available = len(self.corpus.val) - 1 - skip_tokens  # the last token has no target
        n_windows = min(n_tokens, available) // seq_len
        if n_windows < 1:
            has = f"the held-out text has {len(self.corpus.val):,}"
            raise nothing_left(f"window of seq_len={seq_len:,}", n_tokens, skip_tokens, has)
        return _windows(self.corpus.val, skip_tokens + np.arange(n_windows) * seq_len, seq_len)


def _windows(ids: np.ndarray, start_B: np.ndarray, seq_len: int) -> Sequences:
    return next_tokens(ids[start_B[:, None] + np.arange(seq_len + 1)].astype(np.int64))


class TextKind:
    """How text becomes files of ids, and the files a source."""

    format = 1
    """increased when the same corpus would give other tokens than before"""
    decides_side: Callable[[str], str] = str
    """of a text, the part that decides whether it is held out"""
    check: Callable[[str], object] = staticmethod(check_text)
    texts = staticmethod(documents)
    fingerprint = staticmethod(fingerprint)

    def learned_from(self, text: str) -> str:
        """What a tokenizer learns from one of the texts."""
        return text

    def tokenizer(self, config: RunConfig | TextConfig) -> Tokenizer:
        """The tokenizer of the config; a learned one reads the training texts."""
        documents = split(self.texts(config), config.val_fraction, self.decides_side)
        training_texts = (self.learned_from(document.text) for document in documents if not document.held_out)
        return make_tokenizer(config.tokenizer, training_texts, config.vocab_size)

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return tokenizer

    def packages(self, config: RunConfig | TextConfig) -> list[str]:
        """The packages that read the corpus and determine the ids."""
        readers = ["datasets"] if corpus_name(config.corpus).origin == "hub" else []
        if config.tokenizer == "byte":
            return readers
        return [*readers, "tokenizers", *["transformers"] * (not is_learned(config.tokenizer))]

    def check_fits(self, config: RunConfig | TextConfig, corpus: Corpus) -> None:
        """Raises ValueError for a tokenizer that does not fit the run's fields."""
        n_tokens = corpus.manifest.tokenizer_size
        if known_size(config.tokenizer) is not None:
            check_size(config.tokenizer, n_tokens, config.vocab_size)
        elif n_tokens > config.vocab_size:
            _check_ids(config, corpus)

    def open(self, config: RunConfig, root: Path, tokenizer: Tokenizer | None = None) -> Source:
        return TextSource(prepare(config, root, tokenizer))


def _check_ids(config: RunConfig | TextConfig, corpus: Corpus) -> None:
    """Raises ValueError if an id of the text exceeds the embedding; a tokenizer may have more ids than occur."""
    largest = max(int(ids.max()) for ids in (corpus.train, corpus.val) if len(ids))
    if largest < config.vocab_size:
        return
    what, fix = "which ends a document", "set eos_token in its tokenizer_config.json to a token of the model"
    if largest != corpus.manifest.eod:
        what, fix = repr(corpus.tokenizer().decode([largest])), "name a text without it"
    raise ValueError(
        f"tokenizer={config.tokenizer!r} has {corpus.manifest.tokenizer_size} tokens and the model vocab_size="
        f"{config.vocab_size}, and the text has the id {largest}, {what}; train with vocab_size={largest + 1} or more, "
        f"or {fix}"
    )


KIND = TextKind()
