"""Any module with a list of residual blocks as a `ProbedModel`, on its own modules.

No forward pass is re-implemented. The module runs once with blocks that return their input, which records x_0 and the
other inputs of each block (mask, rotary tables, positions); a block is then called with these. They are recorded for
one sequence, and broadcast over a batch. `check_stream` compares the blocks called so with the module's own pass.

    logits = head(norm(x_L))                 of a model of tokens; where its own pass has a cap, or a norm that is no
                                             module, the module runs anew, and its last block returns x_L
    losses = loss(module(inputs), targets)   where a loss is given, likewise

An encoder (BERT, ViT) has no next token. Its inputs are any tensor [N, ...]; a 'token' is then the number of its row,
repeated over the T positions of the stream, so that measures count and split positions as those of text.

Weights keep their dtype. Blocks below fp32 are still computed in fp32: their weights are cast while the block runs."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import AttentionInputs, ProbedModel
from sparsedepth.quantities.quantity import Named, Row

Call = tuple[tuple[Any, ...], Named]
"""A block's inputs besides the residual stream."""

Loss = Callable[[Any, Tensor], Tensor]
"""(what the module returns for B inputs, their B targets) -> B losses."""

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Largest difference to the module's own pass by dtype, relative to the largest entry or 1; 0.05 below fp32."""

_KINDS = {
    "query": ("q_proj", "query", "wq"),
    "key": ("k_proj", "key", "wk"),
    "value": ("v_proj", "value", "wv"),
    "output": ("o_proj", "out_proj", "wo", "attention.output.dense"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "fc1", "c_fc", "w3", "intermediate.dense"),
    "down": ("down_proj", "fc2", "w2", "output.dense"),
}
"""How the names of matrices end, by kind: the first that fits."""

_PASS_ON = "give the list of blocks that pass on one stream x_BTD, such as layers='model.layers'"


class NotAStream(ValueError):
    """Blocks that read more than one stream."""


