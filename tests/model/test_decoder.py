"""The decoder against transformers, and its properties."""

import ast
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import ZOO, untried
from support import decoder_fp64
from support.hf_parity import carry, ours_to_reference, reference
from support.run_folders import loud
from torch._dynamo.testing import CompileCounter

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.role import fields_where
from sparsedepth.model import attention, decoder
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.feedforward import Experts, RouterLoss

SMALL = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 50, "seq_len": 24}


def config(**fields) -> ModelConfig:
    return build(ModelConfig, {**SMALL, **fields}, "test")


def tokens(n_sequences: int = 2, n_tokens: int = 24) -> torch.Tensor:
    return torch.randint(0, 50, (n_sequences, n_tokens), generator=torch.Generator().manual_seed(1))


ELSEWHERE = {
    **dict.fromkeys(("d_model", "n_heads", "d_ff", "vocab_size", "seq_len", "n_kv_heads"), "tests/reference.py"),
    **dict.fromkeys(("tie_embeddings", "rope_theta", "norm_eps"), "tests/model/test_decoder.py"),
    **dict.fromkeys(("balance_loss", "router_z_loss"), "tests/train/test_loop.py"),
    "init_std": "tests/model/test_init.py",
    "norm_groups": "tests/support/decoder_fp64.py",
    "allow": "tests/config/test_run.py",
}
"""Fields that the zoo leaves as they are -> the file that tries each. Dropout: tests/model/test_dropout.py, which takes
its fields from their role."""


def test_the_zoo_has_every_field_and_every_choice():
    """See also tests/config/test_cost.py and tests/exchange/test_architecture.py."""
    dropouts = fields_where(ModelConfig, lambda role: role.acts and "noise" in role.acts)
    missing = untried(ZOO.values(), {*ELSEWHERE, *dropouts})
    assert not missing, f"{missing}: add to ZOO of tests/reference.py, or name the file that tries it in ELSEWHERE"


@pytest.mark.parametrize("field", ELSEWHERE)
def test_a_field_outside_the_zoo_is_tried_elsewhere(field):
    path = Path(__file__).parents[2] / ELSEWHERE[field]
    named_here = 1 if path == Path(__file__) else 0
    assert len(re.findall(rf"\b{field}\b", path.read_text())) > named_here, f"{ELSEWHERE[field]} does not try {field}"


@pytest.mark.parametrize("name", ZOO)
def test_no_field_of_the_zoo_is_ignored(name):
    """Beside the plain decoder of the same seed: other parameters, or other logits."""
    plain, changed = Decoder(config()), Decoder(config(**ZOO[name]))
    weights, others = plain.state_dict(), changed.state_dict()
    same_weights = weights.keys() == others.keys() and all(torch.equal(w, others[key]) for key, w in weights.items())
    assert not (same_weights and torch.equal(plain(tokens() % 5), changed(tokens() % 5)))


OLMOE = {"n_experts": 4, "top_k": 2, "qk_norm": True, "qk_norm_over": "all"}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"n_kv_heads": 2}),
        ("llama", {"n_kv_heads": 1, "tie_embeddings": True, "rope_theta": 500.0, "norm_eps": 1e-4}),
        ("mixtral", {"n_experts": 4, "top_k": 2, "n_kv_heads": 2}),
        ("mixtral", {"n_experts": 3, "top_k": 3, "d_expert": 20}),
        ("mistral", {"n_kv_heads": 2, "sliding_window": 5}),
        ("qwen3", {"n_kv_heads": 2, "qk_norm": True}),
        ("olmoe", {**OLMOE, "renormalise_gates": False}),
        ("olmoe", {**OLMOE, "n_kv_heads": 2, "d_expert": 20}),
    ],
)
@pytest.mark.parametrize("kernel", ["loop", "grouped"])
def test_logits_and_gradients_equal_the_reference(family, fields, kernel):
    model = loud(Decoder(config(**fields)))
    model.use_kernels(experts=kernel)
    other = carry(model, reference(model.config, family))
    ours, theirs = model(tokens()), other(tokens()).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for logits in (ours, theirs):
        F.cross_entropy(logits.flatten(0, 1), tokens().flatten()).backward()
    theirs_by_name = dict(other.named_parameters())
    for name, theirs_name in ours_to_reference(model).items():
        own_gradient = dict(model.named_parameters())[name].grad
        torch.testing.assert_close(own_gradient, theirs_by_name[theirs_name].grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["pre", "n_kv_heads", *ZOO])
