"""Every family of Hugging Face decoders through one adapter: the model's own states, logits and attention weights."""

import pytest
import torch
from support.handmade_models import integers, normal
from support.hf_families import FAMILIES, OTHERS, tiny

from sparsedepth.model.attention import attention_rows
from sparsedepth.probe.fork import probing, stream
from sparsedepth.probe.hf_adapter import ProbedHfModel
from sparsedepth.probe.hf_types import REFUSED, TYPES

TOKENS = integers(40, 3, 12)


def test_every_family_is_tested():
    assert {tiny(name).config.model_type for name in FAMILIES | OTHERS} == TYPES.keys() and len(TYPES) >= 45
    assert TYPES.keys().isdisjoint(REFUSED)


KERNELS = [(family, "sdpa") for family in FAMILIES if family != "gemma2"]
KERNELS += [(family, "eager") for family in ("gemma2", "gpt2", "gpt_neox", "llama", "mixtral", "qwen2_window")]


@pytest.mark.parametrize(("family", "attention"), KERNELS)
def test_the_blocks_compose_to_the_model(family, attention):
    model = tiny(family, attention)
    seen: list[torch.Tensor] = []
    probed = ProbedHfModel(model)
    layers = [probed.block_module(layer) for layer in range(1, 5)]
    hooks = [layer.register_forward_hook(lambda _, given, out: seen.append(out)) for layer in layers]
    hooks.append(layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])))
    with torch.no_grad():
        logits = model(TOKENS).logits
    for hook in hooks:
        hook.remove()
    with probing(probed):
        states = list(stream(probed, TOKENS))
        torch.testing.assert_close(states, seen, rtol=0, atol=1e-5)
        torch.testing.assert_close(probed.logits(states[-1]), logits, rtol=0, atol=1e-5)
    assert probed.n_layers == 4 and probed.vocab_size == logits.shape[-1] == 40
    assert (states[-1] - states[0]).abs().max() > 0.5


