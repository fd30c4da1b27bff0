"""Packs: read as the folder they were made from, and checked as it is."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.files import MARKER
from sparsedepth.run.execute import execute
from sparsedepth.store import parquet, stored_rows
from sparsedepth.store.best import best
from sparsedepth.store.checksums import DamagedRun, write_marker
from sparsedepth.store.connection import open_store
from sparsedepth.store.evals import Evaluation, save_evaluation
from sparsedepth.store.packs import DamagedPack, open_pack, pack
from sparsedepth.store.pages import decoded_bytes
from sparsedepth.store.run_record import check_place, save_measured
from sparsedepth.store.subject import MeasuredModel

VIEWS = ("runs", "curves", "layers", "heads", "pairs", "tokens", "difficulty", "evals")
TUNED = """
name: s
question: q?
hypothesis: h
base: {n_layers: 2}
space: {weight_decay: [0.1]}
seeds: [0, 1]
tune: {lr: [0.001, 0.002, 0.004]}
"""

SIZES = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_kv_heads": 2, "n_experts": 0, "vocab_size": 9, "params_total": 9}
MODEL = MeasuredModel(
    model="a model", family="llama", dtype="float32", weights_hash="0" * 12, data_hash="1" * 12, seq_len=8, **SIZES
)
EVALUATION = Evaluation(
    run_id=None, weights_hash="0" * 12, task="count", task_version="1", task_hash="1" * 12, n_fewshot=0, max_len=8,
    harness="lm-eval 0.4", model="a model", n=1, n_documents=1, n_truncated=None, started="2026-01-02", seconds=1.0,
    results=(),
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Runs, one of them without tables, a measured model, a toy group and an evaluation; and their pack."""
    root = tmp_path_factory.mktemp("made") / "results"
    for lr in (0.001, 0.002, 0.004):
        rows = [{"step": 1, "layer": layer, "metric": "residual_variance", "value": lr, "n": 8} for layer in (1, 2)]
        curves = [{"step": step, "train_loss": lr} for step in (1, 2)]
        tables = {"layers": rows, "curves": curves} if lr > 0.001 else {}
        make_run(root, RunConfig(n_layers=2, lr=lr), {"val_loss": 3 + lr}, **tables)
    measure(root / "models" / "qwen", 2.0)
    toy = root / "toys" / "0123456789ab"
    toy.mkdir(parents=True)
    (toy / "students.parquet").write_bytes(b"of analysis/toy.py")
    write_marker(toy, toy.name, ["students.parquet"])
    save_evaluation(root, EVALUATION)
    (root / "sweep.yaml").write_text(TUNED)
    failed = root / "work" / RunConfig(n_layers=2, lr=0.0005).run_id
    failed.mkdir(parents=True)
    (failed / "failures.json").write_text('["no"]')
    (failed / "log.txt").write_text("long")
    pack(root, root.with_name("pack"))
    return root.parent


@pytest.fixture
def results(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "results", tmp_path / "results"))


@pytest.fixture
def packed(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "pack", tmp_path / "pack"))


def measure(place: Path, loss: float) -> None:
    row = {"step": 0, "layer": 1, "metric": "residual_variance", "value": loss, "n": 8}
    save_measured(place, MODEL, {"val_loss": loss}, {"device": "cpu"}, {"layers": [row], "pairs": []})


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def rows_of(root: Path) -> dict[str, list]:
    """Every row of every view, with the root taken out of `folder`."""
    with open_store(root) as store:
        views = {view: store.sql(f"select * from {view} order by all").rows for view in VIEWS}
    return {view: [str(row).replace(str(root), "ROOT") for row in rows] for view, rows in views.items()}


def test_a_pack_is_read_as_the_folder_is(results, packed):
    assert rows_of(packed) == rows_of(results)
    assert "edge" in str(rows_of(results)["runs"]), "the sweep's definition beside the pack says what was tuned"
    with open_store(results) as of_folder, open_store(packed) as of_pack:
        assert best(of_pack).table == best(of_folder).table
    with open_store(packed, results) as both:  # each run counts once
        assert both.sql("select count(*) from runs").rows == ((4,),)


def test_it_has_few_files_and_no_scratch(packed):
    names = sorted(path.name for path in packed.iterdir())
    assert names == ["pack.json", "records.parquet", "rows.parquet", "runs.parquet", "sweep.yaml"]
    assert json.loads((packed / "pack.json").read_text())["records"] == 6


