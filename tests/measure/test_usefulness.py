"""Usefulness and blocks needed: linear blocks lose nothing, the fit's corner cases, the plain loop, counts by hand.

Blocks replaced together: two that do the same are one that is needed; the greedy order by a plain loop.
"""

import math
from functools import reduce

import numpy as np
import pytest
import torch
from reference import FAMILIES, affine_increases, run_config
from support.handmade_models import (
    HandMadeModel,
    brackets,
    by_layer,
    ends,
    found_by,
    identity,
    integers,
    known,
    normal,
    residual_mlp,
    rng,
    score,
    scored_text,
    tokens_per_pass,
)

from sparsedepth.config.task import IGNORED
from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap
from sparsedepth.measure.loss import fork_losses
from sparsedepth.measure.measurements import Scored
from sparsedepth.measure.usefulness import (
    NEEDED_AT,
    add_joint_rows,
    add_usefulness_rows,
    count_needed,
    fit_affine,
    needed_layers,
    share_above,
)
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities import IN_RUNS


def usefulness(probed, fit, scored, threshold, needed_threshold=0.05, **known):
    settings = {"usefulness_threshold": threshold, "needed_threshold": needed_threshold, **known}
    return found_by(add_usefulness_rows, probed, scored, fit, **settings)


def jointly_needed_layers(probed, fit, scored, threshold):
    return score(found_by(add_joint_rows, probed, scored, fit, needed_threshold=threshold), "jointly_needed_layers")


def layer_scores(found, metric):
    parts = [by_layer(found, metric + end) for end in ("", "_lo", "_hi")]
    return [BootstrapEstimate(*block) for block in zip(*parts, strict=True)]


def linear(width, seed):
    weight, bias = normal(width, width, seed=seed, std=0.4), normal(width, seed=seed + 100)
    return lambda x: x @ weight + bias


def test_replacing_a_linear_block_loses_nothing_on_held_out_tokens():
    probed = HandMadeModel([residual_mlp(4, 0), linear(4, 1), residual_mlp(4, 2), linear(4, 3)], normal(50, 4))
    scored = scored_text(integers(25, 10, 21, seed=1) + 25)  # disjoint tokens
    found = usefulness(probed, integers(25, 10, 20), scored, 0.1)
    increases = by_layer(found, "affine_loss_increase")
    assert increases[1::2] == pytest.approx([0, 0], abs=1e-6)
    assert min(abs(known(increase)) for increase in increases[::2]) > 1e-3


def test_a_model_of_identities_is_useless_and_a_threshold_below_zero_is_always_passed():
    probed, tokens = HandMadeModel([identity] * 4, normal(50, 4)), integers(50, 5, 20)
    found = usefulness(probed, tokens[:, :-1], scored_text(tokens), 0.1)
    assert ends(score(found, "usefulness")) == (0.0, 0.0, 0.0)
    assert found.summary["usefulness_loss_increase"] == pytest.approx(0, abs=1e-6)
    assert usefulness(probed, tokens[:, :-1], scored_text(tokens), -0.1).summary["usefulness"] == 1.0


