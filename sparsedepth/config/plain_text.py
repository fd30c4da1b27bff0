"""Text of messages: numbers with their nouns, hints at the nearest name, and untrusted text made safe for terminals."""

from collections.abc import Iterable


def counted(n: int, noun: str) -> str:
    """'1 run', '2 runs'."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def did_you_mean(name: str, names: Iterable[str], otherwise: str) -> str:
    """'did you mean ...?' with the nearest of `names`; `otherwise` if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def visible(text: str, keep: str = "") -> str:
    """The text with control characters (terminal sequences, line breaks, text direction) escaped, except `keep`."""
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )
