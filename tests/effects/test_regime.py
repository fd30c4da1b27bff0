"""Regimes planted in made-up sweeps get the right verdict; what is missing or straddles leaves it open."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit
from support.runs_frame import grid

from sparsedepth.effects.regime import RULES, SIGNATURES, angles_by_depth, decide, regime_lines, regimes, turn_law

DEPTHS = (6, 12, 24, 48)


def sweep(b=1.0, update=1.5, even: float | None = 0.9, stop=0.01, a=1.0, seeds=(0, 1, 2), depths=DEPTHS, **axes):
    """Angle 5 L^-b, loss 2 + 3 L^-a; seeds move both by a little."""

    def outcome(config):
        noise = 1 + 0.002 * (config.seed - 1) * (-1) ** config.n_layers
        ends = {"update_angle": update, "early_stop_share": stop}
        ends |= {} if even is None else {"even_share": even}
        return {
            "angular_distance_middle": 5 * config.n_layers**-b * noise,
            "val_loss": 2 + 3 * config.n_layers**-a + 0.0001 * (config.seed - 1),
            **ends,
            **{f"{name}_lo": 0.95 * value for name, value in ends.items()},
            **{f"{name}_hi": 1.05 * value for name, value in ends.items()},
        }

    return grid({"n_layers": depths, "seed": seeds, **axes}, outcome)


def layers_of(runs, b):
    """angular_distance by layer: 0.5 in layer 2 at depth 1, falling with depth as depth^-b."""
    rows = [
        {"run_id": run_id, "layer": layer, "value": 0.5 * n_layers**-b * (1 + 0.01 * seed) / layer}
        for run_id, n_layers, seed in zip(runs["run_id"], runs["n_layers"], runs["seed"], strict=True)
        for layer in range(1, n_layers + 1)
    ]
    return pd.DataFrame(rows)


def verdict(runs, layers=None):
    (found,) = regimes(runs, layers)
    return found.verdict


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        ({}, "ensemble averaging"),
        ({"update": 0.3, "a": 3.0}, "procedural"),
        ({"b": 0.1}, "compositional"),
        ({"b": 0.1, "even": None}, "compositional"),
        # contradictions
        ({"update": 0.3, "a": 1.0}, "undecided"),
        ({"update": 1.5, "a": 3.0}, "undecided"),
        ({"b": 2.5}, "undecided"),
        # in between
        ({"b": 0.5}, "undecided"),
        ({"update": 0.9}, "undecided"),
        ({"even": 0.5}, "undecided"),
        ({"even": 0.1, "stop": 0.8}, "undecided"),  # do the first layers turn as much at every depth?
        # missing: a turn that falls as 1/depth could be an early stop
        ({"even": None}, "undecided"),
        ({"update": math.nan}, "undecided"),
        # the loss of two depths says nothing, and is not needed
        ({"depths": (6, 12)}, "ensemble averaging"),
        # one run per depth has no interval to speak of
        ({"depths": (6, 12), "seeds": (0,)}, "undecided"),
    ],
)
def test_planted_regimes(planted, expected):
    assert verdict(sweep(**planted)) == expected


def test_early_layers_tell_who_does_less():
    """The mean angle falls as 1/depth either because each layer turns less, or because more of them idle."""
    few = sweep(even=0.1, stop=0.8)
    assert verdict(few, layers_of(few, 0.0)) == "compositional"
    assert verdict(few, layers_of(few, 1.0)) == "undecided"
    even = sweep()
    assert verdict(even, layers_of(even, 1.0)) == "ensemble averaging"
    assert verdict(even, layers_of(even, 0.0)) == "undecided"
    (found,) = regimes(even, layers_of(even, 1.0))
    early = found.evidence[1]
    assert early.meaning == "b of mean angle of layers 2 to 3 ~ n_layers^-b" and early.value == pytest.approx(1)
    half = layers_of(even, 1.0).query("layer != 3")  # no mean of what is not all there
    assert regimes(even, half)[0].evidence[1].reading == "unknown"


def test_the_readings_and_their_numbers():
    (found,) = regimes(sweep())
    readings = {one.signature: (one.reading, one.value) for one in found.evidence}
    assert {name: reading for name, (reading, _) in readings.items()} == {
        "turn": "falls as 1/depth",
        "early": "unknown",
        "update": "across",
        "even": "most",
        "stop": "few",
        "loss": "near 1/depth",
    }
    assert readings["turn"][1] == pytest.approx(1, abs=1e-3) and readings["loss"][1] == pytest.approx(1, abs=0.01)
    assert (found.family, found.depths, found.n_runs) == ("all runs", DEPTHS, 12)
    lines = regime_lines(found)
    assert lines[0] == "all runs: ensemble averaging (12 runs, n_layers 6, 12, 24, 48)"
    assert lines[3] == (
        "  update across: angle of neighbouring updates at n_layers=48 (rad): 1.5 (95% interval 1.42 to 1.58)"
    )
    unknown = regime_lines(regimes(sweep(even=None))[0])
    assert "even unknown" in unknown[4] and "needs 'trajectories'" in unknown[4]


def test_the_exponent_and_its_interval_by_hand():
    """log2 angle at log2 L = 1, 2, 3: 0, -1, -2.3 and the same 0.1 higher."""
    runs = sweep(depths=(2, 4, 8), seeds=(0, 1))
    at = {(2, 0): 0.0, (4, 0): -1.0, (8, 0): -2.3, (2, 1): 0.1, (4, 1): -0.9, (8, 1): -2.2}
    angles = [math.exp(math.log(2) * at[n, s]) for n, s in zip(runs["n_layers"], runs["seed"], strict=True)]
    law = turn_law(angles_by_depth(runs.assign(angular_distance_middle=angles)))
    assert law is not None and law.lo is not None
    assert law.b == pytest.approx(1.15)
    # Sxx = 4; depths lie -1/20, 1/10, -1/20 off the line, with two seeds each: s_b^2 = .03, of 3 - 1 - 1 df; seeds lie
    # -+0.05 off their depth's mean: s_w^2 = .015 / 3; .03^2 / (.005^2 / 3 + .025^2 / 1) = 1.42 df
    error, df = math.sqrt(0.03 / 4), 0.0009 / (0.000025 / 3 + 0.000625)
    assert law.b - law.lo == pytest.approx(stdtrit(df, 0.975) * error)
    assert law(np.array([4.0]))[0] == pytest.approx(2**-1.05)  # the mean, at the middle


def test_families_apart_and_together():
    runs = sweep(depth_scale=["none", "lns"])
    runs.loc[runs["depth_scale"] == "lns", "angular_distance_middle"] *= 0.5
    found = regimes(runs)
    assert [one.family for one in found] == ["depth_scale=none", "depth_scale=lns", "all families"]
    assert {one.verdict for one in found} == {"ensemble averaging"}
    assert [one.n_runs for one in found] == [12, 12, 24]
    assert found[-1].evidence[0].value == pytest.approx(1, abs=1e-3)  # each family has its own intercept


def test_families_with_slopes_of_their_own_have_a_joint_interval_that_holds_all():
    runs = sweep(depth_scale=["none", "lns"])
    is_lns = runs["depth_scale"] == "lns"
    depth = runs["n_layers"]
    runs.loc[is_lns, "angular_distance_middle"] *= depth[is_lns] ** 0.7
    runs.loc[is_lns, "val_loss"] = 2 + 3 * depth[is_lns] ** -2.5 + 0.0001 * (runs.loc[is_lns, "seed"] - 1)
    none, lns, together = regimes(runs, layers_of(runs, 1.0))
    assert (none.verdict, lns.verdict, together.verdict) == ("ensemble averaging", "compositional", "undecided")
    for i, mean in ((0, 0.65), (5, 1.75)):
        each, other, joint = none.evidence[i], lns.evidence[i], together.evidence[i]
        assert joint.value == pytest.approx(mean, abs=0.02) and joint.reading == "unclear"
        assert (joint.lo, joint.hi) == (min(each.lo, other.lo), max(each.hi, other.hi))


def test_only_finished_trained_runs_count():
    runs = sweep()
    runs.loc[runs["n_layers"] == 48, "outcome"] = "diverged"
    (found,) = regimes(runs)
    assert found.depths == (6, 12, 24) and "n_layers=24" in found.evidence[2].meaning
    assert regimes(runs[runs["n_layers"] == 6]) == []
    assert regimes(runs.assign(model="hub:somebody/model")) == []


def test_one_run_without_a_value_leaves_the_signature_open():
    runs = sweep()
    deepest = (runs["n_layers"] == 48) & (runs["seed"] == 1)
    runs.loc[deepest, ["even_share", "even_share_lo", "even_share_hi"]] = None
    assert verdict(runs) == "undecided"
    runs = sweep()
    runs["update_angle_lo"] = pd.to_numeric(runs["update_angle_lo"])
    runs.loc[deepest, "update_angle_lo"] = 0.9  # one run of the deepest reaches over the threshold
    assert verdict(runs) == "undecided"


def test_the_interval_covers_as_often_as_it_says():
    rng, covered = np.random.default_rng(0), 0
    runs = angles_by_depth(sweep())
    for _ in range(200):
        noisy = runs.assign(angular_distance_middle=5 / runs["n_layers"] * np.exp(rng.normal(0, 0.1, len(runs))))
        law = turn_law(noisy)
        assert law is not None and law.lo is not None and law.hi is not None
        covered += law.lo <= 1 <= law.hi
    assert 0.90 <= covered / 200 <= 0.99


def test_every_rule_names_readings_that_exist():
    for regime, rule in RULES:
        for signature, readings in rule.items():
            assert set(readings) - {"unclear", "unknown"} <= set(SIGNATURES[signature]), regime
    open_loss = {"turn": "falls as 1/depth", "early": "unclear", "update": "across", "even": "most", "stop": "few"}
    assert decide({**open_loss, "loss": "unclear"}) == "ensemble averaging"
    assert decide({**open_loss, "loss": "steeper"}) == "undecided"
