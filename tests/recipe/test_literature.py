"""Published tables beside a card: what agrees, what contradicts, and why the rest cannot be compared."""

import math

import pytest
from support.runs_frame import grid

from sparsedepth.config.run import RunConfig
from sparsedepth.recipe.card_text import literature_lines
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.literature import compare_with_papers, papers

WIGGLE = (0.0, 0.002, -0.001)


def recipe_of(axes, loss, objective="val_loss"):
    """The recipe of a sweep with three seeds, weight decay 0 unless varied."""

    def of(config):
        turn = config != RunConfig(seed=config.seed, weight_decay=0.0)
        return {objective: loss(config) + WIGGLE[(config.seed + turn) % 3]}

    runs = grid({"weight_decay": [0.0], **axes, "seed": [0, 1, 2]}, of)
    return derive(runs, objective=objective)


def verdicts(rows, words):
    return [row.verdict for row in rows if words in row.published]


def test_every_published_field_is_one_that_a_run_can_vary():
    for table in papers().tables:
        assert table.knob in RunConfig.model_fields
        assert len(table.effects()) == len(table.values) - 1
    assert {remark.field for remark in papers().remarks} <= {*RunConfig.model_fields}


def test_perplexities_become_nats():
    table = next(one for one in papers().tables if one.field == "depth_scale" and "1B" in one.source)
    assert table.effects() == [("lns", pytest.approx(math.log(15.71 / 17.02)))]


@pytest.mark.parametrize(("effect", "verdict"), [(-0.1, "agrees"), (0.1, "contradicts"), (0.0, "not comparable")])
def test_the_sign_decides(effect, verdict):
    recipe = recipe_of({"depth_scale": ["none", "lns"]}, lambda config: 3 + effect * (config.depth_scale == "lns"))
    rows = compare_with_papers(recipe)
    found = verdicts([row for row in rows if "nat/token" in row.published], "depth_scale lns vs none")
    assert found == [verdict] * 10  # table 1, table 4, and figure 1
    assert [row.why for row in rows if "before_norm" in row.published] == [
        "another choice: the card compares depth_scale=lns vs depth_scale=none"
    ]


@pytest.mark.parametrize(("effect", "verdict"), [(-0.1, "contradicts"), (0.1, "agrees")])
def test_a_vits_accuracy_stands_beside_its_loss_with_the_sign_turned(effect, verdict):
    """Table 5: LNS after the norms costs accuracy; nothing of a text is laid beside images, nor the other way round."""
    axes = {"architecture,corpus,batch_tokens,train_tokens": [("vit", "images:digits", 1088, 10880)]}
    loss = lambda config: 3 + (effect + 0.001 * config.seed) * (config.depth_scale == "lns")  # noqa: E731
    rows = compare_with_papers(recipe_of({**axes, "depth_scale": ["none", "lns"]}, loss))
    of_images = [row for row in rows if "points of accuracy" in row.published and row.contrast]
    assert [row.verdict for row in of_images] == [verdict] and "accuracy against our loss" in of_images[0].why
    of_text = [row for row in rows if "nat/token" in row.published and row.contrast]
    assert {row.verdict for row in of_text} == {"not comparable"} and "the table of a decoder" in of_text[0].why
    text = compare_with_papers(recipe_of({"depth_scale": ["none", "lns"]}, loss))
    (other,) = [row for row in text if "points of accuracy" in row.published and row.contrast]
    assert (other.verdict, other.why) == (
        "not comparable",
        "the card is of a decoder, the table of a vision transformer",
    )


