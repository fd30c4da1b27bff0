"""How many runs share a GPU: by steps that were timed with so many, in its memory, one context for each process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sparsedepth.cli import pricing, start_sweep
from sparsedepth.cli.option import WorkerOptions
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import DEFAULT
from sparsedepth.plan.estimate import CONTEXT_BYTES, Timing, peak_bytes, shape_id
from sparsedepth.plan.price import PricingSetup, price_of, pricing_setup, workers_per_gpu
from sparsedepth.sweep.machine import Machine

RUN = build(RunConfig, {"n_layers": 2, "seq_len": 64, "batch_tokens": 512, "train_tokens": 512 * 20_000}, "test")
STEPS = {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.030}
"""Seconds of a step while so many runs share the GPU: 100, 182, 308 and 267 steps a second of all of them."""


def setup_of(n: int, *, steps: dict[int, float] = STEPS, peak: float | None = None) -> PricingSetup:
    setup = pricing_setup(DEFAULT, device="h100", workers=n, gpus=1)
    timings = {shape_id(RUN, step_only=True): Timing(step=steps[n], forward=0.0)} if n in steps else {}
    ratios = {} if peak is None else {shape_id(RUN): peak / peak_bytes(RUN, setup.place)}
    return PricingSetup(device="h100", workers=n, place=setup.place, timings=timings, memory_ratios=ratios)


def test_without_a_measurement_a_gpu_has_two_runs_if_they_fit():
    """Six processes on one H200 delivered .54 of running one after another."""
    assert workers_per_gpu([RUN], lambda n: setup_of(n, steps={})) == 2
    assert workers_per_gpu([], setup_of) == 1
    large = build(RunConfig, {"preset": "llama-1b"}, "test")
    assert workers_per_gpu([large], lambda n: setup_of(n, steps={})) == 1


def test_as_many_runs_as_raise_the_throughput_of_the_gpu():
    assert workers_per_gpu([RUN], setup_of) == 4
    no_gain_from_a_second, four_not_timed = {1: 0.01, 2: 0.02, 4: 0.01}, {1: 0.01, 2: 0.011}
    assert workers_per_gpu([RUN], lambda n: setup_of(n, steps=no_gain_from_a_second)) == 1
    assert workers_per_gpu([RUN], lambda n: setup_of(n, steps=four_not_timed)) == 2


@pytest.mark.parametrize(
    ("peak", "fits"),
    [(30e9, 2), (19e9, 4), (19.5e9, 2), (50e9, 1)],  # 4 x 19.5 GB fit into 80 GB, their contexts do not
)
def test_a_measured_peak_with_a_context_for_each_process_must_fit(peak, fits):
    assert price_of([RUN], setup_of(1, peak=peak)).memory_bytes == pytest.approx(peak + CONTEXT_BYTES["cuda"], abs=2)
    assert workers_per_gpu([RUN], lambda n: setup_of(n, peak=peak)) == fits


def test_a_measured_peak_alone_shares_the_gpu_as_far_as_launches_leave_it_idle():
    """Narrow runs are limited by launches, which several runs make at the same time."""
    chosen = workers_per_gpu([RUN], lambda n: setup_of(n, steps={}, peak=1e9))
    rates = [n / price_of([RUN], setup_of(n, steps={}, peak=1e9)).busy_seconds for n in (chosen // 2, chosen)]
    assert chosen > 1 and rates[1] >= 1.1 * rates[0]


def test_how_long_finished_runs_took_does_not_tell_how_many_shared_their_gpu():
    def took_twice_as_long(n: int) -> PricingSetup:
        return replace(setup_of(n), time_ratios={shape_id(RUN): 2.0 / n})

    assert workers_per_gpu([RUN], took_twice_as_long) == 4


@pytest.mark.parametrize(
    ("asked", "gpus", "workers"), [(None, [["0"], ["1"]], 8), (3, [["0"], ["1"]], 6), (None, [], 2)]
)
def test_without_workers_a_sweep_takes_the_number_that_is_measured_to_be_best(monkeypatch, asked, gpus, workers):
    """On each of two GPUs; on a CPU one per core."""

    def machine_of(given, max_attempts):
        return Machine(workers=(given.workers or 1) * len(gpus) or 2, runtime=DEFAULT, gpus=gpus)

    monkeypatch.setattr(start_sweep, "machine_of", machine_of)
    monkeypatch.setattr(pricing, "setup_of_machine", lambda _, machine, __: setup_of(machine.workers // len(gpus)))
    plan = SimpleNamespace(expected_runs=lambda: [RUN])
    assert start_sweep.machine_for(plan, WorkerOptions(workers=asked), None).workers == workers
