"""One question to the store in a process of its own, under limits that nothing in the question can escape.

The limits of `open_store` act between batches of rows; one call that builds one huge value, such as
repeat('x', 4000000000), runs between them. Here the kernel holds them, whatever the question does:

    time      the process is killed GRACE seconds after the question's own time limit; its processor time is bounded too
    memory    MEMORY bytes of address space beyond what the open store needs (Linux)
    disk      no file can grow by a byte

The child loads what it needs before it is told of any folder (`start`). It opens the store, says so, takes on the
limits and only then reads the question from anyone. It sends back the finished text or Parquet file, so that the parent
interprets nothing.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sparsedepth.config.plain_text import visible
from sparsedepth.store.render import terminal_width

if TYPE_CHECKING:
    from sparsedepth.store.connection import Store

TIME_LIMIT = 60.0
GRACE = 2.0
"""Seconds in which DuckDB should have stopped by itself, with the clearer message."""
MEMORY = 3 * 2**30
"""Bytes; above DuckDB's own limit, which says more clearly what was too much."""

_OPEN, _USER_ERROR = b"open\n", 2
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from sparsedepth.store.sandbox import child; child()"
_LIBRARY = str(Path(__file__).parents[2])

_started: list[subprocess.Popen[bytes]] = []
"""Children without a question. One that gets none ends with this process."""


def start() -> None:
    """Start the child of the next question, for which it waits."""
    # Isolated: no module of the current folder, which may be a stranger's, stands before the library's; nor are paths
    # set up (-S), which takes as long as all of Python: it gets ours.
    command = [sys.executable, "-I", "-S", "-c", _CODE, json.dumps([*filter(None, sys.path), _LIBRARY])]
    _started.append(
        subprocess.Popen(
            command,
            bufsize=0,  # `communicate` must find what follows the first line
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

    Raises ValueError for whatever `open_store`, `Store.sql` or `best` refuse, and at a limit.
    """
    request = {"paths": list(map(str, paths)), "question": question, "format": format, "time_limit": time_limit}
    request["skip_damaged"] = skip_damaged
    if not _started:
        start()
    with _started.pop() as process:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # its exit code says more
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
    if "MemoryError" in said or "bad_alloc" in said:  # Python's, Arrow's, C++'s
        raise ValueError(_beyond(f"needs more memory than there is, or than {MEMORY // 2**30} GB"))
    ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    last = said.strip().rpartition("\n")[2]
    raise ValueError(f"the query was stopped: its process ended {ended}" + (f": {last}" if last else ""))


def _beyond(limit: str) -> str:
    return f"the query was stopped: it {limit}; narrow it with WHERE, or aggregate"


# In the child


def child() -> None:
    """Answer the request on stdin. Exit code 2, with one line on stderr, for what the asker did wrong."""
    import warnings

    warnings.formatwarning = lambda message, *_: f"sparsedepth: warning: {message}\n"  # ty: ignore[invalid-assignment] - fewer names
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("sparsedepth.store.connection")  # while the parent reads its command line
    question = sys.stdin.readline()
    if not question:
        return  # whoever started this has ended
    request = json.loads(question)
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
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.schema import TABLES

    limits = {"time_limit": request["time_limit"], "skip_damaged": request["skip_damaged"]}
    question = request["question"]
    answer = (_selecting if "sql" in question else _ranking)(question, request["format"])
    with open_store(*request["paths"], **limits) as store:
        if any(table in json.dumps(question).lower() for table in TABLES):
            store.read_tables()  # while the cache can be written
        out.write(_OPEN)
        out.flush()
        limit(request["time_limit"] + GRACE)
        return answer(store)


def _selecting(question: Mapping[str, Any], format: str) -> "Callable[[Store], bytes]":
    """What answers SQL, with what it needs loaded."""
    from sparsedepth.store import render

    def answer(store: "Store") -> bytes:
        found = store.sql(question["sql"])
        return render.encode(render.with_decimals(found) if format in render.FOR_PEOPLE else found, format)

    return answer


def _ranking(question: Mapping[str, Any], format: str) -> "Callable[[Store], bytes]":
    """What answers `best`, with what it needs loaded."""
    from sparsedepth.store import best, render

    def answer(store: "Store") -> bytes:
        ranking = best.best(store, **question["best"])
        return best.answer(ranking).encode() if format == "table" else render.encode(ranking.table, format)

    return answer


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
