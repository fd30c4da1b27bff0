"""Residual variance: planted growth, the definition, the plain loop.

Participation ratio and effective rank: hand-made spectra, the plain eigenvalues, and what they must not see.

Batches of decompositions: those of one matrix at a time, and the CPU where a GPU's does not converge.
"""

import math

import numpy as np
import pytest
import torch
from reference import FAMILIES, branch_updates, run_config, states
from support.handmade_models import HandMadeModel, brackets, ends, identity, integers, profiles, tokens_per_pass

from sparsedepth.measure import variance as module
from sparsedepth.measure.variance import add_participation_rows, add_variance_rows, batched
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def variances(probed, tokens):
    scores = {"residual_variance": "residual_variance_last", "residual_growth": "residual_variance_growth"}
    return profiles(add_variance_rows, probed, tokens, scores=scores)


def participation(probed, tokens):
    return {name: found.by_layer for name, found in profiles(add_participation_rows, probed, tokens).items()}


def test_a_stream_that_triples_grows_ninefold_in_variance():
    """Each block triples the stream: v_l = 9^l v_0; var(1, 2, 3, 4) = 5/3 with D - 1 in the denominator."""
    probed = HandMadeModel([lambda x: 3 * x] * 4, torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]]))
    found = variances(probed, torch.tensor([[0, 1], [0, 0]]))
    v_0 = (5 / 3 + 0 + 5 / 3 + 5 / 3) / 4  # mean over the four tokens; the constant one varies by nothing
    assert found["residual_variance"].by_layer == pytest.approx([v_0 * 9**layer for layer in range(5)], rel=1e-6)
    assert ends(found["residual_growth"].score) == pytest.approx((9.0, 9.0, 9.0), rel=1e-6)  # of every resample
    assert found["residual_growth"].by_layer == pytest.approx([9.0] * 4, rel=1e-6)
    assert found.keys() == {"residual_variance", "residual_growth"}
    assert found["residual_variance"].score.value == pytest.approx(v_0 * 9**4, rel=1e-6)
    assert brackets(found["residual_variance"].score)


def test_a_shift_of_the_whole_stream_is_no_variance():
    probed = HandMadeModel([lambda x: x + 10, lambda x: 0 * x], torch.tensor([[1.0, 3.0]]))
    found = variances(probed, torch.zeros(1, 5, dtype=torch.int64))
    assert found["residual_variance"].by_layer == pytest.approx([2.0, 2.0, 0.0], abs=1e-6)
    assert found["residual_growth"].score.value == 0.0
    still = HandMadeModel([lambda x: 0 * x, identity], torch.tensor([[1.0, 3.0]]))
    again = variances(still, torch.zeros(2, 5, dtype=torch.int64))
    assert again["residual_growth"].by_layer == [0.0, None]
    assert ends(again["residual_growth"].score) == (None, None, None)


def test_branches_by_hand():
    """Attention adds x, the feed-forward part 2: var(1, 3) = 2 and 0, then the stream is (4, 8): var 8."""
    probed = HandMadeModel(
        [identity] * 2, torch.tensor([[1.0, 3.0]]), branches=lambda layer, x: (x, torch.full_like(x, 2.0))
    )
    found = variances(probed, torch.zeros(2, 3, dtype=torch.int64))
    assert found["residual_variance"].by_layer == pytest.approx([2, 8, 32], abs=1e-6)
    assert found["attention_variance"].by_layer == pytest.approx([2, 8], abs=1e-6)
    assert found["attention_variance"].score.value == pytest.approx(5, abs=1e-6)
    assert found["ffn_variance"].by_layer == pytest.approx([0, 0], abs=1e-6)


def test_growth_is_from_layer_1_on_and_missing_where_it_is_undefined():
    def growth(*factors):
        """Of a stream that each block multiplies: the embedding's own variance does not count."""
        probed = HandMadeModel([lambda x, factor=factor: factor * x for factor in factors], torch.tensor([[1.0, 3.0]]))
        return variances(probed, torch.zeros(2, 3, dtype=torch.int64))["residual_growth"].score.value

    assert growth(2) is None  # one layer: nothing to grow over
    assert growth(0, 3) is None  # from nothing
    assert growth(0.5, 2, 2) == pytest.approx(4.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_plain_loop_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 5, 16)
    expected = [x.numpy().var(axis=-1, ddof=1).mean() for x in states(model, tokens)]
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = variances(ProbedDecoder(model), tokens)
        assert found["residual_variance"].by_layer == pytest.approx(expected, rel=1e-5)
        branches = (found["attention_variance"], found["ffn_variance"])
        for branch, seen in zip(branches, branch_updates(model, tokens, 4), strict=True):
            assert branch.by_layer[3] == pytest.approx(seen.var(dim=-1).mean().item(), rel=1e-5)
            assert brackets(branch.score)
        assert brackets(found["residual_growth"].score)


CROSS_VD = torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0], [0, -1, 0, 0]])
"""Four tokens on two axes: C = diag(1/2, 1/2, 0, 0)."""
EACH_ONCE = torch.tensor([[0, 1], [2, 3]])


def ratios(found):
    return found["participation_ratio"]


