"""What carrying lr costs: by hand, planted, absent, and told."""

import numpy as np
import pandas as pd
import pytest
from support.made_up_runs import make_run
from support.tiny_sweep import sparsedepth

from sparsedepth.config.run import RunConfig
from sparsedepth.scaling.carry import carry_of, carry_table
from sparsedepth.words.scaling import carry_lines

RATES = (0.001, 0.002, 0.004, 0.008)
SEEDS = (1, 2, 3)


def runs(loss_at, depths=(2, 4, 8), rules=("standard",), seeds=SEEDS, rates=RATES) -> pd.DataFrame:
    """loss_at(rule, n_layers, lr, seed)."""
    records = [
        {
            **RunConfig(n_layers=depth, lr=lr, seed=seed).model_dump(mode="json"), "parametrisation": rule,
            "outcome": "ok", "val_loss": loss_at(rule, depth, lr, seed),
        }
        for rule in rules for depth in depths for lr in rates for seed in seeds
    ]  # fmt: skip
    return pd.DataFrame(records)


def test_the_regret_of_one_shape_by_hand():
    """The best is 0.002 at 2 layers and 0.004 at 8, where 0.002 loses 0.2 more; seeds differ by their level alone."""

    def loss(_, depth, lr, seed):
        best = {2: 0.002, 8: 0.004}[depth]
        return 2 + seed + (0 if lr == best else 0.2 if lr == 0.002 else 1.0)

    (found,) = carry_of(runs(loss, depths=(2, 8)), "val_loss", {"n_layers": 2})
    assert [(one.shape, one.lr, one.best) for one in found.shapes] == [("n_layers=8", 0.002, 0.004)]
    assert found.shapes[0].regret == pytest.approx(0.2) and found.regret == pytest.approx((0.2, 0.2, 0.2))
    assert found.rms == pytest.approx(0.2) and found.n_seeds == 3
    (of_one_seed,) = carry_of(runs(loss, depths=(2, 8), seeds=[1]), "val_loss", {"n_layers": 2})
    assert of_one_seed.regret == (pytest.approx(0.2), -np.inf, np.inf)
    (line, _) = carry_lines([of_one_seed], {"n_layers": 2})  # no definition takes an infinite carry_regret
    assert line.endswith("adds 0.2 nat/token (1 seed, 1 shape): one seed has no interval, and states no carry_regret")


def test_a_shape_that_did_not_run_the_carried_lr_has_no_regret_and_is_left_out():
    """0.008 is best at 2 layers, but was not run at 8; at 4 layers it costs 0.004."""
    best = {2: 0.008, 4: 0.004, 8: 0.001}
    found = runs(lambda _, depth, lr, seed: 2 + abs(lr - best[depth]))
    (carried,) = carry_of(found[(found["n_layers"] < 8) | (found["lr"] < 0.008)], "val_loss", {"n_layers": 2})
    assert [one.regret for one in carried.shapes] == [pytest.approx(0.004), None]
    assert carried.rms == carried.regret[0] == pytest.approx(0.004)
    lines = [*carry_lines([carried], {"n_layers": 2})]
    assert "1 shape)" in lines[0] and lines[1].endswith(
        "left out: n_layers=8, where lr=0.008, the best at n_layers=2, was not run"
    )
    assert carry_table([carried]).rows[-1][-2:] == (None, "lowest")
    assert [one.edge for one in carried.shapes] == [None, "lowest"]


def test_a_best_lr_at_the_end_of_those_tried_is_told():
    best = {2: 0.002, 4: RATES[-1], 8: 0.002}
    (carried,) = carry_of(runs(lambda _, depth, lr, seed: 2 + abs(lr - best[depth])), "val_loss", {"n_layers": 2})
    assert [one.edge for one in carried.shapes] == ["highest", None]
    (line,) = [line for line in carry_lines([carried], {"n_layers": 2}) if "tried" in line]
    told = (
        f"at n_layers=4 the best lr, {RATES[-1]:g}, is the highest tried: a better one may lie beyond, and the regret"
    )
    assert told in line


def test_rounded_values_of_lr_are_one():
    """0.004 at one shape and 0.004004 at another; 0.008 is another value."""

    def loss(_, depth, lr, seed):
        return 3.0 + abs(np.log2(lr / 0.004)) + 0.01 * seed

    table = pd.concat([runs(loss, (2,)), runs(loss, (4,), rates=[rate * 1.001 for rate in RATES])])
    (found,) = carry_of(table.reset_index(drop=True), "val_loss", {"n_layers": 2})
    assert [(each.lr, each.regret) for each in found.shapes] == [(0.004, pytest.approx(0.0, abs=0.02))]


def test_a_carried_lr_that_no_other_shape_ran_is_refused():
    found = runs(lambda _, depth, lr, seed: 2 + abs(lr - (0.008 if depth == 2 else 0.001)), depths=(2, 8))
    with pytest.raises(
        ValueError, match=r"all runs: lr=0.008, the best at that shape, was not run at n_layers=8; run it"
    ):
        carry_of(found[(found["n_layers"] == 2) | (found["lr"] < 0.008)], "val_loss", {"n_layers": 2})


FINE = [0.003 * 2 ** (half / 2) for half in range(-3, 4)]


