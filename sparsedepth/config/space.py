"""The parts of a sweep definition that determine its runs, and the rules by which they fit together (`check_sweep`).

A condition lists fields and allowed values; it is never an expression. Seeds are a list, or their number, counted from
0 (results) or from 101 (tuning)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from sparsedepth.config.role import fields_where
from sparsedepth.config.rule import Rule, refuse_first
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Count, Fields, Inside, Positive, Section, check
from sparsedepth.files import digest
from sparsedepth.words.plain_text import commas

Value = bool | int | float | str | None
Cell = dict[str, Any]


class Interval(Section):
    """A numeric range for a sampler to search."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @check
    def _check(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low={self.low} and high={self.high} must satisfy {'0 < ' if self.log else ''}low < high")
        if self.whole and (self.low % 1 or self.high % 1):
            raise ValueError(f"low={self.low} and high={self.high} must be whole numbers, since whole is true")

    @property
    def bounds(self) -> list[float]:
        return [int(self.low), int(self.high)] if self.whole else [self.low, self.high]


Values = Annotated[list[Value], Field(min_length=1)]
Axis = Values | Interval


def in_axis(axis: Axis, value: Any) -> bool:
    return axis.low <= value <= axis.high if isinstance(axis, Interval) else value in axis


Condition = Annotated[dict[str, Value | Values], Field(min_length=1)]
"""Field -> allowed value or values; all fields must match."""

MAX_RUNS = 20_000
"""Per sweep: status and query read a results folder run by run, and would take minutes with more."""

Bounded = Literal["params_total", "params_active", "flops_per_token", "train_flops"]
"""Costs that are known before a run starts."""


def _check_ascending(values: list[float]) -> list[float]:
    if values != sorted(set(values)):
        raise ValueError("must be ascending")
    return values


def check_distinct(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("must not repeat a value")
    return values


Shares = Annotated[list[Inside], AfterValidator(_check_ascending)]
TuneGrid = Annotated[list[Positive], Field(min_length=3), AfterValidator(_check_ascending)]
"""At least three values, ascending: the best should have a worse one on either side."""


class Prune(Section):
    """Early stopping of a sampler's runs that are worse than most finished runs of the same depth at the same step.

    At each share `at` of the steps, the training loss averaged over the last tenth of the steps done is compared with
    finished runs of the same n_layers at that share. keep 0.5 is the median rule (Golovin et al. 2017); 1/3 at growing
    shares is asynchronous successive halving (1810.05934) against finished runs."""

    by: Literal["train_loss"]
    """the objective that decides, from the curves of the runs"""
    at: Annotated[Shares, Field(min_length=1)]
    """shares of the steps at which to decide, ascending"""
    keep: Inside = 0.5
    """a run continues only if it is in this best share of the finished runs"""
    min_runs: Count = 4
    """finished runs to compare with, at least"""

    def check_window(self, n_steps: int, log_every: int) -> None:
        """Raises ValueError if a run of this length logs no step in the window of a pruning decision."""
        for share in self.at:
            before = int(share * n_steps) // log_every * log_every
            if not any(in_window(step / n_steps, share) for step in (before, before + log_every)):
                most = max(1, int(share * n_steps * WINDOW))
                raise ValueError(
                    f"prune.at={share:g}: a run of {n_steps} steps with log_every={log_every} logs none in the last "
                    f"tenth before step {share * n_steps:g}, so that nothing would ever be pruned; "
                    f"set log_every to {most} or less, or another share"
                )


WINDOW = 0.1
"""The last share of the steps done, over which pruning averages the training loss."""


def in_window(done: float, share: float) -> bool:
    """Whether a step, as a share of all steps, is in the window of a pruning decision at `share`."""
    return share * (1 - WINDOW) < done <= share


def check_size(cells: int, runs_per_cell: int) -> None:
    """Raises ValueError for a sweep beyond MAX_RUNS, before its cells are built."""
    if cells * runs_per_cell > MAX_RUNS:
        raise ValueError(
            f"{cells:,} cells with {runs_per_cell:,} runs each exceed the limit of {MAX_RUNS:,} runs per results "
            "folder; shorten the axes, or let a sampler choose (sampler: random)"
        )


def _counted(first: int) -> BeforeValidator:
    """A validator that turns a number of seeds into a list from `first` on: 3 from 0 are 0, 1 and 2."""

    def listed(seeds: Any) -> Any:
        if isinstance(seeds, list):
            return seeds
        if not isinstance(seeds, int) or isinstance(seeds, bool):
            raise ValueError("must be a whole number, or a list of whole numbers")
        if seeds < 1:
            raise ValueError(f"must be 1 or more, the number of seeds from {first}")
        check_size(1, seeds)
        return list(range(first, first + seeds))

    return BeforeValidator(listed, json_schema_input_type=int | list[int])


SeedList = Annotated[list[int], Field(min_length=1), AfterValidator(check_distinct)]
Seeds = Annotated[SeedList, _counted(0)]
TuningSeeds = Annotated[SeedList, _counted(101)]
_SEEDS = TypeAdapter(Seeds, config=ConfigDict(defer_build=True))


def own_seeds(entry: Fields, default: list[int]) -> list[int]:
    """The seeds of a variant or a listed cell. Raises ValueError."""
    if "seeds" not in entry:
        return default
    try:
        return _SEEDS.validate_python(entry["seeds"], strict=True)
    except ValidationError:
        raise ValueError(
            f"seeds={entry['seeds']!r} must be a list of seeds, each once, or their number, from 0"
        ) from None


def cell_digest(cell: Fields) -> str:
    """A digest that is equal for equal cells: 0 and 0.0 are the same value."""
    return digest({name: float(value) if type(value) is int else value for name, value in cell.items()})


def meets(values: Fields, condition: Fields) -> bool:
    """Whether all fields of the condition have an allowed value."""
    return all(
        values.get(name) in (allowed if isinstance(allowed, list) else [allowed]) for name, allowed in condition.items()
    )


def grid_points(axes: Mapping[str, Sequence[Value]]) -> Iterator[Cell]:
    """All points of a grid, the last axis fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _repeated(sweep: Any) -> str:
    """The fields that vary in several places."""
    axes = [*sweep.space, *(name for axis in sweep.zip for name in axis)]
    varied = [*axes, *sweep.tune, *([sweep.free] if sweep.free else [])]
    repeated = {name for name in varied if varied.count(name) > 1}
    repeated |= {name for place in (*sweep.variants, *sweep.cells) for name in place if name in sweep.tune}
    repeated |= {name for place in sweep.variants for name in place if name in axes}
    solved = {sweep.free, "d_expert" if sweep.free == "d_ff" else sweep.free}  # of experts the width of one
    solved |= {"d_model", "n_heads", "d_ff", "d_expert"} if sweep.same_params_blocks else set()
    repeated |= {name for place in sweep.places() for name in place if name in solved}
    return commas(sorted(repeated))


def _check_zip(sweep: Any) -> None:
    """Zipped fields must have the same length, and the first field distinct values."""
    for axis in sweep.zip:
        lengths = {name: len(values) for name, values in axis.items()}
        if len(lengths) < 2 or len(set(lengths.values())) > 1:
            raise ValueError(f"zip: {lengths} must be two fields or more with equally many values")
        name, values = next(iter(axis.items()))
        if len(set(values)) < len(values):
            raise ValueError(f"zip.{name}={values} must not repeat a value: the first field names the point")


def _is_whole(name: str) -> bool:
    """Whether the values of a field of a run are integers (or None)."""
    annotation = RunConfig.model_fields[name].annotation if name in RunConfig.model_fields else None
    return int in {getattr(part, "__origin__", part) for part in (annotation, *get_args(annotation))}


def _ranges(sweep: Any) -> list[str]:
    return [name for name, axis in sweep.space.items() if isinstance(axis, Interval)]


VARIED: tuple[Rule, ...] = (
    (lambda c: any("preset" in place for place in (c.space, c.tune, *c.zip, *c.only.values(), *c.exclude)),
     "preset stands for many fields: set it in the base, in variants or in cells"),
    (lambda c: "preset" in c.base and any("preset" in entry for entry in (*c.variants, *c.cells)),
     "preset={c.base[preset]!r} of the base conflicts with presets in variants or cells; set it only in these"),
    (lambda c: [name for name in c.only if name not in c.space],
     "only.{found[0]} needs an axis {found[0]!r} in the space"),
    (lambda c: [name for name in fields_where(RunConfig, lambda role: role.kind in ("depth", "data"))
                if name in c.tune],
     "tune.{found[0]}: tuning chooses by the loss within each depth and text; put {found[0]} in the space"),
    (_repeated, "{found} must vary in one place: space, zip, variants, tune or free"),
    (lambda c: [name for where in (*c.only.values(), *c.exclude) for name in where
                if name in ("seed", c.free, *c.tune)],
     "only and exclude select cells, whose {found[0]} is not known yet; leave it out there"),
)  # fmt: skip
"""Each field varies in one place, and conditions name fields that are known when cells are selected."""

GRID: tuple[Rule, ...] = (
    (lambda c: c.n_trials is not None,
     "n_trials={c.n_trials} has no meaning with sampler 'grid', which runs every cell"),
    (lambda c: c.prune, "prune needs another sampler; sampler 'grid' runs every cell to its end"),
    (_ranges, "space.{found[0]} is a range; sampler 'grid' needs a list of values"),
)  # fmt: skip

SAMPLED: tuple[Rule, ...] = (
    (lambda c: c.branch_at,
     "branch_at={c.branch_at} needs sampler 'grid', whose cells are known; leave it out"),
    (lambda c: c.n_trials is None or not c.axes, "sampler {c.sampler!r} needs n_trials and a space to search"),
    (lambda c: c.variants != [{}] or c.cells,
     "variants and cells need sampler 'grid'; {c.sampler!r} proposes from the axes"),
    (lambda c: [name for name in _ranges(c) if not c.space[name].whole and _is_whole(name)],
     "space.{found[0]} is a range with fractions, and {found[0]} is an integer; add whole: true"),
    (lambda c: c.free or c.matched not in ("tokens", "steps"),
     "matched={c.matched!r} needs sampler 'grid'; with {c.sampler!r} use tokens or steps"),
    (lambda c: c.adaptive and commas(c.tune),
     "tune does not go with sampler {c.sampler!r}: put {found} in its space"),
)  # fmt: skip

MATCHED: tuple[Rule, ...] = (
    (lambda c: c.free and c.matched in ("tokens", "steps"),
     "free={c.free!r} is solved for parameters or FLOPs; matched is {c.matched!r}"),
    (lambda c: c.free == "train_tokens" and c.matched not in ("flops", "time"),
     "free='train_tokens' changes FLOPs, not {c.matched}; use matched: flops, or free: d_ff"),
    (lambda c: c.matched == "time" and (c.across, c.free) != ("depth", "train_tokens"),
     "matched='time' compares the steps of depths; add across: depth, free: train_tokens"),
    (lambda c: c.same_params_blocks and (c.across != "depth" or c.free in ("d_model", "d_ff", "d_expert")),
     "free: [width, ...] compares depths; add across: depth, and train_tokens as the second size"),
    (lambda c: c.across and c.matched in ("tokens", "steps"),
     "across: depth has no meaning with matched={c.matched!r}; use matched: flops, or leave it out"),
)  # fmt: skip


def check_sweep(sweep: Any) -> None:
    """Raise ValueError for the first rule that a definition breaks."""
    refuse_first(VARIED, sweep)
    _check_zip(sweep)
    refuse_first((*(GRID if sweep.sampler == "grid" else SAMPLED), *MATCHED), sweep)
