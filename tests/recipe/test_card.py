"""The card: one record behind all texts, the tests that the recipe passed, and a file that is read back strictly."""

import json

import numpy as np
import pandas as pd
import pytest
from support.planted_recipes import cells, planted, sweep
from support.runs_frame import grid

from sparsedepth.config.load import build, parse_yaml, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.recipe.build_card import derive_card, provenance_of
from sparsedepth.recipe.card import MAX_BYTES, Card, Verification, card_path, read_card, recipe_table
from sparsedepth.recipe.files import to_yaml, write_page, write_recipe
from sparsedepth.recipe.verify import after, pair_fields
from sparsedepth.words.recipe import FINDINGS, ROWS, card_markdown, card_text, paragraph, sentence

TITLES = ["Rule", "Settings", "Tests", "Provenance"]
LNS, DECAY = {"depth_scale": "lns"}, {"weight_decay": 1.0}


def page_of(card):
    return card_markdown(card, recipe_table(card))


def joined(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def runs():
    """LNS lowers the loss at every depth, decay raises it; one head of keys and values does nothing."""
    axes = {"n_layers": [8, 12, 24], "depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": [0, 1, 2]}
    generator = np.random.default_rng(0)

    def of(config):
        loss = 3 - 0.05 * (config.depth_scale == "lns") + 0.005 * generator.normal()
        return {"val_loss": loss, "seconds": 1800.0, "device": "cpu"}

    return grid(axes, of)


@pytest.fixture(scope="module")
def card(runs):
    return derive_card(runs, holdout_depth=24)


# Texts


def test_a_card_opens_with_the_setting_its_gain_and_its_cost(card):
    effect = card.recipe.effect
    gain = f"{-effect.estimate:.3g} nat/token ({-effect.hi:.3g} to {-effect.lo:.3g})"
    assert sentence(card) == f"At 24 layers use depth_scale=lns: val_loss lower by {gain}, at equal FLOPs."
    text = card_text(card, recipe_table(card, ROWS), 100, FINDINGS)
    lines = text.splitlines()
    assert joined(text).startswith(sentence(card)) and len(lines) <= 23 and max(map(len, lines)) <= 100
    assert [row[0] for row in recipe_table(card).rows] == ["do", "do", "not shown"]
    assert not any(run_id in text for run_id in card.recipe.run_ids)


def test_a_depth_that_is_not_worth_its_cost_is_said_so_and_settings_share_flops():
    """At equal FLOPs 12 layers lose 0.3 to 4, and LNS takes more tokens for them."""
    generator = np.random.default_rng(1)

    def loss(config):
        deep, lns = config.n_layers == 12, config.depth_scale == "lns"
        value = 2 + 0.3 * deep - 0.1 * lns + 0.005 * generator.normal()
        tokens = 8192 * (1 + lns) / (3 if deep else 1)
        return {"val_loss": value, "train_flops": 1e12, "tokens_trained": tokens}

    axes = {"n_layers": [4, 12], "depth_scale": ["none", "lns"], "seed": range(4)}
    card = derive_card(grid(axes, loss), 12)
    assert card.recipe.matched == "flops" and card.recipe.changes[0].setting == "depth_scale=lns"
    first, second = sentence(card).split("FLOPs. ")
    assert first.startswith("At 12 layers use depth_scale=lns") and "12 layers are not worth their cost" in second
    assert derive_card(grid(axes, loss), 4).recipe.cost_of_depth == ""
    assert not derive_card(grid(axes, loss), 12, matched="tokens").recipe.changes


def test_a_depth_without_settings_names_the_depths_that_have_some(runs):
    """A sweep that has just begun: the deepest depth has its baseline alone."""
    begun = runs[(runs["n_layers"] < 24) | ((runs["depth_scale"] == "none") & (runs["n_kv_heads"] == 4))]
    told = derive_card(begun).recipe
    assert told.depth == 24 and told.abstained.endswith("settings were run at 8 and 12 layers (--depth)")


def test_an_abstention_says_what_would_have_been_seen_and_what_hurts():
    flat = derive_card(sweep(lambda config: 0.0, {"depth_scale": ["none", "lns"], "seed": range(3)}))
    size = flat.recipe.candidates[0].effect.detectable
    assert sentence(flat) == (
        f"At 12 layers nothing tried was shown to help; a gain of about {size:.2g} nat/token or more would "
        "probably have been seen."
    )
    assert flat.tests == ()
    axes = {"n_layers": [6, 12], "depth_scale": ["none", "lns"], "seed": range(3)}
    between = sentence(derive_card(sweep(lambda config: 0.0, axes), 9))
    assert between.startswith("At 9 layers, which were not run, by those at 6 and 12, nothing tried was shown to help")
    assert between.endswith(" or more would probably have been seen at 6.")
    worse = derive_card(cells([({}, 3.0), (LNS, 3.1), (DECAY, 3.0)]))
    assert "nothing tried was shown to help, 1 of 2 settings was shown to hurt; a gain" in sentence(worse)
    one_seed = derive_card(cells([({}, 3.0), (LNS, 3.1)], n_seeds=1))
    assert sentence(one_seed) == (
        "At 12 layers no recommendation: only one seed in common: an interval needs two, or three budgets "
        "(effects --as speedup)."
    )
    assert recipe_table(one_seed).rows[0][0] == "no interval"


def test_a_ratio_is_told_as_a_factor(card):
    effect = card.recipe.effect.model_copy(update={"unit": "ln ratio", "estimate": np.log(0.5), "lo": -1.0, "hi": -0.5})
    ratio = card.model_copy(update={"recipe": card.recipe.model_copy(update={"effect": effect})})
    assert "val_loss lower, ×0.5 (×0.368 to ×0.607), at equal FLOPs" in sentence(ratio)


def test_both_answers_are_given_where_an_effect_depends_on_another_setting():
    moe = {"n_experts": 4, "top_k": 2}
    card = derive_card(cells([({}, 3.0), (LNS, 2.7), (moe, 2.95), ({**LNS, **moe}, 3.15)]))
    assert "use depth_scale=lns: val_loss lower by 0.3" in sentence(card)
    assert any(line.startswith("But depth_scale=lns beside n_experts=4: higher, +0.2") for line in paragraph(card))


def test_diverged_runs_and_reasons_are_said():
    runs = cells([({}, 3.0), (LNS, 2.7)])
    runs.loc[runs.index[runs["depth_scale"] == "lns"][:1], ["outcome", "val_loss"]] = ["diverged", None]
    card = derive_card(runs)
    assert "Diverged: 1 run of depth_scale=lns." in paragraph(card) and "diverged" in recipe_table(card).columns


def test_many_settings_leave_room_for_every_list():
    """Twelve settings: the terminal has one of each list at least and says how many are left out; the page has all."""
    others = [({"weight_decay": 0.2 + 0.01 * i, "depth_scale": "none"}, 3.0 + 0.001 * (i % 2)) for i in range(10)]
    card = derive_card(cells([({}, 3.0), (LNS, 2.7), ({"n_kv_heads": 1}, 3.3), *others]))
    lines = card_text(card, recipe_table(card, ROWS), 100, FINDINGS).splitlines()
    assert len(lines) <= 23 and {"do", "don't", "not"} <= {line.split()[0] for line in lines if line}
    assert any("more settings: on the card" in line for line in lines)
    assert page_of(card).count("| not shown |") == 10


def test_the_domain_names_corpus_size_budget_and_device(card):
    seen = card.recipe.seen_on
    assert seen.startswith("corpus ") and seen.endswith(", width 64, 24k parameters, 2.1M tokens, CPU")


# Tests


def outcomes(card):
    return {test.name: test.outcome for test in card.tests}


def test_each_test_is_passed_failed_or_not_run(runs, card):
    assert outcomes(card) == {
        "in-sample with seeds": "passed",
        "held-out depth": "passed",
        "fresh seeds": "not run",
        "several scales": "not run",
        "equal cost": "passed",
    }
    assert outcomes(derive_card(runs))["held-out depth"] == "not run"
    weak = derive_card(runs.assign(bigram_loss=1.0))
    assert not weak.recipe.changes and not outcomes(weak)
    assert sentence(weak).startswith("No evidence about depth: the model is worse than a bigram table of")
    dear = derive_card(runs.assign(train_flops=np.where(runs["depth_scale"] == "lns", 1.2e9, 1e9)))
    assert outcomes(dear)["equal cost"] == "failed" and "at 1.2 times the FLOPs" in sentence(dear)


def test_several_scales_are_a_test_of_their_own():
    wide = {"d_model": 128}
    for loss, outcome in ((2.2, "passed"), (2.5, "failed"), (2.8, "failed")):
        card = derive_card(cells([({}, 3.0), (LNS, 2.7), (wide, 2.5), ({**wide, **LNS}, loss)]))
        assert outcomes(card)["several scales"] == outcome


# Files


def test_the_page_has_every_section(card):
    page = page_of(card)
    assert [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")] == TITLES
    assert page.startswith("# Recipe card, version 1") and sentence(card) in page
    assert card.provenance.hours == {"cpu": 18.0} and card.provenance.seeds == [0, 1, 2]
    assert "--depth 24 --objective val_loss" in card.provenance.command and "node hours" not in page


def test_node_hours_of_a_cluster_are_summed_over_the_runs_that_have_them(runs, card):
    on_nodes = [0.25, 0.5, *[None] * (len(runs) - 2)]
    made = provenance_of(runs.assign(node_hours=on_nodes), runs, card.recipe, [])
    assert made.node_hours == 0.75
    assert "h on cpu; 0.75 node hours on a cluster" in page_of(card.model_copy(update={"provenance": made}))


def test_names_from_the_store_cannot_inject_markup():
    card = derive_card(sweep(planted, corpus="hub:a <b>`x`|y", seed=2))
    assert "Seen only on corpus hub:a &lt;b>'x'/y" in page_of(card)


def test_the_yaml_is_the_run_config_with_its_evidence(tmp_path):
    card = derive_card(sweep(planted, corpus="hub:a b\u2028norm: post", seed=2))
    recipe = card.recipe
    write_recipe(tmp_path / "recipe.yaml", card)
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "recipe.card.json", "recipe.card.md"}
    assert build(RunConfig, read_yaml(tmp_path / "recipe.yaml"), "recipe") == recipe.config
    text = to_yaml(card)
    assert build(RunConfig, parse_yaml(text, "recipe"), "recipe") == recipe.config
    comments = joined(" ".join(line.lstrip("#") for line in text.splitlines() if line.startswith("#")))
    for wanted in (sentence(card), "corpus hub:a b\\u2028norm: post, width 64", "fresh seeds: ", *recipe.run_ids):
        assert wanted in comments, wanted
    assert not any(line.startswith("seed:") for line in text.splitlines())


def test_two_settings_never_run_together_come_with_the_sweep_that_tests_them(tmp_path):
    """Baseline, each alone, and both, on fresh seeds; lr is tuned again where it was."""
    runs = cells([({}, 3.0), (LNS, 2.7), (DECAY, 2.8)])
    card = derive_card(runs)
    write_recipe(tmp_path / "recipe.yaml", card)
    assert paragraph(card)[0] == (
        "weight_decay=1 is better alone too, but was not run with depth_scale=lns: -o writes the sweep that tests both."
    )
    definition = build(SweepDefinition, read_yaml(tmp_path / "recipe.pair.yaml"), "pair")
    planned = [definition.run_config(cell, 4) for cell in definition.grid()]
    assert definition.seeds == [4, 5, 6]
    assert planned == [RunConfig(seed=4, **cell) for cell in ({}, LNS, DECAY, {**LNS, **DECAY})]
    assert derive_card(runs.assign(tuned_fields="lr", tuned_by="val_loss")).recipe.tried == {"lr": [0.001]}
    tried = card.model_copy(update={"recipe": card.recipe.model_copy(update={"tried": {"lr": [0.001, 0.002, 0.004]}})})
    again = build(SweepDefinition, pair_fields(tried), "pair")
    assert again.tune == {"lr": [0.001, 0.002, 0.004]} and not {*again.tuning_seeds} & {*again.seeds}


def test_a_recipe_without_a_run_has_no_configuration():
    lost = derive_card(sweep(planted).assign(outcome="diverged"))
    assert sentence(lost) == "No recommendation: all 36 complete runs diverged: run them again with a lower lr."
    with pytest.raises(ValueError, match="no configuration to write: all 36 complete runs diverged"):
        to_yaml(lost)


def test_a_card_survives_its_file_and_refuses_what_is_none(card, tmp_path):
    data, page = write_page(tmp_path / "recipe.yaml", card)
    assert (data.name, page.name) == ("recipe.card.json", "recipe.card.md")
    assert read_card(tmp_path / "recipe.yaml") == read_card(data) == read_card(page) == card
    values = json.loads(data.read_text())
    for wrong, words in (
        ({**values, "verdict": "good"}, "verdict"),
        ({**values, "version": 0}, "version"),
        ([1], "it holds a list"),
    ):
        data.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=words):
            read_card(data)
    data.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="no recipe card"):
        read_card(data)
    data.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ValueError, match="a card may have"):
        read_card(data)
    assert card_path(page) == data


