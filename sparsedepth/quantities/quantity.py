"""Record types: a quantity, the measure that computes it, and its columns in the store."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

Row = Mapping[str, Any]
"""Values of a row by the names of its columns."""
Named = dict[str, Any]
"""Values by their names that may be added to, such as a row in the making."""
Key = TypeVar("Key")
Value = TypeVar("Value")
Table = Literal["runs", "curves", "layers", "heads", "pairs", "tokens", "difficulty"]
Tables = tuple[Table, ...]
Passes = tuple[float, float]
"""Over all blocks, and over the head, for each of measure_tokens tokens."""
Range = tuple[float, float]
"""Least and largest value."""
OTHER_COLUMNS = """
run_id cell_id model n_layers d_model n_heads n_kv_heads d_ff activation vocab_size seq_len n_experts top_k d_expert
n_shared_experts n_dense_layers renormalise_gates balance_loss router_z_loss norm mix_frac norm_kind norm_groups
norm_eps depth_scale residual_gate gate_init residual_scalars scalars_start stream_skips gpas attention_residuals
n_streams stream_mixing loops value_residual init init_std parametrisation base_width base_depth attention_dropout
residual_dropout ffn_dropout tie_embeddings rope_theta sliding_window window_pattern gated_attention mask_documents
eod qk_norm qk_norm_over allow corpus text_field tokenizer val_fraction max_corpus_tokens chunk_len task_group tracked
n_operations operation_seed task_form max_gap letters min_hops max_hops task_code train_tokens batch_tokens lr lr_of
optimizer warmup_frac warmup_tokens schedule decay_frac min_lr_frac weight_decay weight_decay_on beta1 beta2 adam_eps
grad_clip start_weights start_cell seed precision log_every observe_every divergence_factor measures val_tokens
eval_seq_len measure_tokens fit_tokens usefulness_threshold needed_threshold permutation_pairs removal_ranges
jacobian_probes weight_eps weight_rel_eps attention_tau attention_rel_tau outcome diverged_step diverged_cause
params_total params_active flops_per_token train_flops steps tokens_trained tokens_per_param train_loss unigram_loss
bigram_loss chance_loss folder device started seconds training_seconds peak_memory_bytes node_hours packages plugins
checkpoint family weights_dtype weights_hash text origin cluster unknown_fields step tokens grad_norm
tokens_per_second layer metric value n head other_layer gradient_norm tuned_fields tuning tuned_by carried_from
carry_regret source
"""
"""Columns of the store that no measure makes: fields of a run, and facts, defined in parts that import this one. A
quantity has none of these names; a test compares them with the store's."""
WATCHED = "watched"
"""The origin of points of a training that `watch` measured in somebody's own loop; their cluster is its name."""
Scale = Literal["linear", "log", "symlog"]
"""symlog: logarithmic away from 0, for relative loss increases, which span decades and may be negative."""
Stage = Literal["", "sparsity", "variance", "effectiveness", "loss"]
Part = Literal["", "lo", "hi", "se"]

_PARTS: dict[Part, str] = {
    "": "{meaning}",
    "lo": "lower end of the 95% bootstrap interval (over sequences)",
    "hi": "upper end of the 95% bootstrap interval (over sequences)",
    "se": "standard error of {name} over the random probes; 0 where exact",
}
LONGEST_LABEL = 36
"""Characters of a line of an axis label."""
_RANGES = {"share": (0.0, 1.0), "share of layers": (0.0, 1.0), "rad": (0.0, math.pi)}


