"""Two blocks replaced by one affine map; a clean state put back at one position; pairs that are sampled by default."""

import numpy as np
import pytest
import torch
from reference import FAMILIES, run_config
from support.handmade_models import (
    HandMadeModel,
    by_layer,
    found_by,
    identity,
    integers,
    normal,
    residual_mlp,
    score,
    scored_text,
    tokens_per_pass,
)
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from sparsedepth.config.run import MeasureOnlyConfig
from sparsedepth.measure.interventions import NOISE, add_permutation_rows, add_trace_map_rows, add_trace_rows
from sparsedepth.measure.usefulness import add_span_rows, fit_affine
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.hf_adapter import ProbedHfModel
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities.measured import MEASURES, pairs_to_swap

TOKENS = integers(40, 6, 17)


def test_two_linear_blocks_are_one_map():
    """Each is affine, so their product is; with a block that is not, only the spans that hold it lose."""

    def turned(x_BTD):
        return x_BTD @ (torch.eye(4) + 0.1 * normal(4, 4)) + 0.3

    model = HandMadeModel([turned, turned, residual_mlp(4, 1), turned], normal(40, 4))
    found = found_by(add_span_rows, model, scored_text(TOKENS), integers(40, 40, 17))
    added = by_layer(found, "span_loss_added")
    assert [row["layer"] for row in found.layers] == [2, 3, 4]
    assert added[0] == pytest.approx(0, abs=1e-5) and min(map(abs, added[1:])) > 1e-4
    assert found.summary["span_loss_added"] == pytest.approx(sum(added) / 3)


def test_one_block_has_no_span():
    model = HandMadeModel([residual_mlp(4, 1)], normal(40, 4))
    assert found_by(add_span_rows, model, scored_text(TOKENS), integers(40, 40, 17)).summary == {}


def test_spans_against_a_plain_loop():
    model, fit = Decoder(run_config(**FAMILIES["gqa_lns"])), integers(40, 60, 17)
    probed = ProbedDecoder(model)
    found = by_layer(found_by(add_span_rows, probed, scored_text(TOKENS), fit), "span_loss_added")
    maps = fit_affine(probed, fit, span=2)

    def loss(layer):
        with torch.no_grad():
            x = probed.embed(TOKENS[:, :-1])
            for block in range(1, probed.n_layers + 1):
                if block == layer:
                    x = maps[layer - 2](x)
                elif block != layer - 1 or layer == 0:
                    x = probed.block(block, x)
            return cross_entropy(probed.logits(x).flatten(0, 1), TOKENS[:, 1:].flatten()).item()

    expected = [loss(layer) - loss(0) for layer in range(2, probed.n_layers + 1)]
    assert found == pytest.approx(expected, abs=1e-5)
    x = torch.cat([probed.embed(fit)])  # least squares on the same tokens, by lstsq
    with torch.no_grad():
        after = probed.block(2, probed.block(1, x))
        ones = torch.cat((x.flatten(0, 1), torch.ones(x.shape[0] * x.shape[1], 1)), dim=1).double()
        solved = ones @ torch.linalg.lstsq(ones, after.flatten(0, 1).double()).solution
        torch.testing.assert_close(maps[0](x).flatten(0, 1).double(), solved, rtol=0, atol=1e-3)


def test_without_attention_a_clean_state_restores_everything():
    model = HandMadeModel([residual_mlp(4, 0), identity, residual_mlp(4, 1)], normal(40, 4))
    found = found_by(add_trace_rows, model, scored_text(TOKENS))
    assert by_layer(found, "trace_restored") == pytest.approx([1, 1, 1, 1], abs=1e-5)
    assert found.summary["trace_restored"] == pytest.approx(1, abs=1e-5)


def test_what_earlier_positions_hold_is_restored_late():
    """Block 2 copies the state of position 0 to all: before it a clean last state is worth nothing, after it all."""

    def copied(x_BTD):
        return x_BTD[:, :1].expand_as(x_BTD).clone()

    model = HandMadeModel([identity, copied, identity], normal(40, 4))
    found = found_by(add_trace_rows, model, scored_text(TOKENS))
    assert by_layer(found, "trace_restored") == pytest.approx([0, 0, 1, 1], abs=1e-6)
    assert found.summary["trace_restored"] == pytest.approx(1 / 3)


def of_position(found, position: int) -> list[float]:
    return by_layer(found, f"trace_map@{position}")


def test_a_map_shows_at_which_layer_an_answer_moves_from_where_to_where():
    """Block 2 copies the state of position 1 to all: the answer is there before it and at the last position, 16, after
    it; no other position ever has it."""

    def copied(x_BTD):
        return x_BTD[:, :1].expand_as(x_BTD).clone()

    found = found_by(
        add_trace_map_rows, HandMadeModel([identity, copied, identity], normal(40, 4)), scored_text(TOKENS)
    )
    assert of_position(found, 1) == pytest.approx([1, 1, 0, 0], abs=1e-6)
    assert of_position(found, 16) == pytest.approx([0, 0, 1, 1], abs=1e-6)
    assert sum(map(sum, (of_position(found, position) for position in range(2, 16)))) == pytest.approx(0, abs=1e-5)
    assert {row["metric"] for row in found.layers} == {f"trace_map@{position}" for position in range(1, 17)}


