"""All measures with their costs, and a record of each number that they make.

A new measure is a `Measure` and a record for each of its numbers; `tests/test_quantities.py` checks that they are
complete. Costs are passes over (blocks, head) for each of measure_tokens tokens; the further tokens of `loss` and of the
fit of `usefulness` are priced in `sparsedepth.plan.estimate`. A fork of the residual stream costs the blocks behind it
(`sparsedepth.probe.fork`): on average L / 2 of L blocks for each layer, two thirds of a pass for each pair of layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, get_args

from sparsedepth import plugins
from sparsedepth.quantities.quantity import OTHER_COLUMNS, Measure, Named, Passes, Quantity, RunSizes, Table, columns_of

SPARSITY = "2603.15389"  # When Does Sparsity Mitigate the Curse of Depth in LLMs
CURSE = "2502.05795"  # The Curse of Depth in Large Language Models
INVERSE = "2602.05970"  # Inverse Depth Scaling From Most Layers Being Similar
EFFICIENT = "2505.13898"  # Do Language Models Use Their Depth Efficiently?
DEEPER = "2403.17887"  # The Unreasonable Ineffectiveness of the Deeper Layers
INFLUENCE = "2403.03853"  # ShortGPT
TRACED = "2202.05262"  # Locating and Editing Factual Associations in GPT
CONTROL = "control, ours"

COSINE = (-1.0, 1.0)
SIZE, SQUARED = "activation", "activation²"  # units of the stream's entries
INCREASE = (-1.0, inf)
"""Range of a relative loss increase: a loss cannot fall below 0."""
LAYERS = ("layers",)
PAIRS = ("pairs",)
TOKENS = ("tokens",)
DIFFICULTY = ("difficulty",)
RUNS_LAYERS = ("runs", "layers")
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""Kinds of a block's matrices with a sparsity of their own."""

EQUAL_RISE = 0.01  # nat/byte: .045 nat/token where a token has 4.5 bytes, about needed_threshold
SAMPLED_FROM = 16
"""Layers from which not all pairs are swapped by default: their number grows with the square."""


def _by_layer(sizes: RunSizes) -> Passes:
    return 1 + (sizes.n_layers - 1) / 2, sizes.n_layers + 1


def _all_pairs(sizes: RunSizes) -> float:
    return sizes.n_layers * (sizes.n_layers - 1) / 2


def pairs_to_swap(n_layers: int, asked: int | None) -> int:
    """As many as asked for, or there are; by default all, and of deep models twice as many as blocks."""
    there = n_layers * (n_layers - 1) // 2
    return min(there, asked or (2 * n_layers if n_layers >= SAMPLED_FROM else there))


def _by_pair(sizes: RunSizes) -> Passes:
    pairs = pairs_to_swap(sizes.n_layers, sizes.permutation_pairs)
    return 1 + 2 / 3 * pairs, pairs + 1


def _by_range(sizes: RunSizes) -> Passes:
    most = _all_pairs(sizes) + sizes.n_layers
    ranges = min(sizes.removal_ranges or most, most)
    return 2 + ranges / 3, ranges + 1


def _jointly(sizes: RunSizes) -> Passes:
    """Upper bound: all blocks are replaced, one after another."""
    passes = _all_pairs(sizes) + 2 * sizes.n_layers
    return passes, passes


def _jacobian(sizes: RunSizes) -> Passes:
    """Without probes: one pass for each dimension at each position, and one for each dimension at all."""
    exact = sizes.stream_width * (sizes.seq_len + 1)
    return 1 + (3 * sizes.jacobian_probes if sizes.jacobian_probes else exact), 0


def _traces(sizes: RunSizes, positions: int) -> Passes:
    forks = positions * (sizes.n_layers + 1)
    return 2 + forks / 2, (2 + forks) / sizes.seq_len  # the head reads one position of a sequence


def _released_code(sizes: RunSizes) -> Passes:
    pairs = _all_pairs(sizes)
    return 2 * _by_layer(sizes)[0] + 2 / 3 * pairs, 2 * sizes.n_layers + pairs


