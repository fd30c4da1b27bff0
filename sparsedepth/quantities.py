"""Every measured quantity by name: what it is, its unit, its formula and where it comes from.

The one place that names results. A name here is the key of a record in `measure`, the column or the `metric` value in
the store, and the label in a plot. Layers count from 1 to n_layers; layer 0 is the embedding's output.
Thresholded metrics of the layer and head tables carry their threshold: `weight_sparsity@0.001`,
`attention_sparsity_rel@0.1`; the summary column without one is at the first threshold of the config field.
"""

from dataclasses import dataclass
from typing import Literal

from sparsedepth.definitions import (
    ATTENTION,
    DEPTH_LAYERS,
    DEPTH_PAIRS,
    DEPTH_SCORES,
    EXPERTS,
    JACOBIAN,
    RELEASED,
    TRAJECTORY_LAYERS,
    TRAJECTORY_SCORES,
    TRAJECTORY_TOKENS,
    USEFULNESS,
    A,
    B,
    Better,
)

Table = Literal["runs", "curves", "layers", "heads", "pairs", "tokens"]
SqlType = Literal["DOUBLE", "BIGINT", "VARCHAR"]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    name: str
    table: Table
    unit: str
    meaning: str
    """Definition, with the formula in the symbols of the decoder: x_l is the residual stream after block l."""
    source: str = ""
    better: Better = ""
    """Which direction `best --by` sorts; empty where neither is better."""
    sql_type: SqlType = "DOUBLE"


def _runs(
    name: str, unit: str, meaning: str, source: str = "", better: Better = "", sql: SqlType = "DOUBLE"
) -> Quantity:
    return Quantity(name=name, table="runs", unit=unit, meaning=meaning, source=source, better=better, sql_type=sql)


def _with_interval(quantity: Quantity) -> tuple[Quantity, ...]:
    ends = (("lo", "lower"), ("hi", "upper"))
    return (
        quantity,
        *(
            _runs(f"{quantity.name}_{end}", quantity.unit, f"{word} end of the 95% bootstrap interval (over sequences)")
            for end, word in ends
        ),
    )


RUNS: tuple[Quantity, ...] = (
    _runs("outcome", "", "ok, or diverged (see diverged_step and diverged_cause)", sql="VARCHAR"),
    _runs("diverged_step", "step", "step at which the run was found to have diverged", sql="BIGINT"),
    _runs("diverged_cause", "", "why it counts as diverged", sql="VARCHAR"),
    _runs(
        "params_total", "parameters", "all parameters, embeddings and every expert included", better="low", sql="BIGINT"
    ),
    _runs(
        "params_active", "parameters", "parameters that touch one token: top_k of n_experts", better="low", sql="BIGINT"
    ),
    _runs("flops_per_token", "FLOP", "forward pass: 2 per multiply-add of every matrix product, full T x T attention"),
    _runs("train_flops", "FLOP", "3 x flops_per_token x tokens_trained (backward = 2 x forward)", better="low"),
    _runs("steps", "step", "optimiser steps taken", sql="BIGINT"),
    _runs("tokens_trained", "token", "tokens trained on", sql="BIGINT"),
    _runs("train_loss", "nat/token", "mean training cross-entropy over the last 10% of the logged steps", better="low"),
    *_with_interval(
        _runs("val_loss", "nat/token", "held-out cross-entropy at seq_len, all positions", better="low"),
    ),
    _runs("val_loss_tokens", "token", "held-out tokens behind val_loss", sql="BIGINT"),
    *_with_interval(
        _runs(
            "val_loss_common", "nat/token", "held-out cross-entropy at eval_seq_len, the shared context", better="low"
        ),
    ),
    _runs(
        "val_bits_per_byte",
        "bit/byte",
        "val_loss / ln 2 / bytes per token of all held-out text: comparable across tokenizers",
        better="low",
    ),
    *_with_interval(
        _runs("residual_variance_last", "1", "residual_variance of layer n_layers, before the final norm", A, "low"),
    ),
    *_with_interval(
        _runs("residual_variance_growth", "1/layer", "(v_L / v_1)^(1/(L-1)), v_l = residual_variance of layer l", B),
    ),
    _runs("weight_sparsity", "share", "share of the blocks' matrix entries with |w| < weight_eps[0]", A),
    _runs(
        "weight_sparsity_rel",
        "share",
        "the same with |w| < weight_rel_eps[0] x rms(matrix): blind to mere shrinkage",
        "control, ours",
    ),
    *_with_interval(
        _runs(
            "attention_sparsity",
            "share",
            "share of causal attention weights < attention_tau[0], over layers and heads",
            A,
        ),
    ),
    *_with_interval(
        _runs(
            "attention_sparsity_rel",
            "share",
            "share of causal attention weights a_ij < attention_rel_tau[0] / i (uniform is 1/i): blind to mere length",
            "control, ours",
        ),
    ),
    *_with_interval(
        _runs(
            "causal_score",
            "1",
            "mean over pairs s < l of E_tokens||u'_l - u_l|| / E_tokens||u_l||; u_l = x_l - x_(l-1), u' with block s skipped",
            f"{A} after 2505.13898",
            "high",
        ),
    ),
    *_with_interval(
        _runs(
            "permutation_score", "1", "mean over pairs of |loss with the two blocks swapped - loss| / loss", A, "high"
        ),
    ),
    *_with_interval(
        _runs(
            "usefulness",
            "share of layers",
            "share of blocks whose replacement by an affine map raises the loss by more than usefulness_threshold; "
            "the map is fitted on other tokens than the loss is measured on",
            A,
            "high",
        ),
    ),
    *_with_interval(
        _runs(
            "usefulness_loss_increase",
            "1",
            "mean over blocks of (loss with the block replaced by its affine map - loss) / loss",
            f"{A}, continuous",
            "high",
        ),
    ),
    _runs("effective_layers", "layer", "usefulness x n_layers", A, "high"),
    _runs(
        "score_tokens", "token", "held-out tokens behind the causal, permutation and usefulness scores", sql="BIGINT"
    ),
    *(
        end
        for name, meaning, source in JACOBIAN
        for end in (
            *_with_interval(_runs(name, "1", f"mean over blocks of {meaning}; by random probes", source, "high")),
            _runs(f"{name}_se", "1", f"standard error of {name} over the random probes"),
        )
    ),
    *(
        end
        for name, unit, meaning, source in (*ATTENTION, *EXPERTS)
        for end in _with_interval(_runs(name, unit, f"mean over layers (and heads) of: {meaning}", source))
    ),
    *(
        end
        for name, unit, meaning, source, better in DEPTH_SCORES
        for end in _with_interval(_runs(name, unit, meaning, source, better))
    ),
    *(end for score in TRAJECTORY_SCORES[:2] for end in _with_interval(_runs(*score))),
    *(_runs(*score) for score in (*TRAJECTORY_SCORES[2:], *USEFULNESS, *RELEASED)),
)

