"""What a run consists of: prepare the text or the task, train (continuing from the run's checkpoints), measure on
held-out sequences, write the record.
"""

import dataclasses
import gc
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsedepth.config.load import build
from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.config.runtime import DEFAULT, RuntimeConfig
from sparsedepth.data.baselines import baselines
from sparsedepth.data.source import Source, open_source
from sparsedepth.exchange.start import Start
from sparsedepth.measure.suite import Measurements, measure_run, observe_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan import planned_vs_actual
from sparsedepth.plan.duration import OBSERVED_TOKENS
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.run.lease import Beat, Lease
from sparsedepth.run.manifest import Stopwatch, device_facts, manifest_allocations, provenance
from sparsedepth.run.measure_existing_model import measured_model, save_record
from sparsedepth.run.publish import publish, write
from sparsedepth.run.resident_memory import resident_bytes
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.train.devices import Devices
from sparsedepth.train.loop import Interrupted, TrainingResult, Work, training
from sparsedepth.train.runtime import Runtime, is_out_of_memory, other_processes_bytes, resolve

TRAINING_SHARE, MEASURED_SHARE = 0.85, 0.99
"""Where the progress of a run stands when training, and measuring, are over; a display's guess, nothing is computed
from it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What does not change the result."""

    runtime: RuntimeConfig = DEFAULT
    stop: Callable[[], bool] | None = None
    report: Callable[[str, float, float | None], None] | None = None
    """called with (phase, share of the run done, last training loss)"""
    prune: Callable[[int, list[dict[str, Any]]], None] | None = None
    """called with (steps done, rows of the curves); raises PrunedRun where the run is to be ended early"""
    stacked_with: tuple[str, ...] = ()
    """run_ids of the runs that this process makes beside this one, as one stacked model"""
    start: Start | None = None
    """the model that training starts from: that of `start_weights`"""
    clock: Callable[[], float] = time.perf_counter
    """the seconds that go into the manifest: of a stacked run its share"""
    concurrent_processes: int = 1
    """processes of runs that the machine computes at a time, this one included"""
    beat: Beat | None = None
    """of the run's lease, first looked at when the process began: the dead holders of a stack are waited for at once"""


DEFAULT_OPTIONS = Options()

NEIGHBOUR_SECONDS, NEIGHBOUR_RETRIES = 30.0, 20
"""A GPU's memory that another process holds may be free again soon: how long to wait for it, and how often."""

MEASURING = "while measuring"
"""Noted on what goes wrong there: smaller micro-batches of training would not mend it."""


def _was_measuring(error: Exception) -> bool:
    return MEASURING in getattr(error, "__notes__", ())


class Infeasible(Exception):
    """The run does not fit into memory, even with one sequence per forward pass."""