def test_a_pack_below_a_folder_is_found_and_beside_it_more_can_be_measured(results, tmp_path):
    pack(results, tmp_path / "all" / "one")
    with open_store(tmp_path / "all") as store:
        assert store.sql("select count(*) from runs").rows == ((4,),)
        (folder,) = store.sql("select folder from runs where model is not null").rows[0]
        assert folder == str(tmp_path / "all/one/models/qwen")
    measure(tmp_path / "all/one/models/again", 9.0)  # the same model, with another result
    with pytest.raises(ValueError, match="with different results"):
        open_store(tmp_path / "all" / "one")
    shutil.rmtree(tmp_path / "all/one/models")
    make_run(tmp_path / "all/one", RunConfig(seed=7), {"val_loss": 1.0})
    with open_store(tmp_path / "all" / "one") as store:
        assert store.sql("select count(*) from runs").rows == ((5,),)


def files_of(root: Path) -> dict[str, bytes]:
    """Every file of a pack's records, by its path in the folder that was packed."""
    packed = open_pack(root)
    places = {place: packed.files(place) for place in packed.contents if not place.startswith("work/")}
    return {
        f"{place}/{name}": files.marker.content if name == MARKER else files.read(name)
        for place, files in places.items()
        for name in (MARKER, *files.marker.files)
    }


def test_it_holds_the_files_byte_by_byte(results, packed, tmp_path):
    expected = {path: content for path, content in contents(results).items() if not path.startswith(("work/", "sweep"))}
    assert files_of(packed) == expected
    pack(packed, tmp_path / "again")
    assert open_pack(tmp_path / "again").contents == open_pack(packed).contents, "also why a run failed"


def test_a_run_in_a_pack_and_in_its_folder_is_packed_once(tmp_path):
    layer = {"step": 1, "layer": 1, "metric": "residual_variance", "value": 1.0, "n": 8}
    make_run(tmp_path / "results", RunConfig(n_layers=2), {"val_loss": 3.0}, layers=[layer])
    pack(tmp_path / "results", tmp_path / "pack")
    shutil.copytree(tmp_path / "results" / "runs", tmp_path / "pack" / "runs")
    assert pack(tmp_path / "pack", tmp_path / "again") == 1
    with open_store(tmp_path / "again") as store:
        assert store.sql("select count(*) from layers").rows == ((1,),)


def test_tables_that_another_pyarrow_wrote_keep_their_rows(results, tmp_path, monkeypatch):
    (run, *_) = [path for path in (results / "runs").iterdir() if (path / "layers.parquet").exists()]
    rows = pq.read_table(run / "layers.parquet")
    marker = json.loads((run / MARKER).read_text())
    pq.write_table(rows, run / "layers.parquet", compression="gzip")
    content = (run / "layers.parquet").read_bytes()
    marker["files"]["layers.parquet"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (run / MARKER).write_text(json.dumps(marker))
    before = rows_of(results)
    pack(results, tmp_path / "pack")
    assert rows_of(tmp_path / "pack") == before
    monkeypatch.setattr(stored_rows, "READABLE", frozenset())  # read from the records
    assert rows_of(tmp_path / "pack") == before


def test_columns_that_came_since_are_filled(packed):
    """A field of the configuration has its default where there is a configuration, a quantity is NULL."""
    older = open_pack(packed).runs.drop_columns(["schedule", "usefulness"])
    completed = stored_rows.completed(older, stored_rows.runs_schema())
    is_trained = [model is None for model in completed["model"].to_pylist()]
    assert completed["schedule"].to_pylist() == ["cosine" if trained else None for trained in is_trained]
    assert {True, False} == {*is_trained} and not any(completed["usefulness"].to_pylist())
    assert completed["val_loss"].equals(older["val_loss"])


def as_of_0_1_0(pack: Path) -> None:
    """A file for each view, as 0.1.0 wrote them, and its own columns of `runs`."""
    index, rows = json.loads((pack / "pack.json").read_text()), pq.ParquetFile(pack / "rows.parquet")
    for view, (first, end) in index.pop("views").items():
        table = rows.read_row_groups([*range(first, end)])
        pq.write_table(table.select(stored_rows.view_schema(view).names), pack / f"{view}.parquet")
    (pack / "rows.parquet").unlink()
    runs = pq.read_table(pack / "runs.parquet")
    pq.write_table(runs.append_column("n_streams", pa.nulls(len(runs), pa.int64())), pack / "runs.parquet")
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in pack.glob("*.parquet")}
    (pack / "pack.json").write_text(json.dumps({**index, "version": "e3a37a583fd5", "files": files}))


