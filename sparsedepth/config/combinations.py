"""Combinations of a decoder's fields that are self-defeating or not implemented, with the reasons.

c is a ModelConfig, whose module imports this one.
"""

import warnings
from collections.abc import Callable
from typing import Any

from sparsedepth.config.section import Mistakes

ON_THE_STREAM: dict[str, Callable[[Any], bool]] = {
    "norm": lambda c: c.n_post_layers > 0,
    "depth_scale": lambda c: c.depth_scale == "after_residual",
    "residual_scalars": lambda c: c.residual_scalars,
    "gpas": lambda c: c.gpas,
}
"""Fields that norm or weight a single residual stream, and when: not possible with several sources."""

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
        lambda c: c.value_residual and c.n_layers == 1,
        "value_residual gives block 1's values to later ones, and n_layers={c.n_layers} has none",
    ),
    (
        lambda c: c.depth_scale == "lns" and c.init == "scaled" and "lns_with_scaled_init" not in c.allow,
        "depth_scale='lns' with init='scaled' damps the residual stream twice and undoes the gain of LNS "
        "(2502.05795, Table 6); use init='normal', or ask for it: allow=['lns_with_scaled_init']",
    ),
    (
        lambda c: c.attention_residuals > 0 and 2 * c.n_layers % c.attention_residuals > 0,
        "attention_residuals={c.attention_residuals} does not divide the branches, 2 x n_layers={c.n_layers}, into "
        "sums of equally many",
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
    "init": (lambda c: c.init not in ("normal", "zero_outputs"), "it sets the size of the outputs itself"),
}
"""Fields for which `parametrisation` mup and completep have no rule: condition and reason."""


def check_combinations(config: Any) -> None:
    """Raises ValueError with all rejected combinations."""
    mistakes = [message.format(c=config) for applies, message in REFUSED if applies(config)]
    fields = type(config).model_fields
    for name, applies in ON_THE_STREAM.items():
        if config.attention_residuals and applies(config):
            mistakes.append(
                f"attention_residuals={config.attention_residuals} with {name}={getattr(config, name)!r}, which norms "
                f"or weighs the one stream after a sum; use {name}={fields[name].default!r}, or attention_residuals=0"
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
    if parallel == "fsdp" and config.optimizer == "muon":
        raise ValueError("optimizer='muon' needs whole matrices, and parallel='fsdp' shards them; use parallel='ddp'")