def test_no_position_sees_the_future(name):
    """d logits[t] / d x[s] is zero for every s > t, and not for s = t."""
    fields = {"pre": {}, "n_kv_heads": {"n_kv_heads": 1}, **ZOO}[name]
    model = loud(Decoder(config(**fields)))
    x_BTD = model.embed_tokens(tokens(1, 10)).detach().requires_grad_()
    context, x = model.context(torch.zeros(1, 10), x_BTD), x_BTD
    for block in model.blocks:
        x = block(x, context)
    logits = model.logits(x)
    for t in (0, 4, 8):
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), x_BTD, retain_graph=True)
        assert gradient[0, t + 1 :].abs().max() == 0 and gradient[0, t].abs().max() > 0


def test_experts_of_any_width_compute_where_no_kernel_was_chosen():
    """PyTorch's grouped product takes rows of 16 bytes; Admin's profile runs while the decoder is made."""
    model = Decoder(config(n_experts=4, top_k=3, d_expert=7, norm="post", residual_gate="admin"))
    chosen = model(tokens())
    model.use_kernels(experts="loop")
    torch.testing.assert_close(chosen, model(tokens()))


@pytest.mark.parametrize("top_k", [1, 2])
def test_router_losses_of_balanced_and_collapsed_routing(top_k):
    """Zero router: uniform probabilities, so P_e = 1/E and balance = E sum f_e / E = 1; z = log(E)^2. Where all tokens
    choose the same k with probability 1/k each: E / k, as f_e is a share of the choices."""
    experts = Experts(config(n_experts=4, top_k=top_k, d_expert=8, renormalise_gates=top_k > 1))
    for weight in experts.parameters():
        torch.nn.init.zeros_(weight)
    x_BTD = torch.ones(1, 6, 32)
    experts(x_BTD, balanced := RouterLoss())
    torch.testing.assert_close(balanced.value, torch.tensor([1.0, math.log(4) ** 2]))
    with torch.no_grad():
        experts.router.weight[1 : 1 + top_k] = 10.0
    experts(x_BTD, collapsed := RouterLoss())
    torch.testing.assert_close(collapsed.value[0], torch.tensor(4.0 / top_k))


def test_every_layer_reports_its_router_losses():
    model = Decoder(config(n_experts=4, top_k=2))
    found: list[torch.Tensor] = []
    model.hidden(tokens(), found)
    assert len(found) == 3


def test_weights_depend_on_seed_and_name_alone():
    shallow, deep = Decoder(config(), seed=5), Decoder(config(n_layers=6, n_kv_heads=2), seed=5)
    for name in ("embed.weight", "blocks.2.ffn.up.weight", "blocks.0.attention.query.weight"):
        assert torch.equal(shallow.get_parameter(name), deep.get_parameter(name))
    assert not torch.equal(shallow.embed.weight, Decoder(config(), seed=6).embed.weight)


TINY = {"n_layers": 3, "d_model": 8, "n_heads": 2, "d_ff": 12, "vocab_size": 11, "seq_len": 6, "norm_groups": 4}
SEQUENCE = [3, 2, 5, 2, 9, 1]
SCALES = ("none", "lns", "before_norm", "after_branch", "after_residual", "after_attention", "after_ffn")


def check_against_loops(fields: dict) -> None:
    """Every state of a sequence and its logits, in fp64 but for RoPE's tables, against the decoder written a second
    time."""
    model = loud(Decoder(build(ModelConfig, {**TINY, **fields}, "test"))).double()
    model.use_kernels(experts="loop")  # the grouped product knows no fp64
    tokens_1T = torch.tensor([SEQUENCE])
    x_BTD, found = model.embed_tokens(tokens_1T), []
    context = model.context(tokens_1T, x_BTD)
    for block in model.blocks:
        found.append(x_BTD)
        x_BTD = block(x_BTD, context)
    torch.testing.assert_close(model.hidden(tokens_1T), x_BTD, rtol=0, atol=0)
    states = decoder_fp64.states(model, SEQUENCE)
    plain = [*states, decoder_fp64.logits(model, states[-1])]
    for ours, theirs in zip([*found, x_BTD, model.logits(x_BTD)], plain, strict=True):
        np.testing.assert_allclose(ours[0].detach().numpy(), theirs, rtol=1e-5, atol=1e-6, err_msg=str(fields))


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich", "peri", "mix", "deepnorm", "keel"])
@pytest.mark.parametrize("gate", ["none", "layerscale", "skipinit", "admin"])
def test_every_placement_scale_and_gate_is_its_formula(norm, gate):
    if gate == "admin" and norm != "post":
        with pytest.raises(ValueError, match="norm='post'"):
            config(norm=norm, residual_gate=gate)
        return
    for depth_scale in SCALES:
        check_against_loops({"norm": norm, "residual_gate": gate, "depth_scale": depth_scale})