CURVES: tuple[Quantity, ...] = (
    Quantity(name="step", table="curves", unit="step", meaning="optimiser steps done", sql_type="BIGINT"),
    Quantity(name="tokens", table="curves", unit="token", meaning="tokens trained on so far", sql_type="BIGINT"),
    Quantity(
        name="train_loss",
        table="curves",
        unit="nat/token",
        meaning="cross-entropy of the step's batch, without the router losses",
    ),
    Quantity(
        name="balance_loss",
        table="curves",
        unit="1",
        meaning="load-balance loss, mean over layers; 1 = balanced; NULL without experts",
    ),
    Quantity(name="lr", table="curves", unit="1", meaning="learning rate of the step"),
    Quantity(name="grad_norm", table="curves", unit="1", meaning="global gradient norm before clipping"),
    Quantity(name="tokens_per_second", table="curves", unit="token/s", meaning="training speed since the last row"),
)

LAYERS: tuple[Quantity, ...] = (
    Quantity(
        name="residual_variance",
        table="layers",
        unit="1",
        meaning="variance of x_l over its d_model entries (unbiased), mean over tokens, before the final norm; also along training, by step",
        source=A,
    ),
    Quantity(
        name="weight_sparsity",
        table="layers",
        unit="share",
        meaning="share of the block's matrix entries with |w| < @",
        source=A,
    ),
    Quantity(
        name="weight_sparsity_rel",
        table="layers",
        unit="share",
        meaning="share with |w| < @ x rms of its matrix",
        source="control, ours",
    ),
    Quantity(
        name="attention_sparsity",
        table="layers",
        unit="share",
        meaning="share of causal attention weights < @, mean over heads",
        source=A,
    ),
    Quantity(
        name="attention_sparsity_rel",
        table="layers",
        unit="share",
        meaning="share of causal attention weights < @ / i in row i",
        source="control, ours",
    ),
    Quantity(
        name="causal_effect",
        table="layers",
        unit="1",
        meaning="mean over later blocks l of the causal effect of skipping this block",
        source=A,
    ),
    Quantity(
        name="affine_loss_increase",
        table="layers",
        unit="1",
        meaning="(loss with the block replaced by its held-out affine map - loss) / loss",
        source=A,
    ),
    Quantity(
        name="skip_loss_increase",
        table="layers",
        unit="1",
        meaning="(loss with the block left out - loss) / loss",
        source="identity control, ours",
    ),
    *(
        Quantity(name=name, table="layers", unit="1", meaning=meaning, source=source)
        for name, meaning, source in JACOBIAN
    ),
    *(
        Quantity(
            name=f"jacobian_deviation{form}_se",
            table="layers",
            unit="1",
            meaning=f"standard error of jacobian_deviation{form} over the random probes; 0 where exact",
        )
        for form in ("", "_averaged", "_released")
    ),
    *(
        Quantity(
            name=f"weight_sparsity{rel}_{kind}",
            table="layers",
            unit="share",
            meaning=f"weight_sparsity{rel} of the block's {kind} matrices alone, all experts together",
            source=source,
        )
        for rel, source in (("", A), ("_rel", "control, ours"))
        for kind in ("query", "key", "value", "output", "gate", "up", "down")
    ),
    *(
        Quantity(name=name, table="layers", unit=unit, meaning=meaning, source=source)
        for name, unit, meaning, source in (*ATTENTION, *EXPERTS)
    ),
    *(
        Quantity(name=name, table="layers", unit=unit, meaning=meaning, source=source)
        for name, unit, meaning, source in (*DEPTH_LAYERS, *TRAJECTORY_LAYERS)
    ),
)

