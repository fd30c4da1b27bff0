"""`watch`: the measures of a model while somebody else's loop trains it.

    watch = watch(model, tokens, every=1000, out="results/mine", name="lns-0", seed=0, settings={"depth_scale": "lns"})
    for step, batch in enumerate(loader, start=1):
        ...
        watch(step)

A call changes nothing of the training: weights, gradients, optimizer, random state, training mode, autocast, buffers
and attributes of modules are what they were, also if a measure fails, which is a warning and missing numbers."""

import random
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.measure.measurements import Measurements
from sparsedepth.measure.suite import measure_run
from sparsedepth.probe.any_module import Loss
from sparsedepth.quantities.quantity import Named, Row
from sparsedepth.run.comparable import check_enough_to_fit
from sparsedepth.watch.adapt import Adapted, Names, adapt, check_weights, is_compiled, original
from sparsedepth.watch.points import N_SEQUENCES, Points, Training
from sparsedepth.words.plain_text import did_you_mean, error_text
from sparsedepth.words.watch import cost_text, left_out_text

Log = Callable[[dict[str, float], int], Any]
"""(values by name, step)"""

N_INTERVALS = 100
"""Steps whose median time costs are told against."""


@dataclass(kw_only=True, eq=False)
class Watch:
    """Measures at the steps it is called with; close it, or use it in a `with`."""

    adapted: Adapted
    every: int
    log: Log | None = None
    budget: float | None = None
    points: Points | None = None
    """where they are written"""
    n_sequences: int | None = None
    """to score at each point; None = all"""
    last: Measurements | None = None
    """what the last point measured"""
    is_closed: bool = False
    _intervals: deque[float] = field(default_factory=partial(deque[float], maxlen=N_INTERVALS))
    _called: tuple[int, float] | None = None
    """step and time of the last call"""
    _is_told: bool = False

    def __call__(self, step: int, *, now: bool = False) -> Measurements | None:
        """After an optimizer step, with the number of those done: measures at multiples of `every`, or `now`. Returns
        the new point; None where nothing is measured, as on other ranks."""
        if self.is_closed:
            raise ValueError("this watch is closed; call sparsedepth.watch again with the same arguments to go on")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r} must be the number of optimizer steps done, from 0")
        self._time(step)
        is_first = _is_first()
        is_repeated = self.last is not None and self.last.step == step  # as between accumulated batches
        if ((step % self.every or is_repeated) and not now) or not (is_first or self.adapted.is_sharded):
            return None
        has_point = self.points is not None and is_first and step in self.points.steps
        if self._agreed(has_point):
            return None
        began = time.perf_counter()
        found = self._measure(step)
        seconds = time.perf_counter() - began
        if is_first:
            self._keep(step, found, seconds)
        self._limit(seconds, is_first)
        self._called = (step, time.perf_counter())
        self.last = found
        return found if is_first else None

    def close(self) -> None:
        """Ends the watch; its points are in the folder already."""
        self.is_closed = True

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _time(self, step: int) -> None:
        now = time.perf_counter()
        if self._called and step > self._called[0]:
            self._intervals.append((now - self._called[1]) / (step - self._called[0]))
        self._called = (step, now)

    def _agreed(self, value: Any) -> Any:
        """The first rank's value, where every rank has a part of the model."""
        if not self.adapted.is_sharded:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def _config(self, *measures: str) -> MeasureOnlyConfig:
        tokens = self.adapted.tokens
        scored, fit = (part.n_tokens for part in (tokens.scored, tokens.fit))
        if self.n_sequences is not None:
            scored = min(scored, self.n_sequences * tokens.seq_len)
            least = self.adapted.probed.stream_width // tokens.seq_len + 2
            fit = min(fit, max(self.n_sequences, least) * tokens.seq_len)
        counts = {"val_tokens": scored, "measure_tokens": scored, "fit_tokens": fit, "seq_len": tokens.seq_len}
        return MeasureOnlyConfig.model_validate({**counts, "measures": measures or self.adapted.measures})

    def _measured(self) -> Named:
        config = self._config()
        return {name: getattr(config, name) for name in ("measure_tokens", "fit_tokens")}

    def _measure(self, step: int) -> Measurements:
        found, adapted = Measurements(step=step), self.adapted
        with unchanged(adapted.model):
            for name in self.adapted.measures:
                try:
                    config = self._config(name)
                    with adapted.gathered():  # anew: one that differentiates lets go of the weights
                        found.extend(measure_run(adapted.probed, config, adapted.tokens.held_out, step=step))
                except Exception as error:
                    told = f"the measure {name} failed at step {step}, and its numbers are missing: {error_text(error)}"
                    warnings.warn(told, stacklevel=3)
        return found

    def _keep(self, step: int, found: Measurements, seconds: float) -> None:
        if self.points is not None and (found.summary or found.layers):
            try:
                self.points.write(step, self._measured(), found, seconds, self.adapted.probed.device.type)
            except OSError as error:  # a full disk must not end a training
                warnings.warn(f"the point at step {step} could not be written: {error}", stacklevel=3)
        if self.log is not None:
            try:
                self.log(scalars(found), step)
            except Exception as error:
                warnings.warn(f"log failed at step {step}: {error_text(error)}", stacklevel=3)

    def _limit(self, seconds: float, is_first: bool) -> None:
        """Tells the first point's cost, once the time of a step is known; with a budget, later ones read as many
        sequences as stay below it, at least two."""
        step_seconds = self._agreed(statistics.median(self._intervals) if self._intervals else None)
        if self._is_told or not step_seconds:
            return
        self._is_told = True
        share = self._agreed(seconds / (self.every * step_seconds))
        n_sequences = len(self.adapted.tokens.scored)
        if self.budget is not None and share > self.budget:
            self.n_sequences = min(n_sequences, max(2, int((self.n_sequences or n_sequences) * self.budget / share)))
            if self.points is not None:
                self.points.keep(**{N_SEQUENCES: self.n_sequences})
        if is_first:
            print(cost_text(seconds, share, self.every, self.n_sequences, n_sequences), file=sys.stderr)


