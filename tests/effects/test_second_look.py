"""Second looks: a verdict that one seed or one folder decides says so, and one that none decides does not; and runs
that were added after a look at a comparison are counted, where dates tell."""

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import grid

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import as_records, effects_frame
from sparsedepth.effects.second_look import with_second_looks
from sparsedepth.recipe.build_card import derive_card
from sparsedepth.report.answers import depth_answer
from sparsedepth.words.answers import recipe_line
from sparsedepth.words.effects import second_look_lines
from sparsedepth.words.recipe import paragraph

NOISE = np.random.default_rng(0).normal(0, 0.01, (2, 6))


def runs(gain: float, odd: float = 0.0):
    """LNS loses `gain` less; the baseline's run of seed 5 loses `odd` more."""

    def loss(config):
        is_lns = config.depth_scale == "lns"
        return {
            "val_loss": 3 - gain * is_lns + NOISE[int(is_lns), config.seed] + odd * (config.seed == 5 and not is_lns)
        }

    return grid({"depth_scale": ["none", "lns"], "seed": range(6)}, loss, n_layers=4)


def looked_at(found, outcome: str = "val_loss"):
    """The effects, by setting."""
    cells = cells_of(found, outcome)
    return {effect.setting: effect for effect in as_records(with_second_looks(effects_frame(cells), cells))}


def test_the_seed_that_makes_an_effect_larger_is_named():
    """Of -.05, the mean of six seeds, and .12 more in one of them: -.07, and -.05 without it."""
    look = looked_at(runs(0.05, odd=0.12))["depth_scale=lns"]
    assert look.without == "seed 5" and look.estimate_without == pytest.approx(-0.05, abs=0.012)
    assert look.estimate == pytest.approx(look.estimate_without - 0.02, abs=0.005)
    (line,) = second_look_lines(look.model_dump())
    assert line.startswith("second look: depth_scale=lns at n_layers=4 is -0.0") and " without seed 5 (" in line


def test_an_effect_of_all_seeds_needs_no_word_and_none_without_a_verdict():
    for gain in (0.1, 0.0):
        look = looked_at(runs(gain))["depth_scale=lns"]
        assert look.without is None and look.later is None and [*second_look_lines(look.model_dump())] == []


def test_the_folder_that_decides_is_named():
    """The second folder has the seeds with the effect."""
    found = runs(0.1).assign(source="results/first")
    second = found["seed"] >= 2
    found.loc[second, "source"] = "results/second"
    found.loc[~second & (found["depth_scale"] == "lns"), "val_loss"] += 0.1
    look = looked_at(found)["depth_scale=lns"]
    assert look.without == "results/second" and look.verdict_without != look.verdict


def test_the_card_and_the_answers_say_what_the_table_says():
    found = runs(0.05, odd=0.12)
    card = derive_card(found)
    line = next(second_look_lines(looked_at(found)["depth_scale=lns"].model_dump()))
    assert f"S{line[1:]}." in paragraph(card) and card.recipe.candidates[0].effect.without == "seed 5"
    assert line in recipe_line(card, []).verdict


def at(found, minutes):
    """The runs with a start [minutes], each of one minute."""
    start = pd.Timestamp("2026-11-01T00:00:00+00:00") + pd.to_timedelta(found["seed"].map(minutes), unit="min")
    return found.assign(started=start.map(pd.Timestamp.isoformat), seconds=60.0)


@pytest.mark.parametrize(
    ("minutes", "second_from", "n_later"),
    [
        (lambda seed: seed, 9, 0),  # one sweep, seed after seed
        (lambda seed: seed + 30 * (seed > 2), 9, 0),  # a short pause
        (lambda seed: seed + 200 * (seed > 2), 9, 6),  # seeds added hours later
        (lambda seed: seed + 200 * (seed > 0), 9, 0),  # there was no interval to look at
        (lambda seed: seed, 3, 6),  # a second folder, begun when the first had ended
        (lambda seed: seed % 3, 3, 0),  # two folders at the same time
    ],
)
def test_runs_that_were_added_after_a_look_are_counted(minutes, second_from, n_later):
    found = at(runs(0.1), minutes).assign(source="first")
    found.loc[found["seed"] >= second_from, "source"] = "second"
    look = looked_at(found)["depth_scale=lns"]
    assert look.later == n_later
    told = [line for line in second_look_lines(look.model_dump()) if "began after all others had ended" in line]
    assert len(told) == (n_later > 0) and all(
        f"{n_later} runs of depth_scale=lns at n_layers=4" in line for line in told
    )


