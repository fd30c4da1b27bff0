"""Three knobs, each added from outside in the simplest way: a field that declares nothing, and one line of code.

Once each was wrong in silence. Now each acts on every path, or the path is refused by the field's name; and once it
declares where it acts, the paths open that may."""

import dataclasses
import functools
from typing import Annotated

import numpy as np
import pytest
import torch
from support.cpu_graph import stand_in
from test_contract import CLOSE, EXACT, SMALL, assert_same, batch, there, train_alone, train_stacked

from sparsedepth.config.role import CHANGES_STEP, KNOB, undeclared, unstackable
from sparsedepth.config.run import RunConfig, check_parallel
from sparsedepth.config.runtime import RuntimeConfig, graph_obstacle
from sparsedepth.config.section import NonNegative, Positive
from sparsedepth.exchange.architecture import architecture
from sparsedepth.measure.suite import measure_run
from sparsedepth.model.attention import Attention, attention_rows
from sparsedepth.model.block import is_supported
from sparsedepth.model.decoder import Decoder
from sparsedepth.plan.estimate import shape
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.train import loop, stack
from sparsedepth.train.runtime import resolve


class Penalised(RunConfig):
    stream_penalty: Annotated[NonNegative, KNOB] = 0.0
    """weight of the mean square of the stream after the last block, in the training loss"""


class Tempered(RunConfig):
    attention_temperature: Annotated[Positive, CHANGES_STEP] = 1.0
    """by which attention scores are divided before the softmax"""


class DeclaredPenalised(RunConfig):
    stream_penalty: Annotated[NonNegative, KNOB.acting("loss")] = 0.0
    """the same"""


class DeclaredTempered(RunConfig):
    attention_temperature: Annotated[Positive, CHANGES_STEP.acting("attention")] = 1.0
    """the same"""


class Decaying(RunConfig):
    weight_decay_end_frac: Annotated[NonNegative, KNOB.acting("schedule")] = 1.0
    """weight decay at the end / at the start, linear in steps"""


PENALTY, TEMPERATURE = {"stream_penalty": 0.3}, {"attention_temperature": 0.05}


@pytest.mark.parametrize(("kind", "fields"), [(Penalised, PENALTY), (Tempered, TEMPERATURE)])
def test_a_field_that_declares_nothing_is_refused_by_every_path_but_the_plain_one(monkeypatch, kind, fields):
    (name,), plain, other = fields, kind(**SMALL), kind(**SMALL, **fields)
    assert undeclared(plain) == set() and undeclared(other) == {name}
    assert unstackable(plain, other) == {name}
    assert unstackable(other, other.model_copy(update={"seed": 1})) == {name}
    assert name in str(graph_obstacle(other, "cuda", "none")) and graph_obstacle(plain, "cuda", "none") is None
    for refused in (
        lambda: architecture(other),
        lambda: check_parallel(other, "ddp"),
        lambda: resolve(other, RuntimeConfig(device="cpu", compile=True)),
    ):
        with pytest.raises(ValueError, match=name):
            refused()
    assert not is_supported("attention", other) and not is_supported("ffn", other) and is_supported("ffn", plain)
    monkeypatch.setattr(RuntimeConfig, "compiles", lambda *given, **named: True)
    assert [resolve(cfg, RuntimeConfig(device="cpu")).compile for cfg in (plain, other)] == [True, False]
    assert name in shape(other) and other.run_id != plain.run_id == RunConfig(**SMALL).run_id


