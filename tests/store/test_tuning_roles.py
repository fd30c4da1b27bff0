"""Tuned sweeps in the store: who stands for a configuration, in `runs`, in `best`, and in paired effects."""

from dataclasses import replace

import pytest
import yaml
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.plots.runs import trained_runs
from sparsedepth.quantities.quantity import WATCHED
from sparsedepth.scaling.points import read_points
from sparsedepth.store import connection
from sparsedepth.store.best import best
from sparsedepth.store.connection import open_store
from sparsedepth.store.run_record import run_folder, save_record
from sparsedepth.store.saved_queries import ask
from sparsedepth.store.subject import ImportedRun
from sparsedepth.store.tuning_roles import (
    IS_RESULT,
    Tuning,
    best_point,
    is_at_edge,
    read_tuning,
    result_rows,
    tuning_columns,
)

RATES = (0.001, 0.002, 0.004)
BEST = {0.1: 0.002, 0.3: 0.004}
"""The best lr of each weight decay: the second lies on the edge."""


def tuning_roles(tuning, runs):
    return {run_id: columns["tuning"] for run_id, columns in tuning_columns(tuning, runs).items()}


def as_row(config: RunConfig, run_id: str, loss: float | None) -> dict:
    return {**config.model_dump(), "run_id": run_id, "outcome": "diverged" if loss is None else "ok", "val_loss": loss}


def loss(config: RunConfig) -> float:
    """0.1 worse a step of lr away from the best; weight decay 0.3 is 0.5 better; a seed adds 0.01."""
    away = abs(RATES.index(config.lr) - RATES.index(BEST[config.weight_decay]))
    return 3.0 + 0.1 * away - 0.5 * (config.weight_decay == 0.3) + 0.01 * config.seed


def fill(results, depths=(12,), n_seeds=3):
    results.mkdir(exist_ok=True)
    for depth in depths:
        for decay in BEST:
            for lr in RATES:
                for seed in range(n_seeds if lr == BEST[decay] else 1):
                    config = RunConfig(n_layers=depth, weight_decay=decay, lr=lr, seed=seed)
                    summary = {"val_loss": loss(config), "tokens_trained": 10, "train_flops": 10.0, "params_total": 10}
                    make_run(results, config, {**summary, "params_active": 10})
    definition = {"name": "s", "question": "q", "hypothesis": "h", "tune": {"lr": list(RATES)}, "seeds": [0, 1, 2]}
    (results / "sweep.yaml").write_text(yaml.safe_dump(definition))
    return results


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("tuned"))


def test_a_run_whose_tuned_value_is_unknown_was_not_tuned():
    """A third-party table can leave the lr of a row empty."""
    tuning = Tuning(fields=("lr",), objective="val_loss", seeds=(0,), tuning_seeds=())
    configs = {"a": RunConfig(lr=0.001), "b": RunConfig(lr=0.002), "c": RunConfig()}
    runs = [as_row(config, name, 1 + config.lr) for name, config in configs.items()]
    runs[2]["lr"] = None
    assert tuning_roles(tuning, runs) == {"a": "edge", "b": "rejected"}


@pytest.mark.parametrize("depths", [(12,), (6, 8, 10, 12)], ids=["read", "cached"])
def test_runs_say_what_they_are(tmp_path, depths):
    fill(tmp_path, depths)
    for _ in range(2):  # the second time from the cache, where there are enough runs for one
        with open_store(tmp_path) as store:
            rows = store.sql("select weight_decay, tuning, tuned_fields, count(*), max(lr) from runs group by all").rows
        n = len(depths)
        assert {row[:4] for row in rows} == {
            (0.1, "best", "lr", 3 * n),
            (0.1, "rejected", "lr", 2 * n),
            (0.3, "edge", "lr", 3 * n),
            (0.3, "rejected", "lr", 2 * n),
        }


@pytest.mark.parametrize("query", ["summarize runs", "select r from main.RUNS r", "with q as (from runs) from q"])
def test_tuning_is_known_to_every_query_of_runs(tuned, query):
    """Though it is worked out when one comes."""
    with open_store(tuned) as first, open_store(tuned) as second:
        second.sql("from runs limit 0")
        assert sorted(map(str, first.sql(query).rows)) == sorted(map(str, second.sql(query).rows))
        assert not first._folders


@pytest.mark.parametrize("name", [".", "link"])
def test_tuning_is_known_in_a_folder_of_runs_that_is_named_by_a_link_or_a_point(tuned, tmp_path, monkeypatch, name):
    (tmp_path / "link").symlink_to(tuned / "runs")
    monkeypatch.chdir(tuned / "runs" if name == "." else tmp_path)
    with open_store(name) as store:
        assert store.sql("select count(tuning) from runs").rows == ((10,),)


