"""The steps of a run: prepare the text or task, train (resuming from checkpoints), measure, and write the record."""

import copy
import gc
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sparsedepth.config.load import build
from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.config.runtime import DEFAULT, RuntimeConfig
from sparsedepth.config.section import Fields
from sparsedepth.data.ngram_losses import ngram_losses
from sparsedepth.data.sequences import Source
from sparsedepth.exchange.start import Start
from sparsedepth.measure.measurements import Measurements
from sparsedepth.measure.suite import measure_run, observe_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.estimate import OBSERVED_TOKENS, Place, fitted
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities.quantity import Named
from sparsedepth.run.comparable import check_same_precision, check_same_stream, checked_source
from sparsedepth.run.lease import HeartbeatMonitor, Lease
from sparsedepth.run.measure_existing_model import measured_model
from sparsedepth.run.process import abandon_cache, anonymous_bytes, is_compiler_error, use_cache
from sparsedepth.run.publish import Stopwatch, device_facts, provenance, publish, write, write_measured
from sparsedepth.run.scratch import ONE_SEQUENCE, Scratch, manifest_facts, trunk_folder
from sparsedepth.store import run_record
from sparsedepth.train.devices import Devices, LostError
from sparsedepth.train.loop import Clock, Interrupted, Progress, TrainingResult, Work, training
from sparsedepth.train.runtime import (
    Runtime,
    device_memory,
    is_out_of_memory,
    measuring_device,
    other_processes_bytes,
    resolve,
)
from sparsedepth.words.plain_text import cause_of

TRAINING_SHARE, MEASURED_SHARE = 0.85, 0.99
"""Displayed progress at the end of training, and of measuring."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that do not change the result."""

    runtime: RuntimeConfig = DEFAULT
    stop: Callable[[], bool] = lambda: False
    report: Callable[[str, float, float | None], None] = lambda phase, done, loss: None
    """called with (phase, share of the run done, last training loss)"""
    prune: Progress = lambda step, curves: None
    """called with (steps done, rows of the curves); raises PrunedRun to end the run early"""
    stacked_with: tuple[str, ...] = ()
    """run_ids of the other runs of this process's stacked model"""
    start: Start | None = None
    """the model of `start_weights`"""
    clock: Clock = time.perf_counter
    """for the seconds in the manifest; a stacked run counts its share"""
    concurrent_processes: int = 1
    """run processes in parallel on the machine, including this one"""
    sharing: int = 1
    """those of them that share its GPU"""
    heartbeat: HeartbeatMonitor | None = None
    """of the run's lease, created at the start of the process, so that a stack waits for dead holders at once"""


DEFAULT_OPTIONS = Options()

NEIGHBOUR_SECONDS, NEIGHBOUR_RETRIES = 30.0, 20
"""Wait and number of retries for GPU memory that another process holds."""

MEASURING = "while measuring"
"""Note on errors of measuring, which smaller micro-batches would not fix."""


def _was_measuring(error: Exception) -> bool:
    return MEASURING in getattr(error, "__notes__", ())


class Infeasible(Exception):
    """The run does not fit into memory, even with one sequence per forward pass."""


