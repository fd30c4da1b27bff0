"""Trains all students of a group as one batched model, with the same result as training each separately.

    kl:             E_x KL(softmax(t / temperature) || softmax(s))                 t, s: logits of teacher and student
    kl_given_head:  E_x KL(softmax(t / temperature) || softmax(s / temperature))   s through the teacher's head
    mse:            mean over inputs and entries of (N(x_L) of the student - N(x_L) of the teacher)^2

The sum of the students' losses is minimised: its gradient with respect to one student is that of its own loss, and Adam
is elementwise. A teacher runs once per step for all its temperatures and seeds. Inputs of step t are a function of
(data_seed, t), test inputs of data_seed; test losses are computed in double precision, because a KL near 0 is the
difference of large terms.

`make_group` writes the record. Each group has a lock, so the same command, started again here or on a machine that
shares the folder, takes other groups.

J = rho x teacher_seed teachers, G = J x temperature targets, S seeds, K = G x S students.
"""

import datetime
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.files import is_locked, locked
from sparsedepth.store.checksums import is_complete
from sparsedepth.toy.config import ToyConfig
from sparsedepth.toy.network import Students, final_state, generator, student_axes, teachers
from sparsedepth.toy.record import save_toy, toy_folder
from sparsedepth.train import checkpoint
from sparsedepth.train.loop import Interrupted

CHECKPOINT_SECONDS = 60.0

Progress = Callable[[int, float | None], None]
"""(steps done, mean training loss last logged)"""


