"""The effects of a recipe's settings at its depth: rows of the frame `effects`, as records of a card. It computes
nothing."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import BASELINE, Cells, cells_of
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.frame import effects_frame
from sparsedepth.effects.intervals import Estimate
from sparsedepth.effects.knobs import Knob, setting_text
from sparsedepth.effects.pairs import BASES
from sparsedepth.effects.text import setting_text as question_text
from sparsedepth.effects.text import size_text

DERIVED = frozenset(fields_where(RunConfig, lambda role: role.derived_if_missing and role.needs_experts))
"""Sizes of experts that follow from the other values, such as d_expert from top_k."""

NO_BASELINE = "the baseline was not run at this depth in these folders"


class Measured:
    """The frame at one depth, by the values of fields."""

    def __init__(self, runs: pd.DataFrame, objective: str, depth: int) -> None:
        cells = cells_of(runs, objective)
        self.cells: Cells = replace(cells, rows=cells.rows[cells.rows["n_layers"] == depth])
        self.rows = effects_frame(self.cells).to_dict("records")
        self.depth = depth

    @property
    def has_baseline(self) -> bool:
        return bool((self.cells.rows["setting"] == BASELINE).any())

    def label(self, values: Mapping[str, Any]) -> str | None:
        """The setting that differs from the baseline in these values alone; None if it was not run."""
        settings = self.cells.settings
        if settings is None:
            return None
        known = {name: _plain(values[name]) for name in settings.label_fields if name in values}
        wanted = {name: value for name, value in known.items() if value != _plain(settings.baseline.knobs[name])}
        for ignored in (frozenset(), DERIVED - values.keys()):
            for label, changes in self.cells.configs.items():
                if {name: value for name, value in dict(changes).items() if name not in ignored} == wanted:
                    return label
        return None

    def contrast(self, knob: str, values: Mapping[str, Any], before: Mapping[str, Any]) -> Contrast | None:
        """The effect of all these values against `before`: the baseline's, or those of one of the changes."""
        label, context = self.label(values), self.label(before)
        if label is None or context is None:
            return None
        for row in self.rows:
            both = row["setting"] if row["question"] == "setting" else self._both(row)
            if row["question"] in ("setting", "beside") and (both, row["context"] or BASELINE) == (label, context):
                return self._contrast(row, knob, setting_text(values), setting_text(before))
        return None

    def _both(self, row: Mapping[str, Any]) -> str:
        """The setting that a row 'beside' is about; '' of other rows."""
        if row["question"] != "beside":
            return ""
        configs = self.cells.configs
        changes = {**configs.get(row["setting"], {}), **configs.get(row["context"], {})}
        return next((label for label, each in configs.items() if dict(each) == changes), "")

    def _contrast(self, row: Mapping[str, Any], knob: str, setting: str, baseline: str) -> Contrast:
        number = {name: None if value is pd.NA or value != value else value for name, value in row.items()}
        half = None if number["hi"] is None else (number["hi"] - number["lo"]) / 2
        is_settled = row["verdict"] in ("lower", "higher")
        return Contrast(
            knob=knob,
            setting=setting,
            baseline=baseline,
            n_layers=self.depth,
            outcome=self.cells.outcome,
            unit=self.cells.unit,
            effect=Estimate(
                mean=number["estimate"],
                lo=number["lo"],
                hi=number["hi"],
                p=number["p"],
                n=int(number["seeds"] or 0),
                error=None if half is None else half / 1.96,
                df=number["df"],
            ),
            by_seed=(),
            floor=0.0 if half is not None else None,
            p_holm=number["p_adjusted"],
            n_tested=sum(other["question"] == row["question"] and other["p"] == other["p"] for other in self.rows),
            tuning_flaw="" if is_settled else row["reason"] or "",
            smallest_seen=number["detectable"],
            baseline_mean=number["baseline_value"],
            n_seeds=int(number["seeds"] or 0),
            n_diverged=int(number["diverged"] or 0),
            n_baseline_diverged=int(number["diverged_baseline"] or 0),
            n_at_edge=0,
            n_missing=0,
            ratios={name: None if (r := number[name]) is None else (float(r), float(r)) for name in BASES},
            run_ids=(),
            deepest=self.depth,
            tuned=self._tuned(number),
        )

    def _tuned(self, number: Mapping[str, Any]) -> str:
        if not self.cells.field or number["lr"] is None or number["lr_baseline"] is None:
            return ""
        if number["lr"] == number["lr_baseline"]:
            return f"both at {self.cells.field} {number['lr']:g}"
        return f"each at its own tuned {self.cells.field} ({number['lr_baseline']:g} -> {number['lr']:g})"

    def others(self) -> tuple[str, ...]:
        """The effects of settings together, and those beside another setting that have a verdict of their own."""
        alone = {row["setting"]: row["verdict"] for row in self.rows if row["question"] == "setting"}
        told = []
        for row in self.rows:
            if row["estimate"] != row["estimate"] or row["lo"] != row["lo"]:
                continue
            together = row["question"] == "setting" and any(row["setting"] == self._both(o) for o in self.rows)
            depends = row["question"] == "beside" and row["verdict"] in {"lower", "higher"} - {alone[row["setting"]]}
            if together or depends:
                size, low, high = (size_text(row[name], self.cells.unit, "+") for name in ("estimate", "lo", "hi"))
                told.append(f"{question_text(row)}: {row['verdict']}, {size} ({low} to {high})")
        return tuple(told)

    def seconds(self, values: Mapping[str, Any]) -> float | None:
        """Mean training time at a setting, over the baseline's."""
        label = self.label(values)
        times = (row["time"] for row in self.rows if row["question"] == "setting" and row["setting"] == label)
        time = next(times, None)
        return None if time is None or time != time else float(time)


def measured(runs: pd.DataFrame, knobs: Iterable[Knob], objective: str, depth: int) -> list[Contrast]:
    """The effect of every setting of these knobs on top of the baseline, all else equal; those not run are absent."""
    found = Measured(runs, objective, depth)
    pairs: Sequence[tuple[Knob, str]] = [(knob, setting) for knob in knobs for setting in list(knob.settings)[1:]]
    each = (found.contrast(knob.name, knob.settings[s], knob.settings[knob.baseline]) for knob, s in pairs)
    return [contrast for contrast in each if contrast is not None]


def _plain(value: Any) -> Any:
    return json.dumps(list(value)) if isinstance(value, list | tuple) else value
