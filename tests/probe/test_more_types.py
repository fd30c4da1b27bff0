"""Types whose blocks are of another make (parallel parts, experts, sinks, latent heads, state spaces), each against a
loop on transformers alone: logits, loss, variance, a block left out, and one replaced by an affine map."""

import numpy as np
import pytest
import torch
from support.handmade_models import found_by, integers, scored_text
from support.hf_families import OTHERS, WORDS, save_tokenizer, tiny
from torch.nn.functional import cross_entropy

from sparsedepth.measure.interventions import add_causal_rows
from sparsedepth.measure.loss import fork_losses
from sparsedepth.measure.sparsity import add_attention_rows, add_weight_rows
from sparsedepth.measure.variance import add_variance_rows
from sparsedepth.probe.fork import probing
from sparsedepth.probe.hf_adapter import ProbedHfModel
from sparsedepth.probe.hf_types import TYPES
from sparsedepth.probe.load import load_model

TOKENS = integers(40, 3, 13)
NO_ATTENTION = {"bloom", "falcon", "falcon_alibi", "gpt_oss", "gptj", "mamba2"}


def blocks(model):
    return [*model.base_model.get_submodule(TYPES[model.config.model_type].layers)]


def loss(model):
    """Of transformers' own forward pass."""
    with torch.no_grad():
        logits = model(TOKENS[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()


def replaced(model, layer, function):
    """The loss with block `layer` returning function(its input), by a hook of torch."""

    def hook(module, args, named, out):
        x = function(args[0] if args else named["hidden_states"])
        return (x, *out[1:]) if isinstance(out, tuple) else x

    handle = blocks(model)[layer - 1].register_forward_hook(hook, with_kwargs=True)
    try:
        return loss(model)
    finally:
        handle.remove()


@pytest.fixture(params=OTHERS)
def name(request):
    return request.param


def test_the_numbers_are_those_of_a_loop_on_transformers_alone(name):
    model = tiny(name)
    states = []

    def note(module, args, named, out):
        states.append((args[0] if args else named["hidden_states"], out[0] if isinstance(out, tuple) else out))

    handles = [block.register_forward_hook(note, with_kwargs=True) for block in blocks(model)]
    with torch.no_grad():
        logits = model(TOKENS[:, :-1], use_cache=False).logits
    for handle in handles:
        handle.remove()
    probed, scored = ProbedHfModel(model), scored_text(TOKENS)
    with probing(probed):
        x = probed.embed(scored.inputs)
        for layer, (before, after) in enumerate(states, start=1):
            torch.testing.assert_close(x, before, rtol=0, atol=1e-5)
            x = probed.block(layer, x)
            torch.testing.assert_close(x, after, rtol=0, atol=1e-5)
        torch.testing.assert_close(probed.logits(x), logits, rtol=0, atol=1e-5)
    assert (x - states[0][0]).abs().max() > 0.3
    matrix, shift = torch.eye(32) * 0.7 + 0.1, torch.linspace(-1, 1, 32)

    def affine(x_BTD):
        return x_BTD @ matrix + shift

    base_N, changed_NP = fork_losses(probed, scored, [{2: None}, {3: affine}])
    expected = [loss(model), replaced(model, 2, lambda x: x), replaced(model, 3, affine)]
    assert [base_N.mean(), *changed_NP.mean(0)] == pytest.approx(expected, abs=1e-5)
    assert abs(expected[1] - expected[0]) > 1e-3 and abs(expected[2] - expected[0]) > 1e-3
    found = found_by(add_variance_rows, probed, scored)
    values = [row["value"] for row in found.layers if row["metric"] == "residual_variance"]
    variances = [states[0][0].var(-1).mean().item(), *(after.var(-1).mean().item() for _, after in states)]
    assert values == pytest.approx(variances, rel=1e-5)
    assert found_by(add_causal_rows, probed, scored).summary["skip_loss_increase"] is not None


def test_parts_of_blocks_add_up_and_matrices_have_their_kinds(name):
    probed, x = ProbedHfModel(tiny(name)), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    with probing(probed):
        parts = probed.branches(2, x)
        if TYPES[probed.model.config.model_type].ffn is None:
            assert parts is None
        else:
            torch.testing.assert_close(x + parts[0] + parts[1], probed.block(2, x), rtol=0, atol=1e-5)
            assert all(part.abs().max() > 0.01 for part in parts)
        routing = probed.routing(2, x)
        assert routing is None or routing[0].sum(-1).allclose(torch.ones(2, 9))
    rows = found_by(add_weight_rows, probed, scored_text(TOKENS))
    assert rows.summary["weight_sparsity"] is not None
    assert all(matrix.ndim == 2 for layer in (1, 2) for matrix in probed.matrices(layer).values())


def test_attention_is_measured_where_its_weights_are_known(name):
    model = tiny(name, "eager")
    probed = ProbedHfModel(other := tiny(name))
    other.load_state_dict(model.state_dict())
    rows = found_by(add_attention_rows, probed, scored_text(TOKENS))
    if name in NO_ATTENTION:
        assert not rows.summary and not rows.layers
        return
    with torch.no_grad():
        weights = model(TOKENS[:, :-1], output_attentions=True, use_cache=False).attentions
    sinks = [row["value"] for row in rows.layers if row["metric"] == "attention_sink"]
    known = [each for each in weights if each is not None]
    assert [value for value in sinks if value is not None] == pytest.approx(
        [weight[..., 1:, 0].mean().item() for weight in known], abs=1e-5
    )
    if name == "qwen3_next":
        assert [value is None for value in sinks] == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_is_read(name, dtype, tmp_path):
    model, wide = tiny(name, vocab_size=len(WORDS)).to(dtype), tiny(name, vocab_size=len(WORDS))
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, WORDS)
    wide.load_state_dict({key: weight.float() for key, weight in model.state_dict().items()})
    loaded = load_model(tmp_path)
    tokens = integers(len(WORDS), 2, 8)
    with probing(loaded.probed), torch.no_grad():
        x = loaded.probed.embed(tokens)
        for layer in range(1, 5):
            x = loaded.probed.block(layer, x)
        expected = wide(tokens, use_cache=False).logits
        torch.testing.assert_close(loaded.probed.logits(x), expected, rtol=0, atol=1e-5)
    assert loaded.facts.n_layers == 4 and loaded.facts.d_model == 32 and loaded.facts.n_heads == 4
    assert loaded.facts.n_kv_heads in (1, 2, 4) and np.isfinite(loaded.facts.params_total)


def test_an_opt_with_norms_after_blocks_is_refused():
    with pytest.raises(ValueError, match="this OPTForCausalLM has no norm before its head"):
        ProbedHfModel(tiny("opt", do_layer_norm_before=False))
