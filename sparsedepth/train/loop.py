"""The training loop: optimizer steps (`train.optimizer`), curves, checkpoints and observations.

    loss = CE + balance_loss * mean_l balance_l + router_z_loss * mean_l z_l

The batch of step t is a function of t, so a run resumed from a checkpoint takes the same steps as
without interruption: on a CPU its weights end bit-equal. Divergence is a result, not an error.

CE is the mean over scored positions: all of a text, the answers of a task. A step adds the
gradients of micro-batches, each weighted by its share of the scored positions. Deviates: the
balance loss, a product of two means, is averaged over micro-batches; over several devices it is
exact. Nothing in a step makes the host wait for the device.

Shapes: B sequences, T tokens of one sequence."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from sparsedepth.config.run import RunConfig, check_parallel
from sparsedepth.model.decoder import Decoder
from sparsedepth.quantities.quantity import Named
from sparsedepth.train import checkpoint
from sparsedepth.train.cuda_graph import CapturedUpdate, CudaCapture
from sparsedepth.train.devices import ALONE, Devices, full_tensor, gathered
from sparsedepth.train.feed import Batch, Part, ReadBatch, feed
from sparsedepth.train.optimizer import AnyOptimizer, learning_rate, make_optimizer, set_learning_rate
from sparsedepth.train.runtime import Runtime, choose_attention_backends, compile_blocks, dropout_masks

Result = TypeVar("Result")

Observe = Callable[[Decoder, int], list[Named]]
"""(model, step) -> rows; called before the first step, and every observe_every steps but the last."""
Clock = Callable[[], float]
Progress = Callable[[int, list[Named]], None]
"""(steps done, curves); called after each step."""


class Interrupted(Exception):
    """The run was asked to stop, and has written a checkpoint to continue from."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of training, without the weights."""

    outcome: Literal["ok", "diverged"]
    diverged_step: int | None
    diverged_cause: str | None
    steps: int
    curves: list[Named]
    observations: list[Named]
    earlier_seconds: float = 0.0
    """training time of earlier processes, up to the checkpoint that this one continued from"""
    captured_steps: int = 0
    """steps of this process that were replays of a CUDA graph"""
    n_stacked: int = 1
    """the most runs with which it took a step as one model, itself included"""


