"""Depth scaling added in place to an existing Hugging Face model, to train it on: s_l = 1/sqrt(l), l = 1..L.

    from sparsedepth.exchange import retrofit
    retrofit.apply(model, "lns")                   # LayerNorm Scaling (2502.05795): the norms' outputs times s_l
    retrofit.apply(model, "lns", mode="hook")

    lns              the output of every norm of the block     after_attention  the output of attention
    after_branch     the output of both branches               after_ffn        the output of the feed-forward part
    before_norm      the input of every norm of the block (hook only: it cannot be folded into a weight)

Scaling the stream itself (`after_residual`) is impossible from outside a block, and refused. Blocks with norms on
branch outputs (Gemma-2, OLMo-2) are scaled after that norm, which would otherwise undo it.

Two modes compute the same function and train differently. `fold` multiplies weights: the model keeps its class, saves
and loads anywhere, and its config.json records `depth_scale`. But then g' = s g is trained: a step of AdamW, whose size
does not depend on the gradient's, changes it 1/s = sqrt(l) times as much as it would change s g, and one of SGD 1/s^2 =
l times. `hook` multiplies at run time by a buffer, and trains like a model built with the scale; it is not saved:
`apply` it again after loading. So train with `hook`; afterwards `remove` it and `fold`.

Any of these changes what a trained model computes, so trained models are refused without `allow_trained`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

DepthScale = Literal["lns", "before_norm", "after_branch", "after_attention", "after_ffn"]
Mode = Literal["fold", "hook"]

FAMILIES = frozenset({
    "gemma", "gemma2", "llama", "mistral", "mixtral", "olmo2", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
})  # fmt: skip
"""Values of `model_type` with Llama's layout: self_attn, mlp, and norms called ..._layernorm with a gain."""

_OUT_NORMS = {"gemma2", "olmo2"}
"""Families with norms on branch outputs: post_attention_layernorm and post_feedforward_layernorm."""

_GAIN_IS_ONE_PLUS = {"gemma", "gemma2"}
"""Families whose norms multiply by 1 + w."""

_BUFFER = "depth_scale"
_HANDLES = "_depth_scale_handles"


@dataclass(frozen=True, kw_only=True)
class Retrofit:
    depth_scale: DepthScale
    mode: Mode
    scales: dict[str, float]
    """s_l by name of the scaled module or parameter"""


def apply(
    model: PreTrainedModel, depth_scale: DepthScale = "lns", *, mode: Mode = "fold", allow_trained: bool = False
) -> Retrofit:
    """Scale the model in place. Raises ValueError for an unsupported family or scale, a model that already has a
    scale, and a trained one (some norm's gain is not 1) without `allow_trained`."""
    _check(model, depth_scale, mode)
    if not allow_trained and _is_trained(model):
        raise ValueError(
            f"this {model.config.model_type} model is trained: depth_scale={depth_scale!r} changes what it computes, "
            f"and it must be trained on to recover; if that is meant, pass allow_trained=True"
        )
    if mode == "fold":
        scales = _fold(model, depth_scale, lambda layer: 1 / math.sqrt(layer))
        model.config.depth_scale = depth_scale
        return Retrofit(depth_scale=depth_scale, mode=mode, scales=scales)
    names = {id(module): name for name, module in model.named_modules()}
    handles, scales = [], {}
    for layer, module in _scaled_modules(model, depth_scale):
        scale = scales[names[id(module)]] = 1 / math.sqrt(layer)
        parameter = next(module.parameters())
        module.register_buffer(_BUFFER, torch.tensor(scale, device=parameter.device), persistent=False)
        is_before = depth_scale == "before_norm"
        handles.append(
            module.register_forward_pre_hook(_scale_input) if is_before else module.register_forward_hook(_scale_output)
        )
    vars(model)[_HANDLES] = handles
    return Retrofit(depth_scale=depth_scale, mode=mode, scales=scales)


