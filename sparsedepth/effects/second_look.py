"""A second look at verdicts: what an effect would be without one seed, or without one results folder; and whether runs
were added after a look at it.

Every verdict that is lower or higher is judged again, with its family, without the results of each seed, and without
those of each folder where there are several. Told are those that turn, and those whose effect moves by more than MOVES
of itself: the part that moves it most, in the columns `without`, `estimate_without`, `verdict_without`.

A batch is the runs of a folder without a pause of PAUSE, and as long as its longest run. `later`: the runs of both
sides in batches that began when all of theirs before had ended, with two seeds or more, the same on both sides."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import BASELINE, Cells
from sparsedepth.effects.frame import depth_effects, setting_effects

MOVES = 0.25
MOST_SEEDS = 12
"""With more, none of them decides: it has less than a twelfth of the results."""
SHOWN = ("lower", "higher")
PAUSE = 3600.0


def with_second_looks(effects: pd.DataFrame, cells: Cells) -> pd.DataFrame:
    """The frame of effects with those columns, of its settings and depths."""
    found = effects.copy()
    shown = effects[effects["verdict"].isin(SHOWN)]
    batches = _batches(cells.runs)
    for question, judge, side in (("setting", setting_effects, "setting"), ("depth", depth_effects, "n_layers")):
        asked = shown[shown["question"] == question]
        of_question = cells.rows if side == "setting" else cells.rows[cells.rows["setting"] == BASELINE]
        for _, own in asked.groupby("n_layers" if side == "setting" else "question"):
            rows = of_question[of_question["n_layers"].isin(own["n_layers"])] if side == "setting" else of_question
            looks = [(without, judge(replace(cells, rows=rest))) for without, rest in _parts(cells, rows)]
            for index, effect in own.iterrows():
                told = [look for without, again in looks if (look := _look(effect, without, again))]
                if told:
                    most = max(told, key=lambda look: (look[2] != effect["verdict"], abs(_move(effect, look[1]))))
                    found.loc[index, ["without", "estimate_without", "verdict_without"]] = most
                reference = BASELINE if side == "setting" else rows.loc[rows["value"].notna(), "n_layers"].min()
                sides = [rows[rows[side] == value] for value in (effect[side], reference)]
                found.loc[index, "later"] = _n_later(sides, batches)
    return found


def _parts(cells: Cells, rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """What is left out, and the rows of a family without it; tuning runs stay."""
    is_result = rows["role"] == "result"
    seeds = sorted({*rows.loc[is_result, "seed"]})
    for seed in seeds if 2 < len(seeds) <= MOST_SEEDS else []:
        yield f"seed {seed}", rows[~(is_result & (rows["seed"] == seed))]
    source = cells.runs["source"].reindex(rows.index) if "source" in cells.runs else pd.Series("", rows.index)
    for folder in sorted({*source}) if source.nunique() > 1 else []:
        yield str(folder), rows[source != folder]


def _look(effect: pd.Series, without: str, again: pd.DataFrame) -> tuple[str, float, str] | None:
    """The part, the effect without it, and its verdict; None where that is not there, or as it is."""
    same = again[again["setting"] == effect["setting"]].dropna(subset=["estimate", "lo"])
    if same.empty:
        return None
    estimate, verdict = float(same["estimate"].iloc[0]), str(same["verdict"].iloc[0])
    is_told = verdict != effect["verdict"] or abs(_move(effect, estimate)) > MOVES
    return (without, estimate, verdict) if is_told else None


def _move(effect: pd.Series, estimate: float) -> float:
    return (estimate - effect["estimate"]) / effect["estimate"]


def _batches(runs: pd.DataFrame) -> pd.DataFrame:
    """start and end of each run, and its batch with the time that it began [s]; no row where a time is not known."""
    known = runs.reindex(columns=["source", "started", "seconds"])
    start = pd.to_datetime(known["started"], utc=True, errors="coerce")
    seconds = pd.to_numeric(known["seconds"], errors="coerce").astype(float)
    times = pd.DataFrame(
        {
            "start": (start - pd.Timestamp(0, tz="UTC")).dt.total_seconds(),
            "source": known["source"].astype(object).fillna(""),
        }
    )
    times = times.assign(end=times["start"] + seconds).dropna(subset=["start", "end"]).sort_values("start")
    by_source = times.groupby(times.pop("source"))
    pause = times["start"] - by_source["end"].cummax().groupby(by_source.ngroup()).shift()
    begins = ~(pause <= np.maximum(PAUSE, seconds.reindex(times.index).groupby(by_source.ngroup()).transform("max")))
    times["batch"] = by_source.ngroup() * len(times) + begins.groupby(by_source.ngroup()).cumsum()
    return times.assign(began=times.groupby("batch")["start"].transform("min"))


def _n_later(sides: list[pd.DataFrame], batches: pd.DataFrame) -> float:
    """NaN where the times of some runs are not known."""
    runs = pd.concat([rows.assign(side=side)[["side", "seed", "role"]] for side, rows in enumerate(sides)])
    if not runs.index.isin(batches.index).all():
        return np.nan
    runs = runs.join(batches)
    for began in sorted({*runs["began"]}):
        before = runs[runs["began"] < began]
        own, other = ({*before.loc[(before["side"] == side) & (before["role"] == "result"), "seed"]} for side in (0, 1))
        if own == other and len(own) > 1 and before["end"].max() <= began:
            return len(runs) - len(before)
    return 0
