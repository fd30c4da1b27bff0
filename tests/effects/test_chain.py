"""Rank correlations: by hand, against pandas, their invariances, and how often noise is called an association; and the
verdicts 'associated', 'predicts' and 'causes', each earned by its own evidence."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import grid

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.chain import (
    LINKS,
    LinkEvidence,
    Skill,
    cautions,
    chain_evidence,
    chain_of,
    interventions,
    is_unchanged,
    jackknife,
    link,
    links_of,
    rank_correlations,
    skill,
)
from sparsedepth.store.connection import open_store
from sparsedepth.words.chain import chain_lines


def frame(x, y, n_layers=12, unit=None):
    ids = [str(i) for i in range(len(x))]
    named = {"run_id": ids, "unit": ids if unit is None else unit, "n_layers": n_layers, "outcome": "ok"}
    return pd.DataFrame({**named, "usefulness": x, "val_loss": y})


def with_unit(runs):
    return runs.assign(unit=cells_of(runs, "val_loss").rows["setting"])


def rho(x, y, stratum=None, weight=None):
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    stratum = np.zeros(len(x)) if stratum is None else np.asarray(stratum)
    weight = np.ones((1, len(x))) if weight is None else np.asarray([weight], dtype=float)
    return rank_correlations([x, y], stratum, weight)[0]


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
    assert (found.n_runs, found.n_settings, found.n_missing, found.n_diverged) == (3, 3, 1, 1)
    assert found.rho == pytest.approx(-1.0)
    assert (found.lo, found.is_associated) == (None, False)  # three configurations are too few


def test_undefined_is_none_and_never_0():
    constant = link(frame([0.5] * 9, range(9)), "usefulness", "val_loss", "pooled")
    assert (constant.rho, constant.lo, constant.is_associated) == (None, None, False)
    empty = link(frame([None] * 9, range(9)), "usefulness", "val_loss", "within depth")
    assert (empty.rho, empty.n_runs, empty.n_missing) == (None, 0, 9)


def test_the_links_are_those_that_were_measured():
    """At several context lengths the loss is the one taken at a shared one."""
    names = {name for pair in LINKS for name in pair}
    runs = frame(np.arange(8.0), np.arange(8.0)).assign(**{name: np.arange(8.0) for name in names})
    assert links_of(runs) == list(LINKS)
    assert links_of(runs.assign(usefulness=np.nan)) == [pair for pair in LINKS if "usefulness" not in pair]
    runs = runs.assign(seq_len=[128, 256] * 4, eval_seq_len=128, val_loss_common=np.arange(8.0))
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


def test_the_jackknife_by_hand():
    """Values 1, 2, 3, 6 and their mean: it is the standard error of the mean, sqrt(14 / 3 / 4), of 3 df."""
    values = np.array([1.0, 2.0, 3.0, 6.0])
    lo, hi, p = jackknife(3.0, (values.sum() - values) / 3, 3) or (None, None, None)
    half = 3.182446 * np.sqrt(14 / 3 / 4)
    assert (lo, hi) == (pytest.approx(3 - half), pytest.approx(3 + half))
    assert p == 2 / 24  # Student's 0.069, but no less than four units can earn
    assert jackknife(3.0, np.array([1.0, np.nan]), 3) is None


def test_the_interval_of_a_link_has_one_df_less_for_each_quantity():
    """Seven configurations: t(5) = 2.57058, and given another quantity t(4) = 2.77645, on Fisher's scale."""
    runs = frame([1, 2, 3, 4, 5, 6, 7], [2, 1, 4, 3, 7, 5, 6]).assign(causal_score=[3, 1, 2, 5, 4, 7, 6])
    names = ["usefulness", "val_loss", "causal_score"]

    def partial(rows):
        r = rows[names].rank().corr().to_numpy()
        return (r[0, 1] - r[0, 2] * r[1, 2]) / np.sqrt((1 - r[0, 2] ** 2) * (1 - r[1, 2] ** 2))

    def plain(rows):
        return rows["usefulness"].rank().corr(rows["val_loss"].rank())

    for rho_of, given, t in ((plain, (), 2.57058), (partial, ("causal_score",), 2.77645)):
        found = link(runs, "usefulness", "val_loss", "pooled", given)
        without = np.arctanh([rho_of(runs.drop(index=i)) for i in range(7)])
        half = t * np.sqrt(6 / 7 * ((without - without.mean()) ** 2).sum())
        z = np.arctanh(rho_of(runs))
        assert (found.rho, found.lo, found.hi) == pytest.approx(
            (np.tanh(z), np.tanh(z - half), np.tanh(z + half)), abs=1e-5
        )


