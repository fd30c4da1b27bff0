"""Documents of a corpus, as text: the standard library's source, local files, or a data set on the Hugging Face hub.

    'stdlib'             every .py file of the Python standard library is one document; no network, no account
    FILE.txt             cut at blank lines into documents of at least MIN_DOCUMENT characters
    FILE.jsonl, .json    one JSON object per line, the document in its `text_field`; or in .json one array of objects
    FILE.parquet         one document per row, in the column `text_field`
    FOLDER               all files of these kinds in it, in order of their paths; each .txt file is one document. Of a
                         data set's folder the split `train`, if names tell it, without what describes the data set
    'hub:NAME[:CONFIG]'  the train split of a data set of the Hugging Face hub, streamed

Text and JSON-lines may be gzipped (.txt.gz). Data sets that need code of their own are not supported."""

import contextlib
import gzip
import io
import itertools
import json
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparsedepth.config.corpus import STDLIB, corpus_name
from sparsedepth.config.run import DataConfig
from sparsedepth.files import digest, local_path, open_regular, repository_of, unreadable
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import did_you_mean, one_line, utf8

if TYPE_CHECKING:
    import pyarrow

Row = TypeVar("Row")

MIN_DOCUMENT = 4096
"""Characters of a document cut from a text file: a few contexts of a small model."""

_PLAIN = {".txt": "text", ".jsonl": "lines", ".json": "lines"}
KINDS = {**_PLAIN, **{f"{suffix}.gz": kind for suffix, kind in _PLAIN.items()}, ".parquet": "parquet"}
_KINDS = ", ".join(KINDS)
_UNREAD = (".zst", ".xz", ".bz2", ".lz4", ".zip", ".7z", ".gz", ".arrow", ".csv", ".tsv")
"""Suffixes of data that are not read, and are named if they lie beside a corpus."""
_ABOUT = re.compile(
    r"(?i)(^|/)((read[-_ ]?me|licen[sc]e|copying|notice|citation|changelog|contributing)\b[^/]*"
    r"|(dataset_(infos?|dict)|state)\.json)$"
)
"""What describes a data set, and is no document of it."""
_SPLIT = r"(?i)(^|[/._ -])({})([/._ -]|\d|$)"
_TRAIN = re.compile(_SPLIT.format("train|training"))
_OTHER_SPLIT = re.compile(_SPLIT.format("test|testing|eval|evaluation|validation|valid|val|dev"))
"""Names of splits, as `datasets` recognises them."""
MAX_BYTES = 2**50
_STDLIB = Path(sysconfig.get_path("stdlib"))
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_ROWS_AT_ONCE = 128
CHECKED = 10_000_000
"""Characters of a text that are read before a sweep is planned."""


def documents(config: DataConfig) -> Iterator[str]:
    """The documents of `config.corpus` with more than white space, in a fixed order. Raises ValueError for a corpus
    that is missing, unreadable, empty or of unknown kind."""
    read = {"built in": _read_stdlib, "hub": _read_hub, "files": _read_local}[corpus_name(config.corpus).origin]
    is_empty = True
    for text in read(config):
        if text.strip():
            is_empty = False
            yield text
    if is_empty:
        raise _no_text(config.corpus)


def fingerprint(corpus: str) -> str | None:
    """12 hex digits that change with names and sizes of a local corpus's files; None without local files."""
    name = corpus_name(corpus)
    if name.origin == "built in":
        return names_and_sizes(_STDLIB, _stdlib_files())
    root = local_path(name.place)
    return names_and_sizes(root, local_files(corpus)) if name.origin == "files" and root.exists() else None


def names_and_sizes(root: Path, files: Iterable[Path]) -> str:
    """12 hex digits of the files' paths below `root`, and their sizes."""
    return digest([(file.relative_to(root).as_posix(), file.stat().st_size) for file in files])


def _stdlib_files() -> Iterator[Path]:
    """The same files on every machine with this Python version: no tests, packages or build settings."""
    for folder, subfolders, names in os.walk(_STDLIB):
        # In place, so that os.walk skips the others: site-packages can hold tens of thousands of files.
        subfolders[:] = sorted(name for name in subfolders if not (name in _NOT_STDLIB or name.startswith("config-")))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def _read_stdlib(config: DataConfig) -> Iterator[str]:
    for file in _stdlib_files():
        with contextlib.suppress(UnicodeDecodeError):  # a few files declare another encoding
            yield file.read_text(encoding="utf-8")


