"""RunConfig: all choices that affect the results of a training run, as one flat, frozen, validated record.

A field's name is its YAML key, its `--set` name, its column in the store and its axis label in a plot. Sections
(model, data, train, measure) are base classes, so that each part of the library takes only what it needs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from sparsedepth.config import presets
from sparsedepth.config.corpus import kind_of
from sparsedepth.config.load import build
from sparsedepth.config.lr_groups import LrOf, check_groups, group_of
from sparsedepth.config.model import RETIRED_FIELDS, ModelConfig, with_derived_sizes
from sparsedepth.config.role import (
    AMOUNT,
    CHANGES_STEP,
    DATA,
    KNOB,
    RECORD,
    ROUNDS,
    THRESHOLD,
    Role,
    changed,
    fields_where,
    refuse_undeclared,
)
from sparsedepth.config.rule import Rule, refuse_first
from sparsedepth.config.section import WHOLE, Count, Fields, Fraction, NonNegative, Positive, Section, check
from sparsedepth.config.task import TASKS, TaskConfig, check_task, with_task_fields
from sparsedepth.files import digest
from sparsedepth.quantities.measured import MEASURES
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import commas, did_you_mean

DEFAULTS_VERSION = 1
"""Incremented when a default changes: `run_id` hashes only what differs, so that new fields keep old ids."""

if TYPE_CHECKING:
    Measure = str
else:
    Measure = Literal[tuple(measure.name for measure in MEASURES)]
FIT = frozenset({"usefulness", "joint", "spans"})
"""The measures that fit maps on fit_tokens."""


def _check_distinct(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    names = [f"{threshold:g}" for threshold in thresholds]
    if len({*names}) < len(names):
        raise ValueError("must differ in their first six digits, which name their values; leave the repeated ones out")
    return thresholds


Positives = Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)]
Thresholds = Annotated[Positives, AfterValidator(_check_distinct), THRESHOLD]

CORPORA = (
    "'stdlib' (the Python standard library's source), a local .txt/.jsonl/.parquet file or folder, 'hub:NAME[:CONFIG]' "
    "(streamed), 'sft:FILE.jsonl' (prompts and answers, loss on the answers), or a task of known depth: "
    f"{commas(repr(f'task:{name}') for name in TASKS)}"
)


class DataConfig(Section):
    """The text, and how it becomes tokens."""

    corpus: Annotated[str, Field(min_length=1, description=CORPORA), DATA] = "stdlib"
    text_field: Annotated[str, DATA] = "text"
    """column that holds the text, in JSON-lines, Parquet and hub data"""
    tokenizer: Annotated[str, Field(min_length=1), DATA] = "byte"
    """'byte', 'bpe:SIZE' (trained on the corpus), or a local folder with a tokenizer.json, or a hub name"""
    val_fraction: Annotated[float, Field(gt=0, lt=0.5), DATA] = 0.05
    """share of documents held out, chosen by their hash"""
    max_corpus_tokens: Annotated[Count | None, DATA] = None
    """stop reading the corpus after this many training tokens"""
    chunk_len: Annotated[Count | None, KNOB.acting("data")] = None
    """unit of shuffling, in tokens; default seq_len. Set it to the longest seq_len of a sweep and every run reads the
    same text in the same step"""


class TextConfig(DataConfig):
    """The text of a model that was not trained here, in its own tokenizer."""

    vocab_size: Count
    start_weights: ClassVar[None] = None


SCHEDULE, OPTIMIZER = KNOB.acting("schedule"), KNOB.acting("optimizer")


class TrainConfig(Section):
    """The optimiser and its schedule: linear warm-up, then cosine, wsd or linear."""

    train_tokens: Annotated[Count, Role(kind="capacity", cost_scope="amount").acting("batch", "schedule")] = 2_097_152
    """tokens to train on"""
    batch_tokens: Annotated[Count, CHANGES_STEP.acting("batch")] = 8192
    """tokens per optimiser step"""
    lr: Annotated[Positive, SCHEDULE] = 1e-3
    """peak learning rate"""
    lr_of: Annotated[LrOf, OPTIMIZER] = ()
    """multiples of lr of groups of parameters, such as {residual_scalars: 0.01, embed: 2}; a group's weights decay by
    its own lr, and a parametrisation's factor multiplies it. Groups: embed, head, norms, attention, ffn, router, and by
    field residual_scalars (of the stream), first_scalars (of x_0), value_residual, gpas, residual_gate,
    attention_residuals, n_streams, stream_skips"""
    optimizer: Annotated[Literal["adamw", "muon"], CHANGES_STEP.acting("optimizer")] = "adamw"
    """muon: orthogonalised momentum for the matrices of the blocks, its updates as large as AdamW's are (rms 0.2), so
    that lr and weight_decay mean the same; AdamW for all else"""
    warmup_frac: Annotated[Fraction, SCHEDULE] = 0.05
    """share of the steps that warm up linearly from 0"""
    warmup_tokens: Annotated[Count | None, SCHEDULE] = None
    """tokens of warm-up in place of warmup_frac: the same for runs of several lengths"""
    schedule: Annotated[Literal["cosine", "wsd", "linear"], SCHEDULE] = "cosine"
    """after warm-up: a cosine, or linear, to the end; wsd: constant, then linear over decay_frac"""
    decay_frac: Annotated[Fraction, SCHEDULE] = 0.2
    """share of the steps at the end in which schedule wsd falls to its minimum"""
    min_lr_frac: Annotated[Fraction, SCHEDULE] = 0.1
    """learning rate at the end / peak"""
    weight_decay: Annotated[NonNegative, replace(OPTIMIZER, sparser_direction="more")] = 0.1
    """lambda; a step shrinks weights by lr * lambda, with either optimizer"""
    weight_decay_on: Annotated[Literal["all", "matrices", "no_embed_norm"], OPTIMIZER] = "matrices"
    """which parameters decay: all; every matrix; every matrix but the embedding. Norms and gates decay only with all"""
    beta1: Annotated[float, Field(ge=0, lt=1), OPTIMIZER] = 0.9
    """AdamW beta 1"""
    beta2: Annotated[float, Field(ge=0, lt=1), OPTIMIZER] = 0.95
    """AdamW beta 2"""
    adam_eps: Annotated[Positive, OPTIMIZER] = 1e-8
    """AdamW epsilon"""
    grad_clip: Annotated[NonNegative, replace(OPTIMIZER, cost_scope="step")] = 1.0
    """largest global gradient norm; 0 = no clipping"""
    start_weights: Annotated[str | None, Field(pattern="^[0-9a-f]{12}$"), Role(kind="replicate").acting("start")] = None
    """digest of the weights that training starts from, which `train --from` sets; null = initial weights, drawn from
    seed"""
    start_cell: Annotated[str | None, Field(pattern="^[0-9a-f]{12}$"), KNOB.acting()] = None
    """digest of how those weights were trained, which `train --from` sets: for a run, its fields without the seed and
    those that the new run inherits; for another model, its weights"""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE, Role(kind="replicate").acting("start", "data")] = 0
    """initial weights and order of the text"""
    precision: Annotated[Literal["auto", "fp32", "bf16"], replace(ROUNDS, cost_scope="step")] = "auto"
    """bf16: matrix products under autocast, weights in fp32; auto: bf16 on a GPU that has it"""
    log_every: Annotated[Count, RECORD] = 10
    """steps between two rows of the curves"""
    observe_every: Annotated[Count, replace(RECORD, cost_scope="amount")] = 50
    """steps between two observations of residual variance"""
    divergence_factor: Annotated[float, Field(gt=1), THRESHOLD] = 2.0
    """a loss above this multiple of the first step's, at a logged step and at one after it, ends the run as diverged"""

    def lr_factor(self, name: str) -> float:
        """By `lr_of`, of the parameter of this name."""
        return dict(self.lr_of).get(group_of(name), 1.0) if self.lr_of else 1.0

    @property
    def n_steps(self) -> int:
        return self.train_tokens // self.batch_tokens

    @property
    def warmup_steps(self) -> int:
        if self.warmup_tokens is not None:
            return round(self.warmup_tokens / self.batch_tokens)
        return round(self.warmup_frac * self.n_steps)

    @property
    def stable_steps(self) -> int:
        """Steps before the decay of schedule wsd, warm-up included: the trunk that longer runs share."""
        return self.n_steps - max(1, round(self.decay_frac * self.n_steps))


