"""Runs that train as one stacked model: each as if it stood alone."""

import dataclasses
import functools
import time

import numpy as np
import pytest
import torch
from reference import ZOO
from support.cpu_graph import stand_in

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.role import ALONE, can_stack, fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.model.decoder import Decoder
from sparsedepth.train import stack
from sparsedepth.train.loop import Interrupted, TrainingResult, TrainingState, train, training
from sparsedepth.train.runtime import resolve
from sparsedepth.train.stack import Clock, StackedStep, _Stacks, train_together

TINY = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "batch_tokens": 32}
TINY: dict = {**TINY, "train_tokens": 32 * 40, "lr": 3e-3, "log_every": 1, "precision": "fp32"}

RUNS: list[dict] = [
    {"seed": 0},
    {"seed": 1, "lr": 1e-2, "weight_decay": 1.0, "init": "scaled", "warmup_frac": 0.5},
    {"seed": 2, "depth_scale": "lns", "init_std": 0.03, "beta2": 0.99, "grad_clip": 0.1, "weight_decay_on": "all"},
]
PARAMETRISED: dict = {"parametrisation": "completep", "base_width": 8, "base_depth": 1, "train_tokens": 32 * 6}


def config(**fields) -> RunConfig:
    return build(RunConfig, {**TINY, **fields}, "test")


def batch(cfg: RunConfig, step: int) -> Sequences:
    """Sequences that count upwards modulo 12, a function of seed and step."""
    start = np.random.default_rng((cfg.seed, step)).integers(0, 12, (4, 1))
    return next_tokens((start + np.arange(9)) % 12)


def steps_of(cfg: RunConfig, model: Decoder, runtime: dict | None = None, **options):
    there = dataclasses.replace(resolve(cfg, RuntimeConfig(device="cpu")), **(runtime or {}))
    return training(model, cfg, there, functools.partial(batch, cfg), **options)


def alone(cfg: RunConfig, **runtime) -> tuple[Decoder, TrainingResult]:
    model = Decoder(cfg, cfg.seed)
    there = dataclasses.replace(resolve(cfg, RuntimeConfig(device="cpu")), **runtime)
    return model, train(model, cfg, there, functools.partial(batch, cfg))


def stacked(configs: list[RunConfig], options: list[dict] | None = None, **runtime) -> tuple[list[Decoder], list]:
    models = [Decoder(cfg, cfg.seed) for cfg in configs]
    each = options or [{} for _ in configs]
    runs = [steps_of(cfg, model, runtime, **own) for cfg, model, own in zip(configs, models, each, strict=True)]
    return models, train_together(runs, [Clock() for _ in configs])


def losses(trained: TrainingResult) -> list[float]:
    return [row["train_loss"] for row in trained.curves]


def assert_as_alone(cfg: RunConfig, model: Decoder, result: TrainingResult) -> None:
    own_model, own = alone(cfg)
    assert losses(result) == pytest.approx(losses(own), abs=1e-6) and len(losses(own)) == cfg.n_steps
    for name, weight in own_model.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight, atol=2e-5, rtol=1e-4, msg=name)


PERI = {"norm": "peri", "residual_gate": "skipinit", "qk_norm": True, "qk_norm_over": "all"}
SHAPES: list[dict] = [
    {},
    {"n_kv_heads": 1, "qk_norm": True, "tie_embeddings": True, "norm": "sandwich"},
    {"norm": "deepnorm", "norm_kind": "group", "norm_groups": 2, "sliding_window": 4},
    {**PERI, "mask_documents": True, "eod": 0},
    {"norm": "mix", "mix_frac": 0.5, "residual_gate": "layerscale", "gate_init": 0.1},
    {"residual_scalars": True, "value_residual": True, "n_kv_heads": 1, "rope_theta": 100.0, "norm_eps": 1e-3},
    {"norm": "keel", "gpas": True, "activation": "relu2", "d_ff": 24},
    {"n_experts": 4, "top_k": 2, "balance_loss": 0.3, "router_z_loss": 0.1},
    {"n_experts": 3, "top_k": 1, "d_expert": 8, "n_shared_experts": 2, "n_dense_layers": 1, "renormalise_gates": False},
]

