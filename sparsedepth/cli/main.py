"""Entry point of `sparsedepth`. A user error is one line on stderr and exit code 2."""

import errno
import gc
import io
import os
import sys
import warnings
from collections.abc import Sequence

OUTPUTS = frozenset({"-o", "--out", "--again"})
"""Options of all commands that name what is written."""

RESUMED = frozenset({"sweep", "work", "train", "measure", "evaluate", "verify"})
"""Words of commands that go on where they were interrupted."""

FIXES = {
    errno.ENOSPC: "free space, and run the same command again",
    errno.ENOTDIR: "a file is in the place of a folder; name another folder",
    errno.EACCES: "name a place that may be written and read",
    errno.EROFS: "name a place that may be written",
    errno.ENOENT: "name a folder in which folders can be made, or a file that exists",
}
"""What to do about an error of the system, by its number."""


def run(arguments: Sequence[str] | None = None) -> None:
    """The command line (default: `sys.argv`). Exits with 2 and one line for a user's error, 130 when interrupted."""
    warnings.showwarning = lambda message, *_: _print("warning", str(message))  # ty: ignore[invalid-assignment]
    _prepare_streams()
    gc.set_threshold(50_000, 20, 20)  # what is imported and read lives to the end: looking through it is a tenth of all
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    try:
        _check_options(words)
        from sparsedepth.plugins import name_on_command_line

        words = name_on_command_line(words)
        from typer.main import get_command

        import sparsedepth.quantities  # noqa: F401 - errors of plugins, before any work
        from sparsedepth.cli.commands import app

        code = get_command(app).main(args=words, prog_name="sparsedepth", standalone_mode=False)
    except KeyboardInterrupt:
        code = _fail("interrupted" + "; run the same command again to resume" * bool(RESUMED & {*words[:2]}), 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, such as `head`, has closed
        code = 1
    except ValueError as error:
        code = _fail(str(error), 2)
    except OSError as error:
        fix = FIXES.get(error.errno or 0)
        code = _fail(f"{error.filename or 'the system'}: {error.strerror or error}{f'; {fix}' if fix else ''}", 2)
    except Exception as error:
        message = getattr(error, "format_message", None)  # errors of the command-line parser have one
        if message is None:
            raise
        text, code = message(), 2
        if type(error).__name__ == "NoArgsIsHelpError":  # by name: click and typer each have their own
            print(text)
        else:
            text = text.replace("Value error, ", "").removesuffix(".")  # pydantic's prefix
            if text.startswith("Missing option '-o'") and words[2:] and not words[2].startswith("-"):
                text += f"; did you mean --out {words[2]}?"
            _fail(f"{text}{'' if text.endswith('?') else '.'} Try --help.", code)
    sys.exit(code if isinstance(code, int) else 0)


def _check_options(words: Sequence[str]) -> None:
    """Raises ValueError for an empty output, and for a field apart from its values."""
    from sparsedepth.files import check_not_empty

    for word, following, after in zip(words, [*words[1:], "none"], [*words[2:], "none", "none"], strict=False):
        option, equals, value = word.partition("=")
        if option in OUTPUTS:
            check_not_empty(option, value if equals else following)
        if word in ("--vary", "--set") and following.isidentifier():
            values = "VALUE" if after == "none" or after.startswith("-") else after
            raise ValueError(f"{word} {following} lacks '=': write {word} {following}={values}")


def _prepare_streams() -> None:
    """Let each standard stream take all text. /dev/null is opened as one that the caller has closed (`2>&-`): otherwise
    the next file or pipe that is opened gets its number, and a child process writes its errors there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
        elif number and isinstance(stream := getattr(sys, name), io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # '?' for a sign that the terminal cannot show


def _fail(message: str, code: int) -> int:
    _print("error", message)
    return code


def _print(kind: str, message: str) -> None:
    from sparsedepth.words.plain_text import visible

    print(f"sparsedepth: {kind}: {visible(' '.join(message.split()))}", file=sys.stderr)


if __name__ == "__main__":
    run()
