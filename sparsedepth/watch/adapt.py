"""The model and the tokens that a user gives, as measures take them; what cannot be measured is refused here."""

import hashlib
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.config.run import FIT, measures_named
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.files import digest
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.any_module import Loss, NotAStream, ProbedModule, check_stream
from sparsedepth.probe.hf_types import ENCODERS, EXPERTS, TYPES
from sparsedepth.probe.observed import OBSERVED, ObservedModule
from sparsedepth.probe.probed_model import ProbedDecoder, ProbedModel
from sparsedepth.probe.text import TokenArrays, halves
from sparsedepth.quantities.measured import MEASURES
from sparsedepth.quantities.quantity import Named
from sparsedepth.train.devices import gathered
from sparsedepth.words.watch import LACK, Lack

DEFAULT_MEASURES = ("variance", "usefulness", "causal", "loss")
NEEDS_LOSS = frozenset({"usefulness", "loss", "permutation", "removal", "joint", "early_exit", "spans", "gradients"})
NEEDS_HEAD = frozenset({"lens", "gradients", "released_code", "trace", "trace_map"})
NEEDS_PARTS = frozenset({"activations", "experts", "released_code"})
"""Measures that ask more of a module than its stream: a loss, its logits, or the parts of a block by name."""
_NORMS = ("norm", "ln_f", "final_layer_norm", "final_norm", "norm_f", "ln_final", "layernorm")
_HEADS = ("lm_head", "head", "output", "unembed", "embed_out", "to_logits")
"""Names by which final norm and head are known, where nothing else is said."""
_SIZES = {
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab_size",
    **dict.fromkeys(EXPERTS, "n_experts"),
}
"""The names of configurations of transformers, and ours."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapted:
    model: nn.Module
    """without the wrappers of compilation and data parallelism"""
    probed: ProbedModel
    tokens: TokenArrays
    data_hash: str
    """of what is read: the tokens, or the inputs and targets of an encoder"""
    measures: Sequence[str]
    left_out: Mapping[str, Lack]
    """of all measures, those that the model does not go with"""
    fields: Named
    """of RunConfig, as far as the model tells"""
    n_params: int
    is_sharded: bool
    """whether every rank has a part of the weights"""

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Context in which every rank has the weights outside of blocks; blocks gather their own when they run, but
        for those of our decoder, which are called past their hooks (`ProbedDecoder`)."""
        if not self.is_sharded:
            yield
            return
        model: Any = self.model
        run = partial(ProbedModule.run, self.probed) if isinstance(self.probed, ProbedModule) else model
        with torch.no_grad():  # FSDP2 takes the first module that runs for the whole
            run(torch.from_numpy(self.tokens.scored.inputs[:1]).to(self.probed.device))
        with gathered(self.model, with_blocks=isinstance(self.probed, ProbedDecoder)):
            yield


@dataclass(frozen=True, kw_only=True)
class Names:
    """Dotted paths in the module, where its type is not known, and the loss of a model without next tokens."""

    layers: str | None = None
    norm: str | None = None
    head: str | None = None
    loss: Loss | None = None


