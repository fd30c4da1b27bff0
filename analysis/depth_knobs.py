"""Does LNS still help when combined with other remedies? One row per remedy and depth, with LNS and without.

    python analysis/depth_knobs.py RESULTS_DIR [...] [--table FILE.csv]

For runs of the example depth_knobs.yaml, or any in which depth_scale is crossed with other fields. Each side at its
tuned lr: mean loss and needed layers over the result seeds, and the effect of LNS on loss, paired by seed, Student's
interval. At equal lr, which changes variance far more than LNS does: the ratio of the last layer's residual variance,

    variance_ratio = exp(mean over runs of equal lr and seed of ln variance(LNS) - ln variance(without))

with the smallest and the largest such ratio. The intervals are not corrected for the number of remedies. To test
whether the effects differ from each other: `sparsedepth effects`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from estimate import estimate
from script import read_runs, run_script

from sparsedepth.effects.cells import cells_of
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.table import fitted_table
from sparsedepth.words.values import assignment

CLAIM = (
    "LNS lowers residual variance and so the loss of deep models (2502.05795); other remedies for the curse of depth "
    "may leave nothing for it to do"
)
NEEDED, VARIANCE = "needed_layers", "residual_variance_last"


def crossed(runs: pd.DataFrame) -> pd.DataFrame | None:
    """One row per depth and setting of the other knobs, sorted by depth and loss; None if LNS is not crossed with any.
    Column `beside`: that setting."""
    changes = cells_of(runs, loss_of(runs)).rows["changes"]
    if not any("depth_scale" in dict(fields) for fields in changes):
        return None
    others = changes.map(lambda fields: sorted(fields - {("depth_scale", "lns")}, key=str))
    beside = others.map(lambda fields: ", ".join(assignment(*field) for field in fields))
    runs = runs.loc[changes.index].assign(beside=beside, loss=runs[loss_of(runs)])
    runs = runs[(runs["outcome"] == "ok") & runs["depth_scale"].isin(["none", "lns"])]
    rows = [
        {"n_layers": n_layers, "beside": beside or "nothing", **_row(same)}
        for (n_layers, beside), same in runs.groupby(["n_layers", "beside"])
        if same["depth_scale"].nunique() == 2
    ]
    return pd.DataFrame(rows).sort_values(["n_layers", "loss"], ignore_index=True) if rows else None


def _row(runs: pd.DataFrame) -> dict[str, float | int | None]:
    results = result_rows(runs)
    without, lns = (results[results["depth_scale"] == scale] for scale in ("none", "lns"))
    paired = lns.merge(without, on="seed", suffixes=("_lns", ""))
    effect = estimate((paired["loss_lns"] - paired["loss"]).to_numpy())
    at_equal_lr = runs[runs["depth_scale"] == "lns"].merge(
        runs[runs["depth_scale"] == "none"], on=["seed", "lr"], suffixes=("_lns", "")
    )
    ratio = np.log(at_equal_lr[f"{VARIANCE}_lns"].astype(float) / at_equal_lr[VARIANCE].astype(float)).dropna()
    return {
        "lr": without["lr"].median(),
        "lr_lns": lns["lr"].median(),
        "loss": without["loss"].mean(),
        "loss_lns": lns["loss"].mean(),
        "effect": effect.mean,
        "lo": effect.lo,
        "hi": effect.hi,
        "needed": without[NEEDED].mean(),
        "needed_lns": lns[NEEDED].mean(),
        "variance_ratio": float(np.exp(ratio.mean())),
        "least_ratio": float(np.exp(ratio.min())),
        "largest_ratio": float(np.exp(ratio.max())),
        "pairs_of_equal_lr": len(ratio),
    }


def lines(table: pd.DataFrame) -> Iterator[str]:
    """One table per depth."""
    names = [*table.loc[:, "lr":"variance_ratio"], "beside"]
    for n_layers, rows in table.groupby("n_layers"):
        cells = rows[names].astype(object).where(rows[names].notna(), None)
        values = tuple(tuple(row) for row in cells.itertuples(index=False))
        yield f"\nn_layers={n_layers}"
        yield fitted_table(QueryResult(columns=tuple(names), rows=values), ("needed needed_lns", "lr lr_lns")).text


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="depth_knobs.py", description="LNS combined with other remedies")
    parser.add_argument("results", nargs="+")
    parser.add_argument("--table", type=Path, help="write all columns to this CSV file")
    options = parser.parse_args(arguments)
    if options.table is not None and options.table.suffix.lower() != ".csv":
        parser.error(f"--table {options.table} must end in .csv")
    runs = read_runs(options.results)
    table = crossed(runs)
    if table is None:
        raise ValueError(f"in these {len(runs)} runs depth_scale lns is not crossed with another field")
    print(f"Claimed: {CLAIM}\nMeasured:")
    print("beside: the other remedy; effect: loss with LNS minus without, 95% interval over seeds;")
    print("variance_ratio: with LNS over without, last layer, at equal lr")
    for line in lines(table):
        print(line)
    if options.table is not None:
        table.round(6).to_csv(options.table, index=False)
        print(f"written: {options.table}")


if __name__ == "__main__":
    run_script(main)
