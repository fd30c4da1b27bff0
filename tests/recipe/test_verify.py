"""The verification of a recipe: its configurations, its seeds, and the verdicts on made-up results. The held-out test:
what the shallower depths recommend, at a depth that they did not see."""

from functools import cache

import pytest
from support.planted_recipes import cells, sweep
from support.runs_frame import runs_frame

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.effects.cells import cells_of
from sparsedepth.plan.tasks import Plan
from sparsedepth.recipe.build_card import derive_card, trials_of, with_trial
from sparsedepth.recipe.card import recipe_table, write_card
from sparsedepth.recipe.choose import Evidence, derive
from sparsedepth.recipe.verify import configurations, fresh_seeds, hold_out, verification_fields, verified
from sparsedepth.words.recipe import card_markdown, ingredient_texts, trial_text, verification_text

LNS, MOE = {"depth_scale": "lns"}, {"n_experts": 8, "top_k": 2}
WITHOUT_LNS, WITHOUT_MOE = "without depth_scale=lns", "without n_experts=8"
WIGGLE = (0.0, 0.002, -0.001)


def results(card, loss, seeds):
    """Runs of the configurations of a verification with a loss by name; by default 3."""
    return runs_frame(
        (config.model_copy(update={"seed": seed}), {"val_loss": loss.get(name, 3.0) + WIGGLE[(seed + i) % 3]})
        for i, (name, config) in enumerate(configurations(card).items())
        for seed in seeds
    )


@pytest.fixture(scope="module")
def card():
    """LNS and experts, tested one by one and together."""
    return derive_card(cells([({}, 3.0), (LNS, 2.9), (MOE, 2.8), ({**LNS, **MOE}, 2.7)], n_seeds=3))


def test_the_verification_has_baseline_recipe_and_every_change_left_out(card):
    configs = configurations(card)
    assert configs == {
        "baseline": RunConfig(),
        "recipe": RunConfig(**LNS, **MOE),
        WITHOUT_LNS: RunConfig(**MOE),
        WITHOUT_MOE: RunConfig(**LNS),
    }
    definition = build(SweepDefinition, verification_fields(card, 3), "verification")
    assert definition.seeds == [3, 4, 5] == fresh_seeds(card, 3)
    planned = [definition.run_config(cell, 3) for cell in definition.grid()]
    assert [one.run_id for one in planned] == [c.model_copy(update={"seed": 3}).run_id for c in configs.values()]


def test_a_verification_confirms_the_recipe_and_tells_which_change_is_needed(card):
    after = verified(card, results(card, {"recipe": 2.8, WITHOUT_LNS: 2.8}, [3, 4, 5]), [3, 4, 5])
    verification = after.verification
    assert (verification.outcome, verification.gain.estimate) == ("confirmed", pytest.approx(-0.2, abs=0.01))
    assert {one.left_out: one.verdict for one in verification.ingredients} == {
        "depth_scale=lns": "not shown to be needed",
        "n_experts=8": "needed",
    }
    assert any(text.startswith("without n_experts=8: +0.2") for text in ingredient_texts(after))
    assert (card.version, after.version) == (1, 2) and fresh_seeds(after, 3) == [6, 7, 8]
    fresh = {test.name: (test.outcome, test.text) for test in after.tests}["fresh seeds"]
    assert fresh == ("passed", "confirmed on seeds 3, 4, 5")


def test_a_recipe_at_equal_flops_can_be_run_though_its_tokens_differ():
    fewer = {**LNS, "train_tokens": 8192 * 255}
    card = derive_card(cells([({}, 3.0), (fewer, 2.9)]), matched="flops")
    assert card.recipe.changes[0].values == fewer
    planned = Plan(build(SweepDefinition, verification_fields(card, 3), "verification")).configs().values()
    assert [one.train_tokens for one in planned] == [8192 * 256, 8192 * 255] * 3