class MeasureConfig(Section):
    """What is measured, how much held-out text each measure reads, and at which thresholds."""

    measures: Annotated[tuple[Measure, ...], Field(min_length=1, strict=False), AMOUNT] = tuple(
        measure.name for measure in MEASURES if not measure.on_request
    )
    """groups of quantities to measure"""
    val_tokens: Annotated[Count, AMOUNT] = 131_072
    """held-out tokens of the validation loss, at most"""
    eval_seq_len: Annotated[int | None, Field(ge=2), WHOLE, AMOUNT] = None
    """common context at which every run is scored too; default seq_len"""
    measure_tokens: Annotated[Count, AMOUNT] = 8192
    """held-out tokens of each score, at most"""
    fit_tokens: Annotated[Count, AMOUNT] = 16_384
    """held-out tokens on which usefulness fits its maps (disjoint from the scored ones)"""
    usefulness_threshold: Annotated[Positive, THRESHOLD] = 0.1
    """a layer is useful if its replacement raises the loss by more than this share"""
    needed_threshold: Annotated[Positive, THRESHOLD] = 0.05
    """a layer is needed if its replacement adds more than this to the loss, in nat/token: about the effect of another
    seed in small models, and of 1% of the answers in k-hop induction"""
    permutation_pairs: Annotated[Count | None, AMOUNT] = None
    """pairs of layers to swap, drawn at random; default all, from 16 layers two per layer; a large number: all"""
    removal_ranges: Annotated[Count | None, AMOUNT] = None
    """ranges of layers to remove, drawn at random; default all; with 'removal'"""
    jacobian_probes: Annotated[int | None, Field(ge=2), WHOLE, AMOUNT] = 4
    """random probes of each block's Jacobian; null = exact; with 'jacobian'"""
    weight_eps: Thresholds = (1e-3, 1e-4, 1e-2)
    """|w| below which a weight counts as zero; `runs` uses the first"""
    weight_rel_eps: Thresholds = (0.1, 0.01)
    """the same, as multiples of the matrix's rms"""
    attention_tau: Thresholds = (1e-3, 1e-4, 1e-2)
    """attention weight below which an entry counts as zero"""
    attention_rel_tau: Thresholds = (0.1, 0.01)
    """the same, as multiples of uniform attention 1/i"""


