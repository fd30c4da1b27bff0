"""Outcomes that tuning did not choose are compared at equal lr: worlds in which lr alone moves the variance, and worlds
in which a setting halves it at every lr."""

import math
import re

import numpy as np
import pandas as pd
import pytest

from sparsedepth.effects.cells import BASELINE, Cells
from sparsedepth.effects.frame import depth_effects, effects_frame, setting_effects

SETTINGS = (BASELINE, "n_kv_heads=1", "depth_scale=lns", "weight_decay=1")
LRS = tuple(0.001 * 2.0**k for k in range(5))
SD = 0.15
"""Of ln variance, between the seeds of a setting."""


def world(rng: np.random.Generator, slope: float, effect: float = 0.0, n_layers: int = 4, shift: float = 0.0) -> Cells:
    """Cells of ln variance: three settings and the baseline, five lr by two tuning seeds, five result seeds at the lr
    that each setting chose by a loss of its own. `slope`: of ln variance per step of lr. `effect`: of the first
    setting, at every lr. `shift`: share of the variance by which a seed moves all runs of a setting."""
    rows = []
    for name in SETTINGS:
        chosen = int(rng.integers(0, len(LRS)))
        level = effect * (name == SETTINGS[1])
        own_S = SD * math.sqrt(shift) * rng.standard_normal(7)
        for k, lr in enumerate(LRS):
            for seed in (*(5, 6), *(range(5) if k == chosen else ())):
                role = ("tuning" if seed > 4 else "best") if k == chosen else "rejected"
                value = level + slope * k + own_S[seed] + SD * math.sqrt(1 - shift) * rng.standard_normal()
                rows.append((name, lr, seed, value, 3.0 + 0.01 * (k - chosen) ** 2, role))
    frame = pd.DataFrame(rows, columns=["setting", "lr", "seed", "value", "loss", "tuning"])
    frame = frame.assign(n_layers=n_layers, diverged=False, role=np.where(frame["seed"] > 4, "tuning", "result"))
    frame["changes"] = [frozenset({(name.partition("=")[0], name.partition("=")[2])}) for name in frame["setting"]]
    frame.loc[frame["setting"] == BASELINE, "changes"] = [frozenset()] * int((frame["setting"] == BASELINE).sum())
    return cells_with(frame)


def cells_with(frame: pd.DataFrame) -> Cells:
    return Cells(
        runs=frame, rows=frame.assign(edge_beside=""), settings=None, outcome="residual_variance_last",
        unit="ln ratio", n_tuning=0, tuned=("lr",), tuned_by=frozenset({"val_loss"}),
    )  # fmt: skip


def verdicts(n: int, **of) -> np.ndarray:
    """Of n draws: whether any setting without an effect has a verdict, whether the first is found, and the share of
    intervals that hold the truth."""
    results = []
    for i in range(n):
        rows = setting_effects(world(np.random.default_rng([7, i]), **of)).set_index("setting")
        truth = pd.Series(0.0, rows.index)
        truth[SETTINGS[1]] = of.get("effect", 0.0)
        shown = rows["verdict"].isin(["lower", "higher"])
        covered = ((rows["lo"] <= truth) & (truth <= rows["hi"])).mean()
        results.append(((shown & (truth == 0)).any(), rows["verdict"][SETTINGS[1]] == "lower", covered))
    return np.array(results, dtype=float).mean(axis=0)


