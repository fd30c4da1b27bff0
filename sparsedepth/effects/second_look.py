"""A second look at verdicts: what an effect would be without one seed, or without one results folder.

Every verdict on a setting that is lower or higher is judged again, with its family, without the results of each seed
that both sides have, and without those of each folder where there are several. Told are those that turn, and those
whose effect moves by more than MOVES of itself."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from sparsedepth.effects.cells import Cells
from sparsedepth.effects.frame import setting_effects
from sparsedepth.store.query_result import QueryResult

MOVES = 0.25
MOST_SEEDS = 12
"""With more, none of them decides: it has less than a twelfth of the results."""
SHOWN = ("lower", "higher")


class SecondLook(NamedTuple):
    """An effect as it stands, and without a part of its results."""

    effect: Mapping[str, Any]
    """A row of the frame."""
    without: str
    """'seed 5', 'results/text_flops'"""
    estimate: float | None
    verdict: str

    @property
    def turns(self) -> bool:
        return self.verdict != self.effect["verdict"]


def second_looks(cells: Cells) -> list[SecondLook]:
    """Of each verdict the part of the results that moves it most, where that is told."""
    effects = setting_effects(cells)
    shown = effects[(effects["question"] == "setting") & effects["verdict"].isin(SHOWN)]
    found: list[SecondLook] = []
    for depth in shown["n_layers"].unique():
        rows = cells.rows[cells.rows["n_layers"] == depth]
        looks = [(without, setting_effects(replace(cells, rows=rest))) for without, rest in _parts(cells, rows)]
        for effect in QueryResult.of_frame(shown[shown["n_layers"] == depth]).records():
            of_effect = [_look(effect, without, again) for without, again in looks]
            told = [look for look in of_effect if look is not None]
            found += sorted(told, key=lambda look: (not look.turns, -abs(_move(look))))[:1]
    return found


def _parts(cells: Cells, rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """What is left out, and the rows of a depth without it; tuning runs stay."""
    is_result = rows["role"] == "result"
    seeds = sorted({*rows.loc[is_result, "seed"]})
    for seed in seeds if 2 < len(seeds) <= MOST_SEEDS else []:
        yield f"seed {seed}", rows[~(is_result & (rows["seed"] == seed))]
    source = cells.runs["source"].reindex(rows.index) if "source" in cells.runs else pd.Series("", rows.index)
    for folder in sorted({*source}) if source.nunique() > 1 else []:
        yield str(folder), rows[source != folder]


def _look(effect: Mapping[str, Any], without: str, again: pd.DataFrame) -> SecondLook | None:
    """None where the setting is not there without it, or its effect stays as it is."""
    same = again[again["setting"] == effect["setting"]]
    if same.empty or pd.isna(same["estimate"].iloc[0]) or pd.isna(same["lo"].iloc[0]):
        return None
    look = SecondLook(effect, without, float(same["estimate"].iloc[0]), str(same["verdict"].iloc[0]))
    return look if look.turns or abs(_move(look)) > MOVES else None


def _move(look: SecondLook) -> float:
    assert look.estimate is not None
    return (look.estimate - look.effect["estimate"]) / look.effect["estimate"]