class MeasureOnlyConfig(MeasureConfig):
    """How to measure a model that exists already."""

    seq_len: Annotated[int, Field(ge=2), WHOLE, AMOUNT] = 256
    """context of the measured windows, in tokens"""


def _add_preset(schema: Named) -> None:
    """Add `preset`, a key of run files that expands to fields."""
    schema["properties"]["preset"] = {
        "enum": [*presets.PRESETS, *presets.REMEDIES],
        "description": "fields of a paper's model, or of a remedy",
    }


# pydantic lists the fields of the last first
class RunConfig(MeasureConfig, TrainConfig, TaskConfig, DataConfig, ModelConfig):
    """One run. Unknown keys, wrong types and impossible shapes raise ValueError (pydantic's ValidationError)."""

    model_config = ConfigDict(json_schema_extra=_add_preset)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return cls.filled(values) if isinstance(values, dict) else values

    @classmethod
    def filled(cls, values: Fields) -> Named:
        """`values`, unchecked, with the fields of their preset and task, derived ones, and `eod` where it is known."""
        filled = presets.expand(values)
        if kind_of(filled.get("corpus")).packs_documents and filled.get("mask_documents") is None:
            filled["mask_documents"] = True
        if filled.get("mask_documents") is True and filled.get("eod") is None:
            tokenizer = filled.get("tokenizer", cls.model_fields["tokenizer"].default)
            filled["eod"] = {"byte": 256, "bpe": 0}.get(str(tokenizer).partition(":")[0])
        return with_derived_sizes(with_task_fields(filled))

    @check
    def _check_run(self) -> None:
        """The parts in turn: the corpus, whole sequences and steps, optimizer, schedule, measures."""
        self._check_corpus()
        check_groups(self, dict(self.lr_of))
        for name, part in (("batch_tokens", self.seq_len), ("train_tokens", self.batch_tokens)):
            if (tokens := getattr(self, name)) % part:
                whole = "sequences of seq_len" if name == "batch_tokens" else "steps of batch_tokens"
                raise ValueError(
                    f"{name}={tokens} is not a whole number of {whole}={part}; use "
                    f"{name}={max(1, round(tokens / part)) * part}"
                )
        refuse_first(STEPS, self)
        self._check_measures()

    @property
    def sequences_per_step(self) -> int:
        return self.batch_tokens // self.seq_len

    @property
    def trunk_key(self) -> str | None:
        """What runs of schedule wsd share whose steps before their decay are the same; None for other schedules."""
        if self.schedule != "wsd":
            return None
        later = {"train_tokens", "warmup_frac", "warmup_tokens", "decay_frac", "min_lr_frac", "allow", "eod"}
        changed = self.model_dump(mode="json", exclude_defaults=True, exclude=later | {*MeasureConfig.model_fields})
        return digest({**changed, "warmup_steps": self.warmup_steps, "gradients": "gradients" in self.measures})

    def _check_corpus(self) -> None:
        """What is about another kind of corpus stands at its default."""
        kind = kind_of(self.corpus)
        for field in kind.foreign_fields:
            if (value := getattr(self, field)) != type(self).model_fields[field].default:
                raise ValueError(f"{field}={value!r} {kind.foreign_reason.format(self.corpus)}; leave {field} out")
        if kind.packs_documents and not self.mask_documents:
            raise ValueError(
                f"mask_documents=False: corpus={self.corpus!r} packs several pairs into a sequence, "
                "and each would attend to others; leave mask_documents out"
            )
        lengths = {"seq_len": self.seq_len} | ({"eval_seq_len": self.eval_seq_len} if self.eval_seq_len else {})
        check_task(self.corpus, self, self.vocab_size, lengths)

    def _check_measures(self) -> None:
        """Text is read in whole sequences; maps that some measures fit have stream_width + 1 unknowns per output."""
        fit = -(-(self.stream_width + 2) // self.seq_len) * self.seq_len
        least = {
            "val_tokens": max(self.seq_len, self.eval_seq_len or 0),
            "measure_tokens": fit if "released_code" in self.measures else self.seq_len,
            "fit_tokens": self.seq_len if FIT.isdisjoint(self.measures) else fit,
        }
        for name, tokens in least.items():
            if getattr(self, name) < tokens:
                raise ValueError(
                    f"{name}={getattr(self, name)} is too few for seq_len={self.seq_len}, d_model={self.d_model}; "
                    f"use at least {tokens}"
                )

    @property
    def run_id(self) -> str:
        """12 hex digits: the hash of the fields that differ from the defaults, and of the defaults' version; without
        `eod`, which follows from the tokenizer, and `allow`, which changes nothing (`Role.hashed`)."""
        changed = self.model_dump(mode="json", exclude_defaults=True, exclude={*UNHASHED})
        return digest({"defaults": DEFAULTS_VERSION, **changed})

    @property
    def cell(self) -> "RunConfig":
        """The configuration shared by replicates: with seed 0, and without start weights that depend on a seed."""
        return self.model_copy(update={"seed": 0, **({"start_weights": None} if self.start_cell else {})})

    @property
    def cell_id(self) -> str:
        """'c-' and 12 hex digits, shared by the replicates of a cell."""
        return f"c-{self.cell.run_id}"


REPLICATE_FIELDS = fields_where(RunConfig, lambda role: role.kind == "replicate")
"""The seed, and what depends on it."""
UNHASHED = fields_where(RunConfig, lambda role: not role.hashed)
CELL_FIELDS = tuple(name for name in RunConfig.model_fields if name not in (*REPLICATE_FIELDS, "allow"))
"""The fields that make a cell."""


STEPS: tuple[Rule, ...] = (
    (lambda c: c.chunk_len is not None and (c.chunk_len % c.seq_len or c.batch_tokens % c.chunk_len),
     "chunk_len={c.chunk_len} must be a multiple of seq_len={c.seq_len} and divide batch_tokens={c.batch_tokens}"),
    (lambda c: c.optimizer == "muon" and c.parametrisation != "standard",
     "optimizer='muon' with parametrisation={c.parametrisation!r}, whose rules are AdamW's; use optimizer='adamw', or "
     "parametrisation='standard'"),
    (lambda c: c.optimizer == "muon" and c.n_experts,
     "optimizer='muon' cannot train n_experts={c.n_experts}, whose weights are no matrices; use optimizer='adamw', or "
     "leave n_experts out"),
    (lambda c: c.warmup_tokens is not None and "warmup_frac" in changed(c),
     "warmup_tokens={c.warmup_tokens} and warmup_frac={c.warmup_frac:g} both set the warm-up; leave one out"),
    (lambda c: c.warmup_steps > c.n_steps,
     "warmup_tokens={c.warmup_tokens} is more than train_tokens={c.train_tokens}; lower it, or train for longer"),
    (lambda c: c.schedule != "wsd" and "decay_frac" in changed(c),
     "decay_frac={c.decay_frac:g} is the decay of schedule=wsd, and schedule={c.schedule}; set schedule=wsd, or leave "
     "decay_frac out"),
    (lambda c: c.schedule == "wsd" and c.warmup_steps > c.stable_steps,
     "schedule=wsd warms up for {c.warmup_steps} of {c.n_steps} steps and decays from step {c.stable_steps}; shorten "
     "the warm-up, lower decay_frac={c.decay_frac:g}, or train for longer"),
)  # fmt: skip
"""Of the order of the text, of muon, which orthogonalises matrices, not stacks of them, and of the schedule: warm-up is
given once and ends in time; the phases of wsd follow each other, and no other has a decay."""

SHARDED: tuple[Rule, ...] = (
    (lambda c: c.loops > 1, "loops={c.loops} shares weights between layers, which fsdp shards; use parallel='ddp'"),
    (lambda c: c.optimizer == "muon",
     "optimizer='muon' needs whole matrices, and parallel='fsdp' shards them; use parallel='ddp'"),
)  # fmt: skip


def check_parallel(config: RunConfig, parallel: str) -> None:
    """Raises ValueError for a RunConfig that cannot be trained with this kind of parallelism."""
    if parallel != "none":
        refuse_undeclared(config, f"parallel={parallel!r}")
    if parallel == "fsdp":
        refuse_first(SHARDED, config)


def stored_config(values: Fields, source: str) -> RunConfig:
    """The configuration of a stored run. Measures of earlier versions or of plugins stay in it, since `run_id` covers
    them; fields of earlier versions are left out at their defaults, which it does not cover. Raises ValueError."""
    for name, default in RETIRED_FIELDS.items():
        if values.get(name, default) != default:
            raise ValueError(
                f"{source}: {name}={values[name]!r} is of an earlier version, and this one computes with "
                f"{name}={default!r}; open the run with the version that trained it"
            )
    values = {name: value for name, value in values.items() if name not in RETIRED_FIELDS}
    measures = values.get("measures")
    if not isinstance(measures, list) or not measures or (kept := known_measures(measures)) == measures:
        return build(RunConfig, values, source)
    config = build(RunConfig, {**values, "measures": kept}, source)
    return config.model_copy(update={"measures": tuple(measures)})


def known_measures(names: Iterable[Any]) -> list[Any]:
    """Those that can be measured, or the loss: others are of an earlier version, or of a plugin that is not loaded.
    What is no text stays, so that it is refused."""
    known = {measure.name for measure in MEASURES}
    return [name for name in names if not isinstance(name, str) or name in known] or ["loss"]


def measures_named(measures: Sequence[str] | str) -> list[str]:
    """'all', or names in a list or between commas, each once. Raises ValueError for one that is unknown."""
    known = [measure.name for measure in MEASURES]
    names = [name.strip() for name in measures.split(",")] if isinstance(measures, str) else measures
    names = known if measures == "all" else names
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known, f"it must be one of all, {commas(known)}")
        raise ValueError(f"measures: {unknown[0]!r} is unknown; {hint}")
    return [*dict.fromkeys(names)]
