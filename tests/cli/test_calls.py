"""`import sparsedepth as sd`: the commands as calls, with the command line's names, defaults and errors."""

import inspect
import json
import pydoc
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.report_folder import fill
from support.tiny_sweep import BASE, definition

import sparsedepth as sd
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.words.formats import encode

NOTEBOOK = Path(__file__).parents[2] / "docs" / "python.ipynb"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls") / "results"
    fill(folder)
    return folder


def test_importing_it_is_fast_and_brings_nothing():
    code = "import sys, sparsedepth as sd; dir(sd); print(len(sys.modules), 'typer' in sys.modules, sd.__all__)"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    n_modules, has_typer, *names = lines.split(maxsplit=2)
    assert int(n_modules) < 120 and has_typer == "False" and "'sweep'" in names[0]


def test_help_lists_every_call_with_its_options():
    text = pydoc.plain(pydoc.render_doc(sd))
    assert not [name for name in sd.__all__ if name not in text]
    assert "    judge(table, *, baseline=None" in text and "baseline: variant to compare with" in text


def test_in_a_fresh_process_help_lists_each_call_and_tells_of_a_package_what_its_call_takes():
    code = "import pydoc, sparsedepth as sd; [print(pydoc.plain(pydoc.render_doc(each))) for each in (sd, sd.watch)]"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    commands = [name for name in sd.__all__ if name.islower()]
    assert [name for name in commands if f"    sd.{name}(" in text] == commands
    assert "    sd.recipe(folders, *, skip_damaged=False, out=None" in text and "cli.calls" not in text
    assert (
        "sparsedepth.watch - watch(model: " in text
        and "    measures         names (see `sparsedepth metrics`), or 'all'" in text
    )


def test_a_word_that_a_call_does_not_take_is_told_with_those_that_it_takes(results):
    told = "sparsedepth.query: got an unexpected keyword argument 'limit'; it takes folders, sql, skip_damaged, timeout"
    with pytest.raises(TypeError, match=told):
        sd.query(results, "select 1", limit=3)
    with pytest.raises(ValueError, match=r"the table is a DataFrame, .* table.to_csv\('runs.csv', index=False\), then"):
        sd.judge(sd.query(results, "select 1").frame())
    with pytest.raises(ValueError, match=r"^measures: 'varience' is unknown; did you mean 'variance'"):
        sd.measure(results, measures="varience")


def test_answers_and_recipes_say_their_sentence_and_answers_make_frames(results):
    answer = sd.ask(results, "variance")
    assert list(answer.frame().columns) == list(answer.rows.columns)
    card = sd.recipe(results)
    assert repr(card) == str(card) == card.sentence and card.sentence.startswith("At ")


def test_a_package_and_its_call_stand_under_one_name():
    import sparsedepth.sweep.status

    assert sd.sweep is sparsedepth.sweep and sd.sweep.status.scan
    assert callable(sd.sweep) and "retry_failed" in inspect.signature(sd.sweep).parameters
    with pytest.raises(AttributeError, match="no attribute 'sweeps'"):
        _ = sd.sweeps


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("best R --by beauty", lambda r: sd.best(r, by="beauty")),
        ("plot R -o x.png --figure pie", lambda r: sd.plot(r, out="x.png", figure="pie")),
        ("recipe R/gone", lambda r: sd.recipe(r / "gone")),
        ("measure R --data a --tokens b.npy", lambda r: sd.measure(r, data="a", tokens="b.npy")),
        ("measure R --measures beauty", lambda r: sd.measure(r, measures=["beauty"])),
        ("train R/no.yaml -o R/out", lambda r: sd.train(r / "no.yaml", r / "out")),
        ("sweep -o R/out --vary lr=1e-3 --set lr=1", lambda r: sd.sweep(out=r, vary={"lr": [1e-3]}, set={"lr": 1})),
        ("query R 'select beauty from runs'", lambda r: sd.query(r, "select beauty from runs")),
        ("query R --ask beauty", lambda r: sd.ask(r, "beauty")),
        ("effects R --by beauty", lambda r: sd.effects(r, by="beauty")),
        ("effects R --as speedup --part chain", lambda r: sd.effects(r, currency="speedup", part="chain")),
        ("judge R/no.csv", lambda r: sd.judge(r / "no.csv")),
        ("judge R/no.csv --column loss", lambda r: sd.judge(r / "no.csv", column=["loss"])),
        ("report R -o R/x.txt", lambda r: sd.report(r, r / "x.txt")),
        ("scaling fit R --without beauty", lambda r: sd.scaling(r, without=["beauty"])),
        ("status R/gone", lambda r: sd.status(r / "gone")),
        ("plan R/no.yaml", lambda r: sd.plan(r / "no.yaml")),
        ("plan --vary beauty=1", lambda r: sd.plan(vary=["beauty=1"])),
        ("export R/gone -o R/out", lambda r: sd.export(r / "gone", r / "out")),
        ("import R/no.csv --map R/no.yaml -o R/out", lambda r: sd.import_runs(r / "no.csv", r / "no.yaml", r / "out")),
        ("pack R -o R/out", lambda r: sd.pack(r, r / "out")),
        ("evaluate R/gone --tasks ,", lambda r: sd.evaluate(r / "gone", tasks=",")),
        ("sweep -o R/out --vary beauty=1", lambda r: sd.sweep(out=r / "out", vary=["beauty=1"])),
    ],
)
def test_what_ends_the_command_with_code_2_is_a_value_error_of_the_same_line(results, words, call, command):
    arguments = [word.replace("R", str(results), 1) if word[0] == "R" else word for word in shlex.split(words)]
    line = command(*arguments, code=2)[1].removeprefix("sparsedepth: error: ").strip()
    with pytest.raises(ValueError) as error:
        call(results)
    assert " ".join(str(error.value).split()) == line
    assert not (results / "out").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda r: sd.train({}, ""),
        lambda r: sd.sweep(out="", vary={"lr": [1e-3]}),
        lambda r: sd.measure(r, out=" "),
        lambda r: sd.recipe(r, out=""),
    ],
)
def test_an_empty_output_is_not_the_current_folder(results, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="out is empty; name a file or folder"):
        call(results)
    assert not [*tmp_path.iterdir()]


