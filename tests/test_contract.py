"""The contract of fast paths (`config.role`): every field, at another value than the default, acts on every path as on
the plain one, or is refused by its name.

The plain path: one run, eager, on the CPU, without interruption. The others: stacked beside the default and beside its
like, captured (by the stand-in), probed; and in the slow suite compiled, exported and read back, resumed."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from config.test_role import OTHER, ROLES, pair
from support.attention_weights import assert_weights_are_used
from support.cpu_graph import stand_in
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparsedepth.config.role import ALONE, BY_RUN, COMPUTED, RECORD, roles, unstackable
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig, graph_obstacle
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.exchange.architecture import TOLERANCE, architecture, random_documents
from sparsedepth.exchange.export import save_model
from sparsedepth.model.attention import attention_rows
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import probing, stream
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.run.publish import device_facts
from sparsedepth.train.loop import Interrupted, TrainingResult, losses, train, training
from sparsedepth.train.optimizer import learning_rate, make_optimizer
from sparsedepth.train.runtime import Runtime, resolve
from sparsedepth.train.stack import Clock, train_together

SMALL = {
    **{"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 48, "vocab_size": 264, "seq_len": 16, "batch_tokens": 64},
    **{"train_tokens": 64 * 5, "lr": 3e-3, "init_std": 0.1, "log_every": 1, "measures": ["loss"]},
}
VALUES = {
    **{"n_layers": 3, "d_model": 32, "seq_len": 8, "d_ff": 24, "batch_tokens": 32, "train_tokens": 64 * 6},
    **{"log_every": 2, "measures": ["gradients"], "chunk_len": 32, "warmup_tokens": 128, "sliding_window": 3},
    **{"grad_clip": 0.01, "attention_residuals": 2, "min_lr_frac": 0.5, "warmup_frac": 0.5, "gate_init": 0.3},
    **{"norm_eps": 1e-2, "adam_eps": 1e-3, "d_expert": 16},
}
"""Other values than those of tests/config/test_role.py, for the run above."""
LOADED = {"start_weights"}
"""What acts before training (tests/run/test_fine_tuning.py)."""
ACTING = [
    field for field in OTHER if ROLES[field].touches(*COMPUTED, *ALONE, *BY_RUN - {"data"}, "loss", "batch", "rounding")
]
RECORDS = "all that act nowhere"


def runs(field: str) -> tuple[RunConfig, RunConfig]:
    """Two that differ in a field, or in all that act nowhere."""
    if field != RECORDS:
        return pair(
            field, SMALL | ({"n_layers": 4} if field in ("mix_frac", "stream_skips") else {}), VALUES.get(field)
        )
    inert = [name for name, role in ROLES.items() if role.acts == frozenset()]
    return RunConfig(**SMALL), RunConfig(**SMALL, **{name: OTHER[name] for name in inert if name not in SMALL})


def batch(cfg: RunConfig, step: int) -> Sequences:
    """Sequences that count upwards modulo 12, with 256 for 11 (it ends a document): a function of seed and step."""
    start = np.random.default_rng((cfg.seed, step)).integers(0, 12, (cfg.batch_tokens // cfg.seq_len, 1))
    count = (start + np.arange(cfg.seq_len + 1)) % 12
    return next_tokens(np.where(count == 11, 256, count))


Trained = tuple[dict[str, Tensor], list[float]]


def trained(model: Decoder, result: TrainingResult) -> Trained:
    assert result.outcome == "ok"
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return weights, [row["train_loss"] for row in result.curves if row["step"] % 2 == 0]


def there(cfg: RunConfig, **changes: object) -> Runtime:
    return dataclasses.replace(resolve(cfg, RuntimeConfig(device="cpu")), **changes)


def train_alone(cfg: RunConfig, runtime: Runtime | None = None, **options) -> Trained:
    model = Decoder(cfg, cfg.seed)
    return trained(model, train(model, cfg, runtime or there(cfg), functools.partial(batch, cfg), **options))


plain = functools.cache(train_alone)


def train_stacked(*configs: RunConfig, **changes: object) -> list[Trained]:
    models = [Decoder(cfg, cfg.seed) for cfg in configs]
    each = [
        training(model, cfg, there(cfg, **changes), functools.partial(batch, cfg))
        for model, cfg in zip(models, configs, strict=True)
    ]
    results = train_together(each, [Clock() for _ in configs])
    return [trained(model, result) for model, result in zip(models, results, strict=True)]


def assert_same(one: Trained, other: Trained, **tolerance: float) -> None:
    for name, weight in one[0].items():
        torch.testing.assert_close(other[0][name], weight, msg=lambda told, name=name: f"{name}: {told}", **tolerance)
    assert other[1] == pytest.approx(one[1], abs=tolerance["atol"])


EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-3, "atol": 5e-5}
COARSE = {"rtol": 0.1, "atol": 1e-2}
"""of bf16, in which small gradients may change their sign"""


def differs(one: Trained, other: Trained) -> bool:
    return one[0].keys() != other[0].keys() or any(not torch.equal(w, other[0][name]) for name, w in one[0].items())


def test_every_field_declares_where_it_acts():
    """A field without it is closed to every path but the plain one."""
    for model in (RunConfig, RuntimeConfig):
        assert [name for name, role in roles(model).items() if role.acts is None] == []


@pytest.mark.parametrize("field", OTHER)
def test_a_field_acts_where_it_says(field):
    """Trained on the same sequences, the two differ where it acts; and where it does not, each part is the same."""
    base, other = runs(field)
    role, models = ROLES[field], [Decoder(cfg, cfg.seed).eval() for cfg in (base, other)]
    states = [model.state_dict() for model in models]
    if field not in LOADED:
        assert differs(plain(base), plain(other)) == (field in ACTING)
    if role.touches("shapes", "batch"):
        return
    if not role.touches("start"):
        assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    models[1].load_state_dict(states[0])
    tokens_BT = torch.from_numpy(batch(base, 0).inputs)
    if not role.touches("stream", "attention", "ffn"):
        assert models[0](tokens_BT).equal(models[1](tokens_BT))
    if not role.touches("stream", "attention", "ffn", "loss"):
        found = [losses(model, tokens_BT, tokens_BT, cfg)[0] for model, cfg in zip(models, (base, other), strict=True)]
        assert found[0].equal(found[1])
    if not role.touches("stream", "attention"):
        weights = []
        for probed in map(ProbedDecoder, models):
            q, k, context = probed.attention_inputs(1, probed.embed(tokens_BT))
            weights.append(attention_rows(q, k, 0, base.seq_len, context))
        assert weights[0].equal(weights[1])
    if not role.touches("schedule"):
        assert [learning_rate(base, step) for step in range(6)] == [learning_rate(other, step) for step in range(6)]
    if not role.touches("optimizer", "schedule"):
        groups = [make_optimizer(model, cfg).param_groups for model, cfg in zip(models, (base, other), strict=True)]
        told = [[{**group, "params": len(group["params"])} for group in of_run] for of_run in groups]
        assert told[0] == told[1]


@pytest.mark.parametrize("field", [*ACTING, RECORDS])
def test_in_a_stack_a_run_is_as_alone_or_its_field_is_refused(monkeypatch, field):
    """Beside the default, and, where its steps are those of a stack, beside its like of another seed; captured, too."""
    recorders = stand_in(monkeypatch)
    base, other = runs(field)
    like = [] if set(ROLES.get(field, RECORD).acts or ()) <= BY_RUN else [other.model_copy(update={"seed": 1})]
    for one in (base, *like):
        if refused := unstackable(one, other):
            assert field in refused
        else:
            found = train_stacked(one, other)
            assert_same(plain(other), found[1], **(COARSE if field == "precision" else CLOSE))
            if graph_obstacle(other, "cuda", "none") is None:
                recorders.clear()
                assert_same(found[1], train_stacked(one, other, cuda_graph=True)[1], **EXACT)
                assert len(recorders) == 1


@pytest.mark.parametrize("field", [*ACTING, RECORDS])
def test_a_captured_run_is_as_uncaptured_or_its_field_is_refused(monkeypatch, field):
    _, other = runs(field)
    if obstacle := graph_obstacle(other, "cuda", "none"):
        assert f"{field}=" in obstacle
        return
    recorders = stand_in(monkeypatch)
    assert_same(plain(other), train_alone(other, there(other, cuda_graph=True)), **EXACT)
    assert len(recorders) == 1


@pytest.mark.parametrize("field", [field for field in ACTING if ROLES[field].touches(*COMPUTED)])
def test_a_probed_model_is_the_model(monkeypatch, field):
    _, other = runs(field)
    model, tokens_BT = Decoder(other, other.seed).eval(), torch.from_numpy(batch(other, 0).inputs)
    probed = ProbedDecoder(model)
    with probing(probed):
        *_, x_BTD = stream(probed, tokens_BT)
        torch.testing.assert_close(probed.logits(x_BTD), model(tokens_BT), rtol=1e-4, atol=1e-5)
        assert_weights_are_used(monkeypatch, probed, tokens_BT)


@pytest.mark.slow
@pytest.mark.parametrize("field", [*ACTING, RECORDS])
def test_a_resumed_run_is_as_uninterrupted(field, tmp_path):
    _, other = runs(field)
    calls = iter(range(1, 100))
    with pytest.raises(Interrupted):
        train_alone(other, checkpoints=tmp_path, stop=lambda: next(calls) == 3)
    assert_same(plain(other), train_alone(other, checkpoints=tmp_path), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("field", [field for field in OTHER if ROLES[field].touches(*COMPUTED, "noise", "loss")])
def test_a_compiled_run_is_as_an_eager_one(field):
    _, other = runs(field)
    if ROLES[field].touches("noise"):  # a compiler draws other numbers
        other = other.model_copy(update={field: 1e-9})
    assert_same(plain(other), train_alone(other, there(other, compile=True)), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("field", ACTING)
def test_an_exported_model_is_the_model_or_its_field_is_refused(field, tmp_path):
    _, other = runs(field)
    try:
        target = architecture(other)
    except ValueError as refusal:
        owner, _ = ROLES[field].only_with or (field, None)  # without which it has no effect
        assert f"{field}=" in str(refusal) or f"{owner}=" in str(refusal)
        return
    model = Decoder(other, other.seed).eval()
    save_model(model, target, tmp_path, eos_token_id=0)
    tokens_NT = random_documents(other, 4)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(exported(tokens_NT).logits, model(tokens_NT), rtol=0, atol=TOLERANCE)


RUNTIME = {
    **{"device": "cpu", "threads": 1, "compile": False, "attention_kernel": "reference", "experts_kernel": "loop"},
    **{"cuda_graph": True, "parallel": "ddp", "micro_batch": 2, "stack": 2, "checkpoint_seconds": 1.0},
    "stream": "bf16",
}


@pytest.mark.parametrize("field", RuntimeConfig.model_fields)
def test_a_choice_of_the_runtime_rounds_alone_or_not_at_all(monkeypatch, field):
    role, cfg = roles(RuntimeConfig)[field], runs("n_experts" if field == "experts_kernel" else "n_kv_heads")[1]
    choice = RuntimeConfig(**{field: RUNTIME[field]})
    cfg = cfg.model_copy(update={"precision": "bf16"}) if field == "stream" else cfg
    assert choice.can_stack != role.touches("step")
    if role.touches("step"):
        with pytest.raises(ValueError, match="trains one run"):
            RuntimeConfig(stack=2, **{field: RUNTIME[field]})
        return
    stand_in(monkeypatch)  # a CPU has no graph
    runtime = there(cfg, cuda_graph=True) if choice.cuda_graph else resolve(cfg, choice)
    tolerance = COARSE if field == "stream" else CLOSE if role.touches("rounding") else EXACT
    assert_same(plain(cfg), train_alone(cfg, runtime), **tolerance)


def test_what_was_computed_with_is_recorded():
    """Every choice of the runtime but how often it saves, and how many share a step, which is told by their ids."""
    cfg = runs("n_experts")[1]
    facts = {**device_facts(resolve(cfg, RuntimeConfig(device="cpu"))), "compile": 0, "attention_kernel": 0}
    assert set(RuntimeConfig.model_fields) - {*facts, "experts_kernel"} == {"stack", "checkpoint_seconds"}