def parabola(shift: float, noise: float, rng: np.random.Generator):
    """A loss whose best lr, 0.003, moves by `shift` doublings from 2 layers on; the loss rises by 0.04 at half or twice
    that, above it by 0.08; there the noise doubles with each doubling, as it does in results/depth_shape."""

    def loss(_, depth, lr, seed):
        steps = np.log2(lr / 0.003) - (shift if depth > 2 else 0.0)
        sd = noise * np.clip(2.0**steps, 1, 4)
        return 2 + 0.04 * steps**2 * (2 if steps > 0 else 1) + 0.1 * seed + sd * rng.normal()

    return loss


def true_regret(steps: float) -> float:
    return 0.04 * steps**2 * (2 if steps > 0 else 1)


def test_a_planted_regret_is_found():
    (found,) = carry_of(runs(parabola(-1.0, 0.01, np.random.default_rng(1)), rates=FINE), "val_loss", {"n_layers": 2})
    truth = true_regret(np.log2(found.shapes[0].lr / 0.003) + 1)
    assert truth > 0.05 and found.regret[1] > 0.02 and found.regret[0] == pytest.approx(truth, rel=0.3)


def test_noise_alone_is_no_regret():
    """Where one lr is best for all shapes, the lowest mean that was tried is 0.015 lower than that at the carried lr on
    average, by the noise alone."""
    rng = np.random.default_rng(2)
    worlds = [runs(parabola(0.0, 0.03, rng), rates=FINE) for _ in range(30)]
    found = [carry_of(world, "val_loss", {"n_layers": 2})[0] for world in worlds]
    truth = [true_regret(np.log2(one.shapes[0].lr / 0.003)) for one in found]
    off = np.array([one.regret[0] for one in found]) - truth
    assert abs(off.mean()) < 0.006
    covered = [lo < true < hi for one, true in zip(found, truth, strict=True) for _, lo, hi in [one.regret]]
    assert np.mean(covered) >= 0.9


@pytest.mark.parametrize("seeds", [SEEDS, [1]])
@pytest.mark.filterwarnings("error")
def test_a_shape_where_the_carried_lr_diverged_has_no_regret_but_is_told(seeds):
    def loss(_, depth, lr, seed):
        return float("nan") if depth == 8 and lr == 0.004 else 2 + abs(lr - 0.004)

    found = runs(loss, depths=(2, 4, 8), seeds=seeds)
    found.loc[found["val_loss"].isna(), "outcome"] = "diverged"
    (carried,) = carry_of(found, "val_loss", {"n_layers": 2})
    assert {one.shape: one.regret for one in carried.shapes} == {"n_layers=4": 0.0, "n_layers=8": np.inf}
    assert carried.regret == (np.inf, np.inf, np.inf)
    (line, _) = carry_lines([carried], {"n_layers": 2})
    assert line == "all runs: lr=0.004, the best at n_layers=2, diverged at n_layers=8: do not carry it there"


def test_a_setting_may_be_a_mapping():
    found = runs(lambda _, depth, lr, seed: 2 + abs(lr - 0.002), rules=("standard", "completep"), depths=(2, 8))
    found["lr_of"] = np.where(found["parametrisation"] == "standard", "[]", '[["embed", 2.0], ["head", 3.0]]')
    (one, other) = carry_of(found, "val_loss", {"n_layers": 2})
    assert {one.setting, other.setting} == {
        "parametrisation=standard, lr_of=[]", "parametrisation=completep, lr_of={embed: 2, head: 3}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("at", "told"),
    [
        ({"n_layers": 3}, r"no run has n_layers=3.*n_layers: 2, 8"),
        ({"lr": 0.1}, r"--at lr=0.1: at is a shape, such as n_layers=12"),
        ({}, r"--at names the shape"),
    ],
)
def test_a_shape_that_was_not_run_is_refused(at, told):
    with pytest.raises(ValueError, match=told):
        carry_of(runs(lambda *_: 2.0, depths=(2, 8)), "val_loss", at)


def test_a_shape_of_several_sizes_is_refused():
    """Curves of two budgets, or widths, are not one."""
    found = pd.concat([runs(lambda *_: 2.0).assign(train_tokens=tokens) for tokens in (2048, 16384)], ignore_index=True)
    with pytest.raises(
        ValueError, match=r"run with several train_tokens: 2048, 16384; name one: --at train_tokens=2048"
    ):
        carry_of(found, "val_loss", {"n_layers": 2})
    assert carry_of(found, "val_loss", {"n_layers": 2, "train_tokens": 2048})
    found["parametrisation"] = np.where(found["train_tokens"] == 2048, "standard", "completep")  # as at equal FLOPs
    assert len(carry_of(found, "val_loss", {"n_layers": 2})) == 2


def test_the_command_prints_the_regret_and_the_line_for_a_definition(tmp_path):
    for depth in (2, 4):
        for lr in RATES:
            for seed in SEEDS:
                config = RunConfig(n_layers=depth, lr=lr, seed=seed)
                value = 2 + 0.1 * abs(np.log2(lr / (0.002 * depth / 2))) + 0.01 * seed
                make_run(tmp_path, config, {"val_loss": value, "val_loss_common": value})
    out, _ = sparsedepth("scaling", "carry", tmp_path, "--at", "n_layers=2")
    assert "carrying lr from n_layers=2 adds 0.1 nat/token (0.1 to 0.1, 3 seeds, 1 shape)" in " ".join(out.split())
    assert "carry_regret: 0.1" in out
