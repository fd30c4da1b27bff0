"""The start of a command that makes runs: what looks like a slip is said, and a start that fails leaves nothing."""

import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition

Result = TypeVar("Result")

MAX_LR = 1.0
MAX_TOKENS = 10**14
"""More than any corpus of text holds."""

STARTED = ("sweep.yaml", "plan.json")
"""Files that a sweep writes before its first run."""


def warn_of_slips(values: Iterable[Mapping[str, Any]]) -> None:
    """Warn of values that are possible and hardly meant: a learning rate above 1, tokens beyond any corpus."""
    known = list(values)
    rates = [given["lr"] for given in known if given.get("lr", 0) > MAX_LR]
    tokens = [given["train_tokens"] for given in known if given.get("train_tokens", 0) > MAX_TOKENS]
    if rates:
        warnings.warn(f"lr={max(rates):g} is above 1, where AdamW diverges; is a minus missing in 1e-3?", stacklevel=2)
    if tokens:
        warnings.warn(f"train_tokens={max(tokens):,} are more than any corpus of text holds", stacklevel=2)


def check_tokenizers(values: Iterable[Mapping[str, Any]], results: Path) -> None:
    """Refuse a tokenizer that cannot be had, before torch is imported. A folder that is there may hold the tokens.
    Raises ValueError."""
    from sparsedepth.config.images import is_text
    from sparsedepth.data.tokenizer import check_reachable

    if not results.exists():
        known = [given for given in values if "tokenizer" in given and is_text(str(given.get("corpus", "stdlib")))]
        for name in {str(given["tokenizer"]) for given in known}:
            check_reachable(name)


def check_corpora(values: Iterable[Mapping[str, Any]], results: Path | None) -> None:
    """Refuse a local text, or a folder of images, that is not here, as `sweep` does. A results folder that is there may
    hold the tokens. Raises ValueError."""
    from sparsedepth.config.images import is_images, is_text
    from sparsedepth.config.task import SFT
    from sparsedepth.data.corpus import HUB, STDLIB, local_files
    from sparsedepth.data.images import DIGITS, IMAGES, class_folders

    if results is None or not results.exists():
        corpora = {str(given["corpus"]) for given in values if "corpus" in given} - {STDLIB, IMAGES + DIGITS}
        for corpus in sorted(corpora):
            if is_images(corpus) and not corpus.startswith(IMAGES + HUB):
                class_folders(corpus)
            elif is_text(corpus) and not corpus.startswith(HUB):
                local_files(corpus.removeprefix(SFT))


def values_of(definition: "SweepDefinition") -> Iterable[Mapping[str, Any]]:
    """What a sweep gives to the fields of its runs; of a range its upper end."""
    from sparsedepth.config.space import Interval

    yield from (values for _, values in definition.parts())
    for name, axis in definition.space.items():
        if isinstance(axis, Interval):
            yield {name: axis.high}


def leaving_nothing(results: Path, start: Callable[[], Result]) -> Result:
    """What `start()` returns; where it raises ValueError before any run was made, the folder it made is removed."""
    was_there = results.exists()
    try:
        return start()
    except ValueError:
        if not was_there and results.is_dir():
            _drop_empty(results)
        raise


def _drop_empty(results: Path) -> None:
    """Remove what was written before the first run; a tokenised text and anything unknown stay."""
    made = [*results.glob("runs/*"), *results.glob("toys/*"), *results.glob("study*")]
    logs = [*results.glob("work/*/log.txt"), *results.glob("work/*/failures*"), *results.glob("work/*/checkpoints/*")]
    if made or logs:
        return
    for name in STARTED:
        (results / name).unlink(missing_ok=True)
    for name in ("work", "slurm"):
        shutil.rmtree(results / name, ignore_errors=True)
    for lock in results.glob("data/.*.lock"):
        if not (lock.parent / lock.name[1:].removesuffix(".lock")).exists():
            lock.unlink()
    for folder in (*sorted(results.rglob("*"), reverse=True), results):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
