"""Before a command trains: refuse what is missing, and warn of what is unlikely."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sparsedepth.quantities.quantity import Row

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.machine import Machine

Result = TypeVar("Result")

MAX_LR = 1.0
MAX_TOKENS = 10**14
"""More than any corpus of text holds."""


def warn_of_unlikely_values(values: Iterable[Row]) -> None:
    """Warn of a learning rate above 1, and of more tokens than any corpus has."""
    values = list(values)
    rates = [fields["lr"] for fields in values if fields.get("lr", 0) > MAX_LR]
    tokens = [fields["train_tokens"] for fields in values if fields.get("train_tokens", 0) > MAX_TOKENS]
    if rates:
        warnings.warn(f"lr={max(rates):g} is above 1, where AdamW diverges; is a minus missing in 1e-3?", stacklevel=2)
    if tokens:
        warnings.warn(f"train_tokens={max(tokens):,} is more than any text corpus holds", stacklevel=2)


def check_tokenizers(values: Iterable[Row], results: Path) -> None:
    """Raises ValueError for an unavailable tokenizer, before torch is imported. Skipped for an existing results folder,
    which may hold the tokens."""
    from sparsedepth.config.corpus import kind_of
    from sparsedepth.data.tokenizer import check_reachable

    if not results.exists():
        text_runs = [run for run in values if "tokenizer" in run and kind_of(run.get("corpus")).is_tokenised]
        for name in {str(run["tokenizer"]) for run in text_runs}:
            check_reachable(name)


def check_corpora(values: Iterable[Row], results: Path | None) -> None:
    """Raises ValueError for a missing local text folder. Skipped for an existing results folder, which may
    hold the tokens."""
    from sparsedepth.data.sequences import check_files

    if results is None or not results.exists():
        for corpus in sorted({str(run["corpus"]) for run in values if "corpus" in run}):
            check_files(corpus)


def field_values(definition: "SweepDefinition") -> Iterable[Row]:
    """The values that a sweep gives to run fields; for a range its upper end."""
    from sparsedepth.config.space import Interval

    yield from (values for _, values in definition.parts())
    for name, axis in definition.space.items():
        if isinstance(axis, Interval):
            yield {name: axis.high}


def with_cleanup(results: Path, start: Callable[[], Result]) -> Result:
    """`start()`; if it raises ValueError before any run began, the results folder that it created is removed."""
    existed = results.exists()
    try:
        return start()
    except ValueError:
        if not existed and results.is_dir():
            _remove_if_no_runs(results)
        raise


def _remove_if_no_runs(results: Path) -> None:
    """Remove the files written before the first run; tokenised text and unknown files stay."""
    from sparsedepth.config.sweep import DEFINITION

    records = [*results.glob("runs/*"), *results.glob("toys/*"), *results.glob("study*")]
    logs = [*results.glob("work/*/log.txt"), *results.glob("work/*/failures*"), *results.glob("work/*/checkpoints/*")]
    if records or logs:
        return
    (results / DEFINITION).unlink(missing_ok=True)
    for name in ("work", "slurm"):
        shutil.rmtree(results / name, ignore_errors=True)
    for lock in results.glob("data/.*.lock"):
        if not (lock.parent / lock.name[1:].removesuffix(".lock")).exists():
            lock.unlink()
    for folder in (*sorted(results.rglob("*"), reverse=True), results):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def check_machine(plan: "Plan", machine: "Machine") -> None:
    """Raises ValueError for a kernel or a number of threads that a CPU does not have; torch is not asked where nothing
    was asked for by name. On a GPU the run's process checks, since the check allocates GPU memory."""
    from sparsedepth.config.role import changed

    by_name = changed(machine.runtime).keys() - {"device", "threads", "stack", "checkpoint_seconds", "micro_batch"}
    if not machine.gpus and (by_name or (machine.runtime.threads or 1) > (os.cpu_count() or 1)):
        from sparsedepth.train.runtime import resolve

        for config in plan.expected_runs():
            resolve(config, machine.runtime)
