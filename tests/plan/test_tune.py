"""Tuning: which points are run, when the grid is extended, and which is best. Losses are made up."""

import math

import pytest
from support.made_up_runs import make_run

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.propose import distributions
from sparsedepth.plan.tasks import Plan
from sparsedepth.run.scratch import Scratch
from sparsedepth.store.connection import open_store
from sparsedepth.store.tuning_roles import extended, tune
from sparsedepth.sweep.results_folder import ResultsIndex, claim

GRID = {"lr": [1.0, 2.0, 4.0]}


def losses(**by_lr):
    """lr -> loss: lr_2=3.0."""
    known = {float(name.removeprefix("lr_").replace("_", ".")): loss for name, loss in by_lr.items()}
    return lambda point: known.get(point["lr"])


def test_an_interior_best_needs_no_more_and_nothing_is_final_before_every_point_is_known():
    points, best, is_final = tune(GRID, losses(lr_1=3.0, lr_2=2.0))
    assert points == [{"lr": 1.0}, {"lr": 2.0}, {"lr": 4.0}] and best == {"lr": 2.0} and not is_final
    points, best, is_final = tune(GRID, losses(lr_1=3.0, lr_2=2.0, lr_4=2.5))
    assert len(points) == 3 and best == {"lr": 2.0} and is_final


def test_a_best_on_the_edge_extends_the_grid_once_by_its_ratio():
    points, _, is_final = tune(GRID, losses(lr_1=3.0, lr_2=2.0, lr_4=1.5))
    assert points[-1] == {"lr": 8.0} and not is_final, "the new point is run first"
    assert tune(GRID, losses(lr_1=3.0, lr_2=2.0, lr_4=1.5, lr_8=1.7))[1] == {"lr": 4.0}
    points, best, _ = tune(GRID, losses(lr_1=1.0, lr_2=2.0, lr_4=1.5, lr_0_5=1.7))
    assert points[0] == {"lr": 0.5} and best == {"lr": 1.0}


def test_a_grid_is_extended_as_often_as_asked():
    known = losses(lr_1=3.0, lr_2=2.0, lr_4=1.5, lr_8=1.2)
    points, _, is_final = tune(GRID, known, extensions=2)
    assert points[-1] == {"lr": 16.0} and not is_final
    known = losses(lr_1=3.0, lr_2=2.0, lr_4=1.5, lr_8=1.2, lr_16=1.4, lr_32=0.0)
    for extensions, n_points, expected in ((0, 3, 4.0), (1, 4, 8.0), (2, 5, 8.0), (8, 5, 8.0)):
        points, best, _ = tune(GRID, known, extensions)
        assert len(points) == n_points and best == {"lr": expected}


def test_a_study_has_room_for_every_extension():
    """0.001 to 0.004, twice halved or doubled: what Optuna is told before any run."""
    grid = {"tune": {"lr": [1e-3, 2e-3, 4e-3]}, "tuning_seeds": [5], "seeds": [0], "tune_extensions": 2}
    fields = {"name": "s", "question": "q", "hypothesis": "h", "space": {"n_layers": [2, 3]}, **grid}
    lr = distributions(build(SweepDefinition, fields, "s"))["lr"]
    assert (lr.low, lr.high) == (0.00025, 0.016)


def test_a_point_outside_the_constraints_is_the_worst_so_that_tuning_ends():
    """d_ff 512 has more than 8,000 parameters and never runs."""
    base = {"n_layers": 1, "d_model": 8, "n_heads": 2, "vocab_size": 257, "tokenizer": "byte", "corpus": "stdlib"}
    fields = {"matched": "steps", "tune": {"d_ff": [8, 16, 512]}, "tuning_seeds": [5], "tune_extensions": 0}
    asked = {"name": "s", "question": "q", "hypothesis": "h", "base": base, **fields}
    plan = Plan(build(SweepDefinition, {**asked, "constraints": {"params_total": 8000}}, "s"))
    assert sorted(run.config.d_ff for run in plan.runs()) == [8, 16]
    losses = {run.run_id: 2.0 - 0.01 * run.config.d_ff for run in plan.runs()}
    assert sorted(run.config.d_ff for run in plan.runs(losses.get)) == [8, 16, 16] and not plan.is_open(losses.get)


def test_a_diverged_point_is_the_worst_and_not_missing():
    assert tune(GRID, losses(lr_1=3.0, lr_2=2.0, lr_4=math.inf))[1] == {"lr": 2.0}
    found = tune(GRID, losses(lr_1=math.inf, lr_2=math.inf, lr_4=math.inf, lr_0_5=math.inf))
    assert found[1] == {"lr": 0.5}, "all diverged: lower once"