HEAD = torch.tensor([[-100.0, 0.0, 0.0, -100.0], [250.0, 0.0, 0.0, 250.0]])  # logit of +-2: 250 - 100 x^2
EMBEDDING = torch.tensor([[-2.0, 1.0], [-1.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
FIT, SCORED = torch.tensor([[0, 1, 2, 3]]), scored_text(torch.tensor([[0, 1, 3, 2, 0], [1, 0, 2, 3, 1]]))


def test_the_share_by_hand():
    """The stream is -2, -1, 1 or 2; block 1 squares it; after a 1 follows +-2, after a 4 follows +-1: the loss is ln 2.

    The best affine map of x^2 on these four is its mean, which says nothing: ln 4, an increase of 1.
    """
    probed = HandMadeModel([lambda x: x * x, identity, identity, identity], EMBEDDING, HEAD)
    found = usefulness(probed, FIT, SCORED, 0.1)
    assert by_layer(found, "affine_loss_increase") == pytest.approx([1, 0, 0, 0], abs=1e-6)
    assert ends(score(found, "usefulness")) == (0.25, 0.25, 0.25)
    assert found.summary["usefulness_loss_increase"] == pytest.approx(0.25, abs=1e-6)
    names = ("affine_loss_added", "affine_accuracy_lost")
    added, lost = (by_layer(found, name) for name in names)
    assert added == pytest.approx([math.log(2), 0, 0, 0], abs=1e-6)
    # Of logits that are equal the first is the answer, token 0 after a 1 and token 1 after a 4: right at half of the
    # positions. After the map all are equal: right at a quarter, whichever that makes the first.
    assert lost == [0.25, 0, 0, 0]
    assert found.summary["affine_loss_added"] == pytest.approx(math.log(2) / 4, abs=1e-6)
    assert found.summary["affine_accuracy_lost"] == 0.0625 and ends(score(found, "needed_layers")) == (1, 1, 1)


def test_the_interval_of_needed_layers_counts_by_the_threshold_in_nats():
    """Block 1 adds ln 2 = 0.69 in every resample, a relative increase of 1: above 0.05 nat/token, not above 5 times."""
    probed = HandMadeModel([lambda x: x * x, identity], EMBEDDING, HEAD)
    found = usefulness(probed, FIT, SCORED, 5.0, 0.05)
    assert found.summary["usefulness"] == 0.0 and ends(score(found, "needed_layers")) == (1, 1, 1)


@pytest.mark.parametrize(("length", "needed", "expected"), [(1, 0.01, (3, 3, 4)), (5, 0.05, (3, 1, 3))])
def test_needed_at_an_equal_rise_are_those_at_so_much_for_each_token_with_its_interval(length, needed, expected):
    """Blocks add .111, .116, .004 and .070 nat/token; .01 nat/byte are .01 or .05 nat/token."""
    blocks, inputs = [residual_mlp(4, seed) for seed in range(4)], integers(50, 8, 9, seed=3)
    probed = HandMadeModel(blocks, normal(50, 4))
    likely = probed.logits(reduce(lambda x, block: block(x), blocks, probed.embed(inputs))).argmax(-1)
    known = (probed, integers(50, 10, 20), Scored(inputs, likely), 0.1)
    found, in_tokens = usefulness(*known, bytes_per_token=length), usefulness(*known, needed)
    assert ends(score(found, "needed_equal_rise")) == ends(score(in_tokens, "needed_layers")) == expected
    assert "needed_equal_rise" not in in_tokens.summary, "bytes are unknown: NULL"


def test_of_one_block_the_mean_over_blocks_has_that_blocks_interval():
    """Also where sequences have 1, 4 and 9 scored positions: resamples are means over positions."""
    probed, inputs = HandMadeModel([residual_mlp(4, 0)], normal(50, 4)), integers(50, 3, 9, seed=1)
    counts = torch.tensor([[1], [4], [9]])
    targets = integers(50, 3, 9, seed=2).masked_fill(torch.arange(9) >= counts, IGNORED)
    found = usefulness(probed, integers(50, 10, 20), Scored(inputs, targets), 0.1)
    for mean, (block,) in [
        (score(found, "affine_loss_added"), layer_scores(found, "affine_loss_added")),
        (score(found, "usefulness_loss_increase"), layer_scores(found, "affine_loss_increase")),
        (score(found, "affine_accuracy_lost"), layer_scores(found, "affine_accuracy_lost")),
    ]:
        assert ends(mean) == pytest.approx(ends(block), abs=1e-12)


def test_where_the_loss_is_small_blocks_are_useful_that_none_needs():
    """Targets are what the model itself is sure of, so the loss is near 0, and so is what its small blocks add to it:
    several times as much, of nothing."""
    blocks, head = [residual_mlp(4, seed, 0.2) for seed in range(3)], normal(4, 6, seed=5) * 10
    probed, inputs = HandMadeModel(blocks, normal(50, 4), head), integers(50, 10, 20)
    logits = probed.logits(blocks[2](blocks[1](blocks[0](probed.embed(inputs)))))
    best, second = logits.topk(2).values.unbind(-1)
    scored = Scored(inputs, logits.argmax(-1).masked_fill(best - second < 6, IGNORED))
    found = usefulness(probed, integers(50, 10, 20, seed=1), scored, 0.1)
    assert found.summary["usefulness"] == pytest.approx(2 / 3) and known(by_layer(found, "affine_loss_increase")[0]) > 3
    assert max(known(block.value) for block in layer_scores(found, "affine_loss_added")) < 0.001
    assert found.summary["needed_layers"] == 0


def test_an_interval_by_layer_is_that_of_the_layers_own_difference():
    probed = HandMadeModel([residual_mlp(4, 0), residual_mlp(4, 2)], normal(50, 4))
    scored = scored_text(integers(50, 10, 21, seed=1))
    found = usefulness(probed, integers(50, 10, 20), scored, 0.1)
    forks = [{1: fit_affine(probed, integers(50, 10, 20))[0]}, {2: lambda x: x}]
    base_N2, affine_NL2 = fork_losses(probed, scored, forks, accuracy=True)
    assert base_N2[:, 0] == pytest.approx(fork_losses(probed, scored, [])[0], abs=1e-12)
    difference_N = affine_NL2[:, 0, 0] - base_N2[:, 0]
    alone = bootstrap(lambda mean_R: mean_R, difference_N, rng=np.random.default_rng(int(rng().integers(2**63))))
    added, increase = layer_scores(found, "affine_loss_added"), layer_scores(found, "affine_loss_increase")
    assert ends(added[0])[1:] == pytest.approx((alone.lo, alone.hi), abs=1e-9)
    assert all(brackets(block) for block in (*added, *increase))


def test_a_direction_that_no_fit_token_has_passes_unchanged():
    """Fit tokens on the first axis only, where the block triples; off that axis there is nothing to learn from."""
    probed = HandMadeModel([lambda x: 3 * x], torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [4.0, 0, 0]]))
    (affine,) = fit_affine(probed, integers(3, 2, 10))
    torch.testing.assert_close(affine(torch.tensor([[[5.0, 7.0, -2.0]]])), torch.tensor([[[15.0, 7.0, -2.0]]]))


def test_more_fit_tokens_than_unknowns():
    probed = HandMadeModel([identity], normal(5, 4))
    with pytest.raises(ValueError, match=r"5 fit tokens .* width 4; expected more than d_model"):
        fit_affine(probed, integers(5, 1, 5))
    assert len(fit_affine(probed, integers(5, 1, 6))) == 1


def test_parts_of_the_fit_tokens_merge_exactly():
    probed, tokens = HandMadeModel([residual_mlp(4, 0)] * 2, normal(50, 4) + 100), integers(50, 7, 20)
    whole = fit_affine(probed, tokens)
    for max_tokens in (1, 45):
        with tokens_per_pass(max_tokens):
            parts = fit_affine(probed, tokens)
        for one, other in zip(parts, whole, strict=True):
            torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-6)
            torch.testing.assert_close(one.bias, other.bias, rtol=0, atol=1e-6)
            torch.testing.assert_close(one.mean, other.mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_numpy_least_squares_and_full_forward_passes(family):
    model = Decoder(run_config(**FAMILIES[family]))
    fit, tokens = integers(40, 12, 16), integers(40, 3, 17, seed=1)
    expected = affine_increases(model, fit, tokens)
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = usefulness(ProbedDecoder(model), fit, scored_text(tokens), 0.02)
        assert by_layer(found, "affine_loss_increase") == pytest.approx(expected, abs=2e-5)
        assert found.summary["usefulness"] == np.mean([increase > 0.02 for increase in expected])
        assert brackets(score(found, "usefulness_loss_increase"))
    assert max(np.abs(expected)) > 0.02


def test_a_needed_block_costs_more_than_the_threshold_and_for_sure():
    def block(value, lo):
        return BootstrapEstimate(value=value, lo=lo, hi=None if lo is None else 9.0)

    blocks = [block(0.3, 0.1), block(0.3, -0.1), block(0.04, 0.03), block(-0.2, -0.3)]  # sure; unsure; cheap; better
    counted = BootstrapEstimate(value=2.0, lo=2.0, hi=3.0)
    needed = needed_layers(blocks, 0.05, counted)
    assert (needed.value, needed.lo, needed.hi) == (1, 1, 3)
    assert needed_layers([block(0.3, None)], 0.05, counted).value is None  # one sequence has no interval


INCREASES = [0.5, 0.15, 0.1, 0.06, 0.01, -0.02]


@pytest.mark.parametrize(("threshold", "count"), [(0.02, 4), (0.05, 4), (0.1, 2), (0.2, 1), (0.5, 0)])
def test_strictly_more_than_the_threshold_counts(threshold, count):
    assert share_above(INCREASES, threshold) == pytest.approx(count / 6)


@pytest.mark.parametrize("increases", [[], [0.5, None]])
def test_an_unknown_increase_makes_the_count_unknown(increases):
    assert share_above(increases, 0.1) is None


def test_needed_layers_are_counted_at_three_thresholds():
    """Blocks that add 0.02, 0.1, 0.3 nat/token, and one whose interval contains 0."""
    increases = ((0.02, 0.01), (0.1, 0.05), (0.3, 0.2), (0.4, -0.1))
    added = [BootstrapEstimate(value=value, lo=lo, hi=1.0) for value, lo in increases]
    assert [count_needed(added, threshold) for threshold in NEEDED_AT.values()] == [3, 2, 1]
    assert {name: float(name.split("_")[2].removesuffix("mnat")) / 1000 for name in NEEDED_AT} == NEEDED_AT
    assert {*NEEDED_AT} <= {*IN_RUNS}


SIGNS_FIT = torch.tensor([[0, 1, 2, 3] * 3])
SIGNS_SCORED = scored_text(torch.tensor([[0, 1, 3, 2, 3, 0, 1], [1, 0, 2, 3, 2, 1, 0], [3, 2, 0, 1, 0, 2, 3]]))


def signs(n_blocks: int) -> HandMadeModel:
    """The stream is -2, -1, 1 or 2, of which each block takes the sign; the logits of tokens 0, 1 are -x, of 2, 3 x.

    The affine map of sign(x) on these four is 0.6 x: after it another block finds the same signs, and without another
    the loss rises from ln(1 + e^-2) = 0.127 to (ln(1 + e^-1.2) + ln(1 + e^-2.4)) / 2 = 0.175, each beside ln 2.
    """
    embedding = torch.tensor([[-2.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    head = torch.tensor([[-1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    return HandMadeModel([torch.sign] * n_blocks, embedding, head)


@pytest.mark.parametrize("n_blocks", [2, 3])
def test_of_blocks_that_do_the_same_none_is_needed_alone_and_one_together(n_blocks):
    own_sign = Scored(SIGNS_SCORED.inputs, SIGNS_SCORED.inputs)  # targets of the input's sign
    alone = usefulness(signs(n_blocks), SIGNS_FIT, own_sign, 0.1, needed_threshold=0.02)
    together = jointly_needed_layers(signs(n_blocks), SIGNS_FIT, own_sign, 0.02)
    assert (alone.summary["needed_layers"], together.value) == (0, 1)
    assert jointly_needed_layers(signs(n_blocks), SIGNS_FIT, own_sign, 0.1).value == 0


def test_what_a_map_can_do_needs_no_block_and_a_threshold_below_zero_all():
    probed, tokens = HandMadeModel([identity, lambda x: x @ normal(4, 4)], normal(50, 4)), integers(50, 5, 20)
    scored = scored_text(integers(50, 5, 21, seed=1))
    none = jointly_needed_layers(probed, tokens, scored, 0.001)
    assert (none.value, none.lo, none.hi) == (0, 0, 0)
    assert jointly_needed_layers(probed, tokens, scored, -10.0).value == 2


def test_the_order_by_a_plain_loop():
    """Every step tries each block that is left; the count ends at the first step over the threshold."""
    probed = HandMadeModel([residual_mlp(4, seed, 0.1 * (1 + seed)) for seed in (3, 0, 2, 1)], normal(50, 4))
    fit, scored = integers(50, 10, 20), scored_text(integers(50, 10, 21, seed=1))
    maps = dict(enumerate(fit_affine(probed, fit), start=1))

    def added(layers):
        base, changed = fork_losses(probed, scored, [{layer: maps[layer] for layer in layers}])
        return (changed[:, 0] - base).mean()

    chosen: list[int] = []
    path = []
    for _ in range(4):
        chosen.append(min(set(maps) - set(chosen), key=lambda layer: added([*chosen, layer])))
        path.append(added(chosen))
    assert chosen != sorted(chosen)
    for threshold in [*(value + 1e-9 for value in path), 0.0]:
        n_within = [*(value <= threshold for value in path), False].index(False)
        found = jointly_needed_layers(probed, fit, scored, threshold)
        assert found.value == 4 - n_within
        assert found.lo is not None and found.hi is not None and found.lo <= found.value <= found.hi


def test_a_loss_that_is_no_number_has_no_count():
    """Token 4, which is scored and not fitted on, starts as NaN."""
    embedding = torch.tensor([[-2.0], [-1.0], [1.0], [2.0], [torch.nan]])
    broken = HandMadeModel([torch.sign] * 2, embedding, torch.tensor([[-1.0, -1.0, 1.0, 1.0, 0.0]]))
    found = jointly_needed_layers(broken, SIGNS_FIT, scored_text(torch.tensor([[0, 1, 4, 3], [1, 2, 3, 0]])), 0.02)
    assert (found.value, found.lo, found.hi) == (None, None, None)
