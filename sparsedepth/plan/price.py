"""Estimate the cost of a sweep before it runs: parameters, FLOPs, tokens, memory, disk and time.

A *kind* is a group of runs of equal shape: equal in all fields that change the cost. Parameters and FLOPs are exact,
memory is modelled, time assumed or calibrated (`plan.estimate`); finished runs correct both:

    total time       = time at which the last worker finishes if workers take the runs in the order of the plan
    ratio of a shape = measured / estimated; a shape without a finished run takes the median of the others

Runs that are still unknown are priced at assumed values (`Plan.expected_runs`). A sampler's number of runs is an upper
bound, since equal proposals share runs and pruned runs end early; an extension of a tuning grid adds runs."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from sparsedepth.config.corpus import TASK, kind_of
from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig, check_parallel
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.section import Fields
from sparsedepth.plan import estimate
from sparsedepth.plan.budgets import shared_steps
from sparsedepth.plan.estimate import DEVICES, Device, Place, Seconds, Timing, shape_id
from sparsedepth.plan.tasks import Plan
from sparsedepth.store.cache import read_columns
from sparsedepth.store.schema import stored_value

RECORD_BYTES = 100_000
"""Assumed size of a run's tables, manifest and summary."""

MOST_SHARING, GAIN = 32, 1.1
"""Most runs on one GPU, and the least throughput of twice as many runs / that of so many."""


