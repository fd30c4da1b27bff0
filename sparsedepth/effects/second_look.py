"""A second look at verdicts: what an effect would be without one seed, or without one results folder; and whether runs
were added after a look at it.

Every verdict that is lower or higher is judged again, with its family, without the results of each seed, and without
those of each folder where there are several. Told are those that turn (of seeds: where FEW or more are left, as two
show hardly anything), and those whose effect moves by more than MOVES of itself: the part that moves it most, in the
columns `without`, `estimate_without`, `verdict_without`.

A batch is the runs of a folder without a pause of PAUSE, and as long as its longest run. `later`: the runs of both
sides in batches that began when all of theirs before had ended, with two seeds or more, the same on both sides."""

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import BASELINE, Cells
from sparsedepth.effects.frame import depth_rows, setting_rows
from sparsedepth.quantities.quantity import Named

MOVES, FEW = 0.25, 3
MOST_SEEDS = 12
"""With more, none of them decides: it has less than a twelfth of the results."""
SHOWN = ("lower", "higher")
PAUSE = 3600.0


def with_second_looks(effects: pd.DataFrame, cells: Cells) -> pd.DataFrame:
    """The frame of effects with those columns, of its settings and depths."""
    found, batches = effects.copy(), _batches(cells.runs)
    shown = effects[effects["verdict"].isin(SHOWN) & effects["question"].isin(["setting", "depth"])]
    for family, own in shown.groupby(shown["n_layers"].where(shown["question"] == "setting", 0)):
        side, judge = ("setting", setting_rows) if family else ("n_layers", depth_rows)
        rows = cells.rows[cells.rows["n_layers"] == family if family else cells.rows["setting"] == BASELINE]
        reference = BASELINE if family else rows.loc[rows["value"].notna(), "n_layers"].min()
        again = []
        for name, is_seed, rest in _parts(cells, rows):
            if rest.loc[rest[side] == reference, "value"].notna().any():  # else it is another comparison
                judged = judge(replace(cells, rows=rest))
                again.append((is_seed, {row.fields["setting"]: row.fields | {"without": name} for row in judged}))
        for index, effect in own.iterrows():
            if told := sorted(_told(effect, again), key=itemgetter(0, 1)):
                changed = [told[-1][2][name] for name in ("without", "estimate", "verdict")]
                found.loc[index, ["without", "estimate_without", "verdict_without"]] = changed
            found.loc[index, "later"] = _n_later([rows[rows[side] == of] for of in (effect[side], reference)], batches)
    return found


def _told(effect: pd.Series, again: list[tuple[bool, dict[str, Named]]]) -> Iterator[tuple[bool, float, Named]]:
    """Whether the verdict turns, how far the effect moves, and what it is then, without each part that is told of."""
    for is_seed, looks in again:
        look = looks.get(effect["setting"])
        if look and look["p"] is not None:
            turns = look["verdict"] != effect["verdict"] and not (is_seed and look["seeds"] < FEW)
            moves = abs(look["estimate"] / effect["estimate"] - 1)
            if turns or moves > MOVES:
                yield turns, moves, look


def _parts(cells: Cells, rows: pd.DataFrame) -> Iterator[tuple[str, bool, pd.DataFrame]]:
    """What is left out of a family, whether it is a seed, and the rows without it: each seed, whose tuning runs stay,
    and each folder."""
    is_result = rows["role"] == "result"
    seeds = sorted({*rows.loc[is_result, "seed"]})
    for seed in seeds if 2 < len(seeds) <= MOST_SEEDS else []:
        yield f"seed {seed}", True, rows[~(is_result & (rows["seed"] == seed))]
    source = cells.runs["source"].reindex(rows.index) if "source" in cells.runs else pd.Series("", rows.index)
    for folder in sorted({*source}) if source.nunique() > 1 else []:
        yield str(folder), False, rows[source != folder]


def _batches(runs: pd.DataFrame) -> pd.DataFrame:
    """start and end of each run, and when its batch began [s]; no row where a time is not known."""
    known = runs.reindex(columns=["source", "started", "seconds"])
    start = pd.to_datetime(known["started"], utc=True, errors="coerce") - pd.Timestamp(0, tz="UTC")
    seconds = pd.to_numeric(known["seconds"], errors="coerce").astype(float)
    times = pd.DataFrame({"source": known["source"].astype(object).fillna(""), "start": start.dt.total_seconds()})
    times = times.assign(seconds=seconds, end=times["start"] + seconds).dropna().sort_values(["source", "start"])
    of_source = times.groupby("source")
    pause = times["start"] - of_source["end"].cummax().shift()
    longest = of_source["seconds"].transform("max").clip(lower=PAUSE)
    is_first = (times["source"] != times["source"].shift()) | (pause > longest)
    return times.assign(began=times["start"].where(is_first).ffill())


def _n_later(sides: list[pd.DataFrame], batches: pd.DataFrame) -> float:
    """NaN where the times of some runs are not known."""
    runs = pd.concat([rows.assign(side=side)[["side", "seed", "role"]] for side, rows in enumerate(sides)])
    if not runs.index.isin(batches.index).all():
        return np.nan
    runs = runs.join(batches[["end", "began"]])
    for began in sorted({*runs["began"]}):
        before = runs[runs["began"] < began]
        own, other = ({*before.loc[(before["side"] == side) & (before["role"] == "result"), "seed"]} for side in (0, 1))
        if own == other and len(own) > 1 and before["end"].max() <= began:
            return len(runs) - len(before)
    return 0