def test_the_same_rows_in_another_order_give_the_same_files():
    runs = sweep(planted)
    assert to_yaml(derive_card(runs)) == to_yaml(derive_card(runs.sample(frac=1, random_state=3)))


def test_settings_are_called_as_in_the_ranking():
    """An expert setting that differs from the baseline in three fields, of which one tells it from all others."""
    moe = {"n_experts": 4, "top_k": 2}
    runs = cells([({}, 3.0), (moe, 2.7)])
    (one,) = derive_card(runs).recipe.candidates
    assert one.setting == "n_experts=4" and {*moe} <= {*one.values}
    both = derive_card(pd.concat([runs, cells([({"n_experts": 4, "top_k": 4}, 2.9)])], ignore_index=True))
    names = {f"n_experts=4, top_k={top_k}, d_expert={width}" for top_k, width in ((2, 88), (4, 44))}
    assert {each.setting for each in both.recipe.candidates} == names


@pytest.mark.parametrize(("seeds", "version"), [((3, 4, 5), 1), ((3, 4, 5, 6), 2), ((6, 7, 8), 1)])
def test_more_seeds_are_another_verification(seeds, version):
    """The first was on seeds 3, 4, 5: the same again is no other look, and other seeds are those of another card."""
    card, test = Card.model_construct(version=1), Verification.model_construct(seeds=(3, 4, 5))
    assert after(card, Card.model_construct(version=2, verification=test), seeds).version == version
