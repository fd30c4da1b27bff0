"""Training: it learns, resumes bit for bit, and records divergence as a result."""

import dataclasses
import math
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.counting import counting
from torch._dynamo.testing import CompileCounter

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.model.decoder import Decoder
from sparsedepth.train import checkpoint
from sparsedepth.train.checkpoint_files import remove_checkpoints
from sparsedepth.train.devices import ALONE
from sparsedepth.train.feed import Batch
from sparsedepth.train.loop import Interrupted, TrainingState, divergence, losses, train
from sparsedepth.train.optimizer import make_optimizer
from sparsedepth.train.runtime import choose_attention_backends, compile_blocks, resolve

TINY = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "batch_tokens": 32}
CPU = RuntimeConfig(device="cpu")
TINY: dict = {**TINY, "train_tokens": 32 * 25, "lr": 3e-3, "log_every": 5, "observe_every": 10, "precision": "fp32"}


def config(**fields) -> RunConfig:
    return build(RunConfig, {**TINY, **fields}, "test")


def run(cfg: RunConfig, **options):
    model = Decoder(cfg, cfg.seed)
    return model, train(model, cfg, resolve(cfg, CPU), counting, **options)


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def timeless(trained) -> list[dict]:
    return [{**row, "tokens_per_second": 0} for row in trained.curves]


@pytest.mark.parametrize(
    "fields", [{}, {"n_experts": 4, "top_k": 2}, {"depth_scale": "lns", "n_kv_heads": 1}, {"optimizer": "muon"}]
)
def test_the_loss_begins_at_guessing_and_falls_below_half_of_it(fields):
    _, trained = run(config(train_tokens=32 * 100, lr=1e-2, **fields))
    assert trained.outcome == "ok" and trained.steps == 100
    assert trained.curves[0]["train_loss"] == pytest.approx(math.log(12), rel=0.02)
    assert trained.curves[-1]["train_loss"] < 0.5 * math.log(12)
    assert (trained.curves[-1]["balance_loss"] is None) == ("n_experts" not in fields)


def test_curves_hold_the_first_every_sixth_and_the_last_step_and_the_last_is_not_observed():
    observe = lambda model, step: [{"step": step}]  # noqa: E731
    _, trained = run(config(train_tokens=32 * 20, log_every=6), observe=observe)
    assert [row["step"] for row in trained.curves] == [1, 6, 12, 18, 20] and trained.curves[-1]["tokens"] == 20 * 32
    assert trained.observations == [{"step": 0}, {"step": 10}]


