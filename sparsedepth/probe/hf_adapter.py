"""Hugging Face decoders as `ProbedModel`s: one adapter for every family, built on the model's own modules.

No family's forward pass is re-implemented. The model runs once with layers that return their input, which records x_0
and the other inputs of each layer (mask, rotary tables, positions); a layer is then the model's own module, called with
these inputs. Queries and keys are captured at its attention function, after norms, clipping and rotation.

Weights keep the dtype they were loaded in. Layers below fp32 are still computed in fp32: their weights are cast while
the layer runs, which costs the memory of one layer.

Shapes: B sequences, T tokens, D width of the residual stream, H query heads, G key/value heads, K head width, F hidden
units, E experts, V vocabulary.
"""

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, PreTrainedModel

from sparsedepth.probe.hf_names import MATRIX_KINDS
from sparsedepth.probe.probed_model import AttentionForm

FAMILIES = frozenset({
    "gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe",
})  # fmt: skip
"""Supported values of `model_type`; a test compares each with the model's own logits and attention weights."""

_LAYERS = ("layers", "h")
_FINAL_NORMS = ("norm", "final_layer_norm", "ln_f")
_FFN = "mlp"

_MATRICES = MATRIX_KINDS | {
    "attention.dense.weight": "output",
    "mlp.dense_h_to_4h.weight": "up",
    "mlp.dense_4h_to_h.weight": "down",
}
"""Parameter name inside its layer -> kind, for matrices stored as [outputs, inputs]."""

_TRANSPOSED = {"attn.c_proj.weight": "output", "mlp.c_fc.weight": "up", "mlp.c_proj.weight": "down"}
"""The same for GPT-2's, stored as [inputs, outputs]."""

_ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
"""Routers choose experts and transform nothing."""

_CAPTURE = "sparsedepth_capture"

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""A layer's inputs besides the residual stream."""


class _AttentionCaptured(Exception):
    """Carries q_BHTK, k_BGTK, mask, scaling and softcap out of the model; what would follow is not needed."""


