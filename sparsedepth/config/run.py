"""RunConfig: every choice that changes the numbers of one training run, as one flat, frozen, validated record.

A field's name is its YAML key, its `--set` name, its column in the store and its axis label in a plot. Sections
(model, data, train, measure) are base classes, so that each part of the library asks only for what it reads.
Where a run is written and on what device it runs are not part of it: `run_id` names the *result*.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import ConfigDict, Field, model_validator

from sparsedepth.config import presets
from sparsedepth.config.model import Count, Fraction, ModelConfig, NonNegative, Positive, Section
from sparsedepth.config.task import TEXT_ONLY, TaskConfig, check_task, task_name
from sparsedepth.files import digest

DEFAULTS_VERSION = 1
"""Raised when a default changes meaning: `run_id` hashes only what differs from the defaults, so new fields
keep old ids valid and a changed default must not."""

Measure = Literal[
    "usefulness",
    "loss",
    "weights",
    "variance",
    "attention",
    "geometry",
    "experts",
    "early_exit",
    "causal",
    "permutation",
    "neighbours",
    "jacobian",
    "removal",
    "causal_maximum",
    "trajectories",
    "released",
]
ON_REQUEST: tuple[Measure, ...] = ("neighbours", "jacobian", "removal", "causal_maximum", "trajectories", "released")
"""These cost more than the scores of the papers and what a few forward passes give."""

Thresholds = Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)]


class DataConfig(Section):
    """The text, and how it becomes tokens."""

    corpus: Annotated[
        str,
        Field(
            min_length=1,
            description="'stdlib' (the Python standard library's source), a local .txt/.jsonl/.parquet file or folder, "
            "'hub:NAME[:CONFIG]' (streamed), or a task of known depth: 'task:state_tracking', 'task:k_hop', "
            "'task:successor', 'task:arithmetic'",
        ),
    ] = "stdlib"
    text_field: Annotated[str, Field(description="column that holds the text, in JSON-lines, Parquet and hub data")] = (
        "text"
    )
    tokenizer: Annotated[
        str,
        Field(
            min_length=1,
            description="'byte', 'bpe:SIZE' (trained on the corpus), or a local folder or hub name of a tokenizer",
        ),
    ] = "byte"
    val_fraction: Annotated[
        float, Field(gt=0, lt=0.5, description="share of documents held out, chosen by their hash")
    ] = 0.05
    max_corpus_tokens: Annotated[
        Count | None, Field(description="stop reading the corpus after this many training tokens")
    ] = None
    chunk_len: Annotated[
        Count | None,
        Field(
            description="unit of shuffling, in tokens; default seq_len. Set it to the longest seq_len of a sweep and "
            "every run reads the same text in the same step"
        ),
    ] = None


class TrainConfig(Section):
    """The optimiser and its schedule: AdamW, linear warm-up, cosine."""

    train_tokens: Annotated[Count, Field(description="tokens to train on")] = 2_097_152
    batch_tokens: Annotated[Count, Field(description="tokens per optimiser step")] = 8192
    lr: Annotated[Positive, Field(description="peak learning rate")] = 1e-3
    warmup_frac: Annotated[Fraction, Field(description="share of the steps that warm up linearly from 0")] = 0.05
    min_lr_frac: Annotated[Fraction, Field(description="learning rate at the end / peak")] = 0.1
    weight_decay: Annotated[NonNegative, Field(description="AdamW lambda; a step shrinks weights by lr * lambda")] = 0.1
    weight_decay_on: Annotated[
        Literal["all", "matrices", "no_embed_norm"],
        Field(description="which parameters decay: all, every matrix, or all but embeddings and norms"),
    ] = "matrices"
    beta1: Annotated[float, Field(ge=0, lt=1, description="AdamW beta 1")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="AdamW beta 2")] = 0.95
    adam_eps: Annotated[Positive, Field(description="AdamW epsilon")] = 1e-8
    grad_clip: Annotated[NonNegative, Field(description="largest global gradient norm; 0 = no clipping")] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="initial weights and order of the text")] = 0
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(description="bf16: matrix products under autocast, weights in fp32; auto: bf16 on a GPU that has it"),
    ] = "auto"
    log_every: Annotated[Count, Field(description="steps between two rows of the curves")] = 10
    observe_every: Annotated[Count, Field(description="steps between two observations of residual variance")] = 50
    divergence_factor: Annotated[
        float, Field(gt=1, description="a loss above this multiple of the first step's ends the run as diverged")
    ] = 2.0

    @property
    def n_steps(self) -> int:
        return self.train_tokens // self.batch_tokens


class MeasureConfig(Section):
    """What is measured, how much held-out text each measure reads, and at which thresholds."""

    measures: Annotated[
        tuple[Measure, ...], Field(min_length=1, strict=False, description="groups of quantities to measure")
    ] = tuple(name for name in get_args(Measure) if name not in ON_REQUEST)

    val_tokens: Annotated[Count, Field(description="held-out tokens of the validation loss, at most")] = 131_072
    eval_seq_len: Annotated[
        int | None,
        Field(ge=2, description="common context at which every run is scored too; default seq_len"),
    ] = None
    measure_tokens: Annotated[Count, Field(description="held-out tokens of each score, at most")] = 8192
    fit_tokens: Annotated[
        Count, Field(description="held-out tokens on which usefulness fits its maps (disjoint from the scored ones)")
    ] = 16_384
    usefulness_threshold: Annotated[
        Positive, Field(description="a layer is useful if its replacement raises the loss by more than this share")
    ] = 0.1
    permutation_pairs: Annotated[
        Count | None, Field(description="pairs of layers to swap, drawn at random; default all")
    ] = None
    removal_ranges: Annotated[
        Count | None, Field(description="ranges of layers to remove, drawn at random; default all; with 'removal'")
    ] = None
    jacobian_probes: Annotated[
        int | None, Field(ge=2, description="random probes of each block's Jacobian; null = exact; with 'jacobian'")
    ] = 4
    weight_eps: Annotated[Thresholds, Field(description="|w| below which a weight is zero; the first leads")] = (
        1e-3,
        1e-4,
        1e-2,
    )
    weight_rel_eps: Annotated[Thresholds, Field(description="the same as multiples of the matrix's rms")] = (0.1, 0.01)
    attention_tau: Annotated[Thresholds, Field(description="attention weight below which an entry is zero")] = (
        1e-3,
        1e-4,
        1e-2,
    )
    attention_rel_tau: Annotated[Thresholds, Field(description="the same as multiples of uniform attention 1/i")] = (
        0.1,
        0.01,
    )


class MeasureOnlyConfig(MeasureConfig):
    """How to measure a model that exists already."""

    seq_len: Annotated[int, Field(ge=2, description="context of the measured windows, in tokens")] = 256


def _add_preset(schema: dict[str, Any]) -> None:
    """A key of run files that is no field: it stands for fields."""
    schema["properties"]["preset"] = {"enum": list(presets.PRESETS), "description": "fields of a paper's model"}


class RunConfig(
    MeasureConfig, TrainConfig, TaskConfig, DataConfig, ModelConfig
):  # pydantic lists the fields of the last first
    """One run. Unknown keys, wrong types and impossible shapes raise ValueError (pydantic's ValidationError)."""

    model_config = ConfigDict(json_schema_extra=_add_preset)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """A preset's fields under those given, and the end of a document where the tokenizer's name says it."""
        if not isinstance(values, dict):
            return values
        filled = presets.expand(values)
        if filled.get("mask_documents") is True and filled.get("eod") is None:
            tokenizer = filled.get("tokenizer", cls.model_fields["tokenizer"].default)
            filled["eod"] = {"byte": 256, "bpe": 0}.get(str(tokenizer).partition(":")[0])
        return filled

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if self.batch_tokens % self.seq_len:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is not a whole number of sequences of seq_len={self.seq_len}; "
                f"use batch_tokens={max(1, round(self.batch_tokens / self.seq_len)) * self.seq_len}"
            )
        if self.train_tokens % self.batch_tokens:
            raise ValueError(
                f"train_tokens={self.train_tokens} is not a whole number of steps of batch_tokens={self.batch_tokens}; "
                f"use train_tokens={max(1, round(self.train_tokens / self.batch_tokens)) * self.batch_tokens}"
            )
        if self.chunk_len is not None and (self.chunk_len % self.seq_len or self.batch_tokens % self.chunk_len):
            raise ValueError(
                f"chunk_len={self.chunk_len} must be a multiple of seq_len={self.seq_len} "
                f"and divide batch_tokens={self.batch_tokens}"
            )
        self._check_corpus()
        self._check_measures()
        return self

    def _check_corpus(self) -> None:
        """A task has its own fields and none of a text's; a text has none of a task's."""
        if task_name(self.corpus) is not None:
            for name in TEXT_ONLY:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is about text, and corpus={self.corpus!r} makes its tokens; "
                        f"leave {name} out"
                    )
        lengths = {"seq_len": self.seq_len} | ({"eval_seq_len": self.eval_seq_len} if self.eval_seq_len else {})
        check_task(self.corpus, self, self.vocab_size, lengths)

    def _check_measures(self) -> None:
        """Held-out text is read in whole sequences; usefulness fits maps with d_model + 1 unknowns per output."""
        least = {
            "val_tokens": max(self.seq_len, self.eval_seq_len or 0),
            "measure_tokens": max(self.seq_len, self.d_model + 2 if "released" in self.measures else 0),
            "fit_tokens": max(self.seq_len, self.d_model + 2),
        }
        for name, tokens in least.items():
            if getattr(self, name) < tokens:
                raise ValueError(
                    f"{name}={getattr(self, name)} is too few for seq_len={self.seq_len}, d_model={self.d_model}; "
                    f"use at least {tokens}"
                )

    @property
    def run_id(self) -> str:
        """12 hex digits: the hash of everything that differs from the defaults, and of the defaults' version.

        `eod` follows from the tokenizer, and `allow` changes nothing.
        """
        chosen = self.model_dump(mode="json", exclude_defaults=True, exclude={"allow", "eod"})
        return digest({"defaults": DEFAULTS_VERSION, **chosen})

    @property
    def cell_id(self) -> str:
        """`run_id` with the seed left out: the runs that share it are replicates of one configuration."""
        return self.model_copy(update={"seed": 0}).run_id