@dataclass(frozen=True)
class Quantity:
    """A quantity: columns, axis labels, chain links and directions are derived from this record."""

    name: str
    """Key in `measure`, column of `runs`, value of `metric`."""
    formula: str
    """x_l is the residual stream after block l, u_l = x_l - x_(l-1), a_ij an attention weight, E a mean over tokens;
    @ is the threshold in a metric's name."""
    unit: str = "1"
    _: KW_ONLY
    tables: Tables = ("runs",)
    measure: str = ""
    """The measure that computes it; '' = recorded in training."""
    source: str = ""
    better: Literal["", "low", "high"] = ""
    """Empty if neither direction is better."""
    bounds: Range | None = None
    """Least and largest value; None = those of its unit (`range`)."""
    label: str = ""
    """Its name in figures, if not that of the column; may include the unit."""
    scale: Scale = "linear"
    """Of its axis."""
    is_ratio: bool = False
    """Positive, and differs by orders of magnitude between runs: compared by ratio."""
    is_relative: bool = False
    """Divided by the model's loss, so unreliable at a small loss."""
    stage: Stage = ""
    """Its place in the chain sparsity -> variance -> effectiveness -> loss."""
    has_interval: bool = False
    """`runs` has NAME_lo and NAME_hi."""
    layer_interval: bool = False
    """`layers` has the metrics NAME_lo and NAME_hi."""
    has_error: bool = False
    """`runs` and `layers` have NAME_se."""
    in_runs: str = "mean over layers of {}"
    """How the column of `runs` is computed from the values by layer, head or pair."""
    rows: str = ""
    """The metric that the column of `runs` averages, if it has another name."""
    carried_by: Literal["", "layer", "first", "both"] = ""
    """The block that a row of `rows` belongs to: its layer; of a pair the first, or both. Gives the score a depth
    profile (`depth_columns`)."""
    threshold: str = ""
    """The config field of its thresholds; `runs` is at the first."""
    type: Literal["DOUBLE", "BIGINT", "VARCHAR"] = "DOUBLE"

    @property
    def range(self) -> Range:
        return self.bounds or _RANGES.get(self.unit, (0.0, math.inf))

    def clipped(self, end: float | None) -> float | None:
        """The end of an interval, clipped to its range; None stays None."""
        least, most = self.range
        return None if end is None else min(max(end, least), most)

    @property
    def display_name(self) -> str:
        return self.label or self.name.replace("_", " ")

    @property
    def axis_label(self) -> str:
        is_named = "(" in self.display_name or self.unit in self.display_name  # 'needed layers (layer)'
        has_unit = self.unit not in ("", "1") and not is_named
        text = f"{self.display_name} ({self.unit})" if has_unit else self.display_name
        if has_unit and (len(self.display_name) >= 24 or len(text) > LONGEST_LABEL):
            text = f"{self.display_name}\n({self.unit})"
        is_long = max(map(len, text.split("\n"))) > LONGEST_LABEL
        return "\n".join(textwrap.wrap(text, LONGEST_LABEL)) if is_long else text

    @property
    def metric(self) -> str:
        """The metric by layer, head or pair whose values its column of `runs` averages."""
        return self.rows or self.name

    def columns(self) -> "Iterator[Column]":
        """Its columns in wide tables (runs, curves, tokens, difficulty) and its metrics in the others."""
        for table in self.tables:
            meaning = self.formula
            if table != "runs":
                over = {"heads": ", of the head", "layers": ", mean over heads"} if "heads" in self.tables else {}
                meaning += over.get(table, "")
            else:
                meaning = meaning.replace("@", f"{self.threshold}[0]")
                meaning = self.in_runs.format(meaning) if len(self.tables) > 1 else meaning
            has_ends = {"runs": self.has_interval, "layers": self.layer_interval}.get(table, False)
            parts: dict[Part, bool] = {"": True, "lo": has_ends, "hi": has_ends, "se": self.has_error}
            for part in (part for part, is_there in parts.items() if is_there):
                yield Column(
                    view=table,
                    name=f"{self.name}_{part}" if part else self.name,
                    type=self.type,
                    meaning=_PARTS[part].format(name=self.name, meaning=meaning),
                    unit=self.unit,
                    part=part,
                    measure=self.measure,
                    source="" if part else self.source,
                    quantity=self,
                )

    def depth_columns(self) -> "Iterator[Quantity]":
        """The columns of its depth profile (`sparsedepth.measure.measurements`)."""
        short_name = self.display_name.replace("\n", " ").partition(":")[0]
        for name, formula, label in (
            ("without_first", "{} without the first block", "{}, without the first block"),
            ("deep_half", "{} of the blocks above n_layers / 2", "{}, deep half"),
        ):
            yield replace(
                self, name=f"{self.name}_{name}", formula=formula.format(self.name), tables=("runs",), carried_by="",
                has_interval=False, has_error=False, layer_interval=False, stage="", label=label.format(short_name),
            )  # fmt: skip
        share = f"share of {self.name} that its largest block carries; 1/n_layers if all are alike"
        centre = f"centre of mass of {self.name} in depth: 0 = all in the first block, 1 = all in the last"
        fields: Named = {"measure": self.measure, "source": "ours", "bounds": (0, 1), "rows": self.rows}
        yield Quantity(f"{self.name}_largest_share", share, "share", **fields)
        yield Quantity(f"{self.name}_centre", centre, **fields)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a view, or a value of `metric` in a long table (layers, heads, pairs)."""

    view: str
    name: str
    type: str
    """BIGINT, DOUBLE, VARCHAR or BOOLEAN."""
    meaning: str
    unit: str = ""
    part: Part = ""
    """The quantity's value (''), an end of its interval, or its standard error."""
    measure: str = ""
    source: str = ""
    quantity: Quantity | None = field(default=None, repr=False)
    """None for configuration and other facts that are not measured."""


def without_none(values: Mapping[Key, Value | None]) -> dict[Key, Value]:
    return {name: value for name, value in values.items() if value is not None}


def columns_of(records: Iterable[Quantity]) -> Iterator[Column]:
    """Those of the records, and of their profiles over depth."""
    for each in records:
        for record in (each, *(each.depth_columns() if each.carried_by else ())):
            yield from record.columns()


class RunSizes(Protocol):
    """The config fields that determine the cost of a measure."""

    @property
    def n_layers(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def stream_width(self) -> int: ...
    @property
    def n_experts(self) -> int: ...
    @property
    def permutation_pairs(self) -> int | None: ...
    @property
    def removal_ranges(self) -> int | None: ...
    @property
    def jacobian_probes(self) -> int | None: ...


@dataclass(frozen=True)
class Measure:
    """A name in the config field `measures`."""

    name: str
    passes: Callable[[RunSizes], Passes]
    _: KW_ONLY
    source: str = ""
    """Of its quantities, unless they have their own."""
    on_request: bool = False
    """Not measured by default: more expensive than the papers' scores and a few forward passes."""

    def number(self, name: str, formula: str, unit: str = "1", *, source: str = "", **fields: Any) -> Quantity:
        """The record of one of its numbers."""
        return Quantity(name, formula, unit, measure=self.name, source=source or self.source, **fields)
