"""What no card had seen when it was written, first in a visit: compiled variants, stacks of experts and as one graph,
Muon's products, the head in chunks, an export, several processes. Each against the same without, or on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from reference import ZOO
from support.card import DEVICE, IS_REHEARSAL, stand_ins  # noqa: F401 - a fixture for all
from support.tiny_sweep import BASE, ENVIRONMENT, corpus
from test_gpu import FAMILIES, config, counting

from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.exchange.export import export
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.head import cross_entropy
from sparsedepth.probe.load import load_model
from sparsedepth.train.loop import train, training
from sparsedepth.train.runtime import resolve
from sparsedepth.train.stack import Clock, train_together

pytestmark = pytest.mark.gpu

VARIANTS = ("value_residual", "residual_scalars", "peri", "gated", "streams", "sources", "loops", "window_pattern")


def losses(trained) -> list[float]:
    return [row["train_loss"] for row in trained.curves]


def short(**fields):
    return config(**{"precision": "fp32", "log_every": 1, "train_tokens": 512 * 8, **fields})


def runtime_of(cfg, **settings):
    return resolve(cfg, RuntimeConfig(device=str(DEVICE), **settings))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_compiled_variant_trains_as_uncompiled(name):
    cfg = short(**ZOO[name])
    plain, compiled = (losses(train(Decoder(cfg), cfg, runtime_of(cfg, compile=on), counting)) for on in (False, True))
    assert compiled == pytest.approx(plain, rel=1e-3) and plain[-1] < plain[0]


@pytest.mark.parametrize("settings", [{}, {"cuda_graph": "auto"}, {"compile": True, "cuda_graph": "auto"}], ids=str)
@pytest.mark.parametrize("fields", [FAMILIES[1], {**FAMILIES[2], "precision": "bf16"}], ids=["lns", "experts"])
def test_a_stack_learns_as_its_runs_alone(fields, settings):
    runs = [short(**fields, seed=seed, lr=lr) for seed, lr in ((0, 3e-3), (1, 1e-3))]
    alone = [losses(train(Decoder(cfg, cfg.seed), cfg, runtime_of(cfg), counting)) for cfg in runs]
    works = [training(Decoder(cfg, cfg.seed), cfg, runtime_of(cfg, **settings), counting) for cfg in runs]
    for cfg, expected, found in zip(runs, alone, train_together(works, [Clock(), Clock()]), strict=True):
        assert not isinstance(found, Exception), found
        assert losses(found) == pytest.approx(expected, rel=1e-3 if cfg.precision == "fp32" else 5e-2)


@pytest.mark.parametrize("settings", [{}, {"compile": True}], ids=str)
def test_muon_trains_as_on_the_cpu(settings):
    cfg = short(optimizer="muon")
    on_cpu = losses(train(Decoder(cfg), cfg, resolve(cfg, RuntimeConfig(device="cpu")), counting))
    assert losses(train(Decoder(cfg), cfg, runtime_of(cfg, **settings), counting)) == pytest.approx(on_cpu, rel=2e-3)


@pytest.mark.parametrize("n_parts", [1, 3])
def test_a_head_in_chunks_has_the_gradients_of_a_whole_one(n_parts):
    torch.manual_seed(0)
    sizes = ((1536, 64), (2048, 64))
    x_ND, weight_VD = leaves = [torch.randn(size).to(DEVICE).requires_grad_() for size in sizes]
    target_N = torch.randint(2048, (1536,)).to(DEVICE)
    mean, _ = cross_entropy(x_ND, weight_VD, target_N, budget=4 * 1536 * 2048 // n_parts)
    whole = F.cross_entropy(x_ND @ weight_VD.T, target_N)
    found, expected = (torch.autograd.grad(loss, leaves) for loss in (mean, whole))
    torch.testing.assert_close([mean, *found], [whole, *expected], atol=1e-3, rtol=1e-3)


def train_a_run(folder, out, *more, launch=()):
    """`sparsedepth train` on the card, or on the CPU."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**BASE, "n_layers": 2, "corpus": str(corpus(folder)), "train_tokens": 128 * 300}))
    command = [*(launch or [sys.executable, "-m"]), "sparsedepth.cli.main", "train", str(file)]
    command += ["--out", str(folder / out), "--device", DEVICE.type, *more]
    return subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, stderr=subprocess.PIPE, text=True)


def test_a_run_leaves_for_transformers(tmp_path):
    process = train_a_run(tmp_path, "out")
    assert process.wait(300) == 0, process.stderr and process.stderr.read()
    (run,) = (tmp_path / "out" / "runs").iterdir()
    export(run, tmp_path / "exported")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 200, (2, 32))).to(DEVICE)
    logits = []
    for place in (run, tmp_path / "exported"):
        probed = load_model(str(place), device=DEVICE).probed
        state = probed.embed(tokens)
        for layer in range(1, probed.n_layers + 1):
            state = probed.block(layer, state)
        logits.append(probed.logits(state).float())
    torch.testing.assert_close(*logits, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_on_several_processes_is_killed_and_resumed(tmp_path, parallel):
    """NCCL on as many cards as there are; gloo and two processes in a rehearsal."""
    n = 2 if IS_REHEARSAL else min(2, torch.cuda.device_count())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "-m"]
    more = ["--runtime", f"parallel={parallel}", "--runtime", "checkpoint_seconds=0.2"]
    process = train_a_run(tmp_path, "out", *more, launch=launch)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("out/work/*/checkpoints/*.json")):
        assert time.monotonic() < deadline and process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(tmp_path.glob("out/runs/*"))
    again = train_a_run(tmp_path, "out", *more, launch=launch)
    assert again.wait(200) == 0, again.stderr and again.stderr.read()
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("out/runs/*/manifest.json"))
    assert (manifest["parallel"], manifest["processes"]) == (parallel, n)
