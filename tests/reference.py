"""The measures written a second time, as plain loops over a `Decoder`: one full forward pass per intervention.

Slow, and with no code in common with `sparsedepth.probe` and `sparsedepth.measure`. `architecture.py` has the decoder
itself a second time.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.run import RunConfig
from sparsedepth.model.block import Block
from sparsedepth.model.decoder import Decoder

FAMILIES = {
    "dense": {},
    "gqa_lns": {"n_kv_heads": 2, "depth_scale": "lns"},
    "moe": {"n_experts": 4, "top_k": 2, "d_expert": 24},
}


def run_config(**fields) -> RunConfig:
    """Small, and with weights large enough that every block matters."""
    small = {"n_layers": 5, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 40, "seq_len": 16, "init_std": 0.25}
    return build(RunConfig, {**small, **fields}, "test")


ZOO: dict[str, dict] = {
    "post": {"norm": "post"},
    "sandwich": {"norm": "sandwich"},
    "peri": {"norm": "peri"},
    "mix": {"norm": "mix", "mix_frac": 0.4},
    "deepnorm": {"norm": "deepnorm"},
    "keel": {"norm": "keel"},
    "group_norm": {"norm_kind": "group"},
    "layer_norm": {"norm_kind": "layer"},
    "lns": {"depth_scale": "lns"},
    "before_norm": {"depth_scale": "before_norm"},
    "after_branch": {"depth_scale": "after_branch"},
    "after_attention": {"depth_scale": "after_attention"},
    "after_ffn": {"depth_scale": "after_ffn"},
    "after_residual": {"depth_scale": "after_residual"},
    "scaled": {"init": "scaled"},
    "depth_scaled": {"init": "depth_scaled"},
    "zero_outputs": {"init": "zero_outputs"},
    **{activation: {"activation": activation} for activation in ("geglu", "reglu", "gelu", "relu", "relu2")},
    "layerscale": {"residual_gate": "layerscale", "gate_init": 0.1},
    "skipinit": {"residual_gate": "skipinit"},
    "admin": {"residual_gate": "admin", "norm": "post"},
    "residual_scalars": {"residual_scalars": True},
    "falling_scalars": {"residual_scalars": True, "scalars_start": "falling"},
    "value_residual": {"value_residual": True},
    "gpas": {"gpas": True},
    "sources": {"attention_residuals": 2},
    "streams": {"n_streams": 3},
    "manifold": {"n_streams": 2, "stream_mixing": "manifold"},
    "skips": {"stream_skips": True, "n_layers": 5},
    "loops": {"n_layers": 2, "loops": 2},
    "gated": {"gated_attention": "channel"},
    "gated_heads": {"gated_attention": "head"},
    "window_pattern": {"sliding_window": 3, "window_pattern": "SL"},
    "mup": {"parametrisation": "mup", "base_width": 8},
    "completep": {"parametrisation": "completep", "base_width": 8, "base_depth": 1},
    "window": {"sliding_window": 3},
    "documents": {"mask_documents": True, "eod": 2},
    "qk_norm": {"qk_norm": True},
    "qk_norm_over": {"qk_norm": True, "qk_norm_over": "all"},
    "shared_expert": {"n_experts": 4, "top_k": 2, "d_expert": 24, "n_shared_experts": 2, "renormalise_gates": False},
    "dense_first": {"n_experts": 4, "top_k": 3, "d_expert": 16, "n_dense_layers": 1},
}
"""Every architecture of the papers, by the fields that make it."""


def untried(cases: Iterable[Mapping[str, object]], elsewhere: Collection[str]) -> list[str]:
    """Fields of a model, and choices of a field, that none of the cases has away from the default: 'gpas', 'norm=keel'.
    Those `elsewhere` do not count; one that is tried here all the same is named, too."""
    cases, missing = [*cases], []
    for name, field in ModelConfig.model_fields.items():
        choices = (
            {*get_args(field.annotation)} - {None, field.default} if get_origin(field.annotation) is Literal else ()
        )
        tried = {str(case[name]) for case in cases if name in case and case[name] != field.default}
        if name in elsewhere:
            missing += [f"{name} is in the list of others, and tried"] if tried else []
        elif choices:
            missing += [f"{name}={choice}" for choice in choices if choice not in tried]
        elif not tried:
            missing.append(name)
    return missing


Plan = Sequence[int | Callable | None]


def _block(model: Decoder, layer: int) -> Block:
    block = model.blocks[layer - 1]
    assert isinstance(block, Block)
    return block


def states(model: Decoder, tokens_BT: Tensor, plan: Plan | None = None) -> list[Tensor]:
    """x_0 .. x_L of a forward pass that runs plan[l - 1] at layer l: the block of that number, a function, nothing."""
    plan = range(1, len(model.blocks) + 1) if plan is None else plan
    found = [model.embed_tokens(tokens_BT)]
    context = model.context(tokens_BT, found[0], in_order=False)
    for what in plan:
        x = found[-1]
        if isinstance(what, int):
            x = model.blocks[what - 1](x, context)
        elif what is not None:
            x = what(x)
        found.append(x)
    return [x.detach().double() for x in found]


def loss(model: Decoder, tokens_BS: Tensor, plan: Plan | None = None) -> float:
    """Mean of -log p(next token), one position at a time."""
    x_BTD = states(model, tokens_BS[:, :-1], plan)[-1].float()
    with torch.no_grad():
        logits_BTV = model.head(model.norm(x_BTD)).double().numpy()
    total = 0.0
    for logits_TV, targets in zip(logits_BTV, tokens_BS[:, 1:].tolist(), strict=True):
        for logits_V, target in zip(logits_TV, targets, strict=True):
            total += math.log(np.exp(logits_V - logits_V.max()).sum()) + logits_V.max() - logits_V[target]
    return total / tokens_BS[:, 1:].numel()


def causal_effects(model: Decoder, tokens_BT: Tensor) -> dict[tuple[int, int], float]:
    n_layers = len(model.blocks)
    base = states(model, tokens_BT)
    effects = {}
    for s in range(1, n_layers + 1):
        skipped = states(model, tokens_BT, [None if layer == s else layer for layer in range(1, n_layers + 1)])
        for later in range(s + 1, n_layers + 1):
            changed, unchanged = 0.0, 0.0
            for b in range(tokens_BT.shape[0]):
                for t in range(tokens_BT.shape[1]):
                    update = base[later][b, t] - base[later - 1][b, t]
                    update_skipped = skipped[later][b, t] - skipped[later - 1][b, t]
                    changed += (update_skipped - update).norm().item()
                    unchanged += update.norm().item()
            effects[s, later] = changed / unchanged
    return effects


def permutation_effects(model: Decoder, tokens_BS: Tensor) -> dict[tuple[int, int], float]:
    order = list(range(1, len(model.blocks) + 1))
    base = loss(model, tokens_BS)
    effects = {}
    for a in order:
        for b in range(a + 1, len(order) + 1):
            swapped = [{a: b, b: a}.get(layer, layer) for layer in order]
            effects[a, b] = abs(loss(model, tokens_BS, swapped) - base) / base
    return effects


def skip_increases(model: Decoder, tokens_BS: Tensor) -> list[float]:
    order = range(1, len(model.blocks) + 1)
    base = loss(model, tokens_BS)
    return [(loss(model, tokens_BS, [None if i == s else i for i in order]) - base) / base for s in order]


def affine_increases(model: Decoder, fit_BT: Tensor, tokens_BS: Tensor) -> list[float]:
    """One least-squares problem in -> out per block, with a column of ones for the offset."""
    base, fitted = loss(model, tokens_BS), states(model, fit_BT)
    order = list(range(1, len(model.blocks) + 1))
    increases = []
    for layer in order:
        before, after = (fitted[index].flatten(0, 1).numpy() for index in (layer - 1, layer))
        design = np.concatenate([before, np.ones((len(before), 1))], axis=1)
        solution = torch.from_numpy(np.linalg.lstsq(design, after, rcond=None)[0])

        def affine(x: Tensor, solution: Tensor = solution) -> Tensor:
            return (x.double() @ solution[:-1] + solution[-1]).float()

        replaced = loss(model, tokens_BS, [affine if index == layer else index for index in order])
        increases.append((replaced - base) / base)
    return increases


def attention_weights(model: Decoder, tokens_BT: Tensor, layer: int) -> np.ndarray:
    """a_BHTT of one block, one head and one row at a time, from the projections and RoPE spelt out on pairs."""
    block, config = _block(model, layer), model.config
    width, half = config.d_model // config.n_heads, config.d_model // config.n_heads // 2
    x_BTD = states(model, tokens_BT)[layer - 1].float()
    with torch.no_grad():
        normed = block.attention_norm(x_BTD) / (math.sqrt(layer) if config.depth_scale == "lns" else 1.0)
        queries = block.attention.query(normed).double().numpy()
        keys = block.attention.key(normed).double().numpy()

    def turned(vector: np.ndarray, position: int) -> np.ndarray:
        out = np.empty_like(vector)
        for i in range(half):
            angle = position * config.rope_theta ** (-2 * i / width)
            out[i] = vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle)
            out[i + half] = vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle)
        return out

    n_sequences, n_tokens = tokens_BT.shape
    weights = np.zeros((n_sequences, config.n_heads, n_tokens, n_tokens))
    for b in range(n_sequences):
        for head in range(config.n_heads):
            group = head // (config.n_heads // (config.n_kv_heads or config.n_heads))
            q = [turned(queries[b, t, head * width : (head + 1) * width], t) for t in range(n_tokens)]
            k = [turned(keys[b, t, group * width : (group + 1) * width], t) for t in range(n_tokens)]
            for i in range(n_tokens):
                scores = np.array([q[i] @ k[j] / math.sqrt(width) for j in range(i + 1)])
                weights[b, head, i, : i + 1] = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    return weights


def jacobian_blocks(model: Decoder, tokens_BT: Tensor, layer: int) -> np.ndarray:
    """J_BTDTD of one block: d x_l[b, t, i] / d x_(l-1)[b, s, j], one sequence after the other."""
    context = model.positions(tokens_BT.shape[1])
    inputs_BTD = states(model, tokens_BT)[layer - 1].float()

    def of_one(x_TD: Tensor) -> Tensor:
        return model.blocks[layer - 1](x_TD[None], context)[0]

    return np.stack([torch.autograd.functional.jacobian(of_one, x_TD).double().numpy() for x_TD in inputs_BTD])


def branch_updates(model: Decoder, tokens_BT: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """What attention and the feed-forward part of a block add, seen by hooks on the two modules, which training and
    inference mode may not call."""
    block, seen, was_training = _block(model, layer), {}, model.training
    model.eval()
    hooks = [
        part.register_forward_hook(lambda _, __, out, name=name: seen.__setitem__(name, out.detach().double()))
        for name, part in (("attention", block.attention), ("ffn", block.ffn))
    ]
    with torch.inference_mode(False), torch.no_grad():
        states(model, tokens_BT)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return seen["attention"], seen["ffn"]


def cosine(a: Tensor, b: Tensor) -> float:
    return sum((x * y).item() for x, y in zip(a, b, strict=True)) / math.sqrt((a * a).sum() * (b * b).sum())


def angles(model: Decoder, tokens_BT: Tensor, positions: Sequence[int]) -> dict[tuple[int, int], float]:
    """Mean angle of each pair of states, one token at a time."""
    found = states(model, tokens_BT)
    out = {}
    for a in range(len(found)):
        for b in range(a + 1, len(found)):
            each = [math.acos(cosine(found[a][s, t], found[b][s, t])) for s in range(len(tokens_BT)) for t in positions]
            out[a, b] = sum(each) / len(each)
    return out


def removal_drops(model: Decoder, tokens_BS: Tensor) -> dict[tuple[int, int], float]:
    order = range(1, len(model.blocks) + 1)
    base = loss(model, tokens_BS)
    return {
        (i, j): (loss(model, tokens_BS, [None if i <= layer <= j else layer for layer in order]) - base) / base
        for i in order
        for j in order
        if i <= j
    }


def exit_losses(model: Decoder, tokens_BS: Tensor, through: Sequence[int]) -> list[float]:
    """The loss of a model that runs blocks 1..l and then those of `through`, for each l."""
    n_layers = len(model.blocks)
    return [loss(model, tokens_BS, [*range(1, layer + 1), *through]) for layer in range(n_layers + 1 - len(through))]


def expert_loads(model: Decoder, tokens_BT: Tensor, layer: int) -> tuple[list[float], float]:
    """Share of the choices of each expert, and the mean entropy of the router, one token after the other."""
    block, config = _block(model, layer), model.config
    assert config.top_k is not None
    x_BTD = states(model, tokens_BT)[layer - 1].float()
    shrink = math.sqrt(layer) if config.depth_scale == "lns" else 1.0
    with torch.no_grad():
        u_BTD = x_BTD + block.attention(block.attention_norm(x_BTD) / shrink, model.positions(tokens_BT.shape[1]))
        logits = block.get_submodule("ffn.router")(block.ffn_norm(u_BTD) / shrink).double().flatten(0, 1).numpy()
    counts, entropies = [0] * config.n_experts, []
    for row in logits:
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        entropies.append(-sum(q * math.log(q) for q in p))
        for expert in np.argsort(-p)[: config.top_k]:
            counts[expert] += 1
    return [count / sum(counts) for count in counts], sum(entropies) / len(entropies)


def answer_loss(model: Decoder, pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """Mean of -ln p over all answer tokens, each pair by itself: one forward pass for each token."""
    total, n = 0.0, 0
    for prompt, answer in pairs:
        ids = list(prompt)
        for token in answer:
            with torch.no_grad():
                total -= model(torch.tensor([ids]))[0, -1].log_softmax(-1)[token].item()
            ids.append(token)
            n += 1
    return total / n
