"""Combinations of a decoder's fields that are self-defeating or not implemented, with the reasons.

c is a ModelConfig, whose module imports this one.
"""

import warnings
from collections.abc import Callable
from typing import Any

from sparsedepth.config.mistakes import Mistakes

ON_THE_STREAM: dict[str, Callable[[Any], bool]] = {
    "norm": lambda c: c.n_post_layers > 0,
    "depth_scale": lambda c: c.depth_scale == "after_residual",
    "residual_scalars": lambda c: c.residual_scalars,
    "gpas": lambda c: c.gpas,
}
"""Fields that norm or weight a single residual stream, and when: not possible with several streams or sources."""

REFUSED: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda c: c.n_experts > 0 and c.top_k is None, "n_experts={c.n_experts} needs top_k, from 1 to {c.n_experts}"),
    (
        lambda c: c.n_experts > 0 and c.top_k is not None and c.top_k > c.n_experts,
        "top_k={c.top_k} is more than n_experts={c.n_experts}; choose top_k <= {c.n_experts}",
    ),
    (
        lambda c: c.n_experts > 1 and c.top_k == 1 and c.renormalise_gates,
        "top_k=1 with renormalise_gates=true: the one gate of a token is then always 1, and the loss teaches the "
        "router nothing (2101.03961, eq. 2, keeps its probability); set renormalise_gates=false",
    ),
    (
        lambda c: c.n_experts > 0 and c.activation != "swiglu",
        "activation={c.activation!r} is of the dense feed-forward part, and experts are SwiGLU in every kernel; use "
        "activation='swiglu', or n_experts=0",
    ),
    (
        lambda c: c.n_experts > 0 and c.ffn_dropout > 0,
        "ffn_dropout={c.ffn_dropout:g} is of the dense feed-forward part, and the kernels of experts drop no hidden "
        "units; use residual_dropout, or n_experts=0",
    ),
    (
        lambda c: c.n_experts > 0 and c.n_dense_layers >= c.n_layers,
        "n_dense_layers={c.n_dense_layers} leaves no layer of n_layers={c.n_layers} to the experts; choose a smaller "
        "one, or n_experts=0",
    ),
    (
        lambda c: c.residual_gate == "admin" and c.norm != "post",
        "residual_gate='admin' weighs the stream against a branch before their norm (2004.08249), and norm={c.norm!r} "
        "has none there or weights of its own; use norm='post'",
    ),
    (
        lambda c: c.residual_gate == "admin" and c.residual_scalars,
        "residual_scalars with residual_gate='admin' weighs the stream twice, and the second undoes the variances that "
        "the first was profiled for; choose one of them",
    ),
    (
        lambda c: c.residual_gate == "admin" and c.gpas,
        "gpas with residual_gate='admin' weighs the stream twice before one sum; choose one of them",
    ),
    (
        lambda c: c.value_residual and c.n_layers == c.loops,
        "value_residual gives block 1's values to later ones, and n_layers={c.n_layers} with loops={c.loops} has none",
    ),
    (
        lambda c: c.depth_scale == "lns" and c.init == "scaled" and "lns_with_scaled_init" not in c.allow,
        "depth_scale='lns' with init='scaled' damps the residual stream twice and undoes the gain of LNS "
        "(2502.05795, Table 6); use init='normal', or ask for it: allow=['lns_with_scaled_init']",
    ),
    (
        lambda c: c.n_layers % c.loops > 0,
        "loops={c.loops} does not divide n_layers={c.n_layers}, which counts every pass; choose n_layers = blocks x "
        "loops",
    ),
    (
        lambda c: c.loops > 1 and c.n_dense_layers > 0,
        "n_dense_layers={c.n_dense_layers} with loops={c.loops}: the first layers run again later; use "
        "n_dense_layers=0, or loops=1",
    ),
    (
        lambda c: c.loops > 1 and c.residual_gate == "admin",
        "residual_gate='admin' with loops={c.loops}: each layer's weights are profiled for its own place, and layers "
        "that share weights have several; use loops=1",
    ),
    (
        lambda c: c.attention_residuals > 0 and 2 * c.n_layers % c.attention_residuals > 0,
        "attention_residuals={c.attention_residuals} does not divide the branches, 2 x n_layers={c.n_layers}, into "
        "sums of equally many",
    ),
    (
        lambda c: c.attention_residuals > 0 and c.loops > 1,
        "attention_residuals={c.attention_residuals} with loops={c.loops}: a query is of one layer's place among the "
        "sources, and layers that share weights have several; use loops=1",
    ),
    (
        lambda c: c.attention_residuals > 0 and c.n_streams > 1,
        "attention_residuals={c.attention_residuals} with n_streams={c.n_streams}: either takes the place of the sum; "
        "choose one of them",
    ),
    (
        lambda c: c.n_streams == 1 and c.stream_mixing != "plain",
        "stream_mixing={c.stream_mixing!r} has no meaning with n_streams=1; set n_streams, or leave stream_mixing out",
    ),
    (
        lambda c: c.base_width != type(c).model_fields["base_width"].default and c.parametrisation == "standard",
        "base_width={c.base_width} has no meaning with parametrisation='standard'; set parametrisation='mup' or "
        "'completep', or leave base_width out",
    ),
)
"""(condition, error message) of each rejected combination."""