def remove(model: PreTrainedModel) -> None:
    """Undo `apply`, to rounding if weights were folded. Raises ValueError for a model without a scale."""
    folded = getattr(model.config, _BUFFER, None)
    if folded is not None:
        _fold(model, folded, math.sqrt)
        delattr(model.config, _BUFFER)
        return
    if not _is_hooked(model):
        raise ValueError("this model has no depth scale to remove: neither its config nor its layers have one")
    for handle in vars(model).pop(_HANDLES):
        handle.remove()
    for module in model.modules():
        if _BUFFER in module._buffers:
            delattr(module, _BUFFER)


def _check(model: PreTrainedModel, depth_scale: str, mode: str) -> None:
    family = model.config.model_type
    if family not in FAMILIES:
        raise ValueError(
            f"model_type={family!r} does not have Llama's layout; supported: {', '.join(sorted(FAMILIES))}"
        )
    if depth_scale not in get_args(DepthScale):
        raise ValueError(f"depth_scale={depth_scale!r} is not one of {', '.join(get_args(DepthScale))}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}")
    if mode == "fold" and depth_scale == "before_norm":
        raise ValueError("depth_scale='before_norm' is undone by the norm except for its epsilon; use mode='hook'")
    present = getattr(model.config, _BUFFER, None) or ("hooks" if _is_hooked(model) else None)
    if present:
        raise ValueError(f"this model has a depth scale already ({present}); remove it with retrofit.remove(model)")


def _is_hooked(model: PreTrainedModel) -> bool:
    return any(_BUFFER in module._buffers for module in model.modules())


def _is_trained(model: PreTrainedModel) -> bool:
    """Whether the gain of some norm is not 1."""
    start = 0.0 if model.config.model_type in _GAIN_IS_ONE_PLUS else 1.0
    return any((norm.weight != start).any().item() for _, layer in _layers(model) for norm in _norms(layer))


def _layers(model: PreTrainedModel) -> Iterator[tuple[int, Any]]:
    base: Any = model.base_model
    return enumerate(base.layers, start=1)


def _norms(layer: nn.Module) -> list[Any]:
    return [child for name, child in layer.named_children() if name.endswith("layernorm")]


def _scaled_modules(model: PreTrainedModel, depth_scale: str) -> Iterator[tuple[int, nn.Module]]:
    """The modules whose output (for before_norm: input) is scaled, with their layer."""
    has_out_norms = model.config.model_type in _OUT_NORMS
    for index, layer in _layers(model):
        if depth_scale in ("lns", "before_norm"):
            yield from ((index, norm) for norm in _norms(layer))
        if depth_scale in ("after_branch", "after_attention"):
            yield index, layer.post_attention_layernorm if has_out_norms else layer.self_attn.o_proj
        if depth_scale in ("after_branch", "after_ffn"):
            yield index, layer.post_feedforward_layernorm if has_out_norms else layer.mlp


@torch.no_grad()
def _fold(model: PreTrainedModel, depth_scale: str, factor: Callable[[int], float]) -> dict[str, float]:
    """Multiply the weights of each scaled module by factor(layer); returns s_l by parameter name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    offset = 1.0 if model.config.model_type in _GAIN_IS_ONE_PLUS else 0.0
    scales = {}
    for layer, module in _scaled_modules(model, depth_scale):
        is_norm = type(module).__name__.endswith("Norm")
        for weight in module.parameters() if is_norm else _outputs(module):
            shift = offset if is_norm else 0.0
            weight.copy_((weight.double() + shift) * factor(layer) - shift)
            scales[names[id(weight)]] = 1 / math.sqrt(layer)
    return scales


def _outputs(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights in which the output of a projection, or of a feed-forward part with experts, is linear."""
    if isinstance(module, nn.Linear):
        yield from module.parameters()
        return
    for name, parameter in module.named_parameters():
        if "down_proj" in name.split("."):
            yield parameter


def _scale_output(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (_scaled(module, output[0]), *output[1:])
    return _scaled(module, output)


def _scale_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (_scaled(module, args[0]), *args[1:])


def _scaled(module: nn.Module, x: Tensor) -> Tensor:
    return x * module.get_buffer(_BUFFER).to(x.dtype)