def test_steps_are_those_of_a_plain_loop_of_pytorch():
    """Warm-up over 2 of 8 steps, a cosine to a tenth; gradients clipped to a norm of 0.05, below every one of these."""
    fields = {"train_tokens": 32 * 8, "lr": 0.01, "warmup_frac": 0.25, "min_lr_frac": 0.1, "log_every": 1}
    cfg = config(**fields, beta1=0.8, beta2=0.97, grad_clip=0.05, weight_decay=0.5, weight_decay_on="matrices")
    trained_model, trained = run(cfg)
    rates = [0.005, 0.01, *(0.01 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 5))) for k in range(6))]
    assert [row["lr"] for row in trained.curves] == pytest.approx(rates)
    model = Decoder(cfg, cfg.seed)
    kinds = [[p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False)]
    groups = [{"params": params, "weight_decay": decay} for params, decay in zip(kinds, (0.5, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.97), eps=cfg.adam_eps)
    norms = []
    for step, rate in enumerate(rates):
        batch = counting(step)
        logits_BTV = model(torch.from_numpy(batch.inputs))
        F.cross_entropy(logits_BTV.flatten(0, 1), torch.from_numpy(batch.targets).flatten()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.05 and [row["grad_norm"] for row in trained.curves] == pytest.approx(norms, rel=1e-4)
    for name, weight in weights(trained_model).items():
        torch.testing.assert_close(weight, model.get_parameter(name), atol=1e-5, rtol=1e-4, msg=name)


EXPERTS = {"n_experts": 4, "top_k": 2, "attention_residuals": 2}


@pytest.mark.parametrize(
    ("fields", "kill_step"), [*(({}, step) for step in (1, 5, 24)), (EXPERTS, 12), ({"optimizer": "muon"}, 5)]
)
def test_resumed_run_ends_bit_equal(tmp_path, kill_step, fields):
    cfg = config(**fields)
    whole_model, whole = run(cfg)
    calls = iter(range(1, 1000))
    with pytest.raises(Interrupted):
        run(cfg, checkpoints=tmp_path, stop=lambda: next(calls) == kill_step)
    model, resumed = run(cfg, checkpoints=tmp_path)
    for name, weight in weights(whole_model).items():
        assert torch.equal(weight, model.get_parameter(name)), name
    assert timeless(resumed) == timeless(whole)


def test_a_run_goes_on_in_its_precision_with_the_speed_of_the_steps_since(tmp_path):
    calls, cfg = iter(range(1, 1000)), config(precision="auto")
    with pytest.raises(Interrupted):
        run(cfg, checkpoints=tmp_path, stop=lambda: next(calls) == 12)
    bf16 = dataclasses.replace(resolve(cfg, CPU), precision="bf16")
    state = TrainingState(Decoder(cfg), cfg, bf16, ALONE)
    with pytest.raises(ValueError, match=r"is bf16 on cpu, but the run's first 12 steps were computed in fp32"):
        state.resume(tmp_path)
    state = TrainingState(Decoder(cfg), cfg, resolve(cfg, CPU), ALONE)
    state.resume(tmp_path)
    assert (state.step, state.logged_step) == (12, 12)


def test_a_run_goes_on_with_the_stream_that_it_began_with(tmp_path):
    calls, cfg = iter(range(1, 1000)), config(precision="bf16")
    with pytest.raises(Interrupted):
        run(cfg, checkpoints=tmp_path, stop=lambda: next(calls) == 3)
    narrow = resolve(cfg, CPU.model_copy(update={"stream": "bf16"}))
    with pytest.raises(ValueError, match=r"is bf16, with the stream on cpu, but .* 3 steps were computed in bf16; "):
        TrainingState(Decoder(cfg), cfg, narrow, ALONE).resume(tmp_path)


def test_a_run_goes_on_in_the_data_that_it_began_with(tmp_path):
    calls, cfg = iter(range(1, 1000)), config()
    with pytest.raises(Interrupted):
        run(cfg, checkpoints=tmp_path, data_hash="a", stop=lambda: next(calls) == 12)
    with pytest.raises(ValueError, match=r"first 12 steps read data a, and now it is b; restore the corpus, or delete"):
        run(cfg, checkpoints=tmp_path, data_hash="b")
    assert run(cfg, checkpoints=tmp_path, data_hash="a")[1].steps == cfg.n_steps


def test_a_checkpoint_that_is_written_aside_is_of_the_step_it_was_taken_at(tmp_path):
    """Training goes on, in place, while a thread writes: the copy does not."""
    cfg = config()
    runtime = dataclasses.replace(resolve(cfg, CPU), saves_in_background=True, checkpoint_seconds=0.0)
    whole_model, _ = run(cfg)
    calls = iter(range(1, 1000))
    with pytest.raises(Interrupted):
        stop = {"checkpoints": tmp_path, "stop": lambda: next(calls) == 7}
        train(Decoder(cfg, cfg.seed), cfg, runtime, counting, **stop)
    (tmp_path / "step-000000007.json").unlink()  # of the stop: what was written aside is continued from
    assert [path.name for path in tmp_path.glob("step-*.json")]
    model = Decoder(cfg, cfg.seed)
    train(model, cfg, runtime, counting, checkpoints=tmp_path)
    for name, weight in weights(whole_model).items():
        assert torch.equal(weight, model.get_parameter(name)), name


def test_what_is_written_aside_is_a_copy():
    """The thread of the test above may well have written before the next step."""
    model = Decoder(config())
    optimizer = make_optimizer(model, config())
    before, tensors = weights(model), checkpoint.snapshot(model, optimizer, copy=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(tensors[f"model.{name}"], weight) for name, weight in before.items())


def test_a_checkpoint_is_written_for_all_who_may_read_the_folder_and_parts_of_others_go(tmp_path):
    for name in ("step-000000001.safetensors", ".step-000000003.safetensors.tmp-0a", ".step-000000001.json.tmp-0b"):
        (tmp_path / name).touch()
    (tmp_path / ".tmpA1b2C3").write_text("of `save_file` in a process that was killed")
    run(config(), checkpoints=tmp_path)
    (tmp_path / "of this user").touch()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-000000025.safetensors", "step-000000025.json", "of this user"}
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    remove_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["of this user"]


def test_what_goes_wrong_in_writing_aside_ends_the_run(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    runtime = dataclasses.replace(resolve(config(), CPU), saves_in_background=True, checkpoint_seconds=0.0)
    with pytest.raises(OSError, match="No space"):
        train(Decoder(config()), config(), runtime, counting, checkpoints=tmp_path)


def test_checkpoints_take_at_most_a_twentieth_of_the_time():
    cfg = config()
    state = TrainingState(Decoder(cfg), cfg, resolve(cfg, CPU), ALONE)
    ago = time.perf_counter() - 50
    assert state.is_save_due(ago)  # 30 seconds, where saving takes no time
    state.save_seconds = 4.0
    assert not state.is_save_due(ago) and state.is_save_due(ago - 40)
    state.save_seconds, state.writer_seconds = 1.0, 3.0  # a thread's time may have held up training
    assert not state.is_save_due(ago) and state.is_save_due(ago - 40)
    state.save_seconds = state.writer_seconds = 0.0
    assert not state.is_save_due(ago + 40)  # 10 seconds


@pytest.mark.parametrize(
    ("wanted", "n_steps", "on_gpu", "expected"),
    [("auto", 500, True, True), ("auto", 499, True, False), ("auto", 500, False, False), (True, 1, False, True)],
)
def test_what_is_compiled(wanted, n_steps, on_gpu, expected):
    assert RuntimeConfig(compile=wanted).compiles(n_steps, on_gpu) is expected


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 4}, {"mask_documents": True, "eod": 0}])
def test_masked_attention_is_kept_from_cudnn(fields):
    choose_attention_backends(config(**fields))
    assert torch.backends.cuda.cudnn_sdp_enabled() is not bool(fields)
    choose_attention_backends(config())


