"""Which scores say nothing: every reason planted alone, none where there is none, and what is not known is said."""

import statistics
from pathlib import Path

import pandas as pd
import pytest

from sparsedepth.store import degeneracy as why
from sparsedepth.store.best import best
from sparsedepth.store.connection import open_store
from sparsedepth.store.degeneracy import (
    Reason,
    degeneracy,
    reasons_in,
    reasons_of_run,
    sound_form,
    unknown_in,
    usable_form,
    usable_forms,
)
from sparsedepth.words.best import heading
from sparsedepth.words.degeneracy import (
    caution,
    degeneracy_caption,
    degeneracy_text,
    main_reason,
    notes_on_run,
    reason_text,
    stronger,
    weakness_text,
)

BY_BIGRAM, BY_CHANCE, BY_BLOCK, BY_ZERO, BY_START = map(Reason, ("bigram", "chance", "block", "zero", "start"))
BY_LOSS = Reason("loss", why.SMALL_LOSS)
KNOWN_DEPTH = Path(__file__).parents[2] / "results" / "known_depth"
SOUND = {
    "outcome": "ok", "val_loss": 2.0, "bigram_loss": 2.5, "chance_loss": 5.0, "vocab_size": 256,
    "usefulness": 0.5, "usefulness_loss_increase": 0.4, "usefulness_loss_increase_lo": 0.3,
    "usefulness_loss_increase_hi": 0.5, "usefulness_loss_increase_largest_share": 0.3,
    "usefulness_loss_increase_without_first": 0.3, "affine_loss_added": 0.8, "affine_loss_added_lo": 0.7,
    "affine_loss_added_hi": 0.9, "affine_loss_added_largest_share": 0.3, "needed_layers": 3.0,
    "causal_score": 0.2, "causal_score_largest_share": 0.2,
}  # fmt: skip


def runs(n=4, **planted):
    """Runs whose scores differ, with something planted in all of them."""
    varied = [name for name in why.SCORES if name in SOUND]
    return [{**SOUND, **{name: SOUND[name] * (1 + i / 10) for name in varied}, **planted} for i in range(n)]


def test_sound_scores_have_no_reason_against_them():
    for score in (name for name in why.SCORES if name in SOUND):
        found = degeneracy(score, runs())
        assert (found.is_degenerate, found.reasons, found.unknown, degeneracy_text(found)) == (False, {}, {}, "")
        assert sound_form(score, runs()) == score and usable_form(score, runs()) == (score, found)
    assert why.common_weakness(runs()) is None


@pytest.mark.parametrize(
    ("planted", "reason", "hit", "spared"),
    [
        ({"val_loss": 2.6}, BY_BIGRAM, "causal_score", None),
        ({"val_loss": 5.0 * (1 - why.AT_CHANCE)}, BY_CHANCE, "causal_score", None),
        ({"val_loss": 0.05, "bigram_loss": None}, BY_LOSS, "usefulness", "affine_loss_added"),
        ({"usefulness_loss_increase_largest_share": 0.51}, BY_BLOCK, "usefulness", "affine_loss_added"),
        ({"usefulness_loss_increase_largest_share": 0.51}, BY_BLOCK, "usefulness_loss_increase",
         "usefulness_loss_increase_without_first"),
        ({"affine_loss_added_lo": -0.1}, BY_START, "affine_loss_added", "usefulness_loss_increase"),
    ],
)  # fmt: skip
def test_each_reason_alone(planted, reason, hit, spared):
    assert reasons_in(hit, {**SOUND, **planted}) == [reason]
    found = degeneracy(hit, runs(**planted))
    assert found.is_degenerate and found.reasons == {reason: 4}
    assert reason_text(reason) in degeneracy_text(found) and "(4 of 4 runs)" in degeneracy_text(found)
    assert spared is None or not degeneracy(spared, runs(**planted)).is_degenerate


def test_the_same_in_every_run_is_constant_and_in_one_run_is_not():
    found = degeneracy("usefulness", runs(usefulness=0.25))
    assert found.is_degenerate and main_reason(found) == "0.25 in every run" and [*found.reasons.values()] == [4]
    assert not degeneracy("usefulness", runs(1, usefulness=0.25)).is_degenerate
    assert not degeneracy("usefulness", [*runs(3, usefulness=0.25), SOUND]).is_degenerate


