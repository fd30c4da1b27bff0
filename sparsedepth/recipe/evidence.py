"""The rows of the frame `effects` that a recipe filters: those of each depth, computed once, and the runs behind them.

It computes nothing itself.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig, known_measures
from sparsedepth.effects.cells import BASELINE, Cells, Changes, plain
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.frame import effects_frame
from sparsedepth.store.subject import buildable, is_imported
from sparsedepth.store.tuning_roles import result_rows


class Evidence:
    """The cells of a store and their effects on one objective, a depth at a time."""

    def __init__(self, cells: Cells) -> None:
        self.cells, self.runs = cells, cells.runs
        self.results = result_rows(cells.runs)
        self.depths = tuple(sorted(set(map(int, self.results.loc[self.results["outcome"] == "ok", "n_layers"]))))
        self.changes = self.cells.changes
        self._effects: dict[int, tuple[Effect, ...]] = {}

    @property
    def tried(self) -> dict[str, list[float]]:
        """Tuned field -> values tried."""
        if not self.cells.tuned:
            return {}
        tuned = self.runs[self.runs["tuned_fields"].notna()]
        return {name: sorted({float(value) for value in tuned[name].dropna()}) for name in sorted(self.cells.tuned)}

    def effects(self, depth: int) -> tuple[Effect, ...]:
        """The effects at one depth, in the order of the frame."""
        if depth not in self._effects:
            cells = replace(self.cells, rows=self.cells.rows[self.cells.rows["n_layers"] == depth])
            self._effects[depth] = effects_of(cells)
        return self._effects[depth]

    def effect(self, depth: int, setting: str, context: str = "") -> Effect | None:
        """The effect of a setting at the baseline, or beside another setting."""
        wanted = ("beside" if context else "setting", setting, context)
        return next((e for e in self.effects(depth) if (e.question, e.setting, e.context) == wanted), None)

    def why_no_baseline(self, depth: int) -> str:
        """Why the baseline of a depth has no run to compare with; '' where it has."""
        rows = self.cells.rows
        if ((rows["n_layers"] == depth) & (rows["setting"] == BASELINE)).any():
            return ""
        results = self.results.loc[self.results["n_layers"] == depth, "run_id"]
        if results.isin(rows["run_id"]).all():
            return "the baseline was not run at this depth in these folders"
        return "the baseline was scored in another way than most runs at this depth; name fewer folders"

    def label(self, depth: int, changes: Changes) -> str | None:
        """The setting with these changes; None if it was not run at this depth."""
        names = (e.setting for e in self.effects(depth) if e.question == "setting")
        return next((name for name in names if self.changes[name] == changes), None)

    def runs_of(self, setting: str, depth: int, lr: float | None = None) -> pd.DataFrame:
        """The results of a setting at one depth: at one value of the tuned field, by default the one with most runs."""
        rows = self.cells.rows
        ids = rows.loc[(rows["n_layers"] == depth) & (rows["setting"] == setting), "run_id"]
        found = self.results[self.results["run_id"].isin(ids)].sort_values("run_id")
        field = self.cells.field
        if not field or found.empty:
            return found
        lr_N = found[field].astype(float)
        if lr is None or not (lr_N == lr).any():
            lr = float(lr_N.mode().min())
        return found[lr_N == lr]

    def config(self, setting: str, depth: int, n_layers: int, lr: float | None = None) -> RunConfig:
        """The configuration of a setting as it was run at `depth`, with another number of layers. Raises ValueError for
        one that cannot be built."""
        runs = self.runs_of(setting, depth, lr)
        row = runs.iloc[int(np.argmax((runs["outcome"] == "ok").to_numpy()))]
        values = {name: plain(row[name]) for name in RunConfig.model_fields if name != "seed" and name in row}
        values = {name: value for name, value in values.items() if value is not None} | {"n_layers": n_layers}
        if isinstance(measures := values.get("measures"), tuple):
            values["measures"] = known_measures(measures)
        with warnings.catch_warnings(action="ignore"):
            return build(RunConfig, buildable(values) if is_imported(runs) else values, "recipe")


def effects_of(cells: Cells) -> tuple[Effect, ...]:
    """The frame of these cells as records."""
    return tuple(Effect.of_row(row, cells.outcome, cells.unit) for row in effects_frame(cells).to_dict("records"))


def changed_config(config: RunConfig, *changes: Mapping[str, Any]) -> RunConfig:
    """A configuration with other values of some fields; sizes that are None follow from the others. Raises
    ValueError."""
    values = config.model_dump(mode="json")
    for change in changes:
        values |= change
    values = {name: value for name, value in values.items() if value is not None}
    return build(RunConfig, values, "the recipe's configuration")


def differing_values(config: RunConfig, baseline: RunConfig, tuned: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The fields in which two configurations differ, with the values of either; tuned ones left out."""
    own, other = (each.model_dump(mode="json", exclude={"seed", "allow", *tuned}) for each in (config, baseline))
    names = [name for name in own if own[name] != other[name]]
    return {name: own[name] for name in names}, {name: other[name] for name in names}