def test_a_finished_run_is_not_trained_again(tmp_path):
    run(config(), checkpoints=tmp_path)
    model = Decoder(config())
    again = train(
        model, config(), resolve(config(), CPU), lambda step: pytest.fail("took a step"), checkpoints=tmp_path
    )
    assert again.steps == 25 and again.curves[-1]["step"] == 25


def commit(folder, *steps):
    model = Decoder(config())
    optimizer = make_optimizer(model, config())
    for step in steps:
        position = checkpoint.Position(step=step, curves=[], observations=[])
        checkpoint.commit(folder, checkpoint.snapshot(model, optimizer), position)
    return model, optimizer


def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    model, optimizer = commit(tmp_path, 1, 2, 3)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["step-000000002.json", "step-000000003.json"]
    newest = tmp_path / "step-000000003.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    position = checkpoint.read(tmp_path, model, optimizer)
    assert position is not None and position.step == 2
    (tmp_path / "step-000000002.json").write_text("{")
    assert checkpoint.read(tmp_path, model, optimizer) is None
    remove_checkpoints(tmp_path)
    assert not tmp_path.exists()


def test_divergence_is_a_result_that_does_not_depend_on_when_it_was_found_out(tmp_path):
    """With a checkpoint due after every step each is judged at once; without, only at the rows of the curves."""
    cfg = config(lr=1e4, grad_clip=0.0, warmup_frac=0.0, train_tokens=32 * 60)
    whole = run(cfg)[1]
    runtime = dataclasses.replace(resolve(cfg, CPU), checkpoint_seconds=0.0)
    eager = train(Decoder(cfg, cfg.seed), cfg, runtime, counting, checkpoints=tmp_path)
    assert whole.outcome == "diverged" and whole.diverged_cause and whole.diverged_step is not None
    assert 1 < whole.diverged_step == whole.steps < 60
    assert (whole.steps, whole.diverged_cause) == (eager.steps, eager.diverged_cause)
    assert timeless(whole) == timeless(eager)