_OURS: tuple[Measure, ...] = (
    USEFULNESS := Measure("usefulness", _by_layer, source=SPARSITY),  # first: it can refuse a text that is too short
    LOSS := Measure("loss", lambda sizes: (0, 0)),
    WEIGHTS := Measure("weights", lambda sizes: (0, 0), source=SPARSITY),
    VARIANCE := Measure("variance", lambda sizes: (1, 0), source=SPARSITY),
    ATTENTION := Measure("attention", lambda sizes: (2, 0), source=CONTROL),
    GEOMETRY := Measure("geometry", lambda sizes: (1, 0), source=EFFICIENT),
    EXPERTS := Measure("experts", lambda sizes: (1 if sizes.n_experts else 0, 0)),
    EARLY_EXIT := Measure("early_exit", lambda sizes: (2, 2 * sizes.n_layers + 2), source=INVERSE),
    CAUSAL := Measure("causal", _by_layer),
    PERMUTATION := Measure("permutation", _by_pair, source=SPARSITY),
    JACOBIAN := Measure("jacobian", _jacobian, on_request=True),
    JACOBIAN_MAP := Measure("jacobian_map", lambda sizes: (sizes.n_layers + 2.0, 0), source=CURSE, on_request=True),
    REMOVAL := Measure("removal", _by_range, source=DEEPER, on_request=True),
    TRAJECTORIES := Measure("trajectories", lambda sizes: (1, 0), on_request=True),
    PARTICIPATION := Measure(
        "participation", lambda sizes: (1, 0), source="Roy & Vetterli 2007, of squares", on_request=True
    ),
    JOINT := Measure("joint", _jointly, source="ours", on_request=True),
    SPANS := Measure("spans", _by_layer, source=INVERSE, on_request=True),
    TRACE := Measure("trace", lambda sizes: _traces(sizes, 1), source=TRACED, on_request=True),
    TRACE_MAP := Measure("trace_map", lambda sizes: _traces(sizes, sizes.seq_len), source=TRACED, on_request=True),
    ACTIVATIONS := Measure("activations", lambda sizes: (4, 0), on_request=True),
    GRADIENTS := Measure("gradients", lambda sizes: (3, 3), source=CURSE, on_request=True),
    LENS := Measure("lens", lambda sizes: (1, sizes.n_layers + 1.0), source=EFFICIENT, on_request=True),
    RELEASED_CODE := Measure("released_code", _released_code, source=SPARSITY, on_request=True),
)

SCORE: Named = {"better": "high", "has_interval": True}
RELATIVE_SCORE: Named = {**SCORE, "is_relative": True}
LOSS_INCREASE: Named = {**RELATIVE_SCORE, "bounds": INCREASE}
BY_HEAD: Named = {
    "tables": ("runs", "layers", "heads"), "has_interval": True, "in_runs": "mean over layers and heads of {}",
}  # fmt: skip

