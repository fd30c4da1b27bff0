"""Fences around untrusted SQL: no files, no network, limits of time and memory; the syntax tree of a statement.

DuckDB stops a query at its own limits between batches of rows. A call that builds one huge value, such as
repeat('x', 4000000000), or range(3000000000) as a list, passes both. So a process of one query, such as a command, is
`limited` itself:

    memory   at most MEMORY bytes of address space beyond what the open store needs (Linux); then the query fails
    time     GRACE seconds after the query's own time limit the process ends, with exit code 2 and a line on stderr
"""

import functools
import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

FENCES: dict[str, Any] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "python_enable_replacements": False,  # otherwise FROM x would read Python's local variable x
    "temp_directory": "",  # otherwise a large sort would write to the current folder
    "memory_limit": "2GB",
}
NARROW = "narrow it with WHERE, or aggregate"
GRACE = 2.0
"""Seconds for DuckDB to stop by itself."""
MEMORY = 3 * 2**30
"""Bytes; above DuckDB's own limit, whose message is clearer."""


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Put files and network out of reach for good; no progress bar of a slow query stands in the answer on stdout."""
    connection.execute("SET enable_progress_bar = false")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@contextmanager
def after(seconds: float, act: Callable[[], None]) -> Generator[None]:
    """What to do if the body takes longer, such as to interrupt a connection."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a late interrupt must not hit the next statement


@contextmanager
def read_only(connection: duckdb.DuckDBPyConnection) -> Generator[None]:
    connection.execute("BEGIN TRANSACTION READ ONLY")
    try:
        yield
    finally:
        if hasattr(connection, "abort"):  # DuckDB 2 requires unread rows to be discarded explicitly
            connection.abort()
        connection.execute("ROLLBACK")


def syntax_nodes(connection: duckdb.DuckDBPyConnection, sql: str) -> list[dict[str, Any]]:
    """The nodes of a SELECT's syntax tree, innermost first; nothing is run. Raises ValueError for another statement."""
    nodes: list[dict[str, Any]] = []

    def keep(node: dict[str, Any]) -> dict[str, Any]:
        nodes.append(node)
        return node

    ((content,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    tree = json.loads(content, object_hook=keep)
    if tree.get("error") is not False:
        raise ValueError(f"only plain SELECT statements are allowed here ({tree.get('error_message')})")
    return nodes


def one_line(error: Exception) -> str:
    """A message of DuckDB without its drawing of the position and settings that would help."""
    text = " ".join(str(error).split("\n\nLINE ")[0].split("Possible fixes:")[0].split("Try setting")[0].split())
    return "".join(character if character.isprintable() else "?" for character in text)


@contextmanager
def limited(seconds: float) -> Generator[None]:
    """Limits for a query with this time limit. Raises ValueError where memory ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with after(seconds + GRACE, functools.partial(_end, seconds)):
            if sys.platform == "linux":
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limits = [pages * resource.getpagesize() + MEMORY, *(limit for limit in (soft, hard) if limit >= 0)]
                resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
            yield
    except MemoryError:  # of Python or Arrow
        raise ValueError(_message(f"needs more memory than there is, or than {MEMORY // 2**30} GB")) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _end(seconds: float) -> None:
    print(f"sparsedepth: error: {_message(f'ran for longer than {seconds:g} s')}", file=sys.stderr, flush=True)
    os._exit(2)


def _message(limit: str) -> str:
    return f"the query was stopped: it {limit}; {NARROW}"
