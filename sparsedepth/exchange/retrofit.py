"""Depth scaling on a Hugging Face model that exists already, in place, for training it on: s_l = 1/sqrt(l), l = 1..L.

    from sparsedepth.exchange import retrofit
    retrofit.apply(model, "lns")                   # LayerNorm Scaling (2502.05795): the norms' outputs times s_l
    retrofit.apply(model, "lns", mode="hook")

    lns              the output of every norm of the block     after_attention  what attention adds
    after_branch     what either branch adds                   after_ffn        what the feed-forward part adds
    before_norm      the input of every norm of the block (hook alone: no weight can hold it)

Scaling the stream itself (`after_residual`) cannot be done from outside a block, and is refused. A block that norms its
branches' outputs (Gemma-2, OLMo-2) is scaled there, since a norm would undo what stands before it.

Two modes compute the same function and train differently. `fold` multiplies weights: the model keeps its class, saves
and loads anywhere, and its config.json says `depth_scale`. But the gain g' = s g is now what is trained: a step of
AdamW, whose size does not depend on the gradient's, moves it by 1/s = sqrt(l) times as much as it would move s g, and
one of SGD by 1/s^2 = l times. `hook` multiplies at run time by a buffer, and trains as a model built with the scale
does; it is not saved: `apply` it again after loading. So train with `hook`; when done, `remove` it and `fold`.

A trained model computes something else with any of these. It is refused unless `allow_trained` says that this is meant.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsedepth.probe.hf_adapter import FAMILIES as MEASURED

DepthScale = Literal["lns", "before_norm", "after_branch", "after_attention", "after_ffn"]
Mode = Literal["fold", "hook"]

FAMILIES = MEASURED - {"gpt2", "gpt_neox", "olmo"}
"""Values of `model_type` whose blocks are laid out as Llama's: self_attn, mlp, and norms called ..._layernorm with a
gain."""

_OUT_NORMS = {"gemma2", "olmo2"}
"""Their blocks norm what a branch adds: post_attention_layernorm and post_feedforward_layernorm."""

_GAIN_IS_ONE_PLUS = {"gemma", "gemma2"}
"""Their norms multiply by 1 + w."""

_BUFFER = "depth_scale"
_HANDLES = "_depth_scale_handles"


@dataclass(frozen=True, kw_only=True)
class Retrofit:
    """What was done."""

    depth_scale: DepthScale
    mode: Mode
    scales: dict[str, float]
    """s_l by the name of the module, or of the parameter, that was scaled"""


def apply(
    model: PreTrainedModel, depth_scale: DepthScale = "lns", *, mode: Mode = "fold", allow_trained: bool = False
) -> Retrofit:
    """Scale the model in place. Raises ValueError for a family or a scale that cannot be, for a model that has a scale
    already, and for a trained one (its norms are not as they start) without `allow_trained`."""
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
    for layer, module in _places(model, depth_scale):
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
    """Undo `apply`, to rounding where weights were folded. Raises ValueError for a model without a scale."""
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
        raise ValueError(f"model_type={family!r} is not laid out as Llama; known: {', '.join(sorted(FAMILIES))}")
    if depth_scale not in get_args(DepthScale):
        raise ValueError(f"depth_scale={depth_scale!r} is not one of {', '.join(get_args(DepthScale))}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}")
    if mode == "fold" and depth_scale == "before_norm":
        raise ValueError("depth_scale='before_norm' is undone by the norm but for its epsilon; use mode='hook'")
    present = getattr(model.config, _BUFFER, None) or ("hooks" if _is_hooked(model) else None)
    if present:
        raise ValueError(f"this model has a depth scale already ({present}); retrofit.remove(model) takes it off")


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


def _places(model: PreTrainedModel, depth_scale: str) -> Iterator[tuple[int, nn.Module]]:
    """The modules whose output (input for before_norm) is scaled, with their layer."""
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
    """Multiply the weights behind each place by factor(layer); s_l by the name of the parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    offset = 1.0 if model.config.model_type in _GAIN_IS_ONE_PLUS else 0.0
    scales = {}
    for layer, place in _places(model, depth_scale):
        is_norm = type(place).__name__.endswith("Norm")
        for weight in place.parameters() if is_norm else _outputs(place):
            shift = offset if is_norm else 0.0
            weight.copy_((weight.double() + shift) * factor(layer) - shift)
            scales[names[id(weight)]] = 1 / math.sqrt(layer)
    return scales


def _outputs(place: nn.Module) -> Iterator[nn.Parameter]:
    """What the output of a projection, or of a feed-forward part with all its experts, is linear in."""
    if isinstance(place, nn.Linear):
        yield from place.parameters()
        return
    for name, parameter in place.named_parameters():
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
