"""Sizes that a GPU multiplies slowly, with the nearest good ones: a warning of `plan`.

Tensor cores take tiles of 64: a product whose size is no multiple wastes the rest, and an odd one loses the aligned
loads too. Attention's kernels are made for heads 64 or 128 wide. From NVIDIA's guide to products; not timed here.
"""

from collections.abc import Iterable

from sparsedepth.config.run import RunConfig

TILE = 64
WIDE = 256
"""Models narrower than this wait for launches, whatever their sizes."""


def slow_shapes(runs: Iterable[RunConfig]) -> list[str]:
    """A line for each size that some of the runs would be faster without; each said once."""
    return list(dict.fromkeys(line for run in runs if run.d_model >= WIDE for line in _slow(run)))


def _slow(run: RunConfig) -> Iterable[str]:
    widths = {"d_model": run.d_model, "d_ff": run.d_ff} if not run.n_experts else {"d_expert": run.d_expert}
    for name, size in widths.items():
        if size and size % TILE:
            near = size // TILE * TILE
            such = f"{near} or {near + TILE}" if near else TILE
            yield f"{name}={size} is slow on a GPU: use a multiple of {TILE}, such as {such}"
    d_head = run.d_model // run.n_heads
    if d_head < TILE and run.d_model % TILE == 0:
        yield f"n_heads={run.n_heads} gives heads {d_head} wide, slow on a GPU: use n_heads={run.d_model // TILE}"
