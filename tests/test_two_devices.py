"""A training step and each measure with the model on one device and the host's tensors on another: a tensor that is
made in the wrong place, which only a GPU would refuse, is found on a CPU."""

import numpy as np
import pytest
import torch
from support.two_devices import DEVICE, MixedDevices, TwoDevices, mark, side

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.measure.suite import SUITE, measure_run
from sparsedepth.model import attention
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.train.devices import ALONE
from sparsedepth.train.feed import Batch
from sparsedepth.train.loop import TrainingState
from sparsedepth.train.runtime import Runtime

SETTINGS = [
    {},
    {"n_kv_heads": 1, "depth_scale": "lns", "sliding_window": 5},
    {"n_experts": 4, "top_k": 2, "d_expert": 16, "n_shared_experts": 1},
    {"mask_documents": True, "eod": 0},
    {"optimizer": "muon"},
    {"residual_dropout": 0.1},
    {"residual_gate": "layerscale", "value_residual": True},
]


def config(**fields) -> RunConfig:
    shape = {"n_layers": 3, "d_model": 16, "n_heads": 2, "vocab_size": 32, "seq_len": 16, "batch_tokens": 64}
    sizes = {"train_tokens": 64 * 20, "lr": 3e-3, "fit_tokens": 256, "measure_tokens": 64, "val_tokens": 64}
    return build(RunConfig, {**shape, **sizes, "permutation_pairs": 2, "precision": "fp32", **fields}, "devices")


def drawn(seed: int, n_sequences: int, seq_len: int) -> Sequences:
    return next_tokens(np.random.default_rng(seed).integers(0, 32, (n_sequences, seq_len + 1)))


def held_out(seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
    return drawn(skip_tokens, max(1, n_tokens // seq_len), seq_len)


def step_of(cfg: RunConfig, devices: TwoDevices) -> TrainingState:
    """Of the model on the device, after two steps."""
    model = Decoder(cfg).train()
    devices.place(model)
    state = TrainingState(model, cfg, Runtime(device=torch.device("cpu"), precision="fp32", threads=1), ALONE)
    for number in range(2):
        batch = Batch.of(drawn(number, 4, cfg.seq_len)).to(DEVICE)
        state.take_step(batch)
    return state


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_a_training_step_mixes_no_devices(fields):
    with TwoDevices() as devices:
        state = step_of(config(**fields), devices)
        losses = torch.stack(state.recent)
        assert side(losses) == DEVICE
    assert losses[:, 0].isfinite().all()


@pytest.mark.parametrize("name", SUITE)
@pytest.mark.parametrize("fields", [{}, SETTINGS[2]], ids=["dense", "experts"])
def test_a_measure_mixes_no_devices(name, fields):
    cfg = config(measures=[name], **fields)
    with TwoDevices() as devices:
        model = Decoder(cfg).eval()
        devices.place(model)
        found = measure_run(ProbedDecoder(model), cfg, held_out, 1.0, step=0)
    expected = measure_run(ProbedDecoder(Decoder(cfg).eval()), cfg, held_out, 1.0, step=0)
    assert found.summary.keys() == expected.summary.keys()
    for column, value in expected.summary.items():
        assert found.summary[column] == (value if value is None else pytest.approx(value, rel=1e-3, abs=1e-6)), column


def test_a_mask_made_on_the_host_is_found_in_a_step_and_in_a_measure(monkeypatch):
    """As if `visible` forgot its device."""
    cfg, of_device = config(sliding_window=5, measures=["causal"]), attention.visible

    def on_host(n_tokens, context, device):
        return of_device(n_tokens, context, torch.device("cpu"))

    monkeypatch.setattr(attention, "visible", on_host)
    with TwoDevices() as devices:
        with pytest.raises(MixedDevices, match="scaled_dot_product_attention"):
            step_of(cfg, devices)
        model = Decoder(cfg).eval()
        devices.place(model)
        with pytest.raises(MixedDevices, match="scaled_dot_product_attention"):
            measure_run(ProbedDecoder(model), cfg, held_out, 1.0, step=0)


def on_device(*shape: int) -> torch.Tensor:
    x = torch.ones(shape)
    mark(x, DEVICE)
    return x


MISTAKES = {
    "a tensor made without device": lambda x: x + torch.arange(3),
    "a mask made without device": lambda x: x.masked_fill(torch.ones(3, dtype=torch.bool), 0),
    "brought to the host and back too late": lambda x: x.cpu() + x,
    "made on the host by name": lambda x: torch.stack((x, torch.zeros(3, device="cpu"))),
    "numpy of the device": lambda x: x.numpy(),
    "of numpy's": lambda x: x @ torch.from_numpy(np.ones(3, dtype=np.float32)),
}
ALLOWED = {
    "made on the same device": lambda x: x + torch.arange(3, device=x.device),
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "a Python number": lambda x: x * 2.0,
    "an index of the host": lambda x: x[torch.tensor([0, 2])],
    "moved": lambda x: x + torch.ones(3).to(x.device),
    "moved to where another is": lambda x: x + torch.ones(3).to(x),
    "like another": lambda x: x + torch.zeros_like(x) + x.new_ones(3),
    "numpy of the host": lambda x: x.cpu().numpy(),
    "copied over": lambda x: x.copy_(torch.ones(3)),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_tensor_in_the_wrong_place_is_found(mistake):
    with TwoDevices():
        x = on_device(3)
        with pytest.raises(MixedDevices):
            mistake(x)


@pytest.mark.parametrize("right", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_a_gpu_allows_is_allowed(right):
    with TwoDevices():
        right(on_device(3))
