"""Power of a ladder before running: what it calls detectable is found by `judge`, as often as it says."""

import math
from pathlib import Path

import numpy as np
import pytest
from support.report_pages import ladder as ladder_folder
from support.shape_ladders import SD as SHAPES_SD, shapes

import sparsedepth
from sparsedepth.cli.describe import init
from sparsedepth.cli.input_file import sweep_definition
from sparsedepth.cli.plan import detectable_effects
from sparsedepth.effects.cells import BASELINE
from sparsedepth.effects.power import PilotNoise, power_table
from sparsedepth.plan.tasks import Plan
from sparsedepth.recipe.judge import judge
from sparsedepth.recipe.judge_ladder import judge_ladder
from sparsedepth.scaling import ladder_power as module
from sparsedepth.scaling.aspect import aspect_law
from sparsedepth.scaling.ladder_power import LadderPilot, PlannedLadder, ladder_pilot, ladder_power, pilot_of_laws
from sparsedepth.scaling.shapes import ShapesAnswer
from sparsedepth.store.connection import open_store
from sparsedepth.words.power import power_text

SD = 0.001
"""Of ln loss."""


def straight(C_B):
    return 1.9 + 4.1 * (C_B / 1e16) ** -0.13


def detectable(n_budgets, n_settings, df=None):
    C_B = np.geomspace(2e17, 6.4e18, 6)[:n_budgets]
    planned = PlannedLadder(C_B, (8,), [f"s{number}" for number in range(n_settings)])
    return C_B, ladder_power(planned, LadderPilot(straight, C_B, PilotNoise(own=SD, df=df)))


def found_in(C_B, powers, log_m, n_draws):
    """The share of tables in which `judge` says that the first setting is better, where it is worth this."""
    n_found = 0
    for number in range(n_draws):
        rng = np.random.default_rng([7, number])
        losses = {}
        for name in (BASELINE, *(power.setting for power in powers)):
            loss_B = straight(C_B * math.exp(log_m * (name == "s0"))) * np.exp(rng.normal(0, SD, len(C_B)))
            losses[name] = {C: {0: loss} for C, loss in zip(C_B, loss_B.tolist(), strict=True)}
        records = judge_ladder(losses, BASELINE, {}).table.records()
        n_found += any(record["variant"] == "s0" and record["verdict"] == "better" for record in records)
    return n_found / n_draws


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("budgets", "settings"), [(4, 1), (6, 1), (4, 3), (8, 2)])
def test_what_plan_calls_detectable_is_found_in_80_percent(budgets, settings):
    C_B, powers = detectable(budgets, settings)
    share = found_in(C_B, powers, powers[0].detectable, 100)
    print(f"{budgets} budgets, {settings} settings: {math.exp(powers[0].detectable):.3f} is found in {share:.2f}")
    assert 0.7 <= share <= 0.9


def test_a_gain_of_that_size_is_found_mostly_and_a_third_of_it_seldom(monkeypatch):
    monkeypatch.setattr(module, "DRAWS", 8)
    C_B, powers = detectable(4, 1)
    assert found_in(C_B, powers, powers[0].detectable, 10) >= 0.6
    assert found_in(C_B, powers, powers[0].detectable / 3, 10) <= 0.4
    _, (unsure,) = detectable(4, 1, df=2.0)
    assert unsure.detectable > powers[0].detectable


def test_what_a_law_would_show_is_where_its_p_is_the_level():
    C_B = np.geomspace(2e17, 6.4e18, 6)
    rng = np.random.default_rng(0)
    losses = {
        name: {C: {0: loss} for C, loss in zip(C_B, straight(C_B) * np.exp(rng.normal(0, SD, 6)), strict=True)}
        for name in (BASELINE, "s0")
    }
    (law,) = judge_ladder(losses, BASELINE, {}).laws.values()
    least = law.least_shown(0.05)
    assert law.p(least - law.judged_by.estimate) == pytest.approx(0.05, rel=0.05)
    assert law.p(1.1 * least - law.judged_by.estimate) < 0.05 < law.p(0.9 * least - law.judged_by.estimate)
    assert law.p() == law.p(0.0)


