"""Many models, one at a time: each in a process of its own, and what became of each in a ledger that outlives a kill.

    OUT/measured/NAME.json   {"settings": ..., "models": {name: what is known of it}}

Whatever a model does, a kill for memory included, costs its row alone; the next call tries it again, and no other."""

import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sparsedepth.files import locked, write_json
from sparsedepth.probe.folder import read_json
from sparsedepth.run.process import end_with_parent
from sparsedepth.store.connection import open_store
from sparsedepth.store.packs import refuse_pack
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.plain_text import one_line

if TYPE_CHECKING:
    from sparsedepth.probe.load import LoadedModel

Known = dict[str, Any]
"""Of a model: key, weights (their hash), equal_to (a name), bytes, seconds, run_id; where it failed its reason."""
Tell = Callable[[str, Known, int], None]
"""Gets what is known of a model, and how many are left."""
PROBE_SECONDS = 10.0
"""After which a fork that computes for a moment is taken to wait for ever."""


class Ledger:
    """Raises ValueError for one that was made with other settings."""

    def __init__(self, out: Path, name: str, settings: Known):
        refuse_pack(out)
        self.out, self.path = out, out / "measured" / f"{name}.json"
        self.stored = {"settings": json.loads(json.dumps(settings)), "models": {}}
        self.read()

    def read(self) -> None:
        """What is known by now."""
        if self.path.exists():
            now, self.stored = self.stored["settings"], read_json(self.path)
            before = self.stored["settings"]
            for key in {**before, **now}:
                if before.get(key) != now.get(key):
                    raise ValueError(
                        f"{str(self.out)!r} has {self.path.stem!r} with another {key}={before.get(key)}, "
                        f"now {now.get(key)}; give another -o"
                    )

    @property
    def models(self) -> dict[str, Known]:
        return self.stored["models"]

    def note(self, name: str, **facts: Any) -> Known:
        self.models[name] = {**self.models.get(name, {}), **facts}
        write_json(self.path, self.stored)
        return self.models[name]

    def measured(self, name: str, loaded: "LoadedModel", weights: str, measure: Callable[[], str]) -> Known:
        """What is known of a loaded model after `measure`, which gives its run_id, unless another that was measured has
        its weights. Raises ValueError for a model that has others now."""
        if self.models.get(name, {}).get("weights", weights) != weights:
            raise ValueError("its weights are not those that were measured before; give another -o")
        alike = {other: known for other, known in self.models.items() if known.get("weights") == weights}
        equal = next((other for other, known in alike.items() if other != name and not known.get("equal_to")), None)
        n_bytes = sum(path.stat().st_size for path in loaded.weights)
        return {"weights": weights, "bytes": n_bytes, "equal_to": equal, "run_id": None if equal else measure()}

    def table(self, columns: str, rows: Mapping[str, Known]) -> QueryResult:
        """The rows by name, with these columns of their records in the store, seconds, and a note."""
        known = {name: {"run_id": None} | row | self.models.get(name, {}) for name, row in rows.items()}
        for each in known.values():
            twin = each.get("equal_to")
            each["note"] = each.get("reason") or (f"has the weights of {twin}, and is measured there" if twin else None)
        frame = pd.DataFrame(known.values()).assign(name=[*known])
        first = ["name", *next(iter(rows.values())), *columns.split(", ")]
        if frame["run_id"].notna().any():
            with open_store(self.out) as store:
                frame = frame.merge(store.frame(f"select run_id, {columns} from runs"), "left", "run_id")
        return QueryResult.of_frame(frame.reindex(columns=[*first, "seconds", "note"]).convert_dtypes())


def one_by_one(keys: Mapping[str, str], ledger: Ledger, work: Callable[[str], Known], tell: Tell) -> None:
    """Calls `work` on each name that the ledger does not have as done with its key, which changes where its files do.
    `tell` gets what is known of it, and how many are left. A second call waits for the first."""
    with locked(ledger.path.with_suffix(".lock")):
        ledger.read()  # again: another call may have written it meanwhile
        done = {name for name, known in ledger.models.items() if known["key"] == keys.get(name) and not known["reason"]}
        left = [name for name in keys if name not in done]
        if left:
            import_module("sparsedepth.probe.hf_adapter")  # once, not in each fork
            _compute_on_one_thread()
        for number, name in enumerate(left, start=1):
            began = time.perf_counter()
            known: Known = {"reason": None, "key": keys[name], **_own_process(partial(work, name))}
            for text in known.pop("warnings", ()):
                warnings.warn(text, stacklevel=2)  # once for all models
            tell(name, ledger.note(name, seconds=round(time.perf_counter() - began, 2), **known), len(left) - number)


def _compute_on_one_thread() -> None:
    """Where a fork would wait for ever for OpenMP's threads, as it does once this process has computed on several."""
    import torch

    probe = multiprocessing.get_context("fork").Process(target=lambda: torch.ones(2**20).exp())
    probe.start()
    probe.join(PROBE_SECONDS)
    if probe.exitcode is None:
        probe.kill()
        torch.set_num_threads(1)
        warnings.warn("models are measured on one thread, as this process has computed on several", stacklevel=3)


def _own_process(work: Callable[[], Known]) -> Known:
    """What `work` returns in a fork of this process, which ends with it; a reason where it raises or is killed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(work, theirs, os.getpid()))
    child.start()
    theirs.close()
    try:
        return json.loads(ours.recv_bytes())
    except EOFError:
        child.join()
        return {"reason": f"its process ended with {child.exitcode}, as where memory runs out; measure fewer tokens"}
    finally:
        child.kill()
        child.join()


def _work(work: Callable[[], Known], theirs: Connection, parent: int) -> None:
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
