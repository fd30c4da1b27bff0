import itertools
import math

import pytest
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of
from sparsedepth.store.best import best
from sparsedepth.store.connection import open_store
from sparsedepth.store.saved_queries import ask
from sparsedepth.store.setting import read_settings
from sparsedepth.words.best import heading, ranking_table

# loss of each seed, by depth and weight decay; None: the run diverged
LOSSES = {
    (12, 0.0): [3.0, 3.5, 4.0],
    (12, 0.1): [3.0, 3.25],
    (12, 0.3): [1.0, None],
    (12, 1.0): [2.5],
    (24, 0.1): [2.0],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    for (depth, decay), losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            config = RunConfig(n_layers=depth, weight_decay=decay, seed=seed)
            # a diverged run may have been measured at the end; the number must not count
            summary = {"val_loss": 0.5, "outcome": "diverged"} if loss is None else {"val_loss": loss}
            make_run(results, config, {**summary, "usefulness": None if loss is None else loss / 10})
    with open_store(results) as store:
        yield store


def columns(ranking, *names):
    places = [ranking.table.columns.index(name) for name in names]
    return [tuple(row[place] for place in places) for row in ranking.table.rows]


def test_cells_are_ranked_by_their_mean_and_diverged_ones_come_last(store):
    ranking = best(store, "val_loss", depth=12)
    assert columns(ranking, "rank", "weight_decay", "val_loss", "seeds", "diverged") == [
        (1, 1.0, 2.5, 1, 0),
        (2, 0.1, 3.125, 2, 0),
        (3, 0.0, 3.5, 3, 0),
        (4, 0.3, 1.0, 1, 1),
    ]
    assert (ranking.n_cells, ranking.n_runs, ranking.n_diverged) == (4, 8, 1)
    assert heading(ranking).startswith("val_loss [nat/token], lower is better")


def test_the_interval_is_students_over_seeds(store):
    spread = columns(best(store, depth=12), "lo", "hi")
    assert spread[0] == spread[1] == (None, None)  # one seed shows no spread, and two too little of it
    half = 4.30265 * 0.5 / math.sqrt(3)  # t(2), sd .5
    assert spread[2] == (pytest.approx(3.5 - half, abs=1e-5), pytest.approx(3.5 + half, abs=1e-5))


def test_an_interval_ends_where_the_quantity_does(tmp_path):
    for seed, loss in enumerate([0.1, 0.1, 0.6]):
        make_run(tmp_path, RunConfig(seed=seed), {"val_loss": loss, "usefulness": 1.0 - loss})
    with open_store(tmp_path) as store:
        ((lo, hi),) = columns(best(store), "lo", "hi")
        assert lo == 0 and hi > 0.6
        ((lo, hi),) = columns(best(store, "usefulness"), "lo", "hi")
        assert lo > 0 and hi == 1


def test_the_baseline_stands_beside_the_best(store):
    """No weight decay is the least sparse: it closes a list that ends before it, and is marked where it stands."""
    assert columns(best(store, depth=12, top=1), "rank", "weight_decay", "note") == [
        (1, 1.0, None),
        (3, 0.0, "baseline"),
    ]
    assert columns(best(store, depth=12, top=3), "note") == [(None,), (None,), ("baseline",)]
    assert "4 configurations, 2 shown (top 1 and the baseline), 8 runs" in heading(best(store, depth=12, top=1))


@pytest.mark.parametrize(
    "axes",
    [
        {"weight_decay": [0.01, 0.3, 0.1]},
        {"n_kv_heads": [1, 2, 4], "weight_decay": [1.0, 0.0]},
        {"n_experts": [8, 4], "seq_len": [64, 32]},
        {"depth_scale": ["lns", "none"], "norm": ["post", "pre"], "lr": [3e-3, 1e-3]},
        {"n_layers": [24, 12, 4], "n_kv_heads": [1, 4]},
    ],
)
def test_the_baseline_is_that_of_the_effects(axes, tmp_path):
    """One rule: `best` and figures mark the configuration that is the baseline of `effects`, the shallowest."""
    for values in itertools.product(*axes.values()):
        fields = dict(zip(axes, values, strict=True))
        experts = {"top_k": 2} if fields.get("n_experts") else {}
        make_run(tmp_path, RunConfig(n_heads=4, **fields, **experts), {"val_loss": 3.0})
    with open_store(tmp_path) as store:
        settings, runs = read_settings(store), store.frame("select * from runs")
    assert settings is not None
    rows = cells_of(runs, "val_loss").rows
    (run_id,) = rows[rows["setting"] == "baseline"].sort_values("n_layers")["run_id"][:1]
    (cell_id,) = runs.loc[runs["run_id"] == run_id, "cell_id"]
    assert cell_id == settings.baseline.cell_id


def test_high_is_better_where_the_glossary_says_so(store):
    ranking = best(store, "usefulness", depth=12, top=2)
    assert columns(ranking, "weight_decay", "usefulness") == [(0.0, pytest.approx(0.35)), (0.1, pytest.approx(0.3125))]
    said = "usefulness [share of layers], higher is better, mean over seeds with 95% interval"
    assert " ".join(heading(ranking).split()).startswith(said)


def test_only_what_varies_is_shown(store):
    shown = "rank cell_id weight_decay seeds diverged val_loss lo hi note"
    assert " ".join(best(store, depth=12).table.columns) == shown
    assert set(best(store).table.columns[2:4]) == {"n_layers", "weight_decay"}
    assert best(store, depth=24).table.columns[2] == "seeds"


def test_a_condition_narrows(store):
    ranking = best(store, where="weight_decay < 0.2 AND seed < 2 -- and so on")
    assert columns(ranking, "val_loss") == [(2.0,), (3.125,), (3.25,)]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("n_layers >", "syntax"),
        ("1=1) OR (1=1", "syntax error at or near"),
        ("seed = 0) GROUP BY ALL HAVING (1=1", "syntax error at or near"),
        ("1=1 /*", "unterminated"),
        ("model = ' OR (1=1", "unterminated"),
        ("1=1) -- and so on", "syntax error at or near"),
        ("'abc'", "Could not convert"),
    ],
)
def test_a_condition_that_is_wrong_is_named_and_stays_in_its_brackets(store, where, says):
    with pytest.raises(ValueError, match=says) as caught:
        best(store, depth=12, where=where)
    assert str(caught.value).startswith(f"where {where!r}: ")


