"""LNS for models of others: the norms of block l divided by sqrt(l), by a hook or in the weights."""

import pytest
import torch
import transformers
from support.plain_loop import Plain, held_out, llama

import sparsedepth as sd

IDS = held_out()[:, :-1]


@pytest.mark.parametrize("fold", [False, True])
def test_the_norms_of_block_l_are_divided_by_its_root(fold):
    plain, scaled = llama(4).eval(), llama(4).eval()
    names = sd.scale_norms(scaled, "lns", fold=fold)
    assert names[:3] == [*(f"model.layers.0.{name}_layernorm" for name in ("input", "post_attention")),
                         "model.layers.1.input_layernorm"] and len(names) == 8  # fmt: skip
    with torch.no_grad():
        for layer, block in enumerate(plain.model.layers, start=1):
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight.div_(layer**0.5)
        assert torch.allclose(scaled(IDS).logits, plain(IDS).logits, atol=1e-6)
    weight = scaled.model.layers[3].input_layernorm.weight
    assert torch.equal(weight, torch.full_like(weight, 0.5 if fold else 1.0))


@pytest.mark.parametrize("family", ["Qwen3", "Olmo2", "Olmoe"])
def test_norms_of_queries_and_keys_are_left_alone(family):
    """By head (Qwen3), and over all heads, which is the width of the stream."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "eos_token_id": 1,
    }
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=2, vocab_size=32, **sizes)
    names = sd.scale_norms(getattr(transformers, f"{family}ForCausalLM")(config))
    assert len(names) == 4 and all(name.endswith("layernorm") for name in names)


def test_a_wider_norm_inside_a_block_is_not_of_the_stream():
    sizes = {"hidden_size": 16, "head_dim": 8, "num_heads": 4, "n_groups": 1, "state_size": 8, "eos_token_id": 1}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(num_hidden_layers=2, vocab_size=32, **sizes))
    assert sd.scale_norms(model) == ["backbone.layers.0.norm", "backbone.layers.1.norm"]


def test_weights_that_are_added_to_one_cannot_hold_the_factor():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8, "vocab_size": 32}
    model = transformers.GemmaForCausalLM(
        transformers.GemmaConfig(num_hidden_layers=2, num_key_value_heads=1, eos_token_id=1, **sizes)
    )
    with pytest.raises(ValueError, match=r"layers.1.post_attention_layernorm multiplies by more .*; leave fold out"):
        sd.scale_norms(model, fold=True)
    assert len(sd.scale_norms(model)) == 4


def test_it_is_measured_as_it_trains():
    """A hook acts in measures, too: the variance of what attention adds falls by about its share."""
    variances = []
    for is_scaled in (False, True):
        model = Plain(4)
        if is_scaled:
            sd.scale_norms(model, layers="trunk.blocks")
        found = sd.watch(model, held_out(), out=None, measures=["variance"], layers="trunk.blocks", norm="last_norm",
                         head="words")(0)  # fmt: skip
        variances.append({row["layer"]: row["value"] for row in found.layers if row["metric"] == "residual_variance"})
    assert variances[0][1] == pytest.approx(variances[1][1], rel=0.5) and variances[1][4] < variances[0][4]


def test_mistakes_are_told():
    model = llama()
    with pytest.raises(ValueError, match="scale='mix' is not known; the only one is 'lns'"):
        sd.scale_norms(model, "mix")
    sd.scale_norms(model)
    with pytest.raises(ValueError, match="input_layernorm is scaled already"):
        sd.scale_norms(model)
    shared = llama()
    shared.model.layers[1].input_layernorm = shared.model.layers[0].input_layernorm
    with pytest.raises(ValueError, match="input_layernorm is the norm of several blocks"):
        sd.scale_norms(shared)
    assert not any(part._forward_hooks for part in shared.modules()), "a refused model is left as it was"
    with pytest.raises(ValueError, match=r"none of the known types .*layers='trunk.blocks' \(3 blocks\)"):
        sd.scale_norms(Plain())
    with pytest.raises(ValueError, match="have no norms with weights; divide what its norms return by sqrt"):
        sd.scale_norms(torch.nn.ModuleDict({"a": torch.nn.ModuleList([torch.nn.Linear(2, 2)])}), layers="a")