def test_three_changes_are_left_out_one_by_one():
    """Each change was never run alone on the fresh seeds: it is judged beside the two others."""
    kv = {"n_kv_heads": 1}
    runs = cells([({}, 3.0), (LNS, 2.9), (MOE, 2.8), (kv, 2.95), ({**LNS, **MOE}, 2.7), ({**LNS, **MOE, **kv}, 2.65)])
    card = derive_card(runs)
    assert len(card.recipe.changes) == 3
    loss = {"recipe": 2.7, WITHOUT_LNS: 2.8, WITHOUT_MOE: 2.6, "without n_kv_heads=1": 2.7}
    after = verified(card, results(card, loss, [4, 5, 6]), [4, 5, 6]).verification
    verdicts = {one.left_out: one.verdict for one in after.ingredients}
    assert verdicts == {"depth_scale=lns": "needed", "n_experts=8": "harmful", "n_kv_heads=1": "not shown to be needed"}


@pytest.mark.parametrize(("gain", "again"), [(0.0055, "not confirmed"), (0.1, "confirmed")])
def test_verifying_until_a_recipe_is_confirmed_gets_harder_each_time(card, gain, again):
    """Runs that confirm the recipe with a small p do so once or twice; those of a large effect always."""
    latest, found, seeds = card, [], [3, 4, 5]
    for _ in range(4):
        latest = verified(latest, results(card, {"recipe": 3.0 - gain}, seeds), seeds)
        effect = latest.verification.gain
        found.append((latest.verification.outcome, effect.p_adjusted / effect.p))
        assert effect.p < 0.05
    assert [factor for _, factor in found] == pytest.approx([1, 2, 4, 8]) or found[-1][1] < 8
    assert found[0][0] == "confirmed" and found[-1][0] == again


def test_seeds_that_chose_the_lr_are_not_fresh():
    """Results of seeds 0 to 4; seeds 5 and 6 tuned."""
    chosen = {"tuned_fields": "lr", "tuned_by": "val_loss"}
    rows = [
        (RunConfig(**fields, seed=seed), {"val_loss": loss + 0.01 * (seed % 3), "tuning": role, **chosen})
        for fields, loss in (({}, 3.0), (LNS, 2.5))
        for seed, role in [*((seed, "best") for seed in range(5)), (5, "tuning"), (6, "tuning")]
    ]
    assert fresh_seeds(derive_card(runs_frame(rows)), 3) == [7, 8, 9]


def test_a_card_says_that_earlier_verifications_count(card):
    latest, shown = card, []
    for _ in range(3):
        latest = verified(latest, results(card, {"recipe": 2.9945}, [3, 4, 5]), [3, 4, 5])
        text = verification_text(latest)
        assert text in card_markdown(latest, recipe_table(latest))
        shown.append(text)
    assert "after correction" not in shown[0]
    assert shown[1].endswith("after correction for 1 earlier verification")
    assert shown[2].endswith("after correction for 2 earlier verifications")


def test_only_the_fresh_seeds_count(card):
    """Seed 6, in which the recipe loses by 1, is none of them."""
    runs = results(card, {"recipe": 2.8}, [3, 4, 5, 6])
    runs.loc[(runs["seed"] == 6) & (runs["depth_scale"] == "lns") & (runs["n_experts"] == 8), "val_loss"] = 4.0
    after = verified(card, runs, [3, 4, 5]).verification
    assert (after.outcome, after.gain.seeds) == ("confirmed", 3)
    assert set(after.run_ids) == set(runs.loc[runs["seed"] != 6, "run_id"])


def tuned_card(card):
    return card.model_copy(update={"recipe": card.recipe.model_copy(update={"tried": {"lr": [0.001, 0.002, 0.004]}})})


def tuned_results(card, best_of_baseline):
    """The recipe is 0.2 lower; each configuration is tuned by three seeds, and lowest at 0.002 but for the baseline."""
    rows = []
    for i, (name, config) in enumerate(configurations(tuned_card(card)).items()):
        best = best_of_baseline if name == "baseline" else 0.002
        for lr in (0.001, 0.002, 0.004):
            for seed in (1003, 1004, 1005, *((3, 4, 5) if lr == best else ())):
                loss = (2.8 if name == "recipe" else 3.0) + 0.02 * abs(lr / best - 1) + WIGGLE[(seed + i) % 3]
                role = "rejected" if lr != best else "tuning" if seed > 1000 else "best"
                given = {"val_loss": loss, "tuned_fields": "lr", "tuned_by": "val_loss", "tuning": role}
                rows.append((config.model_copy(update={"seed": seed, "lr": lr}), given))
    return runs_frame(rows)


