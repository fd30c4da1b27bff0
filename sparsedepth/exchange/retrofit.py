"""LayerNorm Scaling added in place to an existing Hugging Face model, to train it on: the norms' outputs times
1/sqrt(layer) (2502.05795).

    from sparsedepth.exchange import retrofit
    retrofit.apply(model, "lns")                   # or mode="hook"

Two modes compute the same function and train differently. `fold` multiplies weights: the model keeps its class, saves
and loads anywhere, and its config.json records `depth_scale`. But then g' = s g is trained: a step of AdamW, whose size
does not depend on the gradient's, changes it 1/s = sqrt(l) times as much as it would change s g, and one of SGD 1/s^2 =
l times. `hook` multiplies at run time, and trains like a model built with the scale; it is not saved:
`apply` it again after loading. So train with `hook`; afterwards `remove` it and `fold`.

Either changes what a trained model computes, so trained models are refused without `allow_trained`."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

FAMILIES = frozenset({
    "gemma", "gemma2", "llama", "mistral", "mixtral", "olmo2", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
})  # fmt: skip
"""Values of `model_type` with Llama's layout, and norms called ..._layernorm with a gain."""

_GAIN_IS_ONE_PLUS = {"gemma", "gemma2"}
"""Families whose norms multiply by 1 + w."""

_HOOK = "_depth_scale_hook"
"""Attribute of a norm: the handle of its hook."""


def apply(
    model: PreTrainedModel,
    depth_scale: Literal["lns"] = "lns",
    *,
    mode: Literal["fold", "hook"] = "fold",
    allow_trained: bool = False,
) -> None:
    """Scale the model in place. Raises ValueError for an unsupported family, a model that already has a scale, and a
    trained one (some norm's gain is not 1) without `allow_trained`."""
    family = model.config.model_type
    if family not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise ValueError(f"model_type={family!r} does not have Llama's layout; supported: {supported}")
    if depth_scale != "lns" or mode not in ("fold", "hook"):
        raise ValueError(f"depth_scale={depth_scale!r}, mode={mode!r}: expected 'lns', and 'fold' or 'hook'")
    present = getattr(model.config, "depth_scale", None) or ("hooks" if _is_hooked(model) else None)
    if present:
        raise ValueError(f"this model has a depth scale already ({present}); remove it with retrofit.remove(model)")
    start = 0.0 if family in _GAIN_IS_ONE_PLUS else 1.0
    if not allow_trained and any((norm.weight != start).any().item() for _, norm in _norms(model)):
        raise ValueError(
            f"this {family} model is trained: depth_scale={depth_scale!r} changes what it computes, and it must be "
            f"trained on to recover; if that is meant, pass allow_trained=True"
        )
    if mode == "fold":
        _fold(model, lambda layer: 1 / math.sqrt(layer))
        model.config.depth_scale = depth_scale
        return
    for layer, norm in _norms(model):
        vars(norm)[_HOOK] = norm.register_forward_hook(partial(_scaled, 1 / math.sqrt(layer)))


def remove(model: PreTrainedModel) -> None:
    """Undo `apply`, to rounding if weights were folded. Raises ValueError for a model without a scale."""
    if getattr(model.config, "depth_scale", None) is not None:
        _fold(model, math.sqrt)
        del model.config.depth_scale
        return
    if not _is_hooked(model):
        raise ValueError("this model has no depth scale to remove: neither its config nor its layers have one")
    for _, norm in _norms(model):
        vars(norm).pop(_HOOK).remove()


def _is_hooked(model: PreTrainedModel) -> bool:
    return any(_HOOK in vars(norm) for _, norm in _norms(model))


def _norms(model: PreTrainedModel) -> Iterator[tuple[int, Any]]:
    base: Any = model.base_model
    for index, layer in enumerate(base.layers, start=1):
        for name, child in layer.named_children():
            if name.endswith("layernorm"):
                yield index, child


@torch.no_grad()
def _fold(model: PreTrainedModel, factor: Callable[[int], float]) -> None:
    """Multiply the gain of each norm by factor(layer)."""
    shift = 1.0 if model.config.model_type in _GAIN_IS_ONE_PLUS else 0.0
    for layer, norm in _norms(model):
        norm.weight.copy_((norm.weight.double() + shift) * factor(layer) - shift)


def _scaled(factor: float, norm: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * output.new_full((), factor)