class ProbedModule(ProbedModel):
    """`layers` are the blocks. `inputs` [N, ...] and `targets` [N, ...] are those of a model without next tokens;
    without them tokens are ids. Without `head` and `loss` all losses are NaN. Raises ValueError as `check_stream`."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        *,
        norm: nn.Module | None = None,
        head: nn.Module | None = None,
        inputs: Tensor | None = None,
        targets: Tensor | None = None,
        loss: Loss | None = None,
    ):
        self.model, self._layers = model, list(layers)
        self.n_layers = len(self._layers)
        self._norm, self.head, self._inputs, self._targets, self.loss = norm, head, inputs, targets, loss
        self._readout: tuple[int, int] | None = None  # T, V of the module's own logits, where those are used
        self._rests: list[tuple[Any, ...] | None] = [None] * self.n_layers  # what blocks return after the stream
        self._calls: tuple[tuple[int, torch.device], list[Call]] | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def block_module(self, layer: int) -> nn.Module:
        return self._layers[layer - 1]

    def embed(self, tokens_BT: Tensor) -> Tensor:
        self._calls = None  # weights may have changed, and with them what blocks read beside the stream
        return self._record_calls(tokens_BT)[0].float()

    def block(self, layer: int, x_BTD: Tensor) -> Tensor:
        args, named = self._calls_at(x_BTD.shape[1])[layer - 1]
        return first_of(in_fp32(self.block_module(layer), x_BTD, *args, **named))

    @property
    def has_logits(self) -> bool:
        return self.head is not None or self._readout is not None

    def logits(self, x_BTD: Tensor) -> Tensor:
        if self._readout:  # in sequences of a length that the module takes
            length, n_words = self._readout
            x_ND = x_BTD.flatten(0, 1)
            x_STD = nn.functional.pad(x_ND, (0, 0, 0, -len(x_ND) % length)).unflatten(0, (-1, length))
            ids_ST = torch.zeros(x_STD.shape[:2], dtype=torch.long, device=x_STD.device)
            returned = tensors_of(self._after_blocks(x_STD, ids_ST, self._low_around_blocks()))
            logits_STV = next(x for x in returned if x.shape == (*ids_ST.shape, n_words))
            return logits_STV.flatten(0, 1)[: len(x_ND)].unflatten(0, x_BTD.shape[:2])
        if self.head is None:
            raise ValueError("the head is not known, which logits need; name it by head=")
        return in_fp32(self.head, self.final_norm(x_BTD))

    def final_norm(self, x_BTD: Tensor) -> Tensor:
        return x_BTD if self._norm is None else in_fp32(self._norm, x_BTD)

    def own_losses(self, x_FBTD: Tensor, targets_BT: Tensor) -> Tensor | None:
        """loss_FB, where targets are rows of the inputs; None where losses are those of next tokens."""
        if self.has_logits:
            return None
        if self.loss is None:
            return x_FBTD.new_full(x_FBTD.shape[:2], torch.nan)
        rows_B = targets_BT[:, 0]
        given = _floats(self._given(rows_B))
        aims = rows_B if self._targets is None else self._targets[rows_B.cpu()].to(self.device)
        low = self._low_around_blocks()
        return torch.stack([self.loss(self._after_blocks(x_BTD, given, low), aims) for x_BTD in x_FBTD]).float()

    def _low_around_blocks(self) -> dict[str, Tensor]:
        """The weights outside of blocks that are not in fp32, in fp32."""
        in_blocks = {weight for module in self._layers for weight in module.parameters()}
        around = {name: weight for name, weight in self.model.named_parameters() if weight not in in_blocks}
        return {name: weight.float() for name, weight in around.items() if weight.dtype != torch.float32}

    def _after_blocks(self, x_BTD: Tensor, given: Tensor, low: Mapping[str, Tensor]) -> Any:
        """What the module returns for inputs whose last block returns x_BTD; `low`: its weights that are replaced."""
        with self._passing(lambda layer, x, *_: x_BTD if layer == self.n_layers else x):
            return functional_call(self.model, dict(low), (given,))

    def attention_inputs(self, layer: int, x_BTD: Tensor) -> AttentionInputs | None:
        raise ValueError(f"attention's weights cannot be read from a {type(self.model).__name__}; leave attention out")

    def weights(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Of a block by name; whole where each rank has a part of it, so that every rank must ask (FSDP2)."""
        for name, weight in self.block_module(layer).named_parameters():
            part: Any = weight
            yield name.removesuffix(".weight"), part.full_tensor() if hasattr(part, "full_tensor") else weight

    def matrices(self, layer: int) -> Mapping[str, Tensor]:
        """Every matrix of the block, its kind last where its name tells it."""
        found = {}
        for name, weight in self.weights(layer):
            kind = next((kind for kind, ends in _KINDS.items() if name.endswith(ends)), "other")
            if weight.ndim == 2:
                found[f"{name}.{kind}"] = weight
        return found

    def exact(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _given(self, tokens: Tensor) -> Tensor:
        """What the module takes: ids [B, T], or the inputs of these rows [B]."""
        return tokens if self._inputs is None else self._inputs[tokens.cpu()].to(self.device)

    def run(self, tokens_BT: Tensor) -> Any:
        """The module's forward pass, to the last block at least."""
        return self.model(self._given(tokens_BT if self._inputs is None else tokens_BT[:, 0]))

    def _calls_at(self, n_tokens: int) -> list[Call]:
        """Each block's other inputs at this length, for one sequence; they broadcast over a batch."""
        key = (n_tokens, self.device)
        if self._calls is None or self._calls[0] != key:
            # They depend only on the number of tokens.
            tokens_1T = torch.zeros(1, n_tokens, dtype=torch.long, device=self.device)
            self._calls = (key, self._record_calls(tokens_1T)[1])
        return self._calls[1]

    def _record_calls(self, tokens_BT: Tensor) -> tuple[Tensor, list[Call]]:
        """x_0 and the calls of all blocks, from a forward pass in which each returns its input."""
        inputs = []
        calls = []

        def note(layer: int, x_BTD: Tensor, args: tuple[Any, ...], named: Named) -> Tensor:
            inputs.append(x_BTD)  # x_0, since no block changes it
            calls.append((_floats(args), _floats(named)))
            return x_BTD

        heads = [] if self.head is None else [self.head]  # with many words it costs more than the blocks
        # Not in inference mode: the calls are kept, also for measures that take gradients.
        headless = replaced_forward(heads, lambda x, *_, **__: x[..., :1])
        with torch.inference_mode(False), torch.no_grad(), self._passing(note), headless:
            self.run(tokens_BT)
        return inputs[0], calls

    @contextmanager
    def _passing(self, function: Callable[..., Tensor]) -> Generator[None]:
        """Context in which block l returns function(l, x, args, named), and does nothing else."""

        def instead(layer: int, *args: Any, **named: Any) -> Any:
            x_BTD, args, named = apart(args, named)
            out_BTD, rest = function(layer, x_BTD, args, named), self._rests[layer - 1]
            return out_BTD if rest is None else (out_BTD, *rest)

        with ExitStack() as stack:
            for layer, module in enumerate(self._layers, start=1):
                stack.enter_context(replaced_forward([module], partial(instead, layer)))
            yield


def check_stream(probed: ProbedModule, tokens_BT: Tensor, name: str, n_words: int | None = None) -> int:
    """The length of the stream of these tokens. Sets the model's width and number of logits; `n_words`: the least
    number of the module's own, which are used where head and norm do not give them; None if never. Raises ValueError,
    with the list's `name`, where its blocks are no map of the stream, or nothing gives the model's logits."""
    seen, returned = own_pass(probed, tokens_BT, name)
    for layer, (before, out) in enumerate(seen, start=1):
        shapes = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (before, first_of(out))]
        if shapes[0] != shapes[1] or len(shapes[0]) != 3:
            raise ValueError(
                f"block {layer} of {name!r} takes {shapes[0]} and returns {shapes[1]}, which is no stream; {_PASS_ON}"
            )
        probed._rests[layer - 1] = out[1:] if isinstance(out, tuple) else None
    with probing(probed):
        x_BTD = _check_blocks(probed, tokens_BT, name, [seen[0][0], *(first_of(out) for _, out in seen)])
        # Modules in bf16 often return logits in fp32, of the stream's precision.
        own = [x.to(first_of(seen[-1][1]).dtype) for x in tensors_of(returned) if x.ndim == 3]
        n_logits = _n_logits(probed, x_BTD, own)
        whole = [x for x in own if n_words and x.shape[:2] == x_BTD.shape[:2] and x.shape[-1] >= n_words]
        if n_logits is None and whole:
            probed._readout = x_BTD.shape[1], whole[0].shape[-1]
            backwards = [x.flip(1) for x in whole]  # by position, whatever its place in the sequence
            n_logits = _n_logits(probed, x_BTD, whole) and _n_logits(probed, x_BTD.flip(1), backwards)
            probed._readout = probed._readout if n_logits else None
        if n_logits:
            probed.vocab_size = n_logits
        elif probed.head is not None:
            raise ValueError(
                "head(norm(x_L)) are not the module's logits; name both by head= and norm=, or let the module return "
                "logits [B, T, V] that depend on x_L alone, and name neither"
            )
    return x_BTD.shape[1]


