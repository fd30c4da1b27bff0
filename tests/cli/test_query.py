"""`query` and `best` as a user meets them."""

import json

import pyarrow.parquet as pq
import pytest
from support.made_up_runs import make_run
from support.tiny_sweep import sparsedepth

from sparsedepth.config.run import RunConfig
from sparsedepth.store.saved_queries import QUESTIONS


def two_seeds(folder, losses, n_params, **fields):
    for seed, loss in enumerate(losses):
        make_run(folder, RunConfig(seed=seed, **fields), {"val_loss": loss, "params_active": n_params})
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return two_seeds(tmp_path_factory.mktemp("query"), (2.5, 2.7), 1000)


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return two_seeds(tmp_path_factory.mktemp("more"), (2.2, 2.3), 2000, weight_decay=0.3)


def test_sql_over_several_folders_in_every_format(results, more, tmp_path):
    sql = "select seed, val_loss, usefulness from runs where weight_decay < 0.2 order by seed"
    assert json.loads(sparsedepth("query", results, more, sql, "--format", "json")[0]) == [
        {"seed": 0, "val_loss": 2.5, "usefulness": None},
        {"seed": 1, "val_loss": 2.7, "usefulness": None},
    ]
    out, _ = sparsedepth("query", results, more, "select count(*) as n from runs", "--format", "csv")
    assert out == "n\n4\n"
    file = tmp_path / "answer.parquet"
    assert str(file) in sparsedepth("query", results, sql, "-o", file)[0]
    assert pq.read_table(file).to_pylist()[1] == {"seed": 1, "val_loss": 2.7, "usefulness": None}


def test_saved_questions_by_name(results, more):
    listed, _ = sparsedepth("query", results, "--ask")
    as_csv, _ = sparsedepth("query", results, "--ask", "--format", "csv")
    assert as_csv.splitlines()[0] == "name,question" and len(as_csv.splitlines()) == 1 + len(listed.splitlines())
    assert [line.partition(":")[0] for line in listed.splitlines()] == [
        *QUESTIONS, "signal_to_noise", "variance", "depth"
    ]  # fmt: skip
    assert sparsedepth("query", "--ask")[0] == listed
    out, _ = sparsedepth("query", results, more, "--ask", "seed_noise", "--format", "csv")
    found = [line.split(",")[2:4] for line in out.splitlines()]
    assert found == [["weight_decay", "seeds"], ["0.1", "2"], ["0.3", "2"]]
    out, _ = sparsedepth("effects", results, more, "--format", "json")
    (row,) = json.loads(out)  # params_active differ, and the other costs are stated by no run
    assert (row["setting"], row["basis"], row["seeds"]) == ("weight_decay=0.3", "none", 2)


def test_the_schema_is_a_line_a_column(results):
    out, _ = sparsedepth("query", results, "--schema")
    assert "runs.val_loss DOUBLE [nat/token]: held-out cross-entropy" in out
    assert "residual_variance" in out
    assert all("." in line.partition(" ")[0] for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("query", "{results}", "selec 1"), "syntax error"),
        (("query", "{results}", "drop table runs"), "SELECT"),
        (("query", "{results}", "select repeat('x', 4000000000)", "--timeout", "1"), "emory"),
        (("query", "{results}"), "--schema"),
        (("query", "{results}", "--ask", "parreto"), "did you mean 'pareto'"),
        (("query", "{results}", "select 1", "--ask", "pareto"), "give one of"),
        (("query", "select 1"), "give a results folder"),
        (("query", "{results}", "select 1", "--format", "parquet"), "-o FILE.parquet"),
        (("best", "{results}", "-o", "{run}/best.csv"), "complete and never changes"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(results, arguments, words):
    run = results / "runs" / RunConfig().run_id
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    _, err = sparsedepth(*[word.format(results=results, run=run) for word in arguments], code=2)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert err.startswith("sparsedepth: error: ") and err.count("\n") == 1, err
    assert words in err and "Traceback" not in err
