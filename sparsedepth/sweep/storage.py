"""Where the study is kept, and what goes wrong there, in one line without a password.

    RESULTS/study.journal     Optuna's journal: a line of JSON for each change; one machine, or a shared folder
    postgresql://...          a database (--storage): many machines

A journal needs no tables, so that any number of processes may open a fresh one at a moment, no URL, so that the folder
may have any name, and no transaction before a read, so that two workers never take one trial. Against SQLite in the
same place (2 busy cores, local disk): 400 trials taken and told by 4 processes in 6 s instead of 167 s. Its lock is an
flock, which falls with a killed process (Optuna's own is waited for 30 s); whoever holds it next drops the half line
that a full disk or a power cut may have left.
"""

import ctypes
import fcntl
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import optuna
import sqlalchemy
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError, PendingRollbackError, SQLAlchemyError

JOURNAL = "study.journal"

ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError)
"""What the study's database raises."""

PATIENCE_SECONDS = 600.0
"""How long a database that does not answer is tried again."""

PROBE_BYTES = 2**20
"""A disk that has no room for this much is full."""

_CREATION_LOCK = 0x5D3F
"""A number of ours among PostgreSQL's advisory locks: two processes must not create the tables at one moment."""


class JournalLock(JournalFileOpenLock):
    """An flock beside the journal, in place of a file that a killed process would leave.

    Taking it cuts off what follows the journal's last whole line.
    """

    def __init__(self, journal: Path):
        super().__init__(str(journal))
        self.journal = journal
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Wait until it is held."""
        self._handle = os.open(self.journal.with_name(f".{self.journal.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        with open(self.journal, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Let go."""
        assert self._handle is not None
        os.close(self._handle)


def open_storage(url: str | None, results: Path) -> optuna.storages.BaseStorage:
    """The database at a URL, or the journal in the results folder. Raises ValueError for what is no URL of ours."""
    if url is None:
        journal = results / JOURNAL
        backend = JournalFileBackend(str(journal), lock_obj=JournalLock(journal))
        try:
            return optuna.storages.JournalStorage(backend)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(
                f"{journal} is damaged ({type(error).__name__}); delete it, and the same command makes it anew"
            ) from None
    address = database_url(url)
    engine = sqlalchemy.create_engine(address)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(f"select pg_advisory_xact_lock({_CREATION_LOCK})"))
        storage = optuna.storages.RDBStorage(
            address.render_as_string(hide_password=False), engine_kwargs={"pool_pre_ping": True}
        )
    engine.dispose()
    return storage


def database_url(url: str) -> sqlalchemy.URL:
    """The URL as SQLAlchemy wants it. Raises ValueError, which never shows it."""
    hint = "give postgresql://USER@HOST/DATABASE, with the password in SPARSEDEPTH_STORAGE or in ~/.pgpass"
    try:
        address = sqlalchemy.make_url(url)
    except (ArgumentError, ValueError):
        raise ValueError(f"--storage is no URL of a database; {hint}") from None
    dialect, _, driver = address.drivername.partition("+")
    if dialect not in ("postgresql", "postgres"):
        raise ValueError(
            f"--storage {dialect}: is not supported; {hint}, or leave it out: DIR/{JOURNAL} serves a shared folder"
        )
    if "@" in (address.host or ""):
        raise ValueError(f"--storage has an @ in its user or password; write it as %40, or {hint}")
    driver = driver or "psycopg"
    if importlib.util.find_spec(driver) is None:
        raise ValueError(f"--storage needs the package {driver}; pip install 'sparsedepth[postgres]'")
    return address.set(drivername=f"postgresql+{driver}")


def shown(url: str | None, results: Path) -> str:
    """What the storage is called in a message: without user and password."""
    if url is None:
        return str(results / JOURNAL)
    address = database_url(url)
    return f"--storage postgresql://{address.host or ''}/{address.database or ''}"


def hide_url(url: str) -> None:
    """Blank a URL, which may hold a password, on this process's command line, where `ps` shows it to every user."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
        place = ctypes.string_at(begin, end - begin).find(url.encode())
    except (OSError, ValueError, IndexError):  # not Linux
        return
    if place >= 0:
        ctypes.memset(begin + place, ord("*"), len(url.encode()))


def is_lost(error: BaseException) -> bool:
    """Whether an exception is that of a connection that broke, and may come back."""
    cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
    return isinstance(cause, OperationalError | InterfaceError | PendingRollbackError)


class StorageWait:
    """Waits for a database that does not answer, at growing intervals, and says once that it does."""

    def __init__(self) -> None:
        self._lost_since: float | None = None

    def wait(self, error: Exception, stop: Callable[[], bool]) -> None:
        """Let some time pass. Raises the error where it is no lost connection, or has lasted PATIENCE_SECONDS."""
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
            if is_lost(error):
                since = time.strftime("%H:%M:%S")  # and so said each time that it is lost
                warnings.warn(
                    f"since {since} the database of the study does not answer; trying again for "
                    f"{PATIENCE_SECONDS / 60:.0f} minutes",
                    stacklevel=2,
                )
        if not is_lost(error) or now > self._lost_since + PATIENCE_SECONDS:
            raise error
        time.sleep(min(30.0, 1.0 + 0.5 * (now - self._lost_since)) if not stop() else 0.0)

    def end(self) -> None:
        """The database has answered."""
        self._lost_since = None


@contextmanager
def explained(url: str | None, results: Path) -> Generator[None]:
    """Turn what the study's storage raises into a ValueError; a full disk is named as the cause."""
    try:
        yield
    except ERRORS as error:
        check_room(results)
        cause = getattr(error.__cause__ or error, "orig", None) or error.__cause__ or error
        lines = " ".join(str(cause).split())
        raise ValueError(
            f"{shown(url, results)} cannot be used: {lines}; what is finished is kept: the same command continues"
        ) from None
    except OSError:
        check_room(results)
        raise


def check_room(results: Path) -> None:
    """Raises ValueError if nothing can be written to the results folder any more."""
    probe = results / f".room-{os.getpid()}"
    try:
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{results} cannot be written ({error.strerror}); what is finished is kept: mend the cause and give the "
            f"same command again"
        ) from None