WINDOWS = {
    **{family: [5, None, 5, None] for family in ("cohere2", "exaone4", "gemma2", "gemma3_text", "ministral", "olmo3")},
    **{family: [5] * 4 for family in ("mistral_window", "phi3", "starcoder2")},
    "qwen2_window": [None, None, 5, 5],
    "smollm3": [None, 5, None, 5],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_are_the_models(family):
    model = tiny(family, "eager")
    with torch.no_grad():
        expected = model(TOKENS, output_attentions=True).attentions
    probed = ProbedHfModel(tiny(family))
    forms = []
    with probing(probed):
        states = list(stream(probed, TOKENS))
        for layer in range(1, 5):
            q, k, form = probed.attention_inputs(layer, states[layer - 1])
            forms.append(form)
            rows = [attention_rows(q, k, start, start + 4, form) for start in (0, 4, 8)]
            rows = torch.cat([torch.nn.functional.pad(row, (0, 12 - row.shape[-1])) for row in rows], dim=2)
            torch.testing.assert_close(rows, expected[layer - 1], rtol=0, atol=1e-5)
    assert [form.window for form in forms] == WINDOWS.get(family, [None] * 4)
    assert {form.softcap for form in forms} == ({2.0} if family == "gemma2" else {None})


@pytest.mark.parametrize("family", ["gemma2", "mistral_window"])
def test_attention_that_is_read_before_any_block_leaves_the_window_as_it_is(family):
    first, later = ProbedHfModel(tiny(family)), ProbedHfModel(tiny(family))
    with probing(first), probing(later):
        states = list(stream(later, TOKENS))
        assert first.attention_inputs(1, first.embed(TOKENS))[2].window == 5
        torch.testing.assert_close(list(stream(first, TOKENS)), states, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_add_up_to_the_block(family):
    probed, x = ProbedHfModel(tiny(family)), normal(2, 9, 32)
    with probing(probed):
        attention, ffn = probed.branches(2, x)
        torch.testing.assert_close(x + attention + ffn, probed.block(2, x), rtol=0, atol=1e-5)
        assert attention.abs().max() > 0.01 and ffn.abs().max() > 0.01
        if family.startswith("llama"):
            mlp, norm = (probed.block_module(2).get_submodule(name) for name in ("mlp", "post_attention_layernorm"))
            torch.testing.assert_close(ffn, mlp(norm(x + attention)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_units_are_what_the_last_product_of_a_block_reads(family):
    probed, x_BTD, read = ProbedHfModel(tiny(family)), normal(2, 9, 32), []
    with probing(probed):
        for layer in (1, 2):
            h_BTF, down = probed.hidden_units(layer, x_BTD), probed.matrices(layer).get("down")
            assert (h_BTF is None) == (down is None)
            if down is not None:
                ffn = probed.block_module(layer).get_submodule("mlp")
                biases = ("c_proj.bias", "dense_4h_to_h.bias", "down_proj.bias")
                bias = next((p for name, p in ffn.named_parameters() if name in biases), 0)
                ffn.register_forward_hook(lambda module, args, output: read.append(output))
                probed.block(layer, x_BTD)
                torch.testing.assert_close(h_BTF @ down.T + bias, read[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_those_of_the_layer_each_once(family):
    probed = ProbedHfModel(tiny(family))
    for layer in range(1, 5):
        block = probed.block_module(layer)
        others = tuple(f"{part}.weight" for part in ("mlp.gate", "mlp.shared_expert_gate", "q_norm", "k_norm"))
        expected = sum(p.numel() for name, p in block.named_parameters() if p.ndim > 1 and not name.endswith(others))
        found = probed.matrices(layer)
        assert sum(matrix.numel() for matrix in found.values()) == expected
        assert all(matrix.ndim == 2 for matrix in found.values())
        assert {"query", "key", "value", "output"} < set(found)
        kinds = {name.split(".")[-1] for name in set(found) - {"query", "key", "value", "output"}}
        ungated = ("gpt", "apertus", "arcee", "nemotron", "starcoder2")
        assert kinds == ({"up", "down"} if family.startswith(ungated) else {"gate", "up", "down"})


@pytest.mark.parametrize(
    ("family", "norm", "fused"),
    [
        ("gpt2", "ln_1", "attn.c_attn"),
        ("gpt_neox", "input_layernorm", "attention.query_key_value"),
        ("phi3", "input_layernorm", "self_attn.qkv_proj"),
    ],
)
def test_fused_projections_are_taken_apart(family, norm, fused):
    """The matrix called 'query' is the one that makes the queries: q = W N(x) + b, at position 0 without rotation."""
    probed, x = ProbedHfModel(tiny(family)), normal(1, 1, 32)
    block = probed.block_module(1)
    with torch.no_grad():
        for name, bias in block.get_submodule(fused).named_parameters():
            if name == "bias":
                bias.zero_()
        q, k, _ = probed.attention_inputs(1, x)
        for name, heads in (("query", q), ("key", k)):
            expected = block.get_submodule(norm)(x) @ probed.matrices(1)[name].T
            torch.testing.assert_close(heads.transpose(1, 2).flatten(2), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmoe", "gpt2", "apertus", "cohere", "glm4_moe", "phi3"])
def test_low_precision_layers_are_computed_in_fp32(family):
    """Blocks in bf16 give what the same weights, widened beforehand, give; the weights stay in bf16."""
    wide, narrow = tiny(family), tiny(family)
    layers = narrow.get_submodule("transformer.h" if family == "gpt2" else "model.layers").to(torch.bfloat16)
    for model in (wide, narrow):
        model.load_state_dict({name: weight.bfloat16() for name, weight in model.state_dict().items()})
    probed_models = ProbedHfModel(wide), ProbedHfModel(narrow)
    states = []
    for probed in probed_models:
        with probing(probed):
            states.append(list(stream(probed, TOKENS)))
            q, k, _ = probed.attention_inputs(3, states[-1][2])
            assert q.dtype == k.dtype == torch.float32
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert {p.dtype for p in layers.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "gpt2", "mamba2", "phi"])
def test_logits_of_a_model_that_is_in_bf16_as_a_whole_are_computed_in_fp32(family):
    """With the scale or cap of its type, and without rounding a weight that is held."""
    narrow, wide = tiny(family).bfloat16(), tiny(family).bfloat16().float()
    probed = ProbedHfModel(narrow)
    with probing(probed):
        found = probed.logits(list(stream(probed, TOKENS))[-1])
    with torch.no_grad():
        torch.testing.assert_close(found, wide(TOKENS, use_cache=False).logits, rtol=0, atol=0.1)
    assert {weight.dtype for weight in narrow.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_runs_and_generates_without_layers(family):
    """Layer 1 left out too, by which the cache of transformers counts positions."""
    model = tiny(family)
    probed = ProbedHfModel(model)

    def without(tokens):
        with probing(probed):
            x_BTD = probed.embed(tokens)
            for layer in (2, 4):
                x_BTD = probed.block(layer, x_BTD)
            return probed.logits(x_BTD)

    with torch.no_grad(), probed.without_layers([1, 3]):
        left = model(TOKENS, use_cache=False).logits
        texts = model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False, eos_token_id=None, use_cache=True)
    torch.testing.assert_close(left, without(TOKENS), rtol=0, atol=1e-4)
    torch.testing.assert_close(texts[:, 12:], without(texts)[:, 11:-1].argmax(-1))
    with torch.no_grad():
        assert not torch.allclose(model(TOKENS).logits, left, atol=1e-2) and "generate" not in vars(model)


@pytest.mark.parametrize("family", ["gemma2", "olmoe"])
def test_the_model_is_left_as_found_also_after_an_error(family):
    model = tiny(family).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    settings = (model.config._attn_implementation, model.config._experts_implementation)
    probed = ProbedHfModel(model)
    with pytest.raises(RuntimeError, match="inside"), probing(probed):
        states = list(stream(probed, TOKENS))
        probed.attention_inputs(1, states[0])
        probed.branches(1, states[0])
        assert not model.training
        raise RuntimeError("inside")
    with pytest.raises(RuntimeError):
        probed.branches(1, normal(1, 4, 31))
    assert model.training
    assert (model.config._attn_implementation, model.config._experts_implementation) == settings
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("family", ["glm", "glm4", "phi3"])
def test_gate_and_up_are_taken_apart(family):
    probed, x = ProbedHfModel(tiny(family)), normal(2, 3, 32)
    ffn, weights = probed.block_module(1).get_submodule("mlp"), probed.matrices(1)
    with torch.no_grad():
        expected = (torch.nn.functional.silu(x @ weights["gate"].T) * (x @ weights["up"].T)) @ weights["down"].T
        torch.testing.assert_close(ffn(x), expected, rtol=0, atol=1e-5)


def test_sigmoid_scores_of_a_router_become_shares():
    model = tiny("glm4_moe")
    probed, x = ProbedHfModel(model), normal(2, 3, 32)
    router, read = model.get_submodule("model.layers.1.mlp.gate"), []
    router.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with probing(probed):
        probability, choice = probed.routing(2, x)
        score = (read[0] @ router.weight.T).sigmoid()
    torch.testing.assert_close(probability, score / score.sum(-1, keepdim=True), rtol=0, atol=1e-6)
    assert choice.shape == (2, 3, 2) and probed.routing(1, x) is None


@pytest.mark.parametrize("family", ["llama", "olmo3"])
def test_dynamic_rotation_beyond_the_trained_length_depends_on_the_length_alone(family):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    rope = dynamic if family == "llama" else {"full_attention": dynamic, "sliding_attention": dynamic}
    fields = {"max_position_embeddings": 16, "rope_parameters": rope}
    probed = ProbedHfModel(tiny(family, **fields))
    assert probed.max_len == (32 if family == "llama" else 16)
    probed.max_len = 32
    for length in (12, 32, 20, 12, 24):  # longer, then shorter ones
        tokens = integers(40, 2, length)
        with torch.no_grad(), probing(probed):
            found = probed.logits(list(stream(probed, tokens))[-1])
            torch.testing.assert_close(found, tiny(family, **fields)(tokens).logits, rtol=0, atol=1e-5)
    probed.max_len = 16
    with pytest.raises(ValueError, match="longer than the 16 positions"):
        probed.embed(integers(40, 1, 17))


def test_blocks_work_with_gradients_after_a_pass_in_inference_mode():
    probed = ProbedHfModel(tiny("mistral_window"))
    with probing(probed):
        list(stream(probed, TOKENS))
    x = normal(2, 12, 32).requires_grad_()
    probed.block(1, x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="longer than the 64 positions"):
        ProbedHfModel(tiny("gpt2")).embed(integers(40, 1, 65))
    for family, field, value, reason in (
        ("llama", "model_type", "bert", "model_type='bert', which is not supported; supported: apertus, arcee"),
        ("gemma2", "use_bidirectional_attention", True, "tokens see the future"),
        ("llama", "is_causal", False, "is_causal=False: tokens see the future"),
        ("gemma2", "_attn_implementation_internal", "sdpa", r"softcap=2\.0.*'eager'"),
        ("llama", "_attn_implementation_internal", "flex_attention", "'flex_attention' cannot be measured"),
    ):
        model = tiny(family)
        setattr(model.config, field, value)
        with pytest.raises(ValueError, match=reason):
            ProbedHfModel(model)
