"""The `runs` view as a frame, from configurations and made-up outcomes: what the row side reads, without any file."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of

Summary = Mapping[str, Any]


def runs_frame(rows: Iterable[tuple[RunConfig, Summary]]) -> pd.DataFrame:
    """One row per run: ids, every RunConfig field (tuples as JSON text), every run quantity (None where not given)."""
    records = []
    for config, summary in rows:
        fields = config.model_dump(mode="json")
        texts = {name: json.dumps(value) for name, value in fields.items() if isinstance(value, list)}
        measured = {quantity.name: None for quantity in quantities.RUNS}
        ids = {"run_id": config.run_id, "cell_id": config.cell_id}
        given = {"outcome": "ok", "tokens_trained": config.train_tokens, "train_flops": 1e9}
        given |= dict.fromkeys(("params_total", "params_active"), 1000 * config.n_layers)
        records.append({**ids, **fields, **texts, **measured, **given, **summary})
    return pd.DataFrame.from_records(records)


def config_of(**fields: Any) -> RunConfig:
    """A configuration from fields of any type, as a table of test cases holds them."""
    return RunConfig(**fields)


def grid(axes: Mapping[str, Iterable[Any]], outcome: Callable[[RunConfig], Summary], **base: Any) -> pd.DataFrame:
    """Every combination of the axes (each a field, or 'a,b' for fields that move together) with its outcome."""
    rows = []
    for point in itertools.product(*axes.values()):
        fields = dict(base)
        for names, value in zip(axes, point, strict=True):
            split = names.split(",")
            fields.update(zip(split, value, strict=True) if len(split) > 1 else [(names, value)])
        config = RunConfig(**fields)
        rows.append((config, outcome(config)))
    return runs_frame(rows)


def labelled_grid(
    axes: Mapping[str, Iterable[Any]], outcome: Callable[[RunConfig], Summary], **base: Any
) -> pd.DataFrame:
    """A grid with the column `setting` that figures read: how each run differs from the baseline."""
    runs = grid(axes, outcome, **base)
    return runs.assign(setting=cells_of(runs, "val_loss").rows["setting"])
