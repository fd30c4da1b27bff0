"""The card: twelve fields that say what the runs said, the grade they earn, and a file that is read back strictly."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import grid

from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.plots.forest import forest_effects
from sparsedepth.recipe.build_card import build_card, derive_card
from sparsedepth.recipe.card import card_path, earned_word, grade_of, passed, read_card
from sparsedepth.recipe.card_markdown import card_markdown, write_page
from sparsedepth.recipe.card_text import (
    card_text,
    domain_texts,
    grade_text,
    holdout_statements,
    learning_rate_lines,
    negative_lines,
    stack_text,
    to_yaml,
)
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.comparison_rows import comparison_rows
from sparsedepth.recipe.conclusion import configuration_text, gain_and_cost, part_of, rule_text, valid_for
from sparsedepth.recipe.holdout import hold_out
from sparsedepth.recipe.provenance import provenance_of
from sparsedepth.recipe.tables import BEST_MEASURED, settings_text

AXES = {
    "n_layers": [8, 12, 16, 24],
    "depth_scale": ["none", "lns"],
    "weight_decay": [0.0, 0.1],
    "n_kv_heads": [4, 1],
    "seed": [0, 1, 2],
}
TITLES = [
    *("Rule", "Domain", "Effects", "What was matched", "Learning rate", "Mechanism", "Confounds", "Held-out test"),
    *("Interactions", "Negative and null results", "Provenance", "Grade"),
]


def sweep(**base):
    """LNS and decay lower the loss, and LNS the variance; one head of keys and values costs less and does nothing."""
    generator = np.random.default_rng(0)

    def of(config):
        lns, decay = config.depth_scale == "lns", config.weight_decay > 0
        return {
            "val_loss": 3 - 0.05 * lns - 0.03 * decay + 0.005 * generator.normal(),
            "residual_variance_last": float(np.exp(-1.0 * lns - 0.5 * decay + 0.01 * generator.normal())),
            "params_total": 1000 - 100 * (config.n_kv_heads == 1),
            "training_seconds": 10.0 - 2 * (config.n_kv_heads == 1),
            "seconds": 1800.0,
            "device": "cpu",
        }

    return grid(AXES, of, **base)


@pytest.fixture(scope="module")
def runs():
    return sweep()


@pytest.fixture(scope="module")
def card(runs):
    return derive_card(runs, holdout_depth=24)


def test_all_twelve_fields_are_on_the_page(card):
    page = card_markdown(card)
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## {n}. {title}" for n, title in enumerate(TITLES, 1)
    ]
    assert page.startswith("# Recipe card: grade C, version 1")


def test_a_card_opens_with_setting_gain_cost_grade_and_what_was_measured_beside_it(runs, card):
    """Both changes are the best configuration but for keys and values, which move nothing but noise."""
    lines = card_text(card, 120).splitlines()
    assert max(map(len, lines)) <= 120 and not any(run_id in "".join(lines) for run_id in card.recipe.run_ids)
    assert lines[0].startswith("At 24 layers: use ")
    opening = " ".join(lines[: lines.index("")])
    assert " (lr 0.001): val_loss -0.0" in opening and "at 1 x the baseline's parameters, " in opening
    assert opening.endswith("1 x its training time. Grade C; not yet verified on fresh seeds.")
    names, _, *rows = lines[
        lines.index("") + 1 : lines.index(next(line for line in lines if line.startswith("Grade ")))
    ]
    assert names.split() == ["configuration", "lr", "seeds", "val_loss", "lo", "hi", "params", "flops", "setting"]
    parts = [row.split("  ")[0] for row in rows if not row.startswith(" ")]
    assert [part for part in parts if part] == [
        "recommended",
        "baseline",
        "best measured",
        f"best measured: {BEST_MEASURED}",
    ]
    here = runs[runs["n_layers"] == 24]
    both = here[(here["depth_scale"] == "lns") & (here["weight_decay"] == 0.1) & (here["n_kv_heads"] == 4)]
    recommended, baseline, best = card.measured
    assert recommended.mean == pytest.approx(both["val_loss"].mean()) and recommended.n_seeds == 3
    assert best.mean == pytest.approx(here.groupby("cell_id")["val_loss"].mean().min())
    assert (recommended.setting, baseline.setting) == ("depth_scale=lns, weight_decay=0.1", "baseline")
    assert [line.split(":")[0] for line in lines if line.startswith(("Grade", "Verif"))] == ["Grade C", "Verification"]


def test_changes_that_were_not_run_together_gain_one_by_one(card):
    """Their sum is expected only, and the cost is that of both."""
    assert len(card.recipe.changes) == 2 and gain_and_cost(card).startswith("-0.0")
    stack = card.recipe.stack.model_copy(update={"against_baseline": None})
    apart = card.model_copy(update={"recipe": card.recipe.model_copy(update={"stack": stack})})
    gain, expected, cost = gain_and_cost(apart).split("; ")
    first, second = (change.contrast for change in card.recipe.changes)
    assert gain.startswith(f"each alone, not run together: {first.setting} -0.0") and f", {second.setting} -0.0" in gain
    assert expected == f"{card.recipe.expected_gain:+.3g} expected after shrinkage, if the effects add up"
    assert cost.startswith("at ")


def test_the_domain_lists_numbers_by_their_size(runs):
    domain = derive(runs.assign(seed=runs["seed"] * 6)).domain
    assert domain.values["seed"] == ("0", "6", "12") and dict(domain_texts(domain))["seed"] == "0, 6, 12"
    assert dict(domain_texts(derive(runs).domain))["seed"] == "0 to 2"


def test_what_was_not_run_at_the_depth_has_no_numbers(runs):
    beside = derive_card(runs, depth=32).measured
    assert [(row.parts, row.n_seeds, row.mean) for row in beside] == [
        (("recommended",), 0, None),
        (("baseline",), 0, None),
    ]


def test_recipe_and_effects_are_unrounded(runs, card):
    recipe = derive(runs)
    assert card.recipe == recipe
    assert recipe.config == RunConfig(n_layers=24, depth_scale="lns", weight_decay=0.1)
    assert recipe.baseline == RunConfig(n_layers=24, weight_decay=0.0)
    assert {change.contrast.setting for change in recipe.changes} == {"depth_scale=lns", "weight_decay=0.1"}
    assert recipe.expected_gain == sum(change.shrunk for change in recipe.changes)
    by_setting = rows_of(runs, 24)
    for one in recipe.candidates:
        assert one.contrast.effect.mean == by_setting[one.contrast.setting]["estimate"] and one.contrast.n_seeds == 3
        assert 0 <= one.reliability <= 1 and one.shrunk == pytest.approx(one.reliability * one.contrast.effect.mean)


def rows_of(runs, depth, outcome="val_loss"):
    """Setting -> its row of the frame `effects`."""
    effects = effects_frame(cells_of(runs, outcome))
    at_depth = effects[(effects["question"] == "setting") & (effects["n_layers"] == depth)]
    return {row["setting"]: row for row in at_depth.to_dict("records")}


def test_one_contrast_has_one_interval_in_effects_recipe_card_and_report():
    """Depth moves the loss by noise of its own, and one setting was run at one depth alone."""
    noise = np.random.default_rng(0).normal(size=999)

    def outcome(config):
        return {"val_loss": 3 + 0.03 * noise[int(config.run_id[:6], 16) % 999] * config.n_layers}

    axes = {"n_layers": [4, 8], "depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": range(3)}
    alone = grid({"n_layers": [4], "norm": ["sandwich"], "seed": range(3)}, outcome)
    runs = pd.concat([grid(axes, outcome), alone], ignore_index=True)
    drawn = forest_effects(runs)
    drawn = {(row["n_layers"], row["setting"]): row for row in drawn.to_dict("records")}
    for depth, n_settings in ((4, 3), (8, 2)):
        card, rows = derive_card(runs, depth), rows_of(runs, depth)
        tested = [candidate.contrast for candidate in card.recipe.candidates]
        assert len(tested) == n_settings
        for contrast in tested:
            row, effect = rows[contrast.setting], contrast.effect
            assert (effect.mean, effect.lo, effect.hi) == (row["estimate"], row["lo"], row["hi"])
            assert (contrast.p_holm, contrast.detectable) == (row["p_adjusted"], row["detectable"])
            assert drawn[depth, contrast.setting]["lo"] == row["lo"]
        assert [each.equal["tokens"] for each in card.matched] == tested


def test_images_are_counted_and_scored_as_images(runs):
    axes, vit = {"depth_scale": ["none", "lns"], "seed": range(3)}, {"corpus": "images:digits", "architecture": "vit"}
    vit |= {"batch_tokens": 1088, "train_tokens": 10880}
    images = grid(axes, lambda config: {"val_loss": 1.0 + config.seed, "val_accuracy": 0.75}, **vit)
    images["tokens_trained"] = 17 * 64
    recipe = derive(images)
    assert recipe.unit == "nat/image" and "64 images" in (text := valid_for(recipe.domain)) and "tokens" not in text
    assert "Not evidence for other images" in text
    assert {row.accuracy for row in comparison_rows(images, recipe)} == {0.75}
    assert {row.accuracy for row in comparison_rows(runs.assign(val_accuracy=0.5), derive(runs))} == {None}


def test_domain_basis_and_learning_rate(card):
    domain = card.recipe.domain
    assert (card.recipe.place, domain.depths, domain.ranges["n_layers"]) == ("inside", (24,), (24, 24))
    assert (domain.values["optimizer"], domain.values["beta1"]) == (("adamw",), ("0.9",))
    by = {one.setting: one for one in card.matched}
    contrast = next(one.contrast for one in card.recipe.candidates if one.contrast.setting == "n_kv_heads=1")
    assert contrast.ratios["params_total"] == (0.9, 0.9) and by["n_kv_heads=1"].wall_clock == 0.8
    assert by["n_kv_heads=1"].equal["params_total"] is None and by["n_kv_heads=1"].equal["tokens"].effect.n == 3
    assert by["depth_scale=lns"].equal["flops"].effect.mean == pytest.approx(-0.05, abs=0.02)  # three pairs
    lines = list(learning_rate_lines(card.learning_rate))
    assert "lr was not tuned" in lines[0] and any("= 1e+04 steps" in line for line in lines)
    assert any("AdamW's time scale" in line for line in card.confounds)


def test_tuning_is_told_with_what_was_tried():
    runs = sweep(lr=2e-3).assign(tuned_fields="lr", tuning="best")
    tried = runs[runs["seed"] == 0].assign(lr=1e-3, tuning="rejected", run_id="tried", val_loss=9.0)
    frame = pd.concat([runs, tried], ignore_index=True)
    tuned = derive_card(frame).learning_rate
    assert (tuned.tried, tuned.best) == ({"lr": [0.001, 0.002]}, {"lr": [0.002]})
    assert next(learning_rate_lines(tuned)).startswith(
        "lr tuned for each configuration over 0.001, 0.002; best: 0.002; 0 runs of"
    )


def test_held_out_depth_slopes_negative_and_provenance(card):
    assert card.held_out.depth_outcome == "confirmed" and card.held_out.depth_test.fitted_on == (8, 12, 16)
    assert card.held_out.depth_test.decision_accuracy > 0.8
    assert stack_text(card.recipe).startswith("run together: against the baseline better")
    assert [one.at_setting.depths for one in card.depth_slopes] == [(8, 12, 16, 24)] * 3
    assert "depth slope of val_loss" in card_markdown(card)
    assert any(line.startswith("n_kv_heads=1 vs n_kv_heads=4: not distinguishable") for line in negative_lines(card))
    assert card.provenance.hours == {"cpu": 48.0} and card.provenance.seeds == [0, 1, 2]
    assert len(card.provenance.run_ids) == 96 and card.provenance.manifests is None
    assert "--depth 24 --objective val_loss" in card.provenance.command
    assert card.provenance.node_hours is None and "node hours" not in card_markdown(card)


def test_node_hours_of_a_cluster_are_summed_over_the_runs_that_have_them(runs, card):
    on_nodes = [0.25, 0.5, *[None] * (len(runs) - 2)]
    made = provenance_of(runs.assign(node_hours=on_nodes), card.recipe, [])
    assert made.node_hours == 0.75
    assert "h on cpu; 0.75 node hours on a cluster" in card_markdown(card.model_copy(update={"provenance": made}))


def test_an_intervention_earns_a_word_of_its_own(runs, card):
    """LNS alone lowers variance and loss, and decay lowers variance too."""
    assert card.mechanism.supported_by == "depth_scale=lns" and card.mechanism.word == "intervention-backed"
    assert (card.grade, grade_text(card).rpartition("; ")[2]) == (
        "C",
        "one width and one budget, so at most grade C",
    )
    (lns,) = card.mechanism.interventions
    assert lns.intervention.moves == lns.moved.outcome == "residual_variance_last"
    assert (lns.moved.verdict, lns.effect.verdict) == ("lower", "lower")
    still = runs.assign(residual_variance_last=runs["residual_variance_last"].where(runs["weight_decay"] == 0, 1.0))
    other = derive_card(still, holdout_depth=24)
    assert (other.mechanism.supported_by, other.mechanism.word, other.grade) == (None, "predicted", "C")
    untested = derive_card(runs)
    assert (untested.mechanism.word, untested.grade) == ("in-sample", "C")


def test_grades(card):
    def wider(grade, **ranges):
        domain = card.recipe.domain.model_copy(update={"ranges": {**card.recipe.domain.ranges, **ranges}})
        return card.recipe.model_copy(update={"grade": grade, "domain": domain})

    several = wider("C", d_model=(64, 128))
    assert grade_of(wider("D", d_model=(64, 128)), True, ("confirmed", "confirmed")) == "D"
    assert grade_of(several, False, (None, None)) == "C"
    assert grade_of(several, False, (None, "confirmed")) == "B"
    assert grade_of(several, True, (None, "confirmed")) == "A"
    assert grade_of(several, True, ("confirmed", "refuted")) == "C"
    assert grade_of(several, True, ("not confirmed", "confirmed")) == "C"
    assert grade_of(wider("C", tokens_trained=(1e6, 1e7)), True, (None, "confirmed")) == "A"
    assert grade_of(wider("C"), True, ("confirmed", "confirmed")) == "C"  # one width and one budget
    assert not passed((None, "not tested")) and earned_word(card.recipe, True, ("refuted",)) == "in-sample"


def test_a_test_that_could_not_be_made_neither_confirms_nor_refutes():
    assert passed(("not tested", "confirmed")) and passed((None, "confirmed"))
    assert not passed(("not tested", "not confirmed")) and not passed((None, "not tested")) and not passed(())


def test_advice_that_the_shallower_runs_did_not_give_is_not_confirmed(runs):
    late = runs.copy()
    gain = (late["n_kv_heads"] == 1) & (late["n_layers"] == 24)
    late.loc[gain, "val_loss"] -= 0.1
    card = build_card(late, derive(late), hold_out(late, 24))
    assert len(card.recipe.changes) == 3
    assert card.held_out.depth_outcome == "not confirmed" and card.grade == "C"
    assert "do not recommend what" in dict(holdout_statements(card.held_out.depth_test, card.recipe))["Not confirmed"]


def test_a_card_survives_its_file_and_refuses_what_is_none(card, tmp_path):
    data, page = write_page(tmp_path / "recipe.yaml", card)
    assert (data.name, page.name) == ("recipe.card.json", "recipe.card.md")
    assert read_card(tmp_path / "recipe.yaml") == read_card(data) == read_card(page) == card
    assert card_path(tmp_path / "x").name == "x.card.json"
    values = json.loads(data.read_text())
    data.write_text(json.dumps(values | {"grades": "A"}))
    with pytest.raises(ValueError, match="unknown key 'grades'"):
        read_card(data)
    for text in ("[]", "{", '{"recipe": 1}'):
        data.write_text(text)
        with pytest.raises(ValueError, match=r"recipe\.card\.json"):
            read_card(data)
    with pytest.raises(ValueError, match="does not exist; write one with"):
        read_card(tmp_path / "absent.yaml")


def test_names_of_a_store_are_no_markup(card):
    domain = card.recipe.domain.model_copy(update={"values": {"corpus": ("a\n# <script>x</script> | `",)}})
    page = card_markdown(card.model_copy(update={"recipe": card.recipe.model_copy(update={"domain": domain})}))
    assert "- corpus: a # &lt;script>x&lt;/script> / '\n" in page


def test_an_abstention_has_a_card_too():
    runs = grid({"weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}, lambda config: {"val_loss": 3 + 0.01 * config.seed})
    card = derive_card(runs)
    assert card.recipe.abstained and card.recipe.expected_gain is None
    assert (card.grade, card.recipe.grade, card.mechanism.word) == (None, "C", None)
    page = card_markdown(card)
    assert page.startswith("# Recipe card: no recommendation, version 1\n")
    assert "Evidence level: **none** (nothing is recommended)" in page and "Expected gain" not in page
    graded = (
        "**none**: in-sample, several seeds; no held-out test. Nothing is recommended, so there is nothing to grade."
    )
    assert page.rstrip().endswith(graded)
    assert not any(line.startswith("Grade") for line in card_text(card).splitlines())


def test_an_abstention_for_what_it_measures_has_the_replicates_that_it_has():
    """Three seeds of one configuration, where nothing was varied: no advice, and no lack of replicates."""
    card = derive_card(grid({"seed": [0, 1, 2]}, lambda config: {"val_loss": 3 + 0.01 * config.seed}))
    assert "nothing was varied" in card.recipe.abstained and grade_text(card).startswith("in-sample, several seeds")
    alone = derive_card(grid({"seed": [0]}, lambda config: {"val_loss": 3.0}))
    assert grade_text(alone).startswith("in-sample, no replicates")


def test_an_abstention_says_what_the_baseline_reaches_and_what_could_not_be_seen():
    """Seeds 0, 1, 2 at 3.00, 3.01, 3.02 and back: mean 3.01, interval 3.01 -+ 4.303 * 0.01 / sqrt(3) = 0.0248."""

    def of(config):
        loss = 3 + 0.01 * (config.seed if config.weight_decay == 0.1 else 2 - config.seed)
        measured = {"val_loss": loss, "training_seconds": 90.0, "device": "cpu (x86_64)", "train_flops": 4e11}
        return measured | {"params_total": 248_000, "corpus": "task:state_tracking", "task_group": "S5"}

    card = derive_card(grid({"weight_decay": [0.1, 0.0], "seed": [0, 1, 2]}, of))
    (candidate,) = card.recipe.candidates
    seen = f"{candidate.contrast.detectable:.2g}"
    assert rule_text(card) == (
        "At 12 layers: keep the baseline (lr 0.001; val_loss 3.01 nat/token, 95% interval 2.99 to 3.03, 3 seeds; "
        "248k parameters, 4e+11 FLOPs, 1.5 min per run on CPU). The one change tested was not shown to help; "
        f"improvements below {seen} nat/token could have been missed."
    )
    assert valid_for(card.recipe.domain).startswith("task state_tracking S5, width 64, 248k parameters, ")
    assert valid_for(card.recipe.domain).endswith(" tokens, CPU. Not evidence for text or for larger models")


def test_an_interval_that_is_cut_at_0_says_so():
    """Losses 0.1, 0.2 and 0.6: mean 0.3, half-width 0.657."""
    losses = [0.1, 0.2, 0.6]
    axes = {"weight_decay": [0.1, 0.0], "seed": [0, 1, 2]}

    def of(config):
        return losses[config.seed if config.weight_decay == 0.1 else 2 - config.seed]

    card = derive_card(grid(axes, lambda config: {"val_loss": of(config), "chance_loss": 2.0}))
    assert "val_loss 0.3 nat/token, 95% interval 0 to 0.957, cut at 0, 3 seeds" in rule_text(card)
    assert "lo, hi: 95% interval over seeds, cut at 0\n" in card_text(card)
    far = derive_card(grid(axes, lambda config: {"val_loss": 3 + of(config)}))
    assert "cut at" not in card_text(far)


def test_a_change_that_helps_and_costs_more_is_named_with_its_reason(runs):
    dearer = runs.assign(params_total=1000 + 100 * (runs["depth_scale"] == "lns") + 100 * (runs["weight_decay"] > 0))
    card = derive_card(dearer, matched="params_total")
    assert card.recipe.abstained and "shown to help" not in rule_text(card)
    assert "No change is recommended: " in rule_text(card)
    assert "depth_scale=lns: it spends more params_total than the baseline" in rule_text(card)


def test_a_rate_that_others_rival_is_said_to_be_unsettled(card):
    baseline = part_of(card, "baseline")
    assert "not distinguishable" not in configuration_text(baseline, card.recipe)
    rivalled = baseline.model_copy(update={"lr": 0.006, "rivals": (0.0015, 0.003)})
    assert configuration_text(rivalled, card.recipe).startswith(
        "lr 0.006, not distinguishable from 0.0015 or 0.003; val_loss "
    )


def test_settings_are_shown_in_three_lists_with_what_they_cost(card):
    text = settings_text(card, 400)
    lists = dict(zip(("do", "dont", "unknown"), re.split(r"\n(?=Do |Don't |Not shown)", text)[1:], strict=True))
    assert (
        lists["do"].startswith("Do (shown to help):") and "depth_scale=lns instead of depth_scale=none" in lists["do"]
    )
    assert lists["dont"].startswith("Don't (shown to hurt):")
    (row,) = [line for line in text.splitlines() if line.strip().startswith("n_kv_heads=1 instead of n_kv_heads=")]
    assert "parameters x0.9" in row and "time x0.8" in row and row in lists["unknown"]
    assert "an effect of" in row and "would have been seen" in row


def test_a_held_out_test_of_an_abstention_is_told_with_its_prediction_error():
    """Nothing helps at 12 and 16 layers; at 24 it is the prediction that is tested."""
    quiet = grid(
        AXES, lambda config: {"val_loss": 3 + 0.01 * ((config.seed + config.n_layers + len(config.depth_scale)) % 3)}
    )
    card = derive_card(quiet, holdout_depth=24)
    test = card.held_out.depth_test
    assert card.recipe.abstained and not test.changes and test.prediction in ("passed", "failed", "undecided")
    made = "held-out test at 24 layers: no recommendation to confirm; prediction error "
    shown = f"{test.error:.3g} against {test.error_of_no_effect:.3g} for predicting no effect: {test.prediction}"
    for text in (card_text(card, 100), card_markdown(card), to_yaml(card).replace("#  ", "")):
        assert f"{made}{shown}" in " ".join(text.replace("# ", "").split())
        assert "no held-out test" not in text
    worse = test.model_copy(update={"error": 0.2, "error_of_no_effect": 0.1})
    sure = test.model_copy(update={"error": 0.1, "error_interval": (0.05, 0.15), "error_of_no_effect": 0.2})
    unsure = sure.model_copy(update={"error_interval": (0.0, 0.3)})
    assert [one.prediction for one in (worse, sure, unsure)] == ["failed", "passed", "undecided"]


def test_values_tuned_apart_are_told_as_a_confound():
    runs = sweep(lr=2e-3).assign(tuned_fields="lr", tuning="best")
    runs.loc[runs["depth_scale"] == "lns", "lr"] = 4e-3
    told = [line for line in derive_card(runs).confounds if line.startswith("lr was tuned")]
    assert len(told) == 1 and "to 0.002, 0.004" in told[0]
    alike = runs.assign(lr=2e-3)
    assert not any("tuned" in line for line in derive_card(alike).confounds)


def test_packages_that_differ_are_told_as_a_confound():
    runs = sweep(lr=2e-3).assign(packages='{"torch": "2.12.0"}')
    assert not any("packages" in line for line in derive_card(runs).confounds)
    runs.loc[runs["depth_scale"] == "lns", "packages"] = '{"torch": "2.13.0"}'
    (told,) = [line for line in derive_card(runs).confounds if "packages" in line]
    assert told.startswith("packages differ between the runs: torch 2.12.0 (") and "2.13.0 (" in told


def test_the_report_has_no_effect_on_a_degenerate_score():
    """Of a solved task: usefulness is divided by a loss of 0.001; its absolute form stands in its place."""
    runs = grid({"depth_scale": ["none", "lns"], "seed": [0, 1, 2]}, lambda config: {"val_loss": 0.001})
    scored = runs.assign(usefulness_loss_increase=1e5 + runs["seed"], affine_loss_added_without_first=runs["seed"])
    outcomes = set(forest_effects(scored)["outcome"])
    assert "affine_loss_added_without_first" in outcomes and "usefulness_loss_increase" not in outcomes


@pytest.mark.parametrize("n_diverged", [1, 2])
def test_one_diverged_run_is_said_and_two_withhold_the_verdict(n_diverged):
    """Differences of -.5 with deviations of .01: far beyond the noise."""

    def of(config):
        is_changed = config.weight_decay == 0.1
        loss = 3 + 0.01 * (config.seed if is_changed else 2 - config.seed) - 0.5 * is_changed
        return {"val_loss": loss, "outcome": "diverged" if is_changed and config.seed >= 6 - n_diverged else "ok"}

    card = derive_card(grid({"weight_decay": [0.1, 0.0], "seed": range(6)}, of))
    assert bool(card.recipe.changes) == (n_diverged == 1)
    assert ("1 run diverged" if n_diverged == 1 else "2 runs of the setting diverged") in one_line(card_text(card))


def one_line(text):
    return " ".join(text.split())
