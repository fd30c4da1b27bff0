"""A training from its checkpoints: each revision of a model is a point of a series, as `watch` writes them in a loop.

    OUT/runs/<run_id>/            a point: an imported run with its step, of cluster NAME
    OUT/measured/NAME.json        what became of each revision

From the last step back: where several names serve the same weights, the latest is the one that can be right
(EleutherAI/pythia#205: 86 of 154 branches of a model serve late weights), and they are measured once, there."""

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sparsedepth.config.run import MeasureConfig
from sparsedepth.config.section import Fields
from sparsedepth.data.tokenizer import TOKENIZER_FILE
from sparsedepth.files import sha256
from sparsedepth.probe.load import SIZES, LoadedModel, load_model
from sparsedepth.probe.revisions import Revision, keep_newest, revisions
from sparsedepth.probe.text import TokenArrays, tokens_to_measure
from sparsedepth.run.measure_existing_model import measure_existing_model, measuring_config, model_facts
from sparsedepth.run.one_by_one import Known, Ledger, Told, one_by_one
from sparsedepth.run.publish import Stopwatch
from sparsedepth.store.query_result import QueryResult
from sparsedepth.train.runtime import find_device, measuring_device
from sparsedepth.watch.points import Points, Training

SCORES = (
    "val_loss", "needed_layers", "usefulness_loss_increase", "causal_score", "permutation_score",
    "residual_variance_last",
)  # fmt: skip
"""Of a row; the others are in the store."""


@dataclass(kw_only=True)
class Series:
    model: str
    name: str
    out: Path
    tokens_per_step: int | None
    measuring: Fields
    training: Fields
    """what is known of the training, fields of a run: seed, depth_scale, ..."""
    data: str | None
    given: TokenArrays | None
    device: str
    keep: int | None
    """downloads to keep; None: all"""
    ledger: Ledger = field(init=False)
    _of_step: dict[int, str] = field(default_factory=dict)

    def measure(self, wanted: Sequence[str], tell: Callable[[Told], None]) -> QueryResult:
        """A row per revision, by step. Raises ValueError where no revision fits, and for other settings than before."""
        if self.keep is not None and Path(self.model).exists():
            raise ValueError(f"--keep deletes downloads, and {self.model!r} is a folder; leave it out")
        every = sorted(revisions(self.model, wanted), key=lambda each: (each.step is None, each.step, each.name))
        settings = {
            "model": self.model, "tokens_per_step": self.tokens_per_step, "data": self.data, **self.measuring,
            **self.training, "tokens": self.given and self.given.data_hash,
        }  # fmt: skip
        self.ledger = Ledger(self.out, self.name, settings)
        for each in every:
            self._of_step.setdefault(each.step or 0, each.name)
        one_by_one(every[::-1], self.ledger, self._measured, tell)
        return self.ledger.table(
            self.out, [each.name for each in every], ("tokens_trained", *SCORES), step=[each.step for each in every]
        )

    def _measured(self, revision: Revision) -> Known:
        """In its own process. Raises ValueError for a revision that is no point of this series."""
        step = revision.step
        if step is None:
            raise ValueError("its name tells no step, such as 'step1000' or 'checkpoint-1000'")
        if (other := self._of_step[step]) != revision.name:
            raise ValueError(f"step {step} is that of {other}, too; name one of them in --revisions")
        with self._loaded(revision) as loaded:
            facts = {"weights": loaded.weights_hash, "bytes": sum(path.stat().st_size for path in loaded.weights)}
            if equal := self.ledger.equal_to(revision.name, loaded.weights_hash):
                return {**facts, "equal_to": equal}
            return {**facts, **self._point(loaded, step)}

    @contextmanager
    def _loaded(self, revision: Revision) -> Generator[LoadedModel]:
        """The model; a download of a series that keeps few is deleted afterwards. Raises ValueError where the disk has
        no room for it."""
        downloads = None if self.keep is None else self.out / "downloads"
        largest = max((known.get("bytes", 0) for known in self.ledger.models.values()), default=0)
        if not Path(revision.source).exists() and (free := shutil.disk_usage(self.out).free) < largest:
            raise ValueError(f"the disk has {free:,} bytes free, and a revision {largest:,}; free some, or --keep 0")
        device = measuring_device(find_device(self.device))
        try:
            yield load_model(revision.source, device=device, downloads=downloads)
        finally:
            if downloads is not None and downloads.exists():
                keep_newest(downloads, self.keep or 0)

    def _point(self, loaded: LoadedModel, step: int) -> Known:
        """Measures it, unless its record is there. Raises ValueError where it reads other tokens than the others."""
        words = loaded.folder / TOKENIZER_FILE
        facts = {"tokenizer": sha256(words) if words.exists() and self.given is None else None}
        for other, known in self.ledger.models.items():
            if known.get("tokenizer", facts["tokenizer"]) != facts["tokenizer"]:
                raise ValueError(f"its tokenizer is not that of {other}, so it reads other tokens; give --tokens")
        config = measuring_config(loaded, self.measuring, self.given)
        measured = {name: value for name, value in config if name in MeasureConfig.model_fields and _is_number(value)}
        sizes = {name: getattr(loaded.facts, name) for name in SIZES}
        stopwatch = Stopwatch()
        with tokens_to_measure(loaded, config, self.data, self.given, root=self.out / "data") as tokens:
            training = Training(
                name=self.name,
                fields={**sizes, **measured, **self.training},
                tokens_per_step=self.tokens_per_step,
                n_params=loaded.facts.params_total,
                data_hash=tokens.source.data_hash,
            )
            points = Points(self.out, training)
            if not points.has(step, {}):
                found = measure_existing_model(loaded, tokens, config, step=step).measurements
                made = model_facts(loaded, tokens)
                points.write(step, {}, found, stopwatch.seconds(), loaded.probed.device.type, made)
        return {**facts, "run_id": training.run_at(step, {}).run_id}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
