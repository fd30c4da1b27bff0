"""Read a table of a stranger's: CSV, TSV, JSON, JSON-lines or Parquet, bounded in bytes and rows."""

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

MAX_BYTES = 200_000_000
MAX_ROWS = 50_000
"""Training runs, that is: a table above this holds something else, such as steps of curves."""
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")


def read_table(path: Path) -> "pd.DataFrame":
    """The table as it is, numbered from 0; of a CSV all values are text. Raises ValueError, one line."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r} is of no kind that is read; name one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; name a table")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{str(path)!r} has {path.stat().st_size:,} bytes; a table of runs may have {MAX_BYTES:,}")
    try:
        read = {".json": _json, ".jsonl": _json, ".parquet": _parquet}.get(path.suffix, _text)
        frame = read(path)
    except (ValueError, OSError, RecursionError) as error:  # ValueError: pandas', Arrow's, JSON's and Unicode's, too
        raise ValueError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())[:300]}") from None
    return frame.reset_index(drop=True)


def _too_many(n: str) -> ValueError:
    return ValueError(f"it has {n} rows, and {MAX_ROWS:,} are taken at most; a row is a run, not a step of one")


def _text(path: Path) -> "pd.DataFrame":
    import pandas as pd

    separator = "\t" if path.suffix == ".tsv" else ","
    with open(path, encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file, delimiter=separator), [])
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the column {twice[0]!r} stands twice in its header")
    frame = pd.read_csv(path, sep=separator, dtype=str, nrows=MAX_ROWS + 1, encoding="utf-8-sig", index_col=False)
    if len(frame) > MAX_ROWS:
        raise _too_many(f"more than {MAX_ROWS:,}")
    return frame


def _json(path: Path) -> "pd.DataFrame":
    import pandas as pd

    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else [text]
    if len(lines) > MAX_ROWS:
        raise _too_many(f"{len(lines):,}")
    rows = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else json.loads(text)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must be a list of objects, one per run")
    if len(rows) > MAX_ROWS:
        raise _too_many(f"{len(rows):,}")
    return pd.DataFrame(rows)


def _parquet(path: Path) -> "pd.DataFrame":
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    if file.metadata.num_rows > MAX_ROWS:
        raise _too_many(f"{file.metadata.num_rows:,}")
    return file.read().to_pandas()