def file_kind(file: Path) -> str | None:
    return next((kind for suffix, kind in KINDS.items() if file.name.lower().endswith(suffix)), None)


def local_files(corpus: str) -> list[Path]:
    """The files of a local corpus, sorted. Raises ValueError if there is none of a supported kind, or one is a pipe, or
    a link out of its folder."""
    return chosen_files(corpus)[0]


def chosen_files(corpus: str) -> tuple[list[Path], list[str]]:
    """The files to read, and the names of those in its folder that are not. Raises as `local_files`, and ValueError for
    a path that is missing."""
    corpus = corpus_name(corpus).place
    path = local_path(corpus)
    if path.is_dir():
        files, rest = _files_in(path, corpus)
    elif not path.exists():
        raise ValueError(
            f"corpus={corpus!r} does not exist ({path.absolute()}); correct the path, "
            f"or use {STDLIB!r} or 'hub:NAME' for a data set of the hub"
        )
    elif file_kind(path) is None:
        raise ValueError(f"corpus={corpus!r} is of unknown kind {path.suffix!r}; convert it to one of {_KINDS}")
    else:
        files = [path]
        rest = list[str]()
    for file in files:
        _open(file).close()
    return files, rest


def _open(file: Path) -> io.FileIO:
    try:
        return open_regular(file, MAX_BYTES, repository_of(file.parent))
    except OSError as error:
        raise unreadable(file, error) from None


