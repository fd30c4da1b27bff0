"""The decoder seen as measures see it: the same numbers as the model, every matrix once, nothing left changed.

Attention weights: blocks of rows are the rows of the whole; windows and caps by hand.
"""

import math

import pytest
import torch
from reference import FAMILIES, ZOO, run_config
from support.attention_weights import assert_weights_are_used
from support.handmade_models import integers, normal

from sparsedepth.model.attention import attention_rows
from sparsedepth.model.context import Context
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.feedforward import Experts
from sparsedepth.probe.probed_model import ProbedDecoder

CASES = {**FAMILIES, **ZOO}


@pytest.mark.parametrize("family", CASES)
def test_matrices_are_the_blocks_weights_without_norms_and_router(family):
    probed = ProbedDecoder(Decoder(run_config(**CASES[family])))
    for layer, block in enumerate(probed.model.blocks, start=1):
        expected = sum(
            p.numel()
            for name, p in block.named_parameters()
            if p.ndim > 1 and not any(part in name for part in ("router", "_streams"))
        )
        assert sum(matrix.numel() for matrix in probed.matrices(layer).values()) == expected
        assert all(matrix.ndim == 2 for matrix in probed.matrices(layer).values())


@pytest.mark.parametrize("family", CASES)
def test_the_weights_that_measures_read_are_those_of_the_model(monkeypatch, family):
    probed = ProbedDecoder(Decoder(run_config(**{"n_kv_heads": 2, **CASES[family]})).eval())
    assert_weights_are_used(monkeypatch, probed, integers(6, 3, 12))


def test_what_is_read_of_the_first_state_is_repeated_for_copies():
    """Queries are of a x + b x_0; with a = 0 and b = 1 those of x_0 at any layer, whatever the stream is."""
    model = Decoder(run_config(residual_scalars=True, value_residual=True))
    with torch.no_grad():
        for name, scalar in model.named_parameters():
            if name.endswith((".stream_scalar", ".first_scalar")):
                scalar.fill_(float("first" in name))
    probed, tokens = ProbedDecoder(model), integers(40, 2, 16)
    x_BTD = probed.embed(tokens)
    context = model.context(tokens, x_BTD, in_order=False)
    for layer, block in enumerate(model.blocks, start=1):
        expected, _ = block.attention.kernel_inputs(block.attention_norm(x_BTD), context)
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


@pytest.mark.parametrize("form", [Context(), Context(window=3), Context(softcap=0.5, window=1)])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_blocks_are_the_rows_of_the_whole(form, rows):
    whole, future = attention_rows(Q, K, 0, 9, form), torch.ones(9, 9).triu(1).bool()
    for start in range(0, 9, rows):
        stop = min(start + rows, 9)
        part = attention_rows(Q, K, start, stop, form)
        torch.testing.assert_close(part, whole[:, :, start:stop, :stop])
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 4, 9))
    assert not whole[..., future].any()


def test_plain_attention_is_the_softmax_of_q_k_over_root_width():
    whole, future = attention_rows(Q, K, 0, 9, Context()), torch.ones(9, 9).triu(1).bool()
    score = torch.einsum("bhtk,bhsk->bhts", Q, K.repeat_interleave(2, dim=1)) / math.sqrt(6)
    torch.testing.assert_close(whole, score.masked_fill(future, -math.inf).softmax(-1))


def test_a_window_hides_what_lies_before_it():
    """Equal scores: each row is uniform over the window's keys, min(i, 2) of them."""
    zeros = torch.zeros(1, 1, 4, 2)
    expected = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]
    found = attention_rows(zeros, zeros, 0, 4, Context(window=2))
    torch.testing.assert_close(found[0, 0], torch.tensor(expected))


def test_documents_hide_each_other():
    """Equal scores: each row is uniform over its document's keys, and a sequence's documents are its own."""
    zeros = torch.zeros(2, 1, 3, 2)
    form = Context(document_BT=torch.tensor([[0, 1, 1], [0, 0, 0]]))
    expected = [[[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5]], [[1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]]
    found = attention_rows(zeros, zeros, 0, 3, form)
    torch.testing.assert_close(found[:, 0], torch.tensor(expected))
    part = attention_rows(zeros, zeros, 1, 2, form)
    torch.testing.assert_close(part, found[:, :, 1:2, :2])


def test_a_cap_bounds_the_scores():
    """Scores 0 and 1e6 with a cap of ln 3: 3 to 1, whatever the second score is."""
    q, k = torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[0.0], [1e6]]]])
    found = attention_rows(q, k, 1, 2, Context(softcap=math.log(3)))
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([0.25, 0.75]))
