"""Many models, one at a time: each in a process of its own, and what became of each in a ledger that outlives a kill.

    OUT/measured/NAME.json   {"settings": ..., "models": {name: what is known of it}}

Whatever a model does, a kill for memory included, costs its row alone; the next call tries it again, and no other."""

import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from sparsedepth.files import is_locked, locked, write_json
from sparsedepth.probe.folder import read_json
from sparsedepth.run.process import end_with_parent
from sparsedepth.store.connection import open_store
from sparsedepth.store.packs import refuse_pack
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.plain_text import one_line
from sparsedepth.words.values import assignment

Known = dict[str, Any]
"""Of a model: key, weights (their hash), equal_to (a name), bytes, seconds, run_id; where it failed its reason."""

PATIENCE = 10.0
"""Seconds for which the process of a killed call may still hold the lock."""


class Item(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str:
        """Changes where the files do, or how they are measured."""


@dataclass(kw_only=True)
class Told:
    """A model that was tried now."""

    name: str
    known: Known
    left: int
    """models after it"""


class Ledger:
    """Raises ValueError for one that was made with other settings."""

    def __init__(self, out: Path, name: str, settings: Known):
        refuse_pack(out)
        self.path = out / "measured" / f"{name}.json"
        stored = read_json(self.path) if self.path.exists() else {}
        self.settings: Known = json.loads(json.dumps(settings))
        self.models: dict[str, Known] = stored.get("models", {})
        before = stored.get("settings", self.settings)
        if other := [key for key in {**before, **self.settings} if before.get(key) != self.settings.get(key)]:
            told = ", ".join(f"{assignment(key, before.get(key))}, now {self.settings.get(key)}" for key in other[:3])
            raise ValueError(f"{str(out)!r} has {name!r} with other settings ({told}); give another -o, or repeat them")

    def note(self, name: str, facts: Known) -> None:
        self.models[name] = {**self.models.get(name, {}), **facts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"settings": self.settings, "models": self.models})

    def is_done(self, item: Item) -> bool:
        known = self.models.get(item.name, {})
        return known.get("key") == item.key and known.get("weights") is not None and known["reason"] is None

    def equal_to(self, name: str, weights: str) -> str | None:
        """Another model with these weights that was measured. Raises ValueError for a model that has others now."""
        before = self.models.get(name, {}).get("weights")
        if before not in (None, weights):
            raise ValueError("its weights are not those that were measured before; give another -o")
        done = [other for other, known in self.models.items() if known.get("weights") == weights and other != name]
        return next((other for other in done if not self.models[other].get("equal_to")), None)

    def table(self, out: Path, names: Sequence[str], columns: Sequence[str], **own: Sequence[Any]) -> QueryResult:
        """A row per name: its `own` columns, those of its record in the store, and what else is known of it."""
        known = {name: self.models.get(name, {}) for name in names}
        ids = ", ".join(f"'{each['run_id']}'" for each in known.values() if "run_id" in each)
        rows = dict[str, Known]()
        if ids:
            with open_store(out) as store:
                found = store.sql(f"SELECT run_id, {', '.join(columns)} FROM runs WHERE run_id IN ({ids})")
                rows = {row["run_id"]: row for row in found.records()}
        made = {"name": [*names], **own}
        for column in columns:
            made[column] = [rows.get(each.get("run_id", ""), {}).get(column) for each in known.values()]
        made["seconds"] = [each.get("seconds") for each in known.values()]
        made["note"] = [_note(each) for each in known.values()]
        return QueryResult.from_columns(made)


def _note(known: Known) -> str | None:
    equal = known.get("equal_to")
    return known.get("reason") or (f"has the weights of {equal}, and is measured there" if equal else None)


def one_by_one(
    items: Sequence[Item], ledger: Ledger, work: Callable[[Any], Known], tell: Callable[[Told], None]
) -> None:
    """Calls `work` on each item that the ledger does not have. Raises ValueError where another process is at it."""
    lock = ledger.path.with_suffix(".lock")
    until = time.monotonic() + PATIENCE
    while is_locked(lock) and time.monotonic() < until:
        time.sleep(0.05)
    if is_locked(lock):
        raise ValueError(f"another process measures {str(ledger.path.with_suffix(''))!r}; wait for its end")
    with locked(lock):
        left = [item for item in items if not ledger.is_done(item)]
        for number, item in enumerate(left, start=1):
            began = time.perf_counter()
            known: Known = {"reason": None, **own_process(partial(work, item))}
            for text in known.pop("warnings", ()):
                warnings.warn(text, stacklevel=2)  # once for all models
            ledger.note(item.name, {"key": item.key, "seconds": round(time.perf_counter() - began, 2), **known})
            tell(Told(name=item.name, known=ledger.models[item.name], left=len(left) - number))


def own_process(work: Callable[[], Known]) -> Known:
    """What `work` returns in a fork of this process, which ends with it; a reason where it raises or is killed."""
    import_module("sparsedepth.probe.hf_adapter")  # once, not in each fork
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(work, theirs, os.getpid()))
    child.start()
    theirs.close()
    try:
        return json.loads(ours.recv_bytes())
    except EOFError:
        child.join()
        ended = f"by signal {-(child.exitcode or 0)}" if (child.exitcode or 0) < 0 else f"with {child.exitcode}"
        return {"reason": f"its process ended {ended}, as where memory runs out; free some, or measure fewer tokens"}
    finally:
        child.kill()
        child.join()
        ours.close()


def _work(work: Callable[[], Known], theirs: Connection, parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    end_with_parent(parent)
    known: Known
    with warnings.catch_warnings(record=True) as caught:
        try:
            known = work()
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            known = {"reason": f"{kind}{one_line(error)}"}
    known["warnings"] = sorted({str(each.message) for each in caught})
    theirs.send_bytes(json.dumps(known).encode())
