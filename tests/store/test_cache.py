import hashlib
import json
import shutil
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest
from support.made_up_runs import MANIFEST, make_run

from sparsedepth.cli.read import query
from sparsedepth.config.run import RunConfig
from sparsedepth.store import cache, run_record, stored_rows
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.connection import open_store
from sparsedepth.store.packs import pack
from sparsedepth.store.run_record import finish


def fill(results, seeds):
    """One run per seed; its loss is its seed, and layer 1 repeats it."""
    return [
        make_run(
            results,
            RunConfig(n_layers=2, seed=seed),
            {"val_loss": float(seed)},
            layers=[{"step": 1, "layer": 1, "metric": "residual_variance", "value": float(seed), "n": 8}],
        )
        for seed in seeds
    ]


def totals(results):
    """Runs, sum of their losses, sum over the layer table: equal sums if and only if every run is there once."""
    with open_store(results) as store:
        ((n, loss),) = store.sql("SELECT count(*), sum(val_loss) FROM runs").rows
        ((in_layers,),) = store.sql("SELECT sum(value) FROM layers").rows
    return n, loss, in_layers


@pytest.fixture
def read_folders(monkeypatch):
    """The run folders that were read, as opposed to taken from the cache."""
    read = []
    original = stored_rows.parse_record
    monkeypatch.setattr(stored_rows, "parse_record", lambda files: read.append(files.folder.name) or original(files))
    return read


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(cache, "CACHE_FROM", 4)


def test_the_second_time_nothing_is_read_again(tmp_path, small_limit, read_folders):
    fill(tmp_path, range(6))
    assert totals(tmp_path) == (6, 15.0, 15.0)
    assert len(read_folders) == 6
    assert totals(tmp_path) == (6, 15.0, 15.0)
    assert len(read_folders) == 6


def segments(results):
    return sorted(path.parent for path in results.glob(".cache/*/pack.json"))


def test_what_a_plugin_measured_is_read_once_the_plugin_is_loaded(tmp_path, small_limit):
    """A cache and a pack that were written without the plugin lack its columns."""
    made = {**MANIFEST, "plugins": {"loss": {"code": "0" * 12, "file": "loss.py"}}}
    for seed in range(6):
        make_run(tmp_path / "results", RunConfig(n_layers=2, seed=seed), {"val_loss": float(seed)}, manifest=made)
    pack(tmp_path / "results", tmp_path / "pack")
    open_store(tmp_path / "results").close()
    for folder in (tmp_path / "pack", *segments(tmp_path / "results")):
        rows, index = folder / "runs.parquet", json.loads((folder / "pack.json").read_text())
        pq.write_table(pq.read_table(rows).drop_columns(["val_loss"]), rows)
        index["files"]["runs.parquet"] = hashlib.sha256(rows.read_bytes()).hexdigest()
        (folder / "pack.json").write_text(json.dumps(index))
    for name in ("results", "results", "pack"):  # the second time from a new cache
        with open_store(tmp_path / name) as store:
            assert store.sql("SELECT count(*), sum(val_loss) FROM runs").rows == ((6, 15.0),)


def test_only_new_runs_are_read(tmp_path, small_limit, monkeypatch, read_folders):
    monkeypatch.setattr(cache, "FRESH", 2)
    fill(tmp_path, range(6))
    totals(tmp_path)
    before = segments(tmp_path)
    read_folders.clear()
    (new,) = fill(tmp_path, [100])
    for _ in range(2):  # one new run is read beside the cache
        assert totals(tmp_path) == (7, 115.0, 115.0)
    assert read_folders == [new.name] * 2 and segments(tmp_path) == before
    (other,) = fill(tmp_path, [200])
    read_folders.clear()
    assert totals(tmp_path) == (8, 315.0, 315.0)  # two are a segment of their own
    assert sorted(read_folders) == sorted([new.name, other.name])
    assert len(segments(tmp_path)) == 2 and set(before) < set(segments(tmp_path))
    read_folders.clear()
    assert totals(tmp_path) == (8, 315.0, 315.0)
    assert read_folders == []


def test_small_segments_are_merged_and_large_ones_are_not_rewritten(tmp_path, small_limit, monkeypatch, read_folders):
    monkeypatch.setattr(cache, "FRESH", 1)
    monkeypatch.setattr(cache, "SEGMENT_RUNS", 4)
    for seeds in (range(0, 10), range(10, 11), range(11, 12), range(12, 13)):
        fill(tmp_path, seeds)
        totals(tmp_path)
    n = sum(range(13))
    assert totals(tmp_path) == (13, n, n) and len(read_folders) == 13, "each run once"
    sizes = [len(json.loads((path / "pack.json").read_text())["files"]) for path in segments(tmp_path)]
    lengths = sorted(pq.read_metadata(path / "runs.parquet").num_rows for path in segments(tmp_path))
    assert lengths == [1, 4, 4, 4] and sizes == [2] * 4


