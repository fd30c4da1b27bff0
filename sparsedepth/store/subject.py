"""What a record is of in place of a RunConfig: a model that was only measured, or an imported third-party run."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from sparsedepth.config.mistakes import field_mistakes
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import MeasureConfig, MeasureOnlyConfig, RunConfig
from sparsedepth.config.section import Count, Mistakes, Section, check
from sparsedepth.config.task import TaskConfig
from sparsedepth.files import digest
from sparsedepth.quantities.quantity import Named, Row

if TYPE_CHECKING:
    import pandas as pd

_UNCONDITIONAL = fields_where(
    RunConfig,
    lambda role: role.kind not in ("record", "measure", "data") and not role.only_with and not role.needs_experts,
)
CHOICES = (*(name for name in _UNCONDITIONAL if name not in TaskConfig.model_fields), "corpus", "tokenizer")
"""Fields that have a value in every training run, whether or not its table states it."""


class MeasuredModel(MeasureOnlyConfig):
    """model.json: facts about the model, and how it was measured. A strict, frozen record."""

    model: Annotated[str, Field(min_length=1, description="the model's name or path, as given")]
    family: str
    """'sparsedepth' for a run, else the model_type of its config"""
    n_layers: Count
    d_model: Count
    n_heads: Count
    n_kv_heads: Count
    n_experts: Annotated[int, Field(ge=0, description="experts per block; 0 = dense")]
    vocab_size: Count
    params_total: Count
    dtype: str
    """dtype of the layers' weights when measured"""
    weights_hash: str
    """digest of the weight files"""
    data_hash: str
    """digest of the tokens read"""

    @property
    def run_id(self) -> str:
        """12 hex digits: the hash of every field."""
        return digest(self.model_dump(mode="json"))


class ImportedRun(Section):
    """imported.json: a strict, frozen record."""

    origin: Annotated[str, Field(min_length=1, description="whose runs these are, as the map names their source")]
    cluster: str | None = None
    """rows that share it are not independent: points of one training run, say"""
    config: Named
    """RunConfig fields that the table states; the others: unknown"""
    step: Annotated[int | None, Field(ge=0, description="optimizer steps at a point of a watched training")] = None

    @check
    def _check_config(self) -> None:
        if "n_layers" not in self.config:
            raise ValueError("n_layers is missing: without a depth there is nothing to compare")
        if mistakes := field_mistakes(RunConfig, self.config):
            raise Mistakes(mistakes)

    @property
    def run_id(self) -> str:
        """12 hex digits: the hash of all known facts."""
        at_step = {} if self.step is None else {"step": self.step}
        return digest({"origin": self.origin, "cluster": self.cluster, "config": self.config, **at_step})

    @property
    def cell_id(self) -> str:
        """'c-' and the hash without seed and cluster."""
        known = {name: value for name, value in self.config.items() if name != "seed"}
        return f"c-{digest({'origin': self.origin, 'config': known})}"

    @property
    def unknown(self) -> tuple[str, ...]:
        """Choices that the table does not state, the seed included."""
        return tuple(name for name in CHOICES if name not in self.config)


def is_imported(runs: "pd.DataFrame") -> bool:
    return "origin" in runs.columns and bool(runs["origin"].notna().any())


class Imported(NamedTuple):
    """The imported of some runs: whose they are, and which choices are unknown in any."""

    n_runs: int
    origins: set[str]
    unknown: set[str]


def imported_among(rows: Iterable[tuple[Any, str]]) -> Imported | None:
    """From rows of (origin, unknown_fields); None where none is imported."""
    imported = [(origin, text) for origin, text in rows if isinstance(origin, str)]
    unknown = {name for _, text in imported for name in text.split(",") if name}
    return Imported(len(imported), {origin for origin, _ in imported}, unknown) if imported else None


def unstated(runs: "pd.DataFrame") -> tuple[str, ...]:
    """Choices, without the seed, that none of these rows of `runs` states; none where a row is not imported."""
    if not is_imported(runs) or runs["origin"].isna().any():
        return ()
    missing = set[str].intersection(*(set(text.split(",")) for text in runs["unknown_fields"]))
    return tuple(name for name in CHOICES if name in missing and name != "seed")


def buildable(values: Row) -> Named:
    """An imported configuration's known values as RunConfig takes them: in whole sequences and steps, since published
    numbers are rounded otherwise, and the one gate of a token not renormalised to 1 where that is unknown. How they
    were measured is left out."""
    values = {name: value for name, value in values.items() if name not in MeasureConfig.model_fields}
    default = {name: RunConfig.model_fields[name].default for name in ("seq_len", "batch_tokens", "train_tokens")}
    length, step, tokens = (values.get(name, default[name]) for name in default)
    step = max(1, round(step / length)) * length
    one_gate = {"renormalise_gates": False} if values.get("n_experts") and values.get("top_k") == 1 else {}
    width = values.get("d_model", 0)
    n_heads = RunConfig.model_fields["n_heads"].default
    heads = {"n_heads": math.gcd(width // 2, n_heads)} if width else {}  # of even width each
    return {**heads, **one_gate, **values, "batch_tokens": step, "train_tokens": max(1, round(tokens / step)) * step}
