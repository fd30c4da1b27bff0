"""One model on several devices, under torchrun: each process has a rank, a device and an equal
share of every global batch.

    ddp    each process holds the whole model; gradients are averaged             (2006.15704)
    fsdp   parameters, gradients and moments are sharded; a block's weights are gathered while it computes (2304.11277)

FSDP gathers weights in fp32: its own mixed precision would send half as much, but round the weights
of norms and router, and so change the losses.

A step equals that of a single process to rounding: the experts' load is averaged over processes
before the balance loss (by `mean`), which makes it that of the global batch (2501.11873).

Processes agree by one small host exchange per step whether to stop or save. So a lost process is
noticed at the next step, not by a device time-out."""

import contextlib
import copy
import datetime
import os
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsedepth.config.runtime import Parallel, RuntimeConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.feedforward import Experts

TIMEOUT = datetime.timedelta(minutes=10)
"""Duration of an exchange after which the other processes count as lost."""

PATIENCE = datetime.timedelta(days=30)
"""How long processes wait for the leader (rank 0) to lock, measure and write."""


class LostError(RuntimeError):
    """Another process of this run has ended or hangs, or all have to start again with less memory."""


class Devices:
    """The processes that train one model together; alone, every method is the identity."""

    def __init__(self, parallel: Parallel = "none", rank: int = 0, size: int = 1):
        self.parallel = parallel
        self.rank = rank
        self.size = size
        self.is_leader = rank == 0
        """whether this process logs, observes, measures and writes"""
        self._patient = dist.new_group(backend="gloo", timeout=PATIENCE) if size > 1 else None

    def share(self, batch: Sequences) -> Sequences:
        """This process's rows of a global batch. Raises ValueError if it has no equal shares."""
        n_sequences = len(batch)
        if n_sequences % self.size:
            raise ValueError(
                f"a batch of {n_sequences} sequences (batch_tokens / seq_len) has no equal shares for {self.size} "
                f"processes; start a number of processes that divides {n_sequences}"
            )
        rows = n_sequences // self.size
        return batch[self.rank * rows : (self.rank + 1) * rows]

    def place_model(self, model: Decoder, device: torch.device) -> Decoder:
        """The model to train: the given one on `device`, or with fsdp a sharded copy."""
        placed = copy.deepcopy(model) if self.parallel == "fsdp" else model.to(device)
        for block in placed.blocks if self.parallel == "fsdp" else ():
            self._shard(block, device)
        _set_expert_mean(self.mean, placed)
        return placed

    def wrap(self, objective: nn.Module, device: torch.device) -> nn.Module:
        """`objective`, which holds a model from `place_model`, wrapped for training."""
        if self.parallel == "fsdp":
            self._shard(objective, device)
        if self.parallel == "ddp":
            with warnings.catch_warnings():  # older torch versions lack the option's new name
                warnings.simplefilter("ignore", FutureWarning)
                return DistributedDataParallel(objective, broadcast_buffers=False, gradient_as_bucket_view=True)
        return objective

    def accumulating(self, wrapped: Any, last: bool) -> AbstractContextManager[object]:
        """Context of a micro-batch: gradients are exchanged only after the `last` one of a step."""
        if self.parallel == "fsdp":
            wrapped.set_requires_gradient_sync(last)
        if isinstance(wrapped, DistributedDataParallel) and not last:
            return wrapped.no_sync()
        return contextlib.nullcontext()

    def _shard(self, module: nn.Module, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # here, since this import takes a second
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=init_device_mesh(device.type, (self.size,)))

    def mean(self, x: Tensor) -> Tensor:
        """The mean over processes, without gradients."""
        if self.size == 1:
            return x
        x = x.detach() / self.size
        dist.all_reduce(x)
        return x

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is true in any process."""
        if self.size == 1:
            return flags
        flag_F = torch.tensor(flags, dtype=torch.int32)  # on the host, so as not to wait for the device
        dist.all_reduce(flag_F)
        return tuple(bool(flag) for flag in flag_F.tolist())

    def broadcast_from_leader(self, number: int) -> int:
        """The leader's number in every process, however long the leader takes."""
        if self.size == 1:
            return number
        number_1 = torch.tensor([number])
        dist.broadcast(number_1, src=0, group=self._patient)
        return int(number_1.item())

    @torch.no_grad()
    def copy_weights_back(self, trained: Decoder, model: Decoder) -> None:
        """Copy the weights of a model from `place_model` to the original one."""
        _set_expert_mean(ALONE.mean, model)
        if trained is not model:
            for target, source in zip(model.parameters(), trained.parameters(), strict=True):
                target.copy_(full_tensor(source))

    def wait_for_leader(self) -> None:
        """Wait until the leader calls this too, however long that takes."""
        if self._patient is not None:
            dist.barrier(group=self._patient)


ALONE = Devices()


def _set_expert_mean(mean: Callable[[Tensor], Tensor], model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.mean_over_devices = mean


@contextmanager
def gathered(wrapped: nn.Module, *, with_blocks: bool = True) -> Generator[None]:
    """While open, every process has all weights of a module; or those outside of parts that are sharded apart."""
    parts = wrapped.modules() if with_blocks else [wrapped]
    sharded: list[Any] = [part for part in parts if hasattr(part, "unshard")]
    for part in sharded:
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; every process must call this."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """This process's part of a full tensor, sharded like `other`, without an exchange."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    tensor = tensor.to(other.device)
    if isinstance(other, DTensor) and tensor.shape == other.shape:
        return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
    return tensor


def world() -> tuple[int, int]:
    """The rank of this process and the number of processes, from torchrun; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_world(parallel: Parallel) -> None:
    """Raises ValueError if `parallel` does not fit the way in which this process was started."""
    if parallel != "none" and not {"WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        raise ValueError(
            f"parallel={parallel!r} needs one process for each device, started by torchrun: "
            "torchrun --nproc-per-node 2 -m sparsedepth.cli.main ..."
        )
    if parallel == "none" and world()[1] > 1:
        raise ValueError(
            f"parallel='none', but this is one of {world()[1]} processes: start it without torchrun, "
            "or set parallel to ddp (the model fits on each device) or fsdp"
        )


@contextmanager
def process_group(runtime: RuntimeConfig) -> Generator[Devices]:
    """The connected processes of this run. Raises LostError if another process is lost."""
    check_world(runtime.parallel)
    if runtime.parallel == "none":
        yield ALONE
        return
    rank, size = world()
    backend = "gloo"
    if runtime.device != "cpu" and torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Devices(runtime.parallel, rank, size)
        dist.barrier()  # leaving early would break the others' connection
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors with such texts
        is_loss = isinstance(error, dist.DistError) or re.search("gloo|nccl|closed by peer", str(error).lower())
        if not is_loss:
            raise
        raise LostError(
            f"process {rank} of {size} lost another process of this run, which ended or hangs (its own message says "
            "why); the same command continues from the last checkpoint"
        ) from error
    finally:
        dist.destroy_process_group()