# fmt: off
_RECORDS: tuple[Quantity, ...] = (
    LOSS.number("val_loss", "held-out cross-entropy at seq_len, over the positions that count: all of a text",
        "nat/token", better="low", has_interval=True, stage="loss", label="validation loss"),
    LOSS.number("val_loss_tokens", "held-out positions that count, behind val_loss", "token", type="BIGINT"),
    LOSS.number("val_accuracy", "share of the positions behind val_loss whose most likely token is the target", "share",
        label="validation accuracy", **SCORE),
    LOSS.number("solved_difficulty", "highest difficulty of a task with accuracy >= 0.9 at it and at every lower one; "
        "one below the lowest if that is not solved; NULL for text", "operations or hops", bounds=(-1.0, inf), **SCORE),
    LOSS.number("step", "optimiser steps done when it was measured", "step", tables=DIFFICULTY, type="BIGINT"),
    LOSS.number("difficulty", "operations so far (state tracking), hops, or operations of the expression",
        "operations or hops", tables=DIFFICULTY, type="BIGINT"),
    LOSS.number("positions", "held-out positions of this difficulty that count", "token", tables=DIFFICULTY,
        type="BIGINT"),
    LOSS.number("loss", "their cross-entropy", "nat/token", tables=DIFFICULTY),
    LOSS.number("accuracy", "share of them whose most likely token is the target", "share", tables=DIFFICULTY),
    LOSS.number("val_loss_common", "held-out cross-entropy at eval_seq_len, the shared context", "nat/token",
        better="low", has_interval=True, label="validation loss at one context"),
    LOSS.number("val_bits_per_byte", "val_loss / ln 2 / bytes per token of all held-out text: comparable across "
        "tokenizers", "bit/byte", better="low"),
    VARIANCE.number("residual_variance_last", "residual_variance of layer n_layers, before the final norm", SQUARED,
        better="low", has_interval=True, stage="variance", scale="log", is_ratio=True, rows="residual_variance",
        label="residual variance, last layer"),
    VARIANCE.number("residual_variance_growth", "(v_L / v_1)^(1/(L-1)), a factor per layer; v_l = residual_variance of "
        "layer l", source=CURSE, has_interval=True, is_ratio=True, rows="residual_growth"),
    VARIANCE.number("residual_variance", "variance of x_l over its d_model entries (unbiased), mean over tokens, "
        "before the final norm; also along training, by step", SQUARED, tables=LAYERS, scale="log"),
    VARIANCE.number("residual_growth", "residual_variance of the layer / that of the layer before", tables=LAYERS,
        source=CURSE, scale="log", label="growth of residual variance"),
    VARIANCE.number("attention_variance", "variance over its entries of what attention adds, mean over tokens", SQUARED,
        tables=RUNS_LAYERS, has_interval=True, scale="log"),
    VARIANCE.number("ffn_variance", "variance over its entries of what the feed-forward part adds, mean over tokens",
        SQUARED, tables=RUNS_LAYERS, has_interval=True, scale="log"),
    WEIGHTS.number("weight_sparsity", "share of the blocks' matrix entries with |w| < @", "share", tables=RUNS_LAYERS,
        in_runs="{}", threshold="weight_eps", stage="sparsity", label="weight sparsity\n(share of weights)"),
    WEIGHTS.number("weight_sparsity_rel", "share of matrix entries with |w| < @ x rms of their matrix: blind to mere "
        "shrinkage", "share", tables=RUNS_LAYERS, source=CONTROL, in_runs="{}", threshold="weight_rel_eps"),
    *(WEIGHTS.number(f"weight_sparsity{suffix}_{kind}", f"weight_sparsity{suffix} of the block's {kind} matrices alone, all "
        "experts together", "share", tables=LAYERS, source=source, threshold=threshold)
        for suffix, source, threshold in (("", SPARSITY, "weight_eps"), ("_rel", CONTROL, "weight_rel_eps"))
        for kind in MATRICES),
    ATTENTION.number("attention_sparsity", "share of causal attention weights < @", "share", source=SPARSITY,
        threshold="attention_tau", stage="sparsity", label="attention sparsity\n(share of weights)", **BY_HEAD),
    ATTENTION.number("attention_sparsity_rel", "share of causal attention weights a_ij < @ / i (uniform is 1/i): blind "
        "to mere length", "share", threshold="attention_rel_tau", stage="sparsity",
        label="attention sparsity, relative to uniform\n(share of weights)", **BY_HEAD),
    ATTENTION.number("attention_entropy", "mean over rows of -sum_j a_ij ln a_ij", "nat", **BY_HEAD),
    ATTENTION.number("attention_entropy_rel", "mean over rows i >= 2 of the row's entropy / ln i; 1 = uniform",
        bounds=(0, 1), label="attention entropy / uniform", **BY_HEAD),
    ATTENTION.number("attention_sink", "mean over rows i >= 2 of a_i1, the weight on the first token", "share",
        source="2309.17453", label="attention on the first token", **BY_HEAD),
    USEFULNESS.number("usefulness", "share of blocks whose replacement by an affine map raises the loss by more than "
        "usefulness_threshold; the map is fitted on other tokens than the loss is measured on", "share of layers",
        stage="effectiveness", rows="affine_loss_increase", **RELATIVE_SCORE),
    USEFULNESS.number("usefulness_loss_increase", "mean over blocks of (loss with the block replaced by its affine map "
        "- loss) / loss", source=f"{SPARSITY}, continuous", stage="effectiveness", rows="affine_loss_increase",
        carried_by="layer", label="relative loss increase with a\nblock replaced, mean over blocks", **LOSS_INCREASE),
    *(USEFULNESS.number(f"usefulness_{percent}pct", f"usefulness at a threshold of {percent}%", "share of layers",
        better="high", is_relative=True, rows="affine_loss_increase") for percent in (2, 5, 20)),
    USEFULNESS.number("effective_layers", "usefulness x n_layers", "layer", better="high", is_relative=True,
        rows="affine_loss_increase"),
    USEFULNESS.number("affine_loss_increase", "(loss with the block replaced by its held-out affine map - loss) / loss",
        tables=LAYERS, is_relative=True, bounds=INCREASE, scale="symlog", layer_interval=True,
        label="relative loss increase with the\nblock replaced by an affine map"),
    USEFULNESS.number("affine_loss_added", "loss with the block replaced by its held-out affine map - loss",
        "nat/token", tables=RUNS_LAYERS, source=f"{SPARSITY}, absolute", layer_interval=True, carried_by="layer",
        bounds=(-inf, inf), scale="symlog", label="loss added with the layer\nreplaced by an affine map", **SCORE),
    USEFULNESS.number("affine_accuracy_lost", "accuracy - accuracy with the block replaced by its held-out affine map",
        "share", tables=RUNS_LAYERS, source="ours", layer_interval=True, carried_by="layer", bounds=(-1.0, 1.0),
        label="accuracy lost with the layer\nreplaced by an affine map", **SCORE),
    USEFULNESS.number("needed_layers", "number of blocks whose affine_loss_added is above needed_threshold, and its "
        "95% interval above 0", "layer", source="ours", label="needed layers", **SCORE),
    *(USEFULNESS.number(f"needed_layers_{mnat}mnat", f"needed_layers at a threshold of {mnat / 1000:g} nat/token", "layer",
        source="ours", better="high") for mnat in (10, 50, 200)),
    USEFULNESS.number("needed_equal_rise", f"number of blocks whose affine_loss_added is above {EQUAL_RISE} nat/byte x bytes "
        "per token, alike for all tokenizers, and its 95% interval above 0", "layer", source="ours",
        label="layers needed at an equal rise", **SCORE),
    JOINT.number("jointly_needed_layers", "blocks left after replacing the cheapest by affine maps, one after another, "
        "while all replacements together add at most needed_threshold", "layer", **SCORE),
    SPANS.number("span_loss_added", "loss with blocks l - 1 and l replaced by one affine map, fitted from x_(l-2) on "
        "other tokens, - loss, layers 2 to n_layers", "nat/token", tables=RUNS_LAYERS, bounds=(-inf, inf), scale="symlog",
        label="loss added with two layers\nreplaced by one affine map", **SCORE),
    TRACE.number("trace_restored", "trace_map of the last position: from which layer on the state there holds what the "
        "answer needs", "share", tables=RUNS_LAYERS, bounds=(-inf, inf), has_interval=True,
        in_runs="mean over layers, without the last, of the {}"),
    TRACE_MAP.number("trace_map", "(loss with noise of 3 sd on x_0 - loss if x_l at this position is clean too) / (loss "
        "with noise - loss), of the last position, layers 0 to n_layers; the position, from 1, ends the metric's name",
        "share", tables=LAYERS, bounds=(-inf, inf), label="causal trace: share restored"),
    CAUSAL.number("causal_score", "mean over pairs s < l of E_tokens||u'_l - u_l|| / E_tokens||u_l||; u_l = x_l - "
        "x_(l-1), u' with block s skipped", source=f"{SPARSITY} after {EFFICIENT}", stage="effectiveness",
        rows="causal_effect", carried_by="first", **SCORE),
    CAUSAL.number("causal_effect", "mean over later blocks l of the causal effect of skipping this block",
        tables=LAYERS, source=SPARSITY, label="causal effect on later layers"),
    CAUSAL.number("causal_effect", "effect of skipping block `layer` on the update of the later block `other_layer`",
        tables=PAIRS, source=SPARSITY, scale="log"),
    CAUSAL.number("skip_loss_increase", "(loss with the block left out - loss) / loss", tables=RUNS_LAYERS,
        source=f"identity {CONTROL}", better="high", is_relative=True, carried_by="layer", bounds=INCREASE,
        scale="symlog", label="relative loss increase\nwith the layer left out"),
    CAUSAL.number("usefulness_identity", "share of blocks that cannot be left out: that raises the loss by more than "
        "usefulness_threshold", "share of layers", source=f"identity {CONTROL}", better="high", is_relative=True,
        rows="skip_loss_increase"),
    CAUSAL.number("score_tokens", "held-out tokens behind the causal, permutation and usefulness scores", "token",
        type="BIGINT"),
    PERMUTATION.number("permutation_score", "mean over pairs of |loss with the two blocks swapped - loss| / loss",
        stage="effectiveness", rows="permutation_effect", carried_by="both", **RELATIVE_SCORE),
    PERMUTATION.number("permutation_swaps", "pairs behind permutation_score: scores of unlike numbers differ in their "
        "interval alone", "pair", type="BIGINT"),
    PERMUTATION.number("permutation_effect", "|loss with blocks `layer` and `other_layer` swapped - loss| / loss",
        tables=PAIRS, is_relative=True, scale="symlog", label="permutation: relative loss increase"),
    *(JACOBIAN.number(name, f"{formula} of the block{more}", tables=RUNS_LAYERS, source=source, has_error=True, label=label,
        in_runs="mean over blocks of {}; by random probes; NULL where their noise makes a square negative",
        carried_by="layer", **SCORE)
        for name, formula, more, source, label in (
            ("jacobian_deviation", "sqrt(E_t ||J_tt - I||_F^2)", ", J_tt = d x_l[t] / d x_(l-1)[t]", SPARSITY,
             "Jacobian's deviation\nfrom identity"),
            ("jacobian_deviation_averaged", "||E_t J_tt - I||_F", ": what the tokens' Jacobians have in common", SPARSITY, ""),
            ("jacobian_deviation_released", "||E_s sum_t J_ts - I||_F / d_model", "", f"{SPARSITY}, released code",
             "Jacobian deviation, released code"))),
    JACOBIAN_MAP.number("jacobian_map", "sqrt(E_t ||J_t - I||_F^2), J_t = d x_b[t] / d x_a[t], a = `layer` < b = "
        "`other_layer`, from layer 0 on; by random probes; NULL where their noise makes the square negative", tables=PAIRS,
        scale="log", label="Jacobian map: deviation from identity"),
    EXPERTS.number("effective_experts", "exp(-sum_e f_e ln f_e), f_e = expert e's share of the choices", "expert",
        tables=RUNS_LAYERS, source="2101.03961 (load)", has_interval=True),
    EXPERTS.number("expert_load_variation", "sd_e(f_e) / mean_e(f_e); 0 = balanced", tables=RUNS_LAYERS,
        source="1701.06538", has_interval=True, label="variation of expert load"),
    EXPERTS.number("router_entropy", "mean over tokens of the entropy of the router's softmax over all experts", "nat",
        tables=RUNS_LAYERS, source="ours", has_interval=True),
    GEOMETRY.number("state_norm", "E ||x_l||, E over tokens; layer 0 is the embedding's output", SIZE, tables=LAYERS,
        scale="log"),
    GEOMETRY.number("state_cosine", "E cos(x_l, x_(l-1))", tables=LAYERS, bounds=COSINE),
    GEOMETRY.number("update_norm", "E ||u_l||, u_l = x_l - x_(l-1)", SIZE, tables=LAYERS, scale="log"),
    GEOMETRY.number("update_ratio", "E ||u_l|| / ||x_(l-1)||, u_l = x_l - x_(l-1), E over tokens", tables=RUNS_LAYERS,
        has_interval=True, scale="log"),
    GEOMETRY.number("update_cosine", "E cos(u_l, x_(l-1))", tables=RUNS_LAYERS, has_interval=True, bounds=COSINE),
    *(GEOMETRY.number(f"{part}_{what}", formula.format(added=added, before=before), unit, tables=LAYERS, bounds=bounds,
        scale=scale)
        for part, added, before, meaning in (
            ("attention", "a_l", "x_(l-1)", "a_l = what attention adds"),
            ("ffn", "f_l", "x_(l-1) + a_l", "f_l = what the feed-forward part adds"))
        for what, formula, unit, bounds, scale in (
            ("norm", f"E ||{{added}}||, {meaning}", SIZE, None, "log"),
            ("ratio", "E ||{added}|| / ||{before}||", "1", None, "log"),
            ("cosine", "E cos({added}, {before})", "1", COSINE, "linear"))),
    GEOMETRY.number("block_influence", "1 - E cos(x_l, x_(l-1))", tables=RUNS_LAYERS, source=INFLUENCE,
        carried_by="layer", bounds=(0, 2), **SCORE),
    GEOMETRY.number("angular_distance", "E arccos cos(x_(l-1), x_l); / pi as published", "rad", tables=RUNS_LAYERS,
        source=DEEPER, carried_by="layer", **SCORE),
    GEOMETRY.number("angular_distance", "E arccos cos(x_a, x_b), a = `layer` < b = `other_layer`, from layer 0 on",
        "rad", tables=PAIRS, source=DEEPER),
    GEOMETRY.number("angular_distance_last_token", "mean over layers of angular_distance at the last token of each "
        "sequence, as published", "rad", source=DEEPER, **SCORE),
    GEOMETRY.number("angular_distance_last_token", "angular_distance at the last token of each sequence, as published",
        "rad", tables=PAIRS, source=DEEPER, label="angular distance, last token"),
    GEOMETRY.number("angular_distance_middle", "mean of angular_distance without the first and the last layer", "rad",
        source=INVERSE, has_interval=True),
    GEOMETRY.number("update_angle", "E arccos cos(u_l, u_(l+1)), layers 1 to n_layers - 1", "rad", tables=RUNS_LAYERS,
        source=INVERSE, has_interval=True),
    GEOMETRY.number("angle_to_end", "E arccos cos(x_l, x_L), before the final norm, layers 0 to n_layers - 1", "rad",
        tables=RUNS_LAYERS, source=INVERSE, has_interval=True),
    EARLY_EXIT.number("lens_loss_increase", "mean over l < n_layers of (lens_loss of layer l - loss) / loss",
        source=EFFICIENT, rows="lens_loss", **LOSS_INCREASE),
    EARLY_EXIT.number("lens_loss", "loss of final norm and head on x_l, layers 0 to n_layers", "nat/token",
        tables=LAYERS, source=EFFICIENT),
    EARLY_EXIT.number("early_exit_loss_increase", "mean over l < n_layers - 1 of (early_exit_loss - loss) / loss",
        rows="early_exit_loss", **LOSS_INCREASE),
    EARLY_EXIT.number("early_exit_loss", "loss of x_l sent through the last block, layers 0 to n_layers - 1",
        "nat/token", tables=LAYERS),
    REMOVAL.number("removal_score", "mean over blocks of (loss without the block - loss) / loss", source=CURSE,
        rows="removal_drop", **LOSS_INCREASE),
    REMOVAL.number("removal_range_score", "the same over contiguous ranges of two blocks and more", **LOSS_INCREASE),
    REMOVAL.number("removal_drop", "(loss without blocks `layer` to `other_layer`, both included - loss) / loss",
        tables=PAIRS, bounds=INCREASE, scale="symlog", label="removal: relative loss increase"),
    REMOVAL.number("removal_accuracy_lost", "mean over blocks of accuracy - accuracy without the block", "share",
        source=CURSE, bounds=(-1.0, 1.0), rows="removal_accuracy_lost", label="accuracy lost without a layer", **SCORE),
    REMOVAL.number("removal_accuracy_lost", "accuracy - accuracy without blocks `layer` to `other_layer`, both "
        "included", "share", tables=PAIRS, bounds=(-1.0, 1.0), label="removal: accuracy lost"),
    REMOVAL.number("removal_cosine_correlation", "Spearman's rank correlation over blocks of removal_drop of the block "
        "alone with 1 - E cos(x_l, x_(l-1)): how well the cosine predicts the cost of removal",
        source="ours; 2605.14075", bounds=COSINE),
    LENS.number("lens_kl", "KL divergence of the prediction read off x_l (final norm and head) from the model's own, E "
        "sum_v p_l ln(p_l / p), layers 0 to n_layers", "nat", tables=RUNS_LAYERS, has_interval=True,
        in_runs="mean over layers, without the last, of the {}"),
    LENS.number("lens_overlap", "share of the 5 most likely tokens that the prediction read off x_l has in common with "
        "the model's own, layers 0 to n_layers", "share", tables=RUNS_LAYERS, has_interval=True,
        in_runs="mean over layers, without the last, of the {}"),
    TRAJECTORIES.number("early_stop_share", "share of tokens whose angles are shaped as early_stop_ideal", "share",
        source=f"shares {INVERSE}", has_interval=True),
    TRAJECTORIES.number("even_share", "share of tokens whose angles are shaped as even_ideal", "share",
        source=f"shares {INVERSE}", has_interval=True),
    *(TRAJECTORIES.number(f"trajectory_pc{i}_share", "share of the variance of the tokens' angles that "
        f"trajectory_pc{i} holds", "share", source=INVERSE) for i in (1, 2)),
    TRAJECTORIES.number("trajectory_mean", "mean over tokens of theta(x_(l-1), x_l), the origin of the components",
        "rad", tables=LAYERS, source=INVERSE),
    *(TRAJECTORIES.number(f"trajectory_pc{i}", f"{which} principal component of the tokens' angles, a unit vector over "
        "layers", tables=LAYERS, source=INVERSE, bounds=COSINE) for i, which in ((1, "first"), (2, "second"))),
    TRAJECTORIES.number("early_stop_ideal", "pi/2, the mean middle angle in the first 6/22 of the middle layers, 0, "
        "pi/2", "rad", tables=LAYERS, source=INVERSE),
    TRAJECTORIES.number("even_ideal", "pi/2, the mean middle angle in every middle layer, pi/2", "rad", tables=LAYERS,
        source=INVERSE),
    *(TRAJECTORIES.number(name, formula, unit, tables=TOKENS, type="BIGINT") for name, formula, unit in (
        ("step", "optimiser steps done when it was measured", "step"),
        ("sequence", "held-out sequence, from 0", ""),
        ("position", "position in the sequence, from 0", "token"),
        ("token_id", "the token", ""),
        ("document_position", "tokens before it in its document; NULL where that is not known", "token"))),
    TRAJECTORIES.number("nearest", "'early stop', 'even' or 'neither': the ideal whose shape its angles have", "",
        tables=TOKENS, type="VARCHAR"),
    *(TRAJECTORIES.number(name, formula, "rad", tables=TOKENS, bounds=bounds) for name, formula, bounds in (
        ("to_early_stop", "angle of its middle angles, as a vector, with those of early_stop_ideal", None),
        ("to_even", "angle of its middle angles, as a vector, with those of even_ideal", None),
        ("pc1", "(its angles - trajectory_mean) projected on trajectory_pc1", (-inf, inf)),
        ("pc2", "(its angles - trajectory_mean) projected on trajectory_pc2", (-inf, inf)))),
    PARTICIPATION.number("participation_ratio", "(tr C)^2 / tr C^2, C = covariance over tokens of the entries of x_l: "
        "among how many directions the stream spreads its variance", tables=RUNS_LAYERS, bounds=(1.0, inf),
        source="Litwin-Kumar et al. 2017; 1906.00443"),
    PARTICIPATION.number("effective_rank", "exp of the entropy of the shares that the eigenvalues of C have of its "
        "trace, C = covariance over tokens of the entries of x_l", tables=RUNS_LAYERS, bounds=(1.0, inf)),
    PARTICIPATION.number("update_rank", "effective_rank of the blocks' updates u_l", tables=RUNS_LAYERS, bounds=(1.0, inf)),
    ACTIVATIONS.number("activation_zeros", "share of the hidden units h of the dense feed-forward part that are "
        "exactly 0", "share", tables=RUNS_LAYERS, source="2210.06313"),
    ACTIVATIONS.number("activation_sparsity", "share of hidden units with |h| < 0.1 x rms of their layer, zeros "
        "included", "share", tables=RUNS_LAYERS, source=f"{SPARSITY}, section 3.2.1; relative {CONTROL}",
        stage="sparsity", label="activation sparsity\n(share of hidden units)"),
    ACTIVATIONS.number("activation_units", "E (sum h^2)^2 / (F sum h^4) of a token's F hidden units: the share that "
        "carries its energy", "share", tables=RUNS_LAYERS, source="ours, as participation_ratio"),
    GRADIENTS.number("gradient_gain", "||d loss / d x_0|| / ||d loss / d x_L||, over all tokens: the gradient end to "
        "end", has_interval=True, is_ratio=True, scale="log"),
    GRADIENTS.number("stream_gradient", "||d loss / d x_l|| / ||d loss / d x_L||, over all tokens", tables=LAYERS,
        scale="log"),
    # What the released code of 2603.15389 computes under the names of the scores: `sparsedepth.measure.released_code`
    RELEASED_CODE.number("causal_score_released", "causal_score with every update after the skipped block shifted by "
        "one layer"),
    RELEASED_CODE.number("permutation_score_released", "permutation_score with pairs weighted by 0.9^i and divided by "
        "their count"),
    RELEASED_CODE.number("usefulness_released", "usefulness with the map transposed, fitted and scored on the same "
        "tokens", "share of layers"),
    RELEASED_CODE.number("residual_variance_last_released", "variance of the state after the final norm", SQUARED),
)
# fmt: on