TRIED = {name for fields in (TINY, PARAMETRISED, *RUNS, *SHAPES) for name in fields}
STACKED = fields_where(ModelConfig, lambda role: not role.touches(*ALONE))
SHAPES += [fields for fields in ZOO.values() if set(fields) - TRIED <= set(STACKED) and set(fields) - TRIED]
"""A new field of the zoo is tried, too, unless its role says that runs with it train alone."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stack_trains_each_run_as_it_trains_alone(shape):
    """To 1e-6 in every loss, over 40 steps of the default shape, and over 6 with each other kind of weight."""
    length = {} if not shape else {"train_tokens": shape.get("batch_tokens", 32) * 6}
    configs = [config(**shape, **length, **own) for own in RUNS]
    models, results = stacked(configs)
    for cfg, model, result in zip(configs, models, results, strict=True):
        assert_as_alone(cfg, model, result)


@pytest.mark.parametrize(
    "places", [("none", "lns"), *((place, place) for place in ("after_branch", "before_norm", "after_residual"))]
)
def test_a_stack_trains_each_run_with_the_bits_it_has_alone(places):
    configs = [config(train_tokens=32 * 6, seed=seed, depth_scale=place) for seed, place in enumerate(places)]
    assert can_stack(*configs)
    models, _ = stacked(configs)
    for cfg, model in zip(configs, models, strict=True):
        own_model, _ = alone(cfg)
        for name, weight in own_model.named_parameters():
            assert torch.equal(model.get_parameter(name), weight), name


@pytest.mark.parametrize("shape", [{}, PARAMETRISED, *SHAPES[1:]])
def test_a_captured_stack_takes_the_steps_of_an_uncaptured_one(monkeypatch, shape):
    """To the last bit, with other numbers of AdamW, clipping and the schedule in each run; from the fourth step on."""
    recorders = stand_in(monkeypatch)
    length = {"train_tokens": shape.get("batch_tokens", 32) * 7}
    configs = [config(**{**length, **shape, **own}) for own in (RUNS if "parametrisation" not in shape else RUNS[::2])]
    plain, captured = stacked(configs), stacked(configs, cuda_graph=True)
    for one, other in zip(plain[0], captured[0], strict=True):
        assert all(weight.equal(other.get_parameter(name)) for name, weight in one.named_parameters())
    rows = [[{**row, "tokens_per_second": 0} for run in runs for row in run.curves] for _, runs in (plain, captured)]
    assert rows[0] == rows[1] and len(recorders) == 1
    for runs, replays in ((plain[1], 0), (captured[1], configs[0].n_steps - 3)):
        assert {(run.captured_steps, run.n_stacked) for run in runs} == {(replays, len(configs))}


def test_a_captured_stack_goes_on_in_parts_alone_and_where_gradients_are_noted(monkeypatch):
    """One run notes gradients every third step, another leaves after 7, the third after 14: each group that remains is
    captured anew, and ends with the bits that it has uncaptured."""

    def leave(at: int, step: int, curves: list) -> None:
        if step == at:
            raise ValueError("leaves")

    recorders = stand_in(monkeypatch)
    configs = [config(train_tokens=32 * 23, seed=seed) for seed in range(3)]
    configs[0] = config(train_tokens=32 * 23, observe_every=3, measures=["loss", "gradients"])
    options: list[dict] = [{}, {"progress": functools.partial(leave, 7)}, {"progress": functools.partial(leave, 14)}]
    (models, plain), (others, captured) = (stacked(configs, options, cuda_graph=on) for on in (False, True))
    for one, other in zip(models, others, strict=True):
        assert all(weight.equal(other.get_parameter(name)) for name, weight in one.named_parameters())
    assert plain[0].observations == captured[0].observations and len(plain[0].observations) == 9 * 2
    assert (plain[0].captured_steps, captured[0].captured_steps) == (0, 1 + 2 + 2) and len(recorders) == 3


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[7]])
def test_a_compiled_stack_is_as_an_eager_one(shape):
    configs = [config(**{"train_tokens": 32 * 6, **shape, **own}) for own in RUNS]
    for eager, compiled in zip(stacked(configs)[1], stacked(configs, compile=True)[1], strict=True):
        assert losses(compiled) == pytest.approx(losses(eager), abs=1e-5)


def test_a_stack_with_a_run_that_cannot_be_captured_is_not(monkeypatch):
    recorders = stand_in(monkeypatch)
    configs = [config(train_tokens=32 * 6), config(train_tokens=32 * 6, optimizer="muon", seed=1)]
    models = [Decoder(cfg, cfg.seed) for cfg in configs]
    runs = [
        steps_of(cfg, model, {"cuda_graph": cfg.optimizer == "adamw"})
        for cfg, model in zip(configs, models, strict=True)
    ]
    assert all(run.captured_steps == 0 for run in train_together(runs, [Clock(), Clock()])) and not recorders


def test_a_stack_follows_the_rules_of_a_parametrisation():
    """Its branches, logits and optimizers: as each of two alone, over 6 steps."""
    configs = [config(**PARAMETRISED, seed=seed) for seed in (0, 1)]
    assert can_stack(*configs)
    for cfg, result in zip(configs, stacked(configs)[1], strict=True):
        assert losses(result) == pytest.approx(losses(alone(cfg)[1]), abs=1e-6)


def test_every_field_that_may_be_in_a_stack_was_tried_in_one():
    """A new field of the model must be: or else its role says that runs with it train alone."""
    assert set(STACKED) - TRIED - {name for fields in SHAPES for name in fields} == {"allow"}


def test_a_trial_that_diverges_or_fails_leaves_the_others_as_they_are():
    """The second diverges, the third raises in its tenth step, the fourth is asked to stop."""
    configs = [config(train_tokens=32 * 20, seed=seed, grad_clip=0.0) for seed in range(4)]
    configs[1] = config(train_tokens=32 * 20, seed=1, grad_clip=0.0, lr=1e4, warmup_frac=0.0)

    def fail(step: int, loss: float | None) -> None:
        if step == 10:
            raise ValueError("the third")

    calls = iter(range(1, 100))
    options: list[dict] = [{}, {}, {"progress": fail}, {"stop": lambda: next(calls) == 12}]
    _, results = stacked(configs, options)
    assert results[1].outcome == "diverged" and results[1].steps == alone(configs[1])[1].steps < 20
    assert str(results[2]) == "the third" and isinstance(results[3], Interrupted)
    assert losses(results[0]) == pytest.approx(losses(alone(configs[0])[1]), abs=1e-6)


def test_trials_that_were_stopped_at_different_steps_go_on_together(tmp_path):
    """Each from its own checkpoint, to the weights that it has alone."""
    configs = [config(train_tokens=32 * 9, seed=seed) for seed in range(3)]
    for steps, cfg in ((3, configs[0]), (7, configs[1])):
        calls = iter(range(1, 100))
        stop = {"checkpoints": tmp_path / str(cfg.seed), "stop": lambda calls=calls, steps=steps: next(calls) == steps}
        assert isinstance(stacked([cfg, configs[2]], [stop, {}])[1][0], Interrupted)
    models, results = stacked(configs, [{"checkpoints": tmp_path / str(cfg.seed)} for cfg in configs])
    for cfg, model, result in zip(configs, models, results, strict=True):
        assert_as_alone(cfg, model, result)


def test_micro_batches_of_a_stack_take_the_same_steps():
    configs = [config(train_tokens=32 * 4, seed=seed) for seed in range(2)]
    for cfg, result in zip(configs, stacked(configs, micro_batch=3)[1], strict=True):
        assert losses(result) == pytest.approx(losses(alone(cfg)[1]), rel=1e-5)


@pytest.mark.parametrize(("limit", "sizes"), [(2, [4, 2]), (1, [4, 2, 1])])
def test_a_stack_that_does_not_fit_is_halved(monkeypatch, limit, sizes):
    tried: list[int] = []

    def limited(step, parts):
        tried.append(len(step.runs))
        if len(step.runs) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return update(step, parts)

    update = StackedStep.update
    monkeypatch.setattr(StackedStep, "update", limited)
    configs = [config(train_tokens=32 * 3, seed=seed) for seed in range(4)]
    for cfg, result in zip(configs, stacked(configs)[1], strict=True):
        assert losses(result) == pytest.approx(losses(alone(cfg)[1]), abs=1e-6)
    assert list(dict.fromkeys([*tried, 1] if limit == 1 else tried)) == sizes


def test_an_error_of_the_stack_itself_ends_all(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(StackedStep, "update", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        stacked([config(seed=0), config(seed=1)])


def test_a_shortage_between_the_updates_of_two_runs_ends_all(monkeypatch):
    """Taken again, the step of the first would count twice; in processes of their own all go on from checkpoints."""
    apply = TrainingState.apply

    def short(run, *row):
        if run.config.seed == 1 and run.step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return apply(run, *row)

    monkeypatch.setattr(TrainingState, "apply", short)
    with pytest.raises(torch.OutOfMemoryError):
        stacked([config(seed=seed) for seed in range(3)])


def test_a_stack_that_is_halved_between_two_takes_no_step_twice(monkeypatch):
    """Of two stacks of two the second no longer fits in the third step: its runs then train alone."""
    update = StackedStep.update

    def limited(step, parts):
        if step.runs[0].config.seed == 2 and step.runs[0].step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return update(step, parts)

    monkeypatch.setattr(StackedStep, "update", limited)
    monkeypatch.setattr(stack, "_Stacks", lambda size: _Stacks(2))
    configs = [config(train_tokens=32 * 6, seed=seed) for seed in range(4)]
    models, results = stacked(configs)
    for cfg, model, result in zip(configs, models, results, strict=True):
        assert_as_alone(cfg, model, result)
        assert result.n_stacked == 2


@pytest.mark.parametrize(
    ("fields", "can"),
    [
        ({"seed": 1, "lr": 2e-3, "weight_decay": 0.0, "beta2": 0.99, "init": "depth_scaled"}, True),
        ({"depth_scale": "lns"}, True),
        ({"n_layers": 4}, False),
        ({"train_tokens": 32 * 50}, False),
        ({"rope_theta": 500.0}, False),
        ({"norm_eps": 1e-5}, False),
        ({"depth_scale": "after_ffn"}, False),
    ],
)
def test_what_can_stack(fields, can):
    assert can_stack(config(), config(**fields)) is can
    assert can_stack(config(**fields), config()) is can


def test_two_places_of_depth_scale_do_not_stack_nor_two_weights_of_the_balance_loss():
    assert not can_stack(config(), config(depth_scale="lns"), config(depth_scale="after_ffn"))
    routed = {"n_experts": 4, "top_k": 2}
    assert can_stack(config(**routed), config(**routed, seed=1))
    assert not can_stack(config(**routed), config(**routed, balance_loss=0.1))
    assert can_stack(config(attention_residuals=2), config(attention_residuals=2, seed=1))
    assert not can_stack(config(), config(attention_residuals=2))


def test_the_share_of_each_run_adds_up_to_the_time_of_all():
    """Two that need 0.02 s each."""
    clocks, began = [Clock(), Clock()], time.perf_counter()

    def waits():
        time.sleep(0.02)
        yield from ()

    train_together([waits(), waits()], clocks)
    shares = [clock() for clock in clocks]
    assert all(share >= 0.02 for share in shares) and sum(shares) <= time.perf_counter() - began
