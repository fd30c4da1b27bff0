"""DuckDB's fences around untrusted SQL: its configuration; no files, no network; limits of time and memory."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
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


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Put files and network out of reach for good."""
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@contextmanager
def interrupt_after(connection: duckdb.DuckDBPyConnection, seconds: float) -> Generator[None, None, None]:
    """Interrupts the connection."""
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a late interrupt must not hit the next statement


@contextmanager
def read_only(connection: duckdb.DuckDBPyConnection) -> Generator[None, None, None]:
    connection.execute("BEGIN TRANSACTION READ ONLY")
    try:
        yield
    finally:
        if hasattr(connection, "abort"):  # DuckDB 2 requires unread rows to be discarded explicitly
            connection.abort()
        connection.execute("ROLLBACK")
