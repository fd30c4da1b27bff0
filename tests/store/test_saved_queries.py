"""Saved questions over a small store, answers worked out by hand."""

import pytest
from support.made_up_runs import make_run

from sparsedepth.config.presets import REMEDIES
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of, read_runs
from sparsedepth.plots import depth as depth_figure
from sparsedepth.quantities.quantity import WATCHED
from sparsedepth.store.best import best
from sparsedepth.store.connection import open_store
from sparsedepth.store.run_record import run_folder, save_record
from sparsedepth.store.saved_queries import QUESTIONS, answered, ask
from sparsedepth.store.schema import stored_fields
from sparsedepth.store.setting import configuration_of, read_settings, settings_of
from sparsedepth.store.subject import ImportedRun
from sparsedepth.words.best import cautions
from sparsedepth.words.differences import depth_text, setting_label
from sparsedepth.words.saved_queries import answer_text

CELLS = {
    # (n_layers, weight_decay, lr): loss of each seed (None: diverged), usefulness, train_flops
    (12, 0.0, 0.001): ([3.0, 3.1, 3.2], 0.5, 1e9),
    (12, 0.1, 0.001): ([2.9, 3.0], 0.4, 1e9),
    (12, 0.1, 0.002): ([2.5, None], 0.9, 1e9),
    (24, 0.0, 0.001): ([2.8], 0.3, 2e9),
    (24, 0.1, 0.001): ([2.85], 0.2, 2e9),
    (24, 0.1, 0.004): ([2.7], 0.3, 2e9),
    (24, 0.1, 0.002): ([2.6], 0.2, 2e9),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    results = tmp_path_factory.mktemp("questions")
    for (depth, decay, lr), (losses, usefulness, flops) in CELLS.items():
        for seed, loss in enumerate(losses):
            config = RunConfig(n_layers=depth, weight_decay=decay, lr=lr, seed=seed)
            summary = {"val_loss": loss, "usefulness": usefulness, "train_flops": flops, "weight_sparsity": 0.25}
            if loss is None:
                summary = {"outcome": "diverged", "diverged_step": 7, "diverged_cause": "loss is NaN", "val_loss": 0.1}
            make_run(results, config, {"tokens_trained": config.train_tokens, **summary})
    with open_store(results) as store:
        yield store


def rows(store, name, *columns):
    answer = ask(store, name)
    places = [answer.columns.index(column) for column in columns]
    return [tuple(row[place] for place in places) for row in answer.rows]


def test_the_best_at_each_depth_had_no_diverged_seed(store):
    assert rows(store, "best_per_depth", "n_layers", "weight_decay", "lr", "seeds", "val_loss", "lo") == [
        (12, 0.1, 0.001, 2, pytest.approx(2.95), None),
        (24, 0.1, 0.002, 1, 2.6, None),
    ]
    assert "losses" not in ask(store, "best_per_depth").columns


def test_the_pareto_front(store):
    """24 layers at lr .001 and decay 0 are beaten by lr .004 at equal usefulness; nothing else is."""
    assert rows(store, "pareto", "n_layers", "weight_decay", "lr") == [
        (12, 0.1, 0.001),
        (12, 0.0, 0.001),
        (24, 0.1, 0.002),
        (24, 0.1, 0.004),
    ]


def test_runs_of_one_seed_from_several_initial_models_count_once(tmp_path):
    """As in `best`: ten of seed 0 at 2, one each of seeds 1 and 2 at 3, against two seeds at 2.5."""
    losses = {(0.001, 0, model): 2.0 for model in range(10)} | {(0.001, 1, 0): 3.0, (0.001, 2, 0): 3.0}
    for (lr, seed, model), loss in (losses | {(0.002, 0, 0): 2.5, (0.002, 1, 0): 2.5}).items():
        start = {"start_weights": str(model) * 12, "start_cell": "a" * 12}
        make_run(tmp_path, RunConfig(n_layers=2, lr=lr, seed=seed, **start), {"val_loss": loss})
    with open_store(tmp_path) as store:
        assert rows(store, "best_per_depth", "lr", "seeds", "val_loss") == [(0.002, 2, 2.5)]
        curve = rows(store, "lr_curves", "lr", "runs", "val_loss", "note")
        assert curve == [(0.001, 12, pytest.approx(8 / 3), None), (0.002, 2, 2.5, "best, at the edge")]
        ((mean, sd),) = rows(store, "seed_noise", "val_loss", "val_loss_sd")[:1]
        assert (mean, sd) == (pytest.approx(8 / 3), pytest.approx(3**-0.5)) and mean == best(store).table.records()[1][
            "val_loss"
        ]


def test_a_learning_rate_curve_has_one_point_of_a_watched_training(tmp_path):
    for lr, losses in ((0.001, (9.0, 3.0)), (0.002, (5.0, 4.0))):
        for step, loss in enumerate(losses, start=1):
            config = {"n_layers": 2, "lr": lr, "train_tokens": 8 * step}
            run = ImportedRun(origin=WATCHED, cluster=str(lr), config=config, step=step)
            summary = {"outcome": "ok", "val_loss": loss, "steps": step, "tokens_trained": 8 * step}
            save_record(run_folder(tmp_path, run.run_id), run, summary, {}, {})
    with open_store(tmp_path) as store:
        assert rows(store, "lr_curves", "lr", "runs", "val_loss") == [(0.001, 1, 3.0), (0.002, 1, 4.0)]


def test_diverged_runs_with_their_cause(store):
    (found,) = rows(store, "diverged", "n_layers", "lr", "seed", "diverged_step", "diverged_cause")
    assert found == (12, 0.002, 1, 7, "loss is NaN")


def test_learning_rate_curves_say_where_the_best_stands(store):
    assert rows(store, "lr_curves", "n_layers", "weight_decay", "lr", "runs", "diverged", "val_loss", "note") == [
        (12, 0.1, 0.001, 2, 0, pytest.approx(2.95), "best, at the edge"),
        (12, 0.1, 0.002, 2, 1, 2.5, None),  # the mean of the one that did not diverge
        (24, 0.1, 0.001, 1, 0, 2.85, None),
        (24, 0.1, 0.002, 1, 0, 2.6, "best"),
        (24, 0.1, 0.004, 1, 0, 2.7, None),
    ]


def test_the_noise_between_seeds_by_hand(store):
    assert rows(store, "seed_noise", "weight_decay", "seeds", "val_loss_sd") == [
        (0.0, 3, pytest.approx(0.1)),
        (0.1, 2, pytest.approx(0.1 / 2**0.5)),
    ]


def test_the_mechanism_leaves_diverged_runs_out(store):
    found = rows(store, "mechanism", "n_layers", "val_loss", "diverged", "weight_sparsity", "usefulness")
    assert found[0] == (12, 2.5, 1, 0.25, 0.9)
    assert len(found) == len(CELLS)


def test_every_question_is_answered_where_nothing_varies(tmp_path):
    """One run: it is the best of its depth, and a row of the mechanism; nothing diverged, varies or is a trade-off."""
    make_run(tmp_path, RunConfig(), {"val_loss": 3.0})
    with open_store(tmp_path) as store:
        settings = read_settings(store)
        assert settings is not None and settings.varying == ()
        answers = {name: ask(store, name).records() for name in QUESTIONS}
    found = {name: [(row["n_layers"], row["seeds"], row["val_loss"]) for row in rows] for name, rows in answers.items()}
    one = [(RunConfig().n_layers, 1, 3.0)]
    assert {name: rows for name, rows in found.items() if rows} == {"best_per_depth": one, "mechanism": one}


def test_why_there_is_no_answer_is_said(tmp_path):
    with open_store(make_run(tmp_path, RunConfig(), {"val_loss": 3.0}).parent.parent) as store:
        assert "none: no configuration has a loss, usefulness (sparsedepth measure), " in answer_text(
            answered(store, "pareto")
        )
        assert answer_text(answered(store, "lr_curves")).endswith(
            "\nnone: no configuration was run at two values of lr"
        )
        with pytest.raises(ValueError, match=r"the saved questions are: .*, variance, depth$"):
            ask(store, "everything")


@pytest.fixture(scope="module")
def six_knobs(tmp_path_factory):
    """Each alone, and all together, at two depths, two seeds and two learning rates."""
    results = tmp_path_factory.mktemp("knobs")
    sparse = {"n_kv_heads": 1, "n_experts": 4, "top_k": 2, "depth_scale": "lns", "weight_decay": 1.0, "seq_len": 128}
    for depth in (12, 24):
        for knobs in ({}, {"n_kv_heads": 1}, {"depth_scale": "lns"}, sparse):
            for lr, seed in ((1e-3, 0), (1e-3, 1), (2e-3, 0)):
                facts = {"val_loss": 3 - len(knobs) / 7, "usefulness": 1 / depth, "residual_variance_last": 1234.5}
                facts |= {"train_flops": depth * 1e9 * (2 if knobs else 1), "attention_sparsity_rel": 0.123456}
                make_run(results, RunConfig(n_layers=depth, lr=lr, seed=seed, **knobs), facts)
    with open_store(results) as store:
        yield store


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_one_table_of_a_terminals_width(six_knobs, name, monkeypatch):
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = answer_text(answered(six_knobs, name)).splitlines()
        assert max(map(len, lines)) <= width and not any(line.startswith("row 1") for line in lines)
    if name in ("diverged", "models", "trainings"):
        assert lines == [QUESTIONS[name].asks, f"none: {QUESTIONS[name].none}"]
    else:
        assert sum("setting" in line for line in lines) == sum(line.startswith("--") for line in lines) == 1
        assert any("baseline" in line for line in lines) or name in ("best_per_depth", "pareto")
        explained = "flops (training): relative to the baseline with 12 layers (1.200e+10)" in lines
        assert explained == any("flops" in line.split() and "setting" in line for line in lines)


def test_a_setting_says_what_differs_from_the_baseline_and_what_it_costs(six_knobs, monkeypatch):
    """The baseline is RunConfig's defaults at 12 layers; both settings cost twice as much, at 24 layers four times."""
    monkeypatch.setenv("COLUMNS", "100")
    lines = answer_text(answered(six_knobs, "best_per_depth")).splitlines()
    header, _, first, rest, second, _, left_out = lines[-7:]
    assert left_out == "columns that did not fit: cell_id"
    assert header.split() == ["n_layers", "seeds", "val_loss", "usefulness", "flops", "setting"]
    assert first.split()[:5] == ["12", "2", "2.143", "0.08333", "2.000"] and second.split()[4] == "4.000"
    assert first.endswith("  n_kv_heads=1, seq_len=128, n_experts=4,")
    assert rest.strip() == "depth_scale=lns, weight_decay=1"


def test_a_degenerate_score_gives_way_to_its_sound_form_and_is_named(tmp_path):
    """One block carries the first score of all three runs; without it, the shallow model's blocks do more for less."""
    form = "usefulness_loss_increase_without_first"
    for depth, scale, score, value in ((12, "none", 0.1, 0.4), (24, "none", 0.2, 0.3), (24, "lns", 0.9, 0.2)):
        facts = {"val_loss": 3.0, "bigram_loss": 4.0, "train_flops": depth * 1e9, "usefulness": score, form: value}
        facts |= {"usefulness_loss_increase": score, "usefulness_loss_increase_largest_share": 0.9}
        make_run(tmp_path, RunConfig(n_layers=depth, depth_scale=scale), facts)
    with open_store(tmp_path) as store:
        assert rows(store, "pareto", "n_layers", form) == [(12, 0.4)]  # by the count, each deeper model is on the front
        for name in ("best_per_depth", "pareto", "mechanism"):
            answer = ask(store, name)
            assert form in answer.columns and "usefulness" not in answer.columns
            said = " ".join(answer_text(answered(store, name)).split())
            assert f"usefulness is degenerate: one block carries more than half of it (3 of 3 runs); use {form}" in said


def test_configurations_on_different_data_are_told_not_to_compare(tmp_path):
    for group, length in (("A5", 8), ("Z60", 8)):
        task = {"corpus": "task:state_tracking", "task_group": group, "seq_len": length}
        make_run(tmp_path, RunConfig(**task), {"val_loss": 3.0})
    with open_store(tmp_path) as store:
        said = "\nconfigurations differ in task_group: losses on different data are not comparable\n"
        assert said in answer_text(answered(store, "best_per_depth"))
        assert said not in answer_text(answered(store, "seed_noise"))


@pytest.mark.parametrize(
    ("fields", "label_fields", "knobs", "label"),
    [
        # the vocabulary of a text goes with the text
        ([{"corpus": "stdlib", "vocab_size": 264}, {"corpus": "other", "vocab_size": 300}], ("depth_scale", "corpus"),
         {"depth_scale": "lns", "corpus": "other"}, "depth_scale=lns, corpus=other"),
        # left out, d_ff follows from the width (8/3 of it, 88 of 32), and a budget per parameter goes with it
        ([{"d_model": width, "n_heads": 2, "train_tokens": tokens} for width, tokens in ((64, 2**21), (32, 2**19))],
         ("d_model", "depth_scale"), {"d_model": 32, "d_ff": 88, "depth_scale": "none"}, "d_model=32"),
        # RunConfig's 4 key-value heads are those of its 4 heads: with 2, both 2 and 1 differ, and 2 is what is left out
        ([{"n_heads": 2, "n_kv_heads": 1}, {"n_heads": 2, "n_kv_heads": 2}], ("n_kv_heads", "depth_scale"),
         {"n_kv_heads": 1, "depth_scale": "none"}, "n_kv_heads=1"),
    ],
)  # fmt: skip
def test_a_setting_names_what_does_not_follow_from_its_rest(fields, label_fields, knobs, label):
    configs = [RunConfig(**values, depth_scale=scale) for values in fields for scale in ("none", "lns")]
    settings = settings_of([configuration_of(config, ()) for config in configs])
    assert settings.label_fields == label_fields and setting_label(settings, knobs) == label


def test_a_remedy_is_named_where_all_of_it_is_changed(tmp_path):
    scalars = REMEDIES["nanochat-scalars"].fields
    settings = {
        "baseline": {},
        "preset=nanochat-scalars": scalars,
        "preset=nanochat-scalars, value_residual=True": scalars | {"value_residual": True},
        "residual_scalars=True, scalars_start=falling, lr_of={residual_scalars: 0.1}": scalars
        | {"lr_of": {"residual_scalars": 0.1}},
        "preset=mhc": REMEDIES["mhc"].fields,
        "n_streams=4": {"n_streams": 4},
    }
    for fields in settings.values():
        for seed in (0, 1):
            make_run(tmp_path, RunConfig(seed=seed, **fields), {"val_loss": 3.0 + 0.1 * seed})
    with open_store(tmp_path) as store:
        found = read_settings(store)
        assert {setting_label(found, stored_fields(RunConfig(**fields))) for fields in settings.values()} == {*settings}
        assert {*cells_of(read_runs(store, "val_loss"), "val_loss").changes} == {*settings}


def test_what_goes_with_depth_is_no_setting_and_is_told(tmp_path):
    """A budget of tokens per parameter, of a sweep that is drawn and ranked by depth."""
    for layers, tokens in ((4, 40960), (12, 122880)):
        for scale in ("none", "lns"):
            make_run(tmp_path, RunConfig(n_layers=layers, train_tokens=tokens, depth_scale=scale), {"val_loss": 3.0})
    said = "train_tokens depends on n_layers: 40960 at 4, 122880 at 12"
    with open_store(tmp_path) as store:
        assert read_settings(store).label_fields == ("depth_scale",) and depth_text(read_settings(store)) == said
        assert f"\n{said}\n" in answer_text(answered(store, "best_per_depth")) and cautions(best(store)) == said
        assert set(depth_figure.depth(store).data["setting"]) == {"baseline", "depth_scale=lns"}
        assert f"{said}." in " ".join(depth_figure.depth(store).page().get_supxlabel().split())
        make_run(tmp_path, RunConfig(n_layers=12, train_tokens=81920), {"val_loss": 3.0})
    with open_store(tmp_path) as store:  # a choice of its own at one depth
        settings = read_settings(store)
        assert settings.label_fields == ("depth_scale", "train_tokens") and not depth_text(settings)
