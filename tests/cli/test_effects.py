"""`effects` as a user meets it."""

import json
import re

import pytest
from support.made_up_runs import make_run
from support.tiny_sweep import sparsedepth

from sparsedepth.config.run import RunConfig


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """LNS lowers the loss by .101 at 12 layers and by .202 at 24, and the variance with it; costs are equal."""
    folder = tmp_path_factory.mktemp("effects")
    for depth in (12, 24):
        for scale in ("none", "lns"):
            for seed in range(3):
                lns = scale == "lns"
                drop = lns * (0.1 + 0.001 * seed) * depth / 12
                config = RunConfig(n_layers=depth, depth_scale=scale, seed=seed)
                sizes = {"params_total": depth, "params_active": depth, "train_flops": float(depth)}
                found = {"residual_variance_last": 100.0 / (1 + lns) + seed, "usefulness": 0.5 + 0.1 * lns}
                found |= {"val_loss": 3 - drop + 0.002 * seed, "tokens_trained": config.train_tokens}
                make_run(folder, config, {**found, **sizes})
    return folder


def test_with_a_setting_as_the_baseline(results):
    """At 24 layers LNS has 3 - .202, at 12 it has 3 - .101; without LNS depth changes nothing."""
    out, _ = sparsedepth("query", results, "--ask", "depth", "--baseline", "depth_scale=lns")
    assert (
        "With depth_scale=lns as the baseline: at equal tokens 24 layers have 0.101 nat/token less val_loss than 12"
        in (" ".join(out.split()))
    )
    out, _ = sparsedepth("effects", results, "--baseline", "depth_scale=lns", "--format", "json")
    effects = {(row["n_layers"], row["setting"]): row["estimate"] for row in json.loads(out)}
    assert effects[24, "n_layers=24"] == pytest.approx(-0.101, abs=0.002)
    assert effects[24, "depth_scale=none"] == pytest.approx(0.202, abs=0.002)


@pytest.mark.parametrize(
    "command",
    [
        ("effects", "--as", "speedup"),
        ("effects", "--part", "chain"),
        ("query", "--ask", "best_per_depth"),
        ("query", "--schema"),
        ("query", "select 1"),
    ],
)
def test_a_baseline_of_what_compares_no_settings_is_refused(results, command):
    name, *options = command
    _, error = sparsedepth(name, results, *options, "--baseline", "depth_scale=lns", code=2)
    assert "--baseline 'depth_scale=lns' is of effects, --ask depth and --ask variance; leave it out" in error


def test_one_knob_in_detail(results):
    out, _ = sparsedepth("effects", results, "--knob", "depth_scale", "--detail")
    lines = [line.split() for line in out.splitlines()]
    names = next(line for line in lines if line and line[0] == "n_layers")
    row = dict(zip(names, next(line for line in lines if line[:1] == ["12"]), strict=True))
    assert (row["effect"], row["verdict"], row["setting"]) == ("-0.1010", "lower", "depth_scale=lns")
    assert float(row["p_adjusted"]) < 0.05
    assert float(row["fitted"]) - 3.002 == pytest.approx(-0.101, abs=0.005)
    assert (
        "depth_scale=lns: per doubling of depth" in " ".join(out.split()) and "basis" not in out
    )  # all at equal tokens


def test_the_chain_has_outcomes_of_its_own(results):
    _, error = sparsedepth("effects", results, "--part", "chain", "--by", "usefulness", code=2)
    assert "--by usefulness" in error


def test_the_chain_has_a_word_for_every_link(results):
    out, _ = sparsedepth("effects", results, "--part", "chain", "--detail")
    assert "residual_variance_last -> usefulness: " in out
    assert re.search(
        r"intervention depth_scale=lns, n_layers=12: residual_variance_last lower, x0.+; not shown to move this cause ",
        out,
    )
    assert "held-out depths" in out and "within depth, given val_loss" in out


def test_it_opens_with_a_row_for_each_setting_and_slope(results):
    lines = sparsedepth("effects", results, "--by", "val_loss")[0].splitlines()
    rows = [line.split() for line in lines]
    assert max(map(len, lines)) <= 160 and len(lines) < 60
    at_depth = [row for row in rows if row[-1:] == ["depth_scale=lns"] and row[0] in ("12", "24")]
    assert [(row[0], row[3]) for row in at_depth] == [("12", "-0.1010"), ("24", "-0.2020")]
    assert all("lower" in row for row in at_depth)
    (slope,) = [row for row in rows if row[:1] == ["all"]]
    assert float(slope[3]) == pytest.approx(-0.101) and "lower" in slope
    chain = sparsedepth("effects", results, "--part", "chain")[0].splitlines()
    assert any(line.startswith("residual_") and line.endswith("too few") for line in chain)


def test_as_a_table(results):
    rows = json.loads(sparsedepth("effects", results, "--by", "usefulness", "--format", "json")[0])
    assert {(row["question"], row["setting"], row["n_layers"]) for row in rows} == {
        ("setting", "depth_scale=lns", 12),
        ("setting", "depth_scale=lns", 24),
        ("depth", "n_layers=24", 24),
    }
    reason = "the runs of different seeds have equal values: there is no noise to judge by"
    assert {row["reason"] for row in rows} == {reason}
    assert {row["outcome"] for row in rows} == {"usefulness"}
    chain = json.loads(sparsedepth("effects", results, "--part", "chain", "--format", "json")[0])
    assert {"pooled", "within depth", "held-out skill"} <= {row["scope"] for row in chain}


def test_wrong_questions_are_one_line(results):
    assert "these runs vary: depth_scale, n_layers" in sparsedepth("effects", results, "--knob", "norm", code=2)[1]
    assert sparsedepth("effects", results, "--part", "lr", code=2)[1].count("Value error") == 0
    assert "not a measured number" in sparsedepth("effects", results, "--by", "nonsense", code=2)[1]


def test_unlike_numbers_of_swaps_side_by_side_are_told(tmp_path):
    for depth, scale, swaps in ((4, "none", 6), (4, "lns", 3), (8, "none", 28), (8, "lns", 28)):
        for seed in range(3):
            found = {"val_loss": 3.0 + 0.01 * seed, "permutation_score": 0.2 + 0.01 * seed, "permutation_swaps": swaps}
            make_run(tmp_path, RunConfig(n_layers=depth, depth_scale=scale, seed=seed), found)
    out, _ = sparsedepth("effects", tmp_path, "--by", "permutation_score")
    assert "permutation_score is of 3 and 6 swaps at 4 layers: fewer widen a run's interval" in " ".join(out.split())
    assert "swaps" not in sparsedepth("effects", tmp_path)[0]
