"""What the fields `corpus` and `tokenizer` name. `sparsedepth.data.sequences` reads each kind of corpus.

stdlib, PATH, hub:NAME[:CONFIG]   text
sft:PATH                          pairs: prompts with answers, loss on the answers only
task:NAME                         a task of known depth, made as it is read"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

STDLIB = "stdlib"
HUB = "hub:"
BYTE_SIZE = 257
"""Tokens of the byte tokenizer: all bytes, and one id that ends a document."""

_OF_TEXT = ("text_field", "tokenizer", "max_corpus_tokens", "chunk_len", "mask_documents", "eod")


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: Literal["text", "pairs", "task"]
    prefix: str = ""
    is_tokenised: bool = False
    """whether a tokenizer makes its ids from text"""
    packs_documents: bool = False
    """whether a sequence holds whole documents, each of which attends to itself alone"""
    foreign_fields: tuple[str, ...] = ()
    """fields that must be at their defaults"""
    foreign_reason: str = ""
    """why: what the fields are about, and what the corpus does"""


TEXT = Kind(name="text", is_tokenised=True)
PAIRS = Kind(
    name="pairs",
    prefix="sft:",
    is_tokenised=True,
    packs_documents=True,
    foreign_fields=("text_field", "chunk_len"),
    foreign_reason="is about running text, and corpus={!r} holds prompts and answers",
)
TASK = Kind(
    name="task",
    prefix="task:",
    foreign_fields=(*_OF_TEXT, "val_fraction"),
    foreign_reason="is about text, and corpus={!r} makes its tokens",
)


@dataclass(frozen=True)
class CorpusName:
    kind: Kind
    place: str
    """a path, NAME[:CONFIG] on the hub, or the name of what is built in"""
    origin: Literal["files", "hub", "built in"]


@functools.cache
def corpus_name(corpus: str) -> CorpusName:
    """What a corpus names; the only place that reads its prefix."""
    kind = next((kind for kind in (PAIRS, TASK) if corpus.startswith(kind.prefix)), TEXT)
    place = corpus.removeprefix(kind.prefix)
    if kind is TASK or corpus == STDLIB:
        return CorpusName(kind, place, "built in")
    return CorpusName(kind, place.removeprefix(HUB), "hub" if place.startswith(HUB) else "files")


def kind_of(corpus: Any) -> Kind:
    """The kind of a corpus; TEXT for a value of another type, which the checks report."""
    return corpus_name(corpus).kind if isinstance(corpus, str) else TEXT


def is_learned(tokenizer: str) -> bool:
    """Whether a tokenizer of this name is learned from the corpus."""
    return tokenizer.partition(":")[0] == "bpe"


def known_size(tokenizer: str) -> int | None:
    """The number of tokens that the name tells; None for a tokenizer that has to be loaded."""
    if not is_learned(tokenizer):
        return BYTE_SIZE if tokenizer == "byte" else None
    size = tokenizer.partition(":")[2]
    if not (size.isascii() and size.isdigit()) or int(size) <= 256:
        raise ValueError(f"tokenizer={tokenizer!r} must be 'bpe:SIZE' with SIZE over 256, such as 'bpe:4096'")
    return int(size)


def check_size(tokenizer: str, size: int, vocab_size: int) -> None:
    """Raises ValueError if ids of the tokenizer exceed the embedding."""
    if size > vocab_size:
        raise ValueError(
            f"tokenizer={tokenizer!r} has {size} tokens and the model vocab_size={vocab_size}; "
            f"set vocab_size to at least {size}"
        )
