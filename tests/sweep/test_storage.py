"""Where the study is kept: what a URL may be, what is never shown, and a journal that was damaged."""

import fcntl
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import optuna
import pytest
from sqlalchemy.exc import OperationalError
from support.instant_sweep import SPACE, Sweep, run_ids, sweep, work
from support.tiny_sweep import ENVIRONMENT

from sparsedepth import files
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.plan.tasks import Plan
from sparsedepth.run.execute import execute
from sparsedepth.sweep import driver, storage, trial_queue
from sparsedepth.sweep.machine import machine
from sparsedepth.sweep.results_folder import claim, delete_leftovers, prepare
from sparsedepth.sweep.storage import database_url, open_storage
from sparsedepth.words.sweep import storage_text


def test_a_journal_that_was_deleted_is_an_error_each_time(tmp_path):
    """The lock is released, so that nobody waits for it for ever."""
    lock = storage.JournalLock(tmp_path / "study.journal")
    with pytest.raises(FileNotFoundError):
        lock.acquire()
    with files.open_regular(tmp_path / ".study.journal.lock", 0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_the_ordinary_url_of_a_database_works(scheme, tmp_path):
    address = database_url(f"{scheme}://user:secret@host:5433/sweeps?sslmode=require")
    assert address.drivername == "postgresql+psycopg" and address.password == "secret"
    assert (address.host, address.port, address.query["sslmode"]) == ("host", 5433, "require")
    assert (
        storage_text(database_url(f"{scheme}://user:secret@host:5433/sweeps"), tmp_path)
        == "--storage postgresql://host/sweeps"
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite://", "sqlite: is not supported"),
        ("sqlite:////tmp/secret.db", "sqlite: is not supported"),
        ("mysql://user:secret@host/db", "mysql: is not supported"),
        ("user:secret@host", "is not a database URL"),
        ("postgresql://user:p@secret@host/db", "write it as %40"),
        ("postgresql+asyncpg2://user:secret@host/db", "needs the package asyncpg2; in a clone"),
    ],
)
def test_what_is_no_url_of_ours_is_refused_and_not_shown(tmp_path, url, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        open_storage(url, tmp_path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["postgresql://u:secret@127.0.0.1:1/db", "postgresql://127.0.0.1:1/db?user=u&password=secret"]
)
def test_a_failure_shows_no_password(tmp_path, url):
    with (
        pytest.raises(ValueError, match=r"postgresql://127\.0\.0\.1/db cannot be used") as caught,
        storage.with_error_messages(url, tmp_path),
    ):
        open_storage(url, tmp_path)
    assert "secret" not in str(caught.value) and caught.value.__suppress_context__


@pytest.mark.skipif(sys.platform != "linux", reason="the command line is in /proc")
def test_the_url_is_blanked_on_the_command_line():
    code = """
import sys
from sparsedepth.words.sweep import storage_text
from sparsedepth.sweep.storage import hide_url
hide_url(sys.argv[2])
print(open("/proc/self/cmdline").read().split(chr(0))[3:6], sys.argv[2])
"""
    url = "postgresql://u:secret@host/db"
    out = subprocess.run([sys.executable, "-c", code, "a", url, "b"], env=ENVIRONMENT, capture_output=True, text=True)
    assert out.stdout.strip() == f"{['a', '*' * len(url), 'b']} {url}", out.stderr


@pytest.mark.parametrize("name", ["what?", "50% off", "a#b&c=d", "s p a c e", "sqlite:x"])
def test_any_folder_may_hold_a_journal(tmp_path, name):
    results = tmp_path / name
    work(results, sweep(space={"n_layers": [1]}))
    assert (results / "study.journal").stat().st_size and len(run_ids(results)) == 1
    assert not [path for path in tmp_path.rglob("study*") if path.parent != results]


def test_work_begins_no_study_and_leaves_nothing_where_there_is_none(tmp_path):
    """As where the sweep's --storage is forgotten: a second queue would share out the same runs."""
    definition = sweep(space={"n_layers": [1]})
    claim(tmp_path, definition)
    with pytest.raises(ValueError, match=r"study.journal has no study of the sweep in .*; give the same --storage as"):
        driver.Driver(Plan(definition), tmp_path, machine(1, RuntimeConfig(device="cpu"))).join()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]
    work(tmp_path, definition)
    assert storage.has_study(definition, None, tmp_path)
    assert not storage.has_study(sweep(space={"n_layers": [1, 2]}), None, tmp_path)


