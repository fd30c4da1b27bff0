"""Sweep definitions: one question, the configurations that answer it, their seeds and their budget.

    cells = variants x grid(zip, space), and `cells`    (sampler: grid)
    cells = n_trials points of the axes                 (samplers random, qmc; tpe and nsga2 learn from the results)
    runs  = cells x seeds                               (with `tune`: cells x grid(tune) x tuning_seeds,
                                                         then the seeds at the best value; with `at` in it
                                                         only cells at that shape are tuned, for all others)

A *cell* is a mapping of RunConfig fields that override `base`; a *run* is a cell with a seed, which is a replicate and
never a dimension of the search. Tuning has separate seeds, because the best of several noisy values is optimistic on
the seeds that chose it."""

import functools
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from sparsedepth.config import presets
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.mistakes import field_mistakes
from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.config.scale import Scale, Tuned, Zip
from sparsedepth.config.section import (
    WHOLE,
    Count,
    Fields,
    Inside,
    Mistakes,
    NonNegative,
    Positive,
    Sentence,
    check,
)
from sparsedepth.config.space import (
    Axis,
    Bounded,
    Cell,
    Condition,
    Interval,
    Prune,
    Seeds,
    Shares,
    TuneGrid,
    TuningSeeds,
    Value,
    cell_digest,
    check_distinct,
    check_size,
    check_sweep,
    grid_points,
    meets,
    own_seeds,
)
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import commas

DEFINITION = "sweep.yaml"
"""The definition of the sweep that fills a results folder, in that folder."""

Matched = Literal["tokens", "steps", "params_total", "params_active", "flops", "time"]
WIDTH = ("d_model", "n_heads", "d_ff")
"""What `free: width` solves for: heads keep their size."""


