"""The tables that `effects` opens with: what stands in their heads, and how an unevenly tuned effect is marked."""

from dataclasses import replace

import pytest
from support.runs_frame import grid

from sparsedepth.effects.all_effects import measure_effects, measure_slopes
from sparsedepth.effects.intervals import estimate
from sparsedepth.effects.summary import chain_lines, effects_text, verdict_cell

TUNED = "each at its own tuned lr (0.001 -> 0.003)"


def effects(outcome="val_loss", effect=-0.5, **changes):
    runs = grid(
        {"depth_scale": ["none", "lns"], "seed": [0, 1, 2]},
        lambda config: {outcome: 3.0 + (effect + 0.001 * (config.seed - 1)) * (config.depth_scale == "lns")},
    )
    return [replace(contrast, **changes) for contrast in measure_effects(runs, outcome)]


def one_line(text):
    return " ".join(text.split())


def test_lr_is_named_where_each_side_has_its_own_and_did_not_choose_by_the_outcome():
    assert "includes the effect of lr" not in one_line(effects_text(effects(tuned=TUNED)))
    assert "includes the effect of lr" not in one_line(effects_text(effects("residual_variance_last")))
    variance = one_line(effects_text(effects("residual_variance_last", tuned=TUNED)))
    assert "so it includes the effect of lr on residual_variance_last (at equal lr: --detail)" in variance
    assert "a ratio above it, or below its inverse" in variance


@pytest.mark.parametrize(("effect", "verdict"), [(-0.5, "uneven tuning"), (0.0, "uneven tuning")])
def test_uneven_tuning_is_marked_whether_or_not_it_withholds_a_verdict(effect, verdict):
    text = one_line(effects_text(effects(effect=effect, tuning_flaw="the best lr is the highest tried")))
    assert verdict in text
    assert "uneven tuning, verdict withheld (depth_scale=lns at n_layers=12): the best lr is the highest tried" in text


def test_a_verdict_says_why_there_is_none():
    (measured,) = {c.setting: c for c in effects(effect=0.0) if c.has_pairs}.values()
    unknown, clear = estimate([]), estimate([0.2, 0.21, 0.22])
    verdicts = {
        "-": measured,
        "higher": replace(measured, effect=clear, floor=0.1, p_holm=0.01),
        "- noise": replace(measured, effect=clear, floor=0.3, p_holm=0.01),
        "- Holm": replace(measured, effect=clear, floor=0.1, p_holm=0.06),
        "few seeds": replace(measured, effect=replace(unknown, mean=0.1, n=1)),
        "unmeasured": replace(measured, effect=unknown),
    }
    assert {cell: verdict_cell(contrast) for cell, contrast in verdicts.items()} == {cell: cell for cell in verdicts}
    assert "too few for an interval" in one_line(effects_text([verdicts["few seeds"]]))
    assert "too few for an interval" not in one_line(effects_text([measured]))


def test_a_verdict_that_is_another_at_equal_lr_is_named_in_one_line():
    """Of its own lr LNS cannot be told from the baseline; at the baseline's it is higher, at 24 layers alone."""
    own = [replace(c, n_layers=depth) for c in effects(effect=0.0) if c.basis == "tokens" for depth in (12, 24)]
    at_one = [replace(c, basis="lr", tuned="") for c in effects(effect=0.3) if c.basis == "tokens"]
    same = [replace(c, basis="lr", n_layers=12) for c in effects(effect=0.0) if c.basis == "tokens"]
    text = effects_text([*own, *same, *(replace(c, n_layers=24) for c in at_one)], 200)
    (line,) = [line for line in text.splitlines() if "baseline's lr" in line]
    assert line.endswith("(intervals: --detail): depth_scale=lns higher (+0.3) at n_layers=24")


def test_columns_left_out_for_width_are_named():
    assert "left out" not in effects_text(effects(), 200)
    assert "columns that did not fit: seeds" in effects_text(effects(), 60)


def test_a_mean_over_other_settings_is_called_one():
    assert "averaged" not in effects_text(effects(), 120)
    axes = {"depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": [0, 1, 2]}
    crossed = grid(axes, lambda config: {"val_loss": 3 + 0.01 * config.seed})
    assert "at equal tokens, averaged over the other settings" in one_line(effects_text(measure_effects(crossed), 120))


def test_a_loss_is_of_an_image_where_the_corpus_holds_images():
    axes = {"depth_scale": ["none", "lns"], "n_layers": [4, 8], "seed": [0, 1, 2]}
    runs = grid(axes, lambda config: {"val_loss": 1 + 0.1 * config.seed}).assign(corpus="images:digits")
    assert {c.unit for c in measure_effects(runs)} == {"nat/image"}
    assert {slope.unit for slope in measure_slopes(runs)} == {"nat/image per doubling of n_layers"}
    assert effects_text(measure_effects(runs), 120).startswith("val_loss [nat/image], lower is better")
    assert {c.unit for c in measure_effects(runs.assign(corpus="stdlib"))} == {"nat/token"}


def test_the_chain_says_why_it_has_no_interval():
    runs = grid(
        {"depth_scale": ["none", "lns"], "n_layers": [4, 12], "seed": [0, 1]},
        lambda config: {"val_loss": 3.0 - config.n_layers / 100, "usefulness": config.n_layers / 24 + config.seed},
    )
    (table,) = chain_lines(runs)
    assert "of 2 combinations of settings" in one_line(table)
    assert "no interval: 2 combinations of settings, 6 are needed" in one_line(table)
    rows = [line.split() for line in table.splitlines() if line.startswith("usefulness ")]
    assert [row[-3:] for row in rows] == [["none", "too", "few"]] and "'too few' no interval" in one_line(table)
    assert "lo" not in table.split("verdict\n")[0].splitlines()[-1].split()
