"""The verification of a recipe: its configurations, its seeds, and the verdicts on made-up results."""

import pytest
from support.runs_frame import runs_frame

from sparsedepth.cli.recipe import _print_verification
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.recipe.build_card import build_card, derive_card
from sparsedepth.recipe.card import write_card
from sparsedepth.recipe.card_markdown import card_markdown
from sparsedepth.recipe.card_text import grade_text, negative_lines, trial_text, verification_text
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.trial import trials_of, with_trial
from sparsedepth.recipe.verify import configurations, fresh_seeds, sweep_fields, verified

WIGGLE = (0.0, 0.002, -0.001)


def results(loss, configs, seeds):
    """Runs of named configurations with a loss by name."""
    return runs_frame(
        (config.model_copy(update={"seed": seed}), {"val_loss": loss[name] + WIGGLE[(seed + i) % 3]})
        for i, (name, config) in enumerate(configs.items())
        for seed in seeds
    )


@pytest.fixture(scope="module")
def card():
    """LNS and experts, tested one by one and together."""
    moe = {"n_experts": 8, "top_k": 2}
    configs = {
        "none": RunConfig(weight_decay=0.0),
        "lns": RunConfig(weight_decay=0.0, depth_scale="lns"),
        "moe": RunConfig(weight_decay=0.0, **moe),
        "both": RunConfig(weight_decay=0.0, depth_scale="lns", **moe),
    }
    runs = results({"none": 3.0, "lns": 2.9, "moe": 2.8, "both": 2.7}, configs, [0, 1, 2])
    return derive_card(runs)


def test_the_verification_has_baseline_recipe_and_every_change_left_out(card):
    configs = configurations(card)
    moe = {"n_experts": 8, "top_k": 2}
    assert configs == {
        "baseline": RunConfig(weight_decay=0.0),
        "recipe": RunConfig(weight_decay=0.0, depth_scale="lns", **moe),
        "without depth_scale=lns": RunConfig(weight_decay=0.0, **moe),
        "without n_experts=8, top_k=2": RunConfig(weight_decay=0.0, depth_scale="lns"),
    }
    definition = build(SweepDefinition, sweep_fields(card, 3), "verification")
    assert definition.seeds == [3, 4, 5] == fresh_seeds(card, 3)
    planned = [definition.run_config(cell, 3) for cell in definition.grid()]
    assert [one.run_id for one in planned] == [c.model_copy(update={"seed": 3}).run_id for c in configs.values()]


def test_a_verification_confirms_the_recipe_and_tells_which_change_is_needed(card):
    loss = {"baseline": 3.0, "recipe": 2.8, "without depth_scale=lns": 2.8, "without n_experts=8, top_k=2": 3.0}
    after = verified(card, results(loss, configurations(card), [3, 4, 5]), [3, 4, 5])
    verification = after.held_out.verification
    assert (verification.outcome, verification.gain.effect.mean) == ("confirmed", pytest.approx(-0.2))
    assert {one.left_out: one.verdict for one in verification.ingredients} == {
        "depth_scale=lns": "not distinguishable",
        "n_experts=8, top_k=2": "needed",
    }
    assert (card.grade, after.grade) == ("C", "C") and "one width and one budget" in grade_text(after)
    assert (card.version, after.version, after.mechanism.word) == (1, 2, "predicted")
    assert any("depth_scale=lns is not distinguishable" in line for line in negative_lines(after))
    assert fresh_seeds(after, 3) == [6, 7, 8]


def test_the_changes_are_corrected_for_their_number_and_the_recipe_is_not(card):
    """Uncorrected, 8% of verifications of two changes without effect called one of them needed or harmful."""
    loss = dict.fromkeys(configurations(card), 3.0)
    verification = verified(card, results(loss, configurations(card), [3, 4, 5]), [3, 4, 5]).held_out.verification
    small, large = sorted((one.gain for one in verification.ingredients), key=lambda gain: gain.effect.p)
    assert small.p_holm == pytest.approx(min(1, 2 * small.effect.p)) and small.n_tested == large.n_tested == 2
    assert verification.gain.p_holm is None


