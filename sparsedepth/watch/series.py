"""A training from its checkpoints: each revision of a model is a point of a series, as `watch` writes them in a loop.

    OUT/runs/<run_id>/            a point: an imported run with its step, of cluster NAME
    OUT/measured/NAME.json        what became of each revision

From the last step back: where several names serve the same weights, the latest is the one that can be right
(EleutherAI/pythia#205: 86 of 154 branches of a model serve late weights), and they are measured once, there."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparsedepth.config.run import MeasureConfig
from sparsedepth.config.section import Fields
from sparsedepth.probe.load import SIZES, LoadedModel, load_model
from sparsedepth.probe.revisions import revisions
from sparsedepth.probe.text import TokenArrays, tokens_to_measure
from sparsedepth.run.measure_existing_model import measure_existing_model, measuring_config, model_facts
from sparsedepth.run.one_by_one import Known, Ledger, Tell, one_by_one
from sparsedepth.run.publish import Stopwatch
from sparsedepth.store.query_result import QueryResult
from sparsedepth.train.runtime import find_device, measuring_device
from sparsedepth.watch.points import Points, Training

SCORES = (
    "tokens_trained, val_loss, needed_layers, usefulness_loss_increase, causal_score, permutation_score, "
    "residual_variance_last"
)
"""Of a row; the others are in the store."""


@dataclass(frozen=True, kw_only=True)
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
    keeps_downloads: bool

    def measure(self, wanted: Sequence[str], tell: Tell) -> QueryResult:
        """A row per revision, by step. Raises ValueError where no revision fits, and for other settings than before."""
        every = sorted(revisions(self.model, wanted), key=lambda each: (each.step is None, each.step, each.name))
        told = {"model": self.model, "tokens_per_step": self.tokens_per_step, "data": self.data}
        tokens = {"tokens": self.given and self.given.data_hash}
        ledger = Ledger(self.out, self.name, {**told, **tokens, **self.measuring, **self.training})
        by_name = {each.name: each for each in every}
        of_step = {each.step: each.name for each in reversed(every)}

        def work(name: str) -> Known:
            revision = by_name[name]
            if revision.step is None:
                raise ValueError("its name tells no step, such as 'step1000' or 'checkpoint-1000'")
            if (other := of_step[revision.step]) != name:
                raise ValueError(f"step {revision.step} is that of {other}, too; name one of them in --revisions")
            downloads = None if self.keeps_downloads else self.out / "downloads"
            try:
                device = measuring_device(find_device(self.device))
                loaded = load_model(revision.source, device=device, downloads=downloads)
                point = partial(self._point, loaded, revision.step)
                return ledger.measured(name, loaded, loaded.weights_hash, point)
            finally:
                if downloads:
                    shutil.rmtree(downloads, ignore_errors=True)

        one_by_one({each.name: each.key for each in reversed(every)}, ledger, work, tell)
        return ledger.table(SCORES, {each.name: {"step": each.step} for each in every})

    def _point(self, loaded: LoadedModel, step: int) -> str:
        """The run_id of its record, which is written unless it is there. Raises ValueError for other tokens."""
        config, stopwatch = measuring_config(loaded, self.measuring, self.given), Stopwatch()
        fields = {name: getattr(loaded.facts, name) for name in SIZES}
        numbers = {name: value for name, value in config if isinstance(value, int)}
        fields |= {name: value for name, value in numbers.items() if name in MeasureConfig.model_fields}
        with tokens_to_measure(loaded, config, self.data, self.given, root=self.out / "data") as tokens:
            training = Training(
                name=self.name,
                fields={**fields, **self.training},
                tokens_per_step=self.tokens_per_step,
                n_params=loaded.facts.params_total,
                data_hash=tokens.source.data_hash,
            )
            points = Points(self.out, training)
            if step not in points.steps:
                found = measure_existing_model(loaded, tokens, config, step=step).measurements
                device = loaded.probed.device.type
                points.write(step, {}, found, stopwatch.seconds(), device, model_facts(loaded, tokens))
        return training.run_at(step, {}).run_id
