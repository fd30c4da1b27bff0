"""The same numbers on a GPU, within stated tolerances; or in a rehearsal (`support.card`). Skipped elsewhere."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.card import DEVICE, only_on_a_card, stand_ins  # noqa: F401 - a fixture for all

from sparsedepth.cli import doctor
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.measure.suite import SUITE, measure_run
from sparsedepth.model import attention, kernels, moe_kernels
from sparsedepth.model.context import Context
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.train.loop import Interrupted, train, training
from sparsedepth.train.runtime import is_out_of_memory, resolve
from sparsedepth.train.stack import Clock, train_together

pytestmark = pytest.mark.gpu

GPU = RuntimeConfig(device=str(DEVICE))

FAMILIES = [{}, {"n_kv_heads": 1, "depth_scale": "lns"}, {"n_experts": 4, "top_k": 2, "d_expert": 64}]


def config(**fields) -> RunConfig:
    shape = {"n_layers": 4, "d_model": 64, "n_heads": 4, "vocab_size": 64, "seq_len": 64, "batch_tokens": 512}
    return build(RunConfig, {**shape, "train_tokens": 512 * 60, "lr": 3e-3, "fit_tokens": 256, **fields}, "gpu")


def counting(step: int) -> Sequences:
    start = np.random.default_rng(step).integers(0, 64, (8, 1))
    return next_tokens((start + np.arange(65)) % 64)


def held_out(seq_len: int, n_tokens: int, skip_tokens: int) -> Sequences:
    rng = np.random.default_rng(skip_tokens)
    return next_tokens(rng.integers(0, 64, (n_tokens // seq_len, seq_len + 1)))


@pytest.mark.parametrize("fields", FAMILIES)
def test_fp32_logits_equal_the_cpus(fields):
    model = Decoder(config(**fields))
    model.use_kernels(experts="loop")
    tokens = torch.from_numpy(counting(0).inputs)
    expected = model(tokens)
    torch.testing.assert_close(model.to(DEVICE)(tokens.to(DEVICE)).cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fields", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_on_a_gpu_lowers_the_loss_in_every_precision(fields, precision, compiled):
    cfg = config(precision=precision, **fields)
    trained = train(Decoder(cfg), cfg, resolve(cfg, RuntimeConfig(device=str(DEVICE), compile=compiled)), counting)
    assert trained.outcome == "ok"
    assert trained.curves[-1]["train_loss"] < 0.7 * trained.curves[0]["train_loss"]


def test_grouped_experts_equal_the_loop_in_bf16():
    model = Decoder(config(**FAMILIES[2])).to(DEVICE)
    tokens = torch.from_numpy(counting(0).inputs).to(DEVICE)
    logits = {}
    for kernel in ("loop", "grouped"):
        model.use_kernels(experts=kernel)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            logits[kernel] = model(tokens).float()
    torch.testing.assert_close(logits["loop"], logits["grouped"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("lost", [False, True])
def test_resumed_run_ends_close_to_the_whole_one(tmp_path, optimizer, lost):
    """Also if the last checkpoint is lost: the one before was written while training went on.

    Atomic adds may reorder sums on a GPU: equal to 1e-4, not to the bit.
    """
    cfg = config(precision="fp32", optimizer=optimizer)
    runtime = resolve(cfg, RuntimeConfig(device=str(DEVICE), checkpoint_seconds=1e-6))
    whole, resumed = Decoder(cfg), Decoder(cfg)
    train(whole, cfg, runtime, counting)
    calls = iter(range(1, 100))
    with pytest.raises(Interrupted):
        train(resumed, cfg, runtime, counting, checkpoints=tmp_path, stop=lambda: next(calls) == 25)
    before, last = sorted(tmp_path.glob("step-*.json"))
    assert last.stem == "step-000000025" and before < last
    if lost:
        last.unlink()
    resumed = Decoder(cfg)
    train(resumed, cfg, runtime, counting, checkpoints=tmp_path)
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(weight, resumed.get_parameter(name), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("fields", FAMILIES)
def test_measures_equal_the_cpus(fields):
    cfg = config(val_tokens=512, measure_tokens=256, **fields)
    model = Decoder(cfg)
    on_cpu = measure_run(ProbedDecoder(model), cfg, held_out, 1.0, step=0).summary
    on_gpu = measure_run(ProbedDecoder(model.to(DEVICE)), cfg, held_out, 1.0, step=0).summary
    known = {name: value for name, value in on_cpu.items() if value is not None}
    assert {name for name, value in on_gpu.items() if value is not None} == set(known)
    assert {name: on_gpu[name] for name in known} == pytest.approx(known, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", sorted(set(SUITE) - set(config().measures)))
def test_every_other_measure_equals_the_cpus(name):
    cfg = config(measures=[name], measure_tokens=256)
    model = Decoder(cfg)
    on_cpu = measure_run(ProbedDecoder(model), cfg, held_out, 1.0, step=0).summary
    on_gpu = measure_run(ProbedDecoder(model.to(DEVICE)), cfg, held_out, 1.0, step=0).summary
    known = {column: value for column, value in on_cpu.items() if value is not None}
    assert {column: on_gpu[column] for column in known} == pytest.approx(known, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stacked_run_learns_as_alone(precision):
    configs = [config(precision=precision, seed=seed, lr=lr, log_every=1) for seed, lr in ((0, 3e-3), (1, 1e-3))]
    alone = [train(Decoder(cfg, cfg.seed), cfg, resolve(cfg, GPU), counting).curves for cfg in configs]
    runs = [training(Decoder(cfg, cfg.seed), cfg, resolve(cfg, GPU), counting) for cfg in configs]
    for cfg, expected, found in zip(configs, alone, train_together(runs, [Clock(), Clock()]), strict=True):
        assert not isinstance(found, Exception), (cfg.seed, found)
        losses = [[row["train_loss"] for row in curves] for curves in (found.curves, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3 if precision == "fp32" else 5e-2)


def test_a_sweep_forks_runs_that_use_the_gpu(tmp_path):
    """Two at a time on one GPU, from a server that must not have initialised CUDA; each records its peak memory."""
    base = {"corpus": "stdlib", "max_corpus_tokens": 60000, "n_layers": 2, "d_model": 16, "n_heads": 2, "seq_len": 32}
    base |= {"batch_tokens": 256, "train_tokens": 2560, "val_tokens": 1024, "measures": ["loss"], "lr": 2e-3}
    (tmp_path / "base.yaml").write_text(json.dumps(base))
    command = f"-m sparsedepth.cli.main sweep --vary depth_scale=none,lns --base {tmp_path / 'base.yaml'}"
    command += f" --seeds 2 --workers 2 --device {DEVICE.type} --stack 1 --out {tmp_path / 'out'}"
    subprocess.run([sys.executable, *command.split()], check=True, timeout=300)
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("out/runs/*/manifest.json")]
    assert len(manifests) == 4
    assert all(facts["device"].startswith(DEVICE.type) and facts["peak_memory_bytes"] > 0 for facts in manifests)


@only_on_a_card("a shortage of its memory")
def test_a_shortage_is_recognised_and_leaves_the_gpu_usable():
    with pytest.raises(RuntimeError) as shortage:
        torch.empty(2**48, device=DEVICE)
    assert is_out_of_memory(shortage.value)
    assert torch.ones(4, device=DEVICE).sum().item() == 4


KERNEL_HERE = kernels.KernelFacts(device=DEVICE, dtype=torch.bfloat16)


def skip_without(part: kernels.Part, name: str) -> None:
    found = kernels.OBSTACLES[part][name](KERNEL_HERE)
    if found:
        pytest.skip(f"only on a card: {found.reason}" if DEVICE.type == "cpu" else found.reason)


@pytest.mark.parametrize("name", ["sdpa", "flash"])
@pytest.mark.parametrize("n_groups", [4, 1])
@pytest.mark.parametrize("window", [None, 1, 50, 300])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_the_reference_in_bf16(name, n_groups, window, packed):
    skip_without("attention", name)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 200, 64), (2, n_groups, 200, 64), (2, n_groups, 200, 64)]
    qkv = [torch.randn(s, generator=generator).bfloat16().to(DEVICE).requires_grad_() for s in shapes]
    weight = torch.randn(shapes[0], generator=generator).to(DEVICE)
    document_BT = (torch.arange(200) // 37).expand(2, -1).contiguous().to(DEVICE) if packed else None
    found, has_cudnn = [], torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(window is None and document_BT is None)  # as training does
    try:
        for kernel in (name, "reference"):
            out = attention.KERNELS[kernel](*qkv, Context(window=window, document_BT=document_BT))
            found.append([out, *torch.autograd.grad((out.float() * weight).sum(), qkv)])
    finally:
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
    torch.testing.assert_close(*found, atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["grouped", "megablocks"])
@pytest.mark.parametrize("shape", [(300, 64, 32, 8, 2), (40, 64, 64, 16, 3), (64, 64, 32, 1, 1)])
def test_experts_equal_the_loop_in_bf16(name, shape):
    skip_without("experts", name)
    n_tokens, d_model, d_expert, n_experts, top_k = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(n_tokens, d_model), (n_tokens, n_experts)]
    sizes += [(n_experts, 2 * d_expert, d_model), (n_experts, d_model, d_expert)]
    leaves = [torch.randn(size, generator=generator).to(DEVICE).requires_grad_() for size in sizes]
    x_ND, logits_NE, gate_up, down = leaves
    gate_NC, choice_NC = logits_NE.softmax(-1).topk(top_k)
    found = []
    for kernel in (name, "loop"):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            out_ND = moe_kernels.KERNELS[kernel](x_ND, gate_NC, choice_NC, gate_up, down)
        gradients = torch.autograd.grad(out_ND.square().mean(), leaves, retain_graph=True)
        found.append([out_ND.detach(), *gradients])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@only_on_a_card("CUDA says what waits")
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="a loop there")
def test_grouped_experts_never_wait_for_the_gpu():
    sizes = [(64, 64), (8, 64, 64), (8, 64, 32)]
    x_ND, gate_up, down = (torch.randn(size, device=DEVICE).requires_grad_() for size in sizes)
    gate_NC, choice_NC = torch.rand(64, 8, device=DEVICE).topk(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            moe_kernels.grouped(x_ND, gate_NC, choice_NC, gate_up, down).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_doctor_runs_every_kernel_that_can_run():
    findings = [finding for finding in doctor.examine() if finding.group in ("attention", "experts")]
    assert {finding.name for finding in findings if finding.state == "broken"} == set()
    assert {"sdpa", "reference", "grouped", "loop"} <= {found.name for found in findings if found.state == "ok"}


@only_on_a_card("CUDA says what waits")
@pytest.mark.parametrize("fields", FAMILIES)
def test_no_step_waits_for_the_gpu(fields):
    """CUDA raises at whatever makes the host wait; the first step is logged and may, the last is logged and must."""
    cfg = config(log_every=1000, observe_every=1000, **fields)
    taken: list[int] = []

    def after(step: int, curves: list) -> None:
        taken.append(step)
        torch.cuda.set_sync_debug_mode("error")

    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            train(Decoder(cfg), cfg, resolve(cfg, GPU), counting, progress=after)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken == list(range(1, cfg.n_steps))
