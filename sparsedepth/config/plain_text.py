"""Text of messages: numbers with their nouns, hints at the nearest name, and untrusted text made safe for terminals."""

from collections.abc import Iterable
from pathlib import Path


def counted(n: int, noun: str) -> str:
    """'1 run', '2 runs'."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def did_you_mean(name: str, names: Iterable[str], otherwise: str) -> str:
    """'did you mean ...?' with the nearest of `names`; `otherwise` if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def unreadable(file: Path, error: Exception) -> ValueError:
    """The error for a file that cannot be read, with the fix."""
    if isinstance(error, UnicodeError):
        return ValueError(f"{file} is not UTF-8 text ({one_line(error)}); save it as UTF-8")
    if isinstance(error, IsADirectoryError):
        return ValueError(f"{file} is a folder; name a file")
    return ValueError(f"{file} cannot be read ({one_line(error)}); check that it is whole and readable")


def refuse_empty(file: Path) -> None:
    """Raises ValueError for a file of 0 bytes."""
    if file.is_file() and file.stat().st_size == 0:
        raise ValueError(f"{file} is empty (0 bytes); was it written completely?")


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."


def visible(text: str, keep: str = "") -> str:
    """The text with control characters (terminal sequences, line breaks, text direction) escaped, except `keep`."""
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


def named_number(text: str) -> tuple[str, float | None]:
    """'a_l=1' -> ('a_l', 1.0); None for a value that is not a number."""
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        return name, None