NULLS = {
    "independent cells": (0.0, False),
    "a configuration keeps its own at all depths": (1.0, False),
    "the same, one configuration far off": (1.0, True),
}


def called(world, n, n_units=8, depths=4, seed=0):
    """Share of n stores without any link that are called associated: by configuration, and by cell (unit x depth)."""
    kept, far = NULLS[world]
    generator = np.random.default_rng(seed)
    verdicts = []
    for _ in range(n):
        of_unit = (
            generator.normal(size=(2, n_units, 1)) + 8 * far * generator.permuted(np.eye(1, n_units), axis=1)[..., None]
        )
        cells = kept * of_unit + (0.3 if kept else 1.0) * generator.normal(size=(2, n_units, depths))
        x, y = (cells[..., None] + 0.1 * generator.normal(size=(*cells.shape, 3))).reshape(2, -1)
        place = np.repeat(np.arange(n_units * depths), 3)
        by = [place // depths, place]
        frames = [frame(x, y, n_layers=place % depths, unit=unit) for unit in by]
        verdicts.append([link(runs, "usefulness", "val_loss", "within depth").is_associated for runs in frames])
    return np.mean(verdicts, axis=0)


def test_a_configuration_is_one_observation():
    """What it keeps at four depths is no evidence four times: in 20 stores by cell four are called, else two."""
    by_unit, by_cell = called("a configuration keeps its own at all depths", 20)
    assert by_unit <= 0.1 < by_cell


@pytest.mark.slow
@pytest.mark.parametrize("n_units", [6, 8, 12, 20])
@pytest.mark.parametrize("world", NULLS)
def test_noise_is_called_an_association_in_at_most_5_percent(world, n_units):
    by_unit, by_cell = called(world, 500, n_units)
    print(f"{world}, {n_units} configurations: associated {by_unit:.3f}, by cell {by_cell:.3f}")
    assert by_unit <= 0.07  # of 500 draws: 5% and two standard deviations


def test_p_values_are_adjusted_over_the_links_of_a_scope():
    """A link of six configurations earns no less than p = 2 / 6! by itself, and twice that beside one of noise."""
    axes = {"depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1, 0.3], "seed": [0]}
    runs = grid(
        axes, lambda config: {"usefulness_loss_increase": 0.5 + config.weight_decay * (config.weight_decay - 0.2)}
    )
    runs = runs.assign(weight_sparsity=np.arange(6.0), residual_variance_last=np.arange(6.0, 0.0, -1.0))
    first, second = (each.links[0] for each in chain_evidence(cells_of(runs, "val_loss")))
    assert (first.p, first.is_associated) == (2 / 720, True)
    assert first.p_adjusted == pytest.approx(1 - (1 - 2 / 720) ** 2, rel=1e-3)
    assert not second.is_associated and second.p_adjusted == pytest.approx(second.p)
    assert not replace(first, p_adjusted=0.06).is_associated


def test_a_partial_correlation_by_hand():
    """x and y both follow z and nothing else: correlated, but not given z."""
    # ranks: x 1 2 3 4, y 2 1 3 4, z 1 2 4 3: rho_xy = 0.8, rho_xz = 0.8, rho_yz = 0.6
    runs = frame([1, 2, 3, 4], [2, 1, 3, 4]).assign(causal_score=[1, 2, 4, 3])
    found = link(runs, "usefulness", "val_loss", "pooled", given=["causal_score"])
    assert found.rho == pytest.approx((0.8 - 0.8 * 0.6) / np.sqrt((1 - 0.64) * (1 - 0.36)))
    assert found.scope == "pooled, given causal_score"
    generator = np.random.default_rng(0)
    z = generator.normal(size=60)
    x, y = z + 0.3 * generator.normal(size=(2, 60))
    confounded = frame(x, y).assign(causal_score=z)
    assert link(confounded, "usefulness", "val_loss", "pooled").is_associated
    partial = link(confounded, "usefulness", "val_loss", "pooled", given=["causal_score"])
    assert not partial.is_associated
    with_itself = link(confounded, "usefulness", "val_loss", "pooled", given=["usefulness"])
    assert (with_itself.rho, with_itself.lo) == (None, None)  # nothing is left of x


def test_the_unit_is_what_depth_seed_and_tuning_leave():
    axes = {"n_layers": [12, 24], "weight_decay": [0.0, 0.1], "depth_scale": ["none", "lns"], "seed": [0, 1]}
    runs = grid(axes, lambda config: {"val_loss": 3.0})
    runs["lr"] = np.where(runs["n_layers"] == 24, 1e-3, 2e-3)
    assert with_unit(runs.assign(tuned_fields="lr", tuning="best"))["unit"].nunique() == 4
    by_setting = with_unit(runs.assign(lr=np.where(runs["weight_decay"] > 0, 1e-3, 2e-3)))["unit"]
    assert by_setting.nunique() == 4 and not by_setting.isna().any()


def test_scores_that_are_degenerate_in_some_runs_share_one_line():
    runs = frame(np.zeros(8), 1 + np.arange(8.0)).assign(usefulness=1 + np.arange(8.0), causal_score=1 + np.arange(8.0))
    share = np.where(np.arange(8) < 2, 0.9, 0.1)
    runs = runs.assign(causal_score_largest_share=share, usefulness_loss_increase_largest_share=share, bigram_loss=99.0)
    (line,) = [line for line in cautions(runs) if "in some runs" in line]
    assert line == (
        "Degenerate in some runs: usefulness, causal_score, because one block carries more than half of it "
        "(2 of 8 runs)"
    )


# The evidence for a link

LINK = ("residual_variance_last", "usefulness_loss_increase")
AXES = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1, 0.3], "seed": range(3)}