def own_pass(probed: ProbedModule, tokens_BT: Tensor, name: str) -> tuple[list[tuple[Any, Any]], Any]:
    """What each block was given and gave in the module's own pass, and what the module returned. Raises ValueError
    where it cannot be run, or where blocks do not run in the order of their list."""
    seen = []

    def note(layer: int, module: nn.Module, args: tuple[Any, ...], named: Named, out: Any) -> None:
        seen.append((layer, apart(args, named)[0], out))

    with probing(probed), ExitStack() as hooks:
        for layer in range(1, probed.n_layers + 1):
            hook = probed.block_module(layer).register_forward_hook(partial(note, layer), with_kwargs=True)
            hooks.callback(hook.remove)
        try:
            returned = probed.run(tokens_BT)
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            fix = "give them as it takes them"
            if isinstance(error, TypeError) and "argument" in told:
                fix = "forward must take them alone, as with targets=None, and return logits"
            raise ValueError(f"the model cannot be run on these inputs ({told}); {fix}") from error
    if [layer for layer, *_ in seen] != [*range(1, probed.n_layers + 1)]:
        order = ", ".join(f"{layer}" for layer, *_ in seen[:8])
        raise ValueError(f"the blocks of {name!r} run in the order {order or '(none)'} of their list; {_PASS_ON}")
    return [(before, out) for _, before, out in seen], returned