UNFIT_FOR_PARAMETRISATION: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n_experts": (lambda c: c.n_experts > 0, "its rules are of dense blocks"),
    "tie_embeddings": (lambda c: c.tie_embeddings, "embedding and head follow different rules"),
    "norm": (lambda c: c.n_post_layers > 0, "its rules are of blocks that add to the stream"),
    "attention_residuals": (lambda c: c.attention_residuals > 0, "it has no rule for what attends over sources"),
    "n_streams": (lambda c: c.n_streams > 1, "it has no rule for what mixes streams"),
    "init": (lambda c: c.init not in ("normal", "zero_outputs"), "it sets the size of the outputs itself"),
    "loops": (
        lambda c: c.loops > 1 and c.parametrisation == "completep",
        "its rules are of layers without shared weights",
    ),
}
"""Fields for which `parametrisation` mup and completep have no rule: condition and reason."""


def check_combinations(config: Any) -> None:
    """Raises ValueError with all rejected combinations."""
    mistakes = [message.format(c=config) for applies, message in REFUSED if applies(config)]
    fields = type(config).model_fields
    for streams in ("n_streams", "attention_residuals"):
        value, default = getattr(config, streams), fields[streams].default
        for name in (name for name, applies in ON_THE_STREAM.items() if value != default and applies(config)):
            mistakes.append(
                f"{streams}={value} with {name}={getattr(config, name)!r}, which norms or weighs the one stream "
                f"after a sum; use {name}={fields[name].default!r}, or {streams}={default}"
            )
    unfit = UNFIT_FOR_PARAMETRISATION if config.parametrisation != "standard" else {}
    for name, (applies, reason) in unfit.items():
        if applies(config):
            value, default = getattr(config, name), fields[name].default
            mistakes.append(
                f"parametrisation={config.parametrisation!r} with {name}={value!r}: {reason}; use {name}={default!r}"
            )
    if mistakes:
        raise Mistakes(mistakes)
    if config.depth_scale == "lns" and config.init == "scaled":
        warnings.warn("depth_scale='lns' with init='scaled' defeats LNS (2502.05795, Table 6)", stacklevel=2)


def check_parallel(config: Any, parallel: str) -> None:
    """Raises ValueError for a RunConfig that cannot be trained with this kind of parallelism."""
    if parallel != "fsdp":
        return
    if config.optimizer == "muon":
        raise ValueError("optimizer='muon' needs whole matrices, and parallel='fsdp' shards them; use parallel='ddp'")
    if config.loops > 1:
        raise ValueError(
            f"loops={config.loops} shares weights between layers, and parallel='fsdp' shards each layer's own; use "
            f"parallel='ddp'"
        )
