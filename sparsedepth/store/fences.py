"""DuckDB's fences around untrusted SQL: its configuration; no files, no network; limits of time and memory; the syntax
tree of a statement, and an error in one line."""

import json
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
    """Put files and network out of reach for good; no progress bar of a slow query stands in the answer on stdout."""
    connection.execute("SET enable_progress_bar = false")
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
    text = " ".join(str(error).split("\n\nLINE ")[0].split("Possible fixes:")[0].split())
    return "".join(character if character.isprintable() else "?" for character in text)