class Group:
    """All students of a config, with their teachers and optimizer."""

    def __init__(self, config: ToyConfig, device: torch.device | str = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        self.teachers = teachers(config, self.device)
        per_teacher = config.n_students // len(self.teachers.head)
        head_KMV = self.teachers.head.repeat_interleave(per_teacher, 0)
        given = head_KMV if config.target == "kl_given_head" else None
        self.students = Students(config, given).to(self.device)
        self.optimizer = torch.optim.Adam(self.students.parameters(), lr=config.lr, fused=True)
        temperature_T = torch.tensor(config.temperature, device=self.device)
        self.temperature_G11 = temperature_T.repeat(len(self.teachers.head))[:, None, None]
        self.step = 0
        self.curves: list[dict[str, Any]] = []
        self.tests: list[tuple[Tensor, Tensor]] | None = None

    def inputs(self, *key: int | str) -> Tensor:
        """A batch of standard normal inputs, drawn on the CPU."""
        source = generator("inputs", self.config.data_seed, *key)
        input_BM = torch.randn(self.config.batch_size, self.config.d_model, generator=source)
        if self.device.type == "cuda":  # copies from pinned memory do not block the host
            input_BM = input_BM.pin_memory()
        return input_BM.to(self.device, non_blocking=True)

    @torch.no_grad()
    def teacher_states(self, input_BM: Tensor) -> Tensor:
        """N(x_L) of each teacher, [J, B, M]."""
        return final_state(self.teachers, input_BM)

    def targets(self, state_JBM: Tensor) -> Tensor:
        """The students' targets: log probabilities [G, B, V], or states [G, B, M]."""
        if self.config.target == "mse":
            return state_JBM
        logits_JBV = torch.bmm(state_JBM, self.teachers.head)
        logits_GBV = logits_JBV.repeat_interleave(len(self.config.temperature), 0)
        return F.log_softmax(logits_GBV / self.temperature_G11, -1)

    def losses(self, input_BM: Tensor, target: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The loss of each student on a batch, [K]."""
        state_KBM = self.students(input_BM)
        if self.config.target == "mse":
            squares = (self._by_target(state_KBM.to(dtype)) - target.to(dtype).unsqueeze(1)).square()
            return squares.mean((-2, -1)).flatten()
        logits_GSBV = self._by_target(self.students.logits(state_KBM).to(dtype))
        if self.config.target == "kl_given_head":
            logits_GSBV = logits_GSBV / self.temperature_G11.unsqueeze(1)
        log_ratio = target.to(dtype).unsqueeze(1) - F.log_softmax(logits_GSBV, -1)
        return (target.to(dtype).exp().unsqueeze(1) * log_ratio).sum(-1).mean(-1).flatten()

    def _by_target(self, x_KBX: Tensor) -> Tensor:
        """[K, B, X] -> [G, S, B, X]."""
        return x_KBX.unflatten(0, (-1, len(self.config.seed)))

    def take_step(self) -> Tensor:
        """One optimizer step; returns the losses before it, [K]."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.step)
        input_BM = self.inputs(self.step)
        losses_K = self.losses(input_BM, self.targets(self.teacher_states(input_BM)))
        self.optimizer.zero_grad(set_to_none=True)
        losses_K.sum().backward()
        self.optimizer.step()
        self.step += 1
        return losses_K.detach()

    @torch.no_grad()
    def test_losses(self) -> list[float]:
        """The loss of each student on the test batches."""
        if self.tests is None:
            batches = [self.inputs("test", index) for index in range(self.config.test_batches)]
            self.tests = [(input_BM, self.teacher_states(input_BM)) for input_BM in batches]
        losses = [self.losses(input_BM, self.targets(state_JBM), torch.float64) for input_BM, state_JBM in self.tests]
        return torch.stack(losses).mean(0).tolist()

    def log(self, train_loss_K: Tensor) -> None:
        """Add a row per student."""
        lr = self.config.learning_rate(self.step - 1)
        pairs = zip(train_loss_K.tolist(), self.test_losses(), strict=True)
        self.curves += [
            {"step": self.step, "student": number, "train_loss": _finite(train), "test_loss": _finite(test), "lr": lr}
            for number, (train, test) in enumerate(pairs)
        ]

    def mean_train_loss(self) -> float | None:
        """The last logged mean over students."""
        last = [row["train_loss"] for row in self.curves[-self.config.n_students :]]
        known = [loss for loss in last if loss is not None]
        return sum(known) / len(known) if known else None

    def save(self, folder: Path) -> None:
        position = checkpoint.Position(step=self.step, curves=self.curves, observations=[])
        checkpoint.write(folder, self.students, self.optimizer, position)

    def resume(self, folder: Path) -> None:
        """Continue from the newest valid checkpoint, if any."""
        if position := checkpoint.read(folder, self.students, self.optimizer):
            self.step, self.curves = position.step, position.curves


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def train(
    config: ToyConfig,
    device: torch.device | str = "cpu",
    *,
    checkpoints: Path | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Group:
    """Train a group to its end, continuing from `checkpoints`; on a CPU with bit-equal results. Raises Interrupted,
    after a checkpoint, once `stop()` is true."""
    group = Group(config, device)
    if checkpoints:
        group.resume(checkpoints)
    saved_at = time.perf_counter()
    while group.step < config.n_steps:
        losses_K = group.take_step()
        if group.step % config.log_every == 0 or group.step == config.n_steps:
            group.log(losses_K)
        stopping = stop is not None and stop()
        if checkpoints and (stopping or time.perf_counter() - saved_at > CHECKPOINT_SECONDS):
            group.save(checkpoints)
            saved_at = time.perf_counter()
        if progress:
            progress(group.step, group.mean_train_loss())
        if stopping:
            raise Interrupted
    return group


def scratch(results: Path, config: ToyConfig) -> Path:
    """`RESULTS/work/<run_id>`: the lock and the checkpoints of a group that is not complete."""
    return results / "work" / config.run_id


def is_busy(results: Path, config: ToyConfig) -> bool:
    """Whether a running process trains the group."""
    return is_locked(scratch(results, config) / "lock")


def make_group(
    config: ToyConfig,
    results: Path,
    device: torch.device,
    facts: Mapping[str, Any],
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Path:
    """Train the group into `results` unless complete; returns its folder. `facts` go into the manifest. Raises
    Interrupted, after a checkpoint, once `stop()` is true."""
    folder, work = toy_folder(results, config), scratch(results, config)
    with locked(work / "lock"):
        if not is_complete(folder):
            started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
            group = train(config, device, checkpoints=work / "checkpoints", progress=progress, stop=stop)
            times = {
                "started": started.isoformat(timespec="seconds"),
                "seconds": round(time.perf_counter() - clock, 3),  # of this process only
            }
            students = [
                {**axes, **{name: row[name] for name in ("student", "test_loss", "train_loss")}}
                for axes, row in zip(student_axes(config), group.curves[-config.n_students :], strict=True)
            ]
            save_toy(results, config, students, group.curves, {**times, **facts})
    shutil.rmtree(work, ignore_errors=True)
    return folder