def losses(model: Decoder, inputs_BT: Tensor, targets_BT: Tensor, config: RunConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The loss to minimise, its cross-entropy, and the mean balance loss (NaN without experts).
    `backward` weights all three by the scored positions of a part, so where rows are scored
    unevenly (pairs) the router losses depend on the parts."""
    router_losses = []
    entropy, _ = model.cross_entropy(model.hidden(inputs_BT, router_losses), targets_BT)
    if not router_losses:
        return entropy, entropy.detach(), torch.full_like(entropy.detach(), math.nan)
    balance, z = torch.stack(router_losses).mean(0)
    loss = entropy + config.balance_loss * balance + config.router_z_loss * z
    return loss, entropy.detach(), balance.detach()


class Objective(nn.Module):
    """The training loss as a module: hooks of DDP and FSDP surround the whole forward pass."""

    def __init__(self, model: Decoder, config: RunConfig):
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return losses(self.model, inputs_BT, targets_BT, self.config)


class TrainingState:
    """The state of one training run between steps."""

    batch: Batch
    """of the next step"""
    taken: Tensor | None = None
    """(loss, balance, gradient norm) of the next step, if `train.stack` has taken it"""
    n_stacked: int = 1
    """the most runs that took one step as one model"""
    captured_steps: int = 0
    """steps that were replays of a CUDA graph"""
    data_hash: str | None = None
    """of what the steps read, if known"""

    def __init__(
        self, model: Decoder, config: RunConfig, runtime: Runtime, devices: Devices, clock: Clock = time.perf_counter
    ):
        self.model = model
        self.config = config
        self.runtime = runtime
        self.devices = devices
        self.clock = clock
        self.began = clock()
        self.earlier_seconds = 0.0
        check_parallel(config, devices.parallel)
        if runtime.compile:
            compile_blocks(model)
        self.precision = runtime.precision
        if runtime.kernels.get("stream") == "bf16":
            self.precision += ", with the stream"
        self.objective = devices.wrap(Objective(model, config), runtime.device)
        self.optimizer = make_optimizer(model, config)
        self.parameters = [*model.parameters()]
        self.captured = self.capture(self.optimizer) if runtime.cuda_graph else None
        self.step = self.logged_step = 0
        self.logged_at = time.perf_counter()
        self.curves: list[Named] = []
        self.observations: list[Named] = []
        self.recent: list[Tensor] = []  # (loss, balance, gradient norm) per step, on the device until logged
        self.diverged: tuple[int, str] | None = None
        self.save_seconds = 0.0
        """time that the last checkpoint blocked training"""
        self.writer_seconds = 0.0
        """processor time of the thread that wrote it, which may have held the interpreter's lock"""
        self.writer: ThreadPoolExecutor | None = None
        self.writing: Future[None] | None = None

    def capture(self, optimizer: AnyOptimizer) -> CapturedUpdate:
        """For updates by that optimizer."""
        return CapturedUpdate(optimizer, CudaCapture(self.runtime.device))

    def take_step(self, batch: Batch) -> None:
        if self.taken is None:
            set_learning_rate(self.optimizer, learning_rate(self.config, self.step))
            parts = [*batch.parts(self.runtime.micro_batch)]
            with dropout_masks(self.config, self.step, self.devices.rank, self.runtime.device):
                if self.captured and not self.is_gradient_norm_due:
                    self.taken, is_replay = self.captured(self.update, parts)
                    self.captured_steps += is_replay
                else:
                    self.taken = self.update(parts)
        self.recent.append(self.taken)
        self.taken = None
        self.step += 1

    def update(self, parts: Sequence[Part]) -> Tensor:
        """Take one optimizer step; returns (loss, balance, gradient norm), on the device."""
        return self.apply(*self.backward(parts))

    def apply(self, entropy: Tensor, balance: Tensor) -> Tensor:
        """`update` with the gradients that are there."""
        self.record_gradient_norms()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack((entropy, balance, full_tensor(grad_norm)))

    @property
    def is_gradient_norm_due(self) -> bool:
        """Whether the next step (first, last, or of observations) records gradient norms."""
        step = self.step + 1
        n_steps = self.config.n_steps
        return "gradients" in self.config.measures and not (step % self.config.observe_every and 1 < step < n_steps)

    def record_gradient_norms(self) -> None:
        """Add a row per block with its gradient norm, if due."""
        if not self.is_gradient_norm_due:
            return
        weights = [[*block.parameters()] for block in self.model.blocks]
        grads = [[weight.grad for weight in parameters if weight.grad is not None] for parameters in weights]
        norms = torch.stack([full_tensor(torch.nn.utils.get_total_norm(parameters)) for parameters in grads]).tolist()
        if self.devices.is_leader:
            for layer, norm in enumerate(norms, start=1):
                value = norm if math.isfinite(norm) else None
                row = {"step": self.step + 1, "layer": layer, "metric": "gradient_norm", "value": value}
                self.observations.append({**row, "n": self.config.batch_tokens})

    def backward(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Compute the gradients of this device's share of a batch; returns entropy and balance."""
        reported = []
        for index, (inputs_BT, targets_BT, weight) in enumerate(parts, start=1):
            with self.devices.accumulating(self.objective, last=index == len(parts)):
                with self.runtime.autocast:
                    loss, entropy, balance = self.objective(inputs_BT, targets_BT)
                (loss * weight).backward()
            reported.append(torch.stack((entropy, balance)) * weight)
        entropy, balance = torch.stack(reported).sum(0)
        return entropy, balance

    def check_divergence(self) -> list[float] | None:
        """Check each loss since the last call for divergence; returns the last step's values."""
        if not self.recent:
            return None
        rows = self.devices.mean(torch.stack(self.recent)).tolist()
        first, last = (row["train_loss"] for row in (self.curves[0], self.curves[-1])) if self.curves else (None, None)
        for step, (loss, _, grad_norm) in enumerate(rows, start=self.step - len(rows) + 1):
            if cause := divergence(loss, grad_norm, first, last, self.config.divergence_factor):
                self.diverged = (step, cause)
                break
        self.recent.clear()
        return rows[-1]

    def log(self) -> None:
        """Check the recent steps for divergence and add a row of the last one to the curves."""
        values = self.check_divergence()
        assert values is not None
        if self.diverged and self.diverged[0] < self.step:
            return  # later steps are no result
        loss, balance, grad_norm = (value if math.isfinite(value) else None for value in values)
        now = time.perf_counter()
        batch_tokens = self.config.batch_tokens
        row = {"step": self.step, "tokens": self.step * batch_tokens, "train_loss": loss, "balance_loss": balance}
        row |= {"lr": learning_rate(self.config, self.step - 1), "grad_norm": grad_norm}
        row["tokens_per_second"] = (self.step - self.logged_step) * batch_tokens / (now - self.logged_at)
        self.curves.append(row)
        self.logged_at = now
        self.logged_step = self.step

    def observe_if_due(self, observe: Observe | None) -> None:
        """Add the rows of `observe` every observe_every steps, except after the last."""
        is_due = self.step % self.config.observe_every == 0 and self.step < self.config.n_steps
        if observe and is_due and not self.diverged:
            with gathered(self.objective):
                if self.devices.is_leader:
                    self.observations.extend(observe(self.model, self.step))

    def save(self, folder: Path, *, in_background: bool = False, keep_all: bool = False) -> None:
        """Commit a checkpoint, unless the run diverged; `in_background` writes a copy meanwhile."""
        self.check_divergence()
        if self.diverged:
            return
        began = time.perf_counter()
        self.finish_saving()
        tensors = checkpoint.snapshot(self.model, self.optimizer, self.devices, copy=in_background)
        position = checkpoint.Position(
            step=self.step,
            curves=[*self.curves],
            observations=[*self.observations],
            seconds=self.earlier_seconds + self.clock() - self.began,
            precision=self.precision,
            data_hash=self.data_hash,
        )
        if in_background and self.devices.is_leader:
            self.writer = self.writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self.writing = self.writer.submit(self._commit, folder, tensors, position)
        elif self.devices.is_leader:
            checkpoint.commit(folder, tensors, position, keep_all=keep_all)
        self.save_seconds = time.perf_counter() - began

    def _commit(self, folder: Path, tensors: checkpoint.Tensors, position: checkpoint.Position) -> None:
        began = time.thread_time()
        checkpoint.commit(folder, tensors, position)
        self.writer_seconds = time.thread_time() - began

    def finish_saving(self) -> None:
        """Wait for the background checkpoint. Raises its error."""
        writing = self.writing
        self.writing = None
        if writing:
            writing.result()

    def is_save_due(self, since: float) -> bool:
        """Whether enough time has passed `since` the last checkpoint that they take below 5%."""
        min_seconds = max(self.runtime.checkpoint_seconds, 20 * (self.save_seconds + self.writer_seconds))
        return time.perf_counter() - since > min_seconds

    def resume(self, folder: Path | None, trunk: Path | None = None) -> None:
        """Continue from the newest valid checkpoint, if any: the run's own, or one of its `trunk`
        that is newer. Raises ValueError if its steps had another precision or read other data."""
        into = self.model, self.optimizer, self.devices
        own = checkpoint.read(folder, *into) if folder else None
        limits = {"after": own.step if own else 0, "upto": self.config.stable_steps}
        shared = checkpoint.read(trunk, *into, **limits) if trunk else None
        position = shared or own
        if position:
            if position.precision not in (None, self.precision):
                raise ValueError(
                    f"precision={self.config.precision} is {self.precision} on {self.runtime.device.type}, but the "
                    f"run's first {position.step} steps were computed in {position.precision}; "
                    f"continue on the device it began on, or delete {trunk if shared else folder} to start again"
                )
            if position.data_hash not in (None, self.data_hash):
                raise ValueError(
                    f"the run's first {position.step} steps read data {position.data_hash}, and now it is "
                    f"{self.data_hash}; restore the corpus, or delete {trunk if shared else folder} to start again"
                )
            self.step = self.logged_step = position.step
            self.curves = position.curves
            self.observations = position.observations
            self.earlier_seconds = position.seconds

    @property
    def result(self) -> TrainingResult:
        """Of training so far."""
        steps, cause = self.diverged or (self.step, None)
        return TrainingResult(
            outcome="diverged" if self.diverged else "ok",
            diverged_step=steps if self.diverged else None,
            diverged_cause=cause,
            steps=steps,
            curves=self.curves,
            observations=[row for row in self.observations if row["step"] <= steps],
            earlier_seconds=self.earlier_seconds,
            captured_steps=self.captured_steps,
            n_stacked=self.n_stacked,
        )


Work = Generator[TrainingState | None, None, Result]
"""A run, step by step: yields the state before each training step, so that several runs can train
together (`train.stack`), and None where another run may continue first."""


def divergence(
    loss: float, grad_norm: float, first_loss: float | None, logged_loss: float | None, factor: float
) -> str | None:
    """Why a step counts as diverged, or None. A high loss counts if the last row of the curves
    before it has one, too: single batches spike, and the run recovers within a few steps."""
    if not math.isfinite(loss):
        return f"loss is {loss}"
    if not math.isfinite(grad_norm):
        return f"gradient norm is {grad_norm}"
    if first_loss is not None and logged_loss is not None and min(loss, logged_loss) > factor * first_loss:
        return (
            f"loss {loss:.3g} is more than {factor:g} times the first step's {first_loss:.3g}, "
            "as at the last logged step"
        )
    return None


def training(
    model: Decoder,
    config: RunConfig,
    runtime: Runtime,
    batch: ReadBatch,
    *,
    devices: Devices = ALONE,
    checkpoints: Path | None = None,
    trunk: Path | None = None,
    data_hash: str | None = None,
    observe: Observe | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    clock: Clock = time.perf_counter,
) -> Work[TrainingResult]:
    """Train `model` in place for config.n_steps steps on batch(step), the same in every process;
    yields before each step. Continues from the newest valid checkpoint in `checkpoints`, if any, or
    with schedule wsd in `trunk`, which runs of several lengths share; the state before the decay is
    left there. Checkpoints of other data than `data_hash` are refused. Raises Interrupted, after a
    checkpoint, once `stop()` is true in any process. Only the leader calls `observe` and returns
    observations. `clock` measures the run's seconds."""
    choose_attention_backends(config)
    trained = devices.place_model(model, runtime.device).train()
    trained.use_kernels(**runtime.kernels)
    state = TrainingState(trained, config, runtime, devices, clock)
    state.data_hash = data_hash
    state.resume(checkpoints, trunk)
    with closing(feed(batch, range(state.step, config.n_steps), runtime.device, devices)) as batches:
        try:
            saved_at = state.logged_at = time.perf_counter()
            if state.step == 0:
                state.observe_if_due(observe)
            while state.step < config.n_steps:
                state.batch = next(batches)
                yield state
                state.take_step(state.batch)
                if state.step % config.log_every == 0 or state.step in (1, config.n_steps):
                    state.log()
                state.observe_if_due(observe)
                if trunk and state.step == config.stable_steps:
                    state.save(trunk, keep_all=True)  # for runs that train for longer
                is_due = checkpoints is not None and devices.is_leader and state.is_save_due(saved_at)
                stopping, is_due = devices.any(stop is not None and stop(), is_due)
                if checkpoints and (stopping or is_due):
                    state.save(checkpoints, in_background=runtime.saves_in_background and not stopping)
                    saved_at = time.perf_counter()
                if state.diverged:
                    break
                if progress:
                    progress(state.step, state.curves)
                if stopping:
                    raise Interrupted
            if checkpoints:
                state.save(checkpoints)
        finally:
            state.finish_saving()
    devices.copy_weights_back(trained, model)
    return state.result


def train(model: Decoder, config: RunConfig, runtime: Runtime, batch: ReadBatch, **options) -> TrainingResult:
    return run_generator(training(model, config, runtime, batch, **options))


def run_generator(steps: Generator[object, None, Result]) -> Result:
    """Exhaust a generator; its return value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
