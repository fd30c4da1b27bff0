"""Steps replayed as one CUDA graph against the same steps without, on a GPU or in a rehearsal (`support.card`)."""

import gc

import pytest
import torch
from support.card import DEVICE, only_on_a_card, stand_ins  # noqa: F401 - a fixture for all
from test_gpu import FAMILIES, config, counting

from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.loop import Interrupted, train
from sparsedepth.train.runtime import Runtime, resolve

pytestmark = pytest.mark.gpu

GRAPHS = [
    *FAMILIES[:2],
    {**FAMILIES[2], "precision": "bf16"},
    {"sliding_window": 16},
    {"mask_documents": True, "eod": 0},
    {"residual_dropout": 0.1, "attention_dropout": 0.1, "ffn_dropout": 0.1},
]

PARTS = {"micro_batch": 3}


def graphs(cfg: RunConfig, **settings) -> tuple[Runtime, Runtime]:
    """Without and with a CUDA graph; skipped where the steps of this config cannot be one on this GPU."""
    plain, captured = (
        resolve(cfg, RuntimeConfig(device=str(DEVICE), cuda_graph=on, **settings)) for on in (False, "auto")
    )
    if not captured.cuda_graph:
        pytest.skip(captured.kernel_reasons["cuda_graph"])
    return plain, captured


def observe_elsewhere(model: Decoder, step: int) -> list[dict]:
    """Other lengths between the steps, so that what is kept for them pushes out what training has kept."""
    with torch.no_grad():
        for n_tokens in (8, 24, 40, 56):
            model(torch.zeros(2, n_tokens, dtype=torch.long, device=DEVICE))
    torch.cuda.empty_cache()
    return []


@pytest.mark.parametrize(
    ("fields", "settings"),
    [*((fields, {}) for fields in GRAPHS), *((fields, {"compile": True}) for fields in GRAPHS[:4]), ({}, PARTS)],
)
def test_steps_are_the_plain_ones(fields, settings):
    """Losses of 60 steps: the learning rate is rounded to fp32, and atomic adds may reorder sums."""
    cfg = config(**{"precision": "fp32", "log_every": 1, "observe_every": 7, **fields})
    curves = []
    for runtime in graphs(cfg, **settings):
        trained = train(Decoder(cfg), cfg, runtime, counting, observe=observe_elsewhere)
        curves.append([row["train_loss"] for row in trained.curves])
    exact = cfg.precision == "fp32"
    assert curves[1] == pytest.approx(curves[0], rel=1e-3 if exact else 5e-2, abs=1e-4 if exact else 5e-2)
    assert curves[1][:2] == pytest.approx(curves[0][:2], rel=1e-6)  # plain steps, of the same batches and masks
    assert curves[0][-1] < 0.7 * curves[0][0]


@pytest.mark.parametrize("stop", [2, 25])
def test_run_that_goes_on_ends_close_to_the_whole_one(tmp_path, stop):
    cfg = config(precision="fp32")
    plain, captured = graphs(cfg)
    whole, resumed = Decoder(cfg), Decoder(cfg)
    train(whole, cfg, plain, counting)
    calls = iter(range(1, 100))
    with pytest.raises(Interrupted):
        train(Decoder(cfg), cfg, captured, counting, checkpoints=tmp_path, stop=lambda: next(calls) == stop)
    train(resumed, cfg, captured, counting, checkpoints=tmp_path)
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(weight, resumed.get_parameter(name), atol=1e-4, rtol=1e-3)


@only_on_a_card("CUDA says what waits")
@pytest.mark.parametrize("fields", GRAPHS)
def test_no_step_waits_for_the_gpu(fields):
    """From the fifth step on, which is replayed; the last is logged and must wait."""
    cfg = config(log_every=1000, observe_every=1000, **fields)
    taken: list[int] = []

    def after(step: int, curves: list) -> None:
        taken.append(step)
        if step == 5:
            torch.cuda.set_sync_debug_mode("error")

    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            train(Decoder(cfg), cfg, graphs(cfg)[1], counting, progress=after)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken == list(range(1, cfg.n_steps))


@only_on_a_card("its memory")
def test_memory_is_given_back():
    cfg = config()
    _, captured = graphs(cfg)
    model = Decoder(cfg)
    train(model, cfg, captured, counting)
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each handle and stream on Hopper
    torch.cuda.empty_cache()
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert torch.cuda.memory_allocated() < weights + 2**26
