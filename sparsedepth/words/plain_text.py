"""Text of messages: numbers with their nouns, durations, hints at the nearest name, lines wrapped for a terminal, and
untrusted text made safe for it."""

import math
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100
"""Characters of a line in a file or a pipe."""
DAY = 24 * 3600
YEAR = 365 * DAY


def counted(n: int, noun: str) -> str:
    """'1 run', '2 runs'."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def counted_are(n: int, noun: str) -> str:
    """'1 run is', '2 runs are'."""
    return f"{counted(n, noun)} {'is' if n == 1 else 'are'}"


def listed(names: Sequence[str], last: str = "and") -> str:
    """'4, 8 and 16'"""
    return f" {last} ".join(filter(None, [commas(names[:-1]), names[-1]]))


def interval(lo: float | None, hi: float | None, digits: str = ".3g", name: str = "") -> str:
    """' (0.4 to 0.9)'; '' where an end is not known."""
    return "" if lo is None or hi is None or math.isnan(lo) else f" ({name}{lo:{digits}} to {hi:{digits}})"


def commas(values: Iterable[object]) -> str:
    """'4, 8, 16'"""
    return ", ".join(map(str, values))


def in_shell(*paths: object) -> str:
    """Paths as in a command: quoted, and none of them an option."""
    return shlex.join(f"./{path}" if str(path).startswith("-") else str(path) for path in paths)


def sentence_of(text: str) -> str:
    """With a capital and a full stop; '' of none."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def did_you_mean(name: str, names: Iterable[str], otherwise: str, within: str = "") -> str:
    """'did you mean ...?' with the nearest of `names`, after what it is `within`; `otherwise` if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(names), n=1)
    return f"did you mean {within + near[0]!r}?" if near else otherwise


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."


def error_text(error: BaseException) -> str:
    """'ImportError: ...', in one line; a ValueError's own words, which are meant to be read."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def utf8(text: str) -> str:
    """The text with characters that UTF-8 cannot encode (half of a surrogate pair, undecodable file names) as '?'."""
    return text.encode(errors="replace").decode()


def visible(text: str, keep: str = "") -> str:
    """The text with control characters (terminal sequences, line breaks, text direction) escaped, except `keep`."""
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


def last_line(text: str, otherwise: str) -> str:
    """The last line of a log or of standard error that is not empty, made safe; `otherwise` if there is none."""
    lines = visible(text, keep="\n\r").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), otherwise)


def terminal_width() -> int:
    """Characters in a line of the terminal; WIDTH for a pipe or a file."""
    return shutil.get_terminal_size(fallback=(WIDTH, 24)).columns


def wrapped(lines: Iterable[str], width: int | None = None) -> str:
    """Lines wrapped at `width` characters (default: the terminal's), continued two further in; paths stay whole."""
    width = width or terminal_width()

    def fold(line: str) -> str:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)

    return "".join(f"{fold(line)}\n" for text in lines for line in text.split("\n"))


def duration(seconds: float) -> str:
    """'12s', '3m05s', '1h02m'; from two days '3d04h', from two years '4.5 years'."""
    whole = max(0, round(seconds))
    if whole >= 2 * YEAR:
        return f"{whole / YEAR:,.{0 if whole >= 10 * YEAR else 1}f} years"
    if whole >= 2 * DAY:
        return f"{whole // DAY}d{whole % DAY // 3600:02d}h"
    minutes, seconds = divmod(whole, 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def cause_of(error: Exception) -> str:
    """What an error says, in one line without passwords."""
    return " ".join(without_password(str(error)).split())[:300] or type(error).__name__


def without_password(text: str) -> str:
    """A text whose addresses, as postgresql://user:password@host, have neither user nor password."""
    return re.sub(r"(password=)[^&\s]+", r"\1...", re.sub(r"//[^/\s]*@", "//", text))


def database_line(error: Exception) -> str:
    """A message of DuckDB without its drawing of the position and settings that would help."""
    text = " ".join(str(error).split("\n\nLINE ")[0].split("Possible fixes:")[0].split("Try setting")[0].split())
    return "".join(character if character.isprintable() else "?" for character in text)
