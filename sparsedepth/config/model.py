"""ModelConfig: the decoder as one flat, frozen, validated record, with a field for each axis of the papers.

Fields are independent unless their description names a condition. Values without effect, and combinations that a paper
found self-defeating, are rejected with the reason, at the end of this file."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sparsedepth.config.role import ANY, COMPUTES, DROPOUT, RECORD, Role, changed, roles
from sparsedepth.config.rule import Rule, refuse_first
from sparsedepth.config.section import (
    WHOLE,
    Count,
    Fields,
    Mistakes,
    NonNegative,
    Positive,
    Section,
    check,
    whole_number,
)
from sparsedepth.quantities.quantity import Named

SIZE = COMPUTES.acting("shapes")
STREAM = COMPUTES.acting("shapes", "stream", "start")
SETS_VARIANCE = replace(STREAM, directly_sets="residual_variance_last")
INITIAL = Role(directly_sets="residual_variance_last").acting("start")
SPARSER = replace(SIZE, sparser_direction="more")
FEWER_HEADS = replace(SIZE, sparser_direction="less", derived_if_missing=True)
SEEN = replace(COMPUTES, fused=ANY).acting("attention")
GATED = COMPUTES.acting("shapes", "ffn")
EXPERTS = replace(GATED, fused=ANY, needs_experts=True)
PARAMETRISED = replace(COMPUTES, cost_scope="nothing").acting("stream", "start", "optimizer")
Dropout = Annotated[float, Field(ge=0, lt=1)]

FILLED_FROM = ("d_model", "n_heads", "d_ff", "n_experts", "top_k", "n_shared_experts")
"""The fields from which missing sizes are derived (`Role.derived_if_missing`)."""

CARRIES: Mapping[str, tuple[str, ...]] = {
    "standard": (),
    "mup": ("d_model",),
    "completep": ("d_model", "n_layers"),
}
"""The sizes over which a parametrisation has rules, so that lr is carried."""

RETIRED_FIELDS = {
    "logit_soft_cap": 0.0, "weight_density": 1.0,
    "cycle_len": None, "modulus": None, "expression_len": None,
    "architecture": "decoder", "image_size": None, "patch_size": None, "n_channels": None,
}  # fmt: skip
"""Fields of earlier versions, with their defaults: records with these values still open (`run.stored_config`)."""


class ModelConfig(Section):
    """The decoder: shapes first, then the axes that the papers vary; each field has a `Role`."""

    n_layers: Annotated[Count, Field(le=10_000), replace(SIZE, kind="depth")] = 12
    """number of decoder blocks"""
    d_model: Annotated[Count, replace(SIZE, kind="capacity")] = 64
    """width of the residual stream"""
    n_heads: Annotated[Count, SIZE] = 4
    """query heads"""
    n_kv_heads: Annotated[Count | None, FEWER_HEADS] = None
    """key/value heads (GQA groups); n_heads = multi-head, 1 = multi-query"""
    d_ff: Annotated[Count | None, replace(SIZE, kind="capacity", derived_if_missing=True)] = None
    """hidden units of the dense feed-forward part; default 8/3 d_model, up to a multiple of 8"""
    activation: Annotated[Literal["swiglu", "geglu", "reglu", "gelu", "relu", "relu2"], GATED] = "swiglu"
    """of the dense feed-forward part. With a gate, a(W_gate x) * W_up x: swiglu (silu), geglu (gelu), reglu (relu);
    without, a(W_up x), two matrices instead of three: gelu, relu, relu2 (its square)"""
    vocab_size: Annotated[Count, replace(SIZE, kind="capacity")] = 264
    """rows of the embedding, at least the tokenizer's size"""
    seq_len: Annotated[int, Field(ge=2), WHOLE, SPARSER] = 256
    """training context, in tokens"""
    n_experts: Annotated[int, Field(ge=0), WHOLE, replace(EXPERTS, needs_experts=False, sparser_direction="more")] = 0
    """experts per block; 0 = dense"""
    top_k: Annotated[int | None, Field(ge=1), WHOLE, EXPERTS] = None
    """experts used per token; only with n_experts"""
    d_expert: Annotated[Count | None, replace(EXPERTS, derived_if_missing=True)] = None
    """width of one expert; default d_ff / (top_k + n_shared_experts), the dense active size"""
    n_shared_experts: Annotated[int, Field(ge=0), WHOLE, EXPERTS] = 0
    """experts of width d_expert that every token uses, added with weight 1; only with n_experts"""
    n_dense_layers: Annotated[int, Field(ge=0), WHOLE, EXPERTS] = 0
    """first layers that keep a dense feed-forward part of width d_ff; only with n_experts"""
    renormalise_gates: Annotated[bool, replace(EXPERTS, cost_scope="nothing")] = True
    """top-k gates sum to 1 (Mixtral; top_k from 2 on) or keep their softmax values (OLMoE)"""
    balance_loss: Annotated[NonNegative, Role(needs_experts=True).acting("loss")] = 0.01
    """weight of the per-layer load-balance loss"""
    router_z_loss: Annotated[NonNegative, Role(needs_experts=True).acting("loss")] = 0.001
    """weight of the per-layer router z loss"""
    norm: Annotated[Literal["pre", "post", "sandwich", "peri", "mix", "deepnorm", "keel"], STREAM] = "pre"
    """where the norms N of a branch F stand: pre x + F(N x); post N(x + F x); sandwich x + N(F(N x)); peri: sandwich
    with a norm on the embedding; mix: first blocks post, the rest pre; deepnorm N((2 n_layers)^(1/4) x + F x) with
    smaller initial weights; keel N(2 n_layers x + F(N x))"""
    mix_frac: Annotated[float, Field(gt=0, lt=1), replace(STREAM, cost_scope="nothing", only_with=("norm", "mix"))] = (
        0.25
    )
    """share of the blocks, from the first, that are post; with norm mix"""
    norm_kind: Annotated[Literal["rms", "group", "layer"], STREAM] = "rms"
    """rms: RMSNorm; group: mean 0 and variance 1 in each group of channels of a token; layer: LayerNorm with bias"""
    norm_groups: Annotated[Count, replace(STREAM, exported=False, only_with=("norm_kind", "group"))] = 4
    """groups of channels; with norm_kind group"""
    norm_eps: Annotated[Positive, Role(fused=ANY, exported=True).acting("stream", "attention")] = 1e-6
    """epsilon of every norm"""
    depth_scale: Annotated[
        Literal["none", "lns", "before_norm", "after_branch", "after_residual", "after_attention", "after_ffn"],
        Role(
            stacked=("none", "lns"),
            fused=("lns",),
            exported=True,
            directly_sets="residual_variance_last",
            must_stand_still=("weight_sparsity", "attention_sparsity_rel"),
        ).acting("stream"),
    ] = "none"
    """what is multiplied by 1/sqrt(l) in block l = 1..L. lns: the output of its norms; before_norm: their input;
    after_branch: outputs of attention and FFN; after_attention, after_ffn: that output only; after_residual: the stream
    after each addition"""
    residual_gate: Annotated[Literal["none", "layerscale", "skipinit", "admin"], SETS_VARIANCE] = "none"
    """learned weights of the residual sum. layerscale: a vector on each branch, from gate_init; skipinit: a number on
    each branch, from 0; admin: a vector on the stream, from profiled variances; with norm post"""
    gate_init: Annotated[Positive, Role(only_with=("residual_gate", "layerscale")).acting("start")] = 1e-4
    """initial gates; with residual_gate layerscale"""
    residual_scalars: Annotated[bool, replace(SETS_VARIANCE, fused=ANY)] = False
    """block l reads a_l x + b_l x_0 in place of its input x: learned numbers that start at 1 and 0"""
    scalars_start: Annotated[Literal["one", "falling"], Role(only_with=("residual_scalars", True)).acting("start")] = (
        "one"
    )
    """where a_l and b_l start: at 1 and 0; falling (nanochat): at 1.15 and .2 in block 1, down to 1.05 and .05"""
    stream_skips: Annotated[bool, replace(STREAM, fused=ANY)] = False
    """block l of the second half reads x + c_l x_(n_layers + 1 - l): skips from the first half, nested, with learned
    numbers that start at 1 (modded-nanogpt)"""
    gpas: Annotated[bool, SETS_VARIANCE] = False
    """each sum shrinks to x - silu(p) x; p: one learned number per block, initially 0; gradients ignore the factor"""
    attention_residuals: Annotated[int, Field(ge=0), WHOLE, STREAM] = 0
    """sources, besides the embedding, over which branches attend in place of the residual sum; each is the
    sum of 2 n_layers / attention_residuals branches, one each if set to 2 n_layers; 0 = none"""
    n_streams: Annotated[Count, STREAM] = 1
    """streams of d_model channels that every branch reads, mixes and writes (hyper-connections); 1 = one sum"""
    stream_mixing: Annotated[Literal["plain", "manifold"], STREAM] = "plain"
    """of n_streams: coefficients of any size (2409.19606), or such that mixing enlarges nothing (mHC, 2512.24880)"""
    loops: Annotated[Count, replace(STREAM, fused=ANY)] = 1
    """passes through n_layers / loops blocks with weights of their own (2502.17416); n_layers counts every pass"""
    value_residual: Annotated[bool, SEEN.acting("shapes", "attention")] = False
    """attention of blocks 2..L sums c_l v_l + d_l v_1, its own values and block 1's: learned numbers, from 1/2"""
    init: Annotated[Literal["normal", "scaled", "depth_scaled", "zero_outputs"], INITIAL] = "normal"
    """scaled: the two output projections of a block start 1/sqrt(2 n_layers) smaller; depth_scaled: 1/sqrt(2 l) smaller
    in block l; zero_outputs: at 0, so that every block starts as the identity"""
    init_std: Annotated[Positive, INITIAL] = 0.02
    """standard deviation of every initial weight"""
    parametrisation: Annotated[Literal["standard", "mup", "completep"], replace(PARAMETRISED, fused=("mup",))] = (
        "standard"
    )
    """rules by which lr, eps, weight decay, initial weights and outputs follow width and depth, so that the best values
    at base_width and base_depth stay the best while d_model / n_heads does. mup: width (2203.03466); completep: width
    and depth, each branch times base_depth / n_layers (2505.01618)"""
    base_width: Annotated[Count, replace(PARAMETRISED, fused=ANY)] = 64
    """d_model at which mup and completep are standard"""
    base_depth: Annotated[Count, replace(PARAMETRISED, only_with=("parametrisation", "completep"))] = 12
    """n_layers at which completep scales no branch"""
    attention_dropout: Annotated[Dropout, replace(DROPOUT, fused=ANY).acting("noise", "attention")] = 0.0
    """dropout of attention weights; off in evaluation"""
    residual_dropout: Annotated[Dropout, DROPOUT.acting("noise", "stream")] = 0.0
    """dropout of single entries of what a branch adds to the stream, not of whole branches"""
    ffn_dropout: Annotated[Dropout, DROPOUT.acting("noise", "ffn")] = 0.0
    """dropout of the hidden units of the dense feed-forward part"""
    tie_embeddings: Annotated[bool, replace(STREAM, fused=ANY)] = False
    """the head is the embedding's transpose"""
    rope_theta: Annotated[Positive, replace(SEEN, cost_scope="nothing")] = 10000.0
    """base of the rotary frequencies"""
    sliding_window: Annotated[Count | None, SEEN] = None
    """tokens that a token attends to, itself included; null = all before it"""
    window_pattern: Annotated[str | None, Field(pattern="^[SL]+$"), SEEN] = None
    """layers with sliding_window (S) and without (L), repeated, such as SSSL; the last layer has none"""
    gated_attention: Annotated[Literal["none", "channel", "head"], COMPUTES.acting("shapes", "attention")] = "none"
    """attended values times sigmoid(W x), x the branch's input: a gate for each channel or head (2505.06708)"""
    mask_documents: Annotated[bool, SEEN] = False
    """no attention across the documents of a packed sequence"""
    eod: Annotated[
        int | None,
        Field(ge=0),
        WHOLE,
        replace(SEEN, kind="record", cost_scope="nothing", hashed=False, only_with=("mask_documents", True)),
    ] = None
    """id that ends a document; with mask_documents, where the default is that of the tokenizers byte (256) and bpe
    (0)"""
    qk_norm: Annotated[bool, COMPUTES.acting("shapes", "attention")] = False
    """RMSNorm on queries and keys, before the rotation"""
    qk_norm_over: Annotated[
        Literal["head", "all"], replace(COMPUTES, only_with=("qk_norm", True)).acting("shapes", "attention")
    ] = "head"
    """whether qk_norm norms each head (Qwen3) or all heads together (OLMoE)"""
    allow: Annotated[
        tuple[Literal["lns_with_scaled_init"], ...], Field(strict=False), replace(RECORD, hashed=False)
    ] = ()
    """names of self-defeating combinations to allow"""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return with_derived_sizes(values) if isinstance(values, dict) else values

    @check
    def _check_shapes(self) -> None:
        refuse_first(SHAPES, self)

    @check
    def _check_experts(self) -> None:
        for name in ("top_k", "d_expert", "n_shared_experts", "n_dense_layers"):
            if self.n_experts == 0 and (value := getattr(self, name)):
                raise ValueError(f"{name}={value} needs experts, but n_experts=0; set n_experts, or leave {name} out")

    @check
    def _check_conditions(self) -> None:
        """A changed field must have an effect: the field that it depends on must have the right value."""
        for name, role in roles(ModelConfig).items():
            own = getattr(self, name)
            (owner, value) = role.only_with or (name, own)
            if own != ModelConfig.model_fields[name].default and getattr(self, owner) != value:
                told = f"{name}={own} has no meaning with {owner}={getattr(self, owner)!r}"
                raise ValueError(f"{told}; set {owner}={value!r}, or leave {name} out")
        if self.mask_documents and (self.eod is None or self.eod >= self.vocab_size):
            told = f"mask_documents needs the id that ends a document, below vocab_size={self.vocab_size}"
            raise ValueError(f"{told}, and has eod={self.eod}; set eod to the tokenizer's end-of-sequence id")

    @check
    def _check_combinations(self) -> None:
        rules = (WITH_EXPERTS if self.n_experts else ()) + OF_STREAM
        rules += WITH_SOURCES if self.attention_residuals else ()
        rules += WITH_STREAMS if self.stream_width > self.d_model else ()
        rules += STANDARD if self.parametrisation == "standard" else PARAMETRISED_ONLY
        if mistakes := [text.format(c=self) for applies, text in rules if applies(self)]:
            raise Mistakes(mistakes)
        if self.depth_scale == "lns" and self.init == "scaled":
            warnings.warn("depth_scale='lns' with init='scaled' defeats LNS (2502.05795, Table 6)", stacklevel=2)

    @property
    def n_blocks(self) -> int:
        """Blocks with weights of their own."""
        return self.n_layers // self.loops

    def has_window(self, layer: int) -> bool:
        """Whether attention of this layer is limited to sliding_window."""
        pattern = self.window_pattern or "S"
        is_long = pattern[(layer - 1) % len(pattern)] == "L" or bool(self.window_pattern and layer == self.n_layers)
        return self.sliding_window is not None and not is_long

    @property
    def stream_width(self) -> int:
        """Channels between blocks."""
        return (self.n_streams + self.attention_residuals) * self.d_model

    @property
    def width_multiplier(self) -> float:
        """m_N = d_model / base_width, 1 with parametrisation standard."""
        return 1.0 if self.parametrisation == "standard" else self.d_model / self.base_width

    @property
    def depth_multiplier(self) -> float:
        """m_L = n_layers / base_depth with parametrisation completep, else 1."""
        return self.n_layers / self.base_depth if self.parametrisation == "completep" else 1.0

    @property
    def reads_stream_start(self) -> bool:
        """Whether blocks also read x_0, block 1's values, or states of the first half."""
        return self.residual_scalars or self.value_residual or self.stream_skips

    @property
    def drops(self) -> bool:
        return any(role.acts and "noise" in role.acts for role in changed(self).values())

    @property
    def is_gated(self) -> bool:
        """Whether the dense feed-forward part has a gate, hence three matrices."""
        return self.activation.endswith("glu")

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def n_post_layers(self) -> int:
        """Number of first blocks with post-norms (after the residual sum)."""
        if self.norm == "mix":
            return round(self.mix_frac * self.n_layers)
        return self.n_layers if self.norm in ("post", "deepnorm", "keel") else 0


