"""A sweep definition: one question, the configurations that answer it, their seeds and their budget.

    cells = variants x grid(space)            (sampler: grid)
    cells = n_trials proposals from the space (sampler: tpe)
    runs  = cells x seeds

A *cell* is a mapping of RunConfig fields laid over `base`; a *run* is a cell with a seed. Seeds are replicates, never
a dimension of the search. `scales` holds named changes of size ('micro' for a CPU), laid over the definition.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sparsedepth.config.load import build
from sparsedepth.config.run import Count, RunConfig, Section

Value = bool | int | float | str


class Interval(Section):
    """A numeric range for a sampler to search."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low={self.low} and high={self.high} must satisfy {'0 < ' * self.log}low < high")
        return self


Axis = Annotated[list[Value], Field(min_length=1)] | Interval


class Scale(Section):
    """Changes that turn the definition into one of another size."""

    cost: str = ""
    base: dict[str, Any] = {}
    space: dict[str, Axis] | None = None
    variants: list[dict[str, Any]] | None = None
    seeds: Annotated[list[int], Field(min_length=1)] | None = None
    n_trials: Count | None = None


class SweepDefinition(Section):
    """One question, as runs."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$", description="short name of the question")]
    question: Annotated[str, Field(min_length=1, description="what the sweep asks, in one sentence")]
    hypothesis: Annotated[str, Field(min_length=1, description="the answer expected, written before the sweep starts")]
    cost: Annotated[str, Field(description="what it costs at the size as written")] = ""
    matched: Annotated[
        Literal["tokens", "params_total", "params_active", "flops"],
        Field(description="what the compared runs share, to 1%: tokens in all, or the rest within each depth"),
    ] = "tokens"
    sampler: Annotated[
        Literal["grid", "tpe"], Field(description="grid: every cell; tpe: n_trials cells proposed by Optuna's TPE")
    ] = "grid"
    objective: Annotated[str, Field(description="the summary column that ranks the cells")] = "val_loss"
    n_trials: Annotated[Count | None, Field(description="cells to propose; only with sampler tpe")] = None
    base: Annotated[dict[str, Any], Field(description="RunConfig fields shared by every cell")] = {}
    space: Annotated[
        dict[str, Axis],
        Field(description="RunConfig fields that vary: a list of values, or {low, high, log, whole} for tpe"),
    ] = {}
    variants: Annotated[
        list[dict[str, Any]],
        Field(min_length=1, description="groups of fields that vary together, each crossed with the space"),
    ] = [{}]
    seeds: Annotated[list[int], Field(min_length=1, description="replicates of every cell")] = [0]
    scales: Annotated[dict[str, Scale], Field(description="the same question at other sizes")] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds} holds a seed twice; each replicate needs its own")
        for scope in (self.base, self.space, *self.variants):
            if "seed" in scope:
                raise ValueError("seed is a replicate, not a knob: list the seeds under 'seeds'")
        for name in self.space:
            if name not in RunConfig.model_fields:
                build(RunConfig, {name: None}, "space")  # raises, naming the nearest field
        if self.sampler == "tpe" and (self.n_trials is None or not self.space):
            raise ValueError("sampler 'tpe' needs n_trials and a space to search")
        if self.sampler == "tpe" and self.variants != [{}]:
            raise ValueError("variants belong to sampler 'grid'; sampler 'tpe' proposes its cells from the space")
        if self.sampler == "grid":
            if self.n_trials is not None:
                raise ValueError(f"n_trials={self.n_trials} has no meaning with sampler 'grid', which runs every cell")
            ranges = [name for name, axis in self.space.items() if isinstance(axis, Interval)]
            if ranges:
                raise ValueError(f"space.{ranges[0]} is a range; sampler 'grid' needs a list of values")
        return self

    def scaled(self, scale: str | None) -> "SweepDefinition":
        """The definition at another size. Raises ValueError for a scale it does not have."""
        if scale is None:
            return self
        if scale not in self.scales:
            known = ", ".join(self.scales) or "none"
            raise ValueError(f"sweep {self.name!r} has no scale {scale!r}; it has: {known}")
        change = self.scales[scale]
        values = self.model_dump(mode="json", exclude={"scales"}, exclude_unset=True)
        for key, value in change.model_dump(mode="json", exclude_unset=True).items():
            values[key] = {**values["base"], **value} if key == "base" else value
        values["name"] = f"{self.name}-{scale}"
        return build(SweepDefinition, values, f"{self.name} at scale {scale}")

    def with_base(self, changes: Mapping[str, Any]) -> "SweepDefinition":
        """The definition with other base fields. Raises ValueError for a field that the sweep itself varies."""
        for name in changes:
            if any(name in scope for scope in (self.space, *self.variants)):
                raise ValueError(f"--set {name}: sweep {self.name!r} varies {name}; change its space in the definition")
        values = self.model_dump(mode="json", exclude_unset=True)
        return build(SweepDefinition, {**values, "base": {**self.base, **changes}}, "--set")

    def run_config(self, cell: Mapping[str, Any], seed: int) -> RunConfig:
        """The run of one cell and seed. Raises ValueError naming the cell that cannot be built."""
        return build(RunConfig, {**self.base, **cell, "seed": seed}, f"sweep {self.name}, cell {dict(cell)}")

    def grid(self) -> Iterator[dict[str, Any]]:
        """The cells of a grid sweep: every variant crossed with every point of the space, in order."""
        axes = {name: axis for name, axis in self.space.items() if not isinstance(axis, Interval)}
        for variant in self.variants:
            for point in itertools.product(*axes.values()):
                yield {**variant, **dict(zip(axes, point, strict=True))}