def test_a_map_against_a_loop_on_transformers_alone():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, **sizes)).eval()
    found = found_by(add_trace_map_rows, ProbedHfModel(model), scored_text(TOKENS))
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((16, 16))).float()
    blocks = [model.model.embed_tokens, *model.model.layers]

    def run(after=lambda layer, x: x) -> tuple[float, list[torch.Tensor]]:
        """The loss at the last position, and the states that `after` makes of the outputs of the layers."""
        states: list[torch.Tensor] = []

        def changed(layer, x):
            states.append(after(layer, x.clone()))
            return states[-1]

        hooks = [
            block.register_forward_hook(lambda module, given, x, layer=layer: changed(layer, x))
            for layer, block in enumerate(blocks)
        ]
        with torch.no_grad():
            logits = model(TOKENS[:, :-1]).logits[:, -1]
        for hook in hooks:
            hook.remove()
        return cross_entropy(logits, TOKENS[:, -1]).item(), states

    clean, states = run()

    def traced(layer: int, position: int) -> float:
        def after(at, x):
            x = x + NOISE * states[0].std(correction=0) * noise if at == 0 else x
            if at == layer:
                x[:, position] = states[at][:, position]
            return x

        return run(after)[0]

    noisy = traced(-1, 0)
    for position in (0, 7, 14, 15):
        expected = [(noisy - traced(layer, position)) / (noisy - clean) for layer in range(4)]
        assert of_position(found, position + 1) == pytest.approx(expected, abs=1e-4)
    last = by_layer(found_by(add_trace_rows, ProbedHfModel(model), scored_text(TOKENS)), "trace_restored")
    assert of_position(found, 16) == pytest.approx(last, abs=1e-6)


def test_traces_do_not_depend_on_how_many_sequences_run_at_once():
    probed = ProbedDecoder(Decoder(run_config(**FAMILIES["gqa_lns"])))
    together = found_by(add_trace_rows, probed, scored_text(TOKENS))
    with tokens_per_pass(34):
        parts = found_by(add_trace_rows, probed, scored_text(TOKENS))
    assert by_layer(parts, "trace_restored") == pytest.approx(by_layer(together, "trace_restored"), abs=1e-4)


def test_traces_against_a_plain_loop():
    model = Decoder(run_config(**FAMILIES["gqa_lns"]))
    probed = ProbedDecoder(model)
    found = found_by(add_trace_rows, probed, scored_text(TOKENS))
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((16, probed.stream_width))).float()

    def loss(is_noisy, restored=None):
        with torch.no_grad():
            clean = [probed.embed(TOKENS[:, :-1])]
            for layer in range(1, probed.n_layers + 1):
                clean.append(probed.block(layer, clean[-1]))
            x = clean[0] + NOISE * clean[0].std(correction=0) * noise * is_noisy
            for layer in range(probed.n_layers + 1):
                x = probed.block(layer, x) if layer else x.clone()
                if layer == restored:
                    x[:, -1] = clean[layer][:, -1]
            return cross_entropy(probed.logits(x)[:, -1], TOKENS[:, -1]).item()

    noisy = loss(True)
    expected = [(noisy - loss(True, layer)) / (noisy - loss(False)) for layer in range(probed.n_layers + 1)]
    assert by_layer(found, "trace_restored") == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("n_layers", "asked", "swaps"),
    [(12, None, 66), (15, None, 105), (16, None, 32), (32, None, 64), (64, None, 128), (32, 9, 9), (32, 10**6, 496)],
)
def test_pairs_of_deep_models_are_sampled_by_default(n_layers, asked, swaps):
    assert pairs_to_swap(n_layers, asked) == swaps
    config = MeasureOnlyConfig(permutation_pairs=asked)
    model = HandMadeModel([residual_mlp(4, seed) for seed in range(n_layers)], 0.1 * normal(40, 4))
    if n_layers <= 16:
        found = found_by(add_permutation_rows, model, scored_text(TOKENS), permutation_pairs=asked)
        assert found.summary["permutation_swaps"] == len(found.pairs) == swaps
        ends = score(found, "permutation_score")
        assert ends.lo < found.summary["permutation_score"] < ends.hi
    (measure,) = [each for each in MEASURES if each.name == "permutation"]
    sizes = type("Sizes", (), {"n_layers": n_layers, "permutation_pairs": config.permutation_pairs})
    assert measure.passes(sizes)[1] == swaps + 1


def test_a_sample_brackets_the_mean_over_all_pairs():
    model = HandMadeModel([residual_mlp(4, seed) for seed in range(16)], 0.1 * normal(40, 4))
    every = found_by(add_permutation_rows, model, scored_text(TOKENS), permutation_pairs=120)
    some = score(found_by(add_permutation_rows, model, scored_text(TOKENS)), "permutation_score")
    assert every.summary["permutation_swaps"] == 120
    assert some.lo < every.summary["permutation_score"] < some.hi
