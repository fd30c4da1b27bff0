"""How many runs share a GPU where --workers does not say: chosen by measurement, else one.

    throughput(n) = n runs / seconds of a run while n share the GPU,    n = 1, 2, 4, ...

Each doubling must fit into the GPU's memory, with a CUDA context for every process, and raise the throughput by GAIN.
Measured are the steps that were timed with so many workers (`--calibrate`), or the peaks of finished runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sparsedepth.config.run import RunConfig
from sparsedepth.plan.price import PricingSetup, price_of, uncalibrated

MOST = 32
"""Runs on one GPU."""

GAIN = 1.1
"""Throughput of twice as many runs / that of so many, at least."""


def workers_per_gpu(runs: Sequence[RunConfig], setup_of: Callable[[int], PricingSetup]) -> int:
    """`setup_of`: the setup of one GPU, or of several with equally many runs on each, for a number of runs on each."""
    if not runs:
        return 1
    chosen, rate = 1, _throughput(runs, setup_of(1))
    while 2 * chosen <= MOST:
        setup = setup_of(2 * chosen)
        is_measured = setup.memory_ratios or not uncalibrated(runs, setup)
        faster = _throughput(runs, setup)
        if not is_measured or not _fits(runs, setup) or faster < GAIN * rate:
            break
        chosen, rate = 2 * chosen, faster
    return chosen


def _throughput(runs: Sequence[RunConfig], setup: PricingSetup) -> float:
    """Runs per second of one GPU: as timed with so many, else as assumed. How long finished runs took does not tell,
    since it is not recorded how many shared their GPU."""
    price = price_of(runs, replace(setup, time_ratios={}))
    return setup.place.sharing * len(runs) / price.busy_seconds


def _fits(runs: Sequence[RunConfig], setup: PricingSetup) -> bool:
    memory = setup.assumed.memory
    return memory is not None and setup.place.sharing * price_of(runs, setup).memory_bytes <= memory
