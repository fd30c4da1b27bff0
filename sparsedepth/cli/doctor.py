"""`sparsedepth doctor`: check the installation: packages, devices, and which kernels run and which 'auto' chooses.

Each kernel runs one forward and backward pass on a tiny input. Nothing is downloaded, and no environment variables are
printed."""

import functools
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from typer import Exit

from sparsedepth import __version__
from sparsedepth.cli.option import TableOrJson
from sparsedepth.words.doctor import doctor_text
from sparsedepth.words.plain_text import counted, error_text

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from sparsedepth.model.kernels import KernelFacts, Part

IMPORTED = ("torch", "transformers", "datasets", "optuna", "duckdb", "pyarrow")
"""Packages that are imported as a check; of the others only the version is checked."""

_REINSTALL = "pip install --force-reinstall --no-deps"

State = Literal["ok", "missing", "broken", "cannot run"]


@dataclass(frozen=True)
class Finding:
    group: Literal["system", "package", "optional", "attention", "experts"]
    name: str
    fact: str = ""
    """Version, size, or the reason why it does not work."""
    state: State = "ok"
    fix: str = ""
    """Command or setting that fixes it."""
    chosen: bool = False
    """Whether 'auto' chooses this kernel."""
    needed: bool = False
    """Whether sparsedepth does not run without it."""


def doctor(format: TableOrJson = "table") -> None:
    """Check the installation: packages, devices, and which kernels run and which 'auto' chooses. Exit code 1 if a
    required part does not work."""
    findings = list(examine())
    healthy = not any(finding.needed and finding.state != "ok" for finding in findings)
    as_json = {"ok": healthy, "findings": [asdict(finding) for finding in findings]}
    print(json.dumps(as_json, indent=2) if format == "json" else doctor_text(findings, healthy))
    raise Exit(0 if healthy else 1)


def examine() -> Iterator[Finding]:
    """All findings, in the order of the printed report."""
    yield Finding("system", "sparsedepth", __version__)
    yield Finding("system", "python", platform.python_version())
    yield from _machine()
    packages = list(_packages())
    yield from packages
    torch_works = all(finding.state == "ok" for finding in packages if finding.name == "torch")
    yield from _optional(torch_works)
    if torch_works:
        yield from _devices()
        yield from _kernels()


