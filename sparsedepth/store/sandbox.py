"""Run one query in a process of its own, under limits of the kernel that no query can escape.

The limits of `open_store` act between batches of rows, so a call that builds one huge value, such as
repeat('x', 4000000000), escapes them. Here

    time      the process is killed GRACE seconds after the query's own time limit; its processor time is bounded too
    memory    MEMORY bytes of address space beyond what the open store needs (Linux)
    disk      no file can grow

The child process imports its modules before it gets a request (`start`). It opens the store, reports that, applies the
limits, and only then runs the query. It returns the finished text or Parquet file, which the parent does not interpret.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from sparsedepth.config.plain_text import visible
from sparsedepth.store.terminal import terminal_width

TIME_LIMIT = 60.0
GRACE = 2.0
"""Seconds for DuckDB to stop by itself, with a clearer message."""
MEMORY = 3 * 2**30
"""Bytes; above DuckDB's own limit, whose message is clearer."""

_OPEN, _USER_ERROR = b"open\n", 2
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from sparsedepth.store.sandbox import child; child()"
_LIBRARY = str(Path(__file__).parents[2])

_started: list[subprocess.Popen[bytes]] = []
"""Idle child processes, which end with this one."""


def start() -> None:
    """Start a child process, which waits for the next query."""
    # Isolated (-I): modules in the current folder, which may be untrusted, do not shadow the library's. Without site
    # (-S), which would double the start time: sys.path is passed instead.
    command = [sys.executable, "-I", "-S", "-c", _CODE, json.dumps([*filter(None, sys.path), _LIBRARY])]
    _started.append(
        subprocess.Popen(
            command,
            bufsize=0,  # `communicate` must see all that follows the first line
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "COLUMNS": str(terminal_width())},
        )
    )


def ask(
    paths: Sequence[Path | str],
    question: Mapping[str, Any],
    format: str = "table",
    time_limit: float = TIME_LIMIT,
    skip_damaged: bool = False,
) -> bytes:
    """The answer in one of the formats of `render.encode`. `question` is {"sql": text}, or {"best": options of `best`}.

    Raises ValueError for errors of `open_store`, `Store.sql` and `best`, and at a limit.
    """
    request = {"paths": list(map(str, paths)), "question": question, "format": format, "time_limit": time_limit}
    request["skip_damaged"] = skip_damaged
    if not _started:
        start()
    with _started.pop() as process:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # the exit code explains more
            process.stdin.write(json.dumps(request).encode() + b"\n")
        opened = process.stdout.readline() == _OPEN
        try:
            content, stderr = process.communicate(timeout=time_limit + GRACE if opened else None)
        except subprocess.TimeoutExpired:
            raise ValueError(_limit_message(f"ran for longer than {time_limit:g} s")) from None
        finally:
            process.kill()
    return _content_or_error(process.returncode, content, stderr.decode(errors="replace"))


def _content_or_error(code: int, content: bytes, stderr: str) -> bytes:
    if code == 0:
        sys.stderr.write(visible(stderr, keep="\n"))  # warnings
        return content
    if code == _USER_ERROR:
        raise ValueError(stderr)
    if "MemoryError" in stderr or "bad_alloc" in stderr:  # of Python, Arrow or C++
        raise ValueError(_limit_message(f"needs more memory than there is, or than {MEMORY // 2**30} GB"))
    ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    last = stderr.strip().rpartition("\n")[2]
    raise ValueError(f"the query was stopped: its process ended {ended}" + (f": {last}" if last else ""))


def _limit_message(limit: str) -> str:
    return f"the query was stopped: it {limit}; narrow it with WHERE, or aggregate"


# In the child


def child() -> None:
    """Answer the request on stdin. User errors exit with code 2 and one line on stderr."""
    import warnings

    warnings.formatwarning = lambda message, *_: f"sparsedepth: warning: {message}\n"  # ty: ignore[invalid-assignment] - fewer names
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("sparsedepth.store.connection")  # while the parent parses its command line
    line = sys.stdin.readline()
    if not line:
        return  # the parent has ended
    request = json.loads(line)
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
    os._exit(0)  # skip cleanup, which takes time and memory


def _answer(request: Mapping[str, Any], out: IO[bytes]) -> bytes:
    from sparsedepth.store import cell_text, render
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.schema import TABLES

    limits = {"time_limit": request["time_limit"], "skip_damaged": request["skip_damaged"]}
    question, format = request["question"], request["format"]
    best = importlib.import_module("sparsedepth.store.best") if "best" in question else None  # before the limits
    with open_store(*request["paths"], **limits) as store:
        if any(table in json.dumps(question).lower() for table in TABLES):
            store.read_tables()  # while the cache can be written
        out.write(_OPEN)
        out.flush()
        limit(request["time_limit"] + GRACE)
        if best:
            ranking = best.best(store, **question["best"])
            return best.answer(ranking).encode() if format == "table" else render.encode(ranking.table, format)
        result = store.sql(question["sql"])
        return render.encode(cell_text.with_decimals(result) if format in render.FOR_PEOPLE else result, format)


def limit(seconds: float) -> None:
    """Limit time, memory and files of this process from now on. Raises ValueError if the kernel refuses."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    processor = int(used.ru_utime + used.ru_stime + seconds * (os.cpu_count() or 1)) + 1
    limits = {resource.RLIMIT_CPU: processor, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MEMORY
    for kind, amount in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))
