"""Train several runs step by step together: one pass of a stacked model (`model.linear`) computes
all gradients, and one graph of it the whole step.

The models of S runs of one shape are one model, whose passes launch as many kernels as those of one
run: kernel launches dominate the time of a small decoder. Each run's parameters are views of the
stack's, so its optimizer, checkpoints, observations and measures work unchanged (`loop.training`):
it yields before each step, which is taken here, compiled and captured as alone. The others
continue without a run that has ended, diverged or failed. When memory runs out the stack is halved.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparsedepth.config.role import can_stack
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.cuda_graph import CapturedUpdate
from sparsedepth.train.feed import Part
from sparsedepth.train.loop import Result, TrainingState, Work, losses
from sparsedepth.train.optimizer import CombinedOptimizer, learning_rate, set_learning_rate
from sparsedepth.train.runtime import compile_blocks, is_out_of_memory


class StackedDecoder(nn.Module):
    """One model of several runs with different weights, for which `can_stack` holds."""

    def __init__(self, runs: Sequence[Decoder]):
        super().__init__()
        scaled = [run for run in runs if run.config.depth_scale != "none"]
        with torch.device("meta"):
            self.decoder = Decoder((scaled or runs)[0].config)
        self.own_parameters = [dict(run.named_parameters()) for run in runs]
        for name, meta in dict(self.decoder.named_parameters()).items():
            own = [parameters[name] for parameters in self.own_parameters]
            stacked = nn.Parameter(torch.stack([parameter.detach() for parameter in own]))
            _replace(self.decoder, meta, stacked)
            for parameter, view in zip(own, stacked.detach().unbind(), strict=True):
                parameter.data = view
        for block, *own in zip(self.decoder.blocks, *(run.blocks for run in runs), strict=True):
            factors = [part.depth_factor if run in scaled else torch.ones_like(part.depth_factor)
                       for run, part in zip(runs, own, strict=True)]  # fmt: skip
            block.depth_factor = torch.stack(factors)[:, None]
        for module, own in zip(self.decoder.modules(), runs[0].modules(), strict=True):
            for name, buffer in own.named_buffers(recurse=False):
                if getattr(module, name).is_meta:  # the same in all runs
                    setattr(module, name, buffer)

    def hand_out_gradients(self) -> None:
        """Move the gradients of the stack to the runs' parameters."""
        for name, stacked in self.decoder.named_parameters():
            assert stacked.grad is not None
            for parameters, grad in zip(self.own_parameters, stacked.grad.unbind(), strict=True):
                parameters[name].grad = grad
            stacked.grad = None


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter everywhere in the module; a tied one occurs twice."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(part, name, new)


