"""A toy sweep: teacher-student networks that distinguish regimes of depth (2602.05970, section 5).

    groups   = variants x n_layers
    students = rho x teacher_seed x temperature x seed          (of one group, trained as one batched model)

A *group* is all students of one depth. Fields with a list are axes of its students; the column of that name holds a
student's value. Teachers, initial weights and inputs are functions of their seeds, so students of all groups learn the
same teachers from the same inputs.
"""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sparsedepth.config.load import build
from sparsedepth.config.mistakes import check
from sparsedepth.config.section import Count, Fraction, Positive, Section, Sentence
from sparsedepth.files import digest

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
DEFAULTS_VERSION = 1
"""Increased when a default changes meaning; new fields keep old ids valid."""
AXES = ("rho", "teacher_seed", "temperature", "seed")
"""The fields with a list, in the order that numbers students; the last varies fastest."""


class ToyConfig(Section):
    """One group: all students of one depth. Unknown keys, wrong types and impossible pairs raise ValueError."""

    n_layers: Annotated[Count, Field(description="steps of the student; a midpoint step has two blocks")] = 6
    d_model: Annotated[Count, Field(description="width of the residual stream (m)")] = 32
    d_ff: Annotated[Count | None, Field(description="width of the ReLU^2 layer; default 4 d_model")] = None
    vocab_size: Annotated[Count, Field(description="outputs of the head (n)")] = 128
    teacher_layers: Count = 128
    """blocks of the teacher; their output scales as 1/sqrt(teacher_layers)"""
    integrator: Literal["euler", "midpoint"] = "euler"
    """the student's step: x + f(x), or x + g(x + f(x) / 2) (RK2)"""
    target: Literal["kl", "kl_given_head", "mse"] = "kl"
    """the teacher's distribution, with a head to learn or the teacher's; or its normed state"""
    rho: Annotated[tuple[Fraction, ...], Field(min_length=1, strict=False)] = (0.0,)
    """correlation of the teacher's layers: 1 = tied, 0 = independent"""
    teacher_seed: Annotated[tuple[Seed, ...], Field(min_length=1, strict=False)] = (0, 1, 2)
    """seeds, one per teacher"""
    temperature: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)] = (1.0,)
    """divides the teacher's logits; not for mse"""
    seed: Annotated[tuple[Seed, ...], Field(min_length=1, strict=False)] = (0,)
    """the students' first weights; replicates"""
    data_seed: Annotated[Seed, Field(description="the stream of inputs, which all students share")] = 0
    batch_size: Annotated[Count, Field(description="inputs per step")] = 1024
    n_steps: Annotated[Count, Field(description="optimiser steps")] = 40_000
    lr: Annotated[Positive, Field(description="Adam's learning rate")] = 6e-4
    lr_depth_factor: Positive | None = None
    """the learning rate is lr x this / sqrt(n_layers); null = lr at every depth"""
    decay_from: Annotated[Fraction, Field(description="share of the steps after which lr falls linearly")] = 1.0
    decay_to: Annotated[Fraction, Field(description="share of lr at the end")] = 0.1
    test_batches: Annotated[Count, Field(description="batches of the test loss, never trained on")] = 10
    log_every: Annotated[Count, Field(description="steps between two rows of the curves")] = 500

    @check
    def _check(self) -> None:
        for name in AXES:
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={list(values)} contains a value twice; all students must differ")
        if self.target == "mse" and self.temperature != (1.0,):
            raise ValueError(
                f"temperature={list(self.temperature)} has no effect on target mse, which has no head; leave it out"
            )

    @property
    def run_id(self) -> str:
        """12 hex digits: a hash of all non-default fields and of the defaults' version."""
        return digest({"toy_defaults": DEFAULTS_VERSION, **self.model_dump(mode="json", exclude_defaults=True)})

    @property
    def n_students(self) -> int:
        return math.prod(len(getattr(self, name)) for name in AXES)

    @property
    def n_blocks(self) -> int:
        """Blocks of one student."""
        return self.n_layers * (2 if self.integrator == "midpoint" else 1)

    @property
    def width_ff(self) -> int:
        return self.d_ff or 4 * self.d_model

    @property
    def flops(self) -> int:
        """FLOPs of the group's blocks: 2 per multiply-add, backward = 2 x forward; without heads and tests."""
        block = 4 * self.d_model * self.width_ff
        n_teachers = len(self.rho) * len(self.teacher_seed)
        per_input = block * (3 * self.n_students * self.n_blocks + n_teachers * self.teacher_layers)
        return self.n_steps * self.batch_size * per_input

    def learning_rate(self, step: int) -> float:
        """The learning rate of step `step` (from 0): constant, then falling linearly from `decay_from` of the steps."""
        peak = self.lr if self.lr_depth_factor is None else self.lr * self.lr_depth_factor / math.sqrt(self.n_layers)
        start = self.decay_from * self.n_steps
        if step < start:
            return peak
        remaining = (self.n_steps - step) / (self.n_steps - start)
        return peak * (self.decay_to + (1 - self.decay_to) * remaining)


