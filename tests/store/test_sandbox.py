"""A question in a process of its own: the same answers, and an end to what escapes the limits of one process."""

import hashlib
import io
import json
import resource
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.store import best, render, sandbox
from sparsedepth.store.connection import open_store


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fenced")
    for seed in range(2):
        layers = [{"step": 1, "layer": 1, "metric": "residual_variance", "value": 1.5 + seed, "n": 8}]
        make_run(folder, RunConfig(n_layers=2, seed=seed), {"val_loss": 3.0 + seed}, layers=layers)
    return folder


def test_answers_are_those_of_the_open_store(results):
    sql = "SELECT seed, val_loss, value, usefulness, outcome FROM runs JOIN layers USING (run_id) ORDER BY seed"
    with open_store(results) as store:
        answer, ranking = store.sql(sql), best.best(store)
    assert sandbox.ask([results], {"sql": sql}, "csv") == render.encode(answer, "csv")
    table = pq.read_table(io.BytesIO(sandbox.ask([results, results], {"sql": sql}, "parquet")))
    assert [tuple(row.values()) for row in table.to_pylist()] == list(answer.rows)
    said = sandbox.ask([results], {"best": {"by": "val_loss"}}, "table").decode()
    assert said == f"{best.heading(ranking)}\n{best.text(ranking)}\n"


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ({"sql": "SELEC 1"}, "syntax error"),
        ({"sql": "SELECT * FROM read_text('/etc/passwd')"}, "not allowed"),
        ({"best": {"by": "val_loss", "where": "1; DROP VIEW runs"}}, "syntax error"),
        ({"best": {"by": "val_los"}}, "did you mean 'val_loss'"),
    ],
)
def test_mistakes_are_the_askers(results, question, says):
    with pytest.raises(ValueError, match=says):
        sandbox.ask([results], question)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="absent"):
        sandbox.ask([tmp_path / "absent"], {"sql": "SELECT 1"})


@pytest.mark.parametrize(
    ("text", "seconds", "says"),
    [
        ("SELECT length(repeat('x', 4000000000)) FROM runs", 60, "(?i)memory|allocate"),
        ("SELECT lpad('x', 2000000000, 'y')", 0.5, "stopped|(?i:memory|allocate)"),
        ("SELECT md5(repeat('y', 1500000000)) FROM range(1000)", 0.5, "stopped|(?i:memory|allocate)"),
    ],
    ids=["repeat", "lpad", "md5"],
)
def test_one_huge_value_ends_at_a_limit(results, monkeypatch, text, seconds, says):
    monkeypatch.setattr(sandbox, "GRACE", 0.5)
    began = time.monotonic()
    with pytest.raises(ValueError, match=says) as caught:
        sandbox.ask([results], {"sql": text}, time_limit=seconds)
    assert "\n" not in str(caught.value).strip()
    assert time.monotonic() - began < 30  # 0.5 s, its grace, and a slow start
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20  # KiB


def test_the_limits_hold_in_the_process_and_nothing_can_be_written(tmp_path):
    """A full disk's worth of writing fails at its first byte, and memory ends where it should."""
    code = (
        "import os, signal, sys; from sparsedepth.store import sandbox; sandbox.limit(5);"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"handle = os.open({str(tmp_path / 'file')!r}, os.O_WRONLY | os.O_CREAT)\n"
        "try: os.write(handle, b'x')\n"
        "except OSError as error: print(error.strerror)\n"
        "try: bytearray(sandbox.MEMORY + 2**20)\n"  # a few pages may have been freed since
        "except MemoryError: print('no memory')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large", "no memory"]


def test_no_module_of_the_current_folder_is_imported(results, tmp_path, monkeypatch):
    (tmp_path / "duckdb.py").write_text("raise SystemExit('hijacked')")
    (tmp_path / "json.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    assert json.loads(sandbox.ask([results], {"sql": "SELECT count(*) AS n FROM runs"}, "json")) == [{"n": 2}]


def test_a_child_that_gets_no_question_ends_without_a_word():
    sandbox.start()
    out, err = sandbox._started.pop().communicate(timeout=60)
    assert (out, err) == (b"", b"")


def test_a_child_that_was_started_gets_the_next_question(results, monkeypatch):
    sandbox.start()
    monkeypatch.setattr(sandbox, "start", lambda: pytest.fail("started another"))
    assert sandbox.ask([results], {"sql": "SELECT count(*) AS n FROM runs"}, "csv") == b"n\n2\n"


def test_a_child_that_died_is_an_error_of_one_line(results):
    sandbox.start()
    sandbox._started[0].kill()
    sandbox._started[0].wait()
    with pytest.raises(ValueError, match=r"stopped: its process ended by SIGKILL$"):
        sandbox.ask([results], {"sql": "SELECT 1"})


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("raise KeyError('lr')", "its process ended with code 1: KeyError: 'lr'$"),
        ("import os; os.kill(os.getpid(), 11)", "its process ended by SIGSEGV$"),
        ("raise MemoryError", "it needs more memory than there is"),
        ("import os, sys; print('std::bad_alloc', file=sys.stderr, flush=True); os.abort()", "it needs more memory"),
    ],
)
def test_a_crash_says_what_is_known_of_it(results, monkeypatch, end, says):
    monkeypatch.setattr(sandbox, "_CODE", end)
    with pytest.raises(ValueError, match=rf"^the query was stopped: {says}") as caught:
        sandbox.ask([results], {"sql": "SELECT 1"})
    assert "\n" not in str(caught.value)


def test_a_query_of_runs_loads_few_modules(results):
    """They take most of its time."""
    code = (
        "import sys; from sparsedepth.store.connection import open_store\n"
        f"open_store({str(results)!r}).sql('SELECT count(*) FROM runs WHERE val_loss < 3')\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    unwanted = {"pandas", "scipy", "torch", "pyarrow.compute", "pyarrow.dataset", "sparsedepth.config.sweep"}
    assert not {*unwanted, "sparsedepth.store.best", "sparsedepth.store.table_map"}.intersection(loaded)
    assert "duckdb" in loaded and len(loaded) < 480


def test_nothing_changes_in_the_folder(results):
    def fingerprint():
        paths = sorted(path for path in results.rglob("*") if path.is_file())
        return [(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]

    before = fingerprint()
    for text in ("COPY runs TO 'x'", "ATTACH 'x' AS y", "SELECT 1"):
        try:
            sandbox.ask([results], {"sql": text})
        except ValueError:
            continue
    assert fingerprint() == before
