"""Rank correlations: by hand, against pandas, their invariances, and how often noise is called an association."""

import numpy as np
import pandas as pd
import pytest
from frames import grid, knob_of

from sparsedepth.effects import chain as module
from sparsedepth.effects.chain import LINKS, cautions, link, link_between, link_within, links_of, spearman
from sparsedepth.effects.knobs import find_knobs


def frame(x, y, n_layers=12, cell=None):
    n = len(x)
    return pd.DataFrame(
        {
            "run_id": [str(i) for i in range(n)],
            "cell_id": [str(i) for i in range(n)] if cell is None else cell,
            "n_layers": n_layers,
            "outcome": "ok",
            "usefulness": x,
            "val_loss": y,
        }
    )


def rho(x, y, stratum=None, weight=None):
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    stratum = np.zeros(len(x)) if stratum is None else np.asarray(stratum)
    weight = np.ones((1, len(x))) if weight is None else np.asarray([weight], dtype=float)
    return spearman(x, y, stratum, np.arange(len(x)), weight)[0]


def test_spearman_by_hand():
    # ranks 1 2 3 4 and 2 1 4 3: 1 - 6 x 4 / (4 x 15) = 0.6
    assert rho([10, 20, 30, 40], [2, 1, 9, 3]) == pytest.approx(0.6)
    assert rho([1, 2, 3], [1, 10, 1000]) == pytest.approx(1.0)
    assert np.isnan(rho([1, 2, 3], [5, 5, 5]))


def test_spearman_agrees_with_pandas_with_ties_and_weights():
    generator = np.random.default_rng(0)
    for _ in range(20):
        x, y = generator.integers(0, 6, size=(2, 30))
        expected = pd.Series(x).rank().corr(pd.Series(y).rank())
        assert rho(x, y) == pytest.approx(expected)
        times = generator.integers(0, 4, size=30)
        repeated = pd.Series(np.repeat(x, times)).rank().corr(pd.Series(np.repeat(y, times)).rank())
        assert rho(x, y, weight=times) == pytest.approx(repeated)


def test_within_depth_is_blind_to_what_depth_does_to_all():
    """Deeper models have a higher x and y (pooled: positive); at each depth y falls with x (within: -1)."""
    x, y, depth = [1, 2, 3, 11, 12, 13], [3, 2, 1, 13, 12, 11], [12] * 3 + [24] * 3
    assert rho(x, y) > 0.5
    assert rho(x, y, depth) == pytest.approx(-1.0)
    assert rho(x, y, depth) == pytest.approx(rho([1, 2, 3, 100, 200, 300], y, depth))


def test_a_link_counts_what_it_leaves_out():
    runs = frame([0.1, 0.2, np.nan, 0.4, 0.5], [4.0, 3.0, 2.0, 1.0, 9.0])
    runs.loc[4, "outcome"] = "diverged"
    found = link(runs, "usefulness", "val_loss", "pooled")
    assert (found.n_runs, found.n_cells, found.n_missing, found.n_diverged) == (3, 3, 1, 1)
    assert found.rho == pytest.approx(-1.0)
    assert (found.lo, found.verdict) == (None, "not distinguishable")  # three configurations are too few


def test_undefined_is_none_and_never_0():
    constant = link(frame([0.5] * 9, range(9)), "usefulness", "val_loss", "pooled")
    assert (constant.rho, constant.lo, constant.verdict) == (None, None, "not distinguishable")
    empty = link(frame([None] * 9, range(9)), "usefulness", "val_loss", "within depth")
    assert (empty.rho, empty.n_runs, empty.n_missing) == (None, 0, 9)


def test_a_strong_link_is_associated_and_the_bootstrap_is_repeatable():
    generator = np.random.default_rng(1)
    x = generator.normal(size=20)
    runs = frame(x, -x + 0.2 * generator.normal(size=20))
    found = link(runs, "usefulness", "val_loss", "pooled", seed=5)
    assert found.rho is not None and found.lo is not None and found.hi is not None
    assert found.lo <= found.rho <= found.hi < 0
    assert found.verdict == "associated"
    assert link(runs, "usefulness", "val_loss", "pooled", seed=5) == found


def test_the_links_are_those_that_were_measured():
    """At several context lengths the loss is the one taken at a shared one."""
    names = {name for pair in LINKS for name in pair}
    runs = frame(np.arange(8.0), np.arange(8.0)).assign(**{name: np.arange(8.0) for name in names})
    assert links_of(runs) == list(LINKS)
    assert links_of(runs.assign(usefulness=np.nan)) == [pair for pair in LINKS if "usefulness" not in pair]
    runs = runs.assign(seq_len=[128, 256] * 4, val_loss_common=np.arange(8.0))
    assert links_of(runs)[-1] == ("permutation_score", "val_loss_common")