def test_a_baseline_at_the_end_of_its_grid_confirms_nothing(card):
    """Of two changes: the gain is judged alone, with the rule on the ends of a grid."""
    after = verified(tuned_card(card), tuned_results(card, 0.004), [3, 4, 5]).verification
    assert after.outcome == "not confirmed" and "the baseline's lr 0.004 is the highest tried" in after.gain.reason


def test_seeds_that_tune_a_verification_are_not_its_results(card):
    """Else each side's lr would be chosen on the runs that judge it. The curve of all values is fitted."""
    definition = build(SweepDefinition, verification_fields(tuned_card(card), 3), "verification")
    assert (definition.seeds, definition.tuning_seeds) == ([3, 4, 5], [1003, 1004, 1005])
    after = verified(tuned_card(card), tuned_results(card, 0.002), [3, 4, 5]).verification
    assert after.outcome == "confirmed" and after.gain.seeds == 3 and after.gain.lr == 0.002
    assert {one.verdict for one in after.ingredients} == {"needed"}


@pytest.mark.parametrize(("loss", "outcome"), [(3.0, "not confirmed"), (3.1, "refuted")])
def test_a_verification_that_fails_is_a_failed_test(card, loss, outcome):
    after = verified(card, results(card, {"recipe": loss}, [3, 4, 5]), [3, 4, 5])
    assert after.verification.outcome == outcome
    assert {test.name: test.outcome for test in after.tests}["fresh seeds"] == "failed"


@pytest.mark.parametrize(("n_diverged", "outcome"), [(1, "confirmed"), (2, "not confirmed")])
def test_one_diverged_run_is_said_and_two_confirm_nothing(card, n_diverged, outcome):
    runs = results(card, {"recipe": 2.7}, [3, 4, 5, 6])
    lost = runs.index[(runs["depth_scale"] == "lns") & (runs["n_experts"] == 8)][:n_diverged]
    runs.loc[lost, ["outcome", "val_loss"]] = ["diverged", None]
    after = verified(card, runs, [3, 4, 5, 6])
    assert (after.verification.outcome, after.verification.gain.diverged) == (outcome, n_diverged)


def test_nothing_to_try(card):
    with pytest.raises(ValueError, match="recommends nothing, so there is nothing to verify"):
        configurations(derive_card(cells([({}, 3.0)])))
    with pytest.raises(ValueError, match="seeds=2: an interval needs 3"):
        fresh_seeds(card, 2)


# Trials next to the results


def named(card, folder="elsewhere/results"):
    """The card as derived from a folder."""
    return card.model_copy(update={"provenance": card.provenance.model_copy(update={"folders": [folder]})})


def test_a_card_knows_its_trial(card, tmp_path):
    """The verified card in a folder beside the results, of this very claim from these very runs, and no other."""
    after = verified(card, results(card, {"recipe": 3.1}, [3, 4, 5]), [3, 4, 5])
    there, trial = tmp_path / "results", tmp_path / "trial"
    for folder in (there, trial, tmp_path / "broken"):
        folder.mkdir()
    write_card(there / "recipe.yaml", card)
    (tmp_path / "broken" / "recipe.card.json").write_text('{"verification": {"seeds": [3]}}')
    with pytest.warns(UserWarning, match="recipe.card.json is not a card of this version and is left out"):
        assert with_trial(card, [there]) == card
    (tmp_path / "broken" / "recipe.card.json").unlink()
    assert not trials_of([there])
    write_card(trial / "recipe.yaml", named(after).model_copy(update={"version": 3}))
    assert with_trial(card, [there]).version == 3  # a third verification counts the second
    write_card(trial / "recipe.yaml", named(after))
    known = with_trial(card, [there])
    assert (known.verification, known.tests, known.version) == (after.verification, after.tests, after.version)
    other = card.model_copy(update={"recipe": card.recipe.model_copy(update={"run_ids": ("one",)})})
    assert with_trial(other, [there]) == other
    ((folder, tried),) = trials_of([there])
    assert folder == trial and "It was refuted on fresh seeds 3, 4, 5" in " ".join(trial_text(folder, tried).split())
    assert not trials_of([tmp_path / "others"])


