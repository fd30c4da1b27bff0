"""The points of a watched training in a results folder: each is one immutable record, written at once.

    OUT/watched/NAME.json   what was said of the training when it was first watched
    OUT/runs/<run_id>/      a point: an imported run with the step, of cluster NAME and origin 'watched'

A point's run_id is the hash of name, step and what is known, so the same call after a crash finds what is there."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsedepth.config.load import build
from sparsedepth.files import write_json
from sparsedepth.measure.measurements import Measurements
from sparsedepth.probe.folder import read_json
from sparsedepth.quantities.quantity import WATCHED, Named, Row
from sparsedepth.run.publish import code_version, provenance
from sparsedepth.store.checksums import is_complete
from sparsedepth.store.packs import refuse_pack
from sparsedepth.store.run_record import IMPORTED, RUNS, run_folder, save_record
from sparsedepth.store.subject import ImportedRun
from sparsedepth.words.values import assignment

NAME = re.compile(r"[\w.-]{1,100}")
N_SEQUENCES = "n_sequences"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is known of a watched training: the same at all its points."""

    name: str
    fields: Named
    """of RunConfig: those of the model, the settings, the seed"""
    tokens_per_step: int | None
    n_params: int
    data_hash: str
    """of the tokens that are measured"""

    def run_at(self, step: int, measured: Named) -> ImportedRun:
        """The record's subject. Raises ValueError for settings that no run can have."""
        tokens = {} if not (step and self.tokens_per_step) else {"train_tokens": step * self.tokens_per_step}
        values = {
            "origin": WATCHED,
            "cluster": self.name,
            "config": {**self.fields, **measured, **tokens},
            "step": step,
        }
        return build(ImportedRun, values, f"settings of {self.name!r}")

    def summary_at(self, step: int, found: Measurements) -> Named:
        has_diverged = any(row["metric"] == "residual_variance" and row["value"] is None for row in found.layers)
        ended = {"diverged_step": step, "diverged_cause": "the stream is not finite"} if has_diverged else {}
        of_run = {"params_total": self.n_params, "steps": step}
        if self.tokens_per_step is not None:
            tokens = step * self.tokens_per_step
            of_run |= {"tokens_trained": tokens, "tokens_per_param": tokens / self.n_params}
            if not self.fields.get("n_experts"):  # else not every parameter acts on a token
                of_run["train_flops"] = 6.0 * self.n_params * tokens
        return {"outcome": "diverged" if has_diverged else "ok", **ended, **of_run, **found.summary}


class Points:
    """The folder and its training. Raises ValueError for a name that was watched with something else."""

    def __init__(self, out: Path, training: Training):
        self.out, self.training = out, training
        self._file = out / WATCHED / f"{training.name}.json"
        if not NAME.fullmatch(training.name):
            raise ValueError(f"name={training.name!r} must be letters, digits, '.', '_' and '-', at most 100")
        refuse_pack(out)
        if out.exists() and not out.is_dir():
            raise ValueError(f"out={str(out)!r} is a file; name a results folder")
        if (out / "config.json").exists() or is_complete(out):
            raise ValueError(f"out={str(out)!r} is a model or a run; name a results folder")
        self.stored = read_json(self._file) if self._file.exists() else {}
        said = {**training.fields, "tokens_per_step": training.tokens_per_step, "params": training.n_params}
        said["tokens"] = training.data_hash
        if not self.stored:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.keep(said=said)
        before = self.stored.get("said", {})
        if other := [name for name in {**before, **said} if before.get(name) != said.get(name)]:
            told = ", ".join(f"{assignment(name, before.get(name))}, now {said.get(name)}" for name in other[:3])
            raise ValueError(
                f"{training.name!r} in {str(out)!r} is another training ({told}); give another name or out"
            )

    def keep(self, **facts: Any) -> None:
        self.stored = {**self.stored, **facts}
        write_json(self._file, self.stored)

    def measure(self, measures: Sequence[str]) -> None:
        """From now on. Warns, once, of the points that were written without some of them."""
        before = self.stored.get("measures", measures)
        new = [name for name in measures if name not in before]
        if new and self.steps:
            warnings.warn(
                f"points of {self.training.name!r} up to step {max(self.steps)} lack {', '.join(new)}: they stay as "
                "they are, and later ones have it; for all steps give another name",
                stacklevel=3,
            )
        self.keep(measures=[*before, *new])

    @cached_property
    def steps(self) -> set[int]:
        """Of its points, however many sequences each was measured on."""
        known = [read_json(path) for path in self.out.glob(f"{RUNS}/[!.]*/{IMPORTED}")]
        own = (WATCHED, self.training.name)
        return {each["step"] for each in known if (each["origin"], each.get("cluster")) == own}

    def write(
        self,
        step: int,
        measured: Named,
        found: Measurements,
        seconds: float,
        device: str,
        facts: Row | None = None,
    ) -> Path:
        run = self.training.run_at(step, measured)
        manifest = {
            **provenance(run.run_id, self.training.data_hash),
            "code": "outside",
            "measured_by": code_version(),
            "device": device,
            "measuring_seconds": round(seconds, 3),
            **(facts or {}),
        }
        folder = run_folder(self.out, run.run_id)
        save_record(folder, run, self.training.summary_at(step, found), manifest, found.tables())
        self.steps.add(step)
        return folder
