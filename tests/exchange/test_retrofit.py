"""Depth scaling put on Hugging Face models equals the decoder built with it."""

import math

import pytest
import torch
from support.hf_families import FAMILIES as ARCHITECTURES, tiny
from support.hf_parity import carry, reference
from transformers import AutoModelForCausalLM

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.exchange import retrofit
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.folder import check_folder

SMALL = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 40, "seq_len": 16, "norm_eps": 1e-2}
TOKENS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
LLAMAS = [name for name in ARCHITECTURES if name.removesuffix("_tied").removesuffix("_window") in retrofit.FAMILIES]


def test_a_measured_type_is_not_scaled_before_its_own_test():
    assert len(LLAMAS) == len(retrofit.FAMILIES) + 3  # a tied head, and windows
    for name in ("gpt2", "cohere", "granite", "gemma3_text", "glm4", "olmo3"):
        with pytest.raises(ValueError, match="does not have Llama's layout; supported: gemma, gemma2, llama"):
            retrofit.apply(tiny(name), allow_trained=True)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("mode", ["fold", "hook"])
@pytest.mark.parametrize("experts", [{}, {"n_experts": 3, "top_k": 2}])
def test_a_scaled_llama_is_our_scaled_decoder(mode, experts):
    ours = Decoder(build(ModelConfig, {**SMALL, **experts, "depth_scale": "lns", "init_std": 0.3}, "test"))
    theirs = carry(ours, reference(ours.config, "mixtral" if experts else "llama"))
    plain = logits(theirs)
    retrofit.apply(theirs, "lns", mode=mode)
    torch.testing.assert_close(logits(theirs), ours(TOKENS).detach(), atol=2e-5, rtol=1e-5)
    assert (logits(theirs) - plain).abs().max() > 1e-5


@pytest.mark.parametrize("name", LLAMAS)
def test_fold_and_hook_agree_and_are_undone_in_every_family(name):
    model = tiny(name)
    plain = logits(model)
    retrofit.apply(model, mode="hook", allow_trained=True)
    hooked = logits(model)
    retrofit.remove(model)
    torch.testing.assert_close(logits(model), plain, atol=0, rtol=0)
    retrofit.apply(model, allow_trained=True)
    torch.testing.assert_close(logits(model), hooked, atol=2e-4, rtol=1e-4)
    assert (hooked - plain).abs().max() > 1e-2
    retrofit.remove(model)
    torch.testing.assert_close(logits(model), plain, atol=2e-4, rtol=1e-4)


def test_one_scale_at_a_time_also_after_saving(tmp_path):
    model = reference(build(ModelConfig, SMALL, "test")).eval()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="no depth scale to remove"):
        retrofit.remove(model)
    retrofit.apply(model, mode="hook")
    with pytest.raises(ValueError, match="already"):
        retrofit.apply(model)
    retrofit.remove(model)
    retrofit.apply(model)
    model.save_pretrained(tmp_path)
    assert check_folder(tmp_path)["depth_scale"] == "lns"
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again), logits(model), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"already \(lns\)"):
        retrofit.apply(again, "lns", allow_trained=True)
    retrofit.remove(again)
    assert not hasattr(again.config, "depth_scale")


def test_hooks_are_not_saved(tmp_path):
    model = reference(build(ModelConfig, SMALL, "test")).eval()
    plain = logits(model)
    retrofit.apply(model, mode="hook")
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), plain, atol=1e-6, rtol=0)


def test_the_gradient_of_a_folded_gain_lacks_the_scale():
    """d loss / d g = s d loss / d g', g' = s g: what the modes' training differs by."""
    gradients = {}
    for mode in ("fold", "hook"):
        torch.manual_seed(0)
        model = reference(build(ModelConfig, {**SMALL, "init_std": 0.3}, "test"))
        retrofit.apply(model, "lns", mode=mode)
        model(TOKENS, labels=TOKENS).loss.backward()
        gradients[mode] = model.model.layers[2].input_layernorm.weight.grad
    torch.testing.assert_close(gradients["hook"], gradients["fold"] / math.sqrt(3), atol=1e-6, rtol=1e-4)


def test_what_is_refused():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"is trained.*allow_trained=True"):
        retrofit.apply(model)
    for wrong in ({"depth_scale": "after_ffn"}, {"mode": "unfold"}):
        with pytest.raises(ValueError, match="expected 'lns', and 'fold' or 'hook'"):
            retrofit.apply(model, **wrong)