def test_tuning_is_known_after_a_query_that_was_stopped(tuned, monkeypatch):
    def stop(folder):
        raise KeyboardInterrupt

    with open_store(tuned) as store:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(connection, "read_tuning", stop)
            store.sql("from runs")
        assert store.sql("select count(tuning) from runs").rows == ((10,),)


@pytest.mark.parametrize("other", [{"seed": 1}, {"weight_decay": 0.3}])
def test_trainings_of_one_name_in_two_folders_are_two(tmp_path, other):
    for folder, fields in (("a", {}), ("b", other)):
        for step in (1, 2):
            config = {"n_layers": 2, "seed": 0, "weight_decay": 0.1, **fields, "train_tokens": 8 * step}
            run = ImportedRun(origin=WATCHED, cluster="training", config=config, step=step)
            save_record(
                run_folder(tmp_path / folder, run.run_id),
                run,
                {"outcome": "ok", "steps": step, "tokens_trained": 8 * step},
                {},
                {},
            )
    with open_store(tmp_path / "a", tmp_path / "b") as store:
        assert store.sql(f"select steps from runs where {IS_RESULT}").rows == ((2,), (2,))


def test_folders_are_judged_each_by_itself(tuned, tmp_path):
    """One sweep tunes lr, another has it as its question: only the first one's runs are judged."""
    make_run(tmp_path, RunConfig(lr=0.5), {"val_loss": 1.0})
    with open_store(tuned, tmp_path) as store:
        rows = dict(store.sql("select tuning, count(*) from runs group by all").rows)
    assert rows == {"best": 3, "edge": 3, "rejected": 4, None: 1}


def test_best_ranks_each_configuration_at_its_best_value_and_flags_the_edge(tuned):
    with open_store(tuned) as store:
        ranking = best(store)
    assert (ranking.n_cells, ranking.n_runs) == (2, 6)
    names = ("weight_decay", "lr", "tuning", "seeds", "val_loss")
    shown = [tuple(row[name] for name in names) for row in ranking.table.records()]
    assert shown == [(0.3, 0.004, "edge", 3, pytest.approx(2.51)), (0.1, 0.002, "best", 3, pytest.approx(3.01))]


def test_one_rule_says_which_runs_count(tuned):
    """Of 10 runs 4 were only tried: best, effects, figures, the depth law and SQL count the other 6."""
    with open_store(tuned) as store:
        runs = store.frame("select * from runs")
        assert store.sql(f"select count(*) from runs where {IS_RESULT}").rows == ((6,),)
        assert best(store).n_runs == len(trained_runs(store)) == 6
    assert len(result_rows(runs)) == len(read_points(tuned)) == 6


def test_the_best_value_is_the_one_that_tuning_chose_though_later_seeds_disagree(tmp_path):
    """lr 0.002 was best at the first seed; with the second its mean is above that of 0.001, and it stays the best."""
    fill(tmp_path)
    other = RunConfig(n_layers=12, weight_decay=0.1, lr=0.002, seed=7)
    make_run(tmp_path, other, {"val_loss": 9.0})
    with open_store(tmp_path) as store:
        rows = ask(store, "lr_curves").records()
    notes = {(row["weight_decay"], row["lr"]): row["note"] for row in rows if row["note"]}
    assert notes == {(0.1, 0.002): "chosen", (0.3, 0.004): "chosen, at the edge"}


def test_equal_losses_choose_the_lowest_value():
    losses = {(4.0, 1.0): 2.0, (2.0, 3.0): 2.0, (1.0, 2.0): 5.0}
    assert best_point(losses) == (2.0, 3.0)
    assert [*map(is_at_edge, (2.0, 3.0), zip(*losses, strict=True))] == [False, True]


def test_a_diverged_value_is_the_worst_whatever_its_number_and_a_single_one_is_not_tuned():
    tuned = Tuning(fields=("lr",), tuning_seeds=(0,), seeds=(0,), objective="val_loss")

    values = (("a", 0.1, 2.0, 6), ("b", 0.2, 1.0, 6), ("c", 0.4, None, 6), ("d", 0.1, 9.0, 3))
    runs = [as_row(RunConfig(lr=lr, n_layers=depth), name, loss) for name, lr, loss, depth in values]
    runs[2]["val_loss"] = 0.5
    assert tuning_roles(tuned, runs) == {"a": "rejected", "b": "best", "c": "rejected"}


