"""The modelled peak of memory, held to the tensors that autograd saves and to real processes."""

import json
import subprocess
import sys

import pytest
import torch
from support.tiny_sweep import BASE, ENVIRONMENT, corpus

from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import COMPILED_STEPS
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.memory import Place, activation_bytes, peak_bytes
from sparsedepth.plan.price import PricingSetup, price_of, with_peaks
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
    [
        {},
        {"n_kv_heads": 1},
        {"qk_norm": True},
        {"qk_norm": True, "qk_norm_over": "all"},
        {"norm": "sandwich"},
        {"norm": "post"},
        {"norm": "keel"},
        {"norm_kind": "group"},
        {"depth_scale": "lns"},
        {"residual_gate": "layerscale"},
        {"residual_scalars": True},
        {"value_residual": True},
        {"gpas": True},
        {"n_streams": 2},
        {"attention_residuals": 2},
        {"n_streams": 3, "stream_mixing": "manifold"},
        {"attention_dropout": 0.1},
        {"residual_dropout": 0.1},
        {"ffn_dropout": 0.1},
        {"sliding_window": 16},
        {"mask_documents": True},
        {"weight_density": 0.5},
        MOE,
        {**MOE, "n_shared_experts": 1},
    ],
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


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(
    "fields",
    [
        {"n_layers": 24},
        pytest.param({"d_model": 128, "n_layers": 6, "batch_tokens": 2048, **MOE}, marks=pytest.mark.slow),
    ],
)
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


def test_a_price_takes_the_peaks_that_runs_had():
    """The larger one of two runs of a shape; other shapes are scaled by the median of measured / modelled."""
    small, large = config(measures=["loss"]), config(measures=["loss"], n_layers=4)
    again = small.model_copy(update={"seed": 1})
    modelled = [kind.memory_bytes for kind in price_of([small, large], PricingSetup()).kinds]
    setup = with_peaks(PricingSetup(), [(small, 2 * modelled[0]), (again, 3 * modelled[0])])
    measured = [kind.memory_bytes for kind in price_of([small, large], setup).kinds]
    assert measured == [3 * modelled[0], 3 * modelled[1]]
