"""Every cell of the zoo: expressed in an architecture of transformers with equal logits, or refused with the reason."""

from itertools import product

import pytest
import torch
from reference import ZOO, untried
from support.run_folders import loud
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.exchange.architecture import REFUSED, architecture, weights
from sparsedepth.model.decoder import Decoder

SMALL = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 50, "seq_len": 12}
TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))

SCALES = ("none", "lns", "before_norm", "after_branch", "after_attention", "after_ffn")
MOE = {"n_experts": 4, "top_k": 2, "d_expert": 24}
OVER_ALL = {"qk_norm": True, "qk_norm_over": "all"}
EXPERTS = {
    "mixtral": [{}, {"tie_embeddings": True}],
    "qwen2_moe": [{"renormalise_gates": False}, {"n_shared_experts": 2}, {"n_dense_layers": 1}],
    "qwen3_moe": [{"qk_norm": True}, {"qk_norm": True, "renormalise_gates": False, "n_dense_layers": 2}],
}
CELLS = [
    *(
        (
            "gemma2" if norm in ("sandwich", "peri") else "llama",
            {"norm": norm, "depth_scale": scale, "residual_gate": gate},
        )
        for norm, scale, gate in product(("pre", "sandwich", "peri"), SCALES, ("none", "layerscale"))
    ),
    *(
        (family, {**MOE, **fields, "depth_scale": scale, "residual_gate": gate, "sliding_window": window})
        for family, choices in EXPERTS.items()
        for fields in choices
        for scale, window, gate in (("none", None, "layerscale"), ("lns", 3, "none"), ("after_ffn", None, "layerscale"))
    ),
    *(
        ("olmoe", {**MOE, **OVER_ALL, "renormalise_gates": gates, "depth_scale": scale, "residual_gate": gate})
        for gates in (False, True)
        for scale, gate in (("none", "layerscale"), ("lns", "none"), ("after_ffn", "layerscale"))
    ),
    ("mistral", {"sliding_window": 3}),
    *(("qwen3", {"qk_norm": True, "sliding_window": window}) for window in (None, 3)),
    ("llama", {"tie_embeddings": True, "rope_theta": 500.0, "norm_eps": 1e-3}),
    ("gemma2", {"norm": "sandwich", "residual_gate": "skipinit"}),
    ("gemma2", {"norm": "peri", "tie_embeddings": True, "sliding_window": 4}),
    *(("llama", {"init": init, "n_kv_heads": 1}) for init in ("scaled", "depth_scaled")),
    ("llama", {"init": "zero_outputs", "activation": "reglu"}),
    ("llama", {"parametrisation": "completep", "base_width": 8, "base_depth": 1}),
    ("gemma2", {"parametrisation": "completep", "base_width": 8, "base_depth": 1, "norm": "sandwich"}),
    ("llama", {"attention_dropout": 0.5, "residual_dropout": 0.5, "ffn_dropout": 0.5}),
    ("gemma2", {"norm": "sandwich", "activation": "geglu"}),
    ("llama", {"n_layers": 4, "depth_scale": "lns"}),
]


def config(**fields) -> ModelConfig:
    return build(ModelConfig, {**SMALL, **fields}, "test")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("family", "fields"), [*CELLS, *((None, fields) for fields in ZOO.values())], ids=str)
