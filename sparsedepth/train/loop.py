"""The training loop: optimizer steps (`train.optimizer`), curves, checkpoints, and the hooks observe, progress, stop.

    loss = CE + balance_loss * mean_l balance_l + router_z_loss * mean_l z_l

The batch of step t is a function of t, so a run resumed from its checkpoint takes exactly the steps that it would have
taken: on a CPU its weights end bit-equal. A loss or gradient that is not finite, or a loss far above the first one,
ends the run as a *result* (outcome 'diverged', with step and cause), not as an error.

CE is the mean over the positions that count, all of a text's, those with an answer of a task's. A step adds the
gradients of micro-batches, each weighted by its share of these positions, so CE is the batch's (and z, in text).
Deviates: the balance loss is the mean of the micro-batches' own, as a product of two means of each; over several
devices it is the whole's. Nothing in a step makes the host wait for the device.

Shapes: B sequences, T tokens of one sequence.
"""

import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from sparsedepth.config.combinations import check_parallel
from sparsedepth.config.run import RunConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.model.decoder import Decoder
from sparsedepth.train import checkpoint
from sparsedepth.train.cuda_graph import CapturedUpdate, CudaCapture, StaticBatch
from sparsedepth.train.devices import ALONE, Devices, whole
from sparsedepth.train.feed import Batch, Feed
from sparsedepth.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from sparsedepth.train.runtime import Runtime, choose_attention_backends, compile_blocks, dropout_masks

Result = TypeVar("Result")

Observe = Callable[[Decoder, int], list[dict[str, Any]]]
"""(model, step) -> rows; called before the first step and every observe_every steps, not after the last."""


class Interrupted(Exception):
    """The run was asked to stop, and has written a checkpoint from which it continues."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of training besides the weights."""

    outcome: Literal["ok", "diverged"]
    diverged_step: int | None
    diverged_cause: str | None
    steps: int
    curves: list[dict[str, Any]]
    observations: list[dict[str, Any]]
    earlier_seconds: float = 0.0
    """that processes before this one had trained, up to the checkpoint that it continued from"""