class SweepDefinition(Tuned):
    """One question, as runs."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$", description="short name of the question")]
    question: Sentence
    """what the sweep asks, in one sentence"""
    hypothesis: Sentence
    """the answer expected, written before the sweep starts"""
    cost: str = ""
    """what it costs at the size as written"""
    matched: Matched = "tokens"
    """what the compared runs share: tokens or steps, exactly, in all; the rest within each depth, or `across` depths"""
    same_params_blocks: bool = False
    """`matched: [params_blocks, flops], free: [width, train_tokens]`: d_model in steps of a head, with its heads, and
    d_ff are solved for, so that the blocks of each cell have as many parameters as those of the first"""
    across: Literal["depth"] | None = None
    """depth: cells of every depth match the first cell of all, the reference; list the reference depth first"""
    free: Literal["train_tokens", "d_model", "d_ff", "d_expert"] | None = None
    """size that is solved for, so that each cell matches the first of its depth, or with `across` the first of all;
    with experts d_ff means d_expert; with train_tokens the number of steps changes, not batch_tokens"""
    tolerance: Inside = 0.01
    """largest mismatch of parameters or FLOPs"""
    step_seconds: dict[Annotated[int, Field(strict=False)], Positive] = {}
    """with matched: time, n_layers -> seconds of a training step, as `plan --calibrate` prints them"""
    sampler: Literal["grid", "random", "qmc", "tpe", "nsga2"] = "grid"
    """grid: every cell; the others propose n_trials cells, tpe and nsga2 from earlier results"""
    objectives: Annotated[list[str], Field(min_length=1), AfterValidator(check_distinct)] = ["val_loss"]
    """summary columns to optimise; the first ranks and tunes"""
    n_trials: Count | None = None
    """cells to propose; not with sampler grid"""
    base: Named = {}
    """RunConfig fields shared by every cell"""
    space: dict[str, Axis] = {}
    """axes that are crossed: a list of values, or {low, high, log, whole} for a sampler"""
    zip: Zip = []
    """axes whose fields move together: [{seq_len: [...], lr: [...]}]"""
    variants: Annotated[list[Named], Field(min_length=1)] = [{}]
    """groups of fields that vary together, each crossed with the axes; with `seeds` a group has its own"""
    cells: list[Named] = []
    """further cells, listed one by one; with `seeds` a cell has its own"""
    only: dict[str, Condition] = {}
    """axis -> where it applies: {top_k: {n_experts: [4, 8]}}"""
    exclude: list[Condition] = []
    """cells to leave out, by values of their fields"""
    constraints: dict[Bounded, Positive] = {}
    """upper bounds, checked before a run starts"""
    branch_at: Shares = []
    """shares of train_tokens at which a run of schedule wsd also ends: further cells"""
    tune: dict[str, TuneGrid] = {}
    """fields re-tuned for each cell with tuning_seeds: {lr: [1e-3, 2e-3, 4e-3]}"""
    tune_at: dict[str, Value] = {}
    """shape at which each setting is tuned, for all shapes: `tune: {at: {n_layers: 12}, lr: [...]}`"""
    carry_regret: NonNegative | None = None
    """loss that carrying lr from that shape adds, in nat/token, as `scaling carry` measures it; widens intervals"""
    tune_extensions: Annotated[int, Field(ge=0, le=8), WHOLE] = 1
    """how often a grid is extended by a value if the best is at its edge"""
    tuning_seeds: TuningSeeds = []
    """seeds of tuning alone: a list, or how many (3 = [101, 102, 103])"""
    reuse_tuning_seeds: bool = False
    """let tuning_seeds be among seeds: cheaper, but biased in favour of tuned values"""
    prune: Prune | None = None
    """when a sampler's run is ended early"""
    seeds: Seeds = [0]
    """replicates of every cell: a list, or how many (3 = [0, 1, 2])"""
    same_packages: bool = False
    """refuse to mix runs made with other package versions"""
    scales: dict[str, Scale] = {}
    """the same question at other sizes"""

    @model_validator(mode="before")
    @classmethod
    def _split_matched(cls, values: Any) -> Any:
        """Two amounts, of which width and a second size are free."""
        if not isinstance(values, dict) or not isinstance(values.get("matched"), list):
            return values
        matched, free = values["matched"], values.get("free")
        if matched[:1] != ["params_blocks"] or len(matched) != 2 or not isinstance(free, list) or free[:1] != ["width"]:
            raise ValueError(
                f"matched={matched} with free={free} must be [params_blocks, flops], [width, train_tokens]"
            )
        return {**values, "same_params_blocks": True, "matched": matched[1], "free": free[1] if free[1:] else None}

    base_fields: ClassVar[Collection[str]] = RunConfig.model_fields
    """Keys that belong in the base, the space and other parts of a definition, not at its top level."""

    @check
    def _check_repeats(self) -> None:
        for name, axis in self.space.items():
            if not isinstance(axis, Interval) and len(set(axis)) < len(axis):
                raise ValueError(f"space.{name}={axis} must not repeat a value")

    @check
    def _check_tuning_seeds(self) -> None:
        for name, value in self.tune_at.items():
            role = roles(RunConfig).get(name)  # an unknown name is told with those of other parts
            is_open = name == "preset" or value is None  # runs have the sizes that follow
            if is_open or (role and (name in self.tune or not role.touches("shapes", "batch"))):
                raise ValueError(f"tune.at.{name}: at is a shape, such as {{n_layers: 12, d_model: 64}}; leave it out")
        if (self.tune_at or self.carry_regret) and not (self.tune and self.tune_at):
            raise ValueError("tune.at, and with it carry_regret, need values: tune: {at: {n_layers: 12}, lr: [...]}")
        results = self.result_seeds  # read even where nothing is tuned: that checks it
        others = f"tuning_seeds: {[max(100, *results) + number for number in (1, 2, 3)]}"
        if self.tune and not self.tuning_seeds:
            raise ValueError(f"tune.{commas(self.tune)} needs several seeds that are not in seeds={results}: {others}")
        shared = [seed for seed in self.tuning_seeds if seed in results]
        if shared and not self.reuse_tuning_seeds:
            raise ValueError(
                f"tuning_seeds={self.tuning_seeds} shares {shared} with the seeds of the results, "
                f"which biases them in favour of tuned values; name others ({others}), "
                "or set reuse_tuning_seeds: true"
            )

    @check
    def _check_parts(self) -> None:
        points = math.prod(len(axis) for axis in self.axes.values() if not isinstance(axis, Interval))
        cells = len(self.variants) * points + len(self.cells) if self.n_trials is None else self.n_trials
        runs = len(self.seeds) + math.prod(map(len, self.tune.values())) * len(self.tuning_seeds)
        check_size(cells, runs * (1 + len(self.branch_at)))
        if any("seed" in place for place in (self.base, *self.places())):
            raise ValueError("seed is for replicates, not a knob: list the seeds under 'seeds'")
        mistakes = [f"{part}: {told}" for part, values in self.parts() for told in field_mistakes(RunConfig, values)]
        if mistakes:
            raise Mistakes(mistakes)

    def parts(self) -> Iterator[tuple[str, Fields]]:
        """(part, values) for all values in the definition."""
        yield "base", self.base
        yield from (("variants", self._fields_of(variant)) for variant in self.variants)
        yield from (("cells", self._fields_of(cell)) for cell in self.cells)
        yield "tune.at", self.tune_at
        parts = (
            ("space", self.space),
            ("tune", self.tune),
            *(("zip", axis) for axis in self.zip),
            *(("exclude", where) for where in self.exclude),
            *((f"only.{name}", where) for name, where in self.only.items()),
        )
        for part, name, axis in ((part, *entry) for part, axes in parts for entry in axes.items()):
            if not isinstance(axis, Interval):
                yield from ((part, {name: value}) for value in (axis if isinstance(axis, list) else [axis]))
            elif name not in RunConfig.model_fields:
                yield part, {name: axis.low}

    _check_rules = check(check_sweep)

    def places(self) -> Iterator[Fields]:
        yield from (self.space, self.tune, self.tune_at, *self.zip, *self.variants_and_cells)

    @property
    def variants_and_cells(self) -> list[Cell]:
        return [self._fields_of(entry) for entry in (*self.variants, *self.cells)]

    @property
    def result_seeds(self) -> list[int]:
        own = (seed for entry in (*self.variants, *self.cells) for seed in own_seeds(entry, []))
        return list(dict.fromkeys((*self.seeds, *own)))

    @property
    def objective(self) -> str:
        """The first objective, which ranks and tunes cells."""
        return self.objectives[0]

    @property
    def is_search(self) -> bool:
        """Whether a sampler draws the cells, so that they share no baseline."""
        return self.sampler != "grid"

    @property
    def adaptive(self) -> bool:
        """Whether the sampler learns from results, so that its cells are not known in advance."""
        return self.sampler in ("tpe", "nsga2")

    @property
    def varied(self) -> list[str]:
        """The fields, without seed, in which runs may differ."""
        names = [name for place in self.places() for name in place]
        names += [self.free] if self.free else []
        names += WIDTH if self.same_params_blocks else ()
        return [*dict.fromkeys(names + (["train_tokens"] if self.branch_at else []))]

    @property
    def axes(self) -> dict[str, Axis]:
        """Field -> axis; a zipped axis is named by its first field."""
        return self.space | {name: axis[name] for axis in self.zip for name in list(axis)[:1]}

    def scaled(self, scale: str | None) -> "SweepDefinition":
        """The definition at another size. Raises ValueError for a scale it does not have, and for one whose base sets
        what the sweep varies."""
        if scale is None:
            return self
        if scale not in self.scales:
            raise ValueError(f"sweep {self.name!r} has no scale {scale!r}; it has: {commas(self.scales) or 'none'}")
        values = self.model_dump(mode="json", exclude={"scales"}, exclude_unset=True)
        changes = self.scales[scale].model_dump(mode="json", exclude_unset=True)
        if "tune" in changes and "tune_at" not in changes:  # `at` is a part of the `tune` that is replaced
            values = {key: value for key, value in values.items() if key not in ("tune_at", "carry_regret")}
        inherited = [(key, getattr(self, key)) for key in ("space", "tune") if key not in changes]
        inherited += [("zip", axes) for axes in self.zip if "zip" not in changes]
        for key, axes in inherited:
            if name := next((name for name in changes.get("base", {}) if name in axes), ""):
                told = f"scales.{scale}.base.{name} of sweep {self.name!r} would do nothing: its {key} varies {name}"
                raise ValueError(f"{told}; give the scale a {key} of its own")
        for key, value in changes.items():
            values[key] = {**self.base, **value} if key == "base" else value
        values["name"] = f"{self.name}-{scale}"
        return build(SweepDefinition, values, f"{self.name} at scale {scale}")

    def with_changes(self, changes: Fields) -> "SweepDefinition":
        """The definition with changed keys or fields of the base. Raises ValueError for a field that it varies."""
        for name in changes:
            if name in ("base", "scales"):
                raise ValueError(f"--set {name}: set a field of a run or a single key of the sweep instead")
            field = name.rpartition(".")[2]  # also of space.n_layers
            if any(field in place for place in self.places()):
                told = f"--set {name}: sweep {self.name!r} varies {field}"
                raise ValueError(
                    f"{told}; change its values in the definition, or give a scale of it values of its own"
                )
        values = self.model_dump(mode="json", exclude_unset=True)
        own = {name: value for name, value in changes.items() if name in SweepDefinition.model_fields}
        base = {name: value for name, value in changes.items() if name not in own}
        values |= {"tune_at": {}, "carry_regret": None} if "tune" in own else {}  # they are parts of what is replaced
        return build(SweepDefinition, {**values, **own, "base": {**self.base, **base}}, "--set")

    def first_run(self, cell: Fields) -> RunConfig:
        return self.run_config(cell, self.seeds[0])

    def run_config(self, cell: Fields, seed: int) -> RunConfig:
        """The run of one cell and seed. Raises ValueError with the cell if it is invalid."""
        config = build(RunConfig, {**self.base, **cell, "seed": seed}, f"sweep {self.name}, cell {dict(cell)}")
        if config.start_weights is not None:
            raise ValueError(
                f"sweep {self.name}: start_weights cannot be set in a sweep; train each run with `train RUN.yaml "
                "--from MODEL`, into one folder"
            )
        return config

    def cell(self, point: Fields) -> Cell:
        """The cell of a point of the axes: with zipped fields, without axes whose `only` condition is not met."""
        cell = dict(point)
        for axis in self.zip:
            first = next(iter(axis))
            index = axis[first].index(cell[first])
            cell |= {name: values[index] for name, values in axis.items()}
        n_before = -1
        while n_before != len(cell):  # a field that leaves can be another's condition
            n_before = len(cell)
            for name, condition in self.only.items():
                if name in cell and not meets(self._values_of(cell), condition):
                    del cell[name]
        return cell

    def is_excluded(self, cell: Fields) -> bool:
        values = self._values_of(cell) if self.exclude else {}
        return any(meets(values, condition) for condition in self.exclude)

    def _values_of(self, cell: Fields) -> Named:
        """The fields of a cell's run, which need not be valid."""
        defaults = {name: field.default for name, field in RunConfig.model_fields.items()}
        return defaults | RunConfig.filled({**self.base, **cell})

    def _fields_of(self, entry: Fields) -> Cell:
        """The RunConfig fields of a variant or a listed cell; the base overrides those of its preset."""
        own = {name: value for name, value in entry.items() if name != "seeds"}
        return {name: value for name, value in presets.expand(own).items() if name in own or name not in self.base}

    def grid(self) -> Iterator[Cell]:
        """The cells of a grid sweep in order: all variants crossed with all points of the axes, then `cells`."""
        return (cell for cell, _ in self.replicated_grid())

    def replicated_grid(self) -> Iterator[tuple[Cell, list[int]]]:
        """The cells of a grid sweep, each with its seeds; duplicates are merged, seeds included."""
        found: dict[str, tuple[Cell, list[int]]] = {}
        for entry, cell in self._grid_cells():
            if not self.is_excluded(cell):
                _, seeds = found.setdefault(cell_digest(cell), (cell, []))
                seeds += [seed for seed in own_seeds(entry, self.seeds) if seed not in seeds]
        return iter(found.values())

    def tuned_cells(self) -> list[Cell]:
        """The cells of a grid that are tuned: all, or each setting at the shape `tune_at`."""
        return [*{cell_digest(cell): cell for cell in ({**one, **self.tune_at} for one in self.grid())}.values()]

    def idle_conditions(self) -> tuple[list[Condition], dict[str, Condition]]:
        """Those of `exclude` and `only` that no cell of the grid meets: a mistake, or for another scale."""
        cells = [cell for _, cell in self._grid_cells()]
        values = [self._values_of(cell) for cell in cells] if self.exclude else []
        unmet = [where for where in self.exclude if not any(meets(fields, where) for fields in values)]
        unused = {name: where for name, where in self.only.items() if not any(name in cell for cell in cells)}
        return unmet, unused

    def _grid_cells(self) -> Iterator[tuple[Fields, Cell]]:
        """The cells of a grid, excluded ones included, each with the variant or listed cell that has its seeds."""
        axes = {name: axis for name, axis in self.axes.items() if not isinstance(axis, Interval)}
        if axes or self.variants != [{}] or not self.cells:
            for variant in self.variants:
                yield from ((variant, self.cell({**self._fields_of(variant), **point})) for point in grid_points(axes))
        yield from ((cell, self._fields_of(cell)) for cell in self.cells)