@pytest.mark.parametrize(
    ("loss", "grad_norm", "first", "logged", "cause"),
    [
        (2.0, 1.0, 2.0, 2.0, None),
        (4.0, 1.0, 2.0, 9.0, None),
        (9.0, 1.0, 2.0, 4.0, None),
        (4.1, 1.0, 2.0, 9.0, "loss 4.1 is more than 2 times the first step's 2, as at the last logged step"),
        (math.nan, 1.0, 2.0, 2.0, "loss is nan"),
        (math.inf, 1.0, None, None, "loss is inf"),
        (2.0, math.inf, 2.0, 2.0, "gradient norm is inf"),
    ],
)
def test_what_counts_as_divergence(loss, grad_norm, first, logged, cause):
    assert divergence(loss, grad_norm, first, logged, 2.0) == cause


@pytest.mark.parametrize(("unlearned", "steps"), [({93}, None), ({94}, None), ({*range(92, 120)}, 96)])
def test_a_spike_of_one_step_is_no_divergence(unlearned, steps):
    """Rows of the curves are at every fifth step, so that batch 94 has one. A model that has learned to count has more
    loss on sequences that do not count than at its first step."""

    def batch(step: int) -> Sequences:
        return next_tokens(np.random.default_rng(step).integers(0, 12, (4, 9))) if step in unlearned else counting(step)

    cfg = config(lr=1e-2, train_tokens=32 * 120, divergence_factor=1.2)
    trained = train(Decoder(cfg, cfg.seed), cfg, resolve(cfg, CPU), batch)
    assert (trained.outcome, trained.diverged_step) == (("diverged", steps) if steps else ("ok", None))
    loss = {row["step"]: row["train_loss"] for row in trained.curves}
    assert (loss[95] > 1.2 * loss[1]) == (94 in unlearned)


def test_unknown_device_is_a_users_error():
    with pytest.raises(ValueError, match="device='tpu7'"):
        resolve(config(), RuntimeConfig(device="tpu7"))


def partly(step: int) -> Sequences:
    """Sequences of which 1, 2, 4 and 8 positions count."""
    whole = counting(step)
    counts_B1 = np.array([[1], [2], [4], [8]])
    return Sequences(inputs=whole.inputs, targets=np.where(np.arange(8) < counts_B1, whole.targets, IGNORED))


def test_steps_are_over_the_positions_that_count_however_the_batch_is_cut():
    cfg = config(log_every=1)
    batch = partly(0)
    logits_BTV = Decoder(cfg)(torch.from_numpy(batch.inputs))
    by_hand = F.cross_entropy(logits_BTV.flatten(0, 1), torch.from_numpy(batch.targets).flatten()).item()
    curves = {}
    for size in (None, 1, 3, 100):  # three of four leave a last micro-batch of one
        runtime = dataclasses.replace(resolve(cfg, CPU), micro_batch=size)
        rows = train(Decoder(cfg), cfg, runtime, partly).curves
        curves[size] = [row[name] for name in ("train_loss", "grad_norm") for row in rows]
        assert curves[size] == pytest.approx(curves[None], rel=1e-4)
    assert curves[None][0] == pytest.approx(by_hand, rel=1e-5)


