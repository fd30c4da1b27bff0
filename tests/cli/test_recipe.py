"""`sparsedepth recipe DIR`, its card, the files it writes, and how each fails in one line."""

import json

import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of
from support.tiny_sweep import sparsedepth

from sparsedepth.store.packs import pack


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """LNS helps at 2, 3 and 4 layers."""
    folder = tmp_path_factory.mktemp("recipe") / "results"
    for depth in (2, 3, 4):
        for i, scale in enumerate(("none", "lns")):
            for seed in range(3):
                config = config_of(n_layers=depth, depth_scale=scale, seed=seed)
                loss = 3 - 0.1 * i + 0.001 * ((seed + i) % 3)
                summary = {"val_loss": loss, "tokens_trained": config.train_tokens, "params_total": 10}
                make_run(folder, config, summary)
    return folder


def test_a_folder_gives_a_recipe_its_card_and_its_score(results, tmp_path):
    out, _ = sparsedepth("recipe", results, "--holdout-depth", 4, "-o", tmp_path / "r.yaml")
    assert out.startswith("At 4 layers use depth_scale=lns: val_loss lower by 0.1 nat/token (0.")
    said = " ".join(out.split())
    assert "passed: in-sample with seeds (" in said
    assert "held-out depth (2, 3 layers recommend depth_scale=lns; confirmed at 4" in said
    assert "| depth_scale=lns | -0.1" in (tmp_path / "r.card.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"r.yaml", "r.card.md", "r.card.json"}
    same, _ = sparsedepth("recipe", "derive", results, "--depth", 4, "--objective", "loss")
    assert same.splitlines()[0] == out.splitlines()[0]


def test_depths_that_were_not_run_are_named(results):
    out, _ = sparsedepth("recipe", "--depth", 8, results)
    said = "At 8 layers, which were not run, by those at 4 and 3, use depth_scale=lns: "
    assert " ".join(out.split()).startswith(said)


def test_json_is_the_card(results, tmp_path):
    out, _ = sparsedepth("recipe", results, "--format", "json", "-o", tmp_path / "r.yaml")
    assert json.loads(out) == json.loads((tmp_path / "r.card.json").read_text())
    assert json.loads(out)["recipe"]["effect"]["setting"] == "depth_scale=lns"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{results}", "--holdout-depth", "3"), "--holdout-depth 3 needs"),
        (("{results}", "--depth", "0"), "--depth 0"),
        (("{results}", "-o", "{tmp}/absent/r.yaml"), "absent' does not exist; create it"),
        (("{results}", "-o", "{tmp}/r.json"), "r.json' must end in .yaml"),
        (("{results}", "--matched", "time"), "--matched 'time'"),
        (("verify", "{tmp}/absent.card.json", "--out", "{tmp}/o"), "does not exist"),
        ((), "DIR"),
    ],
)
def test_wrong_input_is_one_line(results, tmp_path, arguments, words):
    filled = [word.format(results=results, tmp=tmp_path) for word in arguments]
    _, err = sparsedepth("recipe", *filled, code=2)
    assert err.count("\n") == 1 and words in err and not list(tmp_path.iterdir())


def test_a_file_that_is_no_recipe_is_not_replaced(results, tmp_path):
    """A recipe, whose card lies beside it, is made anew; the command that trains it can be pasted."""
    mine = tmp_path / "my sweep.yaml"
    mine.write_text("name: mine")
    _, err = sparsedepth("recipe", results, "-o", mine, code=2)
    assert f"{mine} already exists and is not a recipe" in err and mine.read_text() == "name: mine"
    mine.unlink()
    for _ in range(2):
        out, _ = sparsedepth("recipe", results, "-o", mine)
    assert f"recipe: {mine}; train it with: sparsedepth train '{mine}' --out {results}\n" in out
    pack(results, tmp_path / "pack")
    out, _ = sparsedepth("recipe", tmp_path / "pack", "-o", mine)
    assert f"sparsedepth train '{mine}' --out DIR\n" in out, "a pack is only read"
