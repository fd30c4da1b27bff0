"""The memory that a column of a Parquet file takes, by the headers of its pages: what its footer claims may be a lie.

    PageHeader (Thrift's compact protocol)   2: uncompressed_page_size, 3: compressed_page_size, and more
    https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift

A reader allocates the first of each page, which a kilobyte of zstd or brotli can fill with gigabytes."""

import pyarrow as pa
import pyarrow.parquet as pq

BOUNDED = ("UNCOMPRESSED", "SNAPPY")
"""Codecs of at most 25 times the file's bytes."""
_HEADER = 2**14
"""Bytes of the longest header that is read."""
_INT_TYPES, _STRUCT, _BINARY = (4, 5, 6), 12, 8
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}
"""Type of a field -> bytes of its value: true, false, byte, double."""


def decoded_bytes(file: pa.NativeFile, chunk: pq.ColumnChunkMetaData) -> int:
    """Bytes of all pages of a chunk, decompressed; by the footer for codecs that are BOUNDED. Raises ValueError for
    what is no page."""
    if chunk.compression in BOUNDED:
        return chunk.total_uncompressed_size
    start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
    place, end, n_bytes = start, start + chunk.total_compressed_size, 0
    while place < end:
        try:
            header = bytes(file.read_at(min(_HEADER, end - place), place))
            fields, length = _struct(header, 0)
            decoded, stored = fields[2], fields[3]
        except (IndexError, KeyError, RecursionError):
            raise ValueError(f"has no page at byte {place}") from None
        if decoded < 0 or stored < 0:
            raise ValueError(f"has a page of {min(decoded, stored)} bytes")
        n_bytes += decoded
        place += length + stored
    return n_bytes


def _struct(content: bytes, place: int) -> tuple[dict[int, int], int]:
    """The integers in a struct by their numbers, and where it ends. Raises IndexError, KeyError."""
    fields, number = dict[int, int](), 0
    while head := content[place]:
        kind, place = head & 15, place + 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = _integer(content, place)
        if kind in _INT_TYPES:
            fields[number], place = _integer(content, place)
        elif kind == _STRUCT:
            _, place = _struct(content, place)
        elif kind == _BINARY:
            length, place = _varint(content, place)
            place += length
        else:
            place += _FIXED[kind]
    return fields, place + 1


def _integer(content: bytes, place: int) -> tuple[int, int]:
    """Zigzag: 0, -1, 1, -2, ..."""
    value, place = _varint(content, place)
    return (value >> 1) ^ -(value & 1), place


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