def test_the_same_in_every_run_of_a_depth_is_constant_there():
    """All four blocks of the shallow models are needed; of the deeper ones more or fewer."""
    shallow, deep = runs(4, n_layers=4, needed_layers=4.0), runs(5, n_layers=12)
    found = degeneracy("needed_layers", [*shallow, *deep])
    assert not found.is_degenerate and found.reasons == {Reason("constant", 4.0, 4.0): 4}
    assert (
        degeneracy_text(found) == "needed_layers is degenerate in some runs: 4 in every run at 4 layers (4 of 9 runs)"
    )
    by_run = why.reasons_by_run("needed_layers", [*shallow, *deep])
    assert [bool(reasons) for reasons in by_run] == [True] * 4 + [False] * 5
    by_depth = [run for depth in (4, 8, 12) for run in runs(3, n_layers=depth, needed_layers=float(depth - 1))]
    assert not degeneracy("needed_layers", by_depth).is_degenerate, "it differs by depth, without noise"
    assert main_reason(degeneracy("needed_layers", shallow)) == "4 in every run"


def test_a_form_that_one_run_has_does_not_stand_in():
    carried = runs(usefulness_loss_increase_largest_share=0.9, usefulness_loss_increase_without_first=None)
    alone = [{**run, "affine_loss_added": None} for run in carried[1:]]
    assert sound_form("usefulness", carried) == "affine_loss_added"
    assert sound_form("usefulness", [carried[0], *alone]) is None


def test_a_count_of_0_is_its_value_at_initialisation():
    assert reasons_in("needed_layers", {**SOUND, "needed_layers": 0.0}) == [BY_ZERO]
    assert degeneracy("usefulness", [*runs(3, usefulness=0.0), SOUND]).reasons == {BY_ZERO: 3}


def test_a_comparison_goes_by_most_of_its_finished_runs():
    planted, diverged = runs(3, causal_score_largest_share=0.9), {**SOUND, "outcome": "diverged", "causal_score": None}
    assert degeneracy("causal_score", [*planted, *runs(2), diverged, diverged]).is_degenerate  # 3 of 5
    few = degeneracy("causal_score", [*planted, *runs(3)])  # 3 of 6
    assert not few.is_degenerate and degeneracy_text(few).startswith("causal_score is degenerate in some runs: ")


def test_another_form_stands_in_where_it_is_sound():
    carried = runs(usefulness_loss_increase_largest_share=0.9)
    for i, run in enumerate(carried):
        run["usefulness_loss_increase_without_first"] = 0.1 + i
    assert sound_form("usefulness", carried) == "usefulness_loss_increase_without_first"
    small = runs(val_loss=0.01, bigram_loss=None)
    assert sound_form("usefulness", small) == "affine_loss_added"
    assert caution(usable_form("usefulness", small)).endswith("; use affine_loss_added")
    weak = runs(val_loss=2.6)
    assert sound_form("usefulness", weak) is None
    assert caution(usable_form("usefulness", weak)).endswith("no other form of it is sound in these runs")
    assert weakness_text(why.common_weakness(weak)) == (
        "the model is worse than a bigram table of the text (4 of 4 runs; val_loss 2.6 against 2.5 nat/token)"
    )


def test_a_model_that_knows_its_training_text_by_heart_needs_more_text_and_not_more_steps():
    overfit = {**SOUND, "val_loss": 5.3, "train_loss": 2.2}  # below 0.9 of the bigram table's 2.5
    kinds = [why.weakness_of_run({**overfit, **changed}) for changed in ({}, {"train_loss": 2.3}, {"val_loss": 2.4})]
    assert kinds == ["overfit", "chance", None]
    task = {"bigram_loss": None, "chance_loss": 3.0}
    assert why.weakness_of_run({**overfit, **task, "train_loss": 2.6}) == "overfit"
    half = why.common_weakness([overfit, overfit, {**SOUND, "val_loss": 5.3}, SOUND])
    assert weakness_text(half) == (
        "the model overfits its training text (2 of 4 runs; val_loss 5.3 against a train_loss of 2.2 nat/token)"
    )
    assert notes_on_run(reasons_of_run(overfit)) == [
        "the model overfits its training text, so no score of depth is evidence"
    ]
    assert [stronger(kind, 1000) for kind in ("bigram", "chance", "overfit")] == [
        "train longer: about 1,000 tokens",
        "train longer, for example 1,000 tokens, or with another lr",
        "use more text, or fewer train_tokens",
    ]