def test_mappings_stand_for_files_and_options(tmp_path):
    with pytest.raises(ValueError, match="the given mapping: unknown key 'n_layer'"):
        sd.train({**BASE, "n_layer": 3}, tmp_path / "out")
    with pytest.raises(ValueError, match="the given mapping is a sweep definition"):
        sd.train({"base": {}, "space": {"n_layers": [1]}}, tmp_path / "out")
    assert not [*tmp_path.iterdir()]


def test_a_damaged_run_is_refused_by_name_or_left_out_with_a_count(tmp_path, command, monkeypatch):
    monkeypatch.setattr("sparsedepth.report.page.draw_pictures", lambda store, progress: ([], {}))
    fill(tmp_path)
    summary = min(tmp_path.glob("runs/*/summary.json"))
    summary.write_text(summary.read_text().replace("1234567", "1234568"))
    skipped = f"1 damaged run left out: {summary.parent.name} (summary.json)"
    for words in (
        ("query", tmp_path, "--ask", "diverged"),
        ("best", tmp_path),
        ("effects", tmp_path, "--knob", "depth_scale"),
        ("recipe", tmp_path),
        ("plot", tmp_path, "-o", tmp_path / "x.png", "--figure", "pareto"),
        ("report", tmp_path, "-o", tmp_path / "x.html"),
    ):
        refused = command(*words, code=2)[1]
        assert summary.parent.name in refused and "summary.json is not the file that was written" in refused
        with warnings.catch_warnings():  # each command as a process of its own: a place warns once in one
            said = command(*words, "--skip-damaged")[1].splitlines()
        messages = [line for line in said if not line.startswith("report: ")]  # its progress
        assert messages == [f"sparsedepth: warning: {skipped}"]
    assert skipped in (tmp_path / "x.html").read_text()


def test_rows_come_as_tables(results):
    ranking = sd.best(results, depth=4, top=1)
    assert ranking.attrs["heading"].startswith("val_loss [nat/token], lower is better")
    assert list(ranking["setting"]) == ["depth_scale=lns", "baseline"] and list(ranking["rank"]) == [1, 2]
    assert ranking["val_loss"].tolist() == pytest.approx([2.71 + 0.002 / 3, 3.01])