def evidence(runs, link=LINK):
    """The evidence for one link, and p-values over all links of the runs."""
    (found,) = [
        one for one in chain_evidence(cells_of(runs, "val_loss")) if (one.within.cause, one.within.effect) == link
    ]
    return found


@cache
def found_by_lns():
    return evidence(runs_with())


def runs_with(sparser=0.0, slope=1.0, at_24=1.0, noise=0.02, seed=0):
    """LNS halves the variance; the score falls with its logarithm, `at_24` times as fast at depth 24."""
    generator = np.random.default_rng(seed)

    def outcome(config):
        lns = config.depth_scale == "lns"
        log_variance = 4 - np.log(2) * lns - config.weight_decay + noise * generator.normal()
        turn = at_24 if config.n_layers == 24 else 1.0
        return {
            "residual_variance_last": float(np.exp(log_variance)),
            "weight_sparsity": 0.2 + sparser * lns + 0.001 * generator.normal(),
            "attention_sparsity_rel": 0.5 + 0.001 * generator.normal(),
            "usefulness_loss_increase": 5 - slope * turn * log_variance + noise * generator.normal(),
        }

    return grid(AXES, outcome)


def test_a_cause_was_moved_alone_and_its_effect_with_it():
    found = found_by_lns()
    assert [tried.effect.n_layers for tried in found.interventions] == [12, 24]
    for tried in found.interventions:
        assert (tried.moved.verdict, tried.effect.verdict, tried.is_alone) == ("lower", "higher", True)
    assert found.verdict == "causes"


def test_an_intervention_that_moves_something_else_too_shows_nothing():
    found = evidence(runs_with(sparser=0.1))
    assert [one.is_alone for one in found.interventions] == [False, False]
    assert found.verdict == "predicts"
    unmeasured = runs_with().assign(attention_sparsity_rel=np.nan)
    assert not any(one.is_alone for one in interventions(cells_of(unmeasured, "val_loss"), *LINK))


def test_skill_by_hand():
    """Perfectly ordered at both depths: the other depth's slope of ranks is 1, and nothing is left."""
    axes = {"n_layers": [12, 24], "weight_decay": [0.0, 0.1, 0.3], "seed": [0]}
    runs = grid(axes, lambda config: {"usefulness": config.weight_decay, "val_loss": config.weight_decay**2})
    runs = with_unit(runs)
    assert skill(runs, "usefulness", "val_loss").value == pytest.approx(1.0)
    assert skill(runs[runs["n_layers"] == 12], "usefulness", "val_loss").value is None
    runs.loc[runs["n_layers"] == 24, "val_loss"] *= -1  # slopes 1 and -1: errors (2x)^2 against x^2
    assert skill(runs, "usefulness", "val_loss").value == pytest.approx(-3.0)


def test_noise_earns_no_word_and_what_was_not_measured_is_absent():
    runs = runs_with(slope=0.0, noise=1.0, seed=5)
    assert evidence(runs).verdict == "not distinguishable"
    assert [(one.within.cause, one.within.effect) for one in chain_evidence(cells_of(runs, "val_loss"))] == [
        ("weight_sparsity", "residual_variance_last"),
        ("attention_sparsity_rel", "residual_variance_last"),
        LINK,
    ]