def losses(model: Decoder, inputs_BT: Tensor, targets_BT: Tensor, config: RunConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The loss to minimise, its cross-entropy (nat/token), and the mean balance loss (NaN without experts)."""
    router_losses: list[Tensor] = []
    x_BTD = model.hidden(inputs_BT, router_losses)
    entropy, _ = model.cross_entropy(x_BTD, targets_BT)
    if not router_losses:
        return entropy, entropy.detach(), torch.full_like(entropy.detach(), math.nan)
    balance, z = torch.stack(router_losses).mean(0)
    loss = entropy + config.balance_loss * balance + config.router_z_loss * z
    return loss, entropy.detach(), balance.detach()


class Objective(nn.Module):
    """`losses` as a module: what DDP and FSDP wrap, so that their hooks surround the whole forward pass."""

    def __init__(self, model: Decoder, config: RunConfig):
        super().__init__()
        self.model, self.config = model, config

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return losses(self.model, inputs_BT, targets_BT, self.config)


class TrainingState:
    """The state of one training run between steps."""

    batch: Batch
    """of the step that is about to be taken"""
    given: tuple[Tensor, Tensor] | None = None
    """its cross-entropy and balance loss, where `train.stack` has computed them, and the gradients, already"""

    def __init__(
        self,
        model: Decoder,
        config: RunConfig,
        runtime: Runtime,
        devices: Devices,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model, self.config, self.runtime, self.devices = model, config, runtime, devices
        self.clock, self.began, self.earlier_seconds = clock, clock(), 0.0
        check_parallel(config, devices.parallel)
        if runtime.compile:
            compile_blocks(model)
        self.objective = devices.wrap(Objective(model, config), runtime.device)
        self.optimizer = make_optimizer(model, config)
        self.captured: CapturedUpdate | None = None
        if runtime.cuda_graph:
            self.captured = CapturedUpdate(self.optimizer, runtime.micro_batch, CudaCapture(runtime.device))
        self.step = 0
        self.curves: list[dict[str, Any]] = []
        self.observations: list[dict[str, Any]] = []
        self.recent: list[Tensor] = []  # (loss, balance, gradient norm) per step, left on the device until logged
        self.logged_at = time.perf_counter()
        self.logged_step = 0
        self.diverged: tuple[int, str] | None = None
        self.save_seconds = 0.0
        """for how long the last checkpoint held up training"""
        self.writer: ThreadPoolExecutor | None = None
        self.writing: Future[None] | None = None

    def take_step(self, batch: Batch) -> None:
        set_learning_rate(self.optimizer, learning_rate(self.config, self.step))
        with dropout_masks(self.config, self.step, self.devices.rank, self.runtime.device):
            if self.captured and not (self.given or self.is_noting_gradients):
                row = self.captured(self.update, batch)
            else:
                row = self.update(batch)
        self.recent.append(row)
        self.step += 1

    def update(self, batch: Batch | StaticBatch) -> Tensor:
        """Take one step of the optimizer; returns (loss, balance, gradient norm), on the device."""
        entropy, balance = self.given or self.backward(batch)
        self.given = None
        self.note_gradients()
        limit = self.config.grad_clip or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack((entropy, balance, whole(grad_norm)))

    @property
    def is_noting_gradients(self) -> bool:
        """Whether the next step notes them: at the first step, at observations and at the last step."""
        step, n_steps = self.step + 1, self.config.n_steps
        return "gradients" in self.config.measures and not (step % self.config.observe_every and 1 < step < n_steps)

    def note_gradients(self) -> None:
        """Rows of the gradient's norm by block, in steps that note them."""
        if not self.is_noting_gradients:
            return
        weights = [[*block.parameters()] for block in self.model.blocks]
        grads = [[weight.grad for weight in of_block if weight.grad is not None] for of_block in weights]
        norms = torch.stack([whole(torch.nn.utils.get_total_norm(of_block)) for of_block in grads]).tolist()
        if self.devices.is_leader:
            for layer, norm in enumerate(norms, start=1):
                value = norm if math.isfinite(norm) else None
                row = {"step": self.step + 1, "layer": layer, "metric": "gradient_norm", "value": value}
                self.observations.append({**row, "n": self.config.batch_tokens})

    def backward(self, batch: Batch | StaticBatch) -> tuple[Tensor, Tensor]:
        """Leave the gradients of this device's share of a batch; its cross-entropy and balance loss."""
        parts = list(batch.parts(self.runtime.micro_batch))
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
        """Move the losses of the steps since the last call to the host and judge each; the last step's values."""
        if not self.recent:
            return None
        rows = self.devices.mean(torch.stack(self.recent)).tolist()
        first_loss = self.curves[0]["train_loss"] if self.curves else None
        for step, (loss, _, grad_norm) in enumerate(rows, start=self.step - len(rows) + 1):
            cause = divergence(loss, grad_norm, first_loss, self.config.divergence_factor)
            if cause:
                self.diverged = (step, cause)
                break
        self.recent.clear()
        return rows[-1]

    def log(self) -> None:
        """Judge the recent steps and add a row for the last."""
        values = self.check_divergence()
        assert values is not None
        if self.diverged and self.diverged[0] < self.step:
            return  # what came after is no result, and how much came depends on when it was judged
        loss, balance, grad_norm = (value if math.isfinite(value) else None for value in values)
        now = time.perf_counter()
        self.curves.append(
            {
                "step": self.step,
                "tokens": self.step * self.config.batch_tokens,
                "train_loss": loss,
                "balance_loss": balance,
                "lr": learning_rate(self.config, self.step - 1),
                "grad_norm": grad_norm,
                "tokens_per_second": (self.step - self.logged_step) * self.config.batch_tokens / (now - self.logged_at),
            }
        )
        self.logged_at, self.logged_step = now, self.step

    def observe_if_due(self, observe: Observe | None) -> None:
        """Add the rows of `observe` every observe_every steps, but not after the last."""
        due = self.step % self.config.observe_every == 0 and self.step < self.config.n_steps
        if observe and due and not self.diverged:
            with self.devices.gathered(self.objective):
                if self.devices.is_leader:
                    self.observations.extend(observe(self.model, self.step))

    def save(self, folder: Path, *, aside: bool = False) -> None:
        """Commit a checkpoint; `aside`: it is copied now, and written while training goes on."""
        began = time.perf_counter()
        self.finish_saving()
        kept = checkpoint.snapshot(self.model, self.optimizer, self.devices, copy=aside)
        seconds = self.earlier_seconds + self.clock() - self.began
        position = checkpoint.Position(
            step=self.step, curves=[*self.curves], observations=[*self.observations], seconds=seconds
        )
        if aside and self.devices.is_leader:
            self.writer = self.writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self.writing = self.writer.submit(checkpoint.commit, folder, kept, position)
        elif self.devices.is_leader:
            checkpoint.commit(folder, kept, position)
        self.save_seconds = time.perf_counter() - began

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written. Raises what writing it raised."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def is_save_due(self, since: float) -> bool:
        """Whether enough time has passed `since` the last checkpoint that another takes at most 5% of it."""
        least = max(self.runtime.checkpoint_seconds, 20 * self.save_seconds)
        return time.perf_counter() - since > least

    def resume(self, folder: Path) -> None:
        """Continue from the newest whole checkpoint, if there is one."""
        position = checkpoint.read(folder, self.model, self.optimizer, self.devices)
        if position:
            self.step = self.logged_step = position.step
            self.curves, self.observations = position.curves, position.observations
            self.earlier_seconds = position.seconds


Work = Generator[TrainingState | None, None, Result]
"""Part of the work on a run. Yields the state of training before each step, so that several runs can train together
(`train.stack`), and None where another run may go on first."""


def divergence(loss: float, grad_norm: float, first_loss: float | None, factor: float) -> str | None:
    """Why a step counts as diverged, or None."""
    if not math.isfinite(loss):
        return f"loss is {loss}"
    if not math.isfinite(grad_norm):
        return f"gradient norm is {grad_norm}"
    if first_loss is not None and loss > factor * first_loss:
        return f"loss {loss:.3g} is more than {factor:g} times the first step's {first_loss:.3g}"
    return None


def training(
    model: Decoder,
    config: RunConfig,
    runtime: Runtime,
    batch: Callable[[int], Sequences],
    *,
    devices: Devices = ALONE,
    checkpoints: Path | None = None,
    observe: Observe | None = None,
    progress: Callable[[int, list[dict[str, Any]]], None] | None = None,
    stop: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Work[Trained]:
    """Train `model` in place for config.n_steps steps on batch(step) (the whole batch, the same in every process).

    Continues from the newest whole checkpoint in `checkpoints`, where one is. `progress(steps done, curves)` is called
    after each step. Raises Interrupted, after a checkpoint, once `stop()` is true in any process. Only the
    first process observes, and has observations to return. `clock` counts the seconds. Yields before each step.
    """
    choose_attention_backends(config)
    trained = devices.spread(model, runtime.device).train()
    trained.use_kernels(**runtime.chosen_kernels)
    state = TrainingState(trained, config, runtime, devices, clock)
    if checkpoints:
        state.resume(checkpoints)
    with Feed(batch, config.n_steps, runtime.device, devices) as feed:
        try:
            yield from _take_steps(state, feed, checkpoints, observe, progress, stop)
        finally:
            state.finish_saving()
    devices.collect(trained, model)
    steps, cause = state.diverged or (state.step, None)
    return Trained(
        outcome="diverged" if state.diverged else "ok",
        diverged_step=steps if state.diverged else None,
        diverged_cause=cause,
        steps=steps,
        curves=state.curves,
        observations=[row for row in state.observations if row["step"] <= steps],
        earlier_seconds=state.earlier_seconds,
    )


def train(model: Decoder, config: RunConfig, runtime: Runtime, batch: Callable[[int], Sequences], **options) -> Trained:
    """`training` from its start to its end, by itself."""
    return to_end(training(model, config, runtime, batch, **options))


def to_end(steps: Generator[object, None, Result]) -> Result:
    """What a generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _take_steps(
    state: TrainingState,
    feed: Feed,
    checkpoints: Path | None,
    observe: Observe | None,
    progress: Callable[[int, list[dict[str, Any]]], None] | None,
    stop: Callable[[], bool] | None,
) -> Work[None]:
    """From where the run stands to its end, or its divergence."""
    saved_at = state.logged_at = time.perf_counter()
    if state.step == 0:
        state.observe_if_due(observe)
    while state.step < state.config.n_steps:
        state.batch = feed[state.step]
        yield state
        state.take_step(state.batch)
        if state.step % state.config.log_every == 0 or state.step in (1, state.config.n_steps):
            state.log()
        state.observe_if_due(observe)
        due = checkpoints is not None and state.is_save_due(saved_at)
        stopping, due = state.devices.any(stop is not None and stop(), due)
        if checkpoints and (stopping or due):
            state.check_divergence()
            if not state.diverged:
                state.save(checkpoints, aside=state.runtime.saves_aside and not stopping)
            saved_at = time.perf_counter()
        if state.diverged:
            return
        if progress:
            progress(state.step, state.curves)
        if stopping:
            raise Interrupted
    if checkpoints:
        state.save(checkpoints)
