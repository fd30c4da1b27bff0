"""Facts about a machine with a GPU that decide what to mend first; the file is rewritten after each.

    python benchmarks/gpu/facts.py OUT.json [--device cpu]

machine        versions and sizes
fork           the forkserver's imports initialise no CUDA, and a fork of it can use the GPU
attention      which of PyTorch's kernels runs, and the largest error against the reference over its largest value
empty_experts  gradients of experts without tokens, where freed memory is full of NaN
waits          where the host waits for the device in the third training step
rates          matrix products, copies, launches; the head of 32,000 tokens
algebra        seconds of what measures do in fp64, by width
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.model import attention as attention_kernels, moe_kernels
from sparsedepth.model.context import Context
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.head import cross_entropy
from sparsedepth.train.devices import ALONE
from sparsedepth.train.feed import Batch
from sparsedepth.train.loop import TrainingState
from sparsedepth.train.runtime import resolve

Facts = dict[str, Any]

PACKAGES = ("torch", "triton", "transformers", "numpy", "pandas", "pyarrow", "scipy", "pydantic", "duckdb", "optuna")
BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""torch.nn.attention.SDPBackend's numbers"""

FORK = """
import ctypes, os, time
began = time.time()
import sparsedepth.sweep.preload
import torch
count = ctypes.c_int()
try:
    code = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    print("cuDeviceGetCount", code, "(3: not initialised, as it must be)")
except OSError as error:
    print(error)
print("imports", round(time.time() - began, 1), "threads", len(os.listdir("/proc/self/task")))
pid = os.fork()
if pid == 0:
    began = time.time()
    x = torch.ones(64, 64, device="DEVICE")
    print("child", (x @ x).sum().item(), round(time.time() - began, 1), flush=True)
    os._exit(0)
print("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Of one call: the median of five repeats, after one that is not counted."""
    each = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        each.append((time.perf_counter() - began) / calls)
    return sorted(each[1:])[2]


def machine(device: torch.device) -> Facts:
    facts: Facts = {"python": sys.version.split()[0], "cores": os.cpu_count()}
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gib": round(properties.total_memory / 2**30, 1)}
        facts |= {"cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda}
    return facts


def fork(device: torch.device) -> list[str]:
    code = FORK.replace("DEVICE", str(device))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr[-300:]).splitlines()


def attention(device: torch.device) -> Facts:
    facts: Facts = {}
    for n_heads, n_kv_heads, width, n_tokens in ((4, 4, 64, 256), (4, 1, 64, 256), (4, 4, 16, 64), (4, 1, 128, 192)):
        torch.manual_seed(0)
        drawn = [
            torch.randn(2, n_tokens, n, width, device=device, dtype=torch.bfloat16).transpose(1, 2)
            for n in (n_heads, n_kv_heads, n_kv_heads)
        ]
        leaves = q, k, v = [x.detach().requires_grad_() for x in drawn]
        row: Facts = {}
        if device.type == "cuda":
            is_grouped = n_heads != n_kv_heads
            row["backend"] = BACKENDS.get(torch._fused_sdp_choice(*leaves, None, 0.0, True, enable_gqa=is_grouped))
        weight_BHTK, results = torch.randn(2, n_heads, n_tokens, width, device=device), []
        for name in ("sdpa", "reference"):
            out_BHTK = attention_kernels.KERNELS[name](q, k, v, Context())
            loss = (out_BHTK.float() * weight_BHTK).sum()
            results.append([out_BHTK.detach(), *torch.autograd.grad(loss, leaves)])
        errors = [(a.float() - b.float()).abs().max() / b.float().abs().max() for a, b in zip(*results, strict=True)]
        row["error"] = round(float(max(errors)), 6)
        facts[f"{n_heads} heads, {n_kv_heads} kv, width {width}, {n_tokens} tokens"] = row
    return facts


def empty_experts(device: torch.device) -> Facts:
    torch.manual_seed(0)
    shapes = ((512, 256), (8, 256, 256), (8, 256, 128))
    x_ND, gate_up_E2FD, down_EDF = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    choice_NC, gate_NC = torch.randint(0, 3, (512, 2), device=device) * 2, torch.rand(512, 2, device=device)
    freed = [torch.full((8, 256, 256), float("nan"), device=device, dtype=torch.bfloat16) for _ in range(8)]
    del freed
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out_ND = moe_kernels.KERNELS["grouped"](x_ND, gate_NC, choice_NC, gate_up_E2FD, down_EDF)
    grads = torch.autograd.grad(out_ND.square().mean(), (x_ND, gate_up_E2FD, down_EDF))
    unused = grads[1][[1, 3, 5, 6, 7]]
    return {"finite": all(bool(g.isfinite().all()) for g in grads), "unused are 0": bool((unused == 0).all())}


