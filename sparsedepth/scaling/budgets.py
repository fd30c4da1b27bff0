"""The results of a store by budget: a row per run, with its setting and what it cost.

    n_layers, setting, seed, train_tokens, train_flops, loss, tokens_per_second, device

A setting is how a configuration differs from the baseline (`store.setting`), whatever its budget. Runs of several
budgets that are branches of one trunk share its seed: to the statistics a seed is one unit, over all of its budgets.
"""

import pandas as pd

from sparsedepth.config.role import fields_where
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.setting import BUDGET, only_tuning_text, read_settings
from sparsedepth.store.tuning_roles import IS_RESULT

BASELINE = "baseline"
LOSSES = ("val_loss", "val_loss_common", "val_bits_per_byte", "train_loss")
SAME_BUDGET = 0.01
"""Budgets that differ by less are one: sizes are solved for within 1%."""
DATA = (*fields_where(RunConfig, lambda role: role.kind == "data"), "seq_len")
"""Fields between whose values losses are not comparable."""
_SPEED = "LEFT JOIN (SELECT run_id, median(tokens_per_second) AS tokens_per_second FROM curves GROUP BY ALL) "


def budget_rows(store: Store, knob: str | None = None, outcome: str | None = None) -> pd.DataFrame:
    """The rows, of the baseline and the settings that change `knob`; `outcome` is the loss, by default the one that
    compares these runs. Raises ValueError without any, and for another outcome."""
    loss = outcome or loss_in(store)
    if loss not in LOSSES:
        raise ValueError(f"{loss!r} is no loss that falls with compute; choose one of {', '.join(LOSSES)}")
    settings = read_settings(store)
    runs = store.frame(
        f"SELECT run_id, seed, outcome, train_flops, tokens_per_second, device, {loss} AS loss, "
        f"{', '.join(CELL_FIELDS)} FROM runs {_SPEED} USING (run_id) WHERE {IS_RESULT}"
    )
    if settings is None or runs.empty:
        raise ValueError(only_tuning_text(store) or "no run was trained to the end")
    fields = [name for name in settings.label_fields if name != BUDGET]
    records = runs[fields].astype(object).where(runs[fields].notna(), None).to_dict("records")
    runs["setting"] = [settings.label(record) for record in records]
    if knob is not None:
        if knob not in fields:
            raise ValueError(f"no two runs differ in {knob}; these runs vary: {', '.join(fields) or 'no field'}")
        runs = runs[(runs["setting"] == BASELINE) | (runs[knob] != settings.baseline.knobs[knob])]
    names = ["n_layers", "setting", "seed", BUDGET, "train_flops", "loss", "tokens_per_second", "device", "outcome"]
    runs = runs[[*names, *DATA]].astype({"n_layers": int, "train_flops": float, "loss": float})
    runs = runs[runs["train_flops"].notna()].reset_index(drop=True)
    if runs.empty:
        raise ValueError("no run has train_flops: its cost is not known")
    return runs


def differing_data(rows: pd.DataFrame) -> str:
    """The fields of data and length in which these rows differ, comma-separated."""
    return ", ".join(name for name in DATA if name in rows and rows[name].nunique(dropna=False) > 1)


def finished(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a loss."""
    return rows[(rows["outcome"] == "ok") & rows["loss"].notna()]


def losses_by_budget(rows: pd.DataFrame) -> dict[float, dict[int, float]]:
    """Budget [FLOPs] -> seed -> loss, of the runs of one depth and setting; budgets within SAME_BUDGET are one."""
    losses: dict[float, dict[int, float]] = {}
    for flops, loss, seed in rows.sort_values("train_flops")[["train_flops", "loss", "seed"]].itertuples(index=False):
        budget = next((known for known in losses if abs(flops / known - 1) < SAME_BUDGET), flops)
        losses.setdefault(budget, {})[int(seed)] = loss
    return losses


def flops_text(flops: float) -> str:
    """'2.7e12'"""
    return f"{flops:.2g}".replace("e+", "e")
