"""Estimate the cost of a sweep before it runs: parameters, FLOPs, tokens, memory, disk and time.

A *kind* is a group of runs of equal shape, that is, equal in all fields that change the cost. Parameters and FLOPs are
exact (`cost`), memory is modelled (`memory`) or measured, time is assumed or calibrated (`duration`).

    total time = time at which the last worker finishes if workers take the runs in the order of the plan

Runs that are still unknown are priced at assumed values: results at a tuned value at the first value of its grid,
proposals of a sampler at points drawn evenly from the space. A sampler's number of runs is an upper bound, since equal
proposals share runs and pruned runs end early; an extension of a tuning grid adds runs.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
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
from sparsedepth.plan.tasks import LossOf, Plan, broken_constraints, no_results

RECORD_BYTES = 100_000
"""Assumed size of a run's tables, manifest and summary."""

PROPOSALS = 64
"""Most sample points by which an adaptive sampler's proposals are priced."""


@dataclass(frozen=True, kw_only=True)
class PricingSetup:
    """Machine and runtime settings that the price depends on."""

    device: str = "cpu"
    """of DEVICES"""
    workers: int = 1
    place: Place = field(default_factory=Place)
    timings: Mapping[str, Timing] | None = None
    """by the shape_id of a step"""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """measured / modelled peak memory, by shape_id; other shapes use the median"""

    @property
    def assumed(self) -> Device:
        return DEVICES[self.device]


@dataclass(frozen=True, kw_only=True)
class ShapePrice:
    """The runs of one shape. Amounts are per run."""

    shape_id: str
    varied: dict[str, Any]
    """the fields in which kinds differ"""
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
    kinds: list[ShapePrice]
    alike: tuple[str, ...]
    """fields, the seed included, in which runs of a kind may differ: they change no cost"""
    setup: PricingSetup
    bound: str
    """'' if all runs are known, else 'at least' or 'at most'"""
    seconds: Seconds
    """wall-clock time of the sweep"""
    busy_seconds: float
    """summed over workers"""
    data_bytes: int | None
    """of the tokenised text; None if its length is unknown until it is read"""

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
        """Peak memory of the largest run on one device."""
        return max(kind.memory_bytes for kind in self.kinds)

    @property
    def disk_bytes(self) -> int:
        """Records, three checkpoints per running run, and the text if its length is known."""
        records = sum(kind.runs * kind.disk_bytes for kind in self.kinds)
        largest = max(kind.params_total for kind in self.kinds)
        return records + 3 * 12 * largest * self.setup.workers + (self.data_bytes or 0)

    @property
    def is_calibrated(self) -> bool:
        return all(kind.seconds.calibrated for kind in self.kinds)


def pricing_setup(
    runtime: RuntimeConfig, *, device: str, workers: int, processes: int = 1, gpus: int = 0
) -> PricingSetup:
    """The setup of a machine with one of DEVICES. If there are fewer GPUs (or groups of GPUs) than workers, runs share
    them."""
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
    """The entry of DEVICES for a device name: 'NVIDIA H100 80GB HBM3' -> 'h100'."""
    return next((known for known in DEVICES if known in name.lower()), "a100")


def expected_runs(definition: SweepDefinition, loss_of: LossOf = no_results) -> tuple[list[RunConfig], str]:
    """The expected runs of the sweep in order, given the finished runs; and 'at least', 'at most' or ''."""
    if definition.adaptive:
        return _proposed(definition), "at most"
    plan = Plan(definition)
    runs = [planned.config for planned in plan.runs(loss_of)]
    if not definition.tune:
        return runs, "at most" if definition.prune else ""
    first = {name: grid[0] for name, grid in definition.tune.items()}  # the cost does not depend on the tuned value
    runs += [definition.run_config({**match.cell, **first}, seed) for match, seed in plan.results_to_come(loss_of)]
    return runs, "at least"


def _proposed(definition: SweepDefinition) -> list[RunConfig]:
    """n_trials x seeds runs at points drawn evenly from the space."""
    from sparsedepth.plan.propose import proposals

    assert definition.n_trials is not None
    sample = definition.model_copy(update={"sampler": "random", "n_trials": min(definition.n_trials, PROPOSALS)})
    cells = proposals(sample)
    configs = [definition.run_config(cell, definition.seeds[0]) for cell in cells]
    feasible = [config for config in configs if not broken_constraints(definition, config)]
    if not feasible:
        raise ValueError(
            f"sweep {definition.name!r}: 'exclude' and 'constraints' leave no point of the space; relax one of them"
        )
    points = [feasible[i % len(feasible)] for i in range(definition.n_trials)]
    return [config.model_copy(update={"seed": seed}) for config in points for seed in definition.seeds]


