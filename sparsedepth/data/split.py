"""The split into training and held-out documents, by a hash of the text.

    key(d) = first 64 bits of SHA-256(text of d);   d is held out  <=>  key(d) < val_fraction * 2^64

So a document is always on the same side, whatever precedes it; duplicates are dropped. If a small corpus leaves one
side empty, the document with the key nearest the border changes sides, again independent of order. The text is read
once, and at most one document is held back.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

KEYS = 2**64


class Document(NamedTuple):
    text: str
    key: int
    """first 64 bits of the text's SHA-256: uniform in [0, 2^64)"""
    held_out: bool


def split(texts: Iterable[str], val_fraction: float) -> Iterator[Document]:
    """Each distinct text with its side; both sides are non-empty. Memory: one document, and 8-byte keys in a set (about
    0.1 GB per million documents). Raises ValueError if there are fewer than two distinct documents."""
    border = int(val_fraction * KEYS)
    seen: set[int] = set()
    one_sided = True
    spare: Document | None = None  # nearest the border, while all are on one side
    for text in texts:
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        if key in seen:
            continue
        seen.add(key)
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
        fix = "use a corpus of at least two documents (a file each, a row each, or a .txt file with blank lines in it)"
        raise ValueError(f"the corpus holds {len(seen)} distinct document(s), and one must be held out; {fix}")
    if one_sided:
        assert spare is not None
        yield spare._replace(held_out=not spare.held_out)