@dataclass(frozen=True)
class RunJob:
    """One process's part in one run: all of it, or, without `lease`, of the training alone."""

    config: RunConfig
    results: Path
    scratch: Scratch
    lease: Lease | None
    """None in the processes that train with the one which holds the lease, measures and writes."""
    devices: Devices
    options: Options

    def run(self) -> Work[None]:
        """Train, measure and write; where memory runs out, continue with half as many sequences per forward pass.

        The global batch stays what it is. What fits is kept in the scratch folder, so that a new process begins with
        it. Raises as `execute` says.
        """
        runtime = resolve(self.config, self.options.runtime)
        torch.set_num_threads(runtime.threads)
        retries = 0
        while True:
            runtime = dataclasses.replace(runtime, micro_batch=self.scratch.micro_batch() or runtime.micro_batch)
            try:
                yield from self._attempt(runtime)
                return
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                wait = self._seconds_to_retry(runtime, error, retries)
                if wait is None:
                    self._lower_memory(runtime, error)
                retries = 0 if wait is None else retries + 1
            # Only here, with the exception gone, are its frames and the tensors in them free.
            gc.collect()
            if runtime.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(runtime.device)  # the peak is that of the try that succeeds
            self._wait(wait or 0.0)

    def _seconds_to_retry(self, runtime: Runtime, error: Exception, retries: int) -> float | None:
        """How long to wait before the same is tried again; None: it is to be made smaller."""
        if self.devices.size > 1:
            return None
        if other_processes_bytes(runtime.device) and retries < NEIGHBOUR_RETRIES:
            return NEIGHBOUR_SECONDS
        return 0.0 if retries == 0 and (runtime.device.type == "cuda" or _was_measuring(error)) else None

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._stop():
                raise Interrupted
            time.sleep(0.1)

    def _lower_memory(self, runtime: Runtime, error: Exception) -> None:
        """Halve what a forward pass holds, for the next try. Raises Infeasible where there is nothing to halve."""
        reason = " ".join(str(error).split())[:300]
        if _was_measuring(error):
            shortage = f"out of memory while measuring; lower measure_tokens, fit_tokens or val_tokens: {reason}"
            self.scratch.lower_memory(1, shortage)
            raise Infeasible(shortage) from None
        sequences = self.config.batch_tokens // self.config.seq_len
        tried = runtime.micro_batch or -(-sequences // self.devices.size)
        if not self.scratch.lower_memory(tried, reason):
            raise Infeasible(f"out of memory with one sequence per forward pass: {reason}") from None
        if self.devices.size > 1:
            raise error  # the other processes of the run wait for this one: all of them start again
        logging.warning("out of memory with %d sequences per forward pass; continuing with half", tried)

    def _attempt(self, runtime: Runtime) -> Work[None]:
        """Train; then, in the process that holds the lease, measure and write."""
        watch, before = Stopwatch(self.options.clock), resident_bytes()
        self._report("reading the text", 0.0, None)
        start = self._start()
        source = open_source(self.config, self.results / "data", tokenizer=start.learned if start else None)
        check_source(source, self.config)
        model = Decoder(self.config, self.config.seed)
        if start:
            start.load_into(model)
            self._measure_start(start, model.to(runtime.device), source)
            model.cpu()
            self.devices.wait_for_leader()
        trained = yield from self._train(model, source, runtime)
        if self.lease is None:
            return
        watch.earlier_seconds = trained.earlier_seconds
        training_seconds = watch.seconds()
        yield None  # so that all runs of a stack are at their last checkpoint before the first is measured
        loss = trained.curves[-1]["train_loss"]
        measured = self._measure(model, source, loss) if trained.outcome == "ok" else None
        self._report("writing", MEASURED_SHARE, loss)
        manifest = {
            **manifest_allocations(self.scratch),
            **watch.facts(),
            "training_seconds": training_seconds,
            **device_facts(runtime, before),
            **self._provenance(source, runtime),
        }
        if self.options.stacked_with:  # the peak is that of all
            manifest |= {"stacked_with": [*self.options.stacked_with], "peak_memory_bytes": None}
        aside = self.scratch.folder / f"record-{uuid.uuid4().hex}" / self.config.run_id
        write(aside, self.config, model, trained, measured, manifest)
        publish(aside, run_record.run_folder(self.results, self.config.run_id), self.lease)

    def _train(self, model: Decoder, source: Source, runtime: Runtime) -> Work[TrainingResult]:
        config = self.config
        observed = torch.from_numpy(source.held_out(config.seq_len, max(OBSERVED_TOKENS, config.seq_len)).inputs)

        def after_step(step: int, curves: list[dict[str, Any]]) -> None:
            self._report("training", TRAINING_SHARE * step / config.n_steps, curves[-1]["train_loss"])
            if self.options.prune:
                self.options.prune(step, curves)

        return training(
            model,
            config,
            runtime,
            lambda step: source.batch(config, step),
            devices=self.devices,
            checkpoints=self.scratch.checkpoints,
            observe=lambda model, step: observe_variance(ProbedDecoder(model), observed, step),
            progress=after_step,
            stop=self._stop,
            clock=self.options.clock,
        )

    def _start(self) -> Start | None:
        """The model that training starts from. Raises ValueError where it is not the one that the config names."""
        start, named = self.options.start, self.config.start_weights
        if named != (start and start.weights_hash):
            raise ValueError(
                f"start_weights={named}: the weights that training starts from are a model's; give it by "
                f"`train RUN.yaml --from MODEL`, which sets start_weights, or leave start_weights out"
            )
        return start

    def _measure_start(self, start: Start, model: Decoder, source: Source) -> None:
        """Record the start beside the run, measured as the run will be: what it was before."""
        fields = {name: getattr(self.config, name) for name in MeasureOnlyConfig.model_fields}
        facts = measured_model(start.loaded, build(MeasureOnlyConfig, fields, "--from"), source.data_hash)
        out = self.results / run_record.MODELS / facts.run_id
        if self.lease is None or run_record.is_complete(out):
            return
        watch = Stopwatch(self.options.clock)
        measured = self._measure(model, source, None, is_start=True)
        save_record(out, facts, measured, watch, model.embed.weight.device)

    def _measure(self, model: Decoder, source: Source, loss: float | None, *, is_start: bool = False) -> Measurements:
        """The suite on held-out sequences, in fp32 whatever the precision of training."""

        def progress(done: float) -> None:
            if self._stop():
                raise Interrupted  # training is checkpointed; measuring starts again
            phase = "measuring the start" if is_start else "measuring"
            before = TRAINING_SHARE + (MEASURED_SHARE - TRAINING_SHARE) * done
            self._report(phase, 0.0 if is_start else before, loss)

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
                measured.summary.update(baselines(source, self.config, tick=lambda: progress(1.0)))
        except Exception as error:
            error.add_note(MEASURING)
            raise
        return measured

    def _provenance(self, source: Source, runtime: Runtime) -> dict[str, Any]:
        experts = runtime.experts_kernel if self.config.n_experts else None
        return {
            **provenance(self.config.run_id, source.data_hash),
            **planned_vs_actual.planned_cost(self.results, self.config),
            "processes": self.devices.size,
            "kernels": {
                **runtime.chosen_kernels,
                "experts": experts,
                "reasons": runtime.kernel_reasons,
            },
            **({"start": self.options.start.facts} if self.options.start else {}),
            "data": source.facts,
        }

    def _stop(self) -> bool:
        asked = self.options.stop is not None and self.options.stop()
        return asked or (self.lease is not None and self.lease.lost)

    def _report(self, phase: str, done: float, loss: float | None) -> None:
        if self.options.report:
            self.options.report(phase, done, loss)


def check_source(source: Source, config: RunConfig) -> None:
    """Raises ValueError, before anything is trained, where a text is too short for a batch or for a measure."""
    source.batch(config, 0)
    source.held_out(config.seq_len, config.measure_tokens)
    if "loss" in config.measures:
        source.held_out(config.eval_seq_len or config.seq_len, config.val_tokens)
    if "usefulness" in config.measures:
        n_fit = source.held_out(config.seq_len, config.fit_tokens, config.measure_tokens).n_tokens
        if n_fit <= config.stream_width + 1:
            raise ValueError(
                f"the held-out part leaves {n_fit} tokens to fit usefulness's maps, after measure_tokens="
                f"{config.measure_tokens}; d_model={config.d_model} needs more than {config.stream_width + 1}: use a "
                f"longer corpus or a larger val_fraction"
            )