@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_is_its_formula(name):
    check_against_loops({**ZOO[name], "n_kv_heads": 1})


GATED = {"value_residual": True, "depth_scale": "lns", "residual_gate": "layerscale", "gate_init": 0.5}


@pytest.mark.parametrize(
    "fields",
    [
        {**GATED, "n_layers": 6, "norm": "mix", "residual_scalars": True},
        *({**GATED, "attention_residuals": n, "norm": "sandwich"} for n in (1, 2, 6)),
        *(
            {"norm": norm, "gpas": True, "depth_scale": "after_residual"}
            for norm in ("pre", "post", "peri", "mix", "keel")
        ),
    ],
    ids=str,
)
def test_what_goes_together_is_its_formula(fields):
    check_against_loops(fields)


def test_a_gradient_passes_a_shrunk_stream_as_if_it_were_whole_and_measures_see_the_derivative():
    """p = 1: each of two sums keeps 1 - silu(1) = 0.269 of the stream. The branches are 0."""
    model = Decoder(config(gpas=True, init="zero_outputs"))
    kept = 1 - 1 / (1 + math.exp(-1))
    with torch.no_grad():
        model.blocks[0].gpas_scalar.fill_(1.0)
    for mode, expected in ((True, 1.0), (False, kept**2)):
        x_BTD = model.embed_tokens(tokens()).detach().requires_grad_()
        u_BTD = model.train(mode).blocks[0](x_BTD, model.positions(24))
        torch.testing.assert_close(u_BTD, kept**2 * x_BTD)
        (gradient,) = torch.autograd.grad(u_BTD.sum(), x_BTD)
        torch.testing.assert_close(gradient, torch.full_like(x_BTD, expected))


@pytest.mark.parametrize(
    "fields", [{"depth_scale": "lns", "gpas": True, "norm": "keel"}, {"attention_residuals": 4}], ids=str
)
def test_blocks_compile_to_one_graph_for_all_layers(fields):
    model, tokens_BT = Decoder(config(**{"n_layers": 2, **fields})), tokens()
    expected = model(tokens_BT)
    backend = CompileCounter()
    for block in model.blocks:
        block.compile(backend=backend, dynamic=False, fullgraph=True)
    torch.testing.assert_close(model(tokens_BT), expected)
    assert backend.frame_count == 1


def test_a_packed_document_is_computed_as_if_it_stood_alone():
    model = loud(Decoder(config(mask_documents=True, eod=7)))
    first, second = tokens(1, 9) % 7, tokens(1, 13) % 7
    first[0, -1] = 7
    packed = model(torch.cat((first, second), dim=1))
    torch.testing.assert_close(packed[:, :9], model(first), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed[:, 9:], model(second), atol=1e-4, rtol=1e-4)
    blind = loud(Decoder(config()))
    assert not torch.allclose(blind(torch.cat((first, second), dim=1))[:, 9:], blind(second), atol=1e-2)


def test_documents_are_numbered_and_their_end_belongs_to_them():
    model = Decoder(config(mask_documents=True, eod=7))
    assert model.documents(torch.tensor([[7, 1, 2, 7, 7, 3]])).tolist() == [[0, 1, 1, 1, 2, 3]]
    assert Decoder(config()).documents(tokens()) is None


@pytest.mark.parametrize("name", ZOO)
def test_mixed_precision_gives_the_kernels_one_dtype_and_nearly_the_same_logits(name, monkeypatch):
    model, seen = Decoder(config(**ZOO[name])), set()

    def watched(q, k, v, context, dropout, sdpa=attention.KERNELS["sdpa"]):
        seen.update(x.dtype for x in (q, k, v))
        return sdpa(q, k, v, context, dropout)

    monkeypatch.setitem(attention.KERNELS, "sdpa", watched)
    expected = model(tokens())
    assert seen == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(tokens())
    assert seen == {torch.bfloat16}
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)


def test_the_decoder_and_each_variant_are_short():
    """What is read in a sitting: `variants` hold classes of at most 40 lines."""
    model = Path(decoder.__file__).parent
    assert len((model / "decoder.py").read_text().splitlines()) <= 150
    for path in (model / "variants").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                assert node.body[-1].end_lineno - node.lineno < 40, f"{path.name}: {node.name}"
