"""All measures of one trained model, as rows under the glossary's names.

Held-out text: the scores (residual variance, attention sparsity, causal, permutation, usefulness) read its first
measure_tokens tokens; usefulness fits its maps on the fit_tokens after them, so on no scored token; the validation loss
reads its first val_tokens. All at seq_len, the context that the model was trained at; val_loss_common at eval_seq_len.
Pairs and resamples depend on `seed` alone, so runs are compared on the same draws.

Shapes: N sequences, T tokens of one sequence, S = T + 1 with the last target.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.run import RunConfig
from sparsedepth.measure.attention_sparsity import attention_sparsity
from sparsedepth.measure.bootstrap import Estimate, finite
from sparsedepth.measure.causal import causal_effect
from sparsedepth.measure.loss import bits_per_byte, held_out_loss
from sparsedepth.measure.permutation import permutation_effect
from sparsedepth.measure.usefulness import usefulness
from sparsedepth.measure.variance import residual_variance, variance_by_sequence
from sparsedepth.measure.weight_sparsity import weight_sparsity
from sparsedepth.probe.fork import MAX_TOKENS
from sparsedepth.probe.stack import Stack

HeldOut = Callable[[int, int, int], np.ndarray]
"""(seq_len, n_tokens, skip_tokens) -> int64 [N, seq_len + 1]: at most n_tokens tokens of held-out text, as sequences
with their last target, after the first skip_tokens tokens."""

Row = dict[str, Any]
Summary = dict[str, float | int | None]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Rows for the store; a missing value is None, and n is what is behind a value."""

    summary: Summary = field(default_factory=dict)
    """columns of `runs`"""
    layers: list[Row] = field(default_factory=list)
    """step, layer, metric, value, n (tokens, matrix entries or attention weights)"""
    heads: list[Row] = field(default_factory=list)
    """step, layer, head (from 1), metric, value, n (attention weights)"""
    pairs: list[Row] = field(default_factory=list)
    """step, layer, other_layer, metric, value, n (tokens)"""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Task:
    """What every part of the suite is given."""

    stack: Stack
    config: RunConfig
    held_out: HeldOut
    step: int
    seed: int
    max_tokens: int
    bytes_per_token: float | None

    def sequences(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Tensor:
        return torch.from_numpy(self.held_out(seq_len, n_tokens, skip_tokens))

    @cached_property
    def scored(self) -> Tensor:
        """scored_NS."""
        return self.sequences(self.config.seq_len, self.config.measure_tokens)

    @property
    def inputs(self) -> Tensor:
        """inputs_NT."""
        return self.scored[:, :-1]

    @property
    def fit(self) -> Tensor:
        """fit_NT."""
        return self.sequences(self.config.seq_len, self.config.fit_tokens, self.config.measure_tokens)[:, :-1]

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


def observe_variance(stack: Stack, tokens_NT: Tensor, step: int) -> list[Row]:
    """Layer rows of the residual variance alone: one pass over a small fixed batch, to be called along training."""
    by_layer = variance_by_sequence(stack, tokens_NT).mean(0)
    return _layer_rows(step, "residual_variance", [finite(value) for value in by_layer], tokens_NT.numel(), first=0)


def measure_run(
    stack: Stack,
    config: RunConfig,
    held_out: HeldOut,
    bytes_per_token: float | None = None,
    *,
    step: int,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
    progress: Callable[[float], None] | None = None,
) -> Measurements:
    """Every measure of a trained model, in fp32; the model is left as it was found.

    `bytes_per_token` is that of the held-out text; without it bits per byte are missing. `progress` is told the share
    of the parts that is done. Raises ValueError where the fit tokens do not exceed d_model + 1.
    """
    task = _Task(
        stack=stack,
        config=config,
        held_out=held_out,
        step=step,
        seed=seed,
        max_tokens=max_tokens,
        bytes_per_token=bytes_per_token,
    )
    whole = Measurements()
    for done, part in enumerate(PARTS, start=1):
        found = part(task)
        whole.summary.update(found.summary)
        whole.layers.extend(found.layers)
        whole.heads.extend(found.heads)
        whole.pairs.extend(found.pairs)
        if progress:
            progress(done / len(PARTS))
    return whole


def _weights(task: _Task) -> Measurements:
    summary: Summary = {}
    layers: list[Row] = []
    config = task.config
    for name, thresholds in (("weight_sparsity", config.weight_eps), ("weight_sparsity_rel", config.weight_rel_eps)):
        found = weight_sparsity(task.stack, thresholds, relative=name.endswith("_rel"))
        summary[name] = found.total[thresholds[0]]
        for threshold, shares in found.by_layer.items():
            layers += _layer_rows(task.step, f"{name}@{threshold:g}", shares, found.entries)
    return Measurements(summary=summary, layers=layers)


def _variance(task: _Task) -> Measurements:
    found = residual_variance(task.stack, task.inputs, task.rng(), task.max_tokens)
    return Measurements(
        summary={**_interval("residual_variance_last", found.last), "residual_variance_growth": found.growth},
        layers=_layer_rows(task.step, "residual_variance", found.by_layer, found.n_tokens, first=0),
    )


def _attention(task: _Task) -> Measurements:
    taus, relative_taus = task.config.attention_tau, task.config.attention_rel_tau
    found = attention_sparsity(task.stack, task.inputs, taus, relative_taus, task.rng(), task.max_tokens)
    summary: Summary = {}
    layers: list[Row] = []
    heads: list[Row] = []
    n = found.weights_per_head
    for name, by_threshold in (("attention_sparsity", found.absolute), ("attention_sparsity_rel", found.relative)):
        summary |= _interval(name, next(iter(by_threshold.values())).total)
        for threshold, shares in by_threshold.items():
            metric = f"{name}@{threshold:g}"
            n_heads = shares.by_head.shape[1]
            layers += _layer_rows(task.step, metric, shares.by_layer.tolist(), n * n_heads)
            heads += [
                {
                    "step": task.step,
                    "layer": layer + 1,
                    "head": head + 1,
                    "metric": metric,
                    "value": float(share),
                    "n": n,
                }
                for (layer, head), share in np.ndenumerate(shares.by_head)
            ]
    return Measurements(summary=summary, layers=layers, heads=heads)


def _causal(task: _Task) -> Measurements:
    found = causal_effect(task.stack, task.scored, task.rng(), task.max_tokens)
    return Measurements(
        summary={**_interval("causal_score", found.score), "score_tokens": found.n_tokens},
        layers=_layer_rows(task.step, "causal_effect", found.by_layer, found.n_tokens)
        + _layer_rows(task.step, "skip_loss_increase", found.skip_increase, found.n_tokens),
        pairs=_pair_rows(task.step, "causal_effect", found.effects, found.n_tokens),
    )


def _permutation(task: _Task) -> Measurements:
    n_pairs = task.config.permutation_pairs
    found = permutation_effect(task.stack, task.scored, task.rng(), n_pairs, task.max_tokens)
    return Measurements(
        summary=_interval("permutation_score", found.score),
        pairs=_pair_rows(task.step, "permutation_effect", found.effects, found.n_tokens),
    )


def _usefulness(task: _Task) -> Measurements:
    config = task.config
    found = usefulness(task.stack, task.fit, task.scored, config.usefulness_threshold, task.rng(), task.max_tokens)
    share = found.share.value
    return Measurements(
        summary={
            **_interval("usefulness", found.share),
            **_interval("usefulness_loss_increase", found.mean_increase),
            "effective_layers": None if share is None else share * task.stack.n_layers,
        },
        layers=_layer_rows(task.step, "affine_loss_increase", found.affine_increase, found.n_tokens),
    )


def _loss(task: _Task) -> Measurements:
    config = task.config
    val_NS = task.sequences(config.seq_len, config.val_tokens)
    val = held_out_loss(task.stack, val_NS, task.rng(), task.max_tokens)
    common = val
    if config.eval_seq_len not in (None, config.seq_len):
        common_NS = task.sequences(config.eval_seq_len, config.val_tokens)
        common = held_out_loss(task.stack, common_NS, task.rng(), task.max_tokens)
    bits = None
    if task.bytes_per_token is not None and val.loss.value is not None:
        bits = bits_per_byte(val.loss.value, task.bytes_per_token)
    return Measurements(
        summary={
            **_interval("val_loss", val.loss),
            "val_loss_tokens": val.n_tokens,
            "val_loss_common": common.loss.value,
            "val_bits_per_byte": bits,
        }
    )


PARTS: tuple[Callable[[_Task], Measurements], ...] = (
    _usefulness,  # first: it alone can refuse
    _loss,
    _weights,
    _variance,
    _attention,
    _causal,
    _permutation,
)


def _interval(name: str, estimate: Estimate) -> Summary:
    return {name: estimate.value, f"{name}_lo": estimate.lo, f"{name}_hi": estimate.hi}


def _layer_rows(
    step: int, metric: str, values: list[float | None] | list[float], n: int | list[int], first: int = 1
) -> list[Row]:
    """One row per layer from `first` on; `n` is the sample behind each value, or the one behind all."""
    sizes = n if isinstance(n, list) else [n] * len(values)
    return [
        {"step": step, "layer": layer, "metric": metric, "value": value, "n": size}
        for layer, (value, size) in enumerate(zip(values, sizes, strict=True), start=first)
    ]


def _pair_rows(step: int, metric: str, effects: Mapping[tuple[int, int], float | None], n: int) -> list[Row]:
    return [
        {"step": step, "layer": a, "other_layer": b, "metric": metric, "value": value, "n": n}
        for (a, b), value in effects.items()
    ]
