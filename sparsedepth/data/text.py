"""Running text: the target is the next token, and every position is scored."""

from dataclasses import dataclass
from pathlib import Path

from sparsedepth.config.corpus import check_size, is_learned, known_size
from sparsedepth.config.run import RunConfig, TextConfig
from sparsedepth.data import batches
from sparsedepth.data.corpus import check_text, documents, fingerprint
from sparsedepth.data.pipeline import prepare
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.data.shards import Corpus, CorpusSource, Encoder, split
from sparsedepth.data.source import Source
from sparsedepth.data.tokenizer import Tokenizer, make_tokenizer


@dataclass(eq=False)
class TextSource(CorpusSource):
    corpus: Corpus

    @property
    def bytes_per_token(self) -> float:
        """Of held-out text; bits per byte = nats per token / ln 2 / this."""
        return self.corpus.manifest.val.bytes / self.corpus.manifest.val.tokens

    def batch(self, config: RunConfig, step: int) -> Sequences:
        return next_tokens(batches.batch(self.corpus, config, step))

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        return next_tokens(batches.held_out(self.corpus, seq_len, n_tokens, skip_tokens))


class TextKind:
    """How text becomes files of ids, and the files a source."""

    own_fields: tuple[str, ...] = ()

    def check(self, corpus: str) -> None:
        check_text(corpus)

    texts = staticmethod(documents)
    fingerprint = staticmethod(fingerprint)

    def learned_from(self, text: str) -> str:
        """What a tokenizer learns from one of the texts."""
        return text

    def tokenizer(self, config: RunConfig | TextConfig) -> Tokenizer:
        """The tokenizer of the config; a learned one reads the training texts."""
        documents = split(self.texts(config), config.val_fraction)
        training_texts = (self.learned_from(document.text) for document in documents if not document.held_out)
        return make_tokenizer(config.tokenizer, training_texts, config.vocab_size)

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return tokenizer

    def packages(self, config: RunConfig | TextConfig) -> list[str]:
        """The packages that determine the ids, beside those that read the corpus."""
        if config.tokenizer == "byte":
            return []
        return ["tokenizers"] if is_learned(config.tokenizer) else ["tokenizers", "transformers"]

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
    told = f"tokenizer={config.tokenizer!r} has {corpus.manifest.tokenizer_size} tokens and the model vocab_size="
    told += f"{config.vocab_size}, and the text has the id {largest}, {what}"
    raise ValueError(f"{told}; train with vocab_size={largest + 1} or more, or {fix}")


KIND = TextKind()
