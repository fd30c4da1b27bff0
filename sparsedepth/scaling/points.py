"""The runs that the laws of scaling are fitted to: points of the depth law, and rows by budget.

A point is a trained model, from a table or a results folder: d_model, n_layers, num_tokens (training tokens), loss
[nat/token], model_size (parameters; NaN where unknown).

A row by budget is a run with its setting and what it cost: n_layers, setting, seed, train_tokens, train_flops, loss,
tokens_per_second, device. A setting is how a configuration differs from the baseline (`store.setting`), whatever its
budget. Branches of one trunk share its seed: to the statistics a seed is one unit, over all of its budgets. Where lr
was tuned, a row has what `effects` finds at its budget alone: effect and effect_sd of its setting, each side at its own
optimum, and lr_variance, what the choice of lr adds to the variance of its mean in a comparison of depths."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from sparsedepth.config.role import fields_where
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.effects.cells import BASELINE, Cells, cells_of, off_cpus, read_runs
from sparsedepth.effects.depths import at_budgets, budget_of, with_budgets
from sparsedepth.once import once
from sparsedepth.outside import SECONDS
from sparsedepth.store.comparable_loss import DATA, LOSSES, loss_in
from sparsedepth.store.connection import Store, open_store
from sparsedepth.store.schema import RUN_COLUMNS
from sparsedepth.store.setting import BUDGET, only_tuning
from sparsedepth.store.table_file import cluster_of, open_table, quoted, read_texts
from sparsedepth.store.tuning_roles import IS_RESULT
from sparsedepth.words.differences import only_tuning_text

COLUMNS = ("model_size", "num_tokens", "d_model", "n_layers", "loss")
IS_POINT = f"outcome = 'ok' AND {IS_RESULT}"
SIZE_FIELDS = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "d_expert", "train_tokens", "seed")
"""Fields that may differ between the points of one law; n_kv_heads only in proportion to n_heads."""
Key = TypeVar("Key", float, tuple[bool, float])
_TRUNK = f"md5(CAST(({', '.join(['seed', *(name for name in CELL_FIELDS if name != BUDGET)])}) AS VARCHAR))"
TRAINING = f"coalesce(cluster, CASE WHEN schedule = 'wsd' THEN {_TRUNK} ELSE run_id END)"
"""SQL: branches of one trunk, and imported rows of one cluster, are one training run."""
NO_FLOPS = (
    "no run has train_flops: its cost is not known; in the map of an import give it, such as "
    "train_flops: 6.0 * params * tokens, a column in millions times 1e6"
)
CHOICES = ("effect", "effect_sd", "lr_variance")


def read_points(
    source: Path, where: str | None = None, cluster: str | None = None, seconds: float = SECONDS
) -> pd.DataFrame:
    """The points of a table with COLUMNS, or of a results folder's finished runs.

    `where`: an SQL condition over the columns of `runs`, for a folder only. `cluster`: comma-separated columns; points
    with equal values make a cluster, named in a new column `cluster`. For a folder, 'run' means the training run (an
    imported row's own cluster). A point without a value is independent. Raises ValueError for a missing column, a value
    that is not a positive number, or no points at all."""
    names = [name.strip() for name in cluster.split(",")] if cluster else []
    if source.is_dir():
        return _checked(_from_folder(source, where, names), str(source))
    if where is not None:
        raise ValueError(f"where={where!r} is a condition over runs, and {str(source)!r} is not a results folder")
    return _from_table(source, names, seconds)


def exclude_highest(points: pd.DataFrame, n_excluded: int) -> pd.DataFrame:
    """The points without the n highest losses and their ties. Raises ValueError if none is left."""
    if n_excluded == 0:
        return points
    remaining = points[points["loss"] < points["loss"].nlargest(n_excluded).min()]
    if remaining.empty:
        highest = f"the {n_excluded} highest of {len(points)} losses and their ties"
        raise ValueError(f"cannot exclude {highest}: no point is left")
    return remaining.reset_index(drop=True)


def other_differences(source: Path, where: str | None = None) -> list[str]:
    """Fields, other than sizes, that differ between a results folder's points: the law ignores them."""
    names = fields_where(RunConfig, lambda role: role.kind not in ("measure", "record"))
    values = {name: name for name in names if name not in SIZE_FIELDS} | {"n_kv_heads": "n_heads / n_kv_heads"}
    counts = ", ".join(f"count(DISTINCT coalesce(CAST({value} AS VARCHAR), 'NULL'))" for value in values.values())
    with open_store(source) as store:
        condition = store.condition(where or "true")
        n_values = store.sql(f"SELECT {counts} FROM runs WHERE {IS_POINT} AND {condition}").rows[0]
    return [name for name, count in zip(values, n_values, strict=True) if count > 1]


def _from_folder(source: Path, where: str | None, cluster: list[str]) -> pd.DataFrame:
    """Points of runs in the store, of one cluster where they share these columns, or the training by default."""
    columns = {column.name for column in RUN_COLUMNS} | {"run"}
    if unknown := [name for name in cluster if name not in columns]:
        hint = "name run, or columns such as d_model,n_layers"
        raise ValueError(f"--cluster {unknown[0]!r} is no column of runs; {hint}")
    names = cluster or ["run"]
    parts = [TRAINING if name in ("run", "cluster") else f"CAST({name} AS VARCHAR)" for name in names]
    key = " || ' ' || ".join(parts)  # NULL if any part is
    with open_store(source) as store:
        condition = store.condition(where or "true")
        points = store.frame(
            "SELECT params_total AS model_size, tokens_trained AS num_tokens, d_model, n_layers, val_loss AS loss"
            f", coalesce({key}, run_id) AS cluster FROM runs "
            f"WHERE {IS_POINT} AND val_loss IS NOT NULL AND {condition} ORDER BY run_id"
        )
        tuning = only_tuning_text(only_tuning(store))
    if points.empty and tuning:
        raise ValueError(f"{str(source)!r}: {tuning}; the law is fitted to results")
    if points.empty:
        condition = f" that meets {where!r}" if where else ""
        raise ValueError(f"{str(source)!r} holds no trained run{condition} that finished with a val_loss")
    is_shared = cluster or points["cluster"].duplicated().any()  # by branches, or in the imported table
    return points if is_shared else points.drop(columns="cluster")


def _from_table(source: Path, cluster: list[str], seconds: float) -> pd.DataFrame:
    """Checked points of a table of rows: of one cluster where they share these columns. Raises ValueError for a column
    that is missing."""

    def chosen(have: Sequence[str]) -> list[str]:
        if missing := [name for name in (*COLUMNS[1:], *cluster) if name not in have]:
            told = f"{str(source)!r} has no column {', '.join(missing)}; its columns are {', '.join(have[:12])}"
            raise ValueError(told)
        return [name for name in have if name in (*COLUMNS, *cluster)]

    texts = read_texts(source, chosen, seconds)
    have = texts.names
    values = [quoted(name) if name in have else "NULL" for name in COLUMNS]
    with open_table(texts) as table:
        found = table.rows(", ".join([*values, *map(quoted, cluster)]), "texts")
    n = len(COLUMNS) + 1
    rows = [(*row[:n], f"row {row[0]}" if None in row[n:] or not cluster else cluster_of(row[n:])) for row in found]
    points = pd.DataFrame(rows, columns=["row", *COLUMNS, "cluster"])
    try:
        return _checked(points if cluster else points.drop(columns="cluster"), str(source))
    except ValueError as error:
        raise ValueError(texts.placed(str(error))) from None


def _checked(points: pd.DataFrame, source: str) -> pd.DataFrame:
    """The points as numbers. Raises ValueError, with the row, for one that is not positive and finite."""
    if points.empty:
        raise ValueError(f"{source!r} holds no points")
    numbers = points[list(COLUMNS)].apply(pd.to_numeric, errors="coerce").astype(float)
    for name in COLUMNS:
        bad = ~(np.isfinite(numbers[name]) & (numbers[name] > 0)) & ~(numbers[name].isna() & (name == "model_size"))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            value = json.dumps(points[name].iloc[row], default=str)
            where = f"{value} in row {row + 1}, the first of {bad.sum()} such of {len(points)}"
            raise ValueError(f"{source!r}: {name} is {where}; a positive number is needed")
    return numbers.assign(cluster=points["cluster"]) if "cluster" in points.columns else numbers


@once
def budget_cells(store: Store, loss: str | None = None) -> Cells:
    """The cells of a loss at every budget. Raises ValueError without a run that was trained to the end."""
    if loss is None:
        return budget_cells(store, loss_in(store))
    cells = cells_of(read_runs(store, loss), loss, every_budget=True)
    if cells.settings is None:
        raise ValueError(only_tuning_text(only_tuning(store)) or "no run was trained to the end")
    if "flops" not in cells.rows or cells.rows["flops"].isna().all():
        raise ValueError(NO_FLOPS)
    return cells


def budget_rows(store: Store, knob: str | None = None, outcome: str | None = None) -> pd.DataFrame:
    """The rows, of the baseline and the settings that change `knob`; `outcome` is the loss, by default the one that
    compares these runs. Raises ValueError without any, and for another outcome."""
    loss = outcome or loss_in(store)
    if loss not in LOSSES:
        raise ValueError(f"{loss!r} is no loss that falls with compute; choose one of {', '.join(LOSSES)}")
    cells = budget_cells(store, loss)
    rows = with_budgets(cells)[["run_id", "n_layers", "changes", "name"]].rename(columns={"name": "setting"})
    if knob is not None:
        if knob not in cells.knobs:
            raise ValueError(f"no two runs differ in {knob}; these runs vary: {', '.join(cells.knobs) or 'no field'}")
        rows = rows[(rows["setting"] == BASELINE) | rows["changes"].map(lambda changes: knob in dict(changes))]
    columns = ("run_id", "seed", BUDGET, "train_flops", "device", "started", "outcome", *DATA)
    runs = store.frame(
        f"SELECT {', '.join(columns)}, {loss} AS loss, {TRAINING} AS training, tokens_per_second FROM runs LEFT JOIN "
        "(SELECT run_id, median(tokens_per_second) AS tokens_per_second FROM curves GROUP BY ALL) USING (run_id) WHERE "
        f"{IS_RESULT} AND train_flops IS NOT NULL"
    )
    runs["tokens_per_second"] = off_cpus(runs["tokens_per_second"], runs["device"].fillna("cpu"))
    runs = runs.fillna({"seed": -1}).astype({"train_flops": float, "loss": float}).merge(rows, on="run_id")
    return runs.join(lr_choices(cells), on="run_id", how="inner").drop(columns="changes").reset_index(drop=True)


@once
def lr_choices(cells: Cells) -> pd.DataFrame:
    """run_id -> CHOICES, from the cells of a loss at every budget; without runs at another lr than the one that
    `effects` compares, or scored in another way."""
    rows = with_budgets(cells)
    found = pd.DataFrame(np.nan, rows["run_id"], [*CHOICES]).assign(lr_variance=0.0)
    other_lr: set[str] = set()
    budgets = at_budgets(cells, rows)
    for (budget, name, depth), own in rows.groupby(["budget", "name", "n_layers"]):  # ty: ignore[not-iterable]
        sides = [budgets[budget][side] for side in (name, BASELINE) if side in budgets[budget]]
        at = sides[0].depths[depth]
        lr = own["setting"].map({setting: cell.lr for setting, cell in at.cells.items()})
        other_lr |= {*own.loc[(own["lr"] != lr) & own["lr"].notna() & lr.notna(), "run_id"]}
        found.loc[own["run_id"], "lr_variance"] = sides[0].lr_variance(depth)
        settings = dict.fromkeys(side.cells[depth].setting for side in sides if depth in side.cells)
        if at.has_curves and len(settings) == 2:
            contrast = at.fit.contrast(dict(zip(settings, (1.0, -1.0), strict=True)))
            if contrast:
                found.loc[own["run_id"], ["effect", "effect_sd"]] = contrast.effect.estimate, contrast.effect.sd
    return found.drop(index=[*other_lr])


def finished(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a loss."""
    return rows[(rows["outcome"] == "ok") & rows["loss"].notna()]


def losses_by_budget(rows: pd.DataFrame) -> dict[float, dict[int, float]]:
    """Budget [FLOPs] -> seed -> mean loss, of runs of one depth and setting; budgets within MATCHED are one."""
    budget, seeds = budget_of(rows["train_flops"]), rows["seed"].astype(int)
    at = {flops: budget == flops for flops in np.unique(budget).tolist()}
    return {flops: rows["loss"][which].groupby(seeds).mean().to_dict() for flops, which in at.items()}


def blocks_of(losses: Mapping[Key, Mapping[int, float]]) -> list[tuple[list[int], list[Key]]]:
    """Seeds that some budgets share, with all budgets that each of them has a loss at: from budget -> seed -> loss,
    (seeds, budgets), ascending."""
    shared: set[frozenset[int]] = set()
    for by_seed in losses.values():
        shared |= {frozenset(by_seed), *(seeds & {*by_seed} for seeds in shared)}
    of_seeds = {seeds: [budget for budget, by_seed in losses.items() if seeds <= {*by_seed}] for seeds in shared}
    return [(sorted(seeds), sorted(budgets)) for seeds, budgets in of_seeds.items() if seeds] or [([], [])]