def test_the_noise_of_a_pilot_is_what_its_law_leaves(tmp_path):
    """Of differences: twice the variance of a run. Losses of the folder are straight in ln C, the differences alike."""
    ladder_folder(tmp_path)
    with open_store(tmp_path) as store:
        pilot = ladder_pilot(store)
    assert pilot.of_run.own < 3e-3 and pilot.of_run.df == 2.0
    assert pilot.C_N.tolist() == [1e12, 4e12, 1.6e13, 6.4e13] * 2
    assert pilot.loss_at(np.array([1e12, 6.4e13])) == pytest.approx([3.0, 2.1], rel=0.01)


def test_the_noise_of_shapes_is_what_their_law_leaves(monkeypatch):
    law = aspect_law(shapes(np.random.default_rng(1), (0.0, 0.0, 0.0)))
    monkeypatch.setattr(module, "shapes_answer", lambda store: ShapesAnswer(law=law))
    pilot = ladder_pilot(None)
    runs = law.runs
    assert pilot.of_run.own * runs["loss"].mean() == pytest.approx(SHAPES_SD, rel=0.2)
    size, tokens = (np.exp(np.log(of).mean()) for of in (runs["flops"] / 6 / runs["tokens"], runs["tokens"]))
    truth = 1.75 + 480 * size**-0.34 + 2100 * tokens**-0.37
    assert pilot.loss_at(6 * size * tokens) == pytest.approx(truth, abs=0.01)


def test_a_ladder_is_planned_with_a_pilot_and_asks_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DRAWS", 2)
    init("sweep", tmp_path / "ladder.yaml", ladder=3)
    planned = Plan(sweep_definition(tmp_path / "ladder.yaml"))
    without = detectable_effects(planned, None, None, None)
    assert power_text(without).startswith("power: one run at each budget; --pilot RESULTS")
    pilot = ladder_folder(tmp_path / "pilot")[0]
    found = detectable_effects(planned, pilot, None, None)
    assert "that such a ladder shows with 80% power" in power_text(found)
    assert f"of ln loss between the runs of a setting (of {pilot}, 2 df" in power_text(found)
    ((*row, size),) = power_table(found.powers, found.unit, found.effect).rows
    assert row == ["depth_scale=lns", "8, 9, 10", 1] and size.startswith("x1.")
    with pytest.raises(ValueError, match="--seed-sd and --effect are for several seeds"):
        detectable_effects(planned, None, 0.1, None)


def test_a_table_of_a_ladder_is_a_pilot(tmp_path, monkeypatch):
    """The noise is that of the laws by which `judge` judges it: three variants at six budgets, a worth and a drift of
    each. A table of seeds, or of tokens, is none."""
    monkeypatch.setattr(module, "DRAWS", 2)
    init("sweep", tmp_path / "ladder.yaml", ladder=3)
    planned = Plan(sweep_definition(tmp_path / "ladder.yaml"))
    table = Path(sparsedepth.__file__).parent / "examples/maps/ladder.csv"
    found = detectable_effects(planned, table, None, None)
    laws = [*judge(table).ladder.laws.values()]
    assert found.noise == pilot_of_laws(laws).of_run and found.noise.df == 3 * (6 - 2)
    assert found.powers[0].detectable > 0
    in_tokens = tmp_path / "tokens.csv"
    in_tokens.write_text(table.read_text().replace("flops", "other").replace("tokens", "train_tokens"))
    for other in (in_tokens, table.with_name("variants.csv")):
        with pytest.raises(ValueError, match="is no ladder: one run of each variant at three budgets"):
            detectable_effects(planned, other, None, None)
