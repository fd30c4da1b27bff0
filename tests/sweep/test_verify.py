"""A recipe's verification with real runs: fresh seeds through the normal driver, a verified card, none done twice."""

import pytest
from support.runs_frame import runs_frame
from support.sweep_processes import markers
from support.tiny_sweep import BASE, corpus, sparsedepth, table

from sparsedepth.config.run import RunConfig
from sparsedepth.recipe.build_card import derive_card
from sparsedepth.recipe.card import read_card
from sparsedepth.recipe.files import write_page


@pytest.fixture
def card(tmp_path):
    """A card of made-up evidence that a learning rate of 1e-2 is better than the default."""
    base = {**BASE, "n_layers": 2, "corpus": str(corpus(tmp_path)), "measures": ("loss",), "train_tokens": 128 * 10}
    cells = [{"lr": 1e-3}, {"lr": 1e-2}]
    runs = runs_frame(
        (RunConfig(**{**base, **cell}, seed=seed), {"val_loss": 5 - i + 0.001 * ((seed + i) % 3)})
        for i, cell in enumerate(cells)
        for seed in range(3)
    )
    made = derive_card(runs)
    assert [one.setting for one in made.recipe.changes] == ["lr=0.01"]
    return write_page(tmp_path / "recipe.yaml", made)[0]


def test_a_true_rule_is_confirmed_on_fresh_seeds(card, tmp_path):
    """Ten steps at a learning rate of 1e-3 learn little, and at 1e-2 a lot: whatever the seed."""
    out = tmp_path / "verification"
    said, _ = sparsedepth("recipe", "verify", card, "--out", out, "--workers", 1, "--runtime", "threads=1")
    assert "recipe vs baseline: confirmed on fresh seeds 3, 4, 5" in said
    runs = table(out)
    assert len(runs) == 6
    after = read_card(out / "recipe.card.json")
    assert set(after.verification.run_ids) == set(runs) and after.verification.seeds == (3, 4, 5)
    assert read_card(card).verification is None, "the old card is kept"
    assert "Verification: confirmed on fresh seeds 3, 4, 5" in (out / "recipe.card.md").read_text()
    before = markers(out)
    again, _ = sparsedepth("recipe", "verify", card, "--out", out, "--workers", 1)
    assert again.splitlines()[-2:] == said.splitlines()[-2:]
    assert markers(out) == before
