"""One model on several devices, under torchrun: each process has a rank, a device and a share of every global batch.

    ddp    each process holds the whole model; gradients are averaged             (2006.15704)
    fsdp   parameters, gradients and moments are sharded; a block's weights are gathered while it computes (2304.11277)

FSDP gathers weights in fp32, and autocast casts them as it does in one process: a policy of mixed precision would send
half as much, and round norms' weights and the router's, so that losses would no longer be those of one process.

The step is the one that a single process takes: shares are equal, so the mean of the means is the mean; the experts'
shares of the choices are averaged over processes before the balance loss (`model` calls `mean`), which then equals the
global batch's (2501.11873), since it is linear in the rest. All losses agree with one process to rounding.

What shards is imported where a run shards: it takes a second, for which `plan` and the start of every sweep would wait.

Everything that processes must agree on is decided by one small exchange between hosts per step: whether to stop or to
save, and whether all are alive. So a lost process is noticed at the next step, not at a time-out of the devices.
"""

import contextlib
import copy
import datetime
import os
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsedepth.config.runtime import Parallel, RuntimeConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.moe import Experts

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

TIMEOUT = datetime.timedelta(minutes=10)
"""How long an exchange may take before the process counts the others as lost."""

PATIENCE = datetime.timedelta(days=30)
"""How long the others wait for the leader (rank 0) to get the run, measure and write; its death they notice at once."""


class LostError(RuntimeError):
    """Another process of this run has ended or hangs; the same command continues from the last checkpoint."""


class Devices:
    """The processes that train one model together. Of a single process every method is the identity."""

    def __init__(self, parallel: Parallel = "none", rank: int = 0, size: int = 1):
        self.parallel, self.rank, self.size = parallel, rank, size
        self._patient = dist.new_group(backend="gloo", timeout=PATIENCE) if size > 1 else None

    @property
    def is_leader(self) -> bool:
        """Whether this process logs, observes, measures and writes."""
        return self.rank == 0

    def share(self, batch: Sequences) -> Sequences:
        """This process's rows of a global batch. Raises ValueError where the shares would not be equal."""
        n_sequences = len(batch)
        if n_sequences % self.size:
            raise ValueError(
                f"a batch of {n_sequences} sequences (batch_tokens / seq_len) has no equal shares for {self.size} "
                f"processes; start a number of processes that divides {n_sequences}"
            )
        rows = n_sequences // self.size
        return batch[self.rank * rows : (self.rank + 1) * rows]

    def spread(self, model: Decoder, device: torch.device) -> Decoder:
        """The model that is trained here: the given one, or its shard (the given one then stays on the host)."""
        spread = copy.deepcopy(model) if self.parallel == "fsdp" else model.to(device)
        if self.parallel == "fsdp":
            for block in spread.blocks:
                self._shard(block, device)
        _average_with(self.mean, spread)
        return spread

    def wrap(self, objective: nn.Module, device: torch.device) -> nn.Module:
        """The module to call in place of `objective`, which holds a model from `spread`."""
        if self.parallel == "fsdp":
            self._shard(objective, device)
        if self.parallel == "ddp":
            with warnings.catch_warnings():  # the new name of the option is not known to every torch that we support
                warnings.simplefilter("ignore", FutureWarning)
                return DistributedDataParallel(objective, broadcast_buffers=False, gradient_as_bucket_view=True)
        return objective

    def accumulating(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Around a micro-batch: gradients are exchanged after the last one of a step only."""
        for module in self._sharded(wrapped):
            module.set_requires_gradient_sync(last, recurse=False)
        if isinstance(wrapped, DistributedDataParallel) and not last:
            return wrapped.no_sync()
        return contextlib.nullcontext()

    def _shard(self, module: nn.Module, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=init_device_mesh(device.type, (self.size,)))

    def _sharded(self, wrapped: nn.Module) -> "list[FSDPModule]":
        if self.parallel != "fsdp":
            return []
        from torch.distributed.fsdp import FSDPModule

        return [module for module in wrapped.modules() if isinstance(module, FSDPModule)]

    def mean(self, x: Tensor) -> Tensor:
        """The mean over processes, without gradients."""
        if self.size == 1:
            return x
        x = x.detach() / self.size
        dist.all_reduce(x)
        return x

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag: whether it is true in any process."""
        if self.size == 1:
            return flags
        flag_F = torch.tensor(flags, dtype=torch.int32)  # on the host: the device's queue is not waited for
        dist.all_reduce(flag_F)
        return tuple(bool(flag) for flag in flag_F.tolist())

    def broadcast_from_leader(self, number: int) -> int:
        """The leader's number in every process, however long the leader takes to come here."""
        if self.size == 1:
            return number
        number_1 = torch.tensor([number])
        dist.broadcast(number_1, src=0, group=self._patient)
        return int(number_1.item())

    @contextmanager
    def gathered(self, wrapped: nn.Module) -> Generator[None]:
        """While it is open, the model inside a module from `wrap` holds whole weights in every process."""
        sharded = self._sharded(wrapped)
        for module in sharded:
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()

    @torch.no_grad()
    def collect(self, trained: Decoder, model: Decoder) -> None:
        """Bring the weights of a model from `spread` home to the one that it was made from."""
        _average_with(ALONE.mean, model)
        if trained is not model:
            for own, other in zip(model.parameters(), trained.parameters(), strict=True):
                own.copy_(whole(other))

    def wait_for_leader(self) -> None:
        """Wait until the leader comes here too, however long that takes."""
        if self._patient is not None:
            dist.barrier(group=self._patient)


ALONE = Devices()


def _average_with(mean: Callable[[Tensor], Tensor], model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.mean_over_devices = mean


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every process must ask."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """This process's part of a whole tensor, laid out as `other` is; no exchange, since every process has the whole."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    tensor = tensor.to(other.device)
    if isinstance(other, DTensor) and tensor.shape == other.shape:
        return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
    return tensor


def world() -> tuple[int, int]:
    """The rank of this process and the number of processes, as torchrun says; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_world(parallel: Parallel) -> None:
    """Raises ValueError where `parallel` and the way in which this process was started do not fit."""
    under_torchrun = "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ
    size = world()[1]
    if parallel != "none" and not under_torchrun:
        raise ValueError(
            f"parallel={parallel!r} needs one process for each device, and torchrun to start them: "
            f"torchrun --nproc-per-node 2 -m sparsedepth.cli.main ..."
        )
    if parallel == "none" and size > 1:
        raise ValueError(
            f"parallel='none', but this is one of {size} processes: start it without torchrun, or set parallel to "
            f"ddp (the model fits on each device) or fsdp"
        )


@contextmanager
def joined(wanted: RuntimeConfig) -> Generator[Devices]:
    """The processes of this run, connected while it is open. Raises LostError where one of the others is lost."""
    check_world(wanted.parallel)
    if wanted.parallel == "none":
        yield ALONE
        return
    rank, size = world()
    backend = "gloo"
    if wanted.device != "cpu" and torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Devices(wanted.parallel, rank, size)
        dist.barrier()  # who leaves early takes the connection from those that still use it
    except RuntimeError as error:
        if not _is_loss(error):
            raise
        raise LostError(
            f"process {rank} of {size} lost another process of this run, which ended or hangs (its own message says "
            f"why); the same command continues from the last checkpoint"
        ) from error
    finally:
        dist.destroy_process_group()


def _is_loss(error: RuntimeError) -> bool:
    """Whether an exchange failed: gloo raises plain RuntimeErrors and says so in the text."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "closed by peer"))