def with_derived_sizes(values: Fields) -> Named:
    """The fields with missing sizes derived from the others (`FILLED_FROM`), or from the defaults of those, so that
    every stored run has all sizes."""
    filled = dict(values)

    def whole(name: str) -> int | None:
        size = filled.get(name)
        size = whole_number(ModelConfig.model_fields[name].default if size is None else size)
        return size if isinstance(size, int) and size > 0 else None

    if filled.get("n_kv_heads") is None and whole("n_heads"):
        filled["n_kv_heads"] = whole("n_heads")
    if filled.get("d_ff") is None and (d_model := whole("d_model")):
        filled["d_ff"] = -(-d_model * 8 // 3 // 8) * 8
    if whole("n_experts") and filled.get("d_expert") is None and (top_k := whole("top_k")) and whole("d_ff"):
        filled["d_expert"] = max(1, (whole("d_ff") or 1) // (top_k + (whole("n_shared_experts") or 0)))
    return filled


SHAPES: tuple[Rule, ...] = (
    (lambda c: c.d_model % (2 * c.n_heads),
     "n_heads={c.n_heads} does not divide d_model={c.d_model} into heads of even width; choose n_heads so that "
     "d_model / n_heads is an even number"),
    (lambda c: c.n_heads % c.n_kv_heads and [n for n in range(1, c.n_heads + 1) if c.n_heads % n == 0],
     "n_kv_heads={c.n_kv_heads} does not divide n_heads={c.n_heads}; choose one of {found}"),
    (lambda c: c.norm_kind == "group" and (c.d_model % c.norm_groups or c.norm_groups == c.d_model),
     "norm_groups={c.norm_groups} does not divide d_model={c.d_model} into groups of at least 2 channels; choose a "
     "smaller divisor of {c.d_model}"),
    (lambda c: c.norm == "mix" and not 0 < c.n_post_layers < c.n_layers,
     "with mix_frac={c.mix_frac} {c.n_post_layers} blocks are post of n_layers={c.n_layers}: no mix; use norm='pre', "
     "norm='post', or another mix_frac"),
)  # fmt: skip
"""Sizes divide each other as heads, groups of keys and groups of channels need it."""

WITH_EXPERTS = (
    (lambda c: c.top_k is None,
     "n_experts={c.n_experts} needs top_k, from 1 to {c.n_experts}; with top_k=1 also renormalise_gates=false"),
    (lambda c: (c.top_k or 0) > c.n_experts,
     "top_k={c.top_k} is more than n_experts={c.n_experts}; choose top_k <= {c.n_experts}"),
    (lambda c: c.n_experts > 1 and c.top_k == 1 and c.renormalise_gates,
     "top_k=1 with renormalise_gates=true: the one gate of a token is then always 1, and the loss teaches the router "
     "nothing (2101.03961, eq. 2); set renormalise_gates=false"),
    (lambda c: c.activation != "swiglu",
     "activation={c.activation!r} is of the dense feed-forward part, and experts are SwiGLU in every kernel; use "
     "activation='swiglu', or n_experts=0"),
    (lambda c: c.ffn_dropout > 0,
     "ffn_dropout={c.ffn_dropout:g} is of the dense feed-forward part, and the kernels of experts drop no hidden "
     "units; use residual_dropout, or n_experts=0"),
    (lambda c: c.n_dense_layers >= c.n_layers,
     "n_dense_layers={c.n_dense_layers} leaves no layer of n_layers={c.n_layers} to the experts; choose a smaller one, "
     "or n_experts=0"),
)  # fmt: skip

OF_STREAM = (
    (lambda c: c.residual_gate == "admin" and c.norm != "post",
     "residual_gate='admin' weighs the stream against a branch before their norm (2004.08249), and norm={c.norm!r} has "
     "none there or weights of its own; use norm='post'"),
    (lambda c: c.residual_gate == "admin" and c.residual_scalars,
     "residual_scalars with residual_gate='admin' weighs the stream twice; choose one of them"),
    (lambda c: c.residual_gate == "admin" and c.gpas,
     "gpas with residual_gate='admin' weighs the stream twice; choose one of them"),
    (lambda c: c.value_residual and c.n_layers == c.loops,
     "value_residual gives block 1's values to later ones, and n_layers={c.n_layers} with loops={c.loops} has none"),
    (lambda c: c.stream_skips and (c.n_layers < 3 or c.loops > 1 or c.residual_gate == "admin"),
     "stream_skips joins blocks of two halves, each with its own weights, and n_layers={c.n_layers}, loops={c.loops}, "
     "residual_gate={c.residual_gate!r} has none, or weighs the stream itself; use 3 layers or more, and neither"),
    (lambda c: c.n_layers % c.loops,
     "loops={c.loops} does not divide n_layers={c.n_layers}, which counts every pass; use n_layers = blocks x loops"),
    (lambda c: c.loops > 1 and (c.n_dense_layers or c.residual_gate == "admin" or c.attention_residuals),
     "loops={c.loops} with n_dense_layers, residual_gate='admin' or attention_residuals, whose layers differ by place: "
     "layers that share weights have several places; use loops=1"),
    (lambda c: c.loops > 1 and c.window_pattern,
     "window_pattern={c.window_pattern!r} with loops={c.loops}: layers that share weights share their window; leave "
     "one out"),
    (lambda c: c.n_streams > 1 and c.attention_residuals,
     "attention_residuals={c.attention_residuals} with n_streams={c.n_streams}: either takes the place of the sum; "
     "choose one of them"),
    (lambda c: c.n_streams == 1 and c.stream_mixing != "plain",
     "stream_mixing={c.stream_mixing!r} has no meaning with n_streams=1; set n_streams, or leave stream_mixing out"),
    (lambda c: c.window_pattern and c.sliding_window is None,
     "window_pattern={c.window_pattern!r} has no meaning without sliding_window; set it, or leave the pattern out"),
    (lambda c: c.residual_gate == "skipinit" and c.init == "zero_outputs",
     "residual_gate='skipinit' with init='zero_outputs' starts gates and branches at 0, so that neither gets a "
     "gradient; use init='normal', or residual_gate='none'"),
    (lambda c: c.depth_scale == "lns" and c.init == "scaled" and "lns_with_scaled_init" not in c.allow,
     "depth_scale='lns' with init='scaled' damps the residual stream twice and undoes the gain of LNS (2502.05795, "
     "Table 6); use init='normal', or ask for it: allow=['lns_with_scaled_init']"),
)  # fmt: skip

ONE_STREAM: Mapping[str, Callable[[ModelConfig], object]] = {
    "norm": lambda c: c.n_post_layers > 0,
    "depth_scale": lambda c: c.depth_scale == "after_residual",
    "residual_scalars": lambda c: c.residual_scalars,
    "gpas": lambda c: c.gpas,
    "stream_skips": lambda c: c.stream_skips,
}
WITH_STREAMS = tuple(
    (applies,
     f"attention_residuals={{c.attention_residuals}}, n_streams={{c.n_streams}} with {name}={{c.{name}!r}}, which "
     f"norms or weighs the one stream after a sum; use {name}={ModelConfig.model_fields[name].default!r}, or one")
    for name, applies in ONE_STREAM.items()
)  # fmt: skip
WITH_SOURCES = (
    (lambda c: 2 * c.n_layers % c.attention_residuals,
     "attention_residuals={c.attention_residuals} does not divide the branches, 2 x n_layers={c.n_layers}, into sums "
     "of equally many"),
)  # fmt: skip

UNRULED: Mapping[str, tuple[Callable[[ModelConfig], object], str]] = {
    "n_experts": (lambda c: c.n_experts > 0, "its rules are of dense blocks"),
    "tie_embeddings": (lambda c: c.tie_embeddings, "embedding and head follow different rules"),
    "norm": (lambda c: c.n_post_layers > 0, "its rules are of blocks that add to the stream"),
    "attention_residuals": (lambda c: c.attention_residuals > 0, "it has no rule for what attends over sources"),
    "n_streams": (lambda c: c.n_streams > 1, "it has no rule for what mixes streams"),
    "stream_skips": (lambda c: c.stream_skips, "it has no rule for skips between blocks"),
    "loops": (lambda c: c.loops > 1 and c.parametrisation == "completep", "its rules are of layers with own weights"),
    "init": (lambda c: c.init not in ("normal", "zero_outputs"), "it sets the size of the outputs itself"),
}
PARAMETRISED_ONLY = tuple(
    (applies, f"parametrisation={{c.parametrisation!r}} with {name}={{c.{name}!r}}: {reason}; use "
              f"{name}={ModelConfig.model_fields[name].default!r}")
    for name, (applies, reason) in UNRULED.items()
)  # fmt: skip
STANDARD = (
    (lambda c: c.base_width != type(c).model_fields["base_width"].default,
     "base_width={c.base_width} has no meaning with parametrisation='standard'; set parametrisation='mup' or "
     "'completep', or leave base_width out"),
)  # fmt: skip