def watch(
    model: nn.Module,
    tokens: Any,
    *,
    every: int = 1000,
    out: Path | str | None = "results/watched",
    name: str = "run",
    seed: int | None = None,
    settings: Row | None = None,
    tokens_per_step: int | None = None,
    measures: Sequence[str] | str | None = None,
    layers: str | None = None,
    norm: str | None = None,
    head: str | None = None,
    loss: Loss | None = None,
    log: Any = None,
    budget: float | None = None,
) -> Watch:
    """Measure a model at every so many optimizer steps of your own loop, by `watch(step)`; see `Watch`.

    model            a decoder of sparsedepth, one of the types of transformers that `measure` reads, BERT, ViT or
                     DINOv2, or any module with a list of blocks, named by `layers`
    tokens           held-out ids, integers [sequences, length + 1], the last of a row only a target; of an encoder its
                     inputs [N, ...], or (inputs, targets)
    out, name        results folder (None: no record), and the training's name in it; refused with other settings
    seed, settings   of the training, fields of a run such as {"depth_scale": "lns"}: what `effects` compares
    tokens_per_step  tokens of an optimizer step over all ranks; None: not known
    measures         names (see `sparsedepth metrics`), or 'all' that the model has what they ask for; by default loss,
                     variance, usefulness and causal, as far as it has
    layers, norm, head   dotted paths of the blocks, the final norm and the head of another module
    loss             of a model without next tokens: (its output, targets) -> a loss per input, which usefulness needs
    log              function (values by name, step), or an open run of wandb, trackio, MLflow or TensorBoard
    budget           largest share of the steps' time, such as 0.01; kept by measuring fewer sequences

    Raises ValueError, before anything is written, for what cannot be measured. Every rank may call it; the first one
    writes. Under FSDP2 every rank must call it."""
    check_amounts(every, budget, tokens_per_step)
    names, module = Names(layers=layers, norm=norm, head=head, loss=loss), original(model)
    check_weights(module)
    with unchanged(module):
        adapted = adapt(module, tokens, names, measures)
    fields = {**adapted.fields, **(settings or {}), **({} if seed is None else {"seed": seed})}
    for key, value in (settings or {}).items():
        if key not in RunConfig.model_fields:
            fix = did_you_mean(key, RunConfig.model_fields, "`sparsedepth schema run` lists them")
            raise ValueError(f"settings: {key!r} is no field of a run; {fix}")
        if key in ("n_layers", "d_model") and value != adapted.fields[key]:
            raise ValueError(f"settings: {key}={value!r}, and the model has {adapted.fields[key]}; leave it out")
    training = Training(
        name=name,
        fields=fields,
        tokens_per_step=tokens_per_step,
        n_params=adapted.n_params,
        data_hash=adapted.data_hash,
    )
    made = Watch(adapted=adapted, every=every, log=None if log is None else logging_by(log), budget=budget)
    fix = "give watch more sequences of tokens"
    check_enough_to_fit(adapted.tokens.held_out, made._config(), adapted.probed.stream_width, fix)
    training.run_at(0, made._measured())  # its mistakes are told before the training
    if out is not None:
        made.points = Points(Path(out), training)
        made.n_sequences = made._agreed(made.points.stored.get(N_SEQUENCES))
    if _is_first():
        if adapted.left_out:
            print(left_out_text(adapted.left_out), file=sys.stderr)
        if made.points is not None:
            made.points.measure(adapted.measures)
    return made


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def check_amounts(every: Any, budget: Any, tokens_per_step: Any) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be a whole number of steps, from 1")
    if tokens_per_step is not None and (not isinstance(tokens_per_step, int) or tokens_per_step < 1):
        raise ValueError(f"tokens_per_step={tokens_per_step!r} must be a whole number, from 1; leave it out if unknown")
    if budget is not None and not 0 < budget < 1:
        raise ValueError(f"budget={budget!r} must be a share of the steps' time between 0 and 1, such as 0.01")


