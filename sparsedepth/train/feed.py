"""Batches one step ahead: read and pinned by a thread while the device computes.

Shapes: B sequences of a device's share of the batch, T tokens of one sequence.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Sequences
from sparsedepth.train.devices import ALONE, Devices


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A device's share of the sequences of one step."""

    inputs: Tensor
    """inputs_BT"""
    targets: Tensor
    """targets_BT; IGNORED where a position does not count"""
    scored: np.ndarray
    """positions that count of each sequence, on the host: nothing waits for the device to know them"""
    n_devices: int = 1
    n_scored: int
    """positions that count in the whole batch, over all devices"""

    @classmethod
    def of(cls, sequences: Sequences, devices: Devices = ALONE) -> "Batch":
        """This process's share, on the host."""
        own = devices.share(sequences)
        return cls(
            inputs=torch.from_numpy(own.inputs),
            targets=torch.from_numpy(own.targets),
            scored=(own.targets != IGNORED).sum(axis=1),
            n_devices=devices.size,
            n_scored=sequences.n_scored,
        )

    def to(self, device: torch.device) -> "Batch":
        """On the device, which is not waited for."""
        inputs, targets = (part.to(device, non_blocking=True) for part in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def parts(self, n_sequences: int | None) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Inputs and targets of micro-batches of so many sequences, each with its weight in the loss of the batch.

        The weight is the part's share of the positions that count, times the devices whose mean is taken: so the sum
        over parts of weight x mean loss, averaged over devices, is the mean over all positions that count.
        """
        n = n_sequences or len(self.inputs)
        for first, inputs_BT, targets_BT in zip(
            range(0, len(self.inputs), n), self.inputs.split(n), self.targets.split(n), strict=True
        ):
            scored = int(self.scored[first : first + n].sum())
            yield inputs_BT, targets_BT, scored * self.n_devices / self.n_scored


class Feed:
    """`feed[step]` is the batch of a step on the device, for steps in order from any first one below `n_steps`.

    Used in a `with` block, which ends the thread. What `batch` raises is raised where its step is asked for.
    """

    def __init__(self, batch: Callable[[int], Sequences], n_steps: int, device: torch.device, devices: Devices = ALONE):
        self.batch, self.n_steps, self.device, self.devices = batch, n_steps, device, devices
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.next: tuple[int, Future[Batch]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.reader.shutdown(cancel_futures=True)

    def __getitem__(self, step: int) -> Batch:
        """This process's share of `step`; reading of step + 1 begins."""
        ready = self.next[1] if self.next and self.next[0] == step else self.reader.submit(self._read, step)
        batch = ready.result()
        self.next = (step + 1, self.reader.submit(self._read, step + 1)) if step + 1 < self.n_steps else None
        return batch.to(self.device)

    def _read(self, step: int) -> Batch:
        batch = Batch.of(self.batch(step), self.devices)
        if self.device.type != "cuda":
            return batch
        # A copy from pinned memory does not hold up the host; from pageable memory it does.
        return replace(batch, inputs=batch.inputs.pin_memory(), targets=batch.targets.pin_memory())