def test_several_initial_models_of_one_seed_are_one_value(tmp_path):
    """Seed 0 from two initial models: 2.9 and 3.1, mean 3.0; seeds 1 and 2: 4.0 and 5.0; s = 1, t(2) = 4.30265."""
    runs = ((0, "a", 2.9), (0, "b", 3.1), (1, "a", 4.0), (2, "a", 5.0))
    for seed, start, loss in runs:
        config = RunConfig(seed=seed, start_weights=start * 12, start_cell="c" * 12)
        make_run(tmp_path, config, {"val_loss": loss})
    half = 4.30265 / math.sqrt(3)
    with open_store(tmp_path) as store:
        (row,) = columns(best(store), "val_loss", "lo", "hi", "seeds")
        assert row == (4.0, pytest.approx(4 - half, abs=1e-5), pytest.approx(4 + half, abs=1e-5), 3)
        (answer,) = ask(store, "best_per_depth").records()
        assert [answer[name] for name in ("lo", "hi", "seeds")] == [*row[1:]]


def test_equal_means_share_a_rank_and_cells_without_a_value_have_none(tmp_path):
    for decay, score in ((0.1, 0.5), (0.2, 0.5), (0.3, 0.25), (0.4, None)):
        make_run(tmp_path, RunConfig(weight_decay=decay), {"causal_score": score})
    with open_store(tmp_path) as store:
        ranking = best(store, "causal_score")
    assert columns(ranking, "rank", "causal_score") == [(1, 0.5), (1, 0.5), (3, 0.25), (None, None)]
    assert columns(ranking, "note")[-1] == ("no value",)
    assert ranking.settings[-1] == "weight_decay=0.4 (no value)"