def test_a_call_returns_what_its_command_writes(results, command, tmp_path, capsys):
    """Rows of calls against the CSV or JSON of their commands; no call prints."""
    sql = "select n_layers, depth_scale, avg(val_loss) as loss from runs group by all order by all"
    table = tmp_path / "runs.csv"
    of = {"baseline": (3.0, 3.01, 3.02), "new": (2.8, 2.82, 2.81)}
    losses = [(name, seed, loss) for name, by_seed in of.items() for seed, loss in enumerate(by_seed)]
    table.write_text("variant,seed,val_loss\n" + "".join(f"{name},{seed},{loss}\n" for name, seed, loss in losses))
    told = {"name": "small", "question": "does depth pay?", "hypothesis": "yes"}
    small = {**told, "space": {"n_layers": [1, 2]}, "seeds": [0]}
    calls = {
        ("query", results, sql): lambda: sd.query(results, sql),
        ("query", results, "--ask", "best_per_depth"): lambda: sd.ask(results, "best_per_depth"),
        ("query", results, "--ask", "variance"): lambda: sd.ask(results, "variance").rows,
        ("effects", results, "--knob", "depth_scale"): lambda: sd.effects(results, knob="depth_scale"),
        ("effects", results, "--part", "chain"): lambda: sd.effects(results, part="chain"),
        ("judge", table, "--column", "loss=val_loss"): lambda: sd.judge(table, column={"loss": "val_loss"}).table,
    }
    for words, call in calls.items():
        found = call()
        assert capsys.readouterr().out == ""
        command(*words, "--format", "csv", "-o", tmp_path / "rows.csv")
        assert encode(found, "csv") == (tmp_path / "rows.csv").read_bytes()
        assert found.frame().shape == (len(found.rows), len(found.columns))
    assert sd.judge(table).verdict == "better" and sd.ask(results, "variance").sentence
    printed = json.loads(command("status", results, "--format", "json")[0])
    assert sd.status(results).as_json() == printed and printed["runs"] == sd.status(results).summary.expected
    planned = json.loads(json.dumps(sd.plan(small, on="h100").priced.as_json()))
    (tmp_path / "small.yaml").write_text(json.dumps(small))
    shown = json.loads(command("plan", tmp_path / "small.yaml", "--on", "h100", "--format", "json")[0])
    assert planned == shown
    packed = sd.pack(results, tmp_path / "packed")
    told = command("pack", results, "-o", tmp_path / "again")[0]
    assert told.startswith(f"{tmp_path / 'again'}: {packed.n_records} records in {packed.n_files} files, ")


def test_imports_laws_and_reports_are_calls(results, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sparsedepth.report.page.draw_pictures", lambda store, progress: ([], {}))
    (tmp_path / "map.yaml").write_text("source: mine\nfields: {n_layers: depth, val_loss: loss}\n")
    (tmp_path / "theirs.csv").write_text("depth,loss\n4,3.1\n8,3.0\n")
    imported = sd.import_runs(tmp_path / "theirs.csv", tmp_path / "map.yaml", tmp_path / "theirs")
    assert (imported.runs, imported.rows) == (2, 2) and sd.query(
        tmp_path / "theirs", "select count(*) from runs"
    ).rows == ((2,),)
    points = Path(__file__).parents[2] / "sparsedepth"  # a folder without runs
    with pytest.raises(ValueError):
        sd.scaling(points)
    assert sd.report(results, tmp_path / "x.html") == tmp_path / "x.html" and (tmp_path / "x.html").stat().st_size > 1e4
    assert capsys.readouterr().out == ""


def test_a_figure_is_shown_and_its_numbers_are_at_hand(results, tmp_path):
    figures = sd.plot(results, figure="pareto")
    assert figures._repr_png_().startswith(b"\x89PNG") and not figures.paths
    assert set(figures.drawings["pareto"].data["n_layers"]) == {2, 4}
    with pytest.raises(NothingToDraw):
        sd.plot(results, figure="learning_rate")
    with sd.open_store(results) as store:
        assert store.sql("select count(*) from runs").rows == ((13,),)


@pytest.mark.slow
def test_a_sweep_a_run_and_a_measurement(tmp_path):
    """Trains for real; the caller's signal handlers stand again afterwards, and the same call changes nothing."""
    before = signal.getsignal(signal.SIGINT)
    out = tmp_path / "results"
    states = sd.sweep(definition(tmp_path), out=out, workers=1, device="cpu", set={"seeds": [0]})
    assert [state.state for state in states] == ["complete"] * 2
    trained = sd.train(states[0].config.model_dump(mode="json"), out, device="cpu", threads=1)
    assert trained.run_id == states[0].run_id and trained.summary["outcome"] == "ok"
    measured = sd.measure(trained.folder, measures="causal", device="cpu")
    assert measured.measurements.summary["causal_score"] == pytest.approx(trained.summary["causal_score"])
    assert len(sd.best(out)) == 2 and signal.getsignal(signal.SIGINT) is before


def test_the_notebook_runs_and_its_outputs_are_true(tmp_path, monkeypatch):
    """Every cell anew: texts as they are committed, pictures where they are."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("COLUMNS", raising=False)  # workers of a parallel run have one
    committed = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbclient.NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4), timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    nbformat.validate(committed)
    assert [shown(cell) for cell in fresh.cells] == [shown(cell) for cell in committed.cells]
    assert any("image/png" in kinds for cell in committed.cells for kinds, _ in shown(cell))


def shown(cell) -> list[tuple[tuple[str, ...], str]]:
    """What a cell prints and shows; progress on stderr holds times, and is not committed."""
    outputs = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
    return [
        (tuple(sorted(output.get("data", {}))), output.get("text") or output["data"]["text/plain"])
        for output in outputs
    ]


def test_a_call_of_every_kind_is_in_the_notebook():
    text = NOTEBOOK.read_text()
    assert all(f"sd.{name}(" in text for name in sd.__all__)
    assert "/tmp/" not in text and '"name": "stderr"' not in text
