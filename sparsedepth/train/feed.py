"""Batches loaded one step ahead by a thread, into pinned memory, while the device computes.

Shapes: B sequences of a device's share of the batch, T tokens."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Sequences
from sparsedepth.train.devices import ALONE, Devices

Part = tuple[Tensor, Tensor, Tensor | float]
"""Inputs, targets and loss weight of a micro-batch."""

ReadBatch = Callable[[int], Sequences]
"""step -> its batch, the same in every process."""


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

    def parts(self, n_sequences: int | None) -> Iterator[Part]:
        """Micro-batches of n_sequences (None: all). A weight is the part's share of the scored
        positions, times the number of devices, so that weight x mean loss, summed over parts and
        averaged over devices, is the mean over all scored positions."""
        n = n_sequences or len(self.inputs)
        scored = np.add.reduceat(self.scored, range(0, len(self.inputs), n)).tolist()
        weights = [number * self.n_devices / self.n_scored for number in scored]
        return zip(self.inputs.split(n), self.targets.split(n), weights, strict=True)


def feed(batch: ReadBatch, steps: range, device: torch.device, devices: Devices = ALONE) -> Generator[Batch]:
    """This process's share of the batch of each step, on the device; the thread ends at `close`."""

    def read(step: int) -> Batch:
        share = Batch.of(batch(step), devices)
        if device.type != "cuda":
            return share
        # Copies from pinned memory do not block the host; from pageable memory they do.
        return replace(share, inputs=share.inputs.pin_memory(), targets=share.targets.pin_memory())

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as reader:
        ahead = [reader.submit(read, step) for step in steps[:1]]
        for step in steps:
            ready = ahead.pop().result()
            ahead = [reader.submit(read, step + 1)] if step + 1 in steps else []
            yield ready.to(device)