def test_the_loss_weighs_the_router_losses():
    """A zero router spreads evenly over 4 experts: balance 1, z log(4)^2; the weights are 0.5 and 0.25."""
    cfg = config(n_experts=4, top_k=1, balance_loss=0.5, router_z_loss=0.25, renormalise_gates=False)
    model, (batch,) = Decoder(cfg), Batch.of(counting(0)).parts(4)
    for name, weight in model.named_parameters():
        if "router" in name:
            torch.nn.init.zeros_(weight)
    loss, entropy, balance = losses(model, batch[0], batch[1], cfg)
    assert balance.item() == pytest.approx(1)
    assert (loss - entropy).item() == pytest.approx(0.5 + 0.25 * math.log(4) ** 2, rel=1e-5)


def test_micro_batches_average_their_own_balance_losses():
    """A product of two means over a batch is no mean of products: the rest of the loss is the same."""
    cfg = config(n_experts=4, top_k=2, balance_loss=0.0, log_every=1)
    pieces = train(Decoder(cfg), cfg, dataclasses.replace(resolve(cfg, CPU), micro_batch=1), counting).curves
    whole = run(cfg)[1].curves
    assert [row["train_loss"] for row in pieces] == pytest.approx([row["train_loss"] for row in whole], rel=1e-5)
    parts = Batch.of(counting(0)).parts(1)
    own = [losses(Decoder(cfg), inputs_1T, targets_1T, cfg)[2].item() for inputs_1T, targets_1T, _ in parts]
    assert pieces[0]["balance_loss"] == pytest.approx(np.mean(own), rel=1e-5)
    assert pieces[0]["balance_loss"] > whole[0]["balance_loss"]


@pytest.mark.parametrize("fields", [{}, {"n_experts": 4, "top_k": 2}])
def test_no_step_waits_for_the_device(monkeypatch, fields):
    """Nothing in a step brings a number to the host; on a GPU `test_gpu.py` has CUDA itself watch."""
    cfg = config(log_every=1000, observe_every=1000, **fields)
    taken: list[int] = []
    with monkeypatch.context() as patch:

        def refuse(self, *arguments, **options):
            raise AssertionError("the host waits for a number")

        def batch(step: int) -> Sequences:
            if step == 2:  # the first step is logged, and may wait
                for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy"):
                    patch.setattr(torch.Tensor, name, refuse)
            return counting(step)

        with pytest.raises(AssertionError, match="the host waits"):  # at the last step, which is logged
            train(Decoder(cfg), cfg, resolve(cfg, CPU), batch, progress=lambda step, curves: taken.append(step))
    assert taken == list(range(1, 25))


def test_a_block_with_experts_is_one_graph_in_bf16():
    """Nothing in it is left to Python: not what the router's losses are collected in, nor the grouped product."""
    cfg = config(n_layers=4, n_experts=4, top_k=2, d_expert=16, d_model=32)
    model, plain, zeros_BT = Decoder(cfg).train(), Decoder(cfg).train(), torch.zeros(2, 8, dtype=torch.long)
    torch.compiler.reset()
    backend = CompileCounter()
    for block in model.blocks:
        block.compile(backend=backend, dynamic=False, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(losses(model, zeros_BT, zeros_BT, cfg), losses(plain, zeros_BT, zeros_BT, cfg))
    assert backend.frame_count == 1


def test_blocks_are_compiled_for_the_shapes_they_meet(monkeypatch):
    """Symbolic sizes, which a second shape in one process would get otherwise, are slower."""
    asked: list[dict] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: asked.append(options))
    compile_blocks(Decoder(config()))
    assert asked == [{"dynamic": False}] * 2
