import hashlib
import shutil
import time
import warnings
from pathlib import Path

import pytest
from support.made_up_runs import MANIFEST, make_run

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.store.connection import open_store
from sparsedepth.store.fences import FENCES
from sparsedepth.store.packs import pack
from sparsedepth.store.schema import COLUMNS

BASE = RunConfig(n_layers=2, weight_eps=(0.5, 0.25))


def fill(folder: Path) -> Path:
    """Results with two seeds of one configuration."""
    for seed, loss in ((0, 3.0), (1, 3.5)):
        make_run(
            folder,
            BASE.model_copy(update={"seed": seed}),
            {"val_loss": loss},
            layers=[
                {"step": 1, "layer": layer, "metric": "residual_variance", "value": loss * layer, "n": 8}
                for layer in (1, 2)
            ],
            curves=[{"step": 1, "train_loss": 4.0}],
            heads=[{"step": 1, "layer": 1, "head": 1, "metric": "attention_sparsity@0.001", "value": 0.5}],
            pairs=[{"step": 1, "layer": 1, "other_layer": 2, "metric": "causal_effect", "value": 0.1, "n": 8}],
        )
    return folder


@pytest.fixture
def results(tmp_path):
    return fill(tmp_path / "results")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Results that no test changes."""
    return fill(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def store(shared):
    with open_store(shared) as store:
        yield store


def test_a_run_is_one_row_of_typed_columns(store, shared):
    answer = store.sql("SELECT * FROM runs WHERE seed = 0")
    row = dict(zip(answer.columns, answer.rows[0], strict=True))
    assert row["run_id"] == BASE.run_id and row["cell_id"] == BASE.cell_id
    assert row["n_layers"] == 2 and row["lr"] == 1e-3 and row["renormalise_gates"] is True
    assert row["weight_eps"] == "[0.5, 0.25]"
    assert row["val_loss"] == 3.0 and row["outcome"] == "ok"
    assert row["usefulness"] is None and row["top_k"] is None
    assert row["folder"] == str(shared / "runs" / BASE.run_id)
    assert row["device"] == "cpu" and row["seconds"] == 1.5 and row["packages"] == '{"torch": "2.13.0"}'


def test_a_frame_holds_the_same(store):
    frame = store.frame("SELECT layer, value, n FROM layers ORDER BY value")
    assert frame.to_dict("list") == {"layer": [1, 1, 2, 2], "value": [3.0, 3.5, 6.0, 7.0], "n": [8] * 4}
    assert list(store.frame("SELECT layer FROM layers WHERE false").columns) == ["layer"]


def test_the_schema_names_exactly_the_columns_there_are(store):
    documented = [row[:3] for row in store.schema().rows if " = " not in row[1]]
    for view in ("runs", "curves", "layers", "heads", "pairs", "tokens", "difficulty"):
        described = [(view, row[0], row[1]) for row in store.sql(f"DESCRIBE {view}").rows]
        assert described == [row for row in documented if row[0] == view]
        assert len({name for _, name, _ in described}) == len(described)
    assert ("layers", "metric = 'residual_variance'", "DOUBLE") in [row[:3] for row in store.schema().rows]
    assert all(meaning.strip() for *_, meaning in store.schema().rows)
    names = {name for view, name, _ in documented if view == "runs"}
    assert {*RunConfig.model_fields, *(quantity.name for quantity in quantities.RUNS)} <= names


@pytest.mark.parametrize(
    "text",
    [
        "SUMMARIZE runs",
        "FROM layers PIVOT (avg(value) FOR metric IN ('residual_variance'))",
        "SELECT * FROM range(3)",
        "SELECT e.value FROM runs, json_each(packages) AS e",
        "SELECT val_loss FROM runs; -- the end",
    ],
)
def test_ordinary_questions_are_answered(store, text):
    assert store.sql(text).rows


@pytest.mark.parametrize("text", ["show tables;", "SHOW ALL TABLES", "describe"])
def test_the_tables_that_are_shown_are_the_views(store, text):
    assert store.sql(text).rows == tuple((view,) for view in (*COLUMNS, "evals"))


# Which folders count


def copy_into(folder, run):
    return shutil.copytree(run, folder / run.name)


def test_results_folders_run_folders_and_folders_of_them_open(results, tmp_path):
    run = results / "runs" / BASE.run_id
    copy_into(tmp_path / "flat", run)
    copy_into(tmp_path / "machines" / "a" / "runs", run)
    for path, n in ((results, 2), (results / "runs", 2), (run, 1), (tmp_path / "flat", 1), (tmp_path / "machines", 1)):
        with open_store(path) as store:
            assert store.sql("SELECT count(*) FROM runs").rows == ((n,),)
            assert store.sql("SELECT count(DISTINCT run_id) FROM layers").rows == ((n,),)


def test_a_folder_is_named_as_it_was_given(results, monkeypatch):
    run = f"runs/{BASE.run_id}"
    text = "SELECT folder FROM runs WHERE seed = 0"
    monkeypatch.chdir(results.parent)
    quoted = results.rename("it's")
    for path, folder in ((quoted, f"it's/{run}"), (f"it's/{run}", f"it's/{run}"), (Path("it's").resolve(), None)):
        with open_store(path) as store:
            assert store.sql(text).rows == ((folder or str(Path("it's").resolve() / run),),)
    monkeypatch.chdir(f"it's/{run}")
    with open_store(".") as store:
        assert store.sql(text).rows == ((".",),)


def test_a_copy_counts_once(results, tmp_path):
    copies = tmp_path / "copies"
    copy_into(copies, results / "runs" / BASE.run_id)
    make_run(copies, RunConfig(n_layers=3), {"val_loss": 1.0})
    with open_store(results, copies / BASE.run_id, copies) as store:
        assert store.sql("SELECT count(*), sum(val_loss) FROM runs").rows == ((3, 7.5),)
        assert store.sql("SELECT count(*) FROM layers").rows == ((4,),)
    (results / "runs" / BASE.run_id / "layers.parquet").write_bytes(b"noise")
    with pytest.warns(UserWarning), open_store(results, copies / BASE.run_id, skip_damaged=True) as store:
        assert store.sql("SELECT count(*), sum(val_loss) FROM runs").rows == ((2, 6.5),), "the undamaged copy"
        assert store.sql("SELECT count(*) FROM layers").rows == ((4,),)


def test_source_is_the_folder_as_it_was_named(results, tmp_path):
    """Also of a pack below a named folder; a copy counts for the first, and other views join by run_id."""
    make_run(tmp_path / "more", RunConfig(n_layers=3), {"val_loss": 1.0})
    copy_into(tmp_path / "more" / "runs", results / "runs" / BASE.run_id)
    make_run(tmp_path / "it's", RunConfig(n_layers=4), {"val_loss": 2.0})
    pack(tmp_path / "it's", tmp_path / "packs" / "its")
    with open_store(results, tmp_path / "more", tmp_path / "packs") as store:
        rows = store.sql("SELECT source, count(*), sum(val_loss) FROM runs GROUP BY 1 ORDER BY 1").rows
        layers = store.sql("SELECT source, count(*) FROM layers JOIN runs USING (run_id) GROUP BY 1").rows
        assert store.sql("DESCRIBE SELECT source FROM runs").rows[0][:2] == ("source", "VARCHAR")
    named = ((str(results), 2, 6.5), (str(tmp_path / "more"), 1, 1.0), (str(tmp_path / "packs/its"), 1, 2.0))
    assert sorted(rows) == sorted(named) and layers == ((str(results), 4),)
    with open_store(tmp_path / "it's") as store:
        assert store.sql("SELECT source FROM runs").rows == ((str(tmp_path / "it's"),),)


def test_two_texts_of_one_name_are_told(tmp_path):
    """By the runs' data_hash, also of a pack, where the texts' names and options are equal. A run that has none, and a
    task, say nothing."""
    hashes = {"a": "1", "b": "1", "c": "2", "unknown": None}
    for seed, (name, data_hash) in enumerate(hashes.items()):
        for config in (BASE, RunConfig(corpus="task:k_hop"), RunConfig(val_fraction=0.1 + seed / 100)):
            manifest = {**MANIFEST, "data_hash": data_hash and f"{data_hash}{config.val_fraction}"}
            make_run(tmp_path / name, config.model_copy(update={"seed": seed}), {"val_loss": 1.0}, manifest=manifest)
    make_run(tmp_path / "b", RunConfig(corpus="task:k_hop", seed=9), {}, manifest={**MANIFEST, "data_hash": "other"})
    pack(tmp_path / "c", tmp_path / "packed")
    for one, other in (("a", "c"), ("b", "packed")):
        with pytest.warns(UserWarning, match=rf"corpus='stdlib' is another text in \S*{one} than in \S*{other} "):
            open_store(tmp_path / one, tmp_path / other)
    with warnings.catch_warnings(action="error"):
        open_store(*(tmp_path / name for name in ("a", "b", "unknown"))).close()


def test_two_results_of_one_run_are_refused(results, tmp_path):
    make_run(tmp_path / "other", BASE, {"val_loss": 2.0})
    with pytest.raises(ValueError, match=f"run {BASE.run_id} is in .* with different results"):
        open_store(results, tmp_path / "other")


def test_only_complete_runs_count_and_neither_links_nor_hidden_ones(results, tmp_path):
    run = results / "runs" / BASE.run_id
    work = copy_into(results / "work" / BASE.run_id, run)
    (work / "summary.json").write_text("damaged, and set aside")
    outside = make_run(tmp_path / "outside", RunConfig(n_layers=5), {})
    (results / "runs" / outside.name).symlink_to(outside)
    shutil.copytree(outside, results / "runs" / ".hidden" / outside.name)
    with open_store(results) as store:
        assert store.sql("SELECT seed FROM runs ORDER BY 1").rows == ((0,), (1,))
    (run / "complete").unlink()
    with open_store(results) as store:
        assert store.sql("SELECT seed FROM runs").rows == ((1,),)
    with pytest.raises(ValueError, match="no complete run under"):
        open_store(run)


def test_a_path_that_is_no_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent' does not exist; name a results folder"):
        open_store(tmp_path / "absent")
    (tmp_path / "runs.csv").write_text("variant,loss\na,1\n")
    with pytest.raises(ValueError, match=r"runs.csv' is a file, and results are a folder; `judge` gives the verdict"):
        open_store(tmp_path / "runs.csv")


# The fence


def fingerprint(folder: Path) -> str:
    """Of every path below `folder`, with content and time of change."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path} {path.lstat().st_mtime_ns}".encode())
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


