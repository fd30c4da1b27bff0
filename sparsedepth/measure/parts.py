"""The parts of the suite: each runs one measure on its task's tokens and names what comes out.

A part is chosen by its name in the config field `measures`; PARTS holds them in the order in which they run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.run import Measure, MeasureOnlyConfig, RunConfig
from sparsedepth.measure.attention_sparsity import HeadValues, attention_sparsity
from sparsedepth.measure.bootstrap import finite
from sparsedepth.measure.causal import causal_effect
from sparsedepth.measure.causal_maximum import MARGIN, SPACING, causal_maximum
from sparsedepth.measure.early_exit import early_exit
from sparsedepth.measure.effective_layers import share_above
from sparsedepth.measure.experts import expert_use
from sparsedepth.measure.geometry import geometry
from sparsedepth.measure.jacobian import jacobian_deviation
from sparsedepth.measure.loss import bits_per_byte, held_out_loss
from sparsedepth.measure.permutation import permutation_effect
from sparsedepth.measure.permutation_neighbours import permutation_neighbours
from sparsedepth.measure.released_code import (
    affine_increase_in_sample,
    causal_misaligned,
    normalised_last_variance,
    permutation_weighted,
)
from sparsedepth.measure.removal import removal
from sparsedepth.measure.rows import Measurements, Row, Summary, head_rows, interval, layer_rows, pair_rows
from sparsedepth.measure.trajectories import trajectories
from sparsedepth.measure.usefulness import usefulness
from sparsedepth.measure.variance import residual_variance
from sparsedepth.measure.weight_sparsity import weight_sparsity
from sparsedepth.probe.stack import Stack

HeldOut = Callable[[int, int, int], np.ndarray]
"""(seq_len, n_tokens, skip_tokens) -> int64 [N, seq_len + 1]: at most n_tokens tokens of held-out text, as sequences
with their last target, after the first skip_tokens tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What every part of the suite is given."""

    stack: Stack
    config: RunConfig | MeasureOnlyConfig
    held_out: HeldOut
    step: int
    seed: int
    max_tokens: int
    bytes_per_token: float | None
    eod: int | None
    """the token that ends a document; None = not known"""

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


def _usefulness(task: Task) -> Measurements:
    config = task.config
    found = usefulness(task.stack, task.fit, task.scored, config.usefulness_threshold, task.rng(), task.max_tokens)
    share = found.share.value
    return Measurements(
        summary={
            **interval("usefulness", found.share),
            **interval("usefulness_loss_increase", found.mean_increase),
            **{f"usefulness_{t}pct": share_above(found.affine_increase, t / 100) for t in (2, 5, 20)},
            "effective_layers": None if share is None else share * task.stack.n_layers,
        },
        layers=layer_rows(task.step, "affine_loss_increase", found.affine_increase, found.n_tokens),
    )


def _loss(task: Task) -> Measurements:
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
            **interval("val_loss", val.loss),
            "val_loss_tokens": val.n_tokens,
            **interval("val_loss_common", common.loss),
            "val_bits_per_byte": bits,
        }
    )


def _weights(task: Task) -> Measurements:
    summary: Summary = {}
    layers: list[Row] = []
    config = task.config
    for name, thresholds in (("weight_sparsity", config.weight_eps), ("weight_sparsity_rel", config.weight_rel_eps)):
        found = weight_sparsity(task.stack, thresholds, relative=name.endswith("_rel"))
        summary[name] = found.total[thresholds[0]]
        for threshold, shares in found.by_layer.items():
            layers += layer_rows(task.step, f"{name}@{threshold:g}", shares, found.entries)
            for kind, by_layer in found.by_kind[threshold].items():
                if kind in ("query", "key", "value", "output", "gate", "up", "down"):
                    metric = f"{name}_{kind}@{threshold:g}"
                    layers += layer_rows(task.step, metric, by_layer, found.entries_by_kind[kind])
    return Measurements(summary=summary, layers=layers)


def _variance(task: Task) -> Measurements:
    found = residual_variance(task.stack, task.inputs, task.rng(), task.max_tokens)
    n = found.n_tokens
    parts = Measurements(
        summary={
            **interval("residual_variance_last", found.last),
            **interval("residual_variance_growth", found.growth_rate),
        },
        layers=layer_rows(task.step, "residual_variance", found.by_layer, n, first=0)
        + layer_rows(task.step, "residual_growth", found.growth_by_layer, n),
    )
    for name, branch in (("attention_variance", found.attention), ("ffn_variance", found.ffn)):
        if branch is not None:
            parts.summary.update(interval(name, branch.mean))
            parts.layers.extend(layer_rows(task.step, name, branch.by_layer, n))
    return parts


def _attention(task: Task) -> Measurements:
    taus, relative_taus = task.config.attention_tau, task.config.attention_rel_tau
    found = attention_sparsity(task.stack, task.inputs, taus, relative_taus, task.rng(), task.max_tokens)
    parts = Measurements()

    def add(metric: str, values: HeadValues, n: int) -> None:
        n_heads = values.by_head.shape[1]
        parts.layers.extend(layer_rows(task.step, metric, values.by_layer.tolist(), n * n_heads))
        parts.heads.extend(head_rows(task.step, metric, values.by_head, n))

    for name, by_threshold in (("attention_sparsity", found.absolute), ("attention_sparsity_rel", found.relative)):
        parts.summary.update(interval(name, next(iter(by_threshold.values())).total))
        for threshold, values in by_threshold.items():
            add(f"{name}@{threshold:g}", values, found.weights_per_head)
    for name, values in (
        ("attention_entropy", found.entropy),
        ("attention_entropy_rel", found.relative_entropy),
        ("attention_sink", found.sink),
    ):
        parts.summary.update(interval(name, values.total))
        add(name, values, found.rows_per_head)
    return parts


def _causal(task: Task) -> Measurements:
    found = causal_effect(task.stack, task.scored, task.rng(), task.max_tokens)
    return Measurements(
        summary={
            **interval("causal_score", found.score),
            "usefulness_identity": share_above(found.skip_increase, task.config.usefulness_threshold),
            "score_tokens": found.n_tokens,
        },
        layers=layer_rows(task.step, "causal_effect", found.by_layer, found.n_tokens)
        + layer_rows(task.step, "skip_loss_increase", found.skip_increase, found.n_tokens),
        pairs=pair_rows(task.step, "causal_effect", found.effects, found.n_tokens),
    )


def _permutation(task: Task) -> Measurements:
    n_pairs = task.config.permutation_pairs
    found = permutation_effect(task.stack, task.scored, task.rng(), n_pairs, task.max_tokens)
    return Measurements(
        summary=interval("permutation_score", found.score),
        pairs=pair_rows(task.step, "permutation_effect", found.effects, found.n_tokens),
    )


def _geometry(task: Task) -> Measurements:
    found = geometry(task.stack, task.inputs, task.rng(), task.max_tokens)
    n = found.n_tokens
    parts = Measurements(
        summary={
            **interval("angular_distance_middle", found.angular_distance_middle),
            **interval("angular_distance_last_token", found.angular_distance_last_token),
        },
        pairs=pair_rows(task.step, "angular_distance", found.angles, n)
        + pair_rows(task.step, "angular_distance_last_token", found.angles_last_token, len(task.inputs)),
    )
    for name, profile in found.profiles.items():
        parts.layers.extend(layer_rows(task.step, name, profile.by_layer, n, first=profile.first))
        if name in SCORED_PROFILES:
            parts.summary.update(interval(name, profile.mean))
    return parts


SCORED_PROFILES = (
    "update_ratio",
    "update_cosine",
    "block_influence",
    "angular_distance",
    "update_angle",
    "angle_to_end",
)
"""Profiles of `geometry` whose mean over layers is a score of its own."""


def _trajectories(task: Task) -> Measurements:
    found = trajectories(task.stack, task.inputs, task.rng(), task.eod, task.max_tokens)
    if found is None:
        return Measurements()
    by_layer = {
        "trajectory_mean": found.mean,
        "trajectory_pc1": found.components[0],
        "trajectory_pc2": found.components[1],
        "early_stop_ideal": found.early_stop,
        "even_ideal": found.even,
    }
    return Measurements(
        summary={
            **interval("early_stop_share", found.early_stop_share),
            **interval("even_share", found.even_share),
            "trajectory_pc1_share": found.variance_shares[0],
            "trajectory_pc2_share": found.variance_shares[1],
        },
        layers=[
            row
            for name, values in by_layer.items()
            for row in layer_rows(task.step, name, [finite(value) for value in values], found.n_tokens)
        ],
        tokens=[{"step": task.step, **point} for point in found.points],
    )


def _experts(task: Task) -> Measurements:
    found = expert_use(task.stack, task.inputs, task.rng(), task.max_tokens)
    if found is None:
        return Measurements()
    parts = Measurements()
    for name, mean, by_layer in (
        ("effective_experts", found.mean_effective_experts, found.effective_experts),
        ("expert_load_variation", found.mean_variation, found.variation),
        ("router_entropy", found.mean_router_entropy, found.router_entropy),
    ):
        parts.summary.update(interval(name, mean))
        parts.layers.extend(layer_rows(task.step, name, by_layer, found.n_tokens))
    return parts


def _early_exit(task: Task) -> Measurements:
    found = early_exit(task.stack, task.scored, task.rng(), task.max_tokens)
    parts = Measurements()
    for name, exits in (("lens_loss", found.logit_lens), ("early_exit_loss", found.last_block)):
        parts.summary.update(interval(f"{name}_increase", exits.mean_increase))
        values = [estimate.value for estimate in exits.by_layer]
        parts.layers.extend(layer_rows(task.step, name, values, found.n_tokens, first=0))
    return parts


def _neighbours(task: Task) -> Measurements:
    found = permutation_neighbours(task.stack, task.scored, task.rng(), task.max_tokens)
    return Measurements(summary=interval("permutation_neighbours", found.score))


def _jacobian(task: Task) -> Measurements:
    n_probes = task.config.jacobian_probes
    found = jacobian_deviation(task.stack, task.inputs, task.rng(), n_probes, max_tokens=task.max_tokens)
    parts = Measurements()
    for form, deviation in found.forms.items():
        name = "jacobian_deviation" + ("" if form == "per_token" else f"_{form}")
        parts.summary.update({**interval(name, deviation.score), f"{name}_se": deviation.score_standard_error})
        parts.layers.extend(layer_rows(task.step, name, deviation.by_layer, found.n_tokens))
        parts.layers.extend(layer_rows(task.step, f"{name}_se", deviation.standard_error, found.n_tokens))
    return parts


def _removal(task: Task) -> Measurements:
    found = removal(task.stack, task.scored, task.rng(), task.config.removal_ranges, task.max_tokens)
    return Measurements(
        summary={**interval("removal_score", found.score), **interval("removal_range_score", found.range_score)},
        pairs=pair_rows(task.step, "removal_drop", found.drops, found.n_tokens),
    )


def _causal_maximum(task: Task) -> Measurements:
    parts = Measurements()
    for name, tokens in (("causal_maximum", "future"), ("causal_maximum_current", "current")):
        if tokens == "future" and task.config.seq_len <= SPACING + MARGIN:
            continue  # no position has enough tokens before and after it: the score does not exist
        found = causal_maximum(task.stack, task.inputs, task.rng(), tokens=tokens, max_tokens=task.max_tokens)
        parts.summary.update(interval(name, found.score))
        parts.pairs.extend(pair_rows(task.step, name, found.effects, found.n_tokens))
    return parts


def _released(task: Task) -> Measurements:
    """The released code's forms of the scores, whose differences `sparsedepth.measure.released_code` explains."""
    stack, n_layers = task.stack, task.stack.n_layers
    misaligned = causal_misaligned(stack, task.inputs, stack.final_norm, task.max_tokens).values()
    shifted = [effect for effect in misaligned if effect is not None]
    pairs = permutation_effect(stack, task.scored, task.rng(), None, task.max_tokens).effects
    known = {pair: effect for pair, effect in pairs.items() if effect is not None}
    increases = affine_increase_in_sample(stack, task.scored, max_tokens=task.max_tokens)
    variance = normalised_last_variance(stack, task.inputs, stack.final_norm, task.max_tokens)
    return Measurements(
        summary={
            "causal_score_released": sum(shifted) / len(shifted)
            if shifted and len(shifted) == len(misaligned)
            else None,
            "permutation_score_released": permutation_weighted(known, n_layers),
            "usefulness_released": share_above(increases, task.config.usefulness_threshold),
            "residual_variance_last_released": variance,
        }
    )


PARTS: dict[Measure, Callable[[Task], Measurements]] = {
    "usefulness": _usefulness,  # first: it can refuse a text that is too short
    "loss": _loss,
    "weights": _weights,
    "variance": _variance,
    "attention": _attention,
    "geometry": _geometry,
    "experts": _experts,
    "early_exit": _early_exit,
    "causal": _causal,
    "permutation": _permutation,
    "neighbours": _neighbours,
    "jacobian": _jacobian,
    "removal": _removal,
    "causal_maximum": _causal_maximum,
    "trajectories": _trajectories,
    "released_code": _released,
}
