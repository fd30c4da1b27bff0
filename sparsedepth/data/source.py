"""A run's sequences, with one interface for tokenised text, prompts and answers, images, and generated tasks.

`batch(config, step)` is a pure function of the source, the seed and the step; `held_out(seq_len, n_tokens, skip)` gives
sequences never used in training, disjoint for disjoint ranges of tokens.
"""

from dataclasses import dataclass
from pathlib import Path

from sparsedepth.config.images import is_images
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import is_sft, task_name
from sparsedepth.data import batches
from sparsedepth.data.answers import AnswerSource
from sparsedepth.data.images import ImageSource
from sparsedepth.data.pipeline import prepare
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.data.shards import Corpus, DocumentSource
from sparsedepth.data.tasks.stream import TaskSource
from sparsedepth.data.tokenizer import Tokenizer


@dataclass(eq=False)
class TextSource(DocumentSource):
    """Tokenised text: the target is the next token, and every position is scored."""

    corpus: Corpus

    @property
    def bytes_per_token(self) -> float:
        """Of held-out text; bits per byte = nats per token / ln 2 / this."""
        return self.corpus.manifest.val.bytes / self.corpus.manifest.val.tokens

    def batch(self, config: RunConfig, step: int) -> Sequences:
        """batch_tokens // seq_len windows. Raises ValueError if the training text is shorter than one batch."""
        return next_tokens(batches.batch(self.corpus, config, step))

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        """n_tokens // seq_len windows, fewer at the text's end. Raises ValueError if not even one fits."""
        return next_tokens(batches.held_out(self.corpus, seq_len, n_tokens, skip_tokens))


Source = TextSource | AnswerSource | ImageSource | TaskSource


def open_source(config: RunConfig, root: Path, tokenizer: Tokenizer | None = None) -> Source:
    """The source of a run; text is tokenised once under `root`, with the given tokenizer if the model from which
    training starts learned it. Raises ValueError as `prepare` does, and for pairs longer than seq_len."""
    if task_name(config.corpus) is not None:
        return TaskSource(config)
    corpus = prepare(config, root, tokenizer=tokenizer)
    if is_images(config.corpus):
        return ImageSource(corpus, config)
    return AnswerSource(corpus, config) if is_sft(config.corpus) else TextSource(corpus)
