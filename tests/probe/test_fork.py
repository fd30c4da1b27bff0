"""Forks and branch updates against full forward passes, the memory budget, nothing left changed."""

import contextlib

import pytest
import torch
from hypothesis import given, settings, strategies as st
from reference import FAMILIES, branch_updates, run_config, states
from support.handmade_models import HandMadeModel, identity, integers, normal, residual_mlp, tokens_per_pass

from sparsedepth.model.decoder import Decoder
from sparsedepth.probe import fork as module
from sparsedepth.probe.fork import batches, probing, run_forks, stream, updates
from sparsedepth.probe.probed_model import ProbedDecoder

N_LAYERS = 5


def finals(probed, recorded, forks):
    out = {}
    for step in run_forks(probed, recorded, forks):
        if step.layer == probed.n_layers:
            out |= {fork: step.after[row].double() for row, fork in enumerate(step.forks)}
    return [out[index] for index in range(len(forks))]


@pytest.mark.parametrize("family", [*FAMILIES, "first"])
def test_forks_are_full_forward_passes_with_another_plan(family):
    fields = {**FAMILIES, "first": {"residual_scalars": True, "value_residual": True}}[family]
    model, tokens = Decoder(run_config(**fields)).eval(), integers(40, 3, 16)
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            for name, scalar in block.named_parameters():
                if name.endswith("scalar"):
                    scalar.fill_(0.4 + 0.1 * layer)
    probed = ProbedDecoder(model)
    twice = lambda x: 2 * x + 1  # noqa: E731
    plans = {
        "skip": ({3: None}, [1, 2, None, 4, 5]),
        "skip first": ({1: None}, [None, 2, 3, 4, 5]),
        "skip last": ({5: None}, [1, 2, 3, 4, None]),
        "swap": ({2: 5, 5: 2}, [1, 5, 3, 4, 2]),
        "swap ends": ({1: 5, 5: 1}, [5, 2, 3, 4, 1]),
        "swap neighbours": ({3: 4, 4: 3}, [1, 2, 4, 3, 5]),
        "replace": ({2: twice}, [1, twice, 3, 4, 5]),
        "several": ({2: None, 4: 1, 5: twice}, [1, None, 3, 1, twice]),
        "unchanged": ({3: 3}, [1, 2, 3, 4, 5]),
    }
    with probing(probed):
        recorded = list(stream(probed, tokens))
        found = finals(probed, recorded, [fork for fork, _ in plans.values()])
        for final, (_, plan) in zip(found, plans.values(), strict=True):
            torch.testing.assert_close(final, states(model, tokens, plan)[-1], rtol=1e-5, atol=1e-4)
    for state, expected in zip(recorded, states(model, tokens), strict=True):
        torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=1e-4)  # they reach 20


@st.composite
def forks_of(draw):
    layers = st.integers(1, N_LAYERS)
    change = st.one_of(st.none(), layers, st.just(identity))
    return [draw(st.dictionaries(layers, change, min_size=1)) for _ in range(draw(st.integers(0, 6)))]


