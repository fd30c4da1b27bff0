"""Text that comes from anyone and ends up in terminals: a definition's sentences, what a run said of its failure."""

from typing import Annotated

from pydantic import AfterValidator, Field


def visible(text: str, keep: str = "") -> str:
    """The text with control characters (terminal sequences, line breaks, changes of direction) as escapes, but for
    those in `keep`."""
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


def _check_plain(text: str) -> str:
    if visible(text, keep="\n\t") != text:
        raise ValueError("must be plain text: a terminal would act on its control characters")
    return text


Sentence = Annotated[str, Field(min_length=1), AfterValidator(_check_plain)]
