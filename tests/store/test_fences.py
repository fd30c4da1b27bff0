"""Limits of the process: an end to what escapes DuckDB's own."""

import os
import resource
import subprocess
import sys
import threading
import time

import duckdb
import pandas as pd
import pytest
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.store.fences import FENCES, MEMORY, limited, lock


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limited")
    for seed in range(2):
        make_run(folder, RunConfig(n_layers=2, seed=seed), {"val_loss": 3.0 + seed})
    return folder


@pytest.mark.parametrize(
    ("text", "seconds", "says"),
    [
        ("SELECT length(repeat('x', 4000000000)) FROM runs", 60, "memory"),
        ("SELECT md5(repeat('y', 1500000000)) FROM range(1000)", 0.5, "stopped: it ran for longer than 0.5 s"),
    ],
    ids=["repeat", "md5"],
)
def test_one_huge_value_ends_at_a_limit(results, text, seconds, says):
    command = [sys.executable, "-m", "sparsedepth.cli.main", "query", str(results), text, "--timeout", str(seconds)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sparsedepth: error: the query ") and done.stderr.count("\n") == 1
    assert says in done.stderr
    assert time.monotonic() - began < 30  # 0.5 s, its grace, and a slow start
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20  # KiB


def test_the_limits_hold_and_end_with_the_query():
    before = resource.getrlimit(resource.RLIMIT_AS), threading.active_count()
    with (
        pytest.raises(ValueError, match=r"^the query was stopped: it needs more memory than there is, or than 3 GB"),
        limited(60),
    ):
        assert resource.getrlimit(resource.RLIMIT_AS) != before[0]
        bytearray(MEMORY + 2**30)
    with pytest.raises(KeyError), limited(0.0):
        raise KeyError
    assert (resource.getrlimit(resource.RLIMIT_AS), threading.active_count()) == before


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
    assert not {*unwanted, "sparsedepth.store.best", "sparsedepth.store.import_table"}.intersection(loaded)
    assert "duckdb" in loaded and len(loaded) < 480 and done.stderr == ""


def test_a_locked_connection_reads_nothing_else():
    frame = pd.DataFrame({"x": [1]})
    with duckdb.connect(config=FENCES) as connection:
        with pytest.raises(duckdb.Error, match="frame does not exist"):  # nor while the store is opened
            connection.execute("SELECT x FROM frame")
        lock(connection)
        for sql, says in (
            ("SET memory_limit = '3GB'", "locked"),
            ("SELECT x FROM frame", "frame does not exist"),
            ("SELECT content FROM read_text('pyproject.toml')", "disabled"),
        ):
            with pytest.raises(duckdb.Error, match=says):
                connection.execute(sql)
    assert len(frame) == 1