def test_a_pack_of_0_1_0_is_read(packed):
    before = rows_of(packed)
    as_of_0_1_0(packed)
    assert rows_of(packed) == before


def test_a_pack_that_lacks_a_column_is_of_another_version(packed):
    as_of_0_1_0(packed)
    index, layers = json.loads((packed / "pack.json").read_text()), packed / "layers.parquet"
    pq.write_table(pq.read_table(layers).drop_columns(["metric"]), layers)
    index["files"]["layers.parquet"] = hashlib.sha256(layers.read_bytes()).hexdigest()
    (packed / "pack.json").write_text(json.dumps(index))
    with pytest.raises(DamagedPack, match=r"is of another version: rows.parquet has no column metric .*; pack its"):
        rows_of(packed)


@pytest.mark.parametrize("name", ["runs.parquet", "rows.parquet", "records.parquet", "pack.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "link"])
def test_damage_is_named(packed, tmp_path, name, damage):
    path = packed / name
    content = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    if (name, damage) == ("pack.json", "missing"):
        with pytest.raises(ValueError, match="no complete run"):
            open_store(packed)
    elif (name, damage) != ("pack.json", "flip"):  # one letter of a fact may be another
        with pytest.raises(DamagedPack, match=rf"^pack '[^']*' is damaged: {re.escape(name)} "):
            open_store(packed)


def put(folder: Path, name: str, table: pa.Table) -> None:
    """Another table in a pack's file, with the checksum that it has."""
    pq.write_table(table, folder / name)
    index = json.loads((folder / "pack.json").read_text())
    index["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "pack.json").write_text(json.dumps(index))


@pytest.mark.parametrize("groups", [[0, 99], [-1, 1], ["a", 1], [0], None, [0, 1, 2]])
def test_row_groups_that_do_not_exist_are_damage(packed, groups):
    index = json.loads((packed / "pack.json").read_text())
    index["views"]["layers"] = groups
    (packed / "pack.json").write_text(json.dumps(index))
    with pytest.raises(DamagedPack):
        open_store(packed)


@pytest.mark.parametrize(
    ("column", "value"),
    [("place", "runs/../../evil"), ("place", "/etc"), ("place", "runs"), ("name", "../evil"), ("name", ".x")],
)
def test_a_crafted_pack_names_no_other_place(packed, column, value):
    path = packed / "records.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[0][column] = value
    put(packed, "records.parquet", pa.Table.from_pylist(rows))
    with pytest.raises(DamagedPack, match="names"):
        open_pack(packed).contents  # noqa: B018


def test_a_crafted_run_id_reaches_no_query(results, packed):
    runs = pq.read_table(packed / "runs.parquet")
    at = runs.schema.get_field_index("run_id")
    runs = runs.set_column(at, "run_id", pa.array(["') OR true --"] * len(runs)))
    put(packed, "runs.parquet", runs)
    with pytest.raises(DamagedPack, match="names"):
        open_store(packed, results)


def test_commands_read_a_pack_and_refuse_to_write_one_where_it_cannot_be(results, tmp_path, command):
    assert "results.pack: 6 records in 5 files" in "".join(command("pack", results))
    assert "failed 1x: no" in command("status", tmp_path / "results.pack")[0]
    for words, message in (
        (("pack", results), "is not an empty folder"),
        (("pack", results, "-o", results / "runs/inside"), "is inside its source"),
        (("pack", tmp_path), "several results folders"),
        (("evaluate", results, "--tasks", ","), "names no task"),
        (("evaluate", results, "--tasks", "piqa", "-o", tmp_path / "results.pack"), "is a pack, which is only read"),
        (("pack", results / "work"), "no complete run"),
    ):
        said = "".join(command(*words, code=2))
        assert message in said and said.count("\n") == 1
    before = sorted((tmp_path / "results.pack").iterdir())
    with pytest.raises(ValueError, match="is a pack, which is only read"):
        execute(RunConfig(), tmp_path / "results.pack")
    assert sorted((tmp_path / "results.pack").iterdir()) == before


def test_a_query_reads_a_file_once_and_of_the_records_their_places(tmp_path, monkeypatch):
    make_run(tmp_path / "results", RunConfig(n_layers=2), {"val_loss": 3.0})
    pack(tmp_path / "results", tmp_path / "pack")
    read, known = stored_rows.read_table, []

    def noted(folder, index, name, schema):
        known.append((name, schema and schema.names))
        return read(folder, index, name, schema)

    monkeypatch.setattr(stored_rows, "read_table", noted)
    with open_store(tmp_path / "pack") as store:
        assert store.sql("select val_loss from runs").rows == ((3.0,),)
    assert known == [("records", ["place"])]


@pytest.mark.parametrize("name", ["runs.parquet", "rows.parquet", "records.parquet"])
def test_a_small_file_that_decodes_to_much_is_refused_before(packed, name, monkeypatch):
    """A text of 100 kB in 400 rows, and once in the file's dictionary."""
    monkeypatch.setattr(parquet, "MAX_DECODED", 10**6)
    table = pq.read_table(packed / name)
    rows = pa.concat_tables([table.slice(0, 1)] * 400)
    column = {"runs.parquet": "packages", "rows.parquet": "metric", "records.parquet": "content"}[name]
    field = rows.schema.field(column)
    rows = rows.set_column(rows.schema.get_field_index(column), field, pa.array([b"x" * 10**5] * 400).cast(field.type))
    put(packed, name, rows)
    index = json.loads((packed / "pack.json").read_text())
    (packed / "pack.json").write_text(json.dumps({**index, "views": {"layers": [0, 1]}}))
    assert (packed / name).stat().st_size < 10**6
    with pytest.raises(DamagedPack, match=rf"{name} would take 4\d MB in memory, and at most \d+ MB are read"):
        opened = open_pack(packed)
        opened.files(opened.stored_runs[0].place).read("layers.parquet")
    if name == "rows.parquet":
        refused = r"rows.parquet' would take 4\d MB in memory, and at most \d+ MB are read; pack its results folder"
        with open_store(packed) as store, pytest.raises(ValueError, match=refused):
            store.sql("select * from layers")


def zigzag(number: int) -> bytes:
    """As Thrift's compact protocol writes it."""
    septets = [(2 * number) >> shift & 127 for shift in range(0, max((2 * number).bit_length(), 1), 7)]
    return bytes([*(septet | 128 for septet in septets[:-1]), septets[-1]])


@pytest.mark.parametrize("codec", ["brotli", "zstd", "gzip"])
def test_a_footer_that_claims_less_than_its_pages_hold_is_not_believed(packed, codec, monkeypatch):
    """16 MB in a few kilobytes, which the footer calls 10 bytes."""
    monkeypatch.setattr(parquet, "MAX_DECODED", 10**6)
    path = packed / "runs.parquet"
    rows = pq.read_table(path).slice(0, 1)
    place = rows.schema.get_field_index("packages")
    rows = rows.set_column(place, rows.schema.field(place), pa.array(["x" * 16 * 10**6]))
    pq.write_table(rows, path, compression=codec, use_dictionary=False, write_statistics=False)
    content, claimed = path.read_bytes(), pq.read_metadata(path).row_group(0).column(place).total_uncompressed_size
    true, lie = zigzag(claimed), bytes([20 | 128, *[128] * (len(zigzag(claimed)) - 2), 0])
    assert content.count(true) >= 1 and len(content) < 200_000
    put(packed, "runs.parquet", rows)
    path.write_bytes(content.replace(true, lie))
    index = json.loads((packed / "pack.json").read_text())
    index["files"]["runs.parquet"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (packed / "pack.json").write_text(json.dumps(index))
    assert pq.read_metadata(path).row_group(0).column(place).total_uncompressed_size == 10
    with pytest.raises(DamagedPack, match=r"runs.parquet would take \d+ MB in memory, and at most \d+ MB are read"):
        open_pack(packed)


def test_the_pages_of_a_file_take_what_its_footer_says(packed, tmp_path):
    """Without their headers, of which a dictionary page has one too."""
    numbers = [*range(3000)]
    table = pa.table({"a": [number / 7 for number in numbers], "b": [*map(str, numbers)], "c": [None, *numbers[1:]]})
    for codec in ("zstd", "brotli", "gzip"):
        for version in ("1.0", "2.0"):
            pq.write_table(
                table, tmp_path / "t.parquet", compression=codec, data_page_version=version, data_page_size=999
            )
            with pa.OSFile(str(tmp_path / "t.parquet")) as file:
                (group,) = [pq.read_metadata(file).row_group(0)]
                for column in range(3):
                    chunk = group.column(column)
                    assert (
                        0.7 * chunk.total_uncompressed_size < decoded_bytes(file, chunk) < chunk.total_uncompressed_size
                    )


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"files":' * 10**5, "{" + '"files": {}, "views": {"layers": [0, 1e99]}}']
)
def test_a_nested_or_odd_index_is_one_line(packed, text):
    (packed / "pack.json").write_text(text)
    with pytest.raises(DamagedPack, match="is damaged") as told:
        open_pack(packed).rows()
    assert "\n" not in str(told.value)


def test_a_row_that_is_twice_in_a_pack_is_refused(results, tmp_path):
    """Of any view; its run would count twice, or its layer within a run."""
    pack(results, tmp_path / "pack")
    rows, index = tmp_path / "pack" / "rows.parquet", json.loads((tmp_path / "pack" / "pack.json").read_text())
    whole = {view: pq.ParquetFile(rows).read_row_groups([*range(*groups)]) for view, groups in index["views"].items()}
    for view, table in whole.items():
        for doubled in (pa.concat_tables([table, table]), pa.concat_tables([table.slice(0, 1), table])):
            put(tmp_path / "pack", "rows.parquet", doubled)
            changed = json.loads((tmp_path / "pack" / "pack.json").read_text())
            (tmp_path / "pack" / "pack.json").write_text(json.dumps({**changed, "views": {view: [0, 1]}}))
            with (
                open_store(tmp_path / "pack") as store,
                pytest.raises(ValueError, match="has two rows of equal run_id"),
            ):
                store.sql(f"select count(*) from {view}")
            with pytest.raises(ValueError, match="has two rows of equal run_id"):
                pack(tmp_path / "pack", tmp_path / "again")


def test_keys_of_any_size_are_told_apart():
    """Also where their product is no 64-bit number."""
    values = [0, 2**62, -(2**62), 5, None]
    rows = pa.table(
        {"run_id": pa.array(["a", "b", "a", "b", "a"]).dictionary_encode(), "step": values, "layer": values}
    )
    parquet.refuse_twice(rows, ("run_id", "step", "layer"))
    with pytest.raises(ValueError, match="two rows of equal run_id, step, layer"):
        parquet.refuse_twice(pa.concat_tables([rows, rows.slice(1, 1)]), ("run_id", "step", "layer"))
    parquet.refuse_twice(rows.slice(0, 0), ("run_id",))


def test_an_earlier_version_is_called_so(results, tmp_path):
    """A record with a field that is not known."""
    run = next((results / "runs").iterdir())
    content = (run / "config.yaml").read_text() + "flux: 1\n"
    (run / "config.yaml").write_text(content)
    marker = json.loads((run / MARKER).read_text())
    checksum = hashlib.sha256(content.encode()).hexdigest()
    marker["files"]["config.yaml"] = {"sha256": checksum, "bytes": len(content)}
    (run / MARKER).write_text(json.dumps(marker))
    says = r"^run folder .* is of another version: .*; read it with that version"
    with pytest.raises(DamagedRun, match=says) as told:
        open_store(results)
    assert "damaged" not in str(told.value)


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    """A shell in it would be in a deleted folder, and see none of the files."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "../here"):
        with pytest.raises(ValueError, match="is the current folder, and cannot be replaced"):
            check_place(Path(name))
    check_place(Path("new"))


def test_a_run_that_is_twice_in_a_pack_counts_once(tmp_path):
    for seed in range(3):
        make_run(tmp_path / "r", RunConfig(n_layers=2, seed=seed), {"val_loss": 3.0 + seed})
    pack(tmp_path / "r", tmp_path / "p")
    table = pq.read_table(tmp_path / "p" / "runs.parquet")
    pq.write_table(pa.concat_tables([table, table.slice(0, 2)]), tmp_path / "p" / "runs.parquet")
    index = json.loads((tmp_path / "p" / "pack.json").read_text())
    content = (tmp_path / "p" / "runs.parquet").read_bytes()
    index["files"]["runs.parquet"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "p" / "pack.json").write_text(json.dumps(index))
    with open_store(tmp_path / "p") as store:
        assert store.sql("select count(*), count(distinct run_id) from runs").rows == ((3, 3),)
