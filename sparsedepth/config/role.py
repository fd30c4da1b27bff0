"""The role of a field of a run, stated where the field is defined: `Annotated[type, Field(...), Role(...)]`.

All groups of fields are derived from roles: knobs, budgets, what a run's cost depends on, which values are sparser; and
which fast paths may take a run (stack, captured step, compiler, fused formulas, several devices, export): those that a
field which is away from its default does not touch, or computes. A field that does not declare where it acts is closed
to all of them."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from pydantic import BaseModel

from sparsedepth.words.plain_text import commas

Kind = Literal["knob", "depth", "replicate", "capacity", "data", "numerics", "measure", "record"]
"""knob: a choice whose effect is studied. depth: n_layers, the stratum. replicate: the seed. capacity, data: budgets
and text, between whose values losses are not comparable. numerics: the same computation in another precision. measure:
how a finished run is scored. record: what is recorded, without effect on weights or scores."""

Place = Literal[
    "shapes", "stream", "attention", "ffn", "noise", "loss", "batch",
    "start", "optimizer", "schedule", "data", "rounding", "step",
]  # fmt: skip
"""shapes: sizes of weights and sequences. batch: size and number of batches. stream: the forward pass outside the two
branches' modules; attention, ffn: inside them. noise: random numbers in training. loss: terms beside the cross-entropy.
start: initial weights. optimizer: what a step makes of gradients. schedule: its numbers that change by step. data: what
a step reads. rounding: in which order and precision the same is computed. step: how a whole step of one run is taken.
"""

BY_RUN: frozenset[Place] = frozenset({"start", "optimizer", "schedule", "data"})
"""Where each run of a stack acts by itself."""
ALONE: frozenset[Place] = frozenset({"noise", "step"})
"""Where a run acts that trains alone."""
COMPUTED: frozenset[Place] = frozenset({"shapes", "stream", "attention", "ffn"})
"""Where a field acts in what a trained model computes."""


class Anything:
    def __contains__(self, value: object) -> bool:
        return True


ANY = Anything()


@dataclass(frozen=True, kw_only=True)
class Role:
    kind: Kind = "knob"
    acts: frozenset[Place] | None = None
    """where the field acts, if anywhere (`acting`); None: not declared"""
    stacked: tuple[object, ...] = ()
    """the values that a stack computes run by run, though they act where its runs are one (`train.stack`)"""
    fused: Container[object] = ()
    """the values besides the default that the fused formulas of a branch compute (`model.block.FusedBlock`)"""
    exported: bool = False
    """whether `exchange.architecture` maps or folds it, or refuses values with a reason of its own"""
    hashed: bool = True
    """whether it is part of a run's identity (`RunConfig.run_id`)"""
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

    def acting(self, *places: Place) -> "Role":
        """The role of a field that acts there and nowhere else."""
        return replace(self, acts=frozenset(places))

    def touches(self, *places: Place) -> bool:
        return self.acts is None or not self.acts.isdisjoint(places)

    def stacks(self, values: Sequence[object], default: object) -> bool:
        """Whether runs with these values can train as one stacked model."""
        if self.touches(*ALONE):
            return all(value == default for value in values)
        is_own = self.acts is not None and self.acts <= BY_RUN
        return is_own or all(value == values[0] or {value, values[0]} <= {*self.stacked} for value in values)


KNOB = Role()
CHANGES_STEP = Role(cost_scope="step")
AMOUNT = Role(kind="measure", cost_scope="amount").acting()
THRESHOLD = Role(kind="measure").acting()
RECORD = Role(kind="record").acting()
ROUNDS = Role(kind="numerics").acting("rounding")
DATA = Role(kind="data").acting("data")
COMPUTES = Role(cost_scope="step", exported=True)
DROPOUT = replace(COMPUTES, sparser_direction="more")
"""Acts, among others, in `noise`: its random numbers are seeded (`ModelConfig.drops`)."""


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


def changed(config: BaseModel) -> Mapping[str, Role]:
    """The roles of the fields that are away from their default."""
    fields = type(config).model_fields
    return {name: role for name, role in roles(type(config)).items() if getattr(config, name) != fields[name].default}


def undeclared(config: BaseModel) -> set[str]:
    """The fields away from their default that do not declare where they act."""
    return {name for name, role in changed(config).items() if role.acts is None}


def refuse_undeclared(config: BaseModel, path: str) -> None:
    if unknown := undeclared(config):
        raise ValueError(
            f"{path} is closed to a field that does not declare where it acts: {commas(sorted(unknown))}; "
            "declare it in its Role, or leave it out"
        )


def unstackable(*runs: BaseModel) -> set[str]:
    """The fields by which runs cannot train as one model (`Role.stacks`): they act where the runs are one, and differ;
    or they are away from their default, and draw random numbers or do not declare where they act."""
    fields = type(runs[0]).model_fields
    return {
        name
        for name, role in roles(type(runs[0])).items()
        if not role.stacks([getattr(run, name) for run in runs], fields[name].default)
    }


def can_stack(*runs: BaseModel) -> bool:
    return not unstackable(*runs)