def test_the_mean_over_tuning_seeds_chooses_and_their_runs_are_no_results():
    """0.2 is best with seed 101, 0.1 over both; 0.4 lacks a run; seed 0 at 0.2 is of before 102 was run."""
    tuned = Tuning(fields=("lr",), tuning_seeds=(101, 102), seeds=(0, 1), objective="val_loss")
    losses = {(0.1, 101): 2.0, (0.1, 102): 2.0, (0.2, 101): 1.0, (0.2, 102): 3.5, (0.4, 101): 0.5}
    losses |= {(0.1, 0): 9.0, (0.1, 1): 9.0, (0.2, 0): 1.0}
    runs = [as_row(RunConfig(lr=lr, seed=seed), f"{lr} {seed}", loss) for (lr, seed), loss in losses.items()]
    roles = tuning_roles(tuned, runs)
    assert {name: role for name, role in roles.items() if role != "rejected"} == {
        "0.1 101": "tuning",
        "0.1 102": "tuning",
        "0.1 0": "edge",
        "0.1 1": "edge",
    }
    assert len(roles) == len(runs)
    alone = [run for run in runs if run["lr"] == 0.2 and run["seed"] > 100]
    assert tuning_roles(tuned, alone) == {"0.2 101": "tuning", "0.2 102": "tuning"}, "one value: nothing was chosen"
    before = [run for run in runs if run["seed"] < 2]
    assert tuning_roles(tuned, before)["0.2 0"] == "edge", "no tuning seed was run yet: the first seed chose"


def test_the_sweep_and_its_store_choose_among_the_same_values():
    """Of an earlier grid are 0.05 and 0.1; the one of today, extended once, reaches 0.1 alone, though 0.05 is lower."""
    tuned = Tuning(
        fields=("lr",), grid=((0.2, 0.4, 0.8),), extensions=1, tuning_seeds=(9,), seeds=(0,), objective="val_loss"
    )
    losses = {0.05: 1.0, 0.1: 2.0, 0.2: 3.0, 0.4: 4.0, 0.8: 5.0}
    runs = [as_row(RunConfig(lr=lr, seed=seed), f"{lr} {seed}", loss) for lr, loss in losses.items() for seed in (0, 9)]
    roles = tuning_roles(tuned, runs)
    assert {name: role for name, role in roles.items() if role != "rejected"} == {"0.1 9": "tuning", "0.1 0": "edge"}
    assert tuning_roles(replace(tuned, extensions=2), runs)["0.05 0"] == "edge"


def test_runs_that_do_not_say_their_seed_choose_by_their_mean():
    """Of lr 0.1 the last run is the lowest of all; 0.2 is lower on average."""
    tuned = Tuning(fields=("lr",), tuning_seeds=(), seeds=(), objective="val_loss")
    losses = [("a", 0.1, 3.0), ("b", 0.1, 1.0), ("c", 0.2, 1.5), ("d", 0.2, 1.7), ("e", 0.4, 5.0)]
    runs = [{**as_row(RunConfig(lr=lr), name, loss), "seed": None} for name, lr, loss in losses]
    assert tuning_roles(tuned, runs) == dict(zip("abcde", ["rejected"] * 2 + ["best"] * 2 + ["rejected"], strict=True))


def test_a_definition_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "sweep.yaml").write_text("tune: {lr: [3, 2, 1]}\nname: x\nquestion: q\nhypothesis: h\n")
    with pytest.raises(ValueError, match=r"sweep.yaml: tune.lr=.* must be ascending.*, unless another version"):
        read_tuning(tmp_path)
    assert read_tuning(tmp_path / "nothing") is None


def test_two_tuned_fields_are_at_the_edge_if_one_is():
    tuned = Tuning(fields=("lr", "weight_decay"), tuning_seeds=(0,), seeds=(0,), objective="val_loss")
    runs = [
        as_row(RunConfig(lr=lr, weight_decay=decay), f"{lr} {decay}", abs(lr - 0.2) + abs(decay - 0.3))
        for lr in (0.1, 0.2, 0.4)
        for decay in (0.1, 0.2, 0.3)
    ]
    assert {name: role for name, role in tuning_roles(tuned, runs).items() if role != "rejected"} == {"0.2 0.3": "edge"}


def test_a_tuned_field_with_one_value_in_a_table_has_no_edge():
    """Of imported runs each value counts: where one field was not varied, the other alone decides."""
    tuned = Tuning(fields=("lr", "weight_decay"), tuning_seeds=(), seeds=(), objective="val_loss")
    runs = [as_row(RunConfig(lr=lr, weight_decay=0.1), f"{lr}", abs(lr - 0.2)) for lr in (0.1, 0.2, 0.4)]
    assert tuning_roles(tuned, runs) == {"0.1": "rejected", "0.2": "best", "0.4": "rejected"}


def test_a_value_of_nothing_may_be_in_the_table_of_a_tuned_field():
    tuned = Tuning(fields=("weight_decay",), tuning_seeds=(), seeds=(), objective="val_loss")
    runs = [as_row(RunConfig(weight_decay=decay), f"{decay}", 3 - decay) for decay in (0.0, 0.1)]
    assert tuning_roles(tuned, runs) == {"0.0": "rejected", "0.1": "edge"}