def _files_in(folder: Path, corpus: str) -> tuple[list[Path], list[str]]:
    """The files of a folder, hidden ones left out, and the names of those that are no training text: what describes a
    data set, and where a name tells the split, other splits; warns of data of other kinds. Raises ValueError for a
    folder of `datasets`, whose other files would be taken for text."""
    found = sorted((file.relative_to(folder).as_posix(), file) for file in folder.rglob("*") if not file.is_dir())
    visible = {name: file for name, file in found if not re.search(r"(^|/)\.", name)}
    readable = {name: file for name, file in visible.items() if file_kind(file)}
    unread = {name: file for name, file in visible.items() if file.suffix.lower() in _UNREAD and name not in readable}
    for file in unread.values():
        if file.suffix == ".arrow" and (file.parent / "dataset_info.json").exists():
            is_whole = (file.parent / "state.json").exists()
            read = f"load_from_disk({str(file.parent)!r})" if is_whole else f"Dataset.from_file({str(file)!r})"
            raise ValueError(
                f"corpus={corpus!r} was written by save_to_disk of datasets ({file.parent} has .arrow files beside "
                "dataset_info.json); write it as Parquet, and name that file: "
                f"datasets.{read}.to_parquet('corpus.parquet')"
            )
    has_splits = any(map(_TRAIN.search, readable))
    rest = [name for name in readable if _ABOUT.search(name) or (has_splits and _OTHER_SPLIT.search(name))]
    if len(rest) == len(readable):
        raise ValueError(
            f"corpus={corpus!r} is a folder without any file of the kinds {_KINDS}; name one that has some"
        )
    if unread:
        names = ", ".join([*unread][:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        warnings.warn(f"corpus={corpus!r}: {names} not read; decompress or convert to {_KINDS}", stacklevel=2)
    return [file for name, file in readable.items() if name not in rest], [*rest, *unread]


def check_text(corpus: str) -> None:
    """Raises ValueError for a local text that is missing, or empty or not UTF-8 in its first CHECKED characters."""
    files = local_files(corpus)
    texts = [file for file in files if file_kind(file) == "text"]
    read = 0
    is_empty = len(texts) == len(files)
    for line in itertools.chain.from_iterable(map(_lines, texts)):
        read = read + len(line)
        is_empty = is_empty and not line.strip()
        if read > CHECKED:
            break
    if is_empty:
        raise _no_text(corpus)


def _no_text(corpus: str) -> ValueError:
    return ValueError(f"corpus={corpus!r} contains no text; name a file, folder or data set with documents")


def _read_local(config: DataConfig) -> Iterator[str]:
    files = local_files(config.corpus)
    if file_kind(files[0]) == "text" and local_path(config.corpus).is_file():
        yield from _cut_at_blank_lines(_lines(files[0]))
        return
    for file in files:
        kind = file_kind(file)
        if kind == "text":
            yield "".join(_lines(file))
        elif kind == "parquet":
            yield from _parquet_texts(file, config)
        else:
            for place, row in json_objects(file):  # only the type of this field matters
                _check_field(row, place, config)
                yield utf8(_text(row[config.text_field], place, config))


def _cut_at_blank_lines(lines: Iterable[str]) -> Iterator[str]:
    """Documents of at least MIN_DOCUMENT characters that end at a blank line; a shorter end joins the last one."""
    previous = ""
    current = []
    length = 0
    for line in lines:
        current.append(line)
        length += len(line)
        if length >= MIN_DOCUMENT and not line.strip():
            if previous:
                yield previous
            previous = "".join(current)
            current = []
            length = 0
    if length >= MIN_DOCUMENT:
        yield previous
        previous = ""
    yield previous + "".join(current)


def _lines(file: Path) -> Iterator[str]:
    try:
        with _open(file) as binary:
            content = gzip.GzipFile(fileobj=binary) if file.suffix.lower() == ".gz" else io.BufferedReader(binary)
            yield from io.TextIOWrapper(content, encoding="utf-8-sig")  # without Windows' byte order mark
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None


def json_objects(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of a file, with its place for messages. Raises ValueError for other JSON values."""
    is_json = file.name.lower().removesuffix(".gz").endswith(".json")
    if is_json and next((line for line in _lines(file) if line.strip()), "").lstrip().startswith("["):
        kind, rows = "entry", enumerate(_parsed("".join(_lines(file)), str(file)), start=1)
    else:
        kind, rows = "line", _parsed_lines(file)
    for number, row in rows:
        if not isinstance(row, dict):
            raise _no_object(f"{file}, {kind} {number},")
        yield f"{file}, {kind} {number},", row


def _parsed_lines(file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():  # a file that was appended to another has its mark
            yield number, _parsed(line.removeprefix("\ufeff"), f"{file}, line {number},")


def _parsed(text: str, place: str) -> Any:
    """The JSON value. Raises ValueError also for a key that is twice in an object: its last value would hide others."""

    def once(pairs: list[tuple[str, Any]]) -> Named:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise KeyError(next(key for key in keys if keys.count(key) > 1))
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except KeyError as key:
        raise ValueError(f"{place} has the key {key} twice in one object; rename or delete one") from None
    except (ValueError, RecursionError):
        raise _no_object(place) from None


def _no_object(place: str) -> ValueError:
    return ValueError(f"{place} is not a JSON object; write one object per line")


def _parquet_texts(file: Path, config: DataConfig) -> Iterator[str]:
    def tables() -> "Iterator[pyarrow.RecordBatch]":
        import pyarrow.parquet

        yield from pyarrow.parquet.ParquetFile(_open(file)).iter_batches(_ROWS_AT_ONCE)

    yield from _column(str(file), tables(), config, "check that it is a whole Parquet file")


def _read_hub(config: DataConfig) -> Iterator[str]:
    name, _, subset = corpus_name(config.corpus).place.partition(":")

    def tables() -> "Iterator[pyarrow.Table]":
        from datasets import load_dataset

        data = load_dataset(name, subset or None, split="train", streaming=True)
        yield from data.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)

    fix = f"check the name, the configuration and the network, or name a local file ({STDLIB!r} needs no network)"
    yield from _column(f"corpus={config.corpus!r}", tables(), config, fix)


def read_safely(rows: Iterable[Row], place: str, fix: str) -> Iterator[Row]:
    """The rows. Raises ValueError, with the fix, for whatever the hub, its cache or a file format raises meanwhile."""
    try:
        yield from rows
    except Exception as error:
        raise ValueError(f"{place} cannot be read ({one_line(error)}); {fix}") from None


def _column(place: str, tables: Iterator[Any], config: DataConfig, fix: str) -> Iterator[str]:
    """The column `text_field` of Arrow tables."""
    for table in read_safely(tables, place, fix):
        _check_field(table.schema.names, place, config)
        for value in table[config.text_field].to_pylist():
            yield _text(value, place, config)


def _check_field(names: Collection[str], place: str, config: DataConfig) -> None:
    field = config.text_field
    if list(names).count(field) > 1:
        raise ValueError(f"{place} has the column {field!r} twice; rename or delete one")
    if field not in names:
        hint = did_you_mean(field, names, f"set text_field to one of: {', '.join(sorted(names))}")
        raise ValueError(f"{place} has no field text_field={field!r}; {hint}")


def _text(value: object, place: str, config: DataConfig) -> str:
    """The text of a row; missing values are empty documents."""
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"{place} holds {type(value).__name__} in text_field={config.text_field!r}, not text; name another field"
        )
    return value or ""
