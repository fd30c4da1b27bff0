"""A recipe's verification with real runs: fresh seeds through the normal driver, a verified card, none done twice."""

import pytest
from support.runs_frame import runs_frame
from support.sweep_processes import markers
from support.tiny_sweep import BASE, corpus, sparsedepth, table

from sparsedepth.config.run import RunConfig
from sparsedepth.recipe.build_card import build_card
from sparsedepth.recipe.card import read_card
from sparsedepth.recipe.card_markdown import write_page
from sparsedepth.recipe.choose import derive


@pytest.fixture
def card(tmp_path):
    """A card of made-up evidence that a learning rate of 1e-2 is better than one of 1e-6."""
    base = {**BASE, "n_layers": 2, "corpus": str(corpus(tmp_path)), "measures": ("loss",), "train_tokens": 128 * 10}
    cells = [{"lr": 1e-6}, {"lr": 1e-2}]
    runs = runs_frame(
        (RunConfig(**{**base, **cell}, seed=seed), {"val_loss": 5 - i + 0.001 * ((seed + i) % 3)})
        for i, cell in enumerate(cells)
        for seed in range(3)
    )
    recipe = derive(runs, baselines={"lr": 1e-6})
    assert [one.contrast.setting for one in recipe.changes] == ["lr=0.01"]
    return write_page(tmp_path / "recipe.yaml", build_card(runs, recipe))[0]


def test_a_true_rule_is_confirmed_on_fresh_seeds(card, tmp_path):
    """Ten steps at a learning rate of 1e-6 learn nothing, and at 1e-2 a lot: whatever the seed."""
    out = tmp_path / "verification"
    said, _ = sparsedepth("recipe", "verify", card, "--out", out, "--workers", 1, "--runtime", "threads=1")
    assert "recipe vs baseline: confirmed" in said and "grade C -> C" in said
    runs = table(out)
    assert len(runs) == 6
    after = read_card(out / "recipe.card.json")
    assert set(after.held_out.verification.run_ids) == set(runs)
    assert after.held_out.verification.seeds == (3, 4, 5) and after.grade == "C"
    assert read_card(card).grade == "C", "the old card is kept"
    assert "Verification on fresh seeds 3, 4, 5: confirmed" in (out / "recipe.card.md").read_text()
    before = markers(out)
    assert (
        sparsedepth("recipe", "verify", card, "--out", out, "--workers", 1)[0].splitlines()[-4:]
        == (said.splitlines()[-4:])
    )
    assert markers(out) == before