@dataclass(frozen=True)
class RunJob:
    """One process's part in one run: all of it or, without `lease`, only the training."""

    config: RunConfig
    scratch: Scratch
    lease: Lease | None
    """None if another process holds the lease, measures and writes."""
    devices: Devices
    options: Options

    def run(self) -> Work[None]:
        """Train, measure and write, with as many sequences per forward pass as fit by plan; after running out of
        memory continue with half of them and the same global batch. The size that fits is stored in the scratch folder
        for the next process. After a compiler error continue with an empty cache; after a second one without the
        compiler. Raises as `execute`."""
        runtime = self._planned(resolve(self.config, self.options.runtime))
        torch.set_num_threads(runtime.threads)
        retries = Counter[bool]()  # by whether it was measuring: training has retries of its own
        n_compiler_errors = 0
        while True:
            sizes = filter(None, (self.scratch.recorded().micro_batch, runtime.micro_batch))
            runtime = replace(runtime, micro_batch=min(sizes, default=None))
            if runtime.compile:
                use_cache(self.scratch.results)
            wait = 0.0
            try:
                yield from self._attempt(runtime)
                return
            except Exception as error:
                if is_out_of_memory(error):
                    is_measuring = _was_measuring(error)
                    wait = self._seconds_to_retry(runtime, error, retries[is_measuring])
                    if wait is None:
                        self._halve_micro_batch(runtime, error)
                    retries[is_measuring] = 0 if wait is None else retries[is_measuring] + 1
                elif runtime.compile and is_compiler_error(error):
                    n_compiler_errors += 1
                    runtime = self._after_compiler_error(runtime, error, n_compiler_errors)
                else:
                    raise
            # Only after the except clause are the exception's frames and their tensors free.
            gc.collect()
            if runtime.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(runtime.device)  # the recorded peak is that of the last attempt
            deadline = time.monotonic() + (wait or 0.0)
            while time.monotonic() < deadline:
                if self._stop():
                    raise Interrupted
                time.sleep(0.1)

    def _planned(self, runtime: Runtime) -> Runtime:
        """With the micro-batch that fits into the run's share of its GPU; of a stack into a share of that."""
        memory = device_memory(runtime.device)
        runs = self.options.sharing * (len(self.options.stacked_with) + 1)
        place = Place(
            device="cuda" if runtime.device.type == "cuda" else "cpu",
            micro_batch=runtime.micro_batch,
            compile=runtime.compile,
            processes=self.devices.size,
            parallel=runtime.parallel,
        )
        return replace(runtime, micro_batch=fitted(self.config, place, memory and memory / runs).micro_batch)

    def _seconds_to_retry(self, runtime: Runtime, error: Exception, retries: int) -> float | None:
        """How long to wait before trying the same size again; None to halve it."""
        if self.devices.size > 1:
            return None
        if other_processes_bytes(runtime.device) and retries < NEIGHBOUR_RETRIES:
            return NEIGHBOUR_SECONDS
        return 0.0 if retries == 0 and (runtime.device.type == "cuda" or _was_measuring(error)) else None

    def _after_compiler_error(self, runtime: Runtime, error: Exception, number: int) -> Runtime:
        """What to try next: an empty cache, then no compiler. Several processes raise, and start again together."""
        abandon_cache(self.scratch.results)
        reason = cause_of(error)
        if self.devices.size > 1:
            raise error
        if number == 1:
            logging.warning("the compiler failed; compiling again with an empty cache: %s", reason)
            return runtime
        logging.warning("the compiler failed again; continuing without it: %s", reason)
        reasons = {**runtime.kernel_reasons, "compile": f"not compiled, since the compiler failed twice: {reason}"}
        return replace(runtime, compile=False, kernel_reasons=reasons)

    def _halve_micro_batch(self, runtime: Runtime, error: Exception) -> None:
        """Raises Infeasible if there is nothing to halve."""
        reason = cause_of(error)
        if _was_measuring(error):
            shortage = f"out of memory while measuring; lower measure_tokens, fit_tokens or val_tokens: {reason}"
            self.scratch.set_infeasible(shortage)
            raise Infeasible(shortage) from None
        share = -(-self.config.sequences_per_step // self.devices.size)
        tried = min(runtime.micro_batch or share, share)
        if not self.scratch.halve_micro_batch(tried, reason):
            raise Infeasible(f"{ONE_SEQUENCE}: {reason}") from None
        if self.devices.size > 1:
            raise LostError(f"out of memory with {tried} sequences per forward pass; start again, with half of them")
        logging.warning("out of memory with %d sequences per forward pass; continuing with half", tried)

    def _attempt(self, runtime: Runtime) -> Work[None]:
        """Train; then, in the process that holds the lease, measure and write."""
        watch = Stopwatch(self.options.clock)
        before = anonymous_bytes()
        start = self.options.start
        self.options.report("reading the text", 0.0, None)
        self._check_start_weights()
        source = checked_source(self.config, self.scratch.results, start.learned if start else None)
        check_same_precision(self.config, runtime, self.scratch.results)
        check_same_stream(runtime, self.scratch.results)
        model = Decoder(self.config, self.config.seed)
        if start:
            start.load_into(model)
            self._measure_start(start, model.to(measuring_device(runtime.device)), source)
            model.cpu()
            self.devices.wait_for_leader()
        trained = yield from self._train(model, source, runtime)
        if self.lease is None:
            return
        watch.earlier_seconds = trained.earlier_seconds
        training_seconds = watch.seconds()
        yield None  # runs of a stack that are at the same step finish training before the first is measured
        loss = trained.curves[-1]["train_loss"]
        model.to(measuring_device(runtime.device))  # with fsdp a copy was trained
        measured = self._measure(model, source, loss) if trained.outcome == "ok" else None
        self.options.report("writing", MEASURED_SHARE, loss)
        manifest = {
            **manifest_facts(self.scratch.allocations()),
            **watch.facts(),
            "training_seconds": training_seconds,
            **device_facts(replace(runtime, cuda_graph=trained.captured_steps > 0), before),
            **self._facts(source, runtime, trained),
        }
        if self.options.stacked_with:  # the peak is that of the whole stack
            together = {"stacked_with": [*self.options.stacked_with], "stack": trained.n_stacked}
            manifest |= {**together, "peak_memory_bytes": None}
        aside = self.scratch.folder / f"record-{uuid.uuid4().hex}" / self.config.run_id
        write(aside, self.config, model, trained, measured, manifest)
        publish(aside, run_record.run_folder(self.scratch.results, self.config.run_id), self.lease)

    def _check_start_weights(self) -> None:
        start = self.options.start
        weights = self.config.start_weights
        if weights != (start and start.loaded.weights_hash):
            raise ValueError(
                f"start_weights={weights} does not match the initial model; use `train RUN.yaml --from MODEL`, "
                "which sets start_weights, or remove start_weights"
            )

    def _facts(self, source: Source, runtime: Runtime, trained: TrainingResult) -> Fields:
        """Provenance, kernels and data of the manifest."""
        start = self.options.start
        without_experts = {} if self.config.n_experts else {"experts": None}
        reasons = dict(runtime.kernel_reasons)
        if runtime.cuda_graph and not trained.captured_steps:
            reasons["cuda_graph"] = (
                "asked for, but no step was: the first three are not, nor a stack's with a run that is refused"
            )
        return {
            **provenance(self.config.run_id, source.data_hash, (*self.config.measures, self.config.corpus)),
            "processes": self.devices.size,
            "kernels": {**runtime.kernels, **without_experts, "reasons": reasons},
            **({"start": start.facts} if start else {}),
            "data": source.facts,
        }

    def _train(self, model: Decoder, source: Source, runtime: Runtime) -> Work[TrainingResult]:
        config = self.config
        observed = torch.from_numpy(source.held_out(config.seq_len, max(OBSERVED_TOKENS, config.seq_len)).inputs)

        def after_step(step: int, curves: list[Named]) -> None:
            self.options.report("training", TRAINING_SHARE * step / config.n_steps, curves[-1]["train_loss"])
            self.options.prune(step, curves)

        return training(
            model,
            config,
            runtime,
            lambda step: source.batch(config, step),
            devices=self.devices,
            checkpoints=self.scratch.checkpoints,
            trunk=trunk_folder(self.scratch.results, config),
            data_hash=source.data_hash,
            observe=lambda model, step: observe_variance(ProbedDecoder(_to_measure(model)), observed, step),
            progress=after_step,
            stop=self._stop,
            clock=self.options.clock,
        )

    def _measure_start(self, start: Start, model: Decoder, source: Source) -> None:
        """Measure the initial model with the run's settings, and record it with the models of the folder."""
        fields = {name: getattr(self.config, name) for name in MeasureOnlyConfig.model_fields}
        facts = measured_model(start.loaded, build(MeasureOnlyConfig, fields, "--from"), source.data_hash)
        out = self.scratch.results / run_record.MODELS / facts.run_id
        if self.lease is None or run_record.is_complete(out):
            return
        watch = Stopwatch(self.options.clock)
        measured = self._measure(model, source, None, is_start=True)
        write_measured(out, facts, measured, watch, model.embed.weight.device)

    def _measure(self, model: Decoder, source: Source, loss: float | None, *, is_start: bool = False) -> Measurements:
        """All measures on held-out sequences, in fp32 regardless of the training precision."""

        def progress(done: float) -> None:
            if self._stop():
                raise Interrupted  # training is checkpointed; measuring starts again
            phase = "measuring the initial model" if is_start else "measuring"
            share = TRAINING_SHARE + (MEASURED_SHARE - TRAINING_SHARE) * done
            self.options.report(phase, 0.0 if is_start else share, loss)

        try:
            measured = measure_run(
                ProbedDecoder(model.eval()),
                self.config,
                source.held_out,
                source.bytes_per_token,
                step=0 if is_start else self.config.n_steps,
                eod=source.eod,
                progress=progress,
            )
            if "loss" in self.config.measures:
                measured.summary.update(ngram_losses(source, self.config, tick=lambda: progress(1.0)))
        except Exception as error:
            error.add_note(MEASURING)
            raise
        return measured

    def _stop(self) -> bool:
        return self.options.stop() or (self.lease is not None and self.lease.lost)


def _to_measure(model: Decoder) -> Decoder:
    """The model while it trains, or a copy where its device cannot measure."""
    device = model.embed.weight.device
    return model if device == measuring_device(device) else copy.deepcopy(model).to(measuring_device(device))
