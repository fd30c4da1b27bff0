"""A sweep definition: one question, the configurations that answer it, their seeds and their budget.

    cells = variants x grid(zip, space), and `cells`    (sampler: grid)
    cells = n_trials points of the axes                 (samplers random, qmc; tpe and nsga2 learn from the results)
    runs  = cells x seeds                               (with `tune`: cells x grid(tune) x tuning_seeds,
                                                         then the seeds at the best value)

A *cell* is a mapping of RunConfig fields laid over `base`; a *run* is a cell with a seed. Seeds are replicates, never
a dimension of the search; a variant or a listed cell may have its own. Tuning has seeds apart: the best of several
noisy values is flattered by the seeds it was chosen with. `scales` holds named changes of size ('micro' for a CPU),
laid over the definition.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sparsedepth.config import presets
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.mistakes import Mistakes, check, field_mistakes
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Count, Positive, Section, Sentence
from sparsedepth.config.seeds import Seeds, TuningSeeds, own_seeds
from sparsedepth.config.space import (
    Axis,
    Bounded,
    Cell,
    Condition,
    Interval,
    Prune,
    TuneGrid,
    Value,
    Values,
    cell_digest,
    check_size,
    check_tune,
    check_zip,
    expand,
    grid_points,
    is_whole,
    meets,
)

DEFINITION = "sweep.yaml"
"""The sweep that fills a results folder, in it."""

Matched = Literal["tokens", "steps", "params_total", "params_active", "flops"]


Zip = list[dict[str, Values]]


class Scale(Section):
    """Changes that turn the definition into one of another size."""

    cost: str = ""
    base: dict[str, Any] = {}
    space: dict[str, Axis] | None = None
    zip: Zip | None = None
    variants: list[dict[str, Any]] | None = None
    cells: list[dict[str, Any]] | None = None
    exclude: list[Condition] | None = None
    only: dict[str, Condition] | None = None
    tune: dict[str, TuneGrid] | None = None
    constraints: dict[Bounded, Positive] | None = None
    tuning_seeds: TuningSeeds | None = None
    seeds: Seeds | None = None
    n_trials: Count | None = None


class SweepDefinition(Section):
    """One question, as runs."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$", description="short name of the question")]
    question: Annotated[Sentence, Field(description="what the sweep asks, in one sentence")]
    hypothesis: Annotated[Sentence, Field(description="the answer expected, written before the sweep starts")]
    cost: Annotated[str, Field(description="what it costs at the size as written")] = ""
    matched: Annotated[
        Matched,
        Field(description="what the compared runs share: tokens or steps, exactly; the rest within each depth"),
    ] = "tokens"
    free: Annotated[
        Literal["d_model", "d_ff", "d_expert"] | None,
        Field(description="size that is solved for, so that each cell matches the first of its depth; d_ff is d_expert "
              "where there are experts"),
    ] = None  # fmt: skip
    tolerance: Annotated[float, Field(gt=0, lt=1, description="largest mismatch of parameters or FLOPs")] = 0.01
    sampler: Annotated[
        Literal["grid", "random", "qmc", "tpe", "nsga2"],
        Field(description="grid: every cell; the others propose n_trials cells, tpe and nsga2 from what they learn"),
    ] = "grid"
    objectives: Annotated[
        list[str], Field(min_length=1, description="summary columns to optimise; the first ranks and tunes")
    ] = ["val_loss"]
    n_trials: Annotated[Count | None, Field(description="cells to propose; not with sampler grid")] = None
    base: Annotated[dict[str, Any], Field(description="RunConfig fields shared by every cell")] = {}
    space: Annotated[
        dict[str, Axis],
        Field(description="axes that are crossed: a list of values, or {low, high, log, whole} for a sampler"),
    ] = {}
    zip: Annotated[Zip, Field(description="axes whose fields move together: [{seq_len: [...], lr: [...]}]")] = []
    variants: Annotated[
        list[dict[str, Any]],
        Field(min_length=1, description="groups of fields that vary together, each crossed with the axes; with "
              "`seeds` a group has its own"),
    ] = [{}]  # fmt: skip
    cells: Annotated[
        list[dict[str, Any]], Field(description="further cells, listed one by one; with `seeds` a cell has its own")
    ] = []
    only: Annotated[
        dict[str, Condition], Field(description="axis -> where it applies: {top_k: {n_experts: [4, 8]}}")
    ] = {}
    exclude: Annotated[list[Condition], Field(description="cells to leave out, by some of their fields")] = []
    constraints: Annotated[
        dict[Bounded, Positive], Field(description="upper bounds, checked before a run starts")
    ] = {}  # fmt: skip
    tune: Annotated[
        dict[str, TuneGrid],
        Field(description="fields re-tuned for each cell with tuning_seeds: {lr: [1e-3, 2e-3, 4e-3]}"),
    ] = {}
    tune_extensions: Annotated[
        int, Field(ge=0, le=8, description="how often a grid is widened by a value where the best is at its edge")
    ] = 1
    tuning_seeds: Annotated[
        TuningSeeds, Field(description="seeds of tuning alone: a list, or how many (3 = [101, 102, 103])")
    ] = []
    reuse_tuning_seeds: Annotated[
        bool, Field(description="let tuning_seeds be among seeds: cheaper, and flatters what was tuned")
    ] = False
    prune: Annotated[Prune | None, Field(description="when a sampler's run is ended early")] = None
    seeds: Annotated[Seeds, Field(description="replicates of every cell: a list, or how many (3 = [0, 1, 2])")] = [0]
    same_packages: Annotated[bool, Field(description="refuse to mix runs made with other package versions")] = False
    scales: Annotated[dict[str, Scale], Field(description="the same question at other sizes")] = {}

    fields_of_parts: ClassVar[Collection[str]] = RunConfig.model_fields
    """What stands in the base, the space and the other parts, never beside them."""

    @check
    def _check_repeats(self) -> None:
        own = [("seeds", own_seeds(entry, [])) for entry in (*self.variants, *self.cells)]
        named = [(name, getattr(self, name)) for name in ("seeds", "tuning_seeds", "objectives")]
        for name, given in (*named, *own):
            if len(set(given)) < len(given):
                raise ValueError(f"{name}={given} must not name one twice")

    @check
    def _check_tuning_seeds(self) -> None:
        if self.tune and not self.tuning_seeds:
            raise ValueError(
                f"tune.{', '.join(self.tune)} needs seeds of its own, several and apart from seeds={self.seeds}: "
                "tuning_seeds: [101, 102, 103]"
            )
        shared = [seed for seed in self.tuning_seeds if seed in self.result_seeds]
        if shared and not self.reuse_tuning_seeds:
            raise ValueError(
                f"tuning_seeds={self.tuning_seeds} shares {shared} with the seeds of the results, which flatters what "
                "is tuned; name others (tuning_seeds: [101, 102, 103]), or say reuse_tuning_seeds: true"
            )

    @check
    def _check_parts(self) -> None:
        """Every part names fields of a run, with values that they can have, and there are not too many."""
        points = math.prod(len(axis) for axis in self.axes.values() if not isinstance(axis, Interval))
        cells = len(self.variants) * points + len(self.cells) if self.n_trials is None else self.n_trials
        tuned = math.prod(map(len, self.tune.values())) * len(self.tuning_seeds)
        check_size(cells, len(self.seeds) + tuned)
        if any("seed" in scope for scope in (self.base, *self._scopes())):
            raise ValueError("seed is a replicate, not a knob: list the seeds under 'seeds'")
        mistakes = [
            f"{part}: {mistake}" for part, values in self.parts() for mistake in field_mistakes(RunConfig, values)
        ]
        if mistakes:
            raise Mistakes(mistakes)

    def parts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The values that the definition lists, with the part that lists them."""
        yield "base", self.base
        yield from (("variants", self._fields_of(variant)) for variant in self.variants)
        yield from (("cells", self._fields_of(cell)) for cell in self.cells)
        parts = [("space", self.space), ("tune", self.tune), *(("zip", axis) for axis in self.zip)]
        conditions = [("exclude", where) for where in self.exclude]
        conditions += [(f"only.{name}", where) for name, where in self.only.items()]
        for part, axes in (*parts, *conditions):
            for name, axis in axes.items():
                values = [axis.low] if isinstance(axis, Interval) else axis if isinstance(axis, list) else [axis]
                if not isinstance(axis, Interval) or name not in RunConfig.model_fields:
                    yield from ((part, {name: value}) for value in values)

    @check
    def _check_rules(self) -> None:
        self._check_places()
        check_zip(self.zip)
        check_tune(self.tune)
        if self.sampler == "grid":
            self._check_grid()
        else:
            self._check_sampled()
        if self.free and self.matched in ("tokens", "steps"):
            raise ValueError(f"free={self.free!r} is solved for parameters or FLOPs; matched is {self.matched!r}")

    def _check_places(self) -> None:
        """Every field is said to vary in one place only."""
        scopes = (self.space, self.tune, *self.zip, *self.only.values(), *self.exclude)
        if any("preset" in scope for scope in scopes):
            raise ValueError("preset stands for many fields: set it in the base, in variants or in cells")
        if "preset" in self.base and any("preset" in entry for entry in (*self.variants, *self.cells)):
            raise ValueError(
                f"preset={self.base['preset']!r} of the base has others in variants or cells; set it there"
            )
        for name in self.only:
            if name not in self.space:
                raise ValueError(f"only.{name} needs an axis {name!r} in the space")
        axes = [*self.space, *(name for axis in self.zip for name in axis)]
        once = [*axes, *self.tune, *([self.free] if self.free else [])]
        twice = {name for name in once if once.count(name) > 1}
        twice |= {name for scope in (*self.variants, *self.cells) for name in scope if name in self.tune}
        twice |= {name for scope in self.variants for name in scope if name in axes}
        twice |= {name for scope in self._scopes() for name in scope if name == self.free}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} must vary in one place: space, zip, variants, tune or free")
        unknown = [name for where in (*self.only.values(), *self.exclude) for name in where
                   if name in ("seed", self.free, *self.tune)]  # fmt: skip
        if unknown:
            raise ValueError(
                f"only and exclude choose cells, of which {unknown[0]} is not known yet; leave it out there"
            )

    def _check_grid(self) -> None:
        if self.n_trials is not None:
            raise ValueError(f"n_trials={self.n_trials} has no meaning with sampler 'grid', which runs every cell")
        if self.prune:
            raise ValueError("prune belongs to a sampler; sampler 'grid' runs every cell to its end")
        ranges = [name for name, axis in self.space.items() if isinstance(axis, Interval)]
        if ranges:
            raise ValueError(f"space.{ranges[0]} is a range; sampler 'grid' needs a list of values")

    def _check_sampled(self) -> None:
        if self.n_trials is None or not self.axes:
            raise ValueError(f"sampler {self.sampler!r} needs n_trials and a space to search")
        if self.variants != [{}] or self.cells:
            raise ValueError(f"variants and cells belong to sampler 'grid'; {self.sampler!r} proposes from the axes")
        for name, axis in self.space.items():
            if isinstance(axis, Interval) and not axis.whole and is_whole(RunConfig, name):
                raise ValueError(f"space.{name} is a range with fractions, and {name} a whole number; add whole: true")
        if self.free or self.matched not in ("tokens", "steps"):
            raise ValueError(
                f"matched={self.matched!r} needs sampler 'grid', whose first cell of a depth is what the others match; "
                f"with {self.sampler!r} match tokens or steps"
            )
        if self.tune and self.adaptive:
            raise ValueError(
                f"tune has no place with sampler {self.sampler!r}: put {', '.join(self.tune)} in its space"
            )

    def _scopes(self) -> Iterator[Mapping[str, Any]]:
        """Every place in which a field may vary."""
        yield from (self.space, self.tune, *self.zip, *self.listed)

    @property
    def listed(self) -> list[Cell]:
        """The fields of every variant and every listed cell."""
        return [self._fields_of(entry) for entry in (*self.variants, *self.cells)]

    @property
    def result_seeds(self) -> list[int]:
        """Every seed whose runs are results."""
        own = (seed for entry in (*self.variants, *self.cells) for seed in own_seeds(entry, []))
        return list(dict.fromkeys((*self.seeds, *own)))

    @property
    def objective(self) -> str:
        """The first objective: what ranks cells and tunes them."""
        return self.objectives[0]

    @property
    def adaptive(self) -> bool:
        """Whether the sampler learns: its cells are not known before its runs are."""
        return self.sampler in ("tpe", "nsga2")

    @property
    def varied(self) -> list[str]:
        """The fields in which runs may differ, seeds apart."""
        names = dict.fromkeys(name for scope in self._scopes() for name in scope)
        return [*names, *([self.free] if self.free and self.free not in names else [])]

    @property
    def axes(self) -> dict[str, Axis]:
        """What a sampler chooses; a zipped axis goes by its first field."""
        return self.space | {name: axis[name] for axis in self.zip for name in list(axis)[:1]}

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
            values[key] = {**self.base, **value} if key == "base" else value
        values["name"] = f"{self.name}-{scale}"
        return build(SweepDefinition, values, f"{self.name} at scale {scale}")

    def with_changes(self, changes: Mapping[str, Any]) -> "SweepDefinition":
        """The definition with other keys of its own (seeds, n_trials, ...) or of its base. Raises ValueError for a
        field that the sweep itself varies."""
        for name in changes:
            if name in ("base", "scales"):
                raise ValueError(
                    f"--set {name}: a part of the file; set a field of a run or a key of the sweep instead"
                )
            if any(name in scope for scope in self._scopes()):
                raise ValueError(f"--set {name}: sweep {self.name!r} varies {name}; change its space in the definition")
        values = self.model_dump(mode="json", exclude_unset=True)
        own = {name: value for name, value in changes.items() if name in SweepDefinition.model_fields}
        base = {name: value for name, value in changes.items() if name not in own}
        return build(SweepDefinition, {**values, **own, "base": {**self.base, **base}}, "--set")

    def run_config(self, cell: Mapping[str, Any], seed: int) -> RunConfig:
        """The run of one cell and seed. Raises ValueError naming the cell that cannot be built."""
        config = build(RunConfig, {**self.base, **cell, "seed": seed}, f"sweep {self.name}, cell {dict(cell)}")
        if config.start_weights is not None:
            raise ValueError(
                f"sweep {self.name}: start_weights={config.start_weights} are a model's, which a sweep has not; train "
                f"each run with `train RUN.yaml --from MODEL`, into one folder"
            )
        return config

    def cell(self, point: Mapping[str, Any]) -> Cell:
        """The cell of one point of the axes."""
        return expand(point, self.zip, self.only, self._values_of)

    def is_excluded(self, cell: Mapping[str, Any]) -> bool:
        values = self._values_of(cell) if self.exclude else {}
        return any(meets(values, condition) for condition in self.exclude)

    def _values_of(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a cell's run, which need not be one that can be built."""
        defaults = {name: field.default for name, field in RunConfig.model_fields.items()}
        return defaults | RunConfig.completed({**self.base, **cell})

    def _fields_of(self, entry: Mapping[str, Any]) -> Cell:
        """The RunConfig fields of a variant or a listed cell; of its preset those that the base does not give."""
        given = {name: value for name, value in entry.items() if name != "seeds"}
        return {name: value for name, value in presets.expand(given).items() if name in given or name not in self.base}

    def grid(self) -> Iterator[Cell]:
        """The cells of a grid sweep: every variant crossed with every point of the axes, then `cells`; in order."""
        return (cell for cell, _ in self.replicated_grid())

    def replicated_grid(self) -> Iterator[tuple[Cell, list[int]]]:
        """The cells of a grid sweep, each with its seeds: one that stands twice has those of both."""
        seeds: dict[str, list[int]] = {}
        cells: dict[str, Cell] = {}
        for entry, cell in self._entries():
            if not self.is_excluded(cell):
                key = cell_digest(cell)
                cells.setdefault(key, cell)
                seeds[key] = [*dict.fromkeys((*seeds.get(key, ()), *own_seeds(entry, self.seeds)))]
        return ((cell, seeds[key]) for key, cell in cells.items())

    def idle_conditions(self) -> list[str]:
        """What `exclude` and `only` ask of a grid that no cell meets: a slip, or meant for another scale."""
        cells = [cell for _, cell in self._entries()]
        values = [self._values_of(cell) for cell in cells] if self.exclude else []
        notes = [
            f"exclude {where}: no cell has this, so nothing is left out"
            for where in self.exclude
            if not any(meets(each, where) for each in values)
        ]
        for name, where in self.only.items():
            if not any(name in cell for cell in cells):
                notes.append(f"only.{name} {where}: no cell has this, so {name} is varied nowhere")
        return notes

    def _entries(self) -> Iterator[tuple[Mapping[str, Any], Cell]]:
        """The cells of a grid, excluded ones too, each with the variant or the listed cell whose seeds it has."""
        axes = {name: axis for name, axis in self.axes.items() if not isinstance(axis, Interval)}
        if axes or self.variants != [{}] or not self.cells:
            for variant in self.variants:
                yield from ((variant, self.cell({**self._fields_of(variant), **point})) for point in grid_points(axes))
        yield from ((cell, self._fields_of(cell)) for cell in self.cells)