def test_directions_of_states_and_updates_by_hand():
    """diag(1/2, 1/2): (1)^2 / (1/4 + 1/4) = 2. Three times the first axis: diag(9/2, 1/2), 25 / (81/4 + 1/4) = 50/41.
    One axis alone: 1. No variance: none. Effective ranks: of shares 1/2, 1/2: 2; of shares 9/10, 1/10: exp(H). Block 1
    adds 2 on the first axis, one direction; block 2 takes the second away, another: ranks of updates 1 and 1."""
    triple, first = (lambda x: x * torch.tensor([3.0, 1, 1, 1])), (lambda x: x * torch.tensor([1.0, 0, 0, 0]))
    found = participation(HandMadeModel([triple, first], CROSS_VD), EACH_ONCE)
    assert ratios(found) == pytest.approx([2, 50 / 41, 1], rel=1e-12)
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert found["effective_rank"] == pytest.approx([2, math.exp(entropy), 1], rel=1e-9)
    assert found["update_rank"] == pytest.approx([1, 1], rel=1e-9)
    gone = participation(HandMadeModel([identity, lambda x: 0 * x + 0.1], CROSS_VD), EACH_ONCE)
    assert ratios(gone) == [pytest.approx(2), pytest.approx(2), None] and gone["update_rank"][0] is None
    both = participation(HandMadeModel([lambda x: 2 * x], CROSS_VD), EACH_ONCE)
    assert both["update_rank"][0] == pytest.approx(2)


def test_growth_shifts_and_rotations_change_nothing_and_a_direction_that_takes_over_does():
    """Residual variance sees growth alike, whether all directions grow or one: here they differ."""
    turn_DD = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
    embedding_VD, tokens = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), integers(50, 6, 20)
    blocks = [lambda x: 5 * x, lambda x: x @ turn_DD, lambda x: x + 100]
    same = participation(HandMadeModel(blocks, embedding_VD), tokens)
    assert ratios(same) == pytest.approx([ratios(same)[0]] * 4, rel=1e-4)
    one = torch.tensor([5.0] + [1] * 7)
    probed = HandMadeModel([lambda x: x * one, lambda x: x * one], embedding_VD)
    taken = ratios(participation(probed, tokens))
    variance = variances(probed, tokens)["residual_variance"].by_layer
    assert taken == sorted(taken, reverse=True) and taken[2] == pytest.approx(1, abs=0.1) and taken[0] > 5
    assert variance == sorted(variance)


def test_against_eigenvalues_under_any_budget():
    model, tokens = Decoder(run_config(depth_scale="lns")), integers(40, 5, 16)
    spectra = [torch.linalg.eigvalsh(x.flatten(0, 1).double().T.cov(correction=0)) for x in states(model, tokens)]
    expected = [(values.sum() ** 2 / values.square().sum()).item() for values in spectra]
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = participation(ProbedDecoder(model), tokens)
        assert ratios(found) == pytest.approx(expected, rel=1e-6)
        assert all(np.array(found["effective_rank"]) >= ratios(found))


def matrices(n: int, d: int) -> list[torch.Tensor]:
    x_nDD = torch.randn(n, d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [*(x_nDD @ x_nDD.mT)]


@pytest.mark.parametrize("limit", [1, 2 * 6 * 6 * 8, 2**28])
def test_batches_equal_one_at_a_time(monkeypatch, limit):
    monkeypatch.setattr(module, "BATCH_BYTES", limit)
    given = matrices(5, 6)
    given[2] = torch.diag(torch.tensor([3.0, 2, 1, 0, 0, 0], dtype=torch.float64))
    values = batched(torch.linalg.eigvalsh, given)
    inverses = batched(lambda x: torch.linalg.pinv(x, hermitian=True), given)
    assert len(values) == len(inverses) == 5
    for matrix, value, inverse in zip(given, values, inverses, strict=True):
        torch.testing.assert_close(value, torch.linalg.eigvalsh(matrix))
        torch.testing.assert_close(inverse, torch.linalg.pinv(matrix, hermitian=True))
    assert values[2].tolist() == [0, 0, 0, 1, 2, 3]
    assert inverses[2].diag().tolist() == pytest.approx([1 / 3, 1 / 2, 1, 0, 0, 0])


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU until it is brought back."""

    @property
    def device(self):
        return torch.device("cuda")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_what_does_not_converge_on_a_gpu_is_computed_on_the_cpu(monkeypatch):
    asked = []

    def eigvalsh(x):
        asked.append(type(x))
        if isinstance(x, OnGpu):
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        return torch.linalg.eigvalsh(x)

    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)  # back to the GPU
    given = matrices(1, 4)
    (value,) = batched(eigvalsh, [given[0].as_subclass(OnGpu)])
    assert asked == [OnGpu, torch.Tensor]
    torch.testing.assert_close(value, torch.linalg.eigvalsh(given[0]))


def test_what_does_not_converge_on_a_cpu_is_an_error():
    def fails(x):
        raise torch.linalg.LinAlgError("no")

    with pytest.raises(torch.linalg.LinAlgError):
        batched(fails, matrices(1, 2))
