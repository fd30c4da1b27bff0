"""The points for the depth law: one row per trained model, from a CSV or a results folder.

Columns: d_model, n_layers, num_tokens (training tokens), loss [nat/token], model_size (parameters; NaN where unknown).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from sparsedepth.config.plain_text import refuse_empty, unreadable
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.store.connection import open_store
from sparsedepth.store.schema import RUN_COLUMNS
from sparsedepth.store.setting import only_tuning_text
from sparsedepth.store.tuning_roles import IS_RESULT

COLUMNS = ("model_size", "num_tokens", "d_model", "n_layers", "loss")
SIZE_FIELDS = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "d_expert", "train_tokens", "seed")
"""Fields that may differ between the points of one law; n_kv_heads only in proportion to n_heads."""
MAX_BYTES = 100_000_000

_SQL = """
SELECT params_total AS model_size, tokens_trained AS num_tokens, d_model, n_layers, val_loss AS loss{cluster}
FROM runs WHERE outcome = 'ok' AND {is_result} AND val_loss IS NOT NULL AND {where}
ORDER BY run_id
"""


def read_points(source: Path, where: str | None = None, cluster: str | None = None) -> pd.DataFrame:
    """The points of a CSV file with COLUMNS, or of a results folder's finished runs.

    `where`: an SQL condition over the columns of `runs`, for a folder only. `cluster`: comma-separated columns; points
    with equal values make a cluster, named in a new column `cluster`. For a folder, 'run' means the training run (an
    imported row's own cluster). A point without a value is independent. Raises ValueError for a missing column, a value
    that is not a positive number, or no points at all.
    """
    names = [name.strip() for name in cluster.split(",")] if cluster else []
    if source.is_dir():
        return _checked(_from_folder(source, where, names), str(source))
    if where is not None:
        raise ValueError(f"where={where!r} is a condition over runs, and {str(source)!r} is not a results folder")
    return _checked(_from_csv(source, names), str(source))


def exclude_highest(points: pd.DataFrame, n_excluded: int) -> pd.DataFrame:
    """The points without the n highest losses and their ties. Raises ValueError if none is left."""
    if n_excluded == 0:
        return points
    remaining = points[points["loss"] < points["loss"].nlargest(n_excluded).min()]
    if remaining.empty:
        raise ValueError(
            f"cannot exclude the {n_excluded} highest of {len(points)} losses and their ties: no point is left; "
            f"exclude fewer"
        )
    return remaining.reset_index(drop=True)


def other_differences(source: Path, where: str | None = None) -> list[str]:
    """Fields, other than sizes, that differ between a results folder's points: the law ignores them."""
    names = fields_where(RunConfig, lambda role: role.kind not in ("measure", "record"))
    values = {name: name for name in names if name not in SIZE_FIELDS} | {"n_kv_heads": "n_heads / n_kv_heads"}
    counts = ", ".join(f"count(DISTINCT coalesce(CAST({value} AS VARCHAR), 'NULL'))" for value in values.values())
    with open_store(source) as store:
        condition = store.condition(where or "true")
        n_values = store.sql(f"SELECT {counts} FROM runs WHERE outcome = 'ok' AND {IS_RESULT} AND {condition}").rows[0]
    return [name for name, count in zip(values, n_values, strict=True) if count > 1]


def _from_folder(source: Path, where: str | None, cluster: list[str]) -> pd.DataFrame:
    columns = {column.name for column in RUN_COLUMNS} | {"run"}
    if unknown := [name for name in cluster if name not in columns]:
        raise ValueError(
            f"--cluster {unknown[0]!r} is no column of runs; name run, or columns such as d_model,n_layers"
        )
    parts = [
        "coalesce(cluster, run_id)" if name in ("run", "cluster") else f"CAST({name} AS VARCHAR)" for name in cluster
    ]
    key = " || ' ' || ".join(parts)  # NULL if any part is
    clusters = f", coalesce({key}, run_id) AS cluster" if parts else ""
    with open_store(source) as store:
        condition = store.condition(where or "true")
        points = store.frame(_SQL.format(where=condition, is_result=IS_RESULT, cluster=clusters))
        tuning = only_tuning_text(store)
    if not len(points):
        if tuning:
            raise ValueError(f"{str(source)!r}: {tuning}; the law is fitted to results")
        condition = f" that meets {where!r}" if where else ""
        raise ValueError(f"{str(source)!r} holds no trained run{condition} that finished with a val_loss")
    return points


def _from_csv(source: Path, cluster: list[str]) -> pd.DataFrame:
    if not source.is_file():
        raise ValueError(
            f"{str(source)!r} does not exist; name a CSV file with columns {', '.join(COLUMNS)}, or a folder"
        )
    refuse_empty(source)
    if source.stat().st_size > MAX_BYTES:
        raise ValueError(f"{str(source)!r} has more than {MAX_BYTES:,} bytes; points of a law are a small table")
    try:
        points = pd.read_csv(source, keep_default_na=False, na_values=[""])  # a cluster may be named NA
    except UnicodeError as error:
        raise unreadable(source, error) from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{str(source)!r} is not a CSV file: {error}") from None
    missing = [name for name in (*COLUMNS, *cluster) if name not in points.columns and name != "model_size"]
    if missing:
        have = ", ".join(map(str, points.columns[:12]))
        raise ValueError(f"{str(source)!r} has no column {', '.join(missing)}; its columns are {have}")
    named = [name or f"row {i}" for i, name in enumerate(_clusters_of(points, cluster))]
    points = points.reindex(columns=list(COLUMNS))
    return points.assign(cluster=named) if cluster else points


def _checked(points: pd.DataFrame, source: str) -> pd.DataFrame:
    """The points as numbers. Raises ValueError, with the row, for one that is not positive and finite."""
    numbers = points[list(COLUMNS)].apply(pd.to_numeric, errors="coerce").astype(float)
    for name in COLUMNS:
        bad = ~(np.isfinite(numbers[name]) & (numbers[name] > 0))
        if name == "model_size" and numbers[name].isna().all():
            continue
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            value = json.dumps(points[name].iloc[row], default=str)
            raise ValueError(
                f"{source!r}: {name} is {value} in row {row + 1} of {len(points)}, and {int(bad.sum())} such rows; "
                f"a positive number is needed"
            )
    if not len(numbers):
        raise ValueError(f"{source!r} holds no points")
    return numbers.assign(cluster=points["cluster"]) if "cluster" in points.columns else numbers


def _clusters_of(points: pd.DataFrame, columns: Sequence[str]) -> list[str | None]:
    """The cluster of each row, named by its values in these columns; None, a cluster of its own, if one is missing."""
    is_known = points[columns].notna().all(axis=1) & bool(columns)
    rows = points[columns].astype(object).itertuples(index=False, name=None)
    return [" ".join(map(str, row)) if known else None for row, known in zip(rows, is_known, strict=True)]
