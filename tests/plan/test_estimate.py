"""The modelled peak of memory, held to the tensors that autograd saves and to real processes."""

import json
import subprocess
import sys

import pytest
import torch
from support.made_up_runs import make_run
from support.tiny_sweep import BASE, ENVIRONMENT, corpus

from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import COMPILED_STEPS
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.estimate import CALIBRATED, RELATED, Place, Timing, activation_bytes, peak_bytes, shape_id
from sparsedepth.plan.price import PricingSetup, price_of, with_finished
from sparsedepth.train.loop import losses

MOE = {"n_experts": 4, "top_k": 2, "d_expert": 96}


def config(**fields) -> RunConfig:
    base = {"d_model": 64, "n_heads": 4, "n_layers": 2, "seq_len": 64, "batch_tokens": 512, "train_tokens": 512}
    return RunConfig(**{**base, "d_ff": 200, **fields})


def saved_bytes(config: RunConfig, bf16: bool) -> int:
    """Bytes of the storages that autograd saves in one forward pass, the weights' own left out."""
    model = Decoder(config, 0)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    shape = (config.batch_tokens // config.seq_len, config.seq_len)
    inputs_BT, targets_BT = torch.randint(256, shape), torch.randint(256, shape)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        losses(model, inputs_BT, targets_BT, config)
    return sum(storage.nbytes() for storage in saved.values())


def test_tied_tables_leave_the_blocks_what_they_keep():
    tied, own = (
        activation_bytes(config(vocab_size=50_304, tie_embeddings=tie), 1, Place(device="cuda"))
        for tie in (True, False)
    )
    assert tied == own > 0


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{}, {"n_kv_heads": 1}, {"depth_scale": "lns"}, {"sliding_window": 16}, MOE, {**MOE, "n_shared_experts": 1}],
    ids=str,
)
def test_what_autograd_keeps_of_a_block(fields, bf16):
    """The third block's share is the difference of a model of three and one of two."""
    fields = {**fields, "precision": "bf16" if bf16 else "fp32"}
    small, large = config(**fields), config(**{**fields, "n_layers": 3})
    n_sequences = small.batch_tokens // small.seq_len
    modelled = activation_bytes(large, n_sequences) - activation_bytes(small, n_sequences)
    assert modelled == pytest.approx(saved_bytes(large, bf16) - saved_bytes(small, bf16), rel=0.12)


RUN = """
import sys, json
from pathlib import Path
import pandas, torch, torch._dynamo
from sparsedepth.config.run import RunConfig
from sparsedepth.data.pipeline import prepare
from sparsedepth.run.execute import execute
torch.set_num_threads(1)
config = RunConfig(**json.loads(sys.argv[1]))
prepare(config, Path(sys.argv[2]) / "data")  # as the driver of a sweep does before any run
folder = execute(config, Path(sys.argv[2]))
print(json.loads((folder / "manifest.json").read_text())["peak_memory_bytes"])
"""


@pytest.mark.slow  # a process that starts from nothing
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("fields", [{"n_layers": 24}, {"d_model": 128, "n_layers": 6, "batch_tokens": 2048, **MOE}])
def test_the_peak_of_a_process(fields, tmp_path):
    shape = {**BASE, "d_model": 64, "seq_len": 128, "batch_tokens": 1024, "observe_every": 100, **fields}
    shape |= {"train_tokens": 3 * shape["batch_tokens"], "corpus": str(corpus(tmp_path)), "measures": ["loss"]}
    command = [sys.executable, "-c", RUN, json.dumps(shape), str(tmp_path / "results")]
    out = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) == pytest.approx(peak_bytes(RunConfig(**shape)), rel=0.15)


def test_what_lowers_the_peak():
    run = config(batch_tokens=8192, train_tokens=8192, n_layers=8, d_model=256, measures=["loss"])
    whole = peak_bytes(run, Place(device="cuda"))
    assert peak_bytes(run, Place(device="cuda", micro_batch=16)) < whole
    assert peak_bytes(run, Place(device="cuda", compile=True)) < whole
    assert peak_bytes(run, Place(device="cuda", compile="auto")) == whole  # one step: not compiled by itself
    longer = run.model_copy(update={"train_tokens": COMPILED_STEPS * run.batch_tokens})
    assert peak_bytes(longer, Place(device="cuda", compile="auto")) < whole
    assert peak_bytes(run, Place(device="cuda", processes=2, parallel="ddp")) < whole
    ddp = peak_bytes(run, Place(device="cuda", processes=4, parallel="ddp"))
    assert peak_bytes(run, Place(device="cuda", processes=4, parallel="fsdp")) < ddp


def test_a_price_takes_what_finished_runs_took(tmp_path):
    """Of two runs of a shape the larger peak and the median time; other shapes are scaled by the median ratio. A run on
    another device says nothing, nor one that diverged."""
    small, large = config(measures=["loss"]), config(measures=["loss"], n_layers=4)
    again, third = (small.model_copy(update={"seed": seed}) for seed in (1, 2))
    first, second = price_of([small, large], PricingSetup()).kinds
    timed = PricingSetup(timings={shape_id(small, step_only=True): Timing(step=9.0, forward=9.0)})
    assert with_finished(timed, tmp_path / "new", [small]) == timed, "a folder that is not there yet has no runs"
    for run, device, seconds, peak, outcome in (
        (small, "cpu (x86_64)", 2 * first.seconds.value, 2 * first.memory_bytes, "ok"),
        (again, "cpu (x86_64)", 4 * first.seconds.value, 3 * first.memory_bytes, "ok"),
        (third, "cpu (x86_64)", 1e6, 1e12, "diverged"),
        (large, "cuda (NVIDIA H100)", 1e6, 1e12, "ok"),
    ):
        facts = {"device": device, "seconds": seconds, "peak_memory_bytes": round(peak)}
        make_run(tmp_path, run, {"val_loss": 1.0, "outcome": outcome}, manifest=facts)
    setup = with_finished(timed, tmp_path, [small, again, third, large])
    measured = price_of([small, large], setup)
    assert [kind.memory_bytes for kind in measured.kinds] == [3 * first.memory_bytes, 3 * second.memory_bytes]
    expected = [3 * first.seconds.value, 3 * second.seconds.value]
    assert [kind.seconds.value for kind in measured.kinds] == pytest.approx(expected)
    assert [kind.seconds.factor for kind in measured.kinds] == [CALIBRATED, RELATED] and measured.is_calibrated