def read_definition(results: Path) -> SweepDefinition | None:
    """The definition of the sweep that fills a results folder; None for a folder of single runs. Raises ValueError for
    an invalid sweep.yaml."""
    path = results / DEFINITION
    if not path.is_file():
        return None
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size, state.st_ino)


def readable_definition(results: Path) -> SweepDefinition | None:
    """The definition for what only shows a folder; None, with a warning, also for one of another version."""
    try:
        return read_definition(results)
    except ValueError as error:
        warnings.warn(f"{error}. The folder's runs are read without it", stacklevel=2)
        return None


@functools.lru_cache(maxsize=16)
def _read(path: Path, *state: int) -> SweepDefinition:
    """Cached until the file changes: commands ask for it several times."""
    values = read_yaml(path)
    if values.get("tune") and "tuning_seeds" not in values and isinstance(values.get("seeds", [0]), list):
        # Before `tuning_seeds` existed, a cell was tuned with the first seed, which is also one of the results.
        values |= {"tuning_seeds": values.get("seeds", [0])[:1], "reuse_tuning_seeds": True}
    try:
        return build(SweepDefinition, values, str(path))
    except ValueError as error:
        raise ValueError(f"{error}; correct it, unless another version of sparsedepth wrote it") from None


def ad_hoc(vary: Mapping[str, list[Value]], n_seeds: int, base: Fields) -> SweepDefinition:
    """The sweep of a command line: a grid over `vary`, with seeds 0 to n_seeds - 1. Raises ValueError."""
    if not vary or n_seeds < 1:
        raise ValueError("a sweep needs a definition file, or --vary FIELD=VALUE,VALUE and at least one seed")
    if base.get("seed"):
        raise ValueError(
            f"--base sets seed={base['seed']}, and the seeds of --vary are 0 to {n_seeds - 1}; leave it out"
        )
    values = {
        "name": "ad-hoc",
        "question": f"What {'does' if len(vary) == 1 else 'do'} {' and '.join(vary)} change?",
        "hypothesis": "none was written down before the runs",
        "base": {name: value for name, value in base.items() if name not in (*vary, "seed")},
        "space": dict(vary),
        "seeds": n_seeds,
    }
    return build(SweepDefinition, values, "--vary")
