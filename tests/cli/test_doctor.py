"""`sparsedepth doctor`: what it finds here, and what it says where something is missing or broken."""

import importlib.metadata
import json
import subprocess
import sys

import pytest
import typer
from support.optional_packages import install
from support.tiny_sweep import ENVIRONMENT

from sparsedepth.cli import doctor
from sparsedepth.model import attention, kernels


def found(examine=doctor.examine) -> dict[str, doctor.Finding]:
    findings = list(examine())
    assert len({(finding.group, finding.name) for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


AND_WHAT_WAS_LOADED = """
import sys
sys.modules |= {"flash_attn": None, "megablocks": None}  # which load what they like: as if not installed
from sparsedepth.cli.main import run
try:
    run()
finally:
    slow = {"torch._dynamo", "torch._inductor", "sympy", "scipy", "matplotlib", "seaborn", "torchvision"}
    print(sorted(slow & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.slow  # it imports torch, transformers and datasets anew
def test_the_packages_that_take_seconds_to_load_are_not_loaded():
    command = [sys.executable, "-c", AND_WHAT_WAS_LOADED, "doctor", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert json.loads(done.stdout)["ok"] is True and done.stderr == "[]\n"


def test_this_machine_in_json(command):
    said = json.loads(command("doctor", "--format", "json")[0])
    assert said["ok"] is True
    chosen = {(row["group"], row["name"]) for row in said["findings"] if row["chosen"]}
    assert {group for group, _ in chosen} == {"attention", "experts"} and len(chosen) == 2
    names = {row["name"] for row in said["findings"]}
    assert {"torch", "transformers", "datasets", "optuna", "flash-attn", "megablocks", "triton", "lm-eval"} <= names
    assert {"git", "free disk", "cpu", "threads", "python"} <= names


def test_no_value_of_the_environment_is_shown(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("PGPASSWORD", "very_secret_too")
    with pytest.raises(typer.Exit):
        doctor.doctor()
    assert "secret" not in capsys.readouterr().out


@pytest.fixture
def versions(monkeypatch):
    """Versions to pretend; None for a package that is not installed."""
    pretended: dict[str, str | None] = {}
    real = importlib.metadata.version

    def version(name):
        if pretended.get(name, "") is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return pretended.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return pretended


def failing(findings: dict[str, doctor.Finding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.needed and finding.state != "ok"}


def test_a_missing_and_an_old_package_are_named_with_what_is_needed(versions):
    versions |= {"optuna": None, "transformers": "4.40.0"}
    packages = found(doctor._packages)
    assert failing(packages) == {"optuna", "transformers"} and packages["optuna"].state == "missing"
    assert packages["optuna"].fix.startswith("pip install 'optuna") and ">=5" in packages["optuna"].fix
    assert packages["transformers"].fact.startswith("4.40.0; ") and ">=5.17" in packages["transformers"].fact


def test_without_torch_nothing_is_tried_and_the_code_is_1(versions, monkeypatch, capsys):
    versions["torch"] = None
    findings = found()
    assert failing(findings) == {"torch"}
    assert "sdpa" not in findings and "flash-attn" not in findings
    with pytest.raises(typer.Exit) as stopped:
        doctor.doctor()
    assert stopped.value.exit_code == 1
    assert "sparsedepth cannot run" in capsys.readouterr().out


def test_a_package_that_does_not_load_is_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    packages = found(doctor._packages)
    assert failing(packages) == {"datasets"}
    assert packages["datasets"].state == "broken" and "does not load: ModuleNotFound" in packages["datasets"].fact


def test_a_broken_flash_attn_is_told_from_a_missing_one(versions, monkeypatch):
    versions["flash-attn"] = None
    assert found(lambda: doctor._optional(True))["flash-attn"].fix == kernels.INSTALL_FLASH
    versions["flash-attn"] = "2.8.3"
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    broken = found(lambda: doctor._optional(True))["flash-attn"]
    assert broken.state == "broken" and broken.fix == kernels.REBUILD_FLASH and not broken.needed
    install(monkeypatch, "flash_attn")
    assert found(lambda: doctor._optional(True))["flash-attn"].state == "ok"


def test_a_kernel_that_fails_is_found_by_running_it(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no kernel image is available\nfor execution")

    monkeypatch.setitem(attention.KERNELS, "sdpa", fails)
    findings = found(doctor._kernels)
    assert failing(findings) == {"sdpa"}
    assert findings["sdpa"].fact == "RuntimeError: no kernel image is available for execution"
    assert findings["reference"].state == "ok"
