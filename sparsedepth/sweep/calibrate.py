"""Time a few real steps of each shape of a sweep, in as many parallel processes as the sweep will have workers.

Every process times every shape in a different order, so that they slow each other down as runs will. A shape's time is
the median over processes, kept for later sweeps (`sweep.timings`)."""

import functools
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing.queues import SimpleQueue

import torch

from sparsedepth import files
from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.estimate import DEVICES, Timing, shape_id
from sparsedepth.probe.fork import batches, probing, stream
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.run.process import end_with_parent
from sparsedepth.sweep import forkserver
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.timings import known_timings, timings_path
from sparsedepth.train.devices import ALONE
from sparsedepth.train.feed import Batch
from sparsedepth.train.loop import TrainingState
from sparsedepth.train.runtime import Runtime, resolve

STEPS, SECONDS = 3, 1.0
"""Minimum number of timed steps, and minimum time spent on them."""

LONGEST_STEP = 20.0
"""Longest expected step in seconds; of a longer step only a part of the batch is timed."""


def calibrate(runs: Sequence[RunConfig], machine: Machine, report: Callable[[int], None]) -> dict[str, Timing]:
    """All timings of this machine, with those of `runs`. `report` gets their number so far. Raises ValueError."""
    workers = range(machine.workers)
    in_turn = [runs[(number + turn) % len(runs)] for turn in range(len(runs)) for number in workers]
    runtime = machine.runtime.model_copy(update={"parallel": "none"})
    forkserver.prepare_server(runtime.threads or 1)
    context = multiprocessing.get_context("forkserver")
    gpus = context.SimpleQueue()
    for number in workers:
        gpus.put(machine.gpus[number % len(machine.gpus)][0] if machine.gpus else None)
    timings_of = defaultdict[str, list[Timing]](list)
    with ProcessPoolExecutor(len(workers), context, _prepare, (gpus, runtime.threads, forkserver.server_pid())) as pool:
        with forkserver.for_children():
            futures = [pool.submit(_timed, config, runtime, machine.processes_per_run) for config in in_turn]
        try:
            for n_done, future in enumerate(as_completed(futures), start=1):
                key, timing = future.result()
                timings_of[key].append(timing)
                report(n_done)
        except Exception as error:  # a shape may raise anything
            pool.shutdown(cancel_futures=True)
            raise ValueError(f"a shape of the sweep could not be timed ({error}); plan without --calibrate") from None
    known = known_timings(machine)
    for key, timings in timings_of.items():
        known[key] = Timing(*map(statistics.median, zip(*timings, strict=True)))
    path = timings_path(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {key: timing._asdict() for key, timing in known.items()})
    return known


def _prepare(gpus: "SimpleQueue[str | None]", threads: int | None, server: int | None) -> None:
    end_with_parent(server)  # which ends with the command; a worker would wait for work for ever
    if (gpu := gpus.get()) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if threads:
        torch.set_num_threads(threads)


def _timed(config: RunConfig, runtime: RuntimeConfig, processes: int) -> tuple[str, Timing]:
    torch._dynamo.reset()  # no compiled code from other shapes
    return shape_id(config, step_only=True), time_run(config, resolve(config, runtime), processes)


def time_run(config: RunConfig, runtime: Runtime, processes: int = 1) -> Timing:
    """Time a training step of one of `processes` that share each batch, and a measure's forward pass."""
    on_cpu = runtime.device.type == "cpu"
    device = DEVICES["cpu" if on_cpu else "a100"]
    rate = device.rate(config.d_model, bf16=runtime.precision == "bf16", compiled=bool(runtime.compile))
    rate *= runtime.threads if on_cpu else 1
    expected = cost(config).train_flops(config.batch_tokens) / rate / processes
    share = max(1, config.sequences_per_step // processes)
    n_sequences = max(1, min(share, int(share * LONGEST_STEP / expected)))
    model = Decoder(config, config.seed).to(runtime.device).train()
    model.use_kernels(**runtime.kernels)
    state = TrainingState(model, config, replace(runtime, parallel="none"), ALONE)
    draws = torch.Generator().manual_seed(0)
    inputs_BT = model.embed.random_inputs(n_sequences, config.seq_len, draws)
    targets_BT = torch.randint(config.vocab_size, (n_sequences, config.seq_len), generator=draws)
    batch = Batch.of(Sequences(inputs=inputs_BT.numpy(), targets=targets_BT.numpy())).to(runtime.device)
    step = _seconds(functools.partial(state.take_step, batch), runtime) * share / n_sequences
    del state  # frees the optimiser's moments
    n_measured = max(1, min(config.measure_tokens, 8192) // config.seq_len)
    inputs_NT = torch.cat([batch.inputs] * -(-n_measured // n_sequences))[:n_measured]
    probed = ProbedDecoder(model.eval())

    def forward() -> None:
        with probing(probed):
            for part_BT in batches(probed, inputs_NT):
                *_, last_BTD = stream(probed, part_BT)
                for some_BTD in last_BTD.split(1):
                    probed.logits(some_BTD)

    return Timing(step=step, forward=_seconds(forward, runtime) / inputs_NT.numel())


def _seconds(work: Callable[[], None], runtime: Runtime) -> float:
    """Median seconds of a call, after one warm-up call."""

    def wait() -> None:
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
        elif runtime.device.type == "mps":
            torch.mps.synchronize()

    work()
    wait()
    seconds = []
    while len(seconds) < STEPS or sum(seconds) < SECONDS:
        started = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