HALF = b'{"op_code": 4, "wor'
"""as a full disk or a power cut leaves"""


@pytest.mark.parametrize("end", [HALF, HALF + b"\n", b"\0" * 512 + b"\n\n", b"\xff\xfe\n", b"[" * 5000 + b"\n"])
def test_a_damaged_last_line_is_dropped_when_the_study_is_opened_and_a_half_one_by_whoever_writes_next(tmp_path, end):
    definition = sweep(space={"n_layers": [1, 2]})
    driver = Sweep(definition, tmp_path)
    before = (tmp_path / "study.journal").read_bytes()
    (tmp_path / "study.journal").write_bytes(before + end)
    study = driver.finish() if end == HALF else work(tmp_path, definition)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    assert (tmp_path / "study.journal").read_bytes().startswith(before)


def test_noise_in_the_journal_is_said_and_the_study_is_made_anew(tmp_path):
    definition = sweep(sampler="tpe", n_trials=4, space=SPACE)
    work(tmp_path, definition)
    before = run_ids(tmp_path)
    for noise in (random.Random(0).randbytes(4000), b"[" * 5000):
        (tmp_path / "study.journal").write_bytes(noise + b"\n" + b"0\n")
        with pytest.raises(ValueError, match=r"study.journal is damaged \(.*\); delete it"):
            Sweep(definition, tmp_path)
    (tmp_path / "study.journal").unlink()
    assert len(work(tmp_path, definition).trials) == 4 and run_ids(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../x"])
def test_a_damaged_id_of_the_folder_is_told_with_the_fix(tmp_path, content):
    """An empty one would be the same for every such folder, and in a shared database so would the study."""
    name = storage.folder_id(tmp_path)
    assert storage.folder_id(tmp_path) == name
    (tmp_path / storage.FOLDER_ID).write_bytes(content)
    with pytest.raises(ValueError, match=r"work/folder-id is damaged; delete it, and run the same command"):
        storage.folder_id(tmp_path)


def lost(*_: object) -> None:
    raise OperationalError("select 1", {}, Exception("server closed the connection unexpectedly"))


def test_a_lost_connection_is_tried_again_and_nothing_is_lost(tmp_path, monkeypatch):
    """When a task is taken, and when a result is told."""
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    counts, rng = {"_begin": 0, "tell": 0}, random.Random(0)

    def sometimes(name, original):
        def call(*arguments):
            if rng.random() < 0.5:
                counts[name] += 1
                lost()
            return original(*arguments)

        return call

    sweeping = Sweep(sweep(sampler="tpe", n_trials=10, space=SPACE), tmp_path)
    for place, name in ((trial_queue.Queue, "_begin"), (trial_queue, "tell")):
        monkeypatch.setattr(place, name, sometimes(name, getattr(place, name)))
    with pytest.warns(UserWarning, match="retrying for 10 minutes"):
        while sweeping.assign():
            sweeping._advance()
    monkeypatch.undo()
    assert all(counts.values()), "nothing was lost: the test shows nothing"
    assert len(run_ids(tmp_path)) == 10 and not sweeping.queue.undone()
    states = [trial.state for trial in sweeping.study.trials]
    assert len(states) == 10 and set(states) <= set(trial_queue.SETTLED)


def test_a_connection_that_is_lost_at_the_end_of_a_sweep_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    sweeping = Sweep(sweep(space={"n_layers": [1, 2]}), tmp_path)
    sweeping.finish()
    answers = iter([lost, lost, trial_queue.Queue.refused])
    monkeypatch.setattr(trial_queue.Queue, "refused", lambda queue: next(answers)(queue))
    with pytest.warns(UserWarning, match=r"the study's database has not answered since \d\d:\d\d:\d\d"):
        assert sweeping._result(sweeping.queue).unfinished == 0
    assert not list(answers)


def test_a_connection_that_does_not_come_back_is_given_up_and_another_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    sweeping = Sweep(sweep(space={"n_layers": [1]}), tmp_path)
    monkeypatch.setattr(trial_queue.Queue, "take", lost)
    assert sweeping.assign()
    monkeypatch.setattr(storage, "RETRY_SECONDS", -1.0)
    with pytest.raises(OperationalError):
        sweeping.assign()

    def broken(*_: object) -> None:
        raise optuna.exceptions.StorageInternalError("not a lost connection")

    monkeypatch.undo()
    monkeypatch.setattr(trial_queue.Queue, "take", broken)
    with pytest.raises(optuna.exceptions.StorageInternalError):
        sweeping.assign()


def test_a_clock_that_is_fast_sweeps_away_nothing_of_the_living(tmp_path, monkeypatch):
    """Of another machine the lease beats and a file is being written, by the folder's clock; ours is an hour ahead."""
    lease, written = tmp_path / "work" / f"sweep-{'1' * 32}.lock", tmp_path / ".sweep.yaml.tmp-17"
    lease.parent.mkdir()
    lease.write_text("another kernel")
    written.touch()
    clock = time.time
    monkeypatch.setattr("time.time", lambda: clock() + 3600)
    delete_leftovers(tmp_path)
    assert lease.exists() and written.exists()


def test_leftovers_of_dead_processes_are_swept(tmp_path):
    """What is young may be a living process's."""
    scratch = tmp_path / "work" / ("0" * 12)
    scratch.mkdir(parents=True)
    old = [tmp_path / "work" / f"sweep-{'1' * 32}.lock", tmp_path / ".sweep.yaml.tmp-17", scratch / ".progress-4"]
    old += [scratch / f".lock-{'2' * 32}", tmp_path / "work" / f".queue.lock-{'3' * 32}", tmp_path / ".room-9"]
    kept = [scratch / "failures.json", tmp_path / ".gitignore", scratch / ".progress-5"]
    for path in (*old, *kept):
        path.touch()
        os.utime(path, (0, 0))
    os.utime(kept[-1])
    delete_leftovers(tmp_path)
    assert not any(path.exists() for path in old) and all(path.exists() for path in kept)


@pytest.mark.parametrize("place", ["work", f"work/{'0' * 12}", f"work/{'0' * 12}/checkpoints", "runs"])
def test_a_link_where_a_sweep_deletes_is_refused_and_what_it_leads_to_is_left_alone(tmp_path, place):
    elsewhere, results = tmp_path / "elsewhere", tmp_path / "results"
    names = ["step-000000001.json", "failures.json", "memory.json", f"sweep-{'1' * 32}.lock", ".progress-4"]
    for folder in (elsewhere, elsewhere / "checkpoints", elsewhere / ("0" * 12) / "checkpoints"):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
            os.utime(folder / name, (0, 0))
    before = sorted(elsewhere.rglob("*"))
    complete = results / "runs" / ("0" * 12)
    if place != "runs":
        complete.mkdir(parents=True)
        (complete / "complete").touch()
    (results / place).parent.mkdir(parents=True, exist_ok=True)
    (results / place).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link"):
        prepare(results, sweep(space={"n_layers": [1]}), 2)
    config = sweep(space={"n_layers": [1]}).run_config({"n_layers": 1}, 0)
    if place in ("work", "runs"):
        with pytest.raises(ValueError, match="is a link"):
            execute(config, results)
    assert sorted(elsewhere.rglob("*")) == before


def test_noise_in_the_definition_of_a_folder_is_said(tmp_path):
    (tmp_path / "sweep.yaml").write_bytes(b"\x00\xff: [")
    with pytest.raises(ValueError, match=r"sweep.yaml is damaged, delete it"):
        claim(tmp_path, sweep(space={"n_layers": [1]}))
    (tmp_path / "sweep.yaml").unlink()
    claim(tmp_path, sweep(space={"n_layers": [1]}))


def test_of_two_sweeps_that_claim_a_fresh_folder_at_one_moment_one_is_refused(tmp_path, monkeypatch):
    write = files.write_text

    def slowly(path, content):
        time.sleep(0.2)  # in which the other would find no definition
        write(path, content)

    monkeypatch.setattr(files, "write_text", slowly)
    with ThreadPoolExecutor(2) as pool:
        claims = [pool.submit(claim, tmp_path, sweep(name=name, space={"n_layers": [1]})) for name in ("a", "b")]
    refused = [error for made in claims if (error := made.exception())]
    assert len(refused) == 1 and "holds another sweep" in str(refused[0])


def test_a_database_that_has_answered_is_waited_for_anew(monkeypatch):
    now, gone, retry = (
        [0.0],
        OperationalError("select 1", None, Exception("gone")),
        storage.ConnectionRetry(lambda: False),
    )
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None, strftime=time.strftime)
    monkeypatch.setattr(storage, "time", clock)
    for start in (0.0, storage.RETRY_SECONDS + 1):
        now[0] = start
        with pytest.warns(UserWarning, match="has not answered since"):
            retry.wait(gone)
        if start == 0.0:
            retry.reset()
    now[0] += storage.RETRY_SECONDS + 1
    with pytest.raises(OperationalError):
        retry.wait(gone)
