"""Hugging Face decoders as `ProbedModel`s: one adapter for every type (`probe.hf_types`), on the model's own modules.

No type's forward pass is re-implemented (`probe.any_module`). Queries and keys are captured at the model's attention
function, after norms, clipping and rotation. Logits are those of the model's own forward pass around its blocks, with
its scale or cap."""

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from sparsedepth.model.context import Context
from sparsedepth.model.linear import TensorPair
from sparsedepth.probe.any_module import ProbedModule, apart, replaced_forward
from sparsedepth.probe.hf_types import TYPES, check_type
from sparsedepth.probe.probed_model import AttentionInputs

_CAPTURE = "sparsedepth_capture"
UNLIMITED = 2**20
"""The longest sequence of a type without positions."""
_POSITIONS = ("max_position_embeddings", "seq_length")


class _BaseOutput(MoeModelOutputWithPast):
    """What a model's head reads of its base model, of any type."""

    cross_attentions = cache_params = None


class _AttentionCaptured(Exception):
    """Carries q_BHTK, k_BGTK, mask, scaling and softcap out of the model; what would follow is not needed."""


def _capture(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of the `transformers` interface that captures its inputs."""
    scaling = options.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    raise _AttentionCaptured(query, key, attention_mask, scaling, options.get("softcap"))


AttentionInterface.register(_CAPTURE, _capture)


class ProbedHfModel(ProbedModule):
    """A causal language model of `transformers`, of a type in TYPES, as a `ProbedModel`."""

    model: Any

    def __init__(self, model: PreTrainedModel):
        """Raises ValueError for an unsupported type, or settings that give wrong numbers."""
        _check_model(model)
        self._parts = TYPES[model.config.model_type]
        base, (above, _, _) = model.base_model, self._parts.layers.rpartition(".")
        self._base: Any = base.get_submodule(above)
        try:
            norm, head = base.get_submodule(self._parts.final_norm), model.get_output_embeddings()
        except AttributeError:
            raise ValueError(
                f"this {type(model).__name__} has no norm before its head: its norms stand after blocks, which is not "
                "supported"
            ) from None
        super().__init__(model, base.get_submodule(self._parts.layers).children(), norm=norm, head=head)
        self._rests = [(None,) * self._parts.n_further or None] * self.n_layers
        self.vocab_size, self.stream_width = head.weight.shape
        self.max_len = _max_len(model.config)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """x_0 including the model's scaling and learned positions. Raises ValueError beyond `max_len`."""
        return self._record_calls(tokens_BT)[0].float()

    def block(self, layer: int, x_BTD: Tensor) -> Tensor:
        for _, named in self._calls_at(x_BTD.shape[1]):
            if isinstance(alibi := named.get("alibi"), Tensor):  # [B H, 1, T]: of one sequence, or the last batch
                n_heads = self.model.config.num_attention_heads
                named["alibi"] = alibi[:n_heads].repeat(len(x_BTD), 1, 1) if len(alibi) >= n_heads else alibi
        return super().block(layer, x_BTD)

    def branches(self, layer: int, x_BTD: Tensor) -> TensorPair | None:
        """The updates a_BTD of attention and f_BTD of the feed-forward part: block(x) = x + a + f, to rounding. With
        the feed-forward part replaced by 0 a layer is x + a, with norms before or after its parts."""
        if self._parts.ffn is None:
            return None
        ffn = self.block_module(layer).get_submodule(self._parts.ffn)
        with replaced_forward([ffn], lambda x, *_, **__: torch.zeros_like(x)):
            after_attention_BTD = self.block(layer, x_BTD)
        return after_attention_BTD - x_BTD, self.block(layer, x_BTD) - after_attention_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        normed = _BaseOutput(last_hidden_state=self.final_norm(x_BTD))
        head: Any = self.head
        weight_VD, bias_V = head.weight.float(), None if head.bias is None else head.bias.float()
        in_fp32 = replaced_forward([head], lambda x_BTD: nn.functional.linear(x_BTD.float(), weight_VD, bias_V))
        with in_fp32, replaced_forward([self._base], lambda *_, **__: normed):
            return self.model(inputs_embeds=x_BTD, return_dict=True).logits

    def hidden_units(self, layer: int, x_BTD: Tensor) -> Tensor | None:
        """The input of the block's matrix 'down'."""
        for name, module in self.block_module(layer).named_modules():
            if self._parts.matrices.get(name) == "down":
                h, _ = self._capture(layer, x_BTD, module)
                return h.unflatten(0, x_BTD.shape[:2]) if h.ndim == 2 else h
        return None

    def routing(self, layer: int, x_BTD: Tensor) -> TensorPair | None:
        """Probabilities and choices of the layer's router, captured while the block runs. Scores of a sigmoid are
        divided by their sum (2412.19437, equation 18)."""
        ffn = getattr(self.block_module(layer), self._parts.ffn or "", None)
        router = getattr(ffn, "gate", None)
        if router is None or not hasattr(router, "top_k"):
            return None
        _, (logits_NE, _, choice_NC) = self._capture(layer, x_BTD, router)
        is_sigmoid, shape = self._parts.router_scores == "sigmoid", x_BTD.shape[:2]
        log_NE = nn.functional.logsigmoid(logits_NE.float()) if is_sigmoid else logits_NE.float()
        return log_NE.softmax(-1).unflatten(0, shape), choice_NC.unflatten(0, shape)

    def _capture(self, layer: int, x_BTD: Tensor, module: nn.Module) -> tuple[Any, Any]:
        """Input and output of a module inside the block, captured while the block runs."""
        calls = []
        hook = module.register_forward_hook(lambda module, args, output: calls.append((args[0], output)))
        try:
            self.block(layer, x_BTD)
        finally:
            hook.remove()
        return calls[0]

    def attention_inputs(self, layer: int, x_BTD: Tensor) -> AttentionInputs | None:
        """q_BHTK, k_BGTK, and window and cap; q includes the model's own scale. None of a block of another kind."""
        if not self._parts.shows_attention:
            return None
        return _attention_inputs(self, layer, x_BTD)

    def matrices(self, layer: int) -> Mapping[str, Tensor]:
        """Named as in `ProbedDecoder.matrices`; a dense expert next to routed ones is 'shared'."""
        parts, weights = self._parts, {}
        for name, weight in self.weights(layer):
            if weight.ndim < 2 or not weight.numel() or name in parts.others:  # an expert may be 0 wide: none
                continue
            if name not in parts.matrices:
                raise ValueError(f"the matrix {name!r} of a {self.model.config.model_type} layer has no known kind")
            kinds = parts.matrices[name].split()
            if weight.ndim == 3:
                for index, expert in enumerate(weight):
                    weights |= {f"expert{index}.{kind}": w for kind, w in self._apart(kinds, expert).items()}
            else:
                weights |= self._apart(kinds, weight.T if parts.is_transposed else weight)
        return weights

    def _apart(self, kinds: list[str], weight: Tensor) -> dict[str, Tensor]:
        """The matrices of these kinds in a weight [outputs, inputs]."""
        config, heads = self.model.config, self.model.config.num_attention_heads
        if len(kinds) < 3:
            parts = weight.chunk(len(kinds))
        elif self._parts.is_by_head:
            parts = [part.flatten(0, 1) for part in weight.unflatten(0, (heads, 3, -1)).unbind(1)]
        else:
            n_query = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
            parts = weight.split([n_query, *[(len(weight) - n_query) // 2] * 2])
        return dict(zip(kinds, parts, strict=True))

    @contextmanager
    def exact(self) -> Generator[None]:
        """Context in which mixtures run expert by expert, which every device supports in fp32."""
        before = getattr(self.model.config, "_experts_implementation", None)
        is_fused = before not in (None, "eager")
        if is_fused:
            self.model.set_experts_implementation("eager")
        try:
            yield
        finally:
            if is_fused:
                self.model.set_experts_implementation(before)

    @contextmanager
    def without_layers(self, layers: Iterable[int]) -> Generator[None]:
        """Context in which the model skips these layers: each returns its input."""
        generate: Any = self.model.generate
        # A skipped layer writes nothing to the cache, and layer 1's cache counts positions.
        vars(self.model)["generate"] = lambda *args, **named: generate(*args, **{**named, "use_cache": False})
        try:
            with replaced_forward(map(self.block_module, layers), lambda *args, **named: apart(args, named)[0]):
                yield
        finally:
            del vars(self.model)["generate"]

    def run(self, tokens_BT: Tensor) -> None:
        if (length := tokens_BT.shape[1]) > self.max_len:
            raise ValueError(
                f"sequences of {length:,} tokens are longer than the {self.max_len:,} positions of this "
                f"{self.model.config.model_type} model; use a shorter length"
            )
        for module in self._base.modules():  # dynamic rotations depend on this length alone, not on earlier ones
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)
        self._base(tokens_BT, use_cache=False)


class ProbedEncoder(ProbedModule):
    """An encoder of `transformers`, of a type in ENCODERS; its attention is read as that of decoders."""

    is_causal = False

    def attention_inputs(self, layer: int, x_BTD: Tensor) -> AttentionInputs | None:
        return _attention_inputs(self, layer, x_BTD, is_causal=False)


def _attention_inputs(
    probed: ProbedModule, layer: int, x_BTD: Tensor, *, is_causal: bool = True
) -> AttentionInputs | None:
    """Queries and keys as the block's attention function gets them, and what they see by its mask and cap; None if it
    calls none."""
    model: Any = probed.model
    probed._calls_at(x_BTD.shape[1])  # recorded with the model's own function: masks depend on which it is
    before = model.config._attn_implementation
    model.set_attn_implementation(_CAPTURE)
    try:
        probed.block(layer, x_BTD)
        return None
    except _AttentionCaptured as captured:
        q_BHTK, k_BGTK, mask, scaling, softcap = captured.args
    finally:
        model.set_attn_implementation(before)
    scale = scaling * math.sqrt(q_BHTK.shape[-1])
    q_BHTK = q_BHTK if math.isclose(scale, 1) else q_BHTK * scale
    window = _window(mask) if is_causal else None
    return q_BHTK, k_BGTK, Context(window=window, softcap=softcap, is_causal=is_causal)


def _window(mask: Tensor | None) -> int | None:
    """The window of a mask [1, 1, T, T] (true, or 0 added, at visible keys); None = all earlier keys."""
    if mask is None:
        return None
    visible_TT = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
    window = int(visible_TT[-1].sum())
    causal_TT = torch.ones_like(visible_TT).tril()
    if not torch.equal(visible_TT, causal_TT.triu(1 - window)):
        raise ValueError("the model's attention mask is neither causal nor a causal window; it cannot be measured")
    return None if window == len(visible_TT) else window


def _max_len(config: Any) -> int:
    """The longest sequence: of a rotation that is stretched beyond the trained length (dynamic, YaRN), with it."""
    trained = next((each for name in _POSITIONS if (each := getattr(config, name, None))), UNLIMITED)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "yarn"):
        return trained
    original = rope.get("original_max_position_embeddings") or trained
    return max(trained, int(original * (rope.get("factor") or 1)))


def _check_model(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that sees the future, or whose kernel hides attention's weights."""
    config = model.config
    check_type(config.model_type, f"this {type(model).__name__}")
    for name, sees_future in (("use_bidirectional_attention", True), ("is_causal", False)):
        value = getattr(config, name, None)
        if value is not None and bool(value) is sees_future:
            raise ValueError(f"{name}={value}: tokens see the future, and a decoder's do not")
    softcap = getattr(config, "attn_logit_softcapping", None)
    supported = ("eager",) if softcap else ("sdpa", "eager")
    if (kernel := config._attn_implementation) not in supported:
        raise ValueError(
            f"attn_implementation={kernel!r} cannot be measured with softcap={softcap}; "
            f"load the model with attn_implementation='{supported[0]}'"
        )
