"""The tables of one run: Parquet files in its folder."""

import functools
import io
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from sparsedepth.quantities.quantity import Column, Named, Table
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.pages import decoded_bytes
from sparsedepth.store.schema import FILE_COLUMNS, KEYS
from sparsedepth.words.plain_text import one_line

SMALL_BYTES = 2**16
"""Tables up to this size in memory do not gain from zstd."""

MAX_ROWS = 50_000_000
MAX_DECODED, MAX_RATIO = 2**28, 100
"""Bytes of a table in memory, and times the size of its file, if that is more. Larger tables are rejected as damaged;
ours are far smaller."""


def table_bytes(rows: pa.Table, level: int | None = None) -> bytes:
    """A Parquet file of these rows, at a level of brotli if given; deterministic for one version of pyarrow."""
    content = io.BytesIO()
    pq.write_table(rows, content, compression=codec_of(rows.nbytes, level), compression_level=level)
    return content.getvalue()


def codec_of(n_bytes: int, level: int | None) -> str:
    """zstd, or snappy for small tables, which reads three times as fast; brotli, which is smaller, at a given level."""
    if level is not None:
        return "brotli"
    return "zstd" if n_bytes > SMALL_BYTES else "snappy"


def parse_table(folder: Path, table: Table, content: bytes | None) -> pa.Table:
    """The rows of a record's file, none where it has no such file. Raises DamagedRun."""
    schema = file_schema(table)
    if content is None:
        return empty_table(schema)
    try:
        rows = read_within(pa.BufferReader(content), schema.names)
        return rows if rows.schema.equals(schema) else rows.select(schema.names).cast(schema)
    except (ValueError, pa.ArrowException, OSError, KeyError) as error:
        raise DamagedRun(folder, f"{table}.parquet", f"is not a {table} table ({one_line(error)})") from None


def read_within(file: pa.NativeFile, names: Sequence[str], groups: Sequence[int] | None = None) -> pa.Table:
    """These columns of a Parquet file, or of some of its row groups. Raises as `check_within`."""
    parquet = check_within(file, names, groups)
    groups = range(parquet.metadata.num_row_groups) if groups is None else groups
    return parquet.read_row_groups([*groups], [*names], use_threads=False)


def check_within(file: pa.NativeFile, names: Sequence[str], groups: Sequence[int] | None) -> pq.ParquetFile:
    """The open file. Raises ValueError for more rows or bytes than are read, before any is decoded: a text that its
    dictionary holds once may be in millions of rows."""
    parquet = pq.ParquetFile(file)
    metadata = parquet.metadata
    groups = range(metadata.num_row_groups) if groups is None else groups
    limit = max(MAX_DECODED, MAX_RATIO * file.size())
    n_rows = 0
    n_bytes = 0
    texts = dict[str, int]()
    for row_group in map(metadata.row_group, groups):
        n_rows += row_group.num_rows
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            width = metadata.schema.column(index).length
            name, _, inner = chunk.path_in_schema.partition(".")
            if name not in names:
                continue
            if inner:
                raise ValueError(f"has nested values in {name}")
            decoded = decoded_bytes(file, chunk)
            n_bytes += max(decoded, chunk.num_values * max(width, 8))
            if chunk.physical_type == "BYTE_ARRAY":  # each value at most a whole chunk
                texts[name] = texts.get(name, 0) + chunk.num_values * decoded
    if n_rows > MAX_ROWS:
        raise ValueError(f"has more than {MAX_ROWS:,} rows")
    if n_bytes <= limit < n_bytes + sum(texts.values()):
        rows = encoded(file, [*texts], groups, [*texts])
        n_bytes += sum(_text_bytes(chunk) for column in rows.columns for chunk in column.chunks)
    if n_bytes > limit:
        raise ValueError(f"would take {n_bytes / 1e6:,.0f} MB in memory, and at most {limit / 1e6:,.0f} MB are read")
    return parquet


def encoded(file: pa.NativeFile, names: Sequence[str], groups: Sequence[int], texts: Sequence[str]) -> pa.Table:
    """These columns of a file whose size is known, texts as dictionaries."""
    return pq.ParquetFile(file, read_dictionary=[*texts]).read_row_groups([*groups], [*names], use_threads=False)


def refuse_twice(rows: pa.Table, keys: Sequence[str]) -> None:
    """Raises ValueError for two rows with the same keys, numbers or dictionaries of texts: a run would count twice."""
    import numpy as np  # slow to import, and rarely needed

    columns = []
    for name in keys:
        column = rows[name].unify_dictionaries().combine_chunks()
        values = column.indices if isinstance(column, pa.DictionaryArray) else column
        columns.append((values.fill_null(-1) if values.null_count else values).to_numpy(zero_copy_only=False))
    order_N = np.lexsort(columns)  # fast, since the rows of a run are in order
    in_order = [value_N[order_N] for value_N in columns]
    if np.logical_and.reduce([value_N[1:] == value_N[:-1] for value_N in in_order]).any():
        raise ValueError(f"has two rows of equal {', '.join(keys)}")


def _text_bytes(values: pa.Array) -> int:
    """Bytes of texts in a dictionary, once for each use."""
    import pyarrow.compute as pc  # slow to import, and rarely needed

    if not isinstance(values, pa.DictionaryArray):
        return values.nbytes
    lengths = pc.call_function("binary_length", [values.dictionary]).take(values.indices)
    return pc.call_function("sum", [lengths]).as_py() or 0


def rows_table(rows: list[Named], schema: pa.Schema) -> pa.Table:
    """The rows as an Arrow table, by way of JSON: `pyarrow.array` imports pandas, slower than opening a small store."""
    if not rows:
        return empty_table(schema)
    content = "\n".join(map(json.dumps, rows)).encode()
    return pyarrow.json.read_json(
        io.BytesIO(content),
        read_options=pyarrow.json.ReadOptions(block_size=len(content) + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
    ).select(schema.names)


@functools.cache
def empty_table(schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([], schema)


def arrow_schema(columns: Iterable[Column], keys: Collection[str] = ()) -> pa.Schema:
    """The Arrow schema of these columns; keys are never NULL."""
    types = {"BIGINT": pa.int64(), "DOUBLE": pa.float64(), "VARCHAR": pa.string(), "BOOLEAN": pa.bool_()}
    return pa.schema([pa.field(column.name, types[column.type], column.name not in keys) for column in columns])


@functools.cache
def file_schema(table: Table) -> pa.Schema:
    return arrow_schema(FILE_COLUMNS[table], KEYS[table])