def _machine() -> Iterator[Finding]:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    yield Finding("system", "cpu", f"{os.cpu_count()} cores, {usable} usable by this process")
    free = shutil.disk_usage(".").free
    yield Finding("system", "free disk", f"{free / 2**30:.1f} GiB in the current folder")
    try:
        git = subprocess.run(["git", "--version"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        yield Finding("optional", "git", "run manifests will not record the commit", state="missing")
    else:
        yield Finding("optional", "git", git.strip().removeprefix("git version "))


def _packages() -> Iterator[Finding]:
    """What the installed package declares to need, in the version that it needs."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("sparsedepth") or []
    except importlib.metadata.PackageNotFoundError:
        fix = "pip install -e . (in the checkout)"
        yield Finding("package", "sparsedepth", "not installed", state="missing", fix=fix, needed=True)
        return
    for text in declared:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name, versions = requirement.name, requirement.specifier
            load = functools.partial(importlib.import_module, name) if name in IMPORTED else None
            fix, rebuild = f"pip install '{name}{versions}'", f"{_REINSTALL} '{name}==VERSION'"
            yield _package(name, "not installed", fix, load, rebuild, versions)


def _optional(torch_works: bool) -> Iterator[Finding]:
    """What commands need beside the core: what each is for, and how it is installed."""
    yield _package("lm-eval", "for evaluate", "pip install 'lm-eval>=0.4.13'")
    yield _package("psycopg", "for sweeps on several machines", "pip install 'psycopg[binary]'")
    yield _package("triton", "for torch.compile on a GPU, and megablocks", "pip install triton")
    if torch_works:
        from sparsedepth.model import attention, kernels, moe_kernels

        flash, blocks = kernels.INSTALL_FLASH, kernels.INSTALL_MEGABLOCKS
        yield _package("flash-attn", "for attention", flash, attention.load_flash, kernels.REBUILD_FLASH)
        yield _package("stanford-stk", "for megablocks", blocks)
        yield _package("megablocks", "for experts", blocks, moe_kernels.load_megablocks)


def _package(
    name: str,
    if_missing: str,
    fix: str,
    load: Callable[[], object] | None = None,
    rebuild: str = "",
    versions: "SpecifierSet | None" = None,
) -> Finding:
    """Whether a package is there and loads; with `versions` it is a required one, and must be one of them."""
    is_required = versions is not None
    finding = Finding("package" if is_required else "optional", name, fix=fix, needed=is_required)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return replace(finding, state="missing", fact=if_missing)
    if versions is not None and not versions.contains(version, prereleases=True):
        return replace(finding, state="broken", fact=f"{version}; {versions} is required")
    try:
        if load:
            load()
    except Exception as error:  # a broken package, or a build for another torch, may raise anything
        fact = f"{version} does not load: {error_text(error)}"
        return replace(finding, state="broken", fact=fact, fix=rebuild.replace("VERSION", version) or fix)
    return replace(finding, fact=version, fix="")


def _devices() -> Iterator[Finding]:
    """Threads and GPUs as torch sees them; why it sees no GPU."""
    import torch

    threads = torch.get_num_threads()
    yield Finding("system", "threads", f"{counted(threads, 'thread')} in torch")
    if not torch.cuda.is_available():
        fact, fix = "torch is built without CUDA", f"{_REINSTALL} torch"
        if torch.version.cuda:
            fact, fix = f"torch is built for CUDA {torch.version.cuda} but finds no GPU", "nvidia-smi"
        yield Finding("system", "cuda", fact, "missing", fix if shutil.which("nvidia-smi") else "")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
        fact = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}, {bf16}"
        yield Finding("system", f"cuda:{index}", f"{fact}, CUDA {torch.version.cuda}")


def _kernels() -> Iterator[Finding]:
    """Each kernel at the precision that 'auto' chooses on this machine."""
    import torch

    from sparsedepth.model.kernels import OBSTACLES, KernelFacts, choose

    on_gpu = torch.cuda.is_available()
    bf16 = on_gpu and torch.cuda.is_bf16_supported()
    setting = KernelFacts(
        device=torch.device("cuda" if on_gpu else "cpu"), dtype=torch.bfloat16 if bf16 else torch.float32
    )
    for part, obstacles in OBSTACLES.items():
        choice = choose(part, "auto", setting)
        for kernel, obstacle in obstacles.items():
            if problem := obstacle(setting):
                yield Finding(part, kernel, problem.reason, "cannot run", problem.fix)
                continue
            is_chosen = kernel == choice.kernel
            finding = Finding(part, kernel, "only on request", chosen=is_chosen, needed=is_chosen)
            try:
                _run_kernel(part, kernel, setting)
            except Exception as error:  # a kernel may raise anything
                yield replace(finding, fact=error_text(error), state="broken")
            else:
                yield replace(finding, fact=f"chosen: {choice.reason}") if is_chosen else finding


def _run_kernel(part: "Part", kernel: str, setting: "KernelFacts") -> None:
    """A forward and a backward pass on a tiny input. Raises whatever goes wrong."""
    import torch

    from sparsedepth.model import attention, moe_kernels
    from sparsedepth.model.context import Context

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=setting.device, dtype=setting.dtype, requires_grad=True)

    if part == "attention":
        qkv = ones(1, 4, 16, 16), ones(1, 2, 16, 16), ones(1, 2, 16, 16)
        out = attention.KERNELS[kernel](*qkv, Context(window=8))
    else:
        choice_NC = torch.arange(16, device=setting.device).view(8, 2) % 4
        out = moe_kernels.KERNELS[kernel](ones(8, 16), ones(8, 2), choice_NC, ones(4, 32, 16), ones(4, 16, 16))
    out.float().square().sum().backward()
    if not out.isfinite().all():
        raise ArithmeticError("its result is not finite")