def penalise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first knob adds to `train.loop.losses`."""

    def losses(model, inputs_BT, targets_BT, config):
        x_BTD = model.hidden(inputs_BT)
        entropy, _ = model.cross_entropy(x_BTD, targets_BT)
        loss = entropy + config.stream_penalty * x_BTD.float().square().mean() if config.stream_penalty else entropy
        return loss, entropy.detach(), torch.full_like(entropy.detach(), torch.nan)

    for module in (loop, stack):
        monkeypatch.setattr(module, "losses", losses)


def test_a_term_of_the_loss_is_never_that_of_a_neighbour_in_the_stack(monkeypatch):
    """The baseline and the penalised run were equal to the last digit in one stack."""
    penalise(monkeypatch)
    plain, one, other = (DeclaredPenalised(**SMALL, seed=s, **f) for s, f in ((0, {}), (0, PENALTY), (1, PENALTY)))
    assert unstackable(plain, one) == {"stream_penalty"} and not unstackable(one, other)
    with pytest.raises(AssertionError):
        train_stacked(plain, one)
    for cfg, found in zip((one, other), train_stacked(one, other), strict=True):
        assert_same(train_alone(cfg), found, **CLOSE)
    stand_in(monkeypatch)
    assert_same(train_alone(one), train_alone(one, there(one, cuda_graph=True)), **EXACT)
    assert train_alone(plain)[1] != train_alone(one)[1] and architecture(one).family == "llama"


def temper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second knob adds to attention."""
    plain_init, plain_attended = Attention.__init__, Attention.attended

    def init(self, config):
        plain_init(self, config)
        self.temperature = config.attention_temperature

    def attended(self, q_BHTK, k_BGTK, v_BGTK, context):
        return plain_attended(self, q_BHTK / self.temperature, k_BGTK, v_BGTK, context)

    monkeypatch.setattr(Attention, "__init__", init)
    monkeypatch.setattr(Attention, "attended", attended)


def test_what_attention_does_to_its_scores_is_seen_by_its_measures(monkeypatch):
    """A sparsity of .004 was recorded where it was .888. By hand: the model's own queries, tempered once more."""
    temper(monkeypatch)
    cfg = DeclaredTempered(**{**SMALL, "measures": ["attention"], "init_std": 0.3, "measure_tokens": 64}, **TEMPERATURE)
    probed = ProbedDecoder(Decoder(cfg, 0).eval())
    held_out = batch(cfg, 9)
    found = measure_run(probed, cfg, lambda *_: held_out, step=0).summary["attention_sparsity_rel"]
    x_BTD, shares = probed.embed(torch.from_numpy(held_out.inputs)), []
    for layer, block in enumerate(probed.model.blocks, start=1):
        part, context = block.attention, probed.model.positions(16)
        read_BTD = block.attention_norm(x_BTD)
        q_BHTK, k_BGTK = part._positioned(part.query(read_BTD), part.key(read_BTD), context.rotary)
        weight_BHTT = attention_rows(q_BHTK / 0.05, k_BGTK, 0, 16, context)
        seen_TT = torch.ones(16, 16).tril().bool()
        few = (weight_BHTT < 0.1 / torch.arange(1, 17)[:, None]) & seen_TT
        shares.append(few.sum().item() / (seen_TT.sum().item() * 4 * 4))
        x_BTD = probed.block(layer, x_BTD)
    assert found == pytest.approx(np.mean(shares)) and 0.3 < found < 1
    plain = DeclaredTempered(**SMALL)
    assert unstackable(plain, cfg) == {"attention_temperature"}
    assert not is_supported("attention", cfg) and is_supported("ffn", cfg)
    with pytest.raises(ValueError, match=r"attention_temperature=0.05: no architecture"):
        architecture(cfg)


@pytest.mark.parametrize("end", [1.0, 0.0])
def test_a_number_of_the_optimizer_that_changes_by_step_is_not_frozen_in_a_graph(monkeypatch, end):
    """A replay is refused, and the record says how many steps were replays."""
    take_step = loop.TrainingState.take_step

    def decaying(self, batch):
        for group in self.optimizer.param_groups:
            start = group.setdefault("weight_decay_start", group["weight_decay"])
            group["weight_decay"] = start * (1 + self.step / 5 * (self.config.weight_decay_end_frac - 1))
        take_step(self, batch)

    monkeypatch.setattr(loop.TrainingState, "take_step", decaying)
    stand_in(monkeypatch)
    cfg = Decaying(**{**SMALL, "weight_decay": 5.0}, weight_decay_end_frac=end)
    captured = dataclasses.replace(there(cfg), cuda_graph=True)
    assert_same(train_alone(cfg), train_alone(cfg, captured), **EXACT)
    result = loop.train(Decoder(cfg, 0), cfg, captured, functools.partial(batch, cfg))
    assert result.captured_steps == (2 if end == 1 else 1)