@pytest.mark.parametrize(
    ("objective", "context", "verdict"),
    [
        ("val_loss", None, "agrees"),
        ("val_loss_common", 64, "not comparable"),
        ("val_loss_common", None, "not comparable"),
    ],
)
def test_contexts_are_compared_each_at_its_own_as_published(objective, context, verdict):
    """The published losses are each at the model's own length: at one for all a longer context gains less."""
    axes = {"seq_len": [64, 128], "eval_seq_len": [context]}
    rows = compare_with_papers(
        recipe_of(axes, lambda config: 3 - (0.1 + 0.001 * config.seed) * (config.seq_len == 128), objective)
    )
    assert verdicts(rows, "seq_len 2048 vs 1024: -0.0178") == [verdict]
    loss_table = next(row for row in rows if "2048 vs 1024: -0.0178" in row.published)
    assert (verdict == "agrees") == ("own length, as a card of val_loss does" not in loss_table.why)


def test_another_objective_is_not_comparable():
    recipe = recipe_of({"weight_decay": [0.0, 0.1]}, lambda config: 3 - config.weight_decay)
    rows = compare_with_papers(recipe)
    by = {row.published: row for row in rows}
    same = next(row for text, row in by.items() if text.startswith("weight_decay 0.1 vs 0.0: -0.05"))
    assert same.verdict == "agrees" and same.contrast.effect.mean == pytest.approx(-0.1)
    other = next(row for text, row in by.items() if "0.1 vs 0.0: +0.06 usefulness" in text)
    assert other.why == "the card's objective is val_loss, the table's usefulness"


def test_lengths_and_groups_compare_by_their_factor():
    length = recipe_of({"seq_len": [128, 256]}, lambda config: 3 - 0.1 * (config.seq_len == 256))
    found = [row for row in compare_with_papers(length) if row.verdict == "agrees"]
    assert {row.published.split(" vs")[0] for row in found} == {"seq_len 2048", "seq_len 4096"}  # factors 2 and 4
    groups = recipe_of({"n_kv_heads": [4, 1]}, lambda config: 3 + 0.1 * (config.n_kv_heads == 1))
    (row,) = [row for row in compare_with_papers(groups) if row.verdict == "contradicts"]
    assert row.published.startswith("group_size 4 vs 1")


def test_experts_compare_whatever_their_number():
    axes = {"n_experts,top_k": [(0, None), (8, 2)]}
    rows = compare_with_papers(recipe_of(axes, lambda config: 3 - 0.1 * (config.n_experts > 0)))
    assert verdicts(rows, "nat/token (equal active") == ["agrees", "agrees"]


def test_the_text_counts_and_puts_contradictions_first():
    recipe = recipe_of(
        {"depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1]},
        lambda config: 3 + 0.1 * (config.depth_scale == "lns") - config.weight_decay,
    )
    text = list(literature_lines(compare_with_papers(recipe)))
    assert text[0].startswith("2 agree, 10 contradict, ") and text[1].startswith("contradicts: depth_scale=lns")
    assert list(literature_lines([])) == ["no published table tests these settings"]


@pytest.mark.parametrize(("effect", "verdict"), [(-0.1, "contradicts"), (0.1, "agrees"), (0.0, "not comparable")])
def test_a_finding_that_says_which_way_is_weighed(effect, verdict):
    recipe = recipe_of({"depth_scale": ["none", "lns"]}, lambda config: 3 + effect * (config.depth_scale == "lns"))
    assert verdicts(compare_with_papers(recipe), "LNS did not help") == [verdict]


def test_grouped_heads_beside_the_findings_outside_the_papers():
    """Halving the key/value heads costs here 0.02: as in marin's bits per byte, and against 2603.15389's perplexity."""
    recipe = recipe_of({"n_heads": [4], "n_kv_heads": [4, 1]}, lambda config: 3 + 0.02 * (config.n_kv_heads == 1))
    by = {
        row.source.partition(":")[0]: row
        for row in compare_with_papers(recipe)
        if row.contrast and "usefulness" not in row.published
    }
    assert by["marin#4371"].verdict == by["marin#5151"].verdict == "agrees"
    assert by["marin#4371"].published_effect == pytest.approx(0.004) and "bit/byte" in by["marin#4371"].published
    assert by["2603.15389"].verdict == "contradicts"
