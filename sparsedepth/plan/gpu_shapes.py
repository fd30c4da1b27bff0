"""Warn of matrix sizes that are slow on a GPU, and suggest the nearest fast ones.

Tensor cores use tiles of 64: a matrix size that is not a multiple wastes part of a tile, and an odd size also loses
aligned loads. Attention kernels are built for heads of width 64 or 128. From NVIDIA's matrix multiplication guide; not
timed here.
"""

from collections.abc import Iterable

from sparsedepth.config.run import RunConfig

TILE = 64
MIN_WIDTH = 256
"""Narrower models are limited by kernel launches, not by matrix sizes."""


def slow_shapes(runs: Iterable[RunConfig]) -> list[str]:
    """A line for each slow size, without repeats."""
    return list(dict.fromkeys(line for run in runs if run.d_model >= MIN_WIDTH for line in _warnings(run)))


def _warnings(run: RunConfig) -> Iterable[str]:
    widths = {"d_model": run.d_model, "d_ff": run.d_ff} if not run.n_experts else {"d_expert": run.d_expert}
    for name, size in widths.items():
        if size and size % TILE:
            lower = size // TILE * TILE
            examples = f"{lower} or {lower + TILE}" if lower else TILE
            yield f"{name}={size} is slow on a GPU: use a multiple of {TILE}, such as {examples}"
    d_head = run.d_model // run.n_heads
    if d_head < TILE and run.d_model % TILE == 0:
        yield f"n_heads={run.n_heads} gives heads of width {d_head}, slow on a GPU: use n_heads={run.d_model // TILE}"
