"""The decoder written a second time, in fp64 numpy: one token, one head, one expert at a time.

Nothing is shared with `sparsedepth.model` but the weights and their names.
"""

import math

import numpy as np

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder

Weights = dict[str, np.ndarray]


def states(model: Decoder, tokens_T: list) -> list[np.ndarray]:
    """x_TD after the embedding and after each block, for one sequence."""
    config = model.config
    weights = _weights(model)
    x_TD = np.stack([weights["embed.weight"][token] for token in tokens_T])
    if config.norm == "peri":
        x_TD = np.stack([_norm(config, x_D, weights, "embed_norm") for x_D in x_TD])
    x_TD = np.tile(x_TD, (1, config.n_streams))
    x_TD = np.pad(x_TD, ((0, 0), (0, config.attention_residuals * config.d_model)))
    found, first = [x_TD], (x_TD, [])
    for layer in range(1, config.n_layers + 1):
        prefix = f"blocks.{(layer - 1) % (config.n_layers // config.loops)}."
        block = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        for part in ("attention", "ffn"):
            if part == "attention" and config.stream_skips and config.n_layers + 1 - layer < layer:
                x_TD = x_TD + block["skip_scalar"] * found[config.n_layers + 1 - layer]
            if part == "attention" and config.residual_scalars:
                x_TD = block["stream_scalar"] * x_TD + block["first_scalar"] * first[0]
            x_TD = _branch(config, block, layer, part, x_TD, tokens_T, first[1])
        found.append(x_TD)
    return found


def logits(model: Decoder, x_TD: np.ndarray) -> np.ndarray:
    """logits_TV of a decoder's last states."""
    config, weights = model.config, _weights(model)
    read = []
    for x_SD in (x_S.reshape(-1, config.d_model) for x_S in x_TD):
        p_S = np.ones(len(x_SD))
        if config.attention_residuals:
            key = [_rms(config, x_D, weights["sources.norm.weight"]) for x_D in x_SD]
            p_S = np.exp([key_D @ weights["sources.query_scalar"] for key_D in key])
            p_S = p_S / p_S.sum()
        read.append(_norm(config, p_S @ x_SD, weights, "norm"))
    logits_TV = np.stack(read) @ weights["embed.weight" if config.tie_embeddings else "head.weight"].T
    if config.parametrisation != "standard":
        logits_TV = logits_TV * config.base_width / config.d_model
    return logits_TV


def _weights(model: Decoder) -> Weights:
    return {name: value.detach().double().numpy() for name, value in model.named_parameters()}


