"""Attention over sources: uniform averages by hand, and what leaving a layer out means."""

import torch

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "init_std": 0.3}
TOKENS = torch.arange(12).view(2, 6)


def model_of(**fields) -> Decoder:
    return Decoder(build(ModelConfig, {**SMALL, **fields}, "test"))


def test_at_the_start_every_branch_reads_the_mean_of_what_is_there():
    """Each output by itself: branches read x_0, (x_0 + a_1) / 2, (x_0 + a_1 + f_1) / 3, ..., the head all five."""
    model = model_of(attention_residuals=4)
    context, outputs = model.positions(6), [model.embed(TOKENS)]
    for block in model.blocks:
        for part in ("attention", "ffn"):
            normed_BTD = getattr(block, f"{part}_norm")(torch.stack(outputs).mean(0))
            outputs.append(block.attention(normed_BTD, context) if part == "attention" else block.ffn(normed_BTD))
    torch.testing.assert_close(model.hidden(TOKENS), torch.cat(outputs, dim=-1))
    torch.testing.assert_close(model(TOKENS), model.head(model.norm(torch.stack(outputs).mean(0))))


def test_a_query_picks_the_source_that_lies_its_way():
    """Source 1 is 3 e_1 and source 2 is e_2, a query of 100 e_2 reads source 2 alone, and only where it is seen."""
    model = model_of(attention_residuals=2)
    x_SD = torch.zeros(3, 16)
    x_SD[0, 0], x_SD[1, 1], x_SD[2, 2] = 1.0, 3.0, 1.0
    block = model.blocks[1]
    for part, expected in ((model.sources, 2), (block.ffn_sources, 2), (block.attention_sources, 0)):
        with torch.no_grad():
            part.query_scalar[2], part.query_scalar[0] = 100.0, 50.0
        torch.testing.assert_close(part.read(x_SD.view(1, 1, 48))[0, 0], x_SD[expected])


def test_a_layer_that_is_left_out_adds_nothing_to_its_source():
    probed = ProbedDecoder(model_of(attention_residuals=2))
    x_BTW = probed.embed(TOKENS)
    assert x_BTW.shape == (2, 6, 48) and not x_BTW[..., 16:].any()
    (after_BTW, branches) = probed.block(2, x_BTW), probed.branches(2, x_BTW)
    assert branches is not None and not after_BTW[..., 16:32].any()
    torch.testing.assert_close(after_BTW, x_BTW + sum(branches))
    torch.testing.assert_close(probed.logits(x_BTW), probed.model.head(probed.model.norm(x_BTW[..., :16] / 3)))