def test_what_is_missing_is_unknown_and_never_fine():
    old = {name: value for name, value in SOUND.items() if name not in ("bigram_loss", "chance_loss")}
    assert unknown_in("causal_score", old) == ["bigram"]
    assert unknown_in("causal_score", {**SOUND, "causal_score_largest_share": float("nan")}) == ["rows"]
    harmful = {**SOUND, "causal_score_largest_share": None, "causal_score_without_first": -0.1}
    assert unknown_in("causal_score", harmful) == ["weight"]  # its rows are known, and none is above 0
    assert unknown_in("usefulness_loss_increase_without_first", SOUND) == []
    assert reasons_in("causal_score", {**old, "val_loss": 5.6}) == [BY_CHANCE]  # ln 256 = 5.55 bounds chance
    assert degeneracy_text(degeneracy("causal_score", [old])) == (
        "causal_score: unknown whether the model beats a bigram table: no bigram_loss"
    )


def test_a_loss_is_no_score_and_every_column_asked_for_exists():
    assert degeneracy_text(degeneracy("val_loss", runs(val_loss=9.0))) == "" and "val_accuracy" not in why.SCORES
    with open_store(KNOWN_DEPTH) as store:
        names = store.sql("SELECT * FROM runs LIMIT 0").columns
    assert {name for score in why.SCORES for name in why.columns_for(score)} <= set(names)


def test_a_caption_names_the_degenerate():
    frame = pd.DataFrame(runs(usefulness=0.0))
    caption = degeneracy_caption(
        usable_forms(["usefulness", "causal_score", "val_loss"], frame, may_replace=False).values()
    )
    assert caption == " Degenerate, so no evidence: usefulness (0 in every run)."
    assert degeneracy_caption(usable_forms(["causal_score"], frame).values()) == ""
    assert why.score_rows(frame, "causal_score")[0]["val_loss"] == 2.0


def test_the_models_of_known_depth_are_marked_as_they_were_found_from_outside(monkeypatch):
    """Solved tasks: relative to so small a loss every block is 'useful', and one block carries what is left."""
    monkeypatch.setenv("COLUMNS", "200")
    relative = ("usefulness", "usefulness_loss_increase", "permutation_score")
    scores = (*relative, "causal_score")
    names = ("n_layers", *dict.fromkeys(name for score in scores for name in why.columns_for(score)))
    with open_store(KNOWN_DEPTH) as store:
        rows = store.sql(f"SELECT {', '.join(names)} FROM runs").rows
        ranking = best(store, "usefulness")
    solved = [dict(zip(names, row, strict=True)) for row in rows]
    shares = [run["usefulness_loss_increase_largest_share"] for run in solved]
    assert statistics.median(shares) > 0.5
    assert main_reason(degeneracy("usefulness", [run for run in solved if run["n_layers"] == 4])) == "1 in every run"
    for score in relative:
        found = degeneracy(score, solved)
        assert found.is_degenerate and {*found.reasons} - {Reason("constant", 1.0, 4.0)} == {BY_LOSS, BY_BLOCK}
        assert sound_form(score, solved) == "affine_loss_added_without_first"
    assert not degeneracy("causal_score", solved).is_degenerate
    assert "\nusefulness is degenerate: it is relative to a loss below 0.1 nat/token (90 of 90" in heading(ranking)
    assert (ranking.by, ranking.beside) == ("affine_loss_added_without_first", ("usefulness",))
    assert heading(ranking).startswith("affine_loss_added_without_first [nat/token], higher is better")
    assert [row["rank"] for row in ranking.table.records()] == [1, 2, 3, 4, 5]
    means = [row[ranking.by] for row in ranking.table.records()]
    assert means == sorted(means, reverse=True) and all(row["usefulness"] == 1 for row in ranking.table.records()[:3])


def test_a_run_by_itself_names_each_reason_once():
    run = {"outcome": "ok", "val_loss": 2.6, "bigram_loss": 2.5, "chance_loss": 5.0, "usefulness": 0.0}
    weak, zero = notes_on_run(reasons_of_run({**run, "usefulness_loss_increase": 0.2}))
    assert weak == "the model is worse than a bigram table of the text, so no score of depth is evidence"
    assert zero == "degenerate (it is 0, the value at initialisation): usefulness"
    assert notes_on_run(reasons_of_run({**run, "val_loss": 2.0, "usefulness": 0.5})) == []
    assert notes_on_run(reasons_of_run({"outcome": "diverged", "usefulness": 0.0})) == []