def read_definition(results: Path) -> SweepDefinition | None:
    """The sweep that fills a results folder, as `sweep` left it there; None for a folder of single runs.

    Folders of before tuning had seeds of its own were tuned with the first seed, which is a result as well.
    Raises ValueError for a sweep.yaml that is no definition.
    """
    path = results / DEFINITION
    if not path.is_file():
        return None
    values = read_yaml(path)
    if values.get("tune") and "tuning_seeds" not in values and isinstance(values.get("seeds", [0]), list):
        values |= {"tuning_seeds": values.get("seeds", [0])[:1], "reuse_tuning_seeds": True}
    return build(SweepDefinition, values, str(path))


def ad_hoc(vary: Mapping[str, list[Value]], n_seeds: int, base: Mapping[str, Any]) -> SweepDefinition:
    """The sweep of a command line: a grid over `vary`, with seeds 0 to n_seeds - 1. Raises ValueError."""
    if not vary or n_seeds < 1:
        raise ValueError("a sweep needs a definition file, or --vary FIELD=VALUE,VALUE and at least one seed")
    names = " and ".join(vary)
    values = {
        "name": "ad-hoc",
        "question": f"What does {names} change?" if len(vary) == 1 else f"What do {names} change?",
        "hypothesis": "none was written down before the runs",
        "base": {name: value for name, value in base.items() if name not in vary and name != "seed"},
        "space": dict(vary),
        "seeds": n_seeds,
    }
    return build(SweepDefinition, values, "--vary")