@settings(max_examples=40)
@given(forks=forks_of(), max_tokens=st.integers(1, 60))
def test_any_forks_under_any_budget(forks, max_tokens):
    """Each fork visits each layer from its start on, once, in order; the budget holds, and no result depends on it."""
    passes = []

    def watched(block):
        def run(x):
            passes.append(x[..., 0].numel())
            return block(x)

        return run

    blocks = [residual_mlp(4, seed) for seed in range(N_LAYERS)]
    recorded = list(stream(HandMadeModel(blocks, normal(5, 4)), integers(5, 2, 3)))
    probed = HandMadeModel([watched(block) for block in blocks], normal(5, 4))
    visits = {index: [] for index in range(len(forks))}
    with tokens_per_pass(max_tokens):
        steps, parts = list(run_forks(probed, recorded, forks)), finals(probed, recorded, forks)
    for step in steps:
        assert step.before.shape == step.after.shape == (len(step.forks), 2, 3, 4)
        for row, index in enumerate(step.forks):
            if not visits[index]:
                torch.testing.assert_close(step.before[row], recorded[min(forks[index]) - 1])
            visits[index].append(step.layer)
    assert visits == {index: list(range(min(fork), N_LAYERS + 1)) for index, fork in enumerate(forks)}
    assert max(passes, default=0) <= max(max_tokens, 6)  # 6 tokens: one fork of two sequences of three
    for one, other in zip(parts, finals(probed, recorded, forks), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_layers_in_which_forks_agree_are_one_batch():
    calls = []

    def block(x):
        calls.append(len(x))
        return x

    probed = HandMadeModel([block] * 4, normal(5, 4))
    recorded = list(stream(HandMadeModel([identity] * 4, normal(5, 4)), integers(5, 2, 3)))
    list(run_forks(probed, recorded, [{1: None}, {2: None}, {3: None}]))
    assert calls == [2, 4, 6]  # layer 2 for one fork of two sequences, layer 3 for two, layer 4 for all three
    calls.clear()
    with tokens_per_pass(13):
        list(run_forks(probed, recorded, [{1: None}, {2: None}, {3: None}]))
    assert calls == [2, 4, 4, 2]  # 13 tokens hold two forks of two sequences of three; the third runs alone


def test_batches_hold_whole_sequences_within_the_budget():
    probed, tokens = HandMadeModel([identity], normal(5, 4)), integers(5, 7, 10)
    for max_tokens, sizes in {1: [1] * 7, 25: [2, 2, 2, 1], 70: [7], 1000: [7]}.items():
        with tokens_per_pass(max_tokens):
            parts = list(batches(probed, tokens))
        assert [len(part) for part in parts] == sizes
        assert torch.equal(torch.cat(parts), tokens)


@pytest.mark.parametrize(("tokens", "numbers"), [(6, 1), (1, 6 * 4)])
def test_a_cpu_is_given_no_more_than_it_caches(monkeypatch, tokens, numbers):
    calls, block = [], residual_mlp(4, 0)
    probed = HandMadeModel([lambda x: calls.append(len(x)) or block(x)] * 3, normal(5, 4))
    recorded = list(stream(probed, integers(5, 2, 3)))
    forks = [{1: None}, {2: None}, {1: 3, 3: 1}]
    whole = finals(probed, recorded, forks)
    calls.clear()
    monkeypatch.setattr(module, "CPU_PASS_TOKENS", tokens)  # one fork of two sequences of three, of width 4
    monkeypatch.setattr(module, "CPU_PASS_VALUES", numbers)
    small = finals(probed, recorded, forks)
    assert set(calls) == {2} and [len(part) for part in batches(probed, integers(5, 5, 3))] == [2, 2, 1]
    for one, other in zip(small, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_gradients_reach_inputs_and_no_weight_also_after_an_error():
    model = Decoder(run_config())
    model.embed.weight.requires_grad_(False)
    probed, needed = ProbedDecoder(model), [weight.requires_grad for weight in model.parameters()]
    with pytest.raises(RuntimeError, match="half-way"), probing(probed, gradients=True):
        assert not any(weight.requires_grad for weight in model.parameters()) and not torch.is_grad_enabled()
        with torch.enable_grad():
            x = normal(1, 4, 32).requires_grad_()
            probed.block(1, x).sum().backward()
        assert x.grad is not None and x.grad.abs().max() > 0
        raise RuntimeError("half-way")
    assert [weight.requires_grad for weight in model.parameters()] == needed and torch.is_grad_enabled()
    assert all(weight.grad is None for weight in model.parameters())


def test_scores_are_computed_without_tf32():
    probed = ProbedDecoder(Decoder(run_config(**FAMILIES["moe"])))
    torch.set_float32_matmul_precision("high")
    try:
        with probing(probed):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was_found(fails):
    model = Decoder(run_config(**FAMILIES["moe"]))
    model.train()
    model.get_submodule("blocks.1.ffn").eval()
    probed = ProbedDecoder(model)
    modes = [module.training for module in model.modules()]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    tokens = integers(40, 2, 16)
    final = states(model, tokens, [1, 4, 3, 2, 5])[-1]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    outcome = pytest.raises(RuntimeError, match="half-way") if fails else contextlib.nullcontext()
    with outcome, torch.autocast("cpu", dtype=torch.bfloat16), probing(probed):
        assert not any(module.training for module in model.modules())
        assert torch.is_inference_mode_enabled()
        torch.rand(5)
        for step in run_forks(probed, list(stream(probed, tokens)), [{1: None}, {2: 4, 4: 2}]):
            if fails and step.layer == 3:
                raise RuntimeError("half-way")
        torch.testing.assert_close(step.after[1].double(), final, rtol=1e-5, atol=1e-5)  # no autocast inside
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    model(integers(40, 1, 8)).sum().backward()  # no inference tensor was left in the model


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_of_a_decoder_add_up_to_its_blocks(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])).eval(), integers(40, 2, 16)  # training rounds otherwise
    probed, expected = ProbedDecoder(model), states(model, tokens)
    with probing(probed):
        for update in updates(probed, tokens):
            assert update.branches
            for part, seen in zip(update.branches, branch_updates(model, tokens, update.layer), strict=True):
                # Inference mode rounds otherwise than the plain formulas that the hooks see, in all layers before.
                torch.testing.assert_close(part.double(), seen, rtol=1e-5, atol=3e-5)
            torch.testing.assert_close(update.after, probed.block(update.layer, update.before), rtol=1e-6, atol=1e-6)
            # The states reach 20, where rounding of five layers is 3e-5.
            torch.testing.assert_close(update.after.double(), expected[update.layer], rtol=1e-5, atol=1e-4)
    assert update.layer == 5
