"""Blocks replaced together: two that do the same are one that is needed; the greedy order by a plain loop."""

import pytest
import torch
from support.handmade_models import HandMadeModel, identity, integers, normal, residual_mlp, rng

from sparsedepth.measure.loss import fork_losses
from sparsedepth.measure.measurements import Scored
from sparsedepth.measure.usefulness import fit_affine, jointly_needed_layers, usefulness

FIT = torch.tensor([[0, 1, 2, 3] * 3])
SCORED = Scored.text(torch.tensor([[0, 1, 3, 2, 3, 0, 1], [1, 0, 2, 3, 2, 1, 0], [3, 2, 0, 1, 0, 2, 3]]))


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
    own_sign = Scored(SCORED.inputs, SCORED.inputs)  # targets of the input's sign
    alone = usefulness(signs(n_blocks), FIT, own_sign, 0.1, rng(), needed_threshold=0.02)
    together = jointly_needed_layers(signs(n_blocks), FIT, own_sign, 0.02, rng())
    assert (alone.scores["needed_layers"].value, together.value) == (0, 1)
    assert jointly_needed_layers(signs(n_blocks), FIT, own_sign, 0.1, rng()).value == 0


def test_what_a_map_can_do_needs_no_block_and_a_threshold_below_zero_all():
    probed, tokens = HandMadeModel([identity, lambda x: x @ normal(4, 4)], normal(50, 4)), integers(50, 5, 20)
    scored = Scored.text(integers(50, 5, 21, seed=1))
    none = jointly_needed_layers(probed, tokens, scored, 0.001, rng())
    assert (none.value, none.lo, none.hi) == (0, 0, 0)
    assert jointly_needed_layers(probed, tokens, scored, -10.0, rng()).value == 2


def test_the_order_by_a_plain_loop():
    """Every step tries each block that is left; the count ends at the first step over the threshold."""
    probed = HandMadeModel([residual_mlp(4, seed, 0.1 * (1 + seed)) for seed in (3, 0, 2, 1)], normal(50, 4))
    fit, scored = integers(50, 10, 20), Scored.text(integers(50, 10, 21, seed=1))
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
        found = jointly_needed_layers(probed, fit, scored, threshold, rng())
        assert found.value == 4 - n_within
        assert found.lo is not None and found.hi is not None and found.lo <= found.value <= found.hi


def test_a_loss_that_is_no_number_has_no_count():
    """Token 4, which is scored and not fitted on, starts as NaN."""
    embedding = torch.tensor([[-2.0], [-1.0], [1.0], [2.0], [torch.nan]])
    broken = HandMadeModel([torch.sign] * 2, embedding, torch.tensor([[-1.0, -1.0, 1.0, 1.0, 0.0]]))
    found = jointly_needed_layers(broken, FIT, Scored.text(torch.tensor([[0, 1, 4, 3], [1, 2, 3, 0]])), 0.02, rng())
    assert (found.value, found.lo, found.hi) == (None, None, None)