@dataclass(frozen=True, kw_only=True)
class PricingSetup:
    """Machine and runtime settings that the price depends on."""

    device: str = "cpu"
    workers: int = 1
    place: Place = field(default_factory=Place)
    timings: Mapping[str, Timing] | None = None
    """by the shape_id of a step"""
    time_ratios: Mapping[str, float] = field(default_factory=dict)
    memory_ratios: Mapping[str, float] = field(default_factory=dict)
    """of finished runs: measured / estimated, by shape_id"""

    @property
    def assumed(self) -> Device:
        return DEVICES[self.device]

    @property
    def memory(self) -> float | None:
        """Of a GPU, for each of the runs that share it; None if unknown."""
        return self.assumed.memory and self.assumed.memory / self.place.sharing

    @property
    def devices(self) -> int:
        """GPUs, or groups of GPUs; on a CPU the workers."""
        return -(-self.workers // self.place.sharing)


@dataclass(frozen=True, kw_only=True)
class ShapePrice:
    """The runs of one shape. Amounts are per run."""

    shape_id: str
    varied: Fields
    runs: int
    params_total: int
    params_active: int
    tokens: int
    train_flops: float
    memory_bytes: int
    micro_batch: int | None
    """sequences per forward pass; None for all of a device's share"""
    disk_bytes: int
    seconds: Seconds
    shared: float = 0.0
    """share of the steps that runs take over from shorter ones of their trunk (`branch_at`); priced there"""


@dataclass(frozen=True, kw_only=True)
class Price:
    kinds: list[ShapePrice]
    alike: tuple[str, ...]
    """fields, the seed included, in which runs of a kind may differ: they change no cost"""
    setup: PricingSetup
    bound: str
    """'' if all runs are known, else 'at least' or 'at most'"""
    seconds: Seconds
    busy_seconds: float
    """summed over workers"""
    data_bytes: int | None
    """of the tokenised text; None if its length is unknown until it is read"""
    runs: int
    tokens: int
    train_flops: float
    memory_bytes: int
    """peak of the largest run on one device, with its process's CUDA context"""
    disk_bytes: int
    """records, three checkpoints per running run, and the text if its length is known"""
    is_calibrated: bool


def pricing_setup(
    runtime: RuntimeConfig, *, device: str, workers: int, processes: int = 1, gpus: int = 0
) -> PricingSetup:
    """The setup of a machine with one of DEVICES. Workers share GPUs (or groups) if there are fewer, but not 0."""
    place = Place(
        device="cpu" if device == "cpu" else "cuda",
        micro_batch=runtime.micro_batch,
        compile=runtime.compile,
        cuda_graph=runtime.cuda_graph,
        processes=processes,
        threads=runtime.threads or 1,
        parallel=runtime.parallel,
        sharing=-(-workers // gpus) if gpus else 1,
    )
    return PricingSetup(device=device, workers=workers, place=place)


def named_device(name: str) -> str:
    """The entry of DEVICES for a device: 'NVIDIA H100 80GB HBM3' -> 'h100', 'cpu (x86_64)' -> 'cpu'."""
    return next((known for known in DEVICES if known in name.lower()), "a100")


def price(plan: Plan, setup: PricingSetup) -> Price:
    return price_of(plan.expected_runs(), setup, plan.bound)


def price_of(runs: Sequence[RunConfig], setup: PricingSetup, bound: str = "", done: Sequence[RunConfig] = ()) -> Price:
    """The price of runs that start in this order, after those that are `done`, whose trunks they continue. Raises
    ValueError if the setup's parallelism does not support one."""
    for config in runs:
        check_parallel(config, setup.place.parallel)
    by_shape = _kinds(runs, setup, done)
    kinds = [*by_shape.values()]
    times = [by_shape[shape_id(config)].seconds for config in runs]
    value = makespan([time.value for time in times], setup.workers)
    high = makespan([time.high for time in times], setup.workers)
    data_bytes = _data_bytes(runs)
    checkpoints = 3 * 12 * max(kind.params_total for kind in kinds) * min(setup.workers, len(runs))
    rows = [config.model_dump() for config in runs]
    varied = [name for name, value in rows[0].items() if any(row[name] != value for row in rows)]
    return Price(
        kinds=kinds,
        alike=tuple(name for name in varied if name not in kinds[0].varied),
        setup=setup,
        bound=bound,
        seconds=Seconds(value=value, factor=high / value),
        busy_seconds=sum(kind.runs * kind.seconds.value for kind in kinds),
        data_bytes=data_bytes,
        runs=len(runs),
        tokens=sum(round(kind.runs * kind.tokens * (1 - kind.shared)) for kind in kinds),
        train_flops=sum(kind.runs * kind.train_flops * (1 - kind.shared) for kind in kinds),
        memory_bytes=max(kind.memory_bytes for kind in kinds),
        disk_bytes=sum(kind.runs * kind.disk_bytes for kind in kinds) + checkpoints + (data_bytes or 0),
        is_calibrated=all(kind.seconds.calibrated for kind in kinds),
    )


def _kinds(runs: Sequence[RunConfig], setup: PricingSetup, done: Sequence[RunConfig]) -> dict[str, ShapePrice]:
    """The runs by the id of their shape, in the order of their first."""
    is_wide = len({(run.trunk_key, run.seed) for run in runs}) < setup.workers  # then branches start together
    examples = dict[str, RunConfig]()
    shared = defaultdict[str, list[int]](list)
    for config, steps in zip(runs, shared_steps(runs, done if is_wide else [*runs, *done]), strict=True):
        key = shape_id(config)
        examples.setdefault(key, config)
        shared[key].append(steps)
    shapes = {key: estimate.shape(example) for key, example in examples.items()}
    first, *others = shapes.values()
    differing = [name for name in first if any(other[name] != first[name] for other in others)]
    return {
        key: _kind(key, examples[key], shared[key], {name: fields[name] for name in differing}, setup)
        for key, fields in shapes.items()
    }


def _kind(key: str, config: RunConfig, shared: list[int], varied: Fields, setup: PricingSetup) -> ShapePrice:
    """`shared`: the steps that each run takes over from a shorter one."""
    run_cost = cost(config)
    share = sum(shared) / len(shared) / config.n_steps
    own_tokens = round((1 - share) * config.n_steps) * config.batch_tokens
    correction = _ratio(setup.memory_ratios, key)
    place = estimate.fitted(config, setup.place, setup.memory, correction)
    setup = replace(setup, place=place)
    return ShapePrice(
        shape_id=key,
        varied=varied,
        runs=len(shared),
        params_total=run_cost.params_total,
        params_active=run_cost.params_active,
        tokens=config.train_tokens,
        train_flops=float(run_cost.train_flops(config.train_tokens)),
        memory_bytes=round(correction * estimate.peak_bytes(config, place))
        + estimate.CONTEXT_BYTES[setup.place.device],
        micro_batch=place.micro_batch,
        disk_bytes=(16 if config.schedule == "wsd" else 4) * run_cost.params_total + RECORD_BYTES,
        seconds=_seconds(key, config.model_copy(update={"train_tokens": own_tokens}) if share else config, setup),
        shared=share,
    )


def _seconds(key: str, config: RunConfig, setup: PricingSetup) -> Seconds:
    """As finished runs of the shape took, else as calibrated, else as assumed, corrected by those of other shapes."""
    timing = (setup.timings or {}).get(shape_id(config, step_only=True))
    expected = estimate.seconds(config, setup.place, setup.assumed, None if key in setup.time_ratios else timing)
    if expected.calibrated or not setup.time_ratios:
        return expected
    factor = estimate.CALIBRATED if key in setup.time_ratios else estimate.RELATED
    return Seconds(value=expected.value * _ratio(setup.time_ratios, key), factor=factor)


def _ratio(ratios: Mapping[str, float], key: str) -> float:
    """A shape's own ratio, else the median of all shapes; 1 without any."""
    return ratios.get(key) or (median(ratios.values()) if ratios else 1.0)


def makespan(seconds: Sequence[float], workers: int) -> float:
    """Time at which the last worker finishes if each free worker takes the next job."""
    end_times = [0.0] * workers
    for job in seconds:
        heapq.heapreplace(end_times, end_times[0] + job)
    return max(end_times)


def _data_bytes(runs: Sequence[RunConfig]) -> int | None:
    """Size of token shards: 2 bytes per token, or 4 if the vocabulary exceeds 65,536; none for tasks."""
    texts = {
        (config.corpus, config.text_field, config.tokenizer, config.val_fraction, config.max_corpus_tokens): config
        for config in runs
        if kind_of(config.corpus) is not TASK
    }
    tokens = [(config.max_corpus_tokens, 2 if config.vocab_size <= 2**16 else 4) for config in texts.values()]
    known = [number * width for number, width in tokens if number is not None]
    return sum(known) if len(known) == len(tokens) else None


def uncalibrated(runs: Sequence[RunConfig], setup: PricingSetup) -> list[RunConfig]:
    """A run of each shape whose step was not timed."""
    timings = setup.timings or {}
    shapes = {shape_id(config, step_only=True): config for config in runs}
    return [config for key, config in shapes.items() if key not in timings]


def with_finished(setup: PricingSetup, results: Path | None, runs: Sequence[RunConfig]) -> PricingSetup:
    """The setup corrected by the runs trained in `results` on such a device: a shape's median time, largest peak. A
    search's own runs are not known, but their shapes are."""
    names = [*estimate.shape(runs[0])]
    of_shape = {tuple(stored_value(value) for value in estimate.shape(run).values()): run for run in runs}
    facts = ("outcome", "device", "seconds", "peak_memory_bytes")
    rows = read_columns(results, (*names, *facts), damaged=[]) if results and results.is_dir() else {}
    times = defaultdict[str, list[float]](list)
    peaks = defaultdict[str, list[float]](list)
    for row in rows.values():
        run = of_shape.get(tuple(row[name] for name in names))
        if run is None or row["outcome"] != "ok" or not row["device"] or named_device(row["device"]) != setup.device:
            continue
        key = shape_id(run)
        place = estimate.fitted(run, setup.place, setup.memory)
        if row["seconds"]:
            times[key].append(row["seconds"] / estimate.seconds(run, place, setup.assumed).value)
        if row["peak_memory_bytes"]:
            peaks[key].append(row["peak_memory_bytes"] / estimate.peak_bytes(run, place))
    return replace(
        setup,
        time_ratios={key: median(ratios) for key, ratios in times.items()},
        memory_ratios={key: max(ratios) for key, ratios in peaks.items()},
    )


def workers_per_gpu(runs: Sequence[RunConfig], setup_of: Callable[[int], PricingSetup]) -> int:
    """How many runs share a GPU where --workers does not say: two, one of which trains while another starts or is
    measured, until a measurement says better.

        throughput(n) = n runs / seconds of a run while n share the GPU,    n = 1, 2, 4, ...

    Each doubling must fit into the GPU's memory, with the micro-batch of one, and where it was measured raise the
    throughput by GAIN. Measured are the steps that were timed with so many workers (`--calibrate`), or the peaks of
    finished runs. `setup_of`: for a number of runs on each GPU."""

    def throughput(setup: PricingSetup) -> float:
        """Of one GPU. How long finished runs took does not tell, since it is not recorded how many shared theirs."""
        return setup.place.sharing * len(runs) / price_of(runs, replace(setup, time_ratios={})).busy_seconds

    if not runs:
        return 1
    chosen = 1
    alone = setup_of(1)
    rate = throughput(alone)
    peak = price_of(runs, alone).memory_bytes
    while 2 * chosen <= MOST_SHARING:
        setup = setup_of(2 * chosen)
        is_measured = setup.memory_ratios or not uncalibrated(runs, setup)
        memory = (alone.memory or 0.0) * (1.0 if is_measured else estimate.FITS)
        faster = throughput(setup)
        if 2 * chosen * peak > memory or not (faster >= GAIN * rate if is_measured else chosen == 1):
            break
        chosen = 2 * chosen
        rate = faster
    return chosen


def as_json(price: Price) -> Fields:
    return asdict(replace(price, setup=replace(price.setup, timings=None, time_ratios={}, memory_ratios={})))