def logging_by(log: Any) -> Log:
    """A function of values and step, from one or from a tracker's open run. Raises ValueError for anything else."""
    if hasattr(log, "add_scalar"):  # TensorBoard's SummaryWriter
        return lambda values, step: [log.add_scalar(name, value, step) for name, value in values.items()]
    if hasattr(log, "log_metrics"):  # mlflow, and Lightning's loggers
        return lambda values, step: log.log_metrics(values, step=step)
    if hasattr(log, "log"):  # runs of wandb and trackio
        return lambda values, step: log.log(values, step=step)
    if callable(log):
        return log
    raise ValueError(f"log={log!r} must be a function of (values, step), or an open run of a tracker")


def scalars(found: Measurements) -> dict[str, float]:
    """The scores, and the values by layer, under names that a tracker groups by the part before the slash."""
    scores = {f"sparsedepth/{name}": value for name, value in found.summary.items()}
    layers = {f"{row['metric']}/layer_{row['layer']:03d}": row["value"] for row in found.layers}
    return {name: float(value) for name, value in {**scores, **layers}.items() if isinstance(value, int | float)}


@contextmanager
def unchanged(model: nn.Module) -> Generator[None]:
    """Context that leaves attributes and buffers of all modules, and all random state, as they were; and in which
    compiled parts run as they were written."""
    before = [(own, {**own}) for module in model.modules() for own in (vars(module), module._buffers)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    states = random.getstate(), np.random.get_state()
    cuda = {weight.device for weight in model.parameters() if weight.is_cuda}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[*cuda]))
        if is_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
            for own, entries in before:
                if own.keys() != entries.keys() or any(own[name] is not entries[name] for name in own):
                    own.clear()
                    own.update(entries)
