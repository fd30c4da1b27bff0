"""What a sweep costs, before anything runs: runs by kind, parameters, FLOPs, tokens, memory, disk and time.

A *kind* is a shape with its runs: all fields that change what a run costs, and none that do not. Parameters and FLOPs
are exact (`cost`), memory is modelled (`memory`) or measured, time is assumed or calibrated (`duration`).

    time in all = the runs given out to the workers one after the other, in the order of the plan

Runs that come later (the results at a tuned value, proposals of a sampler) are priced as if they were known: at the
first tuned value; at points drawn evenly from the space. A sampler's runs are an upper bound, since pruned ones end
early and equal proposals share theirs; an extension of a tuning grid adds some.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from sparsedepth.config.combinations import check_parallel
from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.config.task import task_name
from sparsedepth.plan.duration import DEVICES, Device, Seconds, Timing, seconds, shape, shape_id
from sparsedepth.plan.memory import Place, peak_bytes
from sparsedepth.plan.tasks import LossOf, Plan, beyond, no_results

RECORD_BYTES = 100_000
"""A run's tables, manifest and summary: about this much beside its weights."""

PROPOSALS = 64
"""Points of an adaptive sampler's space that stand for its proposals."""


@dataclass(frozen=True, kw_only=True)
class PricingSetup:
    """Where and how a sweep is to run, as far as its price depends on it."""

    device: str = "cpu"
    """of DEVICES"""
    workers: int = 1
    place: Place = field(default_factory=Place)
    timings: Mapping[str, Timing] | None = None
    """by the shape_id of a step"""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """measured / modelled peak of memory, by shape_id; other shapes take the median"""

    @property
    def assumed(self) -> Device:
        return DEVICES[self.device]


@dataclass(frozen=True, kw_only=True)
class ShapePrice:
    """The runs of one shape. Amounts are of one run."""

    shape_id: str
    varied: dict[str, Any]
    """the fields in which this kind differs from another"""
    runs: int
    params_total: int
    params_active: int
    tokens: int
    train_flops: float
    memory_bytes: int
    disk_bytes: int
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class Price:
    """A sweep's price."""

    kinds: list[ShapePrice]
    setup: PricingSetup
    bound: str
    """'' where the runs are known; else 'at least' or 'at most'"""
    seconds: Seconds
    """from start to end, on all workers"""
    busy_seconds: float
    """of all workers together"""
    data_bytes: int | None
    """of the tokenised text; None where its length is not known before it is read"""

    @property
    def runs(self) -> int:
        return sum(kind.runs for kind in self.kinds)

    @property
    def train_flops(self) -> float:
        return sum(kind.runs * kind.train_flops for kind in self.kinds)

    @property
    def tokens(self) -> int:
        return sum(kind.runs * kind.tokens for kind in self.kinds)

    @property
    def memory_bytes(self) -> int:
        """Peak memory on one device, or of one run's process."""
        return max(kind.memory_bytes for kind in self.kinds)

    @property
    def disk_bytes(self) -> int:
        """Records, three checkpoints of each run that is under way, and the text where it is known."""
        records = sum(kind.runs * kind.disk_bytes for kind in self.kinds)
        largest = max(kind.params_total for kind in self.kinds)
        return records + 3 * 12 * largest * self.setup.workers + (self.data_bytes or 0)

    @property
    def is_calibrated(self) -> bool:
        return all(kind.seconds.calibrated for kind in self.kinds)


