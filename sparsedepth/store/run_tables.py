"""The tables of one run: Parquet files in its folder."""

import functools
import io
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sparsedepth.config.plain_text import one_line
from sparsedepth.quantities.record import Column, Table
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.schema import FILE_COLUMNS, KEYS, TABLES

SMALL_BYTES = 2**16
"""Tables up to this size in memory do not gain from zstd."""

MAX_ROWS = 50_000_000
"""Larger tables are rejected as damaged; ours are far smaller."""


def table_bytes(rows: pa.Table, level: int | None = None) -> bytes:
    """A Parquet file of these rows, at a level of brotli if given; deterministic for one version of pyarrow."""
    content = io.BytesIO()
    pq.write_table(rows, content, compression=compression_of(rows.nbytes, level), compression_level=level)
    return content.getvalue()


def compression_of(n_bytes: int, level: int | None) -> str:
    """zstd, or snappy for small tables, which reads three times as fast; brotli, which is smaller, at a given level."""
    if level is not None:
        return "brotli"
    return "zstd" if n_bytes > SMALL_BYTES else "snappy"


class TableFiles(Mapping[Table, pa.Table]):
    """A record's tables, each parsed on first access, which may raise DamagedRun."""

    def __init__(self, folder: Path, contents: Mapping[str, bytes]) -> None:
        self._folder, self._contents = folder, contents
        self._parsed: dict[Table, pa.Table] = {}

    def __getitem__(self, table: Table) -> pa.Table:
        if table not in self._parsed:
            self._parsed[table] = _parse_table(self._folder, table, self._contents.get(f"{table}.parquet"))
        return self._parsed[table]

    def __iter__(self) -> Iterator[Table]:
        return iter(TABLES)

    def __len__(self) -> int:
        return len(TABLES)


def _parse_table(folder: Path, table: Table, content: bytes | None) -> pa.Table:
    schema = file_schema(table)
    if content is None:
        return empty_table(schema)
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        if file.metadata.num_rows > MAX_ROWS:
            raise DamagedRun(folder, f"{table}.parquet", f"has more than {MAX_ROWS:,} rows")
        rows = file.read(use_threads=False)
        return rows if rows.schema.equals(schema) else rows.select(schema.names).cast(schema)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DamagedRun(folder, f"{table}.parquet", f"is not a {table} table ({one_line(error)})") from None


@functools.cache
def empty_table(schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([], schema)


def arrow_schema(columns: Iterable[Column], keys: Collection[str] = ()) -> pa.Schema:
    """The Arrow schema of these columns; keys are never NULL."""
    types = {"BIGINT": pa.int64(), "DOUBLE": pa.float64(), "VARCHAR": pa.string(), "BOOLEAN": pa.bool_()}
    return pa.schema([pa.field(column.name, types[column.type], column.name not in keys) for column in columns])


@functools.cache
def file_schema(table: Table) -> pa.Schema:
    """The Arrow schema of `<table>.parquet`."""
    return arrow_schema(FILE_COLUMNS[table], KEYS[table])