class Clock:
    """Seconds of one run in a process of several: while open, and its share of a stack's time."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._opened = None

    def __call__(self) -> float:
        return self._seconds + (0.0 if self._opened is None else time.perf_counter() - self._opened)

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def __enter__(self) -> None:
        self._opened = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds = self()
        self._opened = None


def train_together(
    runs: Sequence[Work[Result]], clocks: Sequence[Clock], size: int | str = "auto"
) -> list[Result | Exception]:
    """Run every generator to its end, at most `size` (auto: all) as one model; returns each one's return value or
    exception."""
    results = {}
    stacks = _Stacks(size if isinstance(size, int) else len(runs))
    with contextlib.ExitStack() as cleanup:
        for run in runs:
            cleanup.enter_context(contextlib.closing(run))
        while len(results) < len(runs):
            states = {}
            for number, run in enumerate(runs):
                if number not in results:
                    with clocks[number]:
                        try:
                            state = next(run)
                        except StopIteration as end:
                            results[number] = end.value
                        except Exception as error:
                            results[number] = error
                        else:
                            states |= {number: state} if state else {}
            stacks.take_steps(list(states.values()), [clocks[number] for number in states])
    return [results[number] for number in range(len(runs))]


class StackedStep:
    """The step of several runs as one: a forward and backward pass of the stacked model, then clipping and the
    optimizer's step of each run; captured as one CUDA graph where the steps of all may be."""

    def __init__(self, runs: Sequence[TrainingState]):
        assert can_stack(*(run.config for run in runs))
        self.runs = runs
        self.model = StackedDecoder([run.model for run in runs])
        runtime = runs[0].runtime
        self.model.decoder.use_kernels(**runtime.kernels)
        if runtime.compile:
            compile_blocks(self.model.decoder)
        self.captured: CapturedUpdate | None = None
        if all(run.runtime.cuda_graph for run in runs):
            self.captured = runs[0].capture(CombinedOptimizer(*(run.optimizer for run in runs)))
        for run in runs:  # whose weights have moved
            run.captured = run.captured and run.capture(run.optimizer)
        self.is_applying = False

    def take(self) -> None:
        """Take the next step of each run, on its own batch."""
        for run in self.runs:
            set_learning_rate(run.optimizer, learning_rate(run.config, run.step))
        n_sequences = min((size for run in self.runs if (size := run.runtime.micro_batch)), default=None)
        each = zip(*(run.batch.parts(n_sequences) for run in self.runs), strict=True)
        parts = [part for of_runs in each for part in of_runs]
        is_replay = False
        if self.captured and not any(run.is_gradient_norm_due for run in self.runs):
            rows_S3, is_replay = self.captured(self.update, parts)
        else:
            rows_S3 = self.update(parts)
        for run, row in zip(self.runs, rows_S3, strict=True):
            run.taken = row
            run.captured_steps += is_replay
            run.n_stacked = max(run.n_stacked, len(self.runs))

    def update(self, parts: Sequence[Part]) -> Tensor:
        """(loss, balance, gradient norm) of each run, on the device, after its step on the parts, in which runs take
        turns. The gradient of the sum of the losses is each run's own: no run's loss depends on another's weights.
        What acts in the loss is equal in all (`unstackable`), so the first run's configuration holds for it."""
        n_runs = len(self.runs)
        reported = []
        for start in range(0, len(parts), n_runs):
            inputs, targets, weights = zip(*parts[start : start + n_runs], strict=True)
            with self.runs[0].runtime.autocast:
                found = losses(self.model.decoder, torch.cat(inputs), torch.cat(targets), self.runs[0].config)
            rows_S3 = torch.stack([row * weight for row, weight in zip(torch.stack(found, 1), weights, strict=True)])
            rows_S3[:, 0].sum().backward()
            reported.append(rows_S3.detach()[:, 1:])
        self.model.hand_out_gradients()
        self.is_applying = True
        rows = [run.apply(*row) for run, row in zip(self.runs, torch.stack(reported).sum(0), strict=True)]
        self.is_applying = False
        return torch.stack(rows)


class _Stacks:
    """The stacked models of the active runs, each of at most `size` runs."""

    def __init__(self, size: int):
        self.size = size
        self._stacks: dict[tuple[TrainingState, ...], StackedStep] = {}

    def take_steps(self, runs: list[TrainingState], clocks: list[Clock]) -> None:
        """Take the next step of all runs; a single remaining run takes its own."""
        starts = range(0, len(runs), self.size)
        groups = {tuple(runs[start : start + self.size]): clocks[start : start + self.size] for start in starts}
        self._stacks = {group: stack for group, stack in self._stacks.items() if group in groups}  # before new ones
        try:
            for group, own_clocks in groups.items():
                if len(group) == 1:
                    continue
                began = time.perf_counter()
                if group not in self._stacks:
                    self._stacks[group] = StackedStep(group)
                self._stacks[group].take()
                is_logged = any((run.step + 1) % run.config.log_every == 0 for run in group)
                if is_logged and group[0].runtime.device.type == "cuda":
                    torch.cuda.synchronize()  # else the first run that reads its loss is charged for all
                for clock in own_clocks:
                    clock.add((time.perf_counter() - began) / len(group))
            return
        except (MemoryError, RuntimeError) as error:
            # Where some weights have changed, no step can be repeated: the process ends, and each run goes on alone.
            if not is_out_of_memory(error) or any(stack.is_applying for stack in self._stacks.values()):
                raise
        self.size //= 2
        self._stacks.clear()
        gc.collect()
        logging.warning("out of memory; training %d runs at a time", self.size)
        left = [number for number, run in enumerate(runs) if run.taken is None]
        self.take_steps([runs[number] for number in left], [clocks[number] for number in left])