HOSTILE = [
    "CREATE TABLE x AS SELECT 1",
    "DROP VIEW runs",
    "DELETE FROM runs",
    "INSERT INTO runs SELECT * FROM runs",
    "WITH gone AS (DELETE FROM runs RETURNING *) SELECT * FROM gone",
    "ATTACH '{secret}' AS db",
    "COPY runs TO '{target}'",
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM '{secret}'",
    "SELECT (SELECT content FROM read_text('{secret}'))",
    "WITH a AS (FROM read_text('{secret}')) SELECT * FROM a",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM query('SELECT * FROM read_text(''{secret}'')')",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT 1'))",
    "SELECT * FROM read_csv('https://example.org/x.csv')",
    "FROM pg_catalog.pg_settings",
    "SUMMARIZE Pg_Settings",
    "FROM system.main.duckdb_databases",
    "SELECT current_setting('secret_directory')",
    "SELECT list_transform(['home_directory'], lambda x: x.current_setting()) FROM runs",
    "SELECT * FROM arrow_scan(NULL, NULL, NULL)",
    "SELECT * FROM enable_profiling(save_location := '{target}')",
    "INSTALL httpfs",
    "PRAGMA database_list",
    "SET enable_external_access = true",
    "CALL enable_logging()",
    "EXPLAIN ANALYZE SELECT 1",
    "SELECT 1; DROP VIEW runs",
    "",
    "-- only a comment",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT 1 FROM " + "(SELECT * FROM " * 2000 + "runs" + ")" * 2000,
    "SELECT '" + "x" * 200_000 + "'",
    "SELECT \udcff",
    "SELECT \x00",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:30].encode("unicode_escape").decode())