_EXAMPLE: Any = SimpleNamespace(
    n_layers=2, seq_len=8, stream_width=8, n_experts=0, permutation_pairs=None, removal_ranges=None, jacobian_probes=1
)


def _check(plugin: plugins.Plugin) -> None:
    """Raises ValueError for a measure of a plugin whose records are wrong."""
    if (measure := plugin.get("MEASURE")) is None:
        return
    own = plugin.get("QUANTITIES", ())
    if not isinstance(measure, Measure):
        raise ValueError("its MEASURE is no Measure of sparsedepth.quantities.quantity")
    if not isinstance(own, Sequence) or not own or not all(isinstance(each, Quantity) for each in own):
        raise ValueError("its QUANTITIES are no list of Quantity (sparsedepth.quantities.quantity)")
    if wrong := [name for name in (measure.name, *(each.name for each in own)) if not plugins.is_name(name)]:
        raise ValueError(f"{wrong[0]!r} must be a name such as my_measure: small letters, digits and _")
    passes = measure.passes(_EXAMPLE)
    if len(passes) != 2 or not all(isinstance(number, int | float) and number >= 0 for number in passes):
        raise ValueError(f"its measure costs {passes!r} passes; two numbers are needed, over blocks and head")
    for each in own:
        if not each.tables or not {*each.tables} <= {*get_args(Table)}:
            raise ValueError(f"{each.name} has tables {each.tables!r}; choose from {', '.join(get_args(Table))}")
        _ = each.axis_label  # raises for a field of another type
    if twice := [
        name for (name, _), n in Counter((column.name, column.view) for column in columns_of(own)).items() if n > 1
    ]:
        raise ValueError(f"its QUANTITIES have {twice[0]} twice; leave one out")