def test_the_latest_of_several_trials_is_taken_and_of_one_card_that_with_the_most_seeds(card, tmp_path):
    first = verified(card, results(card, {"recipe": 2.7}, range(3, 9)), range(3, 9))
    second = verified(first, results(card, {"recipe": 3.1}, [9, 10, 11]), [9, 10, 11])
    few = verified(card, results(card, {"recipe": 3.1}, [3, 4, 5]), [3, 4, 5])
    for name, trial in (("a", few), ("b", first)):
        (tmp_path / name).mkdir()
        write_card(tmp_path / name / "recipe.yaml", named(trial, "x/results"))
    (tmp_path / "results").mkdir()
    assert with_trial(card, [tmp_path / "results"]).verification == first.verification
    write_card(tmp_path / "a" / "recipe.yaml", named(second, "x/results"))
    known = with_trial(card, [tmp_path / "results"])
    assert (known.version, known.verification.outcome) == (3, "refuted")


# Held-out depth

AXES = {"n_layers": [8, 12, 24], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}


@cache
def held(gain_at_24, others=-0.1):
    """LNS gains .1 at 8 and 12 layers."""

    def loss(config):
        return (gain_at_24 if config.n_layers == 24 else others) * (config.depth_scale == "lns")

    runs = sweep(loss, AXES)
    found = Evidence(cells_of(runs, "val_loss"))
    return hold_out(found, 24, derive(runs, evidence=found)), runs


@pytest.mark.parametrize(("gain", "outcome"), [(-0.1, "confirmed"), (0.1, "refuted"), (0.0, "not confirmed")])
def test_a_recipe_of_the_shallower_depths_is_judged_at_the_held_out_one(gain, outcome):
    test, _ = held(gain)
    assert (test.fitted_on, test.changes, test.outcome) == ((8, 12), ("depth_scale=lns",), outcome)
    (lns,) = [each for each in test.predictions if each.setting == "depth_scale=lns"]
    assert lns.predicted.n_layers == 12 and lns.predicted.estimate == pytest.approx(-0.1, abs=0.03)
    assert lns.measured == test.gain and test.gain.estimate == pytest.approx(gain, abs=0.03)


def test_the_card_passes_only_if_both_say_the_same():
    _, runs = held(-0.1)
    card = derive_card(runs, holdout_depth=24)
    text = {test.name: (test.outcome, test.text) for test in card.tests}["held-out depth"]
    assert text[0] == "passed" and text[1].startswith("8, 12 layers recommend depth_scale=lns; confirmed at 24; mean")
    error, no_effect = (float(part.split()[-1]) for part in text[1].split("; ")[2].split(", "))
    assert error < no_effect
    _, late = held(-0.1, others=0.0)
    card = derive_card(late, holdout_depth=24)
    text = {test.name: (test.outcome, test.text) for test in card.tests}["held-out depth"]
    assert text[0] == "failed" and text[1].startswith("8, 12 layers recommend no change at 24")


def test_an_abstention_is_told_with_what_the_shallower_depths_said():
    _, runs = held(0.0)
    card = derive_card(runs, holdout_depth=24)
    assert not card.recipe.changes
    assert [(test.name, test.outcome) for test in card.tests] == [("held-out depth", "failed")]


@pytest.mark.parametrize("depth", [8, 12, 16])
def test_two_shallower_depths_are_needed(depth):
    _, runs = held(0.0)
    with pytest.raises(ValueError, match=f"--holdout-depth {depth} needs .* 8, 12, 24; try --holdout-depth 24"):
        derive_card(runs, holdout_depth=depth)
