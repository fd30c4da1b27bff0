"""One question to the store in a process of its own, under limits that nothing in the question can escape.

The limits of `open_store` act between batches of rows; one call that builds one huge value, such as
repeat('x', 4000000000), runs between them. Here the kernel holds them, whatever the question does:

    time      the process is killed GRACE seconds after the question's own time limit; its processor time is bounded too
    memory    MEMORY bytes of address space beyond what the open store needs (Linux)
    disk      no file can grow by a byte

The child opens the store, says so, takes on the limits and only then reads the question from anyone. It sends back the
finished text or Parquet file, so that the parent interprets nothing.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sparsedepth.config.plain_text import visible
from sparsedepth.store.render import terminal_width

TIME_LIMIT = 60.0
GRACE = 2.0
"""Seconds in which DuckDB should have stopped by itself, with the clearer message."""
MEMORY = 3 * 2**30
"""Bytes; above DuckDB's own limit, which says more clearly what was too much."""

_OPEN, _USER_ERROR = b"open\n", 2
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from sparsedepth.store.sandbox import child; child()"


def ask(
    paths: Sequence[Path | str],
    question: Mapping[str, Any],
    format: str = "table",
    time_limit: float = TIME_LIMIT,
    skip_damaged: bool = False,
) -> bytes:
    """The answer in one of the formats of `render.encode`. `question` is {"sql": text}, or {"best": options of `best`}.

    Raises ValueError for whatever `open_store`, `Store.sql` or `best` refuse, and at a limit.
    """
    request = {"paths": list(map(str, paths)), "question": question, "format": format, "time_limit": time_limit}
    request["skip_damaged"] = skip_damaged
    # Isolated: no module of the current folder, which may be a stranger's, stands before the library's.
    command = [sys.executable, "-I", "-c", _START, json.dumps([path for path in sys.path if path])]
    with subprocess.Popen(
        command,
        bufsize=0,  # `communicate` must find what follows the first line
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": str(terminal_width())},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        opened = process.stdout.readline() == _OPEN
        try:
            content, said = process.communicate(timeout=time_limit + GRACE if opened else None)
        except subprocess.TimeoutExpired:
            raise ValueError(_beyond(f"ran for longer than {time_limit:g} s")) from None
        finally:
            process.kill()
    return _content_or_error(process.returncode, content, said.decode(errors="replace"))


def _content_or_error(code: int, content: bytes, said: str) -> bytes:
    if code == 0:
        sys.stderr.write(visible(said, keep="\n"))  # warnings
        return content
    if code == _USER_ERROR:
        raise ValueError(said)
    raise ValueError(_beyond(f"needs more memory than there is, or than {MEMORY // 2**30} GB"))


def _beyond(limit: str) -> str:
    return f"the query was stopped: it {limit}; narrow it with WHERE, or aggregate"


# In the child


def child() -> None:
    """Answer the request on stdin. Exit code 2, with one line on stderr, for what the asker did wrong."""
    import signal
    import warnings

    warnings.formatwarning = lambda message, *_: f"sparsedepth: warning: {message}\n"  # ty: ignore[invalid-assignment] - fewer names
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = json.loads(sys.stdin.readline())
    try:
        content = _answer(request, sys.stdout.buffer)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(_USER_ERROR)
    except OSError as error:
        print(f"{error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(_USER_ERROR)
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
    os._exit(0)  # what is left needs no farewell, and no memory


def _answer(request: Mapping[str, Any], out: IO[bytes]) -> bytes:
    from sparsedepth.store import render
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.schema import TABLES

    limits = {"time_limit": request["time_limit"], "skip_damaged": request["skip_damaged"]}
    with open_store(*request["paths"], **limits) as store:
        question, format = request["question"], request["format"]
        if any(table in json.dumps(question).lower() for table in TABLES):
            store.read_tables()  # while the cache can be written
        out.write(_OPEN)
        out.flush()
        limit(request["time_limit"] + GRACE)
        if "sql" in question:
            answer = store.sql(question["sql"])
            return render.encode(render.with_rounded(answer) if format in render.FOR_PEOPLE else answer, format)

        from sparsedepth.store import best

        ranking = best.best(store, **question["best"])
        if format == "table":
            return best.answer(ranking).encode()
        return render.encode(ranking.table, format)


def limit(seconds: float) -> None:
    """Bound what this process may take from now on. Raises ValueError where the kernel refuses."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    processor = int(used.ru_utime + used.ru_stime + seconds * (os.cpu_count() or 1)) + 1
    limits = {resource.RLIMIT_CPU: processor, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MEMORY
    for kind, amount in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))
