"""The door to a run's sequences. Each kind of corpus (`config.corpus`) is a module, whose KIND opens a source of them.

Text, pairs and images are first made into files of ids (`data.pipeline`): their KIND has texts and an encoder.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from sparsedepth.config.corpus import corpus_name
from sparsedepth.config.run import RunConfig
from sparsedepth.data.sequences import Counted, Sequences
from sparsedepth.data.tokenizer import Tokenizer

_MODULES = {"text": "text", "pairs": "pairs", "images": "images", "task": "tasks.stream"}


class Source(Protocol):
    """Sequences for training, and held-out ones, which training never sees."""

    @property
    def bytes_per_token(self) -> float | None:
        """Of held-out text; None where a token is not a piece of running text."""
        return None

    @property
    def eod(self) -> int | None:
        """The token that ends a document; None without documents."""
        return None

    @property
    def data_hash(self) -> str:
        """12 hex digits: equal if and only if the sequences are."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a run records."""

    def batch(self, config: RunConfig, step: int) -> Sequences:
        """batch_tokens // seq_len of them, a pure function of source, seed and step. Raises ValueError if too few."""

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        """n_tokens // seq_len of them after the first `skip_tokens` tokens, fewer at the end: disjoint for disjoint
        ranges. Raises ValueError if there is none."""

    def counted(self, config: RunConfig) -> Counted:
        """The pairs that `data.ngram_losses` counts."""


def data_kind(corpus: str) -> Any:
    """The kind of a corpus; its module is imported when it is first used."""
    return import_module(f"sparsedepth.data.{_MODULES[corpus_name(corpus).kind.name]}").KIND


def check_files(corpus: str) -> None:
    """Raises ValueError for a corpus of local files that are missing or empty."""
    if corpus_name(corpus).origin == "files":
        data_kind(corpus).check(corpus)


def open_source(config: RunConfig, root: Path, tokenizer: Tokenizer | None = None) -> Source:
    """The source of a run; text is tokenised once under `root`, with the given tokenizer if the model from which
    training starts learned it. Raises ValueError for a corpus that cannot be used."""
    return data_kind(config.corpus).open(config, root, tokenizer)