def test_one_table_at_100_columns_with_what_differs_from_the_baseline(tmp_path, monkeypatch):
    """Six knobs at once: a line each, with the cost beside the loss; two seeds promise no interval."""
    monkeypatch.setenv("COLUMNS", "100")
    sparse = {"n_kv_heads": 1, "n_experts": 4, "top_k": 2, "depth_scale": "lns", "weight_decay": 1.0, "seq_len": 128}
    for seed in (0, 1):
        make_run(tmp_path, RunConfig(seed=seed), {"val_loss": 3.0, "train_flops": 100.0, "params_total": 1000})
        facts = {"val_loss": 2.0, "train_flops": 150.0, "params_total": 2500}
        make_run(tmp_path, RunConfig(seed=seed, **sparse), facts)
    with open_store(tmp_path) as store:
        ranking = best(store, "val_loss")
    lines = ranking_table(ranking, 100).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["rank", "seeds", "mean", "params", "flops", "setting"]
    assert "params, flops (training): relative to the baseline (1000, 100.0)" in heading(ranking).splitlines()
    assert lines[2].endswith("n_kv_heads=1, seq_len=128, n_experts=4, depth_scale=lns,")
    assert " 2.500  1.500 " in lines[2]
    assert lines[3].strip() == "weight_decay=1"
    assert lines[4].endswith("baseline") and " 1.000  1.000 " in lines[4]
    assert "(an interval needs 3 seeds)" in heading(ranking)
    assert (
        ranking_table(ranking, 80).endswith("columns that did not fit: cell_id")
        and "cell_id" not in ranking_table(ranking, 80)[:80]
    )
    assert max(map(len, ranking_table(ranking, 80).splitlines())) <= 80


def test_two_folders_say_where_each_configuration_comes_from(tmp_path):
    make_run(tmp_path / "one", RunConfig(), {"val_loss": 3.0})
    make_run(tmp_path / "two", RunConfig(seed=1), {"val_loss": 3.5})
    make_run(tmp_path / "two", RunConfig(weight_decay=0.3), {"val_loss": 2.0})
    with open_store(tmp_path / "one", tmp_path / "two") as store:
        one, two = str(tmp_path / "one"), str(tmp_path / "two")
        assert columns(best(store), "source", "seeds") == [(two, 1), (f"{one}, {two}", 2)]
        assert [line.split()[2:4] for line in ranking_table(best(store), 100).splitlines()[2:]][1] == ["one,", "two"]
    with open_store(tmp_path / "two") as store:
        assert "source" not in best(store).table.columns


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"by": "val_los"}, "did you mean 'val_loss'"),
        ({"by": "lr"}, "no measured quantity 'lr'"),
        ({"by": "nope"}, "'nope'; `sparsedepth metrics` lists them"),
        ({"by": "weight_sparsity"}, "no better direction"),
        ({"where": "weight_deca > 1"}, "weight_decay"),
        ({"where": "true; DROP VIEW runs"}, "syntax error"),
        ({"where": "(SELECT content FROM read_text('/etc/passwd')) IS NULL"}, "not allowed"),
        ({"depth": 32}, "no run has n_layers = 32; the store has runs of n_layers 12, 24"),
        ({"where": "seed = 9"}, r"no run has \(seed = 9\); the store has runs of n_layers 12, 24"),
        ({"top": 0}, "top=0"),
    ],
)
def test_what_cannot_be_ranked_is_said(store, options, says):
    with pytest.raises(ValueError, match="(?s).*" + says) as caught:
        best(store, **options)
    assert "\n" not in str(caught.value)


def test_a_label_names_the_budget_where_it_differs_within_a_depth(tmp_path):
    for depth, tokens in itertools.product((2, 4), (81_920, 163_840)):
        make_run(tmp_path, RunConfig(n_layers=depth, train_tokens=tokens), {"val_loss": 3.0 - tokens / 1e6 - depth})
    make_run(tmp_path, RunConfig(n_layers=2, train_tokens=81_920, depth_scale="lns"), {"val_loss": 9.0})
    with open_store(tmp_path) as store:
        assert best(store, top=9).settings == (
            "baseline, train_tokens=163840",
            "baseline, train_tokens=81920",
            "baseline, train_tokens=163840",
            "baseline, train_tokens=81920",
            "depth_scale=lns, train_tokens=81920",
        )
