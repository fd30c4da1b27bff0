"""Batches loaded one step ahead by a thread, into pinned memory, while the device computes.

Shapes: B sequences of a device's share of the batch, T tokens.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

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
    """targets_BT; IGNORED where not scored"""
    scored: np.ndarray
    """scored positions of each sequence, on the host"""
    n_devices: int = 1
    n_scored: int
    """scored positions of the whole batch, over all devices"""

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
        """Copied to the device without waiting for it."""
        inputs, targets = (part.to(device, non_blocking=True) for part in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def parts(self, n_sequences: int | None) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Inputs, targets and loss weight of micro-batches of n_sequences (None: all): the part's
        share of the scored positions, times the number of devices, so that weight x mean loss,
        summed over parts and averaged over devices, is the mean over all scored positions."""
        n = n_sequences or len(self.inputs)
        scored = np.add.reduceat(self.scored, range(0, len(self.inputs), n)).tolist()
        weights = [number * self.n_devices / self.n_scored for number in scored]
        return zip(self.inputs.split(n), self.targets.split(n), weights, strict=True)


class Feed(AbstractContextManager):
    """Batches, read one step ahead: `feed[step]` is the batch of a step on the device, for
    consecutive steps up to `n_steps` - 1. Its context ends the thread."""

    def __init__(self, batch: Callable[[int], Sequences], n_steps: int, device: torch.device, devices: Devices = ALONE):
        self.batch, self.n_steps, self.device, self.devices = batch, n_steps, device, devices
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.next: tuple[int, Future[Batch]] | None = None

    def __exit__(self, *error: object) -> None:
        self.reader.shutdown(cancel_futures=True)

    def __getitem__(self, step: int) -> Batch:
        """This process's share of `step`; starts reading step + 1."""
        future = self.next[1] if self.next and self.next[0] == step else self.reader.submit(self._read, step)
        batch = future.result()
        self.next = (step + 1, self.reader.submit(self._read, step + 1)) if step + 1 < self.n_steps else None
        return batch.to(self.device)

    def _read(self, step: int) -> Batch:
        batch = Batch.of(self.batch(step), self.devices)
        if self.device.type != "cuda":
            return batch
        # Copies from pinned memory do not block the host; from pageable memory they do.
        return replace(batch, inputs=batch.inputs.pin_memory(), targets=batch.targets.pin_memory())