def test_a_hostile_query_reads_and_changes_nothing(tmp_path, shared, store, text):
    secret, target = tmp_path / "secret.csv", tmp_path / "target"
    secret.write_text("token\nhunter2\n")
    before = fingerprint(tmp_path), fingerprint(shared)
    with pytest.raises(ValueError) as caught:
        store.sql(text.replace("{secret}", str(secret)).replace("{target}", str(target)))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000 and "hunter2" not in message
    assert (fingerprint(tmp_path), fingerprint(shared)) == before
    assert store.sql("SELECT count(*), sum(val_loss) FROM runs").rows == ((2, 6.5),)


def test_no_progress_bar_stands_in_an_answer(store):
    assert store._connection.execute("SELECT current_setting('enable_progress_bar')").fetchall() == [(False,)]


def test_local_variables_are_no_tables(store):
    import pandas

    hidden = pandas.DataFrame({"token": ["hunter2"]})
    assert len(hidden) == 1
    with pytest.raises(ValueError, match="hidden does not exist"):
        store.sql("SELECT * FROM hidden")


@pytest.mark.parametrize(
    "text",
    [
        "WITH RECURSIVE t(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM t) SELECT count(*) FROM t",
        "SELECT count(*) FROM range(10000000) a, range(10000000) b",
    ],
)
def test_endless_work_stops_at_the_time_limit(shared, text):
    with open_store(shared, time_limit=0.1) as store:
        for ask in (store.sql, store.frame):
            start = time.monotonic()
            with pytest.raises(ValueError, match=r"stopped after 0\.1 s"):
                ask(text)
            assert time.monotonic() - start < 10
        assert store.sql("SELECT 1").rows == ((1,),)


