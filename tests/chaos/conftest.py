"""What an undisturbed sweep records: every disturbed one must reproduce it."""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.interrupted_sweep import Record, Sweep, record_of

FEW = 12
"""As many as any test of the default suite asks for: they are made in one go."""


LIMIT_SECONDS = 3600.0
"""No test of these waits longer, whatever it waits for: the longest takes half of it."""


@pytest.fixture(autouse=True)
def limit():
    """Ends a wait that would never end, with the line at which it waits."""

    def end(*_: object) -> None:
        raise TimeoutError(f"a test of kills and damage took more than {LIMIT_SECONDS:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Where the text and the definitions of all these sweeps are."""
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture(scope="session")
def undisturbed(folder):
    """undisturbed(n): the record of the sweep of n runs; each run is made once."""
    results = folder / "undisturbed"
    known: Record = {}

    def made(runs: int) -> Record:
        ids = Sweep(folder, runs).run_ids()
        if not known.keys() >= set(ids):
            Sweep(folder, max(runs, FEW)).run(results, 2)
            known.update(record_of(results))
        return {run_id: known[run_id] for run_id in ids}

    return made


BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))


@dataclass
class Database:
    url: str
    stop: Callable[[], None]
    start: Callable[[], None]


@pytest.fixture(scope="module")
def database():
    """A database on a server that lives as long as the module."""
    if not BINARIES or importlib.util.find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL server (Debian's package postgresql), or no psycopg")
    as_user: list[str] = []
    if os.geteuid() == 0:  # the server refuses to run as root
        if not shutil.which("runuser") or "postgres" not in {entry.pw_name for entry in pwd.getpwall()}:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres to run it as")
        as_user = ["runuser", "-u", "postgres", "--"]
    place = subprocess.run(
        [*as_user, "mktemp", "-d", "/tmp/postgres-XXXXXX"], capture_output=True, text=True, check=True
    )
    data = Path(place.stdout.strip())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def server(program: str, *arguments: object) -> None:
        subprocess.run(
            [*as_user, BINARIES[-1] / program, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL, cwd="/tmp"
        )

    server("initdb", "-D", data / "data", "-U", "sweep", "--auth", "trust", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={data} -c fsync=off"
    server("pg_ctl", "-D", data / "data", "-o", options, "-l", data / "log", "-w", "start")
    server("createdb", "-h", data, "-p", port, "-U", "sweep", "sweeps")
    yield Database(
        url=f"postgresql://sweep:secret@127.0.0.1:{port}/sweeps",
        stop=lambda: server("pg_ctl", "-D", data / "data", "-m", "immediate", "stop"),
        start=lambda: server("pg_ctl", "-D", data / "data", "-o", options, "-l", data / "log", "-w", "start"),
    )
    server("pg_ctl", "-D", data / "data", "-m", "immediate", "stop")
    subprocess.run([*as_user, "rm", "-r", data], check=True, cwd="/tmp")
