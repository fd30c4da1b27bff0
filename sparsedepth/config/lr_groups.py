"""Groups of parameters with a learning rate of their own: `lr_of: {residual_scalars: 0.01}`, multiples of lr.

Every parameter of a decoder is of one group: the first whose pattern its name has."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from sparsedepth.config.model import ModelConfig
from sparsedepth.config.section import Positive
from sparsedepth.words.plain_text import commas, did_you_mean


class Group(NamedTuple):
    pattern: str
    """of the names of its parameters"""
    exists: Callable[[ModelConfig], object] = lambda c: True
    """whether a model has any"""


GROUPS: Mapping[str, Group] = {
    "embed": Group(r"^embed\."),
    "head": Group(r"^head\.", lambda c: not c.tie_embeddings),
    "norms": Group(r"norm\.(weight|bias)$"),
    "residual_scalars": Group(r"\.stream_scalar$", lambda c: c.residual_scalars),
    "first_scalars": Group(r"\.first_scalar$", lambda c: c.residual_scalars),
    "value_residual": Group(r"value_scalar$", lambda c: c.value_residual),
    "stream_skips": Group(r"\.skip_scalar$", lambda c: c.stream_skips),
    "gpas": Group(r"\.gpas_scalar$", lambda c: c.gpas),
    "residual_gate": Group(r"\.(attention|ffn)_gate$", lambda c: c.residual_gate != "none"),
    "attention_residuals": Group(r"\.query_scalar$", lambda c: c.attention_residuals),
    "n_streams": Group(r"_streams\.(weight|start_scalar|size_scalar)$", lambda c: c.n_streams > 1),
    "router": Group(r"\.router\.", lambda c: c.n_experts),
    "attention": Group(r"\.attention\."),
    "ffn": Group(r"\.ffn\."),
}
"""residual_scalars: the a_l of the stream, first_scalars: the b_l of x_0; attention, ffn: matrices."""


def group_of(name: str) -> str:
    """The group of a parameter."""
    return next(group for group, (pattern, _) in GROUPS.items() if re.search(pattern, name))


def _pairs(values: Any) -> Any:
    """A mapping, or the pairs that a store has of it, as sorted pairs."""
    pairs = values.items() if isinstance(values, dict) else values
    is_mapping = isinstance(values, dict | list | tuple)
    if not is_mapping or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("must map groups of parameters to multiples of lr, as in {embed: 2, residual_scalars: 0.01}")
    if unknown := [name for name, _ in pairs if name not in GROUPS]:
        raise ValueError(f"{unknown[0]!r} is no group; {did_you_mean(str(unknown[0]), GROUPS, commas(GROUPS))}")
    return tuple(sorted((str(name), factor) for name, factor in pairs))


LrOf = Annotated[
    tuple[tuple[str, Positive], ...],
    BeforeValidator(_pairs, json_schema_input_type=dict[str, Positive]),
    Field(strict=False),
]


def check_groups(config: ModelConfig, lr_of: Mapping[str, float]) -> None:
    """Raises ValueError for a group of which the model has no parameter."""
    if empty := [name for name in lr_of if not GROUPS[name].exists(config)]:
        raise ValueError(f"lr_of.{empty[0]} is of parameters that this model does not have; leave it out")