def test_two_fields_are_tuned_together():
    def loss(point):
        return abs(point["lr"] - 2.0) + point["weight_decay"]

    points, best, _ = tune({"lr": [1.0, 2.0, 4.0], "weight_decay": [0.1, 0.2, 0.4]}, loss)
    assert len(points) == 3 * 4 and best == {"lr": 2.0, "weight_decay": 0.05}


def test_extended_values_are_the_same_number_on_every_machine():
    assert extended([0.1, 0.3, 0.9], 0.9) == [0.1, 0.3, 0.9, 2.7]
    assert extended([0.1, 0.3, 0.9], 0.1) == [0.0333333333333, 0.1, 0.3, 0.9]


BASE = {"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 1280}


@pytest.fixture
def definition() -> SweepDefinition:
    values = {"name": "s", "question": "q", "hypothesis": "h", "base": BASE, "tune": {"lr": [0.001, 0.002, 0.004]}}
    values |= {"tuning_seeds": [5], "reuse_tuning_seeds": True}
    return build(SweepDefinition, {**values, "space": {"n_layers": [2, 3]}, "seeds": [5, 6, 7]}, "s.yaml")


def finish(results, config: RunConfig, loss: float | None) -> None:
    outcome = "diverged" if loss is None else "ok"
    make_run(results, config, {"val_loss": loss, "outcome": outcome, "tokens_trained": config.train_tokens})


def test_later_seeds_run_at_the_best_value_of_each_configuration(tmp_path, definition):
    """n_layers 2: interior best 0.002. n_layers 3: the best is on the edge, then beyond it, and 0.004 diverges once."""
    claim(tmp_path, definition)
    plan, finished = Plan(definition), ResultsIndex(tmp_path, definition)

    def runs():
        return {
            (one.config.n_layers, one.config.lr, one.config.seed): one.config for one in plan.runs(finished.loss_of)
        }

    first = runs()
    assert set(first) == {(depth, lr, 5) for depth in (2, 3) for lr in (0.001, 0.002, 0.004)}
    assert plan.is_open(finished.loss_of) and plan.expected == 6 + 2 * 2
    values = {(2, 0.001): 3.0, (2, 0.002): 2.0, (2, 0.004): None, (3, 0.001): 1.0, (3, 0.002): 2.0, (3, 0.004): 3.0}
    for (depth, lr), loss in values.items():
        finish(tmp_path, first[depth, lr, 5], loss)
    second = runs()
    assert set(second) - set(first) == {(2, 0.002, 6), (2, 0.002, 7), (3, 0.0005, 5)}
    assert plan.is_open(finished.loss_of), "one configuration's extension is still to run"
    finish(tmp_path, second[3, 0.0005, 5], 0.5)
    third = runs()
    assert set(third) - set(second) == {(3, 0.0005, 6), (3, 0.0005, 7)} and not plan.is_open(finished.loss_of)
    for key in set(third) - set(first):
        if not (tmp_path / "runs" / third[key].run_id).exists():
            finish(tmp_path, third[key], 1.5)

    with open_store(tmp_path) as store:
        rows = store.sql("select n_layers, lr, seed, tuning, tuned_fields from runs order by all").rows
    assert {row[4] for row in rows} == {"lr"}
    kept = {(depth, lr, seed): role for depth, lr, seed, role, _ in rows if role != "rejected"}
    assert kept == {
        **{(2, 0.002, seed): "best" for seed in (5, 6, 7)},
        **{(3, 0.0005, seed): "edge" for seed in (5, 6, 7)},
    }


def test_tuning_seeds_choose_by_their_mean_and_the_results_have_others(tmp_path, definition):
    """0.002 is best with seed 1 and on average, 0.004 with seed 2; one configuration diverges there."""
    values = definition.model_dump(mode="json", exclude_unset=True)
    values |= {"tuning_seeds": [1, 2], "reuse_tuning_seeds": False, "space": {"n_layers": [2]}}
    values |= {"variants": [{"seeds": [5]}, {"weight_decay": 0.5}]}
    definition = build(SweepDefinition, values, "s.yaml")
    claim(tmp_path, definition)
    plan, index = Plan(definition), ResultsIndex(tmp_path, definition)
    tuning = plan.runs()
    assert len(tuning) == 2 * 3 * 2 and plan.expected == len(tuning) + 1 + 3
    assert [run.config.seed for run in tuning] == [1] * 6 + [2] * 6, "every value has one run before any has two"
    losses = {(0.001, 1): 5.0, (0.001, 2): 5.0, (0.002, 1): 2.0, (0.002, 2): 3.0, (0.004, 1): 4.0, (0.004, 2): 1.5}
    for run in tuning[:-1]:
        finish(tmp_path, run.config, losses[run.config.lr, run.config.seed])
    assert plan.is_open(index.loss_of), "one configuration still lacks a run of its tuning"
    finish(tmp_path, tuning[-1].config, None)
    results = [run.config for run in plan.runs(index.loss_of) if run.config.seed > 2]
    assert {(run.weight_decay, run.seed, run.lr) for run in results} == {
        (0.1, 5, 0.002),
        *((0.5, seed, 0.002) for seed in (5, 6, 7)),
    }
    for run in results:
        finish(tmp_path, run, 2.5)
    with open_store(tmp_path) as store:
        roles = dict(store.sql("select tuning, count(*) from runs group by all").rows)
    assert roles == {"tuning": 2 * 2, "rejected": 2 * 2 * 2, "best": 1 + 3}


def test_a_run_that_failed_for_good_does_not_stop_the_tuning(tmp_path, definition):
    plan = Plan(definition)
    for one in plan.runs():
        if one.config.lr == 0.004:
            (tmp_path / "work" / one.run_id).mkdir(parents=True)
            Scratch(tmp_path, one.run_id).add_failure("no")
        else:
            finish(tmp_path, one.config, 3.0 - 100 * one.config.lr)
    finished = ResultsIndex(tmp_path, definition)
    assert {one.config.lr for one in plan.runs(finished.loss_of) if one.config.seed != 5} == {0.002}


def test_a_value_beyond_the_grid_that_cannot_be_built_is_neither_run_nor_chosen(tmp_path, definition):
    """0.9 is best, on the edge: 0.9 x 0.9 / 0.3 of all entries cannot be dropped."""
    values = definition.model_dump(mode="json", exclude_unset=True) | {"tune": {"residual_dropout": [0.1, 0.3, 0.9]}}
    definition = build(SweepDefinition, values, "s.yaml")
    plan, finished = Plan(definition), ResultsIndex(tmp_path, definition)
    for one in plan.runs():
        finish(tmp_path, one.config, 3.0 - one.config.residual_dropout)
    assert {one.config.residual_dropout for one in plan.runs(finished.loss_of) if one.config.seed != 5} == {0.9}


def test_tune_values_can_be_added_and_finished_runs_are_reused(tmp_path, definition):
    for one in Plan(definition).runs():
        finish(tmp_path, one.config, 3.0 - 100 * one.config.lr)
    values = definition.model_dump(mode="json", exclude_unset=True)
    wider = build(SweepDefinition, {**values, "tune": {"lr": [0.001, 0.002, 0.004, 0.008, 0.016]}}, "s.yaml")
    claim(tmp_path, definition)
    claim(tmp_path, wider)
    plan, finished = Plan(wider), ResultsIndex(tmp_path, wider)
    missing = [one.config.lr for one in plan.runs(finished.loss_of) if not finished.is_complete(one.run_id)]
    assert sorted(missing) == [0.008, 0.008, 0.016, 0.016]


def test_where_higher_is_better_the_highest_wins(tmp_path, definition):
    values = definition.model_dump(mode="json", exclude_unset=True)
    definition = build(SweepDefinition, {**values, "objectives": ["usefulness"]}, "s.yaml")
    plan, finished = Plan(definition), ResultsIndex(tmp_path, definition)
    for one in plan.runs():
        make_run(tmp_path, one.config, {"usefulness": {0.001: 0.5, 0.002: 0.9, 0.004: 0.7}[one.config.lr]})
    assert {one.config.lr for one in plan.runs(finished.loss_of) if one.config.seed != 5} == {0.002}


def test_after_a_run_has_ended_only_its_cell_is_computed_anew(tmp_path, definition, monkeypatch):
    """Of thousands of cells, while the workers wait; and anew with losses that are others."""
    plan, index = Plan(definition), ResultsIndex(tmp_path, definition)
    first = plan.runs(index.loss_of)
    asked = []
    tuned_cell = Plan._tuned_cell
    monkeypatch.setattr(
        Plan, "_tuned_cell", lambda self, one, losses: asked.append(one) or tuned_cell(self, one, losses)
    )
    assert plan.runs(index.loss_of) == first and not asked
    finish(tmp_path, first[0].config, 1.0)
    plan.runs(index.loss_of)
    assert [one.config.n_layers for one in asked] == [first[0].config.n_layers]
    assert plan.runs() == first and len(asked) == 2
