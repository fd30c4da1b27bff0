"""Effects across scale: what persists, shrinks or reverses gets its verdict; decisions by hand."""

import numpy as np
import pytest
from support.runs_frame import grid

from sparsedepth.effects.scale import decision_accuracy, decisions, trends
from sparsedepth.effects.scale_text import prediction_sizes, scale_lines, scale_table

WIDTHS = (32, 64, 128, 256)


def worlds(effect, widths=WIDTHS, seeds=3, noise=0.002):
    """Runs with and without LNS at every width; `effect` of ln(width / 32) is what LNS does."""
    generator = np.random.default_rng(0)

    def outcome(config):
        size = config.d_model**2 * 100
        added = effect(np.log(config.d_model / 32)) if config.depth_scale == "lns" else 0.0
        loss = 4 - 0.1 * np.log(size) + added + noise * generator.standard_normal()
        return {
            "val_loss": loss,
            "params_total": size,
            "tokens_per_param": config.train_tokens / size,
            "train_flops": size * 6e6,
        }

    axes = {"d_model": widths, "depth_scale": ("none", "lns"), "seed": range(seeds)}
    return grid(axes, outcome, n_layers=4, n_heads=2, fit_tokens=1024, measure_tokens=1024)


def along(found, axis):
    (trend,) = [trend for trend in found if trend.axis == axis]
    return trend


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [
        (lambda x: -0.1 + 0 * x, "persists"),
        (lambda x: -0.1 + 0.03 * x, "shrinks"),
        (lambda x: -0.1 + 0.1 * x, "reverses"),
        (lambda x: 0 * x, "undecided"),
    ],
)
def test_a_planted_trend_gets_its_verdict(effect, verdict):
    trend = along(trends(worlds(effect), "val_loss", at={"parameters": 512**2 * 100}), "parameters")
    assert trend.verdict == verdict and trend.n_seeds == 3 and len(trend.scales) == 4
    slope = (effect(1.0) - effect(0.0)) * np.log(2) / 2  # parameters go with the width squared
    assert trend.slope.lo <= slope <= trend.slope.hi and trend.slope.hi - trend.slope.lo < 0.02
    assert trend.predicted.lo <= effect(np.log(16)) <= trend.predicted.hi
    assert trend.predicted.hi - trend.predicted.lo > trend.largest.hi - trend.largest.lo


def test_two_scales_have_no_trend_and_one_has_none_at_all():
    assert along(trends(worlds(lambda x: -0.1, WIDTHS[:2]), "val_loss"), "parameters").verdict == "too few scales"
    one = worlds(lambda x: -0.1, WIDTHS[:1])
    assert not trends(one, "val_loss")
    with pytest.raises(ValueError, match="too few scales: no setting was run at two widths"):
        list(scale_lines(one, "val_loss", None, {}))


def test_further_seeds_at_one_scale_do_not_hide_the_trend():
    """Three seeds at every scale and six at one: the three that all have are a trend, of 12 pairs."""
    runs = worlds(lambda x: -0.1 + 0.03 * x, seeds=6)
    uneven = runs[(runs["seed"] < 3) | (runs["d_model"] == 64)]
    trend = along(trends(uneven, "val_loss"), "parameters")
    alone = along(trends(runs[runs["seed"] < 3], "val_loss"), "parameters")
    assert trend == alone and (trend.verdict, trend.n_seeds, trend.n_pairs, len(trend.scales)) == ("shrinks", 3, 12, 4)


def test_verdicts_are_corrected_for_how_many_settings_were_tested():
    """LNS alone persists with a p of 0.02 to 0.05; beside eight values of weight decay that do nothing, it is one of
    nine that were asked."""
    generator = np.random.default_rng(0)

    def outcome(config):
        size = config.d_model**2 * 100
        sizes = {"params_total": size, "tokens_per_param": config.train_tokens / size, "train_flops": size * 6e6}
        lns = 0.03 * (config.depth_scale == "lns")
        return {"val_loss": 3 - lns + 0.01 * generator.standard_normal(), **sizes}

    settings = [("none", 0.1), ("lns", 0.1), *(("none", 0.1 + 0.01 * i) for i in range(1, 9))]
    axes = {"d_model": WIDTHS, "depth_scale,weight_decay": settings, "seed": range(3)}
    runs = grid(axes, outcome, n_layers=4, n_heads=2)
    alone = along(trends(runs[runs["weight_decay"] == 0.1], "val_loss"), "parameters")
    among = along(trends(runs, "val_loss", knob="depth_scale"), "parameters")
    assert 0.02 < alone.largest.p < 0.05 and among.largest == alone.largest
    assert (alone.verdict, alone.n_tested, among.verdict, among.n_tested) == ("persists", 1, "undecided", 9)


def test_what_a_choice_adds_to_the_size_is_no_scale():
    """LNS beside 0, 4, 8 and 16 experts, at one width: parameters grow, and no scale does."""

    def outcome(config):
        size = 1e5 * (1 + config.n_experts)
        added = -0.1 * (config.depth_scale == "lns") * (1 + config.n_experts)
        return {"val_loss": 3 + added, "params_total": size, "tokens_per_param": config.train_tokens / size}

    experts = [(0, None), (4, 2), (8, 2), (16, 2)]
    axes = {"n_experts,top_k": experts, "depth_scale": ["none", "lns"], "seed": range(3)}
    assert not trends(grid(axes, outcome, n_layers=4), "val_loss")


def test_tokens_that_follow_from_parameters_are_not_held():
    """Twenty tokens per parameter: the trend is that of both, and is found on either axis."""
    runs = worlds(lambda x: -0.1 + 0.03 * x)
    runs = runs.assign(tokens_trained=20 * runs["params_total"])
    for axis in ("parameters", "tokens"):
        assert along(trends(runs, "val_loss"), axis).verdict == "shrinks"


def test_rough_scales_widen_a_prediction_that_seeds_alone_would_not():
    rough = {32: 0.05, 64: -0.05, 128: 0.05, 256: -0.05}
    found = along(trends(worlds(lambda x: rough[round(32 * np.exp(x))], noise=1e-4), "val_loss"), "parameters")
    assert found.verdict == "undecided" and found.slope.hi - found.slope.lo > 0.05


def test_decisions_by_hand():
    assert decisions(np.array([1.0, 2.0, 2.0]), np.array([1.0, 3.0, 2.0])) == (2.5, 3)
    assert decisions(np.array([1.0, 2.0]), np.array([1.0, 1.0])) == (0.0, 0)
    decided = decision_accuracy(worlds(lambda x: -0.1 + 0.1 * x, noise=0.0), "val_loss")
    assert [decision.accuracy for decision in decided] == [0.0, 0.0, 1.0]  # better at 32 and 64, worse from 128 on
    assert decided[0].compute == pytest.approx((32 / 256) ** 2) and decided[0].n == 1


def test_the_text_and_the_table_and_a_wrong_size():
    runs = worlds(lambda x: -0.1 + 0 * x)
    text = "\n".join(scale_lines(runs, "val_loss", None, {"parameters": 1e8}))
    assert "persists" in text and "predicted at 1e+08" in text and "of the compute" in text
    table = scale_table(trends(runs, "val_loss"))
    assert {"slope_lo", "word", "predicted"} <= set(table.columns) and len(table.rows) == 2
    assert prediction_sizes(["tokens per parameter=20"]) == {"tokens per parameter": 20}
    for text in ("width=3", "parameters", "tokens=-1"):
        with pytest.raises(ValueError, match="must be NAME=SIZE"):
            prediction_sizes([text])