@pytest.mark.parametrize(("gain", "again"), [(0.0052, "not confirmed"), (0.1, "confirmed")])
def test_verifying_until_a_recipe_is_confirmed_gets_harder_each_time(card, gain, again):
    """Runs that confirm the recipe with p = .02 do so twice; those of a large effect always."""
    latest, found, seeds = card, [], [3, 4, 5]
    loss = dict.fromkeys(configurations(card), 3.0) | {"recipe": 3.0 - gain}
    for _ in range(4):
        latest = verified(latest, results(loss, configurations(card), seeds), seeds)
        verification = latest.held_out.verification
        factor = (verification.gain.p_holm or verification.gain.effect.p) / verification.gain.effect.p
        found.append((verification.outcome, factor))
        assert verification.gain.effect.p < 0.025
    assert found == [("confirmed", 1), ("confirmed", 2), (again, pytest.approx(4)), (again, pytest.approx(8))]


def test_a_card_says_that_earlier_verifications_count(card, capsys):
    """An interval below 0 that confirms nothing: the third p of .02 is .085. Holm's correction is another one."""
    loss, seeds = dict.fromkeys(configurations(card), 3.0) | {"recipe": 3.0 - 0.0052}, [3, 4, 5]
    latest, shown = card, []
    for _ in range(3):
        latest = verified(latest, results(loss, configurations(card), seeds), seeds)
        terminal = verification_text(latest, latest.held_out.verification)
        (page,) = [line for line in card_markdown(latest).splitlines() if "Verification on fresh seeds" in line]
        assert terminal.partition("val_loss ")[2] == page.partition("recipe minus baseline: ")[2]
        _print_verification(card, latest)
        assert terminal.partition("val_loss ")[2] in capsys.readouterr().out.splitlines()[0]
        shown.append(terminal)
    assert shown[0].endswith(", 3 seeds")
    assert shown[1].endswith(", 3 seeds, p 0.043 after correction for 1 earlier verification")
    assert shown[2].endswith(", 3 seeds, p 0.085 after correction for 2 earlier verifications")
    assert "not confirmed" in shown[2] and "-0.00921 to -0.00119" in shown[2]


def test_only_the_fresh_seeds_count(card):
    """Seed 6, in which the recipe loses by 1, is none of them."""
    loss = dict.fromkeys(configurations(card), 3.0) | {"recipe": 2.8}
    runs = results(loss, configurations(card), [3, 4, 5, 6])
    runs.loc[(runs["seed"] == 6) & (runs["depth_scale"] == "lns") & (runs["n_experts"] == 8), "val_loss"] = 4.0
    after = verified(card, runs, [3, 4, 5]).held_out.verification
    assert (after.outcome, after.gain.n_seeds, after.gain.effect.mean) == ("confirmed", 3, pytest.approx(-0.2))
    assert set(after.run_ids) == set(runs.loc[runs["seed"] != 6, "run_id"])


def test_seeds_that_tune_a_verification_are_not_its_results(card):
    """Else each side's lr would be chosen on the runs that judge it."""
    tried = card.learning_rate.model_copy(update={"tried": {"lr": [0.001, 0.002, 0.004]}})
    fields = sweep_fields(card.model_copy(update={"learning_rate": tried}), 3)
    assert (fields["seeds"], fields["tuning_seeds"]) == ([3, 4, 5], [1003, 1004, 1005])
    definition = build(SweepDefinition, fields, "verification")
    assert not {*definition.tuning_seeds} & {*definition.seeds}


@pytest.mark.parametrize(("loss", "outcome"), [(3.0, "not confirmed"), (3.1, "refuted")])
def test_a_verification_that_fails_leaves_the_grade(card, loss, outcome):
    runs = results(dict.fromkeys(configurations(card), 3.0) | {"recipe": loss}, configurations(card), [3, 4, 5])
    after = verified(card, runs, [3, 4, 5])
    assert (after.held_out.verification.outcome, after.grade) == (outcome, "C")
    assert outcome in grade_text(after)