def _capture(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of the `transformers` interface that captures its inputs."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    raise _AttentionCaptured(query, key, attention_mask, scaling, softcap)


AttentionInterface.register(_CAPTURE, _capture)


class ProbedHfModel:
    """A causal language model of `transformers`, of a family in FAMILIES, as a `ProbedModel`."""

    def __init__(self, model: PreTrainedModel):
        """Raises ValueError for an unsupported family, or settings that give wrong numbers."""
        _check_model(model)
        self.model = model
        self._base = model.base_model
        self._layers = list(_first(self._base, _LAYERS).children())
        self._norm = _first(self._base, _FINAL_NORMS)
        self._head = model.get_output_embeddings()
        self.n_layers, self.causal = len(self._layers), True
        self.vocab_size, self.stream_width = self._head.weight.shape
        for part in (model.get_input_embeddings(), self._norm, self._head):
            for parameter in part.parameters():
                if parameter.dtype != torch.float32:
                    raise ValueError(
                        f"{type(part).__name__} outside the layers is {parameter.dtype}, and must be fp32; "
                        f"load the model with sparsedepth.probe.load, or call .float() on it"
                    )
        self.max_len: int = model.config.max_position_embeddings
        self._calls: tuple[tuple[int, torch.device], list[Call]] | None = None

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    def block_module(self, layer: int) -> nn.Module:
        """The model's own module of a layer."""
        return self._layers[layer - 1]

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """x_0 including the family's scaling and learned positions. Raises ValueError beyond `max_len`."""
        return self._record_calls(tokens_BT)[0]

    def block(self, layer: int, x_BTD: Tensor) -> Tensor:
        module = self.block_module(layer)
        args, named = self._calls_at(x_BTD.shape[1])[layer - 1]
        low = {name: weight.float() for name, weight in module.named_parameters() if weight.dtype != torch.float32}
        out = functional_call(module, low, (x_BTD, *args), named) if low else module(x_BTD, *args, **named)
        return out[0] if isinstance(out, tuple) else out

    def branches(self, layer: int, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """The updates a_BTD of attention and f_BTD of the feed-forward part: block(x) = x + a + f, to rounding. With
        the feed-forward part replaced by 0 a layer is x + a, with norms before or after its parts."""
        ffn = self.block_module(layer).get_submodule(_FFN)
        with _replaced_forward([ffn], lambda x, *_, **__: torch.zeros_like(x)):
            after_attention_BTD = self.block(layer, x_BTD)
        return after_attention_BTD - x_BTD, self.block(layer, x_BTD) - after_attention_BTD

    def logits(self, x_BTD: Tensor) -> Tensor:
        logits_BTV = self._head(self.final_norm(x_BTD))
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)

    def final_norm(self, x_BTD: Tensor) -> Tensor:
        return self._norm(x_BTD)

    def hidden_units(self, layer: int, x_BTD: Tensor) -> Tensor | None:
        """The input of the block's matrix 'down'."""
        kinds = _MATRICES | _TRANSPOSED
        names = [name for name, _ in self.block_module(layer).named_parameters() if kinds.get(name) == "down"]
        if not names:
            return None
        h, _ = self._capture(layer, x_BTD, self.block_module(layer).get_submodule(names[0].removesuffix(".weight")))
        return h.unflatten(0, x_BTD.shape[:2]) if h.ndim == 2 else h

    def routing(self, layer: int, x_BTD: Tensor) -> tuple[Tensor, Tensor] | None:
        """Probabilities and choices of the layer's router, captured while the block runs."""
        router = getattr(getattr(self.block_module(layer), "mlp", None), "gate", None)
        if router is None or not hasattr(router, "top_k"):
            return None
        _, (logits_NE, _, choice_NC) = self._capture(layer, x_BTD, router)
        shape = x_BTD.shape[:2]
        return logits_NE.float().softmax(-1).unflatten(0, shape), choice_NC.unflatten(0, shape)

    def _capture(self, layer: int, x_BTD: Tensor, module: nn.Module) -> tuple[Any, Any]:
        """Input and output of a module inside the block, captured while the block runs."""
        calls: list[tuple[Any, Any]] = []
        hook = module.register_forward_hook(lambda module, args, output: calls.append((args[0], output)))
        try:
            self.block(layer, x_BTD)
        finally:
            hook.remove()
        return calls[0]

    def residual_map(self, layer: int, x_BTD: Tensor) -> None:
        """No supported family has several streams."""
        return None

    def attention_inputs(self, layer: int, x_BTD: Tensor) -> tuple[Tensor, Tensor, AttentionForm]:
        """q_BHTK, k_BGTK, and window and cap; q includes the family's own scale."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(_CAPTURE)
        try:
            self.block(layer, x_BTD)
        except _AttentionCaptured as captured:
            q_BHTK, k_BGTK, mask, scaling, softcap = captured.args
        finally:
            self.model.set_attn_implementation(before)
        scale = scaling * math.sqrt(q_BHTK.shape[-1])
        q_BHTK = q_BHTK if math.isclose(scale, 1) else q_BHTK * scale
        return q_BHTK, k_BGTK, AttentionForm(window=_window(mask), softcap=softcap)

    def matrices(self, layer: int) -> Mapping[str, Tensor]:
        """Named as in `ProbedDecoder.matrices`; a dense expert next to routed ones is 'shared'."""
        weights: dict[str, Tensor] = {}
        for name, weight in self.block_module(layer).named_parameters():
            if weight.ndim > 1 and weight.numel() and name not in _ROUTERS:  # an expert may be 0 wide: none
                weights |= self._named(name, weight)
        return weights

    def _named(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """The matrices in one parameter of a layer."""
        if name in _MATRICES:
            return {_MATRICES[name]: weight}
        if name in _TRANSPOSED:
            return {_TRANSPOSED[name]: weight.T}
        if name == "attn.c_attn.weight":  # GPT-2: query, key and value side by side
            return dict(zip(("query", "key", "value"), weight.T.chunk(3), strict=True))
        if name == "attention.query_key_value.weight":  # GPT-NeoX: head by head
            parts = weight.unflatten(0, (self.model.config.num_attention_heads, 3, -1)).unbind(1)
            return {kind: part.flatten(0, 1) for kind, part in zip(("query", "key", "value"), parts, strict=True)}
        if name == "mlp.experts.gate_up_proj":
            n_gate = weight.shape[1] // 2
            gates = {f"expert{index}.gate": gate_up[:n_gate] for index, gate_up in enumerate(weight)}
            return gates | {f"expert{index}.up": gate_up[n_gate:] for index, gate_up in enumerate(weight)}
        if name == "mlp.experts.down_proj":
            return {f"expert{index}.down": part for index, part in enumerate(weight)}
        raise ValueError(f"the matrix {name!r} of a {self.model.config.model_type} layer has no known kind")

    @contextmanager
    def exact(self) -> Generator[None, None, None]:
        """Context in which mixtures run expert by expert, which every device supports in fp32."""
        before = getattr(self.model.config, "_experts_implementation", None)
        if before in (None, "eager"):
            yield
            return
        self.model.set_experts_implementation("eager")
        try:
            yield
        finally:
            self.model.set_experts_implementation(before)

    @contextmanager
    def without_layers(self, layers: Iterable[int]) -> Generator[None, None, None]:
        """Context in which the model skips these layers: each returns its input."""
        generate: Any = self.model.generate
        # A skipped layer writes nothing to the cache, and layer 1's cache counts positions.
        vars(self.model)["generate"] = lambda *args, **named: generate(*args, **{**named, "use_cache": False})
        try:
            with _replaced_forward(map(self.block_module, layers), lambda *args, **named: _input(args, named)):
                yield
        finally:
            del vars(self.model)["generate"]

    def _calls_at(self, n_tokens: int) -> list[Call]:
        """Each layer's other inputs at this length, for one sequence; they broadcast over a batch."""
        key = (n_tokens, self.device)
        if self._calls is None or self._calls[0] != key:
            # They depend only on the number of tokens.
            tokens_1T = torch.zeros(1, n_tokens, dtype=torch.long, device=self.device)
            self._calls = (key, self._record_calls(tokens_1T)[1])
        return self._calls[1]

    def _record_calls(self, tokens_BT: Tensor) -> tuple[Tensor, list[Call]]:
        """x_0 and the calls of all layers, from a forward pass in which each returns its input."""
        if tokens_BT.shape[1] > self.max_len:
            raise ValueError(
                f"sequences of {tokens_BT.shape[1]:,} tokens are longer than the {self.max_len:,} positions of this "
                f"{self.model.config.model_type} model; use a shorter length"
            )
        inputs: list[Tensor] = []
        calls: list[Call] = []

        def return_input(*args: Any, **named: Any) -> Tensor:
            # Every layer gets x_0, since none changes it.
            x_BTD = _input(args, named)
            inputs.append(x_BTD)
            named.pop("hidden_states", None)
            calls.append((args[1:], named))
            return x_BTD

        # Not in inference mode: the calls are kept, also for measures that take gradients.
        with torch.inference_mode(False), torch.no_grad(), _replaced_forward(self._layers, return_input):
            self._base(tokens_BT, use_cache=False)
        return inputs[0], calls


@contextmanager
def _replaced_forward(modules: Iterable[nn.Module], function: Callable[..., Tensor]) -> Generator[None, None, None]:
    """Context in which `function` replaces the modules' forward."""
    forwards = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module, _ in forwards:
            vars(module)["forward"] = function
        yield
    finally:
        for module, forward in forwards:
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


def _input(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """x_BTD among a layer's arguments."""
    return named["hidden_states"] if "hidden_states" in named else args[0]


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


def _first(module: nn.Module, names: Iterable[str]) -> nn.Module:
    part = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if part is None:
        raise ValueError(f"{type(module).__name__} has none of {', '.join(names)}: its layout is not known")
    return part


def _check_model(model: PreTrainedModel) -> None:
    config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type={config.model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    for name, sees_future in (("use_bidirectional_attention", True), ("is_causal", False)):
        value = getattr(config, name, None)
        if value is not None and bool(value) is sees_future:
            raise ValueError(f"{name}={value}: tokens see the future, and a decoder's do not")
    softcap = getattr(config, "attn_logit_softcapping", None)
    supported = ("eager",) if softcap else ("sdpa", "eager")
    if config._attn_implementation not in supported:
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} cannot be measured with softcap={softcap}; "
            f"load the model with attn_implementation='{supported[0]}'"
        )
