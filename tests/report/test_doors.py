"""One voice: every door of a results folder gives the same answer, for the committed folders and their usual
combinations."""

import math
from pathlib import Path

import pandas as pd
import pytest

from sparsedepth.effects.cells import cells_of, read_runs
from sparsedepth.effects.frame import effects_frame
from sparsedepth.recipe.build_card import derive_card
from sparsedepth.report.answers import answer, depth_answer, variance_answer
from sparsedepth.scaling.crossover import crossovers
from sparsedepth.scaling.points import budget_cells, budget_rows
from sparsedepth.scaling.speedup import speedups
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import open_store
from sparsedepth.store.search import search_of

RESULTS = Path("results")
SMALL = ("quickstart", "equal_flops_trial_tuned", "budgets")
TOGETHER = {
    "text, 24 layers": ("text_flops", "text_flops_experts", "text_flops_deep"),
    "text, 12 layers": ("text_flops", "text_flops_lns", "text_flops_decay", "text_flops_heads"),
    "text, 6 layers": ("text_flops", "text_flops_shallow", "text_flops_shallow_experts"),
    "task, equal FLOPs": ("equal_flops", "equal_flops_fourfold"),
    "task, tuned": ("equal_flops", "equal_flops_fourfold", "equal_flops_fourfold_tuned", "equal_flops_trial_tuned"),
    "task, LNS": ("equal_flops", "equal_flops_lns", "equal_flops_lns_shallow"),
    "depth study": ("depth_study", "depth_study_finer_lr", "depth_study_fresh_seeds", "depth_study_middle_depths"),
    "remedies": ("depth_study", "depth_study_remedies"),
}
FOLDERS = {name: (name,) for name in sorted(path.parent.name for path in RESULTS.glob("*/pack.json"))}
FOLDERS = {name: of for name, of in FOLDERS.items() if name != "toy"} | TOGETHER  # it has networks and no runs
SLOW = [pytest.param(name, marks=() if name in SMALL else pytest.mark.slow) for name in FOLDERS]


def row_of(frame: pd.DataFrame, effect) -> pd.Series | None:
    same = frame[
        (frame["question"] == effect.question)
        & (frame["setting"] == effect.setting)
        & (frame["n_layers"] == effect.n_layers)
        & (frame["context"] == effect.context)
    ]
    return same.iloc[0] if len(same) else None


def check_values(frame: pd.DataFrame) -> None:
    """Every effect is the difference of the two values beside it."""
    both = frame.dropna(subset=["fitted", "fitted_baseline", "estimate"])
    assert len(both) or frame.empty or frame["estimate"].isna().all()
    assert ((both["fitted"] - both["fitted_baseline"] - both["estimate"]).abs() < 1e-6).all()


def check_recipe(runs: pd.DataFrame, loss: str, frame: pd.DataFrame) -> None:
    """What a card says of a setting is the row of the frame, and it recommends what is shown to help."""
    try:
        card = derive_card(runs, None, loss, folders=())
    except ValueError:
        return
    sign = -1 if loss != "val_accuracy" else 1
    for candidate in card.recipe.candidates:
        row = row_of(frame, candidate.effect)
        if row is not None:
            assert candidate.effect.verdict == row["verdict"], candidate.setting
            assert candidate.effect.estimate is None or math.isclose(candidate.effect.estimate, row["estimate"])
    for change in card.recipe.changes:
        assert change.effect.verdict == ("lower" if sign < 0 else "higher")


def check_depth(store, cells, frame: pd.DataFrame) -> None:
    """Whether a depth is worth its cost: the two questions agree, and a depth that is worth it is lower than the
    shallowest."""
    said = depth_answer(cells)
    rows = [record for record in said.rows.records() if record.get("basis") == "flops"] if said.rows.rows else []
    try:
        judged = {one.n_layers: one for one in crossovers(budget_cells(store)) if one.setting == "baseline"}
    except ValueError:
        assert not any(record.get("worth_it") for record in rows)
        return
    for record in rows:
        one = judged.get(record["n_layers"])
        expected = {"worth it": "yes", "not worth it": "no"}.get(one.verdict) if one else None
        assert record.get("worth_it") == expected, record["n_layers"]
        if one is not None and expected == "yes" and record["train_flops"] / one.largest < 1.02:
            assert record["verdict"] == "lower"
    for one in judged.values():
        if one.verdict == "not worth it" and f"{one.n_layers} layers are worth" in said.sentence:
            raise AssertionError(said.sentence)


def check_variance(store, cells) -> None:
    said = variance_answer(cells)
    outcome = "residual_variance_last"
    if not said.rows.rows:
        return
    frame = effects_frame(cells.of_outcome(outcome))
    rows = {(row["setting"], row["n_layers"]): row for _, row in frame[frame["question"] == "setting"].iterrows()}
    for record in said.rows.records():
        if record["outcome"] == outcome:
            row = rows[record["setting"], record["n_layers"]]
            assert record["verdict"] == row["verdict"], record["setting"]


def check_compute(store, frame: pd.DataFrame) -> None:
    """A setting that is shown to lower the loss at equal FLOPs is not shown to be worth less compute, nor the other way
    round."""
    try:
        worths = speedups(budget_rows(store))
    except ValueError:
        return
    last = worths.groupby(["n_layers", "setting"]).tail(1).set_index(["n_layers", "setting"])
    for _, row in frame[(frame["question"] == "setting") & frame["verdict"].isin(["lower", "higher"])].iterrows():
        place = (row["n_layers"], row["setting"])
        if place in last.index and row["basis"] == "flops":
            worth = last.loc[place]
            assert not (row["verdict"] == "lower" and worth["hi"] < 1), place
            assert not (row["verdict"] == "higher" and worth["lo"] > 1), place


@pytest.mark.parametrize("name", SLOW)
def test_no_door_contradicts_another(name):
    folders = [RESULTS / folder for folder in FOLDERS[name]]
    with open_store(*folders) as store:
        if search_of(store.roots) is not None:
            with pytest.raises(ValueError, match="no setting is compared"):
                answer(store, "depth")
            return
        loss = loss_in(store)
        runs = store.frame("select * from runs")
        cells = cells_of(runs, loss)
        if cells.settings is None or not cells.is_measured:
            return
        frame = effects_frame(cells)
        check_values(frame)
        check_recipe(read_runs(store, loss), loss, frame)
        check_depth(store, cells, frame)
        check_variance(store, cells)
        check_compute(store, frame)