HEADS: tuple[Quantity, ...] = (
    Quantity(
        name="attention_sparsity",
        table="heads",
        unit="share",
        meaning="share of the head's causal attention weights < @",
        source=A,
    ),
    Quantity(
        name="attention_sparsity_rel",
        table="heads",
        unit="share",
        meaning="share of the head's causal attention weights < @ / i in row i",
        source="control, ours",
    ),
    *(
        Quantity(name=name, table="heads", unit=unit, meaning=f"{meaning}, of the head", source=source)
        for name, unit, meaning, source in ATTENTION
    ),
)

PAIRS: tuple[Quantity, ...] = (
    Quantity(
        name="causal_effect",
        table="pairs",
        unit="1",
        meaning="effect of skipping block `layer` on the update of the later block `other_layer`",
        source=A,
    ),
    Quantity(
        name="permutation_effect",
        table="pairs",
        unit="1",
        meaning="|loss with blocks `layer` and `other_layer` swapped - loss| / loss",
        source=A,
    ),
    *(
        Quantity(name=name, table="pairs", unit=unit, meaning=meaning, source=source)
        for name, unit, meaning, source in DEPTH_PAIRS
    ),
)

TOKENS: tuple[Quantity, ...] = tuple(
    Quantity(name=name, table="tokens", unit=unit, meaning=meaning, sql_type=sql_type)
    for name, unit, meaning, sql_type in TRAJECTORY_TOKENS
)

ALL: tuple[Quantity, ...] = (*RUNS, *CURVES, *LAYERS, *HEADS, *PAIRS, *TOKENS)


MEASURED_BY = (
    ("causal_score_released", "released"),
    ("permutation_score_released", "released"),
    ("usefulness_released", "released"),
    ("residual_variance_last_released", "released"),
    ("val_", "loss"),
    ("weight_sparsity", "weights"),
    ("residual_variance", "variance"),
    ("attention_variance", "variance"),
    ("ffn_variance", "variance"),
    ("attention_", "attention"),
    ("causal_maximum", "causal_maximum"),
    ("causal_score", "causal"),
    ("usefulness_identity", "causal"),
    ("score_tokens", "causal"),
    ("usefulness", "usefulness"),
    ("effective_layers", "usefulness"),
    ("permutation_neighbours", "neighbours"),
    ("permutation_score", "permutation"),
    ("jacobian_", "jacobian"),
    ("removal_", "removal"),
    ("lens_loss", "early_exit"),
    ("early_exit_loss", "early_exit"),
    ("early_stop_share", "trajectories"),
    ("even_share", "trajectories"),
    ("trajectory_", "trajectories"),
    ("effective_experts", "experts"),
    ("expert_load", "experts"),
    ("router_entropy", "experts"),
    ("update_", "geometry"),
    ("block_influence", "geometry"),
    ("ang", "geometry"),
)
"""How the name of a summary column begins, and the group of `measures` that fills it; the first that fits counts."""


def measured_by(name: str) -> str | None:
    """The group of `measures` behind a column of `runs`; None for what training itself leaves."""
    return next((measure for prefix, measure in MEASURED_BY if name.startswith(prefix)), None)


def run_quantity(name: str) -> Quantity | None:
    """The quantity behind a summary column of `runs`, or None."""
    return next((quantity for quantity in RUNS if quantity.name == name), None)