SETTINGS: dict[str, Facts] = {
    "dense": {},
    "experts": {"n_experts": 4, "top_k": 2, "d_expert": 64},
    "documents": {"mask_documents": True, "eod": 0},
    "muon": {"optimizer": "muon"},
    "dropout": {"residual_dropout": 0.1},
    "fp32": {"precision": "fp32"},
}


def waits(device: torch.device) -> Facts:
    shape = {"n_layers": 2, "d_model": 64, "n_heads": 2, "seq_len": 64, "batch_tokens": 512, "train_tokens": 5120}
    facts: Facts = {}
    for name, fields in SETTINGS.items():
        fixed = {"vocab_size": 64, "fit_tokens": 1024, "observe_every": 1000}
        config = build(RunConfig, {**shape, **fixed, **fields}, name)
        runtime = resolve(config, RuntimeConfig(device=str(device)))
        model = ALONE.place_model(Decoder(config), runtime.device).train()
        model.use_kernels(**runtime.kernels)
        state = TrainingState(model, config, runtime, ALONE)
        tokens = np.random.default_rng(0).integers(64, size=(8, 65))
        batch = Batch.of(next_tokens(tokens)).to(runtime.device)
        for _ in range(2):
            state.take_step(batch)
        facts[name] = places_that_wait(partial(state.take_step, batch), device)
    return facts


def places_that_wait(run: Callable[[], object], device: torch.device) -> list[str]:
    places: set[str] = set()

    def note(message: Warning | str, *_: object) -> None:
        if "synchroniz" in str(message):
            stack = traceback.extract_stack()[:-1]
            own = [frame for frame in stack if "/sparsedepth/" in frame.filename] or stack
            places.add(f"{Path(own[-1].filename).name}:{own[-1].lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # ty: ignore[invalid-assignment]
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return sorted(places)


def rates(device: torch.device) -> Facts:
    on_gpu = device.type == "cuda"
    n = 8192 if on_gpu else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * n**3 / seconds(lambda: a @ b, device, 5)
    x = torch.randn(2**28 if on_gpu else 2**20, device=device)
    y, small = torch.empty_like(x), torch.ones(16, device=device)
    facts = {"bf16 TFLOP/s": round(flops / 1e12, 3)}
    facts["copy TB/s"] = round(8 * x.numel() / seconds(lambda: y.copy_(x), device, 3) / 1e12, 3)
    facts["launch us"] = round(1e6 * seconds(lambda: small.add_(1), device, 200), 2)
    n, width, vocabulary = (32768, 1024, 32000) if on_gpu else (64, 16, 64)
    h_ND, weight_VD = (torch.randn(rows, width, device=device, requires_grad=True) for rows in (n, vocabulary))
    target_N = torch.randint(vocabulary, (n,), device=device)

    def head() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss, _ = cross_entropy(h_ND, weight_VD, target_N)
        torch.autograd.grad(loss, (h_ND, weight_VD))

    facts["head ms"] = round(1e3 * seconds(head, device, 3), 1)
    facts["its products at the rate above ms"] = round(6e3 * n * width * vocabulary / flops, 1)
    return facts


def algebra(device: torch.device) -> Facts:
    facts: Facts = {}
    for width in (512, 1024, 2048) if device.type == "cuda" else (32,):
        x_ND = torch.randn(4 * width, width, device=device, dtype=torch.float64)
        x_ND[:, width // 4 :] = 0  # like embeddings of few tokens: rank width / 4
        low, square = x_ND.T @ x_ND, torch.randn(width, width, device=device, dtype=torch.float64)
        full = square @ square.T
        calls: dict[str, Callable[[], object]] = {
            "pinv, rank D/4": partial(torch.linalg.pinv, low, hermitian=True),
            "pinv": partial(torch.linalg.pinv, full, hermitian=True),
            "eigvalsh": partial(torch.linalg.eigvalsh, full),
        }
        if width <= 1024:
            matrix = torch.randn(width, 8 * width // 3, device=device, dtype=torch.float64)
            calls["svdvals, D x 8/3 D"] = partial(torch.linalg.svdvals, matrix)
        facts |= {f"{name}, D {width}": round(seconds(run, device), 4) for name, run in calls.items()}
    return facts


FACTS = (machine, fork, attention, empty_experts, waits, rates, algebra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", type=torch.device)
    given = parser.parse_args()
    found: Facts = {}
    failed = False
    for fact in FACTS:
        try:
            found[fact.__name__] = fact(given.device)
        except Exception as error:  # the others still run
            traceback.print_exc(limit=4)
            found[fact.__name__], failed = f"{type(error).__name__}: {str(error)[:300]}", True
        print(f"{fact.__name__}: {json.dumps(found[fact.__name__])}", flush=True)
        given.out.write_text(json.dumps(found, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
