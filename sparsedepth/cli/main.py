"""`sparsedepth`: how commands start, and how they fail: a user's mistake is one line on stderr and exit code 2."""

import os
import sys
import warnings
from collections.abc import Sequence

from sparsedepth.store import sandbox

OURS = frozenset({"--help", "--ask", "--list", "--schema", "--again"})
"""With one of these, `query` and `best` have no use for the sandbox."""


def run(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    # The documented way to replace it.
    warnings.showwarning = lambda message, *_: _say("warning", str(message))  # ty: ignore[invalid-assignment]
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if words[:1] in (["query"], ["best"]) and not OURS.intersection(words):
        sandbox.start()  # it loads what it needs while this process loads the commands
    try:
        from typer.main import get_command

        from sparsedepth.cli.commands import app

        code = get_command(app).main(args=arguments, prog_name="sparsedepth", standalone_mode=False)
    except KeyboardInterrupt:
        code = _fail("interrupted; the same command continues", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing more to say
        code = 1
    except ValueError as error:
        code = _fail(str(error), 2)
    except OSError as error:
        code = _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 2)
    except Exception as error:
        message = getattr(error, "format_message", None)  # what the parser of the command line raises
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # the help itself, of click's or of typer's own copy
            print(message())
            code = 2
        else:
            text = message().replace("Value error, ", "").removesuffix(".")  # the first two words are pydantic's
            code = _fail(f"{text}{'' if text.endswith('?') else '.'} Try --help.", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    _say("error", message)
    return code


def _say(kind: str, message: str) -> None:
    from sparsedepth.config.plain_text import visible

    print(f"sparsedepth: {kind}: {visible(' '.join(message.split()))}", file=sys.stderr)


if __name__ == "__main__":
    run()