def _read(config: ModelConfig, streams: Weights, x_nD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one token: what a branch reads, the weights b_n of what it adds, and the mixed streams."""
    n, manifold = config.n_streams, config.stream_mixing == "manifold"
    z = np.zeros((n, n + 2))
    for i in range(n):
        for c in range(n + 2):
            if manifold:
                row = streams["weight"][c * n + i]
                z[i, c] = row @ _rms(config, x_nD.flatten(), streams["norm.weight"])
            else:
                z[i, c] = math.tanh(streams["weight"][c] @ _rms(config, x_nD[i], streams["norm.weight"]))
            size = streams["size_scalar"][c if c < 2 else 2 if manifold else 0]
            z[i, c] = streams["start_scalar"][i * (n + 2) + c] + size * z[i, c]
    read, write, mix = z[:, 0], z[:, 1], z[:, 2:]
    if manifold:
        read, write, mix = 1 / (1 + np.exp(-read)), 2 / (1 + np.exp(-write)), np.exp(mix)
        mix = mix / mix.sum(1)[:, None]
        for _ in range(20):
            mix = mix / mix.sum(0)
            mix = mix / mix.sum(1)[:, None]
    return read @ x_nD, write, mix.T @ x_nD


def _rms(config: ModelConfig, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / math.sqrt((x**2).mean() + config.norm_eps) * weight


def _norm(config: ModelConfig, x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    weight = weights[f"{name}.weight"]
    if config.norm_kind == "rms":
        return x / math.sqrt((x**2).mean() + config.norm_eps) * weight
    if config.norm_kind == "layer":
        return (x - x.mean()) / math.sqrt(x.var() + config.norm_eps) * weight + weights[f"{name}.bias"]
    parts = np.split(x, config.norm_groups)
    return np.concatenate([(p - p.mean()) / math.sqrt(p.var() + config.norm_eps) for p in parts]) * weight


def _branch(
    config: ModelConfig, block: Weights, layer: int, part: str, x_TD: np.ndarray, tokens_T: list, values: list
) -> np.ndarray:
    """One branch and its sum with the stream, by the table at the top of the decoder's file; `values` of each block."""
    s, where = 1 / math.sqrt(layer), config.depth_scale

    def norm(x_TD: np.ndarray, name: str) -> np.ndarray:
        before, after = (s if where == place else 1.0 for place in ("before_norm", "lns"))
        return np.stack([after * _norm(config, before * x_D, block, f"{part}_{name}") for x_D in x_TD])

    def function(x_TD: np.ndarray) -> np.ndarray:
        if part == "ffn":
            return _ffn(config, block, layer, x_TD)
        return _attention(config, block, x_TD, tokens_T, values)

    gate = block.get(f"{part}_gate", 1.0)
    on_stream, on_branch = (gate, 1.0) if config.residual_gate == "admin" else (1.0, gate)
    if config.parametrisation == "completep":
        on_branch = on_branch * config.base_depth / config.n_layers
    on_branch = on_branch * (s if where in ("after_branch", f"after_{part}") else 1.0)
    on_sum = s if where == "after_residual" else 1.0
    kept = 1.0
    if config.gpas:
        kept = 1 - float(block["gpas_scalar"][0]) / (1 + math.exp(-block["gpas_scalar"][0]))
    placed = config.norm
    if config.attention_residuals:
        k, per_source = 2 * layer - (2 if part == "attention" else 1), 2 * config.n_layers // config.attention_residuals
        own, written, read = 1 + k // per_source, k % per_source > 0, []
        for x_SD in (x_S.reshape(-1, config.d_model) for x_S in x_TD):
            seen = x_SD[: own + written]
            key = [_rms(config, x_D, block[f"{part}_sources.norm.weight"]) for x_D in seen]
            p = np.exp([key_D @ block[f"{part}_sources.query_scalar"] for key_D in key])
            read.append(p @ seen / p.sum())
        added_TD = function(norm(np.stack(read), "norm"))
        added_TD = on_branch * (added_TD if placed == "pre" else norm(added_TD, "out_norm"))
        at_own = slice(own * config.d_model, (own + 1) * config.d_model)
        x_TD = x_TD.copy()
        x_TD[:, at_own] += added_TD
        return x_TD
    if config.n_streams > 1:
        of_part = {name.removeprefix(f"{part}_streams."): w for name, w in block.items() if f"{part}_streams" in name}
        tokens = [_read(config, of_part, x_W.reshape(config.n_streams, -1)) for x_W in x_TD]
        added_TD = function(norm(np.stack([read_D for read_D, _, _ in tokens]), "norm"))
        added_TD = on_branch * (added_TD if placed == "pre" else norm(added_TD, "out_norm"))
        joined = [mix + np.outer(write, added_D) for (_, write, mix), added_D in zip(tokens, added_TD, strict=True)]
        return np.stack([x_nD.flatten() for x_nD in joined])
    if placed == "mix":
        placed = "post" if layer <= round(config.mix_frac * config.n_layers) else "pre"
    if placed == "pre":
        return kept * on_sum * (x_TD + on_branch * function(norm(x_TD, "norm")))
    if placed in ("sandwich", "peri"):
        return kept * on_sum * (x_TD + on_branch * norm(function(norm(x_TD, "norm")), "out_norm"))
    if placed == "keel":
        branch = on_branch * function(norm(x_TD, "norm"))
        return norm(on_sum * (2 * config.n_layers * kept * x_TD + branch), "sum_norm")
    alpha = (2 * config.n_layers) ** 0.25 if placed == "deepnorm" else 1.0
    return norm(on_sum * (alpha * on_stream * kept * x_TD + on_branch * function(x_TD)), "norm")


def _attention(
    config: ModelConfig, block: Weights, x_TD: np.ndarray, tokens_T: list, values: list[np.ndarray]
) -> np.ndarray:
    width = config.d_model // config.n_heads
    per_group = config.n_heads // (config.n_kv_heads or config.n_heads)
    rate = config.rope_theta ** (-2 * np.arange(width // 2) / width)
    query, key, value = (x_TD @ block[f"attention.{name}.weight"].T for name in ("query", "key", "value"))
    values.append(value)
    if "attention.value_scalar" in block:
        value = block["attention.value_scalar"] * value + block["attention.first_value_scalar"] * values[0]

    def turned(x_TE: np.ndarray, name: str, head: int, t: int) -> np.ndarray:
        """Pairs (i, i + K/2) as complex numbers, turned by t times their rate."""
        here = slice(head * width, (head + 1) * width)
        x_K = x_TE[t, here]
        if config.qk_norm:
            over, weight = (x_K, block[f"attention.{name}_norm.weight"])
            if config.qk_norm_over == "all":
                over, weight = x_TE[t], weight[here]
            x_K = x_K / math.sqrt((over**2).mean() + config.norm_eps) * weight
        return (x_K[: width // 2] + 1j * x_K[width // 2 :]) * np.exp(1j * t * rate)

    def sees(t: int, j: int) -> bool:
        if j > t:
            return False
        pattern, layer = config.window_pattern, len(values)
        is_long = pattern is not None and ((pattern * layer)[layer - 1] == "L" or layer == config.n_layers)
        if config.sliding_window is not None and not is_long and t - j >= config.sliding_window:
            return False
        return not (config.mask_documents and config.eod in tokens_T[j:t])

    heads = np.zeros((len(x_TD), config.n_heads * width))
    for head in range(config.n_heads):
        group = head // per_group
        for t in range(len(x_TD)):
            seen = [j for j in range(len(x_TD)) if sees(t, j)]
            q = turned(query, "query", head, t)
            scores = [(q * turned(key, "key", group, j).conj()).real.sum() / math.sqrt(width) for j in seen]
            p = np.exp(np.array(scores) - max(scores))
            out = (p / p.sum()) @ value[seen][:, group * width : (group + 1) * width]
            heads[t, head * width : (head + 1) * width] = out
    if config.gated_attention != "none":
        gate = 1 / (1 + np.exp(-x_TD @ block["attention.gating.weight"].T))
        heads = heads * np.repeat(gate, heads.shape[1] // gate.shape[1], axis=1)
    return heads @ block["attention.output.weight"].T


ACTIVATIONS = {
    "swiglu": lambda x: x / (1 + math.exp(-x)),
    "geglu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "reglu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def _swiglu(x_TD: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (np.vectorize(ACTIVATIONS["swiglu"])(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T


def _ffn(config: ModelConfig, block: Weights, layer: int, x_TD: np.ndarray) -> np.ndarray:
    if config.n_experts == 0 or layer <= config.n_dense_layers:
        function, up_TF = np.vectorize(ACTIVATIONS[config.activation]), x_TD @ block["ffn.up.weight"].T
        gated = config.activation in ("swiglu", "geglu", "reglu")
        hidden_TF = function(x_TD @ block["ffn.gate.weight"].T) * up_TF if gated else function(up_TF)
        return hidden_TF @ block["ffn.down.weight"].T
    out_TD = np.zeros_like(x_TD)
    for t, x_D in enumerate(x_TD):
        logits = block["ffn.router.weight"] @ x_D
        p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-p)[: config.top_k]
        total = p[chosen].sum() if config.renormalise_gates else 1.0
        for e in chosen:
            gate, up = np.split(block["ffn.gate_up_E2FD"][e], 2)
            out_TD[t] += p[e] / total * _swiglu(x_D, gate, up, block["ffn.down_EDF"][e])
    if config.n_shared_experts:
        out_TD += _swiglu(x_TD, *(block[f"ffn.shared.{name}.weight"] for name in ("gate", "up", "down")))
    return out_TD
