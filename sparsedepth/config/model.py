"""ModelConfig: the decoder as one flat, frozen, validated record; each axis of the papers is one field of it.

Fields are independent of one another unless their description names a condition; a value that would have no effect,
or that a paper found to defeat another, is refused with the reason.
"""

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


CONDITIONS: dict[str, tuple[str, object]] = {
    "mix_frac": ("norm", "mix"),
    "norm_groups": ("norm_kind", "group"),
    "gate_init": ("residual_gate", "layerscale"),
    "eod": ("mask_documents", True),
    "qk_norm_over": ("qk_norm", True),
}
"""Field -> the field, and its value, without which it has no effect."""


class ModelConfig(Section):
    """The decoder: shapes first, then the axes that the papers vary."""

    n_layers: Annotated[Count, Field(description="number of decoder blocks")] = 12
    d_model: Annotated[Count, Field(description="width of the residual stream")] = 64
    n_heads: Annotated[Count, Field(description="query heads")] = 4
    n_kv_heads: Annotated[
        Count | None,
        Field(description="key/value heads (GQA groups); n_heads = multi-head, 1 = multi-query"),
    ] = None
    d_ff: Annotated[
        Count | None, Field(description="width of the dense SwiGLU; default 8/3 d_model, up to a multiple of 8")
    ] = None
    vocab_size: Annotated[Count, Field(description="rows of the embedding; at least the tokenizer's size")] = 264
    seq_len: Annotated[int, Field(ge=2, description="training context, in tokens")] = 256
    n_experts: Annotated[int, Field(ge=0, description="experts per block; 0 = dense")] = 0
    top_k: Annotated[int | None, Field(ge=1, description="experts used per token; only with n_experts")] = None
    d_expert: Annotated[
        Count | None,
        Field(description="width of one expert; default d_ff / (top_k + n_shared_experts), the dense active size"),
    ] = None
    n_shared_experts: Annotated[
        int, Field(ge=0, description="experts of width d_expert that every token uses, added with weight 1; MoE only")
    ] = 0
    n_dense_layers: Annotated[
        int, Field(ge=0, description="first layers that keep a dense SwiGLU of width d_ff; with n_experts")
    ] = 0
    renormalise_gates: Annotated[
        bool, Field(description="top-k gates sum to 1 (Mixtral) or keep their softmax values (OLMoE)")
    ] = True
    balance_loss: Annotated[NonNegative, Field(description="weight of the per-layer load-balance loss")] = 0.01
    router_z_loss: Annotated[NonNegative, Field(description="weight of the per-layer router z loss")] = 0.001
    norm: Annotated[
        Literal["pre", "post", "sandwich", "peri", "mix", "deepnorm"],
        Field(
            description="where the norms N of a branch F stand: pre x + F(N x); post N(x + F x); sandwich "
            "x + N(F(N x)); peri: sandwich with a norm on the embedding; mix: first blocks post, the rest pre; "
            "deepnorm N((2 n_layers)^(1/4) x + F x) with smaller initial weights"
        ),
    ] = "pre"
    mix_frac: Annotated[
        float, Field(gt=0, lt=1, description="share of the blocks, from the first, that are post; with norm mix")
    ] = 0.25
    norm_kind: Annotated[
        Literal["rms", "group"],
        Field(description="rms: RMSNorm; group: mean 0 and variance 1 within each group of channels of a token"),
    ] = "rms"
    norm_groups: Annotated[Count, Field(description="groups of channels; with norm_kind group")] = 4
    norm_eps: Annotated[Positive, Field(description="epsilon of every norm")] = 1e-6
    depth_scale: Annotated[
        Literal[
            "none",
            "lns",
            "before_norm",
            "after_branch",
            "after_residual",
            "after_attention",
            "after_ffn",
        ],
        Field(
            description="what is multiplied by 1/sqrt(l) in block l = 1..L. lns: the output of its norms; before_norm: "
            "their input; after_branch: what attention and FFN add; after_attention, after_ffn: what that one adds; "
            "after_residual: the stream after each addition"
        ),
    ] = "none"
    residual_gate: Annotated[
        Literal["none", "layerscale", "skipinit", "admin"],
        Field(
            description="learned weights of the residual sum. layerscale: a vector on each branch, from gate_init; "
            "skipinit: a number on each branch, from 0; admin: a vector on the stream, from profiled variances; "
            "with norm post"
        ),
    ] = "none"
    gate_init: Annotated[Positive, Field(description="initial gates; with residual_gate layerscale")] = 1e-4
    init: Annotated[
        Literal["normal", "scaled", "depth_scaled"],
        Field(
            description="scaled: the two output projections of a block start 1/sqrt(2 n_layers) smaller; "
            "depth_scaled: 1/sqrt(2 l) smaller in block l"
        ),
    ] = "normal"
    init_std: Annotated[Positive, Field(description="standard deviation of every initial weight")] = 0.02
    weight_density: Annotated[
        float,
        Field(
            gt=0, le=1, description="share of the entries of the blocks' matrices that exist; the rest are 0 forever"
        ),
    ] = 1.0
    tie_embeddings: Annotated[bool, Field(description="the head is the embedding's transpose")] = False
    rope_theta: Annotated[Positive, Field(description="base of the rotary frequencies")] = 10000.0
    sliding_window: Annotated[
        Count | None, Field(description="tokens that a token sees, itself included; null = all before it")
    ] = None
    mask_documents: Annotated[bool, Field(description="no attention across the documents of a packed sequence")] = False
    eod: Annotated[
        int | None,
        Field(
            ge=0,
            description="id that ends a document; with mask_documents, where the default is that of the tokenizers "
            "byte (256) and bpe (0)",
        ),
    ] = None
    qk_norm: Annotated[bool, Field(description="RMSNorm on queries and keys, before the rotation")] = False
    qk_norm_over: Annotated[
        Literal["head", "all"], Field(description="what qk_norm norms at once: each head (Qwen3), or all (OLMoE)")
    ] = "head"
    allow: Annotated[
        tuple[Literal["lns_with_scaled_init"], ...],
        Field(strict=False, description="self-defeating combinations that are wanted all the same, by name"),
    ] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, values: Any) -> Any:
        """Sizes left out follow from the others, so that every stored run holds the sizes it had."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)

        def whole(name: str) -> int | None:
            found = filled.get(name)
            found = cls.model_fields[name].default if found is None else found
            return found if isinstance(found, int) and found > 0 else None

        if filled.get("n_kv_heads") is None and whole("n_heads"):
            filled["n_kv_heads"] = whole("n_heads")
        if filled.get("d_ff") is None and (d_model := whole("d_model")):
            filled["d_ff"] = -(-d_model * 8 // 3 // 8) * 8
        if whole("n_experts") and filled.get("d_expert") is None and (top_k := whole("top_k")) and whole("d_ff"):
            filled["d_expert"] = max(1, (whole("d_ff") or 1) // (top_k + (whole("n_shared_experts") or 0)))
        return filled

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        if self.d_model % (2 * self.n_heads):
            raise ValueError(
                f"n_heads={self.n_heads} does not divide d_model={self.d_model} into heads of even width; "
                f"choose n_heads so that d_model / n_heads is an even number"
            )
        assert self.n_kv_heads is not None
        if self.n_kv_heads > self.n_heads or self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}; "
                f"choose one of {[h for h in range(1, self.n_heads + 1) if self.n_heads % h == 0]}"
            )
        if self.norm_kind == "group" and (self.d_model % self.norm_groups or self.norm_groups == self.d_model):
            raise ValueError(
                f"norm_groups={self.norm_groups} does not divide d_model={self.d_model} into groups of at least 2 "
                f"channels; choose a smaller divisor of {self.d_model}"
            )
        if self.norm == "mix" and not 0 < self.n_post_layers < self.n_layers:
            raise ValueError(
                f"mix_frac={self.mix_frac} of n_layers={self.n_layers} leaves no mix: {self.n_post_layers} blocks are "
                f"post; use norm='pre', norm='post', or another mix_frac"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.n_experts == 0:
            for name in ("top_k", "d_expert", "n_shared_experts", "n_dense_layers"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} needs experts, but n_experts=0; "
                        f"set n_experts, or leave {name} out"
                    )
        elif self.top_k is None:
            raise ValueError(f"n_experts={self.n_experts} needs top_k, from 1 to {self.n_experts}")
        elif self.top_k > self.n_experts:
            raise ValueError(
                f"top_k={self.top_k} is more than n_experts={self.n_experts}; choose top_k <= {self.n_experts}"
            )
        elif self.n_dense_layers >= self.n_layers:
            raise ValueError(
                f"n_dense_layers={self.n_dense_layers} leaves no layer of n_layers={self.n_layers} to the experts; "
                f"choose a smaller one, or n_experts=0"
            )
        return self

    @model_validator(mode="after")
    def _check_conditions(self) -> Self:
        """A field away from its default must have the field that gives it a meaning, so that no knob turns nothing."""
        for name, (owner, value) in CONDITIONS.items():
            if getattr(self, name) != type(self).model_fields[name].default and getattr(self, owner) != value:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning with {owner}={getattr(self, owner)!r}; "
                    f"set {owner}={value!r}, or leave {name} out"
                )
        if self.mask_documents and (self.eod is None or self.eod >= self.vocab_size):
            raise ValueError(
                f"mask_documents needs the id that ends a document, below vocab_size={self.vocab_size}, and has "
                f"eod={self.eod}; set eod to the tokenizer's end-of-sequence id"
            )
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.residual_gate == "admin" and self.norm != "post":
            raise ValueError(
                f"residual_gate='admin' weighs the stream against a branch before their norm (2004.08249), and norm="
                f"{self.norm!r} has none there or weights of its own; use norm='post'"
            )
        if self.depth_scale == "lns" and self.init == "scaled":
            if "lns_with_scaled_init" not in self.allow:
                raise ValueError(
                    "depth_scale='lns' with init='scaled' damps the residual stream twice and undoes the gain of LNS "
                    "(2502.05795, Table 6); use init='normal', or ask for it: allow=['lns_with_scaled_init']"
                )
            warnings.warn("depth_scale='lns' with init='scaled' defeats LNS (2502.05795, Table 6)", stacklevel=2)
        return self

    @property
    def n_post_layers(self) -> int:
        """Blocks, from the first, whose norms stand after the residual sum."""
        return {"post": self.n_layers, "deepnorm": self.n_layers, "mix": round(self.mix_frac * self.n_layers)}.get(
            self.norm, 0
        )