def test_a_degenerate_score_is_no_link_and_its_sound_form_stands_in():
    """One block carries the causal score; the count is 0 everywhere, and no other form of it was measured."""
    names = dict.fromkeys((name for pair in LINKS for name in pair), 1 + np.arange(8.0))
    runs = frame(np.zeros(8), 1 + np.arange(8.0)).assign(**names).assign(usefulness=0.0)
    runs = runs.assign(causal_score_largest_share=0.9, causal_score_without_first=np.arange(8.0))
    effects = {effect for _, effect in links_of(runs)}
    assert "causal_score_without_first" in effects and not {"causal_score", "usefulness"} & effects
    assert {cause for cause, _ in links_of(runs)} >= {"causal_score_without_first", "permutation_score"}
    told = cautions(runs)
    assert any(line.startswith("causal_score is degenerate: one block") for line in told)
    weak = runs.assign(bigram_loss=0.5)
    assert not {"permutation_score", "causal_score_without_first"} & {name for pair in links_of(weak) for name in pair}


def test_noise_is_called_an_association_in_about_5_percent(monkeypatch):
    """8 configurations x 3 near-identical seeds. Drawing cells: about 5% of 200 (standard deviation 1.5%).
    Drawing runs, as if replicates were evidence, errs several times as often: the test can tell."""
    monkeypatch.setattr(module, "RESAMPLES", 300)
    generator = np.random.default_rng(2)
    by_cell = by_run = 0
    for _ in range(200):
        x, y = np.repeat(generator.normal(size=(2, 8)), 3, axis=1) + 0.05 * generator.normal(size=(2, 24))
        cells = [str(i // 3) for i in range(24)]
        by_cell += link(frame(x, y, cell=cells), "usefulness", "val_loss", "pooled").verdict == "associated"
        by_run += link(frame(x, y), "usefulness", "val_loss", "pooled").verdict == "associated"
    assert by_cell / 200 <= 0.10
    assert by_run / 200 >= 0.15


def test_a_partial_correlation_by_hand():
    """x and y both follow z and nothing else: correlated, but not given z."""
    # ranks: x 1 2 3 4, y 2 1 3 4, z 1 2 4 3: rho_xy = 0.8, rho_xz = 0.8, rho_yz = 0.6
    runs = frame([1, 2, 3, 4], [2, 1, 3, 4]).assign(causal_score=[1, 2, 4, 3])
    found = link(runs, "usefulness", "val_loss", "pooled", given="causal_score")
    assert found.rho == pytest.approx((0.8 - 0.8 * 0.6) / np.sqrt((1 - 0.64) * (1 - 0.36)))
    assert found.scope == "pooled, given causal_score"
    generator = np.random.default_rng(0)
    z = generator.normal(size=60)
    x, y = z + 0.3 * generator.normal(size=(2, 60))
    confounded = frame(x, y).assign(causal_score=z)
    assert link(confounded, "usefulness", "val_loss", "pooled").verdict == "associated"
    partial = link(confounded, "usefulness", "val_loss", "pooled", given="causal_score")
    assert partial.verdict == "not distinguishable"
    with_itself = link(confounded, "usefulness", "val_loss", "pooled", given="usefulness")
    assert (with_itself.rho, with_itself.lo) == (None, None)  # nothing is left of x


def test_within_and_between_knobs():
    """Within weight decay the score falls with usefulness; between knobs, settings that raise one raise the other."""

    def outcome(config):
        useful = config.weight_decay + 10 * (config.depth_scale == "lns") + 20 * (config.n_kv_heads == 1)
        return {"usefulness": useful, "val_loss": 3 - config.weight_decay + 10 * (useful >= 10) + 20 * (useful >= 20)}

    axes = {"weight_decay": [0.0, 0.1, 0.3], "depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": [0, 1]}
    runs = grid(axes, outcome)
    within = link_within(runs, knob_of(runs, "weight_decay"), "usefulness", "val_loss")
    assert (within.scope, within.rho, within.n_runs) == ("within weight_decay", pytest.approx(-1.0), 24)
    between = link_between(runs, find_knobs(runs), "usefulness", "val_loss")
    # (d usefulness, d loss): decay (.1, -.1), (.3, -.3); lns and kv heads (> 5, > 5) each
    assert (between.n_cells, between.n_runs) == (4, 24)
    assert between.rho is not None and 0 < between.rho < 1
    assert between.lo is None
    alone = runs[(runs["weight_decay"] == 0) & (runs["depth_scale"] == "none")]
    assert link_within(alone, knob_of(runs, "weight_decay"), "usefulness", "val_loss").n_runs == 0
