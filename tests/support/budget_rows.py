"""Rows of `scaling.budgets.budget_rows` without a store."""

from collections.abc import Iterable

import pandas as pd


def rows_of(runs: Iterable[tuple[int, str, int, float, float, float | None]]) -> pd.DataFrame:
    """From n_layers, setting, seed, train_flops, loss and tokens_per_second; a token costs 1e9 FLOPs."""
    names = ["n_layers", "setting", "seed", "train_flops", "loss", "tokens_per_second"]
    rows = pd.DataFrame(list(runs), columns=names).astype({"tokens_per_second": float})
    return rows.assign(train_tokens=(rows["train_flops"] / 1e9).round().astype(int), device="cpu", outcome="ok")