def adapt(module: nn.Module, tokens: Any, names: Names, measures: Sequence[str] | str | None) -> Adapted:
    """Of 'all' measures, and of DEFAULT_MEASURES where none is named, those that go with the module. Raises ValueError,
    with the fix, for a module, tokens or measures that do not go together."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    is_encoder = kind in ENCODERS and names.layers is None
    is_known = names.layers is None and names.loss is None and (isinstance(module, Decoder) or kind in TYPES)
    inputs, targets = tokens if isinstance(tokens, tuple) and len(tokens) == 2 else (tokens, None)
    given = _tensor(inputs)
    if targets is not None or is_encoder or names.loss or (given.is_floating_point() and not is_known):
        aims = None if targets is None else _tensor(targets)
        read = [_hash(part) for part in (given, aims) if part is not None]
        probed, whole = _of_rows(module, given, aims, names, is_encoder)
    else:
        read = []
        probed, whole = _of_ids(module, given, names, is_known)
    lacks = _lacks(probed) if is_encoder or type(probed) in (ProbedModule, ObservedModule) else {}
    chosen = measures_named(measures or DEFAULT_MEASURES)
    left_out = {name: lacks[name] for name in chosen if name in lacks}
    for name, lack in left_out.items():
        if measures and measures != "all":
            raise ValueError(f"the measure {name} {LACK[lack]}, or leave it out")
        chosen.remove(name)
    arrays = _halves(whole, chosen)
    return Adapted(
        model=module,
        probed=probed,
        tokens=arrays,
        data_hash=digest([arrays.data_hash, *read]) if read else arrays.data_hash,
        measures=chosen,
        left_out=left_out,
        fields=_fields(module, probed),
        n_params=sum(weight.numel() for weight in module.parameters()),
        is_sharded=any(type(weight).__name__ == "DTensor" for weight in module.parameters()),
    )


def _of_ids(module: nn.Module, given: Tensor, names: Names, is_known: bool) -> tuple[ProbedModel, Sequences]:
    """A model of next tokens, by its type where that is known."""
    ids_NS = _ids(given)
    if is_known and isinstance(module, Decoder):
        probed: ProbedModel = ProbedDecoder(module)
    elif is_known and _has_own_adapter(module):
        from sparsedepth.probe.hf_adapter import ProbedHfModel

        probed = ProbedHfModel(cast(Any, module))
    else:
        probed = _by_path(module, names)
    _check_vocabulary(ids_NS, probed)
    if ids_NS.shape[1] - 1 > (longest := getattr(probed, "max_len", None) or ids_NS.shape[1]):
        raise ValueError(
            f"tokens are {list(given.shape)}, and the model has {longest:,} positions; "
            f"give sequences of at most {longest + 1:,} ids, as tokens[:, :{longest + 1}]"
        )
    if type(probed) is ProbedModule:
        n_ids = int(ids_NS.max()) + 1
        n_words = min((size for size in _embeddings(probed) if size >= n_ids), default=n_ids)
        n_words = None if names.norm or names.head else n_words
        ids_BT, name = ids_NS[:2, :-1].to(probed.device), names.layers or type(module).__name__
        try:
            check_stream(probed, ids_BT, name, n_words)
        except NotAStream:
            probed = ObservedModule(module, blocks_of(module, names.layers), ids_BT, name, n_ids)
    return probed, next_tokens(ids_NS.numpy())


def original(model: Any) -> nn.Module:
    """The module that DistributedDataParallel and torch.compile wrap. Raises ValueError for what is no whole one."""
    if type(model).__module__.startswith("torch.distributed.pipelining") or isinstance(model, list | tuple):
        raise ValueError("a stage of a pipeline is not the whole model; watch one that is whole, in FSDP2 or in DDP")
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}, and must be a torch.nn.Module")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if inner is None:
            return model
        model = inner


def check_weights(module: nn.Module) -> None:
    """Raises ValueError for weights that are no numbers."""
    weights = dict(module.named_parameters())
    if not weights:
        raise ValueError(f"this {type(module).__name__} has no weights; give the model itself")
    is_in_parts = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
    if is_in_parts or any(hasattr(weight, "ds_id") for weight in weights.values()):
        raise ValueError(
            "every rank has a part of the weights, and one rank alone cannot run the model (FSDP1, DeepSpeed ZeRO-3); "
            "use FSDP2 (fully_shard, or fsdp_version: 2 of accelerate), DDP or ZeRO-2"
        )
    quantised = getattr(module, "quantization_method", None) or getattr(module, "is_quantized", False)
    for name, weight in weights.items():
        if weight.is_meta:
            raise ValueError(f"{name} is on the device 'meta', without numbers; load or initialise the model first")
        if quantised or not weight.is_floating_point():
            dtype = str(weight.dtype).removeprefix("torch.")
            told = f"{name} is quantised ({dtype})" if quantised else f"{name} is {dtype}, no floating-point numbers"
            raise ValueError(f"{told}: it cannot be measured; load the model in fp32 or bf16")


def _tensor(values: Any) -> Tensor:
    try:
        return values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"tokens are a {type(values).__name__} that is no array of numbers; "
            "give token ids as integers [sequences, length + 1]"
        ) from None


def _ids(given: Tensor) -> Tensor:
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool or given.ndim != 2:
        raise ValueError(
            f"tokens are {str(given.dtype).removeprefix('torch.')} {list(given.shape)}; "
            "give token ids as integers [sequences, length + 1], the last of a row only a target"
        )
    if given.shape[1] < 3 or not len(given):
        raise ValueError(f"tokens are {list(given.shape)}; give at least one sequence of three ids")
    return given.long().cpu()


def _halves(whole: Sequences, measures: Sequence[str]) -> TokenArrays:
    """As `measure --tokens` cuts them: the last half is for fitting, the first is scored; all, where nothing is."""
    if FIT.isdisjoint(measures):
        return TokenArrays(whole, whole)
    if len(whole) < 2:
        raise ValueError("tokens have 1 sequence, and half are for fitting usefulness's maps; give two or more")
    return halves(whole)


def _embeddings(probed: ProbedModel) -> list[int]:
    """The number of ids of each, which may be positions."""
    model = probed.model
    parts = [model.get_input_embeddings()] if hasattr(model, "get_input_embeddings") else model.modules()
    return [part.num_embeddings for part in parts if isinstance(part, nn.Embedding)]


def _check_vocabulary(ids_NS: Tensor, probed: ProbedModel) -> None:
    known = getattr(probed, "vocab_size", 0)  # the number of logits may not be known yet
    size = known or max(_embeddings(probed), default=0)
    if ids_NS.min() < 0 or (size and ids_NS.max() >= size):
        raise ValueError(
            f"tokens are from {int(ids_NS.min())} to {int(ids_NS.max())}, and the model's ids from 0 to {size - 1}; "
            "tokenise the text with its own tokenizer"
        )


def _lacks(probed: Any) -> dict[str, Lack]:
    """Measure -> what it needs and the module does not have."""
    if isinstance(probed, ObservedModule):
        found: dict[str, Lack] = {one.name: "stream" for one in MEASURES if one.name not in OBSERVED}
        return found if probed.has_loss else found | {"loss": "loss"}
    lacks: dict[str, Lack] = dict.fromkeys(NEEDS_PARTS, "parts")
    if type(probed) is ProbedModule:
        lacks["attention"] = "parts"
    if not probed.has_logits:
        lacks |= dict.fromkeys(NEEDS_HEAD, "head")
        lacks |= {} if probed.loss else dict.fromkeys(NEEDS_LOSS, "loss")
    return lacks


def _submodule(module: nn.Module, path: str, option: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        near = ", ".join(name for name, _ in module.named_children())
        raise ValueError(f"{option}={path!r} is no module of this {type(module).__name__}; it has {near}") from None


def blocks_of(module: nn.Module, path: str | None) -> list[nn.Module]:
    """The blocks of the list at a path; without one, of a known type."""
    kind, base = getattr(getattr(module, "config", None), "model_type", None), getattr(module, "base_model", module)
    if path is None and isinstance(module, Decoder):
        return [*module.blocks]
    if path is None and (kind in TYPES or kind in ENCODERS):
        module, path = base, ENCODERS[kind] if kind in ENCODERS else TYPES[kind].layers
    if path is None:
        lists = {name: len(each) for name, each in module.named_modules() if isinstance(each, nn.ModuleList)}
        known = ", ".join(sorted(TYPES)[:3])
        likely = [f"layers={name!r} ({n} blocks)" for name, n in lists.items() if n > 1]
        fix = f"name its list of blocks, such as {likely[0]}" if likely else "it has no list of blocks"
        raise ValueError(f"{type(module).__name__} is none of the known types ({known}, ...); {fix}")
    blocks = [*_submodule(module, path, "layers").children()]
    if not blocks:
        raise ValueError(f"layers={path!r} has no blocks in it; name the list, such as 'model.layers'")
    return blocks


def _has_own_adapter(module: Any) -> bool:
    """Whether the adapter of its type takes the module: it has a head, and no kernel that asks for bf16 or fp16."""
    head = module.get_output_embeddings()
    kernel = module.config._attn_implementation
    return head is not None and (head.weight.dtype == torch.float32 or kernel in ("sdpa", "eager"))


def _by_path(module: nn.Module, names: Names) -> ProbedModule:
    """A model of tokens whose parts are named, or go by a usual name."""
    blocks = blocks_of(module, names.layers)
    above = (names.layers or "").rpartition(".")[0]
    parent: Any = module.get_submodule(above) if names.layers else getattr(module, "base_model", module)
    norm = _submodule(module, names.norm, "norm") if names.norm else _usual(_NORMS, parent, module)
    head = _submodule(module, names.head, "head") if names.head else _usual(_HEADS, module, parent)
    return ProbedModule(module, blocks, norm=norm, head=head)


def _usual(known: Sequence[str], *places: nn.Module) -> nn.Module | None:
    children = [dict(place.named_children()) for place in places]
    return next((own[name] for own in children for name in known if name in own), None)


def _hash(values: Tensor) -> str:
    return hashlib.sha256(values.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _of_rows(
    module: nn.Module, inputs: Tensor, targets: Tensor | None, names: Names, is_encoder: bool
) -> tuple[ProbedModule, Sequences]:
    """An encoder, or another model without next tokens: a 'token' is the row of its input."""
    if targets is not None and len(targets) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets; give one target for each input")
    given: Named = {"inputs": inputs.cpu(), "targets": targets if targets is None else targets.cpu()}
    if is_encoder:
        from sparsedepth.probe.hf_adapter import ProbedEncoder

        probed: ProbedModule = ProbedEncoder(module, blocks_of(module, None), loss=names.loss, **given)
    else:
        probed = ProbedModule(module, blocks_of(module, names.layers), loss=names.loss, **given)
    if not inputs.is_floating_point():
        _check_vocabulary(inputs, probed)
    rows_21 = torch.arange(min(2, len(inputs)), device=probed.device)[:, None]
    length = check_stream(probed, rows_21, names.layers or type(module).__name__)
    row_NT = np.repeat(np.arange(len(inputs))[:, None], length, axis=1)
    return probed, Sequences(inputs=row_NT, targets=row_NT)


def _fields(module: nn.Module, probed: ProbedModel) -> Named:
    """What is known of the model as fields of RunConfig."""
    config = getattr(module, "config", None)
    if isinstance(config, ModelConfig):
        return config.model_dump(mode="json", include={*ModelConfig.model_fields})
    found = [(own, getattr(config, theirs, None)) for theirs, own in _SIZES.items()]
    sizes = {name: value for name, value in found if isinstance(value, int) and value > 0}
    return {"n_layers": probed.n_layers, "d_model": probed.stream_width, **sizes}


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or a part of it may run as compiled code."""
    parts = module.modules() if "torch._dynamo" in sys.modules else ()
    return any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in parts)
