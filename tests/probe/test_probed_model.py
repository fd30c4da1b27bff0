"""The decoder seen as measures see it: the same numbers as the model, every matrix once, nothing left changed.

Attention weights: blocks of rows are the rows of the whole; windows and caps by hand.
"""

import math

import pytest
import torch
from reference import FAMILIES, ZOO, run_config
from support.handmade_models import integers, normal

from sparsedepth.model.decoder import Decoder
from sparsedepth.model.feedforward import Experts
from sparsedepth.probe.probed_model import AttentionForm, ProbedDecoder, attention_rows

CASES = {**FAMILIES, **ZOO}


@pytest.mark.parametrize("family", CASES)
def test_matrices_are_the_blocks_weights_without_norms_and_router(family):
    probed = ProbedDecoder(Decoder(run_config(**CASES[family])))
    for layer, block in enumerate(probed.model.blocks, start=1):
        expected = sum(p.numel() for name, p in block.named_parameters() if p.ndim > 1 and "router" not in name)
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
            read_BTD = block.branch_input("attention", x_BTD)
            v = block.attention.value(read_BTD).unflatten(-1, (2, 8)).transpose(1, 2)
            v = v.repeat_interleave(2, dim=1).repeat(copies, 1, 1, 1)
            expected = block.attention.output((weight_BHTT @ v).transpose(1, 2).flatten(2))
            found = block.attention(read_BTD, model.context(tokens, x_BTD))
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
        expected, _ = block.attention.queries_keys(block.attention_norm(x_BTD), model.positions(16).rotary)
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


Q, K = normal(2, 4, 9, 6, seed=1), normal(2, 2, 9, 6, seed=2)


@pytest.mark.parametrize("form", [AttentionForm(), AttentionForm(window=3), AttentionForm(softcap=0.5, window=1)])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_blocks_are_the_rows_of_the_whole(form, rows):
    whole, future = attention_rows(Q, K, 0, 9, form)
    for start in range(0, 9, rows):
        stop = min(start + rows, 9)
        part, hidden = attention_rows(Q, K, start, stop, form)
        torch.testing.assert_close(part, whole[:, :, start:stop, :stop])
        assert torch.equal(hidden, future[start:stop, :stop])
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 4, 9))
    assert not whole[..., future].any() and torch.equal(future, torch.ones(9, 9).triu(1).bool())


def test_plain_attention_is_the_softmax_of_q_k_over_root_width():
    whole, future = attention_rows(Q, K, 0, 9)
    score = torch.einsum("bhtk,bhsk->bhts", Q, K.repeat_interleave(2, dim=1)) / math.sqrt(6)
    torch.testing.assert_close(whole, score.masked_fill(future, -math.inf).softmax(-1))


def test_a_window_hides_what_lies_before_it():
    """Equal scores: each row is uniform over the window's keys, min(i, 2) of them."""
    zeros = torch.zeros(1, 1, 4, 2)
    expected = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]
    found, _ = attention_rows(zeros, zeros, 0, 4, AttentionForm(window=2))
    torch.testing.assert_close(found[0, 0], torch.tensor(expected))


def test_documents_hide_each_other():
    """Equal scores: each row is uniform over its document's keys, and a sequence's documents are its own."""
    zeros = torch.zeros(2, 1, 3, 2)
    form = AttentionForm(documents=torch.tensor([[0, 1, 1], [0, 0, 0]]))
    expected = [[[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5]], [[1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]]
    found, _ = attention_rows(zeros, zeros, 0, 3, form)
    torch.testing.assert_close(found[:, 0], torch.tensor(expected))
    part, _ = attention_rows(zeros, zeros, 1, 2, form)
    torch.testing.assert_close(part, found[:, :, 1:2, :2])


def test_a_cap_bounds_the_scores():
    """Scores 0 and 1e6 with a cap of ln 3: 3 to 1, whatever the second score is."""
    q, k = torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[0.0], [1e6]]]])
    found, _ = attention_rows(q, k, 1, 2, AttentionForm(softcap=math.log(3)))
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([0.25, 0.75]))