def _check_blocks(probed: ProbedModule, tokens_BT: Tensor, name: str, own: Sequence[Tensor]) -> Tensor:
    """x_L, block by block as measures call them. Raises ValueError where one differs from the module's `own` pass."""
    if bad := [layer for layer, x_BTD in enumerate(own) if not x_BTD.isfinite().all()]:
        raise ValueError(f"the model computes NaN or infinity after block {bad[0]}; check its weights and inputs")
    x_BTD = probed.embed(tokens_BT)
    probed.vocab_size, probed.stream_width = 1, x_BTD.shape[-1]
    for layer in range(probed.n_layers + 1):
        told = f"block {layer} of {name!r} computes something else when it is called with the stream alone"
        told = f"{told}: it reads more, such as earlier blocks or the tokens; it cannot be measured"
        try:
            x_BTD = probed.block(layer, own[layer - 1].float()) if layer else x_BTD
        except Exception as error:  # what it reads is of the shape of another batch
            raise NotAStream(told) from error
        if not _agree(x_BTD, own[layer]):
            raise NotAStream(told)
    return x_BTD


def tensors_of(returned: Any) -> list[Tensor]:
    """Those among which a module returns its logits."""
    parts = returned.values() if isinstance(returned, dict) else returned if isinstance(returned, tuple) else ()
    return [x for x in (getattr(returned, "logits", None), returned, *parts) if isinstance(x, Tensor)]


def _n_logits(probed: ProbedModule, x_BTD: Tensor, returned: Sequence[Tensor]) -> int | None:
    """The number of logits, where those of x_L are among what the model `returned`, [B, T or 1, V]: of all positions
    or the last ones."""
    try:
        logits_BTV = probed.logits(x_BTD)
    except Exception:  # modules that take something else
        return None
    own = next((x for x in returned if x.shape[0::2] == logits_BTV.shape[0::2]), None)
    return None if own is None or not _agree(logits_BTV[:, -own.shape[1] :], own) else logits_BTV.shape[-1]


def in_fp32(module: nn.Module, *args: Any, **named: Any) -> Any:
    """What the module returns, its weights cast to fp32, and on the device of its input, while it runs."""
    device = args[0].device
    moved = {name: weight.to(device, torch.float32) for name, weight in module.named_parameters()}
    low = {name: weight for name, weight in moved.items() if weight is not module.get_parameter(name)}
    return functional_call(module, low, args, named) if low else module(*args, **named)


@contextmanager
def replaced_forward(modules: Iterable[nn.Module], function: Callable[..., Any]) -> Generator[None]:
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


def apart(args: tuple[Any, ...], named: Row) -> tuple[Any, tuple[Any, ...], Named]:
    """x_BTD, the first of a block's arguments, and the others."""
    if args:
        return args[0], args[1:], dict(named)
    name = "hidden_states" if "hidden_states" in named else next(iter(named))
    return named[name], (), {other: value for other, value in named.items() if other != name}


def first_of(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) and out else out


def _floats(value: Any) -> Any:
    """The same with floating tensors in fp32, and without a cache of keys, which would grow with each call."""
    if "Cache" in type(value).__name__:
        return None
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(map(_floats, value))
    return {name: _floats(each) for name, each in value.items()} if type(value) is dict else value


def _agree(x: Tensor, own: Tensor) -> bool:
    least = TOLERANCE.get(own.dtype, 0.05) * max(1.0, float(own.abs().max()))
    return bool((x - own).abs().max() <= least)