def _with_plugins() -> tuple[tuple[plugins.Plugin, ...], list[Measure], list[Quantity]]:
    """Ours, then theirs: on request, since the default of `measures` is part of a run's hash. Raises ValueError for a
    name that is taken; an installed one with such a name is left out."""
    kept, measures, records = list[plugins.Plugin](), [*_OURS], [*_RECORDS]
    for plugin in plugins.load(_check):
        measure = plugin.get("MEASURE")
        own = [replace(each, measure=measure.name) for each in plugin.get("QUANTITIES")] if measure else []
        taken = {*OTHER_COLUMNS.split(), *(column.name for column in columns_of(records))}
        if measure:
            if not plugins.is_accepted(plugin, "measure", [measure.name], [each.name for each in measures]):
                continue
            if not plugins.is_accepted(plugin, "quantity", [column.name for column in columns_of(own)], taken):
                continue
            measures.append(replace(measure, on_request=True))
            records += own
        kept.append(plugin)
    return tuple(kept), measures, records


PLUGINS, _measures, _records = _with_plugins()
"""Loaded here, so that ours is ready when their modules import it."""
MEASURES: tuple[Measure, ...] = tuple(_measures)
_DEPTH_COLUMNS = (column for score in _records if score.carried_by for column in score.depth_columns())
MEASURED = (*_records, *_DEPTH_COLUMNS)
