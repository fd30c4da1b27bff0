"""Models of the papers by name: `preset: NAME` in a run file, or in a sweep's base, variants or cells.

Other fields given with it override it; a preset in a variant or a cell does not override the base. A preset has the
shapes, optimiser and schedule that a paper or its released configs state; budgets are rounded to whole steps.

Sources: 2502.05795 (LLaMA: released sizes and training scripts; OLMo and Qwen2.5, for which it states only name and
tokens: shapes of their own releases) and 2603.15389 (OLMo fork, released configs). Where paper and release disagree,
the preset follows the paper, and `note` has the value of the release."""

from dataclasses import dataclass
from typing import Any

from sparsedepth.config.section import Fields
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import commas, did_you_mean


@dataclass(frozen=True)
class Preset:
    source: str
    fields: Fields
    note: str = ""


LLAMA = "2502.05795"
OLMO = "2603.15389"

Shape = tuple[int, int, int, int]
"""n_layers, d_model, n_heads, d_ff"""


def _sizes(shape: Shape, vocab_size: int, seq_len: int, batch_tokens: int) -> Fields:
    names = ("n_layers", "d_model", "n_heads", "d_ff", "vocab_size", "seq_len", "batch_tokens")
    return dict(zip(names, (*shape, vocab_size, seq_len, batch_tokens), strict=True))


def _llama(shape: Shape, *, lr: float, steps: int, warmup: int) -> Fields:
    """512 sequences of 256 tokens per step, Adam without decay or clipping, cosine to a tenth."""
    schedule = {"train_tokens": steps * 512 * 256, "warmup_frac": warmup / steps} if steps else {}
    return {
        **_sizes(shape, 32_000, 256, 512 * 256),
        **schedule,
        "lr": lr,
        "min_lr_frac": 0.1,
        "weight_decay": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "grad_clip": 0.0,
    }


def _olmo(n_layers: int, d_model: int, n_heads: int, *, seq_len: int, **fields: Any) -> Fields:
    """5 B tokens in whole steps of 256 sequences, 1000 of them warm-up; the embedding does not decay."""
    batch_tokens = 256 * seq_len
    steps = 5_000_000_000 // batch_tokens
    return {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "vocab_size": 50_304,
        "seq_len": seq_len,
        "batch_tokens": batch_tokens,
        "train_tokens": steps * batch_tokens,
        "warmup_frac": 1000 / steps,
        "lr": 1e-3,
        "min_lr_frac": 0.1,
        "weight_decay": 0.1,
        "weight_decay_on": "no_embed_norm",
        "beta1": 0.9,
        "beta2": 0.95,
        "grad_clip": 1.0,
        **fields,
    }


