"""The role of a field of a run, stated where the field is defined: `Annotated[type, Field(...), Role(...)]`.

All groups of fields are derived from roles: knobs, budgets, what a run's cost depends on, which values are sparser."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import BaseModel

Kind = Literal["knob", "depth", "replicate", "capacity", "data", "numerics", "measure", "record"]
"""knob: a choice whose effect is studied. depth: n_layers, the stratum. replicate: the seed. capacity, data: budgets
and text, between whose values losses are not comparable. numerics: the same computation in another precision. measure:
how a finished run is scored. record: what is recorded, without effect on weights or scores."""


@dataclass(frozen=True, kw_only=True)
class Role:
    kind: Kind = "knob"
    cost_scope: Literal["step", "amount", "nothing"] = "nothing"
    """affects the time and memory of a training step; the number of steps or measured tokens; (almost) neither"""
    sparser_direction: Literal["more", "less"] | None = None
    """whether larger or smaller values are sparser; None: neither"""
    directly_sets: str | None = None
    """the quantity of the chain from sparsity to loss on which the field is an intervention"""
    must_stand_still: tuple[str, ...] = ()
    """quantities that must not change under this intervention; without any, it is no evidence for a link"""
    only_with: tuple[str, object] | None = None
    """(field, value) without which this field has no effect and must be at its default"""
    needs_experts: bool = False
    """no effect in a dense model"""
    derived_if_missing: bool = False
    """by default derived from other sizes"""
    stacked: Literal["equal", "own", "no"] = "equal"
    """in runs that train as one stacked model (`train.stack`): equal in all; may differ; or must be at its default"""
    is_dropout: bool = False
    """above 0, training draws random numbers in every step; they are seeded (`ModelConfig.drops`)"""


KNOB = Role()
CHANGES_STEP = Role(cost_scope="step")
DROPOUT = Role(cost_scope="step", sparser_direction="more", stacked="no", is_dropout=True)
DATA = Role(kind="data")
AMOUNT = Role(kind="measure", cost_scope="amount")
THRESHOLD = Role(kind="measure")
RECORD = Role(kind="record", stacked="own")


@cache
def roles(model: type[BaseModel]) -> Mapping[str, Role]:
    """Field -> role, in the order of the fields."""
    by_field = {}
    for name, field in model.model_fields.items():
        found = [entry for entry in field.metadata if isinstance(entry, Role)]
        assert len(found) == 1, f"{model.__name__}.{name} has {len(found)} roles; it needs one: Annotated[..., Role()]"
        by_field[name] = found[0]
    return by_field


def fields_where(model: type[BaseModel], condition: Callable[[Role], object]) -> tuple[str, ...]:
    return tuple(name for name, role in roles(model).items() if condition(role))
