"""The card: thirteen fields that say what the runs said, the grade they earn, and a file that is read back strictly."""

import json

import numpy as np
import pandas as pd
import pytest
from frames import grid

from sparsedepth.config.run import RunConfig
from sparsedepth.recipe.build_card import fill
from sparsedepth.recipe.card import Card, card_path, config_of, grade_of, passed, read_card, word_of
from sparsedepth.recipe.card_markdown import markdown, write_page
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.holdout import hold_out

AXES = {
    "n_layers": [12, 16, 24],
    "depth_scale": ["none", "lns"],
    "weight_decay": [0.0, 0.1],
    "n_kv_heads": [4, 1],
    "seed": [0, 1, 2],
}
FIELDS = [
    *("rule", "domain", "effects", "matched", "learning_rate", "mechanism", "confounds", "held_out", "interactions"),
    *("negative", "literature", "provenance", "grade"),
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
    return fill(runs, derive(runs), hold_out(runs, 24), ())


def test_all_thirteen_fields_are_there_and_on_the_page(card):
    assert list(Card.model_fields) == ["version", *FIELDS[:5], "tune", *FIELDS[5:]]
    page = markdown(card)
    assert [f"## {n}. " in page for n in range(1, 14)] == [True] * 13
    assert page.startswith("# Recipe card: grade A, version 1")


def test_rule_and_effects_are_unrounded(runs, card):
    recipe = derive(runs)
    assert config_of(card.rule.config) == recipe.config == RunConfig(n_layers=24, depth_scale="lns", weight_decay=0.1)
    assert config_of(card.rule.baseline) == RunConfig(n_layers=24, weight_decay=0.0)
    assert {change.setting for change in card.rule.changes} == {"depth_scale=lns", "weight_decay=0.1"}
    assert card.rule.expected_gain == sum(one.shrunk for one in recipe.changes)
    for effect, one in zip(card.effects, recipe.tested, strict=True):
        measured = one.contrast.effect
        assert (effect.mean, effect.lo, effect.hi) == (measured.mean, measured.lo, measured.hi)
        assert (effect.n_seeds, effect.noise, effect.floor) == (3, one.contrast.noise, one.contrast.floor)
        assert 0 <= effect.reliability <= 1 and effect.shrunk == pytest.approx(effect.reliability * effect.mean)


def test_domain_basis_and_learning_rate(card):
    assert (card.domain.place, card.domain.depths) == ("inside", [24])
    assert card.domain.values["n_layers"] == "24" and card.domain.values["optimizer"].startswith("AdamW, beta1 0.9")
    by = {one.setting: one for one in card.matched}
    assert by["n_kv_heads=1"].ratios["params_total"] == [0.9, 0.9] and by["n_kv_heads=1"].wall_clock == 0.8
    assert by["n_kv_heads=1"].equal["params_total"] is None and by["n_kv_heads=1"].equal["tokens"]["n"] == 12
    assert by["depth_scale=lns"].equal["flops"]["mean"] == pytest.approx(-0.05, abs=0.01)
    assert "lr was not tuned" in card.learning_rate[0]
    assert any("= 1e+04 steps" in line for line in card.learning_rate)
    assert any("AdamW's time scale" in line for line in card.confounds)


def test_tuning_is_told_with_what_was_tried():
    runs = sweep(lr=2e-3).assign(tuned_fields="lr", tuning="best")
    tried = runs[runs["seed"] == 0].assign(lr=1e-3, tuning="rejected", run_id="tried", val_loss=9.0)
    frame = pd.concat([runs, tried], ignore_index=True)
    card = fill(frame, derive(frame))
    assert card.tune == {"lr": [0.001, 0.002]}
    assert card.learning_rate[0].startswith("lr tuned for each configuration over 0.001, 0.002; best: 0.002; 0 runs of")


def test_held_out_interactions_negative_and_provenance(card):
    assert card.held_out.depth_outcome == "confirmed" and card.held_out.depth_test["fitted_on"] == [12, 16]
    assert card.held_out.depth_test["decision_accuracy"] > 0.8
    assert card.interactions.stack.startswith("stack run: against the baseline better")
    assert len(card.interactions.with_depth) == 3
    assert any(line.startswith("n_kv_heads=1 vs n_kv_heads=4: not distinguishable") for line in card.negative)
    assert card.provenance.hours == {"cpu": 36.0} and card.provenance.seeds == [0, 1, 2]
    assert len(card.provenance.run_ids) == 72 and card.provenance.manifests is None
    assert "--depth 24 --objective val_loss" in card.provenance.command


def test_an_intervention_earns_the_word_causes(runs, card):
    """LNS alone lowers variance and loss, and decay lowers variance too."""
    assert card.mechanism.supported and card.mechanism.word == "causes" and card.grade.letter == "A"
    (lns,) = card.mechanism.interventions
    assert (lns.link, lns.moves_link, lns.moves_objective) == ("residual_variance_last", "lower", "lower")
    still = runs.assign(residual_variance_last=runs["residual_variance_last"].where(runs["weight_decay"] == 0, 1.0))
    other = fill(still, derive(still), hold_out(still, 24))
    assert (other.mechanism.supported, other.mechanism.word, other.grade.letter) == (False, "predicts", "B")
    untested = fill(runs, derive(runs))
    assert (untested.mechanism.word, untested.grade.letter) == ("associated", "C")


def test_grades():
    assert grade_of("D", True, "confirmed", "confirmed").letter == "D"
    assert grade_of("C", False, None, None).letter == "C"
    assert grade_of("C", False, None, "confirmed").letter == "B"
    assert grade_of("C", True, None, "confirmed").letter == "A"
    assert grade_of("C", True, "confirmed", "refuted").letter == "C"
    assert grade_of("C", True, "not confirmed", "confirmed").letter == "C"
    assert not passed((None, "not tested")) and word_of(True, ("refuted",)) == "associated"


def test_advice_that_the_shallower_runs_did_not_give_is_not_confirmed(runs):
    late = runs.copy()
    gain = (late["n_kv_heads"] == 1) & (late["n_layers"] == 24)
    late.loc[gain, "val_loss"] -= 0.1
    card = fill(late, derive(late), hold_out(late, 24))
    assert len(card.rule.changes) == 3
    assert card.held_out.depth_outcome == "not confirmed" and card.grade.letter == "C"
    assert "advise otherwise" in card.held_out.depth_sentences[-1]


def test_a_card_survives_its_file_and_refuses_what_is_none(card, tmp_path):
    data, page = write_page(tmp_path / "recipe.yaml", card)
    assert (data.name, page.name) == ("recipe.card.json", "recipe.card.md")
    assert read_card(tmp_path / "recipe.yaml") == read_card(data) == read_card(page) == card
    assert card_path(tmp_path / "x").name == "x.card.json"
    values = json.loads(data.read_text())
    data.write_text(json.dumps(values | {"grades": "A"}))
    with pytest.raises(ValueError, match="unknown key 'grades'"):
        read_card(data)
    for text in ("[]", "{", '{"rule": 1}'):
        data.write_text(text)
        with pytest.raises(ValueError, match=r"recipe\.card\.json"):
            read_card(data)
    with pytest.raises(ValueError, match="does not exist; write one with"):
        read_card(tmp_path / "absent.yaml")


def test_names_of_a_store_are_no_markup(card):
    domain = card.domain.model_copy(update={"values": {"corpus": "a\n# <script>x</script>"}})
    page = markdown(card.model_copy(update={"domain": domain}))
    assert "<script>" not in page and "\n# <" not in page


def test_an_abstention_has_a_card_too():
    runs = grid({"weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}, lambda config: {"val_loss": 3 + 0.01 * config.seed})
    card = fill(runs, derive(runs))
    assert card.rule.abstained and card.rule.expected_gain is None and card.grade.letter == "C"
    assert "no recommendation" in markdown(card)


def test_values_tuned_apart_are_told_as_a_confound():
    runs = sweep(lr=2e-3).assign(tuned_fields="lr", tuning="best")
    runs.loc[runs["depth_scale"] == "lns", "lr"] = 4e-3
    told = [line for line in fill(runs, derive(runs)).confounds if line.startswith("lr was tuned")]
    assert len(told) == 1 and "to 0.002, 0.004" in told[0]
    alike = runs.assign(lr=2e-3)
    assert not any("tuned" in line for line in fill(alike, derive(alike)).confounds)