def test_logits_are_those_of_the_decoder(family, fields):
    """Of the zoo, where it is not refused."""
    fields |= {"gate_init": 0.5} if fields.get("residual_gate") == "layerscale" else {}
    ours = loud(Decoder(config(**fields))).eval()
    if family is None and any(is_so(ours.config) for is_so, _ in REFUSED):
        return
    found = architecture(ours.config)
    assert found.family == (family or found.family)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[found.family](**found.values), dtype=torch.float32).eval()
    missing, unexpected = theirs.load_state_dict(weights(ours), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"} and bool(missing) == theirs.config.tie_word_embeddings
    with torch.no_grad():
        expected, logits = ours(TOKENS), theirs(TOKENS).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("fields", [MOE, {**MOE, **OVER_ALL}, {**MOE, "renormalise_gates": False}], ids=str)
def test_training_on_there_weighs_the_balance_of_experts_as_here(fields):
    """Of one layer, where pooling the layers changes nothing."""
    ours = loud(Decoder(config(n_layers=1, **fields))).eval()
    found = architecture(ours.config)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[found.family](**found.values), dtype=torch.float32)
    theirs.load_state_dict(weights(ours), strict=False)
    ours.hidden(TOKENS, router_losses := [])
    aux_loss = theirs(TOKENS, output_router_logits=True).aux_loss
    expected = ours.config.balance_loss * router_losses[0][0]
    torch.testing.assert_close(theirs.config.router_aux_loss_coef * aux_loss, expected, rtol=1e-4, atol=0)


REFUSALS = [
    ({"norm": "post"}, "norm='post'"),
    ({"norm": "mix", "mix_frac": 0.4}, "norm='mix'"),
    ({"norm": "deepnorm"}, "norm='deepnorm'"),
    ({"norm": "keel"}, "norm='keel'"),
    ({"norm": "post", "residual_gate": "admin"}, "norm='post'"),
    ({"norm_kind": "group"}, "norm_kind='group'"),
    ({"activation": "relu2"}, "activation='relu2'"),
    ({"depth_scale": "after_residual"}, "after_residual"),
    ({"residual_scalars": True}, "residual_scalars=True"),
    ({"gpas": True}, "gpas=True"),
    ({"attention_residuals": 2}, "attention_residuals=2"),
    ({"value_residual": True}, "value_residual=True"),
    ({"n_streams": 2}, "n_streams=2"),
    ({"n_layers": 4, "stream_skips": True}, "stream_skips=True"),
    ({"n_layers": 4, "loops": 2}, "loops=2"),
    ({"gated_attention": "head"}, "gated_attention='head'"),
    ({"sliding_window": 3, "window_pattern": "SL"}, "window_pattern='SL'"),
    ({"mask_documents": True, "eod": 2}, "mask_documents=True"),
    ({"norm": "sandwich", **MOE}, "n_experts=4"),
    ({"norm": "peri", "qk_norm": True}, "Gemma-2"),
    ({**MOE, "qk_norm": True, "n_shared_experts": 1}, "OLMoE have no shared expert"),
    (OVER_ALL, "OLMo-2"),
    ({**MOE, **OVER_ALL, "sliding_window": 3}, "sliding_window=3"),
    ({**MOE, **OVER_ALL, "n_dense_layers": 1}, "n_dense_layers=1"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSALS, ids=str)
def test_what_cannot_be_expressed_is_refused_with_the_reason(fields, reason):
    with pytest.raises(ValueError, match="cannot be exported to transformers") as refused:
        architecture(config(**fields))
    assert reason in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_every_reason_is_given():
    with pytest.raises(ValueError, match=r"norm='post'.*norm_kind='group'.*after_residual"):
        architecture(config(norm="post", norm_kind="group", depth_scale="after_residual"))
    for is_so, reason in REFUSED:
        cases = (*(fields for fields, _ in REFUSALS), *ZOO.values())
        assert any(is_so(config(**fields)) for fields in cases), f"no case is refused for: {reason}"


def test_every_field_and_every_choice_is_expressed_or_refused():
    cases = [*(fields for _, fields in CELLS), *(fields for fields, _ in REFUSALS), *ZOO.values()]
    sizes = ("d_model", "n_heads", "d_ff", "vocab_size", "seq_len", "init_std", "norm_groups")
    missing = untried(cases, (*sizes, "allow", "balance_loss", "router_z_loss"))
    assert not missing, f"{missing}: add an exported case to CELLS, or a refused one to REFUSALS"


def test_every_note_is_given():
    fields = {"depth_scale": "lns", "attention_dropout": 0.1}
    notes = " ".join(architecture(config(**fields)).notes)
    assert all(part in notes for part in ("LayerNorm Scaling", "dropout is left out"))