def test_memory_of_a_first_opening_is_that_of_a_segment(tmp_path, tables_later, monkeypatch):
    """At no time are more records in memory than a segment has, of 12 runs and of 24."""
    monkeypatch.setattr(cache, "SEGMENT_RUNS", 4)
    most = []
    original = stored_rows.read_rows

    def noted(stored, *arguments, **options):
        rows = original(stored, *arguments, **options)
        most.append(len(rows.runs))
        return rows

    monkeypatch.setattr(cache, "read_rows", noted)
    for n in (12, 24):
        fill(tmp_path / str(n), range(n))
        assert totals(tmp_path / str(n)) == (n, sum(range(n)), sum(range(n)))
    assert max(most) == 4 and sum(most) == 2 * 36
    with open_store(tmp_path / "24") as store:
        store.read_tables()
        assert all(isinstance(rows, stored_rows.StoredTable) for rows in store._cached.values()), "files, not memory"


def test_removed_replaced_and_moved_runs_are_noticed(tmp_path, small_limit):
    folders = fill(tmp_path, range(6))
    totals(tmp_path)
    shutil.rmtree(folders[5])
    assert totals(tmp_path) == (5, 10.0, 10.0)
    shutil.rmtree(folders[4])
    make_run(tmp_path, RunConfig(n_layers=2, seed=4), {"val_loss": 40.0})
    assert totals(tmp_path) == (5, 46.0, 6.0)
    (tmp_path / "runs").rename(tmp_path / "older")
    with open_store(tmp_path) as store:
        assert store.sql("SELECT DISTINCT folder LIKE '%older%' FROM runs").rows == ((True,),)


def test_a_cache_that_cannot_be_used_is_made_again(tmp_path, small_limit):
    fill(tmp_path, range(5))
    expected = totals(tmp_path)
    (segment,) = segments(tmp_path)
    whole = {path.name: path.read_bytes() for path in segment.glob("*.parquet")}
    index = (segment / "pack.json").read_text()
    for name in whole:
        place = len(whole[name]) // 2
        flipped = whole[name][:place] + bytes([whole[name][place] ^ 1]) + whole[name][place + 1 :]
        for content in (whole[name][:place], flipped):
            (segment / name).write_bytes(content)
            assert totals(tmp_path) == expected
            assert (segment / name).read_bytes() == whole[name]
    (segment / "rows.parquet").unlink()
    assert totals(tmp_path) == expected
    for content in ("[]", index.replace(stored_rows.VERSION, "0" * 12)):
        (segment / "pack.json").write_text(content)
        assert totals(tmp_path) == expected
        assert (segment / "pack.json").read_text() == index


def test_an_open_store_stays_as_it_was(tmp_path, small_limit):
    fill(tmp_path, range(5))
    totals(tmp_path)
    with open_store(tmp_path) as store:
        fill(tmp_path, range(5, 10))
        assert totals(tmp_path)[0] == 10  # rewrites the cache
        assert store.sql("SELECT count(*) FROM runs").rows == ((5,),)
        assert store.sql("SELECT sum(value) FROM layers").rows == ((10.0,),)


def test_every_way_to_name_a_cached_table_reads_it(tmp_path, small_limit):
    fill(tmp_path, range(5))
    totals(tmp_path)
    for text, answer in (
        ("SELECT sum(value) FROM main.LAYERS", 10.0),
        ("SELECT sum(value) FROM layers_0", 10.0),
        ("WITH a AS (FROM layers) SELECT sum(value) FROM a", 10.0),
        ("SELECT (SELECT sum(value) FROM layers WHERE run_id = runs.run_id) FROM runs WHERE seed = 3", 3.0),
        ("SELECT max FROM (SUMMARIZE layers) WHERE column_name = 'value'", "4.0"),
        ("SELECT count(*) FROM heads", 0),
        ("SELECT count(run_id) FROM heads WHERE metric = 'attention_sparsity@0.001'", 0),
    ):
        with open_store(tmp_path) as store:
            assert store.sql(text).rows == ((answer,),)
    with open_store(tmp_path) as store:
        assert store.frame("SELECT run_id, metric, value FROM layers").shape == (5, 3)


@pytest.fixture
def tables_later(small_limit, monkeypatch):
    monkeypatch.setattr(cache, "TABLES_LATER_FROM", 5)