def pricing_setup(
    runtime: RuntimeConfig, *, device: str, workers: int, processes: int = 1, gpus: int = 0
) -> PricingSetup:
    """The setup of a machine whose device is one of DEVICES; of fewer `gpus`, or groups of them, than workers some are
    shared."""
    place = Place(
        device="cpu" if device == "cpu" else "cuda",
        micro_batch=runtime.micro_batch,
        compile=runtime.compile,
        processes=processes,
        threads=runtime.threads or 1,
        parallel=runtime.parallel,
        sharing=-(-workers // gpus) if gpus else 1,
    )
    return PricingSetup(device=device, workers=workers, place=place)


def named_device(name: str) -> str:
    """The one of DEVICES that a device's own name stands for: 'NVIDIA H100 80GB HBM3' -> 'h100'."""
    return next((known for known in DEVICES if known in name.lower()), "a100")


def expected_runs(definition: SweepDefinition, loss_of: LossOf = no_results) -> tuple[list[RunConfig], str]:
    """Every run that the sweep will have, in order, as far as that can be told, given the runs that are finished; and
    'at least', 'at most' or ''."""
    if definition.adaptive:
        return _proposed(definition), "at most"
    plan = Plan(definition)
    runs = [planned.config for planned in plan.runs(loss_of)]
    if not definition.tune:
        return runs, "at most" if definition.prune else ""
    first = {name: grid[0] for name, grid in definition.tune.items()}  # which is the best value changes no cost
    runs += [definition.run_config({**match.cell, **first}, seed) for match, seed in plan.results_to_come(loss_of)]
    return runs, "at least"


def _proposed(definition: SweepDefinition) -> list[RunConfig]:
    """n_trials x seeds runs, at points drawn evenly from the space."""
    from sparsedepth.plan.propose import proposals

    assert definition.n_trials is not None
    sample = definition.model_copy(update={"sampler": "random", "n_trials": min(definition.n_trials, PROPOSALS)})
    cells = proposals(sample)
    built = [definition.run_config(cell, definition.seeds[0]) for cell in cells]
    feasible = [config for config in built if not beyond(definition, config)]
    if not feasible:
        raise ValueError(
            f"sweep {definition.name!r}: exclude and constraints leave no point of its space; widen one of them"
        )
    points = [feasible[i % len(feasible)] for i in range(definition.n_trials)]
    return [config.model_copy(update={"seed": seed}) for config in points for seed in definition.seeds]


def price(definition: SweepDefinition, setup: PricingSetup) -> Price:
    """The price of a sweep. Raises ValueError for a cell that cannot be built or matched."""
    runs, bound = expected_runs(definition)
    return price_of(runs, setup, bound)


def price_of(runs: Sequence[RunConfig], setup: PricingSetup, bound: str = "") -> Price:
    """The price of runs that start in this order. Raises ValueError for one that cannot be spread over processes as
    the setup says."""
    for config in runs:
        check_parallel(config, setup.place.parallel)
    ids = [shape_id(config) for config in runs]
    examples = dict(zip(reversed(ids), reversed(runs), strict=True))
    shapes = {key: shape(examples[key]) for key in dict.fromkeys(ids)}
    every = list(shapes.values())
    differing = [name for name in every[0] if any(other[name] != every[0][name] for other in every)]
    kinds = [
        _kind(key, examples[key], ids.count(key), _varied(fields, differing), setup) for key, fields in shapes.items()
    ]
    by_id = {kind.shape_id: kind.seconds for kind in kinds}
    each = [by_id[key] for key in ids]
    value = makespan([time.value for time in each], setup.workers)
    high = makespan([time.value * time.factor for time in each], setup.workers)
    return Price(
        kinds=kinds,
        setup=setup,
        bound=bound,
        seconds=Seconds(value=value, factor=high / value),
        busy_seconds=sum(time.value for time in each),
        data_bytes=_data_bytes(runs),
    )


def _varied(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Some fields of a shape, which tells of weight_density only whether it is below 1."""
    densities = {True: "below 1", False: 1.0}
    return {name: densities[fields[name]] if name == "weight_density" else fields[name] for name in names}


def _kind(key: str, config: RunConfig, n_runs: int, varied: dict[str, Any], setup: PricingSetup) -> ShapePrice:
    counted = cost(config)
    timing = (setup.timings or {}).get(shape_id(config, step_only=True))
    ratio = setup.peaks.get(key) or (median(setup.peaks.values()) if setup.peaks else 1.0)
    return ShapePrice(
        shape_id=key,
        varied=varied,
        runs=n_runs,
        params_total=counted.params_total,
        params_active=counted.params_active,
        tokens=config.train_tokens,
        train_flops=float(counted.train_flops(config.train_tokens)),
        memory_bytes=round(ratio * peak_bytes(config, setup.place)),
        disk_bytes=4 * counted.params_total + RECORD_BYTES,
        seconds=seconds(config, setup.place, setup.assumed, timing),
    )


def makespan(each: Sequence[float], workers: int) -> float:
    """When the last of `workers` ends that take jobs of these seconds one after the other."""
    free = [0.0] * workers
    for job in each:
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def _data_bytes(runs: Sequence[RunConfig]) -> int | None:
    """Token shards: 2 bytes a token, 4 from 65,537 entries of the vocabulary on; none of a task."""
    texts: dict[tuple[Any, ...], tuple[int | None, int]] = {}
    for config in (config for config in runs if task_name(config.corpus) is None):
        key = (config.corpus, config.text_field, config.tokenizer, config.val_fraction, config.max_corpus_tokens)
        texts[key] = (config.max_corpus_tokens, 2 if config.vocab_size <= 2**16 else 4)
    sizes = [tokens and tokens * width for tokens, width in texts.values()]
    return None if None in sizes else sum(size for size in sizes if size)


def uncalibrated(definition: SweepDefinition, setup: PricingSetup) -> list[RunConfig]:
    """One run of each shape whose steps were not timed yet."""
    known = setup.timings or {}
    shapes = {shape_id(config, step_only=True): config for config in expected_runs(definition)[0]}
    return [config for key, config in shapes.items() if key not in known]


def with_timings(setup: PricingSetup, timings: Mapping[str, Timing]) -> PricingSetup:
    return replace(setup, timings={**(setup.timings or {}), **timings})


def with_peaks(setup: PricingSetup, measured: Sequence[tuple[RunConfig, int]]) -> PricingSetup:
    """The setup with the peaks of memory, in bytes, that runs had on this kind of machine: of a shape the largest."""
    ratios: dict[str, float] = {}
    for config, peak in measured:
        key = shape_id(config)
        ratios[key] = max(ratios.get(key, 0.0), peak / peak_bytes(config, setup.place))
    return replace(setup, peaks=ratios)


def as_json(price: Price) -> dict[str, Any]:
    """The price as plain data."""
    content = asdict(replace(price, setup=replace(price.setup, timings=None, peaks={})))
    totals = ("runs", "tokens", "train_flops", "memory_bytes", "disk_bytes", "is_calibrated")
    return content | {name: getattr(price, name) for name in totals}