def price(definition: SweepDefinition, setup: PricingSetup) -> Price:
    """The price of a sweep. Raises ValueError for a cell that cannot be built or matched."""
    runs, bound = expected_runs(definition)
    return price_of(runs, setup, bound)


def price_of(runs: Sequence[RunConfig], setup: PricingSetup, bound: str = "") -> Price:
    """The price of runs that start in this order. Raises ValueError if the setup's parallelism does not support one."""
    for config in runs:
        check_parallel(config, setup.place.parallel)
    ids = [shape_id(config) for config in runs]
    examples = dict(zip(reversed(ids), reversed(runs), strict=True))
    shapes = {key: shape(examples[key]) for key in dict.fromkeys(ids)}
    first, *others = shapes.values()
    differing = [name for name in first if any(other[name] != first[name] for other in others)]
    kinds = [
        _kind(key, examples[key], ids.count(key), _varied(fields, differing), setup) for key, fields in shapes.items()
    ]
    seconds_by_id = {kind.shape_id: kind.seconds for kind in kinds}
    times = [seconds_by_id[key] for key in ids]
    value = makespan([time.value for time in times], setup.workers)
    high = makespan([time.value * time.factor for time in times], setup.workers)
    return Price(
        kinds=kinds,
        alike=_alike(runs, differing),
        setup=setup,
        bound=bound,
        seconds=Seconds(value=value, factor=high / value),
        busy_seconds=sum(time.value for time in times),
        data_bytes=_data_bytes(runs),
    )


def _alike(runs: Sequence[RunConfig], priced: Collection[str]) -> tuple[str, ...]:
    """Fields that differ between runs and are not among those that tell their shapes apart."""
    rows = [config.model_dump() for config in runs]
    return tuple(name for name in rows[0] if name not in priced and any(row[name] != rows[0][name] for row in rows))


def _varied(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named fields of a shape; of weight_density a shape has only whether it is below 1."""
    densities = {True: "below 1", False: 1.0}
    return {name: densities[fields[name]] if name == "weight_density" else fields[name] for name in names}


def _kind(key: str, config: RunConfig, n_runs: int, varied: dict[str, Any], setup: PricingSetup) -> ShapePrice:
    run_cost = cost(config)
    timing = (setup.timings or {}).get(shape_id(config, step_only=True))
    ratio = setup.peaks.get(key) or (median(setup.peaks.values()) if setup.peaks else 1.0)
    return ShapePrice(
        shape_id=key,
        varied=varied,
        runs=n_runs,
        params_total=run_cost.params_total,
        params_active=run_cost.params_active,
        tokens=config.train_tokens,
        train_flops=float(run_cost.train_flops(config.train_tokens)),
        memory_bytes=round(ratio * peak_bytes(config, setup.place)),
        disk_bytes=4 * run_cost.params_total + RECORD_BYTES,
        seconds=seconds(config, setup.place, setup.assumed, timing),
    )


def makespan(seconds: Sequence[float], workers: int) -> float:
    """Time at which the last worker finishes if each free worker takes the next job."""
    end_times = [0.0] * workers
    for job in seconds:
        heapq.heapreplace(end_times, end_times[0] + job)
    return max(end_times)


def _data_bytes(runs: Sequence[RunConfig]) -> int | None:
    """Size of token shards: 2 bytes per token, or 4 if the vocabulary exceeds 65,536; none for tasks."""
    texts: dict[tuple[Any, ...], tuple[int | None, int]] = {}
    for config in (config for config in runs if task_name(config.corpus) is None):
        key = (config.corpus, config.text_field, config.tokenizer, config.val_fraction, config.max_corpus_tokens)
        texts[key] = (config.max_corpus_tokens, 2 if config.vocab_size <= 2**16 else 4)
    sizes = [tokens and tokens * width for tokens, width in texts.values()]
    return None if None in sizes else sum(size for size in sizes if size)


def uncalibrated(definition: SweepDefinition, setup: PricingSetup) -> list[RunConfig]:
    timings = setup.timings or {}
    shapes = {shape_id(config, step_only=True): config for config in expected_runs(definition)[0]}
    return [config for key, config in shapes.items() if key not in timings]


def with_peaks(setup: PricingSetup, measured: Sequence[tuple[RunConfig, int]]) -> PricingSetup:
    """The setup with measured peaks in bytes; for each shape the largest."""
    ratios: dict[str, float] = {}
    for config, peak in measured:
        key = shape_id(config)
        ratios[key] = max(ratios.get(key, 0.0), peak / peak_bytes(config, setup.place))
    return replace(setup, peaks=ratios)


def as_json(price: Price) -> dict[str, Any]:
    content = asdict(replace(price, setup=replace(price.setup, timings=None, peaks={})))
    totals = ("runs", "tokens", "train_flops", "memory_bytes", "disk_bytes", "is_calibrated")
    return content | {name: getattr(price, name) for name in totals}