def test_a_setting_that_was_tuned_again_and_a_depth_that_was_added_are_marked():
    """Tuned with seeds 0 and 1, and LNS at one lr more a day later; of depths only what had been compared."""
    found = at(runs(0.1), lambda seed: seed).assign(lr=0.001, tuned_fields="lr", tuned_by="val_loss")
    found["tuning"] = np.where(found["seed"] < 2, "tuning", "best")
    again = found[(found["depth_scale"] == "lns") & (found["seed"] < 2)]
    again = again.assign(lr=0.002, started="2026-11-02T00:00:00+00:00", tuning="rejected", val_loss=4.0)
    assert looked_at(pd.concat([found, again], ignore_index=True))["depth_scale=lns"].later == 2
    deep = at(
        grid({"seed": range(6)}, lambda config: {"val_loss": 2 + NOISE[1, config.seed]}, n_layers=8), lambda _: 999
    )
    both = pd.concat([at(runs(0.1), lambda seed: seed), deep], ignore_index=True)
    assert looked_at(both)["n_layers=8"].later == 0
    more = pd.concat([both, at(grid({"seed": [7, 8]}, lambda config: {"val_loss": 2.0}, n_layers=8), lambda _: 9999)])
    answer = depth_answer(cells_of(more.reset_index(drop=True), "val_loss"))
    assert any("second look: 2 runs of n_layers=8 or" in note for note in answer.notes)


def test_the_depth_that_others_are_compared_with_has_no_second_look():
    """The row of 8 layers names the seed that decides, that of 4 layers nothing."""

    def loss(config):
        noise = [0.0, 0.004, -0.003, 0.002][config.seed]
        gain = (config.n_layers == 8) * (0.05 + 0.06 * (config.seed == 3))
        return {"val_loss": 3 - gain + noise * (1 + config.n_layers / 9), "train_flops": 1e9 * config.n_layers}

    found = depth_answer(cells_of(grid({"n_layers": [4, 8], "seed": range(4)}, loss), "val_loss"))
    told = [line for line in found.notes if "second look" in line]
    rows = {row["n_layers"]: row for row in found.rows.records()}
    assert rows[4]["without"] is None and rows[4]["seeds_part"] is None and rows[8]["without"].startswith("seed ")
    assert len(told) == 1 and told[0].startswith("second look: n_layers=8 is "), found.notes
    assert f" without {rows[8]['without']} (" in told[0]


def test_of_three_seeds_a_seed_is_named_only_where_the_effect_moves():
    """Two seeds show hardly anything: that a verdict is gone without the third says nothing of the third."""
    loss = {0: (3.0, 2.95), 1: (3.01, 2.958), 2: (2.99, 2.942)}
    even = grid(
        {"depth_scale": ["none", "lns"], "seed": range(3)},
        lambda config: {"val_loss": loss[config.seed][config.depth_scale == "lns"]},
        n_layers=4,
    )
    look = looked_at(even)["depth_scale=lns"]
    assert look.verdict == "lower" and look.without is None
    odd = even.assign(val_loss=even["val_loss"] - 0.06 * ((even["seed"] == 2) & (even["depth_scale"] == "lns")))
    look = looked_at(odd)["depth_scale=lns"]
    assert look.verdict != "lower" or look.without == "seed 2"


def test_depths_are_not_looked_at_without_the_folder_of_the_shallowest():
    """4 layers lose .3 more than 8 and 16, which are alike: without these runs 16 would be compared with 8."""

    def loss(config):
        return {"val_loss": 3 + 0.3 * (config.n_layers == 4) + NOISE[int(config.n_layers > 8), config.seed]}

    found = grid({"n_layers": [4, 8, 16], "seed": range(6)}, loss)
    look = looked_at(found.assign(source=np.where(found["n_layers"] == 4, "shallow", "deep")))["n_layers=16"]
    assert look.verdict == "lower" and look.without is None
