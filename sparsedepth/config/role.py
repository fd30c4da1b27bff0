"""What a field of a run is for, said once, where the field is defined: `Annotated[type, Field(...), Role(...)]`.

Everything that treats fields by group asks here: what a run's price depends on, which fields can be knobs, which name
a knob, which settings are sparser, which are budgets, what a card names as another explanation of an effect.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import BaseModel

Kind = Literal["knob", "depth", "replicate", "capacity", "data", "numerics", "measure", "record"]
"""knob: a choice whose effect is asked for. depth: n_layers, the stratum. replicate: the seed. capacity, data: budgets
and text, whose losses do not compare. numerics: the same computation in another precision. measure: how a finished
run is judged. record: what is written down, without effect on the weights or on any score."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """The part that a field plays."""

    kind: Kind = "knob"
    cost_scope: Literal["step", "amount", "nothing"] = "nothing"
    """of a run's cost: the time and memory of one training step; how much is done of it; (almost) neither"""
    sparser_direction: Literal["more", "less"] | None = None
    """which of two values is the sparser one; None: neither"""
    directly_sets: str | None = None
    """the one quantity of the chain from sparsity to loss that the field sets directly: it is an intervention on it"""
    must_stand_still: tuple[str, ...] = ()
    """what else such an intervention could act by, and may not move; without any, it is no evidence for a link"""
    confound: str | None = None
    """what else changes with the knob, and what tells the two apart"""
    label_priority: int | None = None
    """of two fields that move together the one with the smaller number names the knob, None last"""
    only_with: tuple[str, object] | None = None
    """the field, and its value, without which this one has no effect and must stay at its default"""
    needs_experts: bool = False
    """without effect in a dense model"""
    derived_if_missing: bool = False
    """left out, it follows from the other sizes"""
    stacked: Literal["equal", "own", "no"] = "equal"
    """a field of the model, between runs that train as one (`train.stack`): one value for all; each its own; or they
    train alone unless it is at its default"""
    is_matched: bool = False
    """a size that a sweep can solve for, so that its runs match in parameters or FLOPs"""


KNOB = Role()
SHAPE = Role(cost_scope="step")
UNSTACKED_SHAPE = Role(cost_scope="step", stacked="no")
DATA = Role(kind="data")
AMOUNT = Role(kind="measure", cost_scope="amount")
THRESHOLD = Role(kind="measure")
RECORD = Role(kind="record", stacked="own")


@cache
def roles(model: type[BaseModel]) -> Mapping[str, Role]:
    """The role of every field of a config, in the order of its fields."""
    named = {}
    for name, field in model.model_fields.items():
        given = [entry for entry in field.metadata if isinstance(entry, Role)]
        assert len(given) == 1, f"{model.__name__}.{name} has {len(given)} roles; it needs one: Annotated[..., Role()]"
        named[name] = given[0]
    return named


def fields_where(model: type[BaseModel], holds: Callable[[Role], object]) -> tuple[str, ...]:
    """The fields whose role meets a condition."""
    return tuple(name for name, role in roles(model).items() if holds(role))