def test_tables_of_many_new_runs_are_read_when_one_is_named(tmp_path, tables_later, monkeypatch, read_folders):
    """And cached then; runs that came, went or changed in between are noticed as ever."""
    parsed = []
    original = run_record.parse_table
    monkeypatch.setattr(run_record, "parse_table", lambda *file: parsed.append(file[1]) or original(*file))
    folders = fill(tmp_path, range(8))
    for _ in range(2):
        with open_store(tmp_path) as store:
            assert store.sql("SELECT count(*), sum(val_loss) FROM runs").rows == ((8, 28.0),)
        assert len(read_folders) == 8 and not parsed and not [*tmp_path.glob(".cache/*/rows.parquet")]
    (new,) = fill(tmp_path, [100])
    shutil.rmtree(folders[7])
    with open_store(tmp_path) as store:
        assert store.sql("SELECT sum(val_loss) FROM runs").rows == ((28.0 - 7 + 100,),)
    read_folders.clear()
    assert totals(tmp_path) == (8, 121.0, 121.0)
    assert len(read_folders) == 8, "the tables, once"
    read_folders.clear()
    assert totals(tmp_path) == (8, 121.0, 121.0) and read_folders == [new.name], "which is beside the cache"


def test_tables_that_are_read_later_are_those_of_the_open_store(tmp_path, tables_later):
    folders = fill(tmp_path, range(6))
    with open_store(tmp_path) as store:
        fill(tmp_path, range(6, 12))
        assert totals(tmp_path)[0] == 12
        assert store.sql("SELECT sum(value) FROM layers").rows == ((15.0,),)
    shutil.rmtree(tmp_path / ".cache")
    with open_store(tmp_path) as store, open_store(tmp_path, skip_damaged=True) as patient:
        (folders[2] / "layers.parquet").write_bytes(b"noise")
        with pytest.raises(DamagedRun, match=rf"{folders[2].name}.*layers\.parquet"):
            store.sql("SELECT sum(value) FROM layers")
        with pytest.warns(UserWarning, match=rf"1 damaged run left out: {folders[2].name}"):
            assert patient.sql("SELECT sum(value) FROM layers").rows == ((66.0 - 2,),)


def test_a_query_leaves_the_tables_in_the_cache(tmp_path, tables_later, monkeypatch, capsys):
    """They are read before the process takes on its limits."""
    fill(tmp_path, range(6))

    @contextmanager
    def limited(seconds):
        (rows,) = tmp_path.glob(".cache/*/rows.parquet")
        rows.rename(tmp_path / "kept")
        yield

    monkeypatch.setattr("sparsedepth.store.fences.limited", limited)
    query([str(tmp_path), "SELECT max(value) AS x FROM Layers"], format="json")
    assert json.loads(capsys.readouterr().out) == [{"x": 5.0}]


def test_a_few_runs_leave_no_trace(tmp_path):
    fill(tmp_path, range(3))
    totals(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_no_cache_where_none_can_be_written(tmp_path, small_limit, monkeypatch, read_folders):
    fill(tmp_path, range(5))

    def refuse(path, *content):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(cache, "atomic_folder", refuse)
    for _ in range(2):
        assert totals(tmp_path) == (5, 10.0, 10.0)
    assert len(read_folders) == 10


def test_the_cache_does_not_follow_a_link(tmp_path, small_limit):
    results, elsewhere = tmp_path / "results", tmp_path / "elsewhere"
    fill(results, range(5))
    elsewhere.mkdir()
    (results / ".cache").symlink_to(elsewhere)
    assert totals(results) == (5, 10.0, 10.0)
    assert list(elsewhere.iterdir()) == []


def test_a_damaged_folder_does_not_enter(tmp_path, small_limit):
    folders = fill(tmp_path, range(5))
    content = (folders[2] / "layers.parquet").read_bytes()
    (folders[2] / "layers.parquet").write_bytes(content[:-1] + b"!")
    for _ in range(2):
        with pytest.raises(DamagedRun, match=rf"{folders[2].name}.*layers\.parquet"):
            open_store(tmp_path)
    assert not (tmp_path / ".cache").exists()


def test_runs_that_are_all_damaged_are_left_out(tmp_path, small_limit):
    for folder in fill(tmp_path, range(5)):
        (folder / "layers.parquet").write_bytes(b"noise")
    with pytest.warns(UserWarning, match="5 damaged runs left out"), open_store(tmp_path, skip_damaged=True) as store:
        assert store.sql("SELECT count(*) FROM runs").rows == ((0,),)


@pytest.mark.parametrize(
    ("file", "column", "value"),
    [
        ("summary.json", "val_loss", '"low"'),
        ("summary.json", "steps", "1.5"),
        ("summary.json", "steps", str(2**63)),
        ("summary.json", "outcome", "[]"),
        ("summary.json", "val_loss", "1e999"),
        ("summary.json", "val_loss", "1" + "0" * 400),
        ("manifest.json", "seconds", "true"),
        ("manifest.json", "device", "1"),
    ],
)
def test_a_value_of_another_type_is_damage(tmp_path, file, column, value):
    run = make_run(tmp_path, RunConfig(), {})
    (run / "complete").unlink()
    (run / file).write_text(f'{{"{column}": {value}}}')
    finish(run)
    with pytest.raises(DamagedRun, match=rf"{file} has {column}="):
        open_store(tmp_path)