def test_every_scope_is_there():
    runs = runs_with().assign(val_loss=np.arange(36) % 5, lr=1.0 + np.arange(36) % 3)
    scopes = [one.scope for one in evidence(runs).links]
    assert scopes == ["pooled", "within depth", "within depth, given lr", "within depth, given val_loss"]
    to_loss = evidence(runs, ("usefulness_loss_increase", "val_loss"))
    assert [one.scope for one in to_loss.links] == scopes[:3]


def test_the_verdict_of_a_link_needs_its_correlation_within_depth_and_a_skill_that_is_sure():
    """Depth moves both alike, which makes a pooled correlation and no link."""
    sure, unsure = (Skill(value=0.5, lo=lo, hi=0.9, depths=(12, 24)) for lo in (0.1, -0.1))
    pooled, within, *_ = found_by_lns().links

    def verdict(skill, **fields):
        return LinkEvidence((pooled, replace(within, **fields)), skill, ()).verdict

    assert [verdict(each) for each in (sure, unsure, sure._replace(lo=None))] == ["predicts"] + 2 * ["associated"]
    assert verdict(sure, lo=-0.1, hi=0.9) == "not distinguishable"


def test_an_intervention_that_was_tried_at_many_depths_needs_more():
    """Adjusted p .02 over the settings of a depth is no proof at one of three."""
    (tried, _) = found_by_lns().interventions
    tried = tried._replace(effect=tried.effect.model_copy(update={"p_adjusted": 0.02}))
    assert tried.confirms(2) and not tried.confirms(3)
    not_shown = tried._replace(effect=tried.effect.model_copy(update={"verdict": "lr decides"}))
    assert not not_shown.confirms(1)


def test_a_control_is_unchanged_if_its_whole_interval_is_within_a_tenth_of_the_baseline():
    """Of a baseline of 0.5 that is .05; of a ratio ln 1.1 = .0953, whatever the baseline."""
    control = found_by_lns().interventions[0].controls[0]

    def is_kept(mean, half, **fields):
        interval = {"estimate": mean, "lo": mean - half, "hi": mean + half}
        return is_unchanged(control.model_copy(update=interval | fields))

    share, ratio = {"unit": "share", "baseline_value": 0.5}, {"unit": "ln ratio", "baseline_value": 50.0}
    assert is_kept(0.0, 0.049, **share) and is_kept(-0.04, 0.009, **share)
    assert not is_kept(0.0, 0.051, **share) and not is_kept(-0.04, 0.011, **share) and not is_kept(0.04, 0.011, **share)
    assert is_kept(0.0, 0.095, **ratio) and not is_kept(0.0, 0.096, **ratio)
    assert not is_kept(0.0, 0.0, baseline_value=None)


def test_an_intervention_without_controls_is_no_evidence():
    """A gate on branches damps the variance, and nothing says what must stand still beside it."""
    generator = np.random.default_rng(0)
    axes = {**AXES, "depth_scale": ["none"], "residual_gate": ["none", "layerscale"]}

    def outcome(config):
        halved = np.log(2) * (config.residual_gate != "none")
        log_variance = 4 - halved - config.weight_decay + 0.02 * generator.normal()
        return {"residual_variance_last": float(np.exp(log_variance)), "usefulness_loss_increase": 5 - log_variance}

    found = evidence(grid(axes, outcome))
    assert (found.interventions, found.verdict) == ((), "predicts")


def test_the_interval_of_a_skill_by_hand():
    """The jackknife's over six combinations of settings, each left out at both depths: t(4) = 2.77645."""
    generator = np.random.default_rng(2)
    axes = {"n_layers": [12, 24], "weight_decay": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], "seed": [0]}
    runs = grid(axes, lambda c: {"usefulness": c.weight_decay, "val_loss": c.weight_decay + 0.2 * generator.normal()})
    runs = with_unit(runs)
    found = skill(runs, "usefulness", "val_loss")
    without = np.array(
        [skill(runs[runs["weight_decay"] != decay], "usefulness", "val_loss").value for decay in axes["weight_decay"]]
    )
    half = 2.77645 * np.sqrt(5 / 6 * ((without - without.mean()) ** 2).sum())
    assert (found.lo, found.hi) == pytest.approx((found.value - half, found.value + half), rel=1e-5)


def test_cautions_are_about_the_runs_that_are_compared():
    """Of the branches of text_flops those at one budget: 6 seeds of 3 depths."""
    with open_store(Path(__file__).parents[2] / "results" / "text_flops") as store:
        cells = cells_of(store.frame("select * from runs"), "val_loss")
    text = " ".join(next(chain_lines(chain_of(cells))).split())
    assert set(re.findall(r"of (\d+) runs\)", text)) == {"18"} and "18 runs of 1 setting" in text
