"""All effects of a store: four bases, the correction for asking often, and power on planted effects."""

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import config_of, grid, knob_of, runs_frame

from sparsedepth.effects.all_effects import (
    _moderated,
    effects_of,
    effects_table,
    family_of,
    measure_effects,
    measure_slopes,
)
from sparsedepth.effects.contrast import contrasts, contrasts_on_bases
from sparsedepth.effects.intervals import correct, holm
from sparsedepth.effects.knobs import depth_knob
from sparsedepth.effects.pairs import BASES, pairs
from sparsedepth.effects.summary import effects_text


def experts(train_tokens, n_experts, seed, loss):
    """A run whose FLOPs are tokens x (1 + experts): at equal tokens experts cost twice as much."""
    flops = float(train_tokens * (1 + (n_experts > 0)))
    config = config_of(train_tokens=train_tokens, n_experts=n_experts, top_k=2 if n_experts else None, seed=seed)
    return config, {
        "val_loss": loss + 0.001 * (seed - 1) * bool(n_experts),
        "train_flops": flops,
        "params_total": 1000 * (1 + n_experts),
    }


@pytest.fixture
def two_budgets():
    """Dense at 8 and 16 steps, experts at 8: equal tokens favours the experts by .2, equal FLOPs the dense by .1."""
    cells = [(8 * 8192, 0, 3.0), (16 * 8192, 0, 2.7), (8 * 8192, 4, 2.8)]
    return runs_frame(experts(tokens, n, seed, loss) for tokens, n, loss in cells for seed in range(3))


def test_each_basis_pairs_the_runs_that_agree_in_it(two_budgets):
    found = measure_effects(two_budgets, "val_loss", "n_experts")
    told = {one.basis: one.effect.mean for one in found}
    assert told == {
        "tokens": pytest.approx(-0.2),
        "params_total": None,
        "params_active": pytest.approx(-0.2),  # made up equal
        "flops": pytest.approx(0.1),
    }
    assert all(one.matches(one.basis) == one.has_pairs for one in found)
    assert [row[6] for row in effects_table(found).rows if row[4] == "params_total"] == ["no matched runs"]


def test_the_terminals_table_has_a_line_for_each_setting_or_for_each_set_of_pairs(two_budgets):
    """Equal tokens and equal active parameters pair the same runs; no runs are equal in all parameters."""
    effects = measure_effects(two_budgets, "val_loss", "n_experts")
    tables = [effects_text(effects, 100, every_basis=every).splitlines() for every in (False, True)]
    assert all(max(map(len, lines)) <= 100 and lines[0].startswith("val_loss [nat/token], low") for lines in tables)
    rows = [[line.split() for line in lines if line.lstrip().startswith("12 ")] for lines in tables]
    assert [row[1] for row in rows[0]] == ["-0.2000"] and "at equal tokens" in tables[0][0]
    assert [(row[1], row[5]) for row in rows[1]] == [("-0.2000", "tokens"), ("0.1000", "flops")]
    assert {(row[-3], row[-2]) for row in rows[1]} == {("lower", "n_experts=4,"), ("higher", "n_experts=4,")}