def _stated_budget(shape: Shape, tokens: int, **fields: Any) -> Fields:
    """A stated budget in whole steps of 4 Mi tokens, as in OLMo's released configs; no learning rate."""
    step = 2048 * 2048
    return {**_sizes(shape, 50_304, 2048, step), "train_tokens": tokens // step * step, **fields}


def _moe(d_model: int, n_heads: int, n_experts: int, top_k: int, d_expert: int, **fields: Any) -> Fields:
    """Softmax gates that are not renormalised, balance loss 0.01, z loss 0.001."""
    return _olmo(
        16,
        d_model,
        n_heads,
        seq_len=4096,
        n_experts=n_experts,
        top_k=top_k,
        d_expert=d_expert,
        renormalise_gates=False,
        balance_loss=0.01,
        router_z_loss=0.001,
        **fields,
    )


_LLAMA_NOTE = "train_tokens counts padding, as the released scripts' steps do: the paper states {} B tokens of text."
_RELEASED_LR = " The released script has lr 5e-4, the paper 1e-3."
_STUDY = "Tokens per step are read off the paper's curves, at a budget of 5 B tokens; its yaml has lr 4e-4."
_DEPTH = "Only the 16-layer config is released; the depths differ in n_layers alone, as the paper says."
_DEPTH_32 = " The recipe's 1.2 B model has 32 layers too, but no released dense config."

_NO_LR = "The paper states {} B tokens and no learning rate: set lr. Shape and tokens a step are of {} release."
_TABLE_3 = " Table 3's baseline has init=scaled."
_OLMO_NOTE, _TIED = _NO_LR.format("20", "OLMo's"), {"tie_embeddings": True}

PRESETS = {
    **{
        f"llama-{size}": Preset(LLAMA, _llama(shape, lr=lr, steps=steps, warmup=warmup), note)
        for size, shape, lr, steps, warmup, note in (
            ("60m", (8, 512, 8, 1376), 1e-3, 0, 0, "No training budget is stated at this size: set train_tokens."),
            ("130m", (12, 768, 12, 2048), 1e-3, 20_000, 2000, _LLAMA_NOTE.format("2.2")),
            ("250m", (24, 768, 16, 2560), 1e-3, 40_000, 4000, _LLAMA_NOTE.format("3.9")),
            ("350m", (24, 1024, 16, 2736), 1e-3, 60_000, 6000, _LLAMA_NOTE.format("6.0") + _RELEASED_LR),
            ("1b", (24, 2048, 32, 5461), 5e-4, 100_000, 1000, _LLAMA_NOTE.format("8.9")),
        )
    },
    **{
        f"olmo-{size}": Preset(f"{LLAMA} ({place})", _stated_budget(shape, 20_000_000_000, **fields), note)
        for size, shape, place, fields, note in (
            ("60m", (8, 512, 8, 2048), "figure 1", {}, _OLMO_NOTE),
            ("150m", (12, 768, 12, 3072), "figure 1", {}, _OLMO_NOTE),
            ("300m", (16, 1024, 16, 4096), "figure 1", {}, _OLMO_NOTE),
            ("1b", (16, 2048, 16, 8192), "figure 1, table 3", _TIED, _OLMO_NOTE + _TABLE_3),
            ("7b", (32, 4096, 32, 11_008), "figure 1", {}, _OLMO_NOTE),
        )
    },
    "qwen2.5-0.5b": Preset(
        LLAMA + " (table 4)",
        _stated_budget(
            (24, 896, 14, 4864), 6_000_000_000, n_kv_heads=2, vocab_size=151_936, tie_embeddings=True, rope_theta=1e6
        ),
        _NO_LR.format("6", "Qwen's") + " Without its biases on queries, keys and values, 27,648 numbers.",
    ),
    "dense-400m": Preset(
        OLMO,
        _olmo(16, 1536, 12, seq_len=4096, d_ff=2304, norm_eps=1e-5),
        "475 M parameters with both tables, 321 M without. " + _STUDY,
    ),
    **{
        f"dense-1b-{depth}": Preset(OLMO, _olmo(depth, 2048, 16, seq_len=1024, d_ff=8192), note)
        for depth, note in ((12, _DEPTH), (16, _DEPTH), (24, _DEPTH), (32, _DEPTH + _DEPTH_32))
    },
    "moe-2b-400m": Preset(OLMO, _moe(768, 12, 32, 4, 1536, n_shared_experts=1), _STUDY),
    "moe-7b-1b": Preset(
        OLMO,
        _moe(2048, 16, 64, 8, 1024),
        "d_expert 1024 gives the paper's 7 B / 1 B; the released config has 2048. " + _STUDY,
    ),
    "moe-7b-1b-released": Preset(
        OLMO + " (released config)",
        _moe(2048, 16, 64, 8, 2048),
        "As released, olmoe-1B-7B has 13.4 B parameters, 2.08 B active: not the 7 B / 1 B of its name. " + _STUDY,
    ),
}


REMEDIES = {
    "gated-attention": Preset(
        "2505.06708", {"gated_attention": "channel"}, "G1, by head and channel: its best variant."
    ),
    "hyper-connections": Preset("2409.19606", {"n_streams": 4}, "Rate 4, dynamic: its main setting."),
    "mhc": Preset("2512.24880", {"n_streams": 4, "stream_mixing": "manifold"}, "Rate 4, 20 Sinkhorn steps."),
    "loops-2": Preset("2502.17416", {"loops": 2}, "n_layers counts every pass: the same FLOPs, half the weights."),
    "nanochat-scalars": Preset(
        "nanochat, gpt.py",
        {
            "residual_scalars": True,
            "scalars_start": "falling",
            "lr_of": {"residual_scalars": 0.1, "first_scalars": 10.0},
        },
        "Its initial values, and its ratio of 100 between the two lr; its beta1 of .8 and .96 are not followed.",
    ),
    "nanochat-windows": Preset(
        "nanochat, gpt.py", {"window_pattern": "SSSL"}, "Set sliding_window to a quarter of seq_len, as it does."
    ),
}
"""Remedies with their authors' settings, for variants and cells."""


def find(name: str) -> Preset:
    """The preset of this name. Raises ValueError that names those with this text in their name, or the nearest one."""
    known = PRESETS | REMEDIES
    if name not in known:
        near = [preset for preset in known if name in preset]
        nearest = did_you_mean(name, known, f"known presets: {commas(known)}")
        fix = f"choose one of: {commas(near)}" if len(near) > 1 else nearest
        raise ValueError(f"preset={name!r} is not known; {fix}")
    return known[name]


def expand(values: Fields) -> Named:
    """`values`, with the missing fields of their preset. Raises ValueError for an unknown preset."""
    fields = dict(values)
    name = fields.pop("preset", None)
    return fields if name is None else {**find(str(name)).fields, **fields}
