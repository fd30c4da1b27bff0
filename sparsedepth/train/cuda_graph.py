"""A whole training step as one CUDA graph: captured once, then replayed by one launch instead of
thousands.

A captured step, of one run or of a stack (`train.stack`), reads its batch, the weights of its
micro-batches and the learning rate from fixed memory, which is written before each replay. Parameters
and moments change in place; gradients exist only inside the graph. The first WARM_UP steps run
uncaptured on the capture stream, where kernels are chosen and moments allocated; they are normal
training steps.

Numbers equal those of an uncaptured step, dropout included (a replay reads the generator's state
anew). Where the host has changed a number that the graph holds, such as a weight decay, the step is
taken uncaptured. Deviates: on CUDA fused AdamW reads the learning rate from memory in fp32, a relative
rounding of at most 6e-8. See docs/kernels-and-installation.md."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import Parallel, graph_obstacle
from sparsedepth.train.feed import Part
from sparsedepth.train.optimizer import AnyOptimizer

Step = Callable[[], Tensor]
"""Takes a training step; returns its losses and gradient norms, on the device."""

WARM_UP = 3
"""as in PyTorch's own capturing functions"""


def obstacle(
    config: RunConfig, device: torch.device, parallel: Parallel, attention_kernel: str, experts_kernel: str
) -> str | None:
    """Why the steps of a run cannot be captured, or None."""
    if known := graph_obstacle(config, device.type, parallel):
        return known
    if attention_kernel == "flash" and config.mask_documents:
        return "attention_kernel=flash waits for the number of documents in a batch"
    if config.n_experts and experts_kernel != "grouped":
        return f"experts_kernel={experts_kernel} waits for the number of tokens of each expert, or may"
    if config.n_experts and torch.cuda.get_device_capability(device) < (9, 0):
        return "experts_kernel=grouped waits for the number of tokens of each expert on GPUs before Hopper"
    return None


class CudaCapture:
    """A step as a graph, by `torch.cuda.CUDAGraph`; tests have a stand-in."""

    lr_dtype = torch.float32
    """of the learning rates in memory"""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def warm_up(self, step: Step) -> Tensor:
        """Take the step on the capture stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            row = step()
        current.wait_stream(self.stream)
        return row

    def capture(self, step: Step) -> Step:
        """The function that replays the step, which is not taken here. Raises RuntimeError with the
        cause of a failed capture, such as an allocation."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        try:
            # Thread-local: meanwhile the feed pins the next batch, and a checkpoint may be written.
            # The outer context restores the stream if ending the capture fails.
            with torch.cuda.stream(current), torch.cuda.graph(graph, None, self.stream, "thread_local"):
                row = step()
        except RuntimeError as error:
            cause = error.__context__ or error  # the error at the end of a broken capture hides the cause
            raise RuntimeError(
                f"cannot capture the training step as a CUDA graph; set --runtime cuda_graph=false: {cause}"
            ) from cause

        def replay() -> Tensor:
            graph.replay()
            return row.clone()  # the next replay overwrites it

        return replay


class CapturedUpdate:
    """A weight update: uncaptured at first, then captured and replayed."""

    def __init__(self, optimizer: AnyOptimizer, capture: CudaCapture):
        self.optimizer = optimizer
        self.capture = capture
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        """the fixed memory of inputs, targets and weight of each micro-batch"""
        self.replay: Step | None = None
        self.held: list[object] = []
        """what the graph holds of the host, from when it was captured"""
        self.n_warm = 0

    def __call__(self, update: Callable[[Sequence[Part]], Tensor], parts: list[Part]) -> tuple[Tensor, bool]:
        """`update(parts)`, the step's losses and gradient norms on the device; and whether a replay made them."""
        groups = self.optimizer.param_groups
        if not self.parts:
            for inputs, targets, _ in parts:
                weight = torch.empty((), device=inputs.device)
                self.parts.append((torch.empty_like(inputs), torch.empty_like(targets), weight))
            for group in groups:
                group["lr"] = torch.tensor(float(group["lr"]), dtype=self.capture.lr_dtype, device=parts[0][0].device)
        if [part[0].shape for part in self.parts] != [part[0].shape for part in parts]:
            return update(parts), False
        for (inputs, targets, weight), (*given, given_weight) in zip(self.parts, parts, strict=True):
            inputs.copy_(given[0])
            targets.copy_(given[1])
            weight.fill_(given_weight)  # an argument of the kernel, so the host does not wait
        if self.replay is None and self.n_warm < WARM_UP:
            self.n_warm += 1
            return self.capture.warm_up(lambda: update(self.parts)), False
        if self.replay is None:
            for group in groups:
                group["capturable"] = True  # needed while capturing, a warning elsewhere
            self.replay = self.capture.capture(lambda: update(self.parts))
            for group in groups:
                group["capturable"] = False
            self.held = self._host_state()
        if self.held != self._host_state():
            return update(parts), False
        return self.replay(), True

    def _host_state(self) -> list[object]:
        """The optimizer's numbers, and where the weights lie. Learning rates are in memory, as tensors."""
        return [
            [parameter.data_ptr() for parameter in value] if name == "params" else value
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if not isinstance(value, Tensor)
        ]