def test_an_answer_without_end_stops_at_the_row_limit(store):
    for ask in (store.sql, store.frame):
        with pytest.raises(ValueError, match="more than 1,000 rows; add LIMIT"):
            ask("SELECT * FROM range(100000000000)", max_rows=1000)
    assert len(store.sql("SELECT * FROM range(1000)", max_rows=1000).rows) == 1000
    assert len(store.frame("SELECT * FROM range(1000)", max_rows=1000)) == 1000


def test_too_much_memory_is_one_line_and_no_file(shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(FENCES, "memory_limit", "200MB")
    refused = pytest.raises(ValueError, match=r"^the query needs more memory than 200MB; narrow it with WHERE[^.]*$")
    with open_store(shared) as store, refused:
        store.sql("SELECT string_agg(repeat('x', 1000000), '') FROM range(1000)")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SELECT val_los FROM runs", 'Candidate bindings: "val_loss"'),
        ("SELECT run_id, val_los FROM runs", 'Candidate bindings: "val_loss"'),
        ("SELECT * FROM runs WHERE preset = 'mhc'", "the name of a remedy's fields: name one of them"),
        ("SELECT * FROM run", 'Did you mean "runs"'),
        ("SELECT CAST(outcome AS INTEGER) FROM runs", "Could not convert string 'ok'"),
        ("PIVOT layers ON metric USING avg(value)", "values spelled out"),
        ("SELECT 1; SELECT 2", "2 statements"),
    ],
)
def test_broken_sql_says_what_is_wrong_in_one_line(store, text, says):
    with pytest.raises(ValueError) as caught:
        store.sql(text)
    assert says in str(caught.value) and "\n" not in str(caught.value) and "LINE 1" not in str(caught.value)