@pytest.mark.parametrize("n", [6, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("slope", [0.2, 0.7])
def test_lr_alone_gives_no_verdict_and_a_halving_is_found(slope, shift, n):
    null = verdicts(n, slope=slope, shift=shift)
    halved = verdicts(n, slope=slope, effect=-math.log(2), shift=shift)
    print(f"slope {slope}, shift {shift}: false {null[0]:.3f}, found {halved[1]:.3f}, covered {halved[2]:.3f}")
    assert null[0] <= (22 / 300 if n > 100 else 0.34)
    assert halved[1] >= (0.9 if n > 100 else 0.6)
    assert null[2] >= 0.93 or n < 100


def exact(values, chosen=(0.001, 0.004), n_layers=4) -> Cells:
    """Two settings at three lr by three tuning seeds, whose values differ by thousandths."""
    rows, rng = [], np.random.default_rng(n_layers)
    for name, best in zip((BASELINE, "depth_scale=lns"), chosen, strict=True):
        for lr in (0.001, 0.002, 0.004):
            for seed in (100, 101, 102, *(range(3) if lr == best else ())):
                role = ("tuning" if seed >= 100 else "best") if lr == best else "rejected"
                rows.append((name, lr, seed, values(name, lr) + 0.002 * rng.standard_normal(), 3.0, role))
    frame = pd.DataFrame(rows, columns=["setting", "lr", "seed", "value", "loss", "tuning"])
    frame = frame.assign(n_layers=n_layers, diverged=False, role=np.where(frame["seed"] >= 100, "tuning", "result"))
    frame["changes"] = [
        frozenset() if name == BASELINE else frozenset({("depth_scale", "lns")}) for name in frame["setting"]
    ]
    return cells_with(frame)


def test_the_effect_is_that_at_equal_lr_and_the_one_at_own_lr_stands_beside():
    """ln variance rises by 1 per doubling of lr, and by -0.5 with the setting, which chose two doublings more."""
    (row,) = setting_effects(exact(lambda name, lr: math.log2(lr) - 0.5 * (name != BASELINE))).to_dict("records")
    assert row["at"] == "equal lr" and row["verdict"] == "lower"
    assert row["estimate"] == pytest.approx(-0.5, abs=0.01) and row["lo"] < -0.5 < row["hi"] < 0
    assert row["estimate_own_lr"] == pytest.approx(1.5, abs=0.01) and row["lo_own_lr"] < 1.5 < row["hi_own_lr"]


def test_signs_that_differ_between_both_sides_lr_are_decided_by_lr():
    """+0.4 at the baseline's lr, -0.4 at the setting's."""
    signs = {0.001: 0.4, 0.002: 0.0, 0.004: -0.4}
    (row,) = setting_effects(exact(lambda name, lr: signs[lr] * (name != BASELINE))).to_dict("records")
    assert row["verdict"] == "lr decides"
    assert re.fullmatch(r"at lr 0\.001 the effect is x1\.4\d, at lr 0\.004 x0\.6\d+", row["reason"])


def test_shown_at_one_lr_alone_is_decided_by_lr():
    one = {0.001: 0.0, 0.002: -0.2, 0.004: -0.4}
    (row,) = setting_effects(exact(lambda name, lr: one[lr] * (name != BASELINE))).to_dict("records")
    assert row["verdict"] == "lr decides"


def test_without_an_lr_of_both_sides_it_is_not_known():
    cells = exact(lambda name, lr: -0.5 * (name != BASELINE))
    rows = cells.rows[(cells.rows["setting"] == BASELINE) == (cells.rows["lr"] < 0.003)]
    (row,) = setting_effects(cells_with(rows)).to_dict("records")
    assert row["verdict"] == "not known" and row["reason"] == "no lr was run on both sides"
    assert math.isnan(row["estimate"]) and row["estimate_own_lr"] == pytest.approx(-0.5, abs=0.01)


def test_depths_and_slopes_follow_equal_lr_too():
    """The variance is that of lr alone; the deeper baseline chose four times the lr."""
    shallow, deep = (
        exact(lambda name, lr: math.log2(lr), chosen, n) for chosen, n in (((0.001, 0.004), 4), ((0.004, 0.001), 16))
    )
    frame = effects_frame(cells_with(pd.concat([shallow.rows, deep.rows], ignore_index=True)))
    assert not frame["verdict"].isin(["lower", "higher"]).any()
    (depth,) = depth_effects(cells_with(pd.concat([shallow.rows, deep.rows], ignore_index=True))).to_dict("records")
    assert depth["estimate"] == pytest.approx(0, abs=0.01) and depth["estimate_own_lr"] == pytest.approx(2, abs=0.01)
