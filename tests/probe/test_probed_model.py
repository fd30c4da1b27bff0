"""The decoder seen as measures see it: the same numbers as the model, every matrix once, nothing left changed."""

import pytest
import torch
from handmade import integers
from reference import FAMILIES, ZOO, run_config

from sparsedepth.model.decoder import Decoder
from sparsedepth.model.moe import Experts
from sparsedepth.probe.probed_model import ProbedDecoder, attention_rows

CASES = {**FAMILIES, **ZOO}


@pytest.mark.parametrize("family", CASES)
def test_the_blocks_compose_to_the_model(family):
    model = Decoder(run_config(**CASES[family]))
    probed, tokens = ProbedDecoder(model), integers(40, 2, 16)
    x = probed.embed(tokens)
    for layer in range(1, probed.n_layers + 1):
        x = probed.block(layer, x)
    torch.testing.assert_close(probed.logits(x), model(tokens), rtol=0, atol=0)
    assert probed.logits(x).shape[-1] == probed.vocab_size


@pytest.mark.parametrize("family", CASES)
def test_matrices_are_the_blocks_weights_without_norms_and_router(family):
    probed = ProbedDecoder(Decoder(run_config(**CASES[family])))
    for layer, block in enumerate(probed.model.blocks, start=1):
        expected = sum(
            p.numel()
            for name, p in block.named_parameters()
            if p.ndim > 1 and "router" not in name and "streams" not in name
        )
        assert sum(matrix.numel() for matrix in probed.matrices(layer).values()) == expected
        assert all(matrix.ndim == 2 for matrix in probed.matrices(layer).values())


@pytest.mark.parametrize("name", ["window", "documents", "qk_norm", "mix", "peri"])
def test_attention_weights_are_those_of_the_model(name):
    """Rows of attention, times the values, are what the kernel makes of them; also for copies, as forks are."""
    model = Decoder(run_config(**ZOO[name], n_kv_heads=2))
    probed, tokens = ProbedDecoder(model), integers(6, 3, 12)
    x_BTD = probed.embed(tokens)
    for layer, block in enumerate(model.blocks, start=1):
        for copies in (1, 2):
            q, k, form = probed.attention_inputs(layer, x_BTD.repeat(copies, 1, 1))
            weight_BHTT, _ = attention_rows(q, k, 0, 12, form)
            v = block.attention.value(block.attention_input(x_BTD)).unflatten(-1, (2, 8)).transpose(1, 2)
            v = v.repeat_interleave(2, dim=1).repeat(copies, 1, 1, 1)
            expected = block.attention.output((weight_BHTT @ v).transpose(1, 2).flatten(2))
            found = block.attention(block.attention_input(x_BTD), model.rotary(12), model.documents(tokens))
            torch.testing.assert_close(found.repeat(copies, 1, 1), expected, atol=1e-5, rtol=1e-5)
        x_BTD = probed.block(layer, x_BTD)


def test_what_is_read_of_the_first_state_is_repeated_for_copies():
    """Queries are of a x + b x_0; with a = 0 and b = 1 those of x_0 at any layer, whatever the stream is."""
    model = Decoder(run_config(residual_scalars=True, value_residual=True))
    with torch.no_grad():
        for name, scalar in model.named_parameters():
            if name.endswith((".stream_scalar", ".first_scalar")):
                scalar.fill_(float("first" in name))
    probed, tokens = ProbedDecoder(model), integers(40, 2, 16)
    x_BTD = probed.embed(tokens)
    for layer, block in enumerate(model.blocks, start=1):
        expected, _ = block.attention.queries_keys(block.attention_norm(x_BTD), model.rotary(16))
        q, _, _ = probed.attention_inputs(layer, torch.ones(4, 16, 32))
        torch.testing.assert_close(q, expected.repeat(2, 1, 1, 1), rtol=0, atol=0)
        assert probed.branches(layer, x_BTD) is None


def test_the_stream_of_other_tokens_is_refused_where_documents_matter():
    probed = ProbedDecoder(Decoder(run_config(**ZOO["documents"])))
    x_BTD = probed.embed(integers(40, 2, 16))
    probed.embed(integers(40, 3, 16))
    with pytest.raises(AssertionError, match="not of the tokens embedded last"):
        probed.block(1, x_BTD)


def test_the_matrices_of_an_expert_are_its_own():
    probed = ProbedDecoder(Decoder(run_config(**FAMILIES["moe"])))
    experts = probed.model.get_submodule("blocks.1.ffn")
    assert isinstance(experts, Experts)
    with torch.no_grad():
        experts.gate_up_E2FD[2, 24:].fill_(7.0)  # d_expert = 24: the gate's rows come first
        experts.down_EDF[3].fill_(5.0)
    matrices = probed.matrices(2)
    assert [name for name, matrix in matrices.items() if (matrix == 7).all()] == ["expert2.up"]
    assert [name for name, matrix in matrices.items() if (matrix == 5).all()] == ["expert3.down"]


def test_exact_puts_each_kernel_back_also_after_an_error():
    probed = ProbedDecoder(Decoder(run_config(**FAMILIES["moe"])))
    mixtures = [module for module in probed.model.modules() if isinstance(module, Experts)]
    mixtures[1].kernel = "loop"
    probed.model.blocks[0].attention.kernel = "flash"
    with pytest.raises(RuntimeError, match="inside"), probed.exact():
        assert {mixture.kernel for mixture in mixtures} == {"grouped"}
        assert probed.model.blocks[0].attention.kernel == "sdpa"
        raise RuntimeError("inside")
    assert probed.model.blocks[0].attention.kernel == "flash"
    assert [mixture.kernel for mixture in mixtures] == ["grouped", "loop", "grouped", "grouped", "grouped"]


def test_a_compiled_block_is_measured_uncompiled():
    def refuse(graph, inputs):
        raise AssertionError("compiled")

    model = Decoder(run_config())
    x = torch.ones(1, 3, 32)
    expected = ProbedDecoder(model).block(1, x)
    model.blocks[0].compile(backend=refuse)
    torch.testing.assert_close(ProbedDecoder(model).block(1, x), expected, rtol=0, atol=0)
