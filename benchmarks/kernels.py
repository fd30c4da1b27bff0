"""Compare the kernels of attention and of the experts on this device.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --quick --threads 1

One forward and backward pass of one layer's attention or experts, in bf16 on a GPU and fp32 elsewhere. The kernels
take turns in each repeat, in alternating order. A ratio is of times of one repeat: tokens per second relative to the
first kernel. A kernel that cannot run is listed with the reason. Results are compared before timing.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparsedepth.model import attention, moe_kernels
from sparsedepth.model.context import Context
from sparsedepth.model.kernels import OBSTACLES, KernelFacts, Part
from sparsedepth.train.runtime import find_device

ORDER: dict[Part, tuple[str, ...]] = {
    "attention": ("sdpa", "reference", "flash"),
    "experts": ("loop", "grouped", "megablocks"),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

Pass = Callable[[], list[Tensor]]
"""One forward and backward pass: the output, then the gradients."""


def attention_pass(
    here: KernelFacts, options: argparse.Namespace, window: int | None, packed: bool, kernel: str
) -> Pass:
    generator = torch.Generator().manual_seed(0)
    heads = (options.heads, options.kv_heads, options.kv_heads)
    shapes = [(options.sequences, n, options.length, here.d_head) for n in heads]
    qkv = [torch.randn(s, generator=generator).to(here.device, here.dtype).requires_grad_() for s in shapes]
    document_BT = None
    if packed:  # four documents in each sequence
        quarter_T = torch.arange(options.length, device=here.device) * 4 // options.length
        document_BT = quarter_T.expand(options.sequences, -1).contiguous()

    def run() -> list[Tensor]:
        torch.backends.cuda.enable_cudnn_sdp(window is None and document_BT is None)  # as training does
        out = attention.KERNELS[kernel](*qkv, context=Context(window=window, document_BT=document_BT))
        return [out, *torch.autograd.grad(out.float().square().mean(), qkv)]

    return run


def experts_pass(here: KernelFacts, options: argparse.Namespace, n_experts: int, top_k: int, kernel: str) -> Pass:
    generator = torch.Generator().manual_seed(0)
    n_tokens = options.sequences * options.length
    sizes = [(n_tokens, here.d_model), (n_experts, 2 * here.d_expert, here.d_model)]
    sizes.append((n_experts, here.d_model, here.d_expert))
    leaves = [torch.randn(s, generator=generator).to(here.device).requires_grad_() for s in sizes]
    x_ND, gate_up, down = leaves
    gate_NC, choice_NC = torch.rand(n_tokens, n_experts, generator=generator).to(here.device).topk(top_k)

    def run() -> list[Tensor]:
        with torch.autocast(here.device.type, dtype=torch.bfloat16, enabled=here.dtype == torch.bfloat16):
            out = moe_kernels.KERNELS[kernel](x_ND, gate_NC, choice_NC, gate_up, down)
        return [out, *torch.autograd.grad(out.float().square().mean(), leaves)]

    return run


def seconds(run: Pass, here: KernelFacts, calls: int) -> float:
    """Seconds of one call, over several calls without waiting in between."""
    began = time.perf_counter()
    for _ in range(calls):
        run()
    if here.device.type == "cuda":
        torch.cuda.synchronize(here.device)
    return (time.perf_counter() - began) / calls


def compare(part: Part, case: str, make: Callable[[str], Pass], here: KernelFacts, options: argparse.Namespace) -> None:
    reasons = {kernel: OBSTACLES[part][kernel](here) for kernel in ORDER[part]}
    runs = {kernel: make(kernel) for kernel, obstacle in reasons.items() if obstacle is None}
    first, expected = next(iter(runs)), None
    for kernel, run in runs.items():  # the first call includes setup
        found = run()
        expected = expected or found
        for ours, theirs in zip(found, expected, strict=True):
            off = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
            if not off <= TOLERANCE[here.dtype]:
                raise SystemExit(f"{part}, {case}: {kernel} differs from {first} by {off:.1e} of the largest entry")
    times: dict[str, list[float]] = {kernel: [] for kernel in runs}
    for repeat in range(options.repeats):
        for kernel in list(runs)[:: (-1) ** repeat]:
            times[kernel].append(seconds(runs[kernel], here, options.calls))
    n_tokens = options.sequences * options.length
    for kernel in ORDER[part]:
        if obstacle := reasons[kernel]:
            print(f"{part:10} {case:22} {kernel:11} cannot run: {obstacle.reason}", flush=True)
            continue
        ratio = [theirs / ours for ours, theirs in zip(times[kernel], times[first], strict=True)]
        rate = n_tokens / statistics.median(times[kernel])
        print(
            f"{part:10} {case:22} {kernel:11} {rate:13,.0f} {statistics.median(ratio):8.2f}"
            f" {f'{min(ratio):.2f} .. {max(ratio):.2f}':>16}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"sequences": 8, "length": 1024, "width": 512, "heads": 8, "kv_heads": 2, "d_expert": 384}
    for name, default in {**sizes, "repeats": 5, "calls": 3, "threads": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="2 sequences of 256 tokens, width 128")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(sequences=2, length=256, width=128, heads=4, d_expert=96, repeats=3)
    torch.set_num_threads(options.threads)
    device = find_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    sizes = {"d_head": options.width // options.heads, "d_model": options.width, "d_expert": options.d_expert}
    here = KernelFacts(device=device, dtype=dtype, **sizes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"{name}, {dtype}, {options.sequences} x {options.length} tokens, forward and backward\n")
    print(f"{'part':10} {'case':22} {'kernel':11} {'tokens/s':>13} {'ratio':>8} {'spread':>16}")
    quarter = options.length // 4
    cases = {"causal": (None, False), f"window {quarter}": (quarter, False), "4 documents": (None, True)}
    for case, (window, packed) in cases.items():
        make = partial(attention_pass, here, options, window, packed)
        compare("attention", case, make, here, options)
    for n_experts, top_k in ((8, 2), (32, 4)):
        make = partial(experts_pass, here, options, n_experts, top_k)
        compare("experts", f"{n_experts} experts, top {top_k}", make, here, options)


if __name__ == "__main__":
    main()
