"""A step as one CUDA graph, held on a CPU: replays of a recorded step are the plain steps, to the last bit."""

import dataclasses
import gc
import inspect
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import optional_packages
from support.counting import counting
from support.cpu_graph import RecordedCapture, Waits, pointers, stand_in

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Sequences
from sparsedepth.model.decoder import Decoder
from sparsedepth.train import loop
from sparsedepth.train.cuda_graph import WARM_UP, CudaCapture, obstacle
from sparsedepth.train.devices import ALONE
from sparsedepth.train.feed import Batch
from sparsedepth.train.loop import Interrupted, TrainingResult, TrainingState, train
from sparsedepth.train.runtime import is_out_of_memory, resolve
from sparsedepth.train.stack import Clock, _Stacks

STEPS = 35
TINY: dict[str, Any] = {
    **{"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "batch_tokens": 32},
    **{"train_tokens": 32 * STEPS, "lr": 3e-3, "log_every": 1, "observe_every": 10, "precision": "fp32"},
}
EXPERTS = {"n_experts": 4, "top_k": 2, "d_expert": 16}
SETUPS: dict[str, dict[str, Any]] = {
    "dense": {"grad_clip": 0.05, "weight_decay": 0.5, "warmup_frac": 0.3},
    "in parts that weigh differently": {"micro_batch": 3, "partly": True},
    "experts": {**EXPERTS, "n_shared_experts": 1, "micro_batch": 2},
    "window": {"sliding_window": 3, "n_kv_heads": 1, "qk_norm": True},
    "documents": {"mask_documents": True, "eod": 0, "micro_batch": 2},
    "dropout": {"residual_dropout": 0.2, "attention_dropout": 0.1, "ffn_dropout": 0.1},
    "scaled": {"parametrisation": "completep", "base_width": 8, "base_depth": 1, "depth_scale": "lns"},
    "scalars": {"value_residual": True, "residual_scalars": True, "gpas": True},
    "others": {"norm_kind": "group", "norm_groups": 2, "attention_residuals": 4},
    "gradients noted": {"measures": ["loss", "gradients"]},
    "bf16": {"precision": "bf16", "tie_embeddings": True},
}


def split(setup: dict[str, Any]) -> tuple[RunConfig, dict[str, Any], bool]:
    fields = {**TINY, **setup}
    runtime = {"micro_batch": fields.pop("micro_batch", None)}
    partly = fields.pop("partly", False)
    return build(RunConfig, fields, "test"), runtime, partly


def partly_counting(step: int) -> Sequences:
    """In each step other shares of the positions count."""
    whole, counts_B1 = counting(step), np.random.default_rng(step).integers(1, 9, (4, 1))
    return Sequences(inputs=whole.inputs, targets=np.where(np.arange(8) < counts_B1, whole.targets, IGNORED))


def run(setup: dict[str, Any], captured: bool, **options: Any) -> tuple[Decoder, TrainingResult]:
    cfg, changes, partly = split(setup)
    runtime = dataclasses.replace(resolve(cfg, RuntimeConfig(device="cpu")), cuda_graph=captured, **changes)
    model = Decoder(cfg, cfg.seed)
    return model, train(model, cfg, runtime, partly_counting if partly else counting, **options)


def assert_equal(one: tuple[Decoder, TrainingResult], other: tuple[Decoder, TrainingResult]) -> None:
    for name, weight in one[0].named_parameters():
        assert weight.equal(other[0].get_parameter(name)) or not weight.isfinite().any(), name
    curves = [[{**row, "tokens_per_second": 0} for row in trained.curves] for _, trained in (one, other)]
    assert curves[0] == curves[1] and one[1].observations == other[1].observations
    assert (one[1].steps, one[1].diverged_cause) == (other[1].steps, other[1].diverged_cause)


def state_of(setup: dict[str, Any], captured: bool = True, **kernels: str) -> TrainingState:
    cfg, changes, _ = split(setup)
    runtime = dataclasses.replace(resolve(cfg, RuntimeConfig(device="cpu")), cuda_graph=captured, **changes)
    model = Decoder(cfg, cfg.seed).train()
    model.use_kernels(**kernels)
    return TrainingState(model, cfg, runtime, ALONE)


def take_steps(state: TrainingState, n_steps: int) -> TrainingState:
    for step in range(n_steps):
        state.take_step(Batch.of(counting(step)))
    return state


SHORT = {"train_tokens": 32 * 8}


@pytest.mark.parametrize(
    ("name", "length"),
    [("dense", {}), *((name, SHORT) for name in SETUPS if name != "dense")]
    + [pytest.param(name, {}, marks=pytest.mark.slow) for name in SETUPS if name != "dense"],
)
def test_replayed_steps_are_the_plain_ones(monkeypatch, name, length):
    recorders = stand_in(monkeypatch)
    setup = {**SETUPS[name], **length}
    assert_equal(run(setup, captured=False), run(setup, captured=True))
    (recorder,) = recorders
    assert len(recorder.operations) > 100


@pytest.mark.parametrize("stops", [[2, 4], pytest.param([3, 1, 11, 5], marks=pytest.mark.slow)])
def test_a_run_that_stops_and_goes_on_ends_as_the_whole_plain_one(monkeypatch, tmp_path, stops):
    """Before, at and after the capture."""
    recorders = stand_in(monkeypatch)
    setup = {**SETUPS["dropout"], "train_tokens": 32 * (sum(stops) + 5)}
    for stop in stops:
        calls = iter(range(1, 100))
        with pytest.raises(Interrupted):
            run(setup, True, checkpoints=tmp_path, stop=lambda calls=calls, stop=stop: next(calls) == stop)
    assert_equal(run(setup, False), run(setup, True, checkpoints=tmp_path))
    assert len(recorders) == sum(n_steps > WARM_UP for n_steps in [*stops, 5])


def test_a_diverging_run_ends_alike(monkeypatch):
    stand_in(monkeypatch)
    setup = {"lr": 1e4, "grad_clip": 0.0, "warmup_frac": 0.0, "log_every": 7}
    plain = run(setup, captured=False)
    assert plain[1].outcome == "diverged" and plain[1].steps > 1
    assert_equal(plain, run(setup, captured=True))


def test_a_learning_rate_in_fp32_changes_weights_by_a_rounding(monkeypatch):
    """What fused AdamW reads on CUDA. Adam divides by a gradient's size, so what is next to 0 may turn by more."""
    monkeypatch.setattr(loop, "CudaCapture", type("Fp32", (RecordedCapture,), {"lr_dtype": torch.float32}))
    models = [run(SETUPS["dense"], captured)[0] for captured in (False, True)]
    gaps = [(a - b).abs().max() for a, b in zip(*(model.parameters() for model in models), strict=True)]
    assert 0 < max(gaps) < 1e-5


def test_steps_that_are_not_as_the_captured_one_are_taken_plainly(monkeypatch):
    """Gradients that a stack has left, and a batch of another shape."""
    recorders = stand_in(monkeypatch)
    states = [state_of({}, captured) for captured in (False, True)]
    odd = counting(7)[:2]
    for state in states:
        take_steps(state, 5)
        state.taken = state.update([*Batch.of(counting(6)).parts(None)])
        state.take_step(Batch.of(counting(6)))
        state.take_step(Batch.of(odd))
        take_steps(state, 2)
    rows = [torch.stack(state.recent)[:, [0, 2]] for state in states]
    assert rows[0].equal(rows[1]) and len(rows[0]) == 9
    assert len(recorders) == 1


@pytest.mark.parametrize("name", ["dense", "experts", "window", "documents", "scaled", "others"])
def test_a_graph_reads_only_what_lives_as_long_as_the_training(monkeypatch, name):
    """A mask that was kept for all layers may be dropped while the graph still reads where it lay."""
    recorders = stand_in(monkeypatch)
    state = take_steps(state_of(SETUPS[name]), 5)
    assert state.captured is not None
    lasting = [*state.model.parameters(), *state.model.buffers(), state.captured.parts]
    moments = [own for own in state.optimizer.state.values()]
    rates = [group["lr"] for group in state.optimizer.param_groups]
    assert recorders[0].outside <= pointers([lasting, moments, rates])


def test_a_graph_goes_when_its_training_does(monkeypatch):
    """Its memory is the measures' then."""
    stand_in(monkeypatch)
    state = take_steps(state_of({}), 5)
    ref = weakref.ref(state.captured)
    gc.disable()
    try:
        del state
        assert ref() is None
    finally:
        gc.enable()


CUDA = torch.device("cuda")
REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "reads the learning rate": ({"optimizer": "muon"}, {}, "_local_scalar_dense"),
    "experts_kernel=loop waits": (EXPERTS, {"experts": "loop"}, "nonzero"),
    "number of documents": ({"mask_documents": True, "eod": 0, "precision": "bf16"}, {"attention": "flash"}, "nonzero"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_makes_the_host_wait_is_refused_by_name(monkeypatch, reason):
    """The recorder refuses it, so the reason is a true one; with it gone nothing stands against a graph."""
    fields, kernels, operation = REFUSED[reason]
    chosen = {"attention": "sdpa", "experts": "grouped", **kernels}
    cfg = split(fields)[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert reason in str(obstacle(cfg, CUDA, "none", chosen["attention"], chosen["experts"]))
    assert obstacle(split({"n_experts": 0})[0], CUDA, "none", "flash", "loop") is None
    stand_in(monkeypatch)
    optional_packages.flash_attn(monkeypatch)
    with pytest.raises(Waits, match=operation):
        take_steps(state_of(fields, **kernels), 5)


@pytest.mark.parametrize(
    ("fields", "device", "parallel", "capability", "reason"),
    [
        ({}, "cuda", "none", (8, 0), None),
        (EXPERTS, "cuda", "none", (9, 0), None),
        (EXPERTS, "cuda", "none", (8, 0), "before Hopper"),
        ({}, "cuda", "ddp", (9, 0), "parallel=ddp"),
        ({}, "cpu", "none", (9, 0), "needs a CUDA device, not cpu"),
    ],
)
def test_where_a_step_can_be_a_graph(monkeypatch, fields, device, parallel, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    stands = obstacle(split(fields)[0], torch.device(device), parallel, "sdpa", "grouped")
    assert stands is None if reason is None else reason in str(stands)


def test_what_is_asked_for_and_cannot_be_is_an_error_and_auto_goes_without():
    cfg = split({})[0]
    with pytest.raises(ValueError, match="cuda_graph=true is not possible: it needs a CUDA device, not cpu; use auto"):
        resolve(cfg, RuntimeConfig(device="cpu", cuda_graph=True))
    auto = resolve(cfg, RuntimeConfig(device="cpu", cuda_graph="auto"))
    assert not auto.cuda_graph and "CUDA device" in auto.kernel_reasons["cuda_graph"]
    plain = resolve(cfg, RuntimeConfig(device="cpu"))
    assert not plain.cuda_graph and "cuda_graph" not in plain.kernel_reasons


class FakeCuda:
    """Of `torch.cuda` what capturing calls, with PyTorch's own signatures: no device, a list of what was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: Exception | None = None):
        self.done: list[str] = []
        self.end = end
        self.takes = inspect.signature(torch.cuda.graph.__init__)
        stream = SimpleNamespace(name="side", wait_stream=lambda other: self.done.append("side waits"))
        default = SimpleNamespace(name="default", wait_stream=lambda other: self.done.append("default waits"))
        graph = SimpleNamespace(replay=lambda: self.done.append("replay"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "graph", self.captured)

    @contextmanager
    def on(self, stream: Any):
        self.done.append(f"on {stream.name}")
        yield
        self.done.append(f"off {stream.name}")

    @contextmanager
    def captured(self, *arguments: Any, **options: Any):
        given = self.takes.bind(None, *arguments, **options).arguments
        assert given["stream"].name == "side" and given["capture_error_mode"] == "thread_local"
        self.done.append("capture")
        try:
            yield
        finally:
            if self.end:
                raise self.end
        self.done.append("captured")


def test_a_step_is_warmed_up_and_captured_on_one_stream(monkeypatch):
    fake = FakeCuda(monkeypatch)
    capture, row = CudaCapture(CUDA), torch.zeros(3)
    assert capture.warm_up(lambda: row) is row
    assert fake.done == ["side waits", "on side", "off side", "default waits"]
    fake.done.clear()
    replay = capture.capture(lambda: row)
    assert fake.done == ["on default", "capture", "captured", "off default"]
    kept = replay()
    row.fill_(1)
    assert fake.done[-1] == "replay" and kept.equal(torch.zeros(3)) and replay().equal(torch.ones(3))


@pytest.mark.parametrize("end", [None, RuntimeError("capture invalidated")])
def test_what_broke_a_capture_is_said_and_memory_is_told_apart(monkeypatch, end):
    FakeCuda(monkeypatch, end)

    def fails() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(RuntimeError, match=r"cannot capture .* cuda_graph=false: CUDA out of memory") as error:
        CudaCapture(CUDA).capture(fails)
    assert is_out_of_memory(error.value)


def test_numbers_of_the_host_are_seen(monkeypatch):
    """What once waited for the stream in every micro-batch: `entropy.new_tensor(nan)`."""
    stand_in(monkeypatch)
    state = state_of({})
    plain = state.backward

    def waiting(batch):
        entropy, balance = plain(batch)
        return entropy, entropy.new_tensor(float("nan")) + balance

    monkeypatch.setattr(state, "backward", waiting)
    with pytest.raises(Waits, match="lift_fresh"):
        take_steps(state, 5)


def test_a_stack_ends_the_graphs_of_those_that_join_it(monkeypatch):
    """Their weights become views of the stack's: a graph would go on with those of before."""
    recorders = stand_in(monkeypatch)
    plain, captured = ([take_steps(state_of({"seed": seed}, on), 5) for seed in range(2)] for on in (False, True))
    for runs in (plain, captured):
        stacks = _Stacks(2)
        for step in (5, 6):
            for run in runs:
                run.batch = Batch.of(counting(step))
            stacks.take_steps(runs, [Clock(), Clock()])
            for run in runs:
                run.take_step(run.batch)
        take_steps(runs[0], 6)
    assert len(recorders) == 3, "each alone, then of the first with the weights that it has in the stack"
    assert [run.captured_steps for run in captured] == [2 + 3, 2]
    for one, other in zip(plain, captured, strict=True):
        assert all(a.equal(b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
