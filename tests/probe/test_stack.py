"""The decoder seen as a stack: the same numbers as the model, every matrix once, nothing left changed."""

import pytest
import torch
from reference import FAMILIES, run_config
from toy import integers

from sparsedepth.model.decoder import Decoder, Experts
from sparsedepth.probe.stack import DecoderStack


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stack_composes_to_the_model(family):
    model = Decoder(run_config(**FAMILIES[family]))
    stack, tokens = DecoderStack(model), integers(40, 2, 16)
    x = stack.embed(tokens)
    for layer in range(1, stack.n_layers + 1):
        x = stack.block(layer, x)
    torch.testing.assert_close(stack.logits(x), model(tokens), rtol=0, atol=0)
    assert stack.logits(x).shape[-1] == stack.vocab_size


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_the_blocks_weights_without_norms_and_router(family):
    stack = DecoderStack(Decoder(run_config(**FAMILIES[family])))
    for layer, block in enumerate(stack.model.blocks, start=1):
        expected = sum(p.numel() for name, p in block.named_parameters() if p.ndim > 1 and "router" not in name)
        assert sum(matrix.numel() for matrix in stack.matrices(layer).values()) == expected
        assert all(matrix.ndim == 2 for matrix in stack.matrices(layer).values())


def test_the_matrices_of_an_expert_are_its_own():
    stack = DecoderStack(Decoder(run_config(**FAMILIES["moe"])))
    experts = stack.model.get_submodule("blocks.1.ffn")
    assert isinstance(experts, Experts)
    with torch.no_grad():
        experts.gate_up_E2FD[2, 24:].fill_(7.0)  # d_expert = 24: the gate's rows come first
        experts.down_EDF[3].fill_(5.0)
    matrices = stack.matrices(2)
    assert [name for name, matrix in matrices.items() if (matrix == 7).all()] == ["expert2.up"]
    assert [name for name, matrix in matrices.items() if (matrix == 5).all()] == ["expert3.down"]


def test_exact_puts_each_kernel_back_also_after_an_error():
    stack = DecoderStack(Decoder(run_config(**FAMILIES["moe"])))
    mixtures = [module for module in stack.model.modules() if isinstance(module, Experts)]
    mixtures[1].kernel = "loop"
    with pytest.raises(RuntimeError, match="inside"), stack.exact():
        assert {mixture.kernel for mixture in mixtures} == {"grouped"}
        raise RuntimeError("inside")
    assert [mixture.kernel for mixture in mixtures] == ["grouped", "loop", "grouped", "grouped", "grouped"]


def test_a_compiled_block_is_measured_uncompiled():
    def refuse(graph, inputs):
        raise AssertionError("compiled")

    model = Decoder(run_config())
    x = torch.ones(1, 3, 32)
    expected = DecoderStack(model).block(1, x)
    model.blocks[0].compile(backend=refuse)
    torch.testing.assert_close(DecoderStack(model).block(1, x), expected, rtol=0, atol=0)