def test_a_diverged_recipe_is_refuted(card):
    loss = dict.fromkeys(configurations(card), 3.0) | {"recipe": 2.7}
    runs = results(loss, configurations(card), [3, 4, 5])
    lost = runs.index[(runs["depth_scale"] == "lns") & (runs["n_experts"] == 8)][0]
    runs.loc[lost, ["outcome", "val_loss"]] = ["diverged", None]
    assert verified(card, runs, [3, 4, 5]).held_out.verification.outcome == "refuted"


def test_nothing_to_try(card):
    runs = results({"none": 3.0}, {"none": RunConfig(weight_decay=0.0)}, [0, 1])
    with pytest.raises(ValueError, match="recommends nothing, so there is nothing to verify"):
        configurations(build_card(runs, derive(runs)))
    with pytest.raises(ValueError, match="seeds=2: an interval needs 3"):
        fresh_seeds(card, 2)


def test_a_card_knows_its_trial(card, tmp_path):
    """The verified card in a folder beside the results, of this very claim from these very runs, and no other."""
    loss = dict.fromkeys(configurations(card), 3.0) | {"recipe": 3.1}
    after = verified(card, results(loss, configurations(card), [3, 4, 5]), [3, 4, 5])
    there, trial = tmp_path / "results", tmp_path / "trial"
    for folder in (there, trial, tmp_path / "broken"):
        folder.mkdir()
    write_card(there / "recipe.yaml", card)
    (tmp_path / "broken" / "recipe.card.json").write_text('{"held_out": {"verification": {"seeds": [3]}}}')
    with pytest.warns(UserWarning, match="recipe.card.json is not a card of this version and is left out"):
        assert with_trial(card, [there]) == card
    (tmp_path / "broken" / "recipe.card.json").unlink()
    assert not trials_of([there])
    write_card(trial / "recipe.yaml", after.model_copy(update={"provenance": named(after, "elsewhere/results")}))
    write_card(
        trial / "recipe.yaml",
        (again := after.model_copy(update={"version": 3, "provenance": named(after, "elsewhere/results")})),
    )
    assert with_trial(card, [there]).version == again.version  # a third verification counts the second
    write_card(trial / "recipe.yaml", after.model_copy(update={"provenance": named(after, "elsewhere/results")}))
    known = with_trial(card, [there])
    assert (known.held_out, known.grade, known.version) == (after.held_out, after.grade, after.version)
    few = verified(card, results(loss | {"recipe": 2.7}, configurations(card), [3, 4, 5]), [3, 4, 5])
    more = verified(card, results(loss, configurations(card), range(3, 9)), range(3, 9))
    (tmp_path / "trial_again").mkdir()
    write_card(trial / "recipe.yaml", more.model_copy(update={"provenance": named(more, "elsewhere/results")}))
    write_card(tmp_path / "trial_again" / "recipe.yaml", few)
    assert with_trial(card, [there]).held_out == more.held_out  # three of its six seeds do not replace it
    (tmp_path / "trial_again" / "recipe.card.json").unlink()
    write_card(trial / "recipe.yaml", after.model_copy(update={"provenance": named(after, "elsewhere/results")}))
    other = card.model_copy(update={"recipe": card.recipe.model_copy(update={"run_ids": ("one",)})})
    assert with_trial(other, [there]) == other
    ((folder, tried),) = trials_of([there])
    assert folder == trial and "refuted" in trial_text(folder, tried, 100)
    assert not trials_of([tmp_path / "others"])


def test_the_latest_of_several_trials_is_taken_though_it_has_fewer_seeds(card, tmp_path):
    loss = dict.fromkeys(configurations(card), 3.0) | {"recipe": 2.7}
    first = verified(card, results(loss, configurations(card), range(3, 9)), range(3, 9))
    second = verified(first, results(loss | {"recipe": 3.1}, configurations(card), [9, 10, 11]), [9, 10, 11])
    for name, trial in (("a", second), ("b", first)):
        (tmp_path / name).mkdir()
        write_card(tmp_path / name / "recipe.yaml", trial.model_copy(update={"provenance": named(trial, "x/results")}))
    (tmp_path / "results").mkdir()
    known = with_trial(card, [tmp_path / "results"])
    assert (known.version, known.held_out.verification.outcome) == (3, "refuted")


def named(card, folder):
    return card.provenance.model_copy(update={"folders": [folder]})