def test_a_run_is_in_one_pair_at_most_and_equal_sizes_come_first():
    """Two dense widths have the experts' FLOPs: the one of the same width stands beside them."""
    rows = [
        (config_of(d_model=width, n_experts=n, top_k=n // 2 or None, seed=seed), {"val_loss": loss, "train_flops": 1.0})
        for width, n, loss in [(64, 0, 3.0), (128, 0, 2.0), (64, 4, 2.9)]
        for seed in range(2)
    ]
    runs = runs_frame(rows)
    found = pairs(runs, knob_of(runs, "n_experts"), "val_loss", "flops")
    assert list(found["difference"]) == pytest.approx([-0.1, -0.1])
    assert not found["run_id"].duplicated().any() and not found["run_id_baseline"].duplicated().any()


def test_effects_of_depth_lend_nothing():
    """They are means over settings, and less noisy than any of one."""
    generator = np.random.default_rng(0)
    axes = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "seed": range(3)}
    runs = grid(axes, lambda config: {"val_loss": 3 + 0.01 * generator.normal()})
    lns = [one for one in contrasts(runs, knob_of(runs, "depth_scale"), "val_loss") if one.n_layers == 24]
    deeper = contrasts(runs, depth_knob(runs), "val_loss")
    assert len(lns) == len(deeper) == 1 and lns[0].noise_depth == deeper[0].noise_depth == 24
    assert _moderated(lns, lenders=deeper) == _moderated(lns)
    assert _moderated([*lns, *deeper])[0] == _moderated(lns)[0]
    assert _moderated(deeper, lenders=lns) != _moderated(deeper)


def test_within_one_percent_counts_as_equal(two_budgets):
    two_budgets["train_flops"] *= np.where(two_budgets["n_experts"] > 0, 1.009, 1.0)
    knob = knob_of(two_budgets, "n_experts")
    assert len(contrasts_on_bases(two_budgets, knob, "val_loss")["flops"]) == 1
    two_budgets["train_flops"] *= np.where(two_budgets["n_experts"] > 0, 1.009, 1.0)
    assert contrasts_on_bases(two_budgets, knob, "val_loss")["flops"] == []


def test_all_bases_at_once_are_the_bases_one_by_one(two_budgets):
    knob = knob_of(two_budgets, "n_experts")
    by_basis = contrasts_on_bases(two_budgets, knob, "val_loss")
    assert list(by_basis) == [None, *BASES]
    for basis, found in by_basis.items():
        matched = pairs(two_budgets, knob, "val_loss", basis)
        assert {run for one in found for run in one.run_ids} == {*matched["run_id"], *matched["run_id_baseline"]}
        assert [one.effect.n for one in found] == [len(matched)] * (len(matched) > 0)
        assert [one.effect.mean for one in found] == pytest.approx([matched["difference"].mean()] * len(found))


def test_holm_is_taken_over_all_knobs_even_if_one_is_shown():
    def outcome(config):
        return {"val_loss": 3 - 0.1 * (config.depth_scale == "lns") + 0.001 * np.sin(17 * int(config.run_id[:4], 16))}

    runs = grid({"depth_scale": ["none", "lns"], "n_kv_heads": [4, 2, 1], "seed": range(4)}, outcome)
    whole = [one for one in measure_effects(runs) if one.basis == "tokens"]
    p_values = [one.effect.p for one in whole if one.effect.p is not None]
    assert len(whole) == 3 and [one.p_holm for one in whole] == holm(p_values)
    shown = [one for one in measure_effects(runs, knob="depth_scale") if one.basis == "tokens"]
    assert shown == [one for one in whole if one.knob == "depth_scale"]
    assert [one.verdict for one in shown] == ["lower"]


def test_slopes_are_corrected_together():
    def outcome(config):
        lns = config.depth_scale == "lns"
        return {
            "val_loss": 3 - lns * (0.1 if config.n_layers == 12 else 0.3) + 0.0001 * config.seed * lns * config.n_layers
        }

    axes = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": range(3)}
    found = measure_slopes(grid(axes, outcome))
    assert {one.knob: one.verdict for one in found} == {
        "depth_scale": "lower",
        "n_kv_heads": "not distinguishable",
    }
    assert found == correct(found) and [one.p_holm for one in found] == holm([one.effect.p for one in found])


def test_wrong_questions_are_refused(two_budgets):
    with pytest.raises(ValueError, match=r"no two runs differ in norm alone; these runs vary: n_experts, train_tokens"):
        measure_effects(two_budgets, knob="norm")
    with pytest.raises(ValueError, match=r"--knob 'n_expert' is no field of a run; did you mean 'n_experts'\?"):
        measure_effects(two_budgets, knob="n_expert")
    with pytest.raises(ValueError, match="not a measured number"):
        measure_effects(two_budgets, "loss")
    with pytest.raises(ValueError, match="run a sweep"):
        measure_effects(two_budgets[:3])


# Power


def stores(n_stores, axes, generator, shared_sd=0.01):
    """The runs of many sweeps in one frame, told apart by n_layers: noise of runs, and of seeds shared by settings."""
    one = grid(axes, lambda config: {})
    runs = pd.concat([one.assign(n_layers=depth) for depth in range(1, n_stores + 1)], ignore_index=True)
    for name in ("run_id", "cell_id"):
        runs[name] += runs["n_layers"].astype(str)
    shared = shared_sd * generator.normal(size=(n_stores + 1, 99))[runs["n_layers"], runs["seed"]]
    return runs.assign(val_loss=3 + shared + 0.01 * generator.normal(size=len(runs)))


def test_planted_effects_are_covered_at_the_nominal_rate():
    """500 sweeps of 2 x 2 cells x 3 seeds: 6 pairs each. The 95% interval covers the effect in 95% +- 2%."""
    axes = {"depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": range(3)}
    runs = stores(500, axes, np.random.default_rng(0))
    runs["val_loss"] -= 0.04 * (runs["depth_scale"] == "lns")
    found = effects_of(runs, [knob_of(runs, "depth_scale")], "val_loss")
    assert len(found) == 500 and {one.effect.n for one in found} == {6}
    assert 0.93 <= np.mean([one.effect.covers(-0.04) for one in found]) <= 0.97
    assert np.mean([one.verdict == "lower" for one in found]) > 0.75  # by the 2 degrees of freedom of one setting
    assert not any(one.verdict == "higher" for one in found)


def test_without_an_effect_a_store_claims_one_in_at_most_5_percent():
    """200 sweeps with five settings of two knobs. Uncorrected, some setting would stand out in far more of them."""
    axes = {"weight_decay": [0.0, 0.1, 0.3, 1.0], "n_kv_heads": [4, 2, 1], "seed": range(3)}
    runs = stores(200, axes, np.random.default_rng(1), shared_sd=0.0)
    knobs = [knob_of(runs, name) for name in ("weight_decay", "n_kv_heads")]
    by_knob = [(knob, {"tokens": contrasts_on_bases(runs, knob, "val_loss")["tokens"]}) for knob in knobs]

    def claimed(found):
        """Share of the sweeps in which something is called."""
        called = {one.n_layers for one in found if one.verdict != "not distinguishable"}
        return len(called) / 200

    judged = family_of(by_knob, "tokens")
    assert claimed(judged) <= 0.05
    alone = {one.n_layers for one in judged if one.verdict_uncorrected != "not distinguishable"}
    assert len(alone) / 200 > 0.10