Variant = dict[str, Any]


class ToyScale(Section):
    """Changes that scale the definition to another size."""

    cost: str = ""
    n_layers: Annotated[list[Count], Field(min_length=1)] | None = None
    base: Variant = {}
    variants: Annotated[list[Variant], Field(min_length=1)] | None = None


class ToyDefinition(Section):
    """One question, as groups of students."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$", description="short name of the question")]
    question: Annotated[Sentence, Field(description="what it asks, in one sentence")]
    hypothesis: Annotated[Sentence, Field(description="the answer expected, written before it starts")]
    cost: Annotated[str, Field(description="what it costs at the size as written")] = ""
    n_layers: Annotated[list[Count], Field(min_length=1)]
    """depths of the students; a variant may have its own"""
    base: Annotated[Variant, Field(description="ToyConfig fields shared by every group")] = {}
    variants: Annotated[list[Variant], Field(min_length=1)] = [{}]
    """groups of ToyConfig fields, each crossed with n_layers"""
    scales: Annotated[dict[str, ToyScale], Field(description="the same question at other sizes")] = {}

    base_fields: ClassVar[Collection[str]] = ToyConfig.model_fields
    """Fields of base and variants, not of the definition."""

    @check
    def _check(self) -> None:
        if "n_layers" in self.base:
            raise ValueError("n_layers is an axis: list the depths under 'n_layers', beside 'base'")
        self.groups()

    def scaled(self, scale: str | None) -> "ToyDefinition":
        """The definition at another size. Raises ValueError for a scale it does not have."""
        if scale is None:
            return self
        if scale not in self.scales:
            raise ValueError(f"toy {self.name!r} has no scale {scale!r}; it has: {', '.join(self.scales) or 'none'}")
        values = self.model_dump(mode="json", exclude={"scales"}, exclude_unset=True)
        changes = self.scales[scale].model_dump(mode="json", exclude_unset=True)
        changes["base"] = {**self.base, **changes.get("base", {})}
        return build(ToyDefinition, {**values, **changes, "name": f"{self.name}-{scale}"}, f"{self.name} at {scale}")

    def with_changes(self, changes: Mapping[str, Any]) -> "ToyDefinition":
        """The definition with other depths or base fields. Raises ValueError for a field set by variants."""
        for name in changes:
            if any(name in variant for variant in self.variants):
                raise ValueError(f"--set {name}: variants of {self.name!r} set {name}; change them in the definition")
        values = self.model_dump(mode="json", exclude={"scales"}, exclude_unset=True)
        base = {**self.base, **changes}
        depths = base.pop("n_layers", self.n_layers)
        return build(ToyDefinition, {**values, "n_layers": depths, "base": base}, "--set")

    def groups(self) -> list[ToyConfig]:
        """All groups, in order. Raises ValueError naming an invalid variant."""
        groups = []
        for variant in self.variants:
            depths = variant.get("n_layers", self.n_layers)
            if not isinstance(depths, list) or not depths:
                raise ValueError(f"variant {variant}: n_layers={depths!r} must be a list of depths")
            for depth in depths:
                values = {**self.base, **variant, "n_layers": depth}
                groups.append(build(ToyConfig, values, f"toy {self.name}, variant {variant}"))
        if len({group.run_id for group in groups}) < len(groups):
            raise ValueError(f"toy {self.name!r} holds a group twice; variants must differ")
        return groups
