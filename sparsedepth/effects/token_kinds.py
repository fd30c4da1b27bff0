"""Position and identity of the tokens that turn early, evenly or neither, from the rows of `tokens`.

2602.05970 finds that tokens with unusual angles are the first of their text; here for every class.
"""

from dataclasses import dataclass

import pandas as pd

from sparsedepth.config.plain_text import counted

KINDS = ("early stop", "even", "neither")
N_COMMONEST = 5


@dataclass(frozen=True, kw_only=True)
class TokenKind:
    """The sampled tokens of one class, or all of them."""

    kind: str
    n: int
    share: float
    """Of the sample."""
    first_in_sequence: float
    """Share of them at position 0."""
    first_in_document: float | None
    """Share of first tokens of a document among those of known position in it; None without any."""
    commonest: tuple[tuple[int, float], ...]
    """(token id, share of them), the commonest first."""


def token_kinds(tokens: pd.DataFrame) -> list[TokenKind]:
    """One per class that occurs, and one of all tokens, from the rows of `tokens` of one run or several."""
    kinds = []
    for kind in (*KINDS, "all"):
        rows = tokens if kind == "all" else tokens[tokens["nearest"] == kind]
        if len(rows):
            position = rows["document_position"].dropna()
            commonest = rows["token_id"].value_counts(normalize=True, sort=False).sort_index()
            commonest = commonest.sort_values(ascending=False, kind="stable").head(N_COMMONEST)
            kinds.append(
                TokenKind(
                    kind=kind,
                    n=len(rows),
                    share=len(rows) / len(tokens),
                    first_in_sequence=float((rows["position"] == 0).mean()),
                    first_in_document=float((position == 0).mean()) if len(position) else None,
                    commonest=tuple((int(token), float(share)) for token, share in commonest.items()),
                )
            )
    return kinds


def kind_sentence(kind: TokenKind) -> str:
    """'early stop: 8 tokens (0.4% of the sample); first in their sequence 100%, ...'."""
    document = "unknown" if kind.first_in_document is None else f"{kind.first_in_document:.0%}"
    ids = ", ".join(f"{token} ({share:.0%})" for token, share in kind.commonest) or "none"
    return (
        f"{kind.kind}: {counted(kind.n, 'token')} ({kind.share:.1%} of the sample); first in their sequence "
        f"{kind.first_in_sequence:.0%}, in their document {document}; commonest ids {ids}"
    )
