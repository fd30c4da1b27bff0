"""Weight sparsity of matrices with known entries."""

import math

import pytest
import torch
from reference import FAMILIES, run_config
from support.handmade_models import HandMadeModel, identity, known, normal

from sparsedepth.measure.weight_sparsity import shares, weight_counts
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def counts_of(*layers, thresholds, relative=False):
    """Of matrices in layers: below each threshold, and all."""
    matrices = [{str(index): matrix for index, matrix in enumerate(layer)} for layer in layers]
    probed = HandMadeModel([identity] * len(layers), normal(2, 2), matrices=matrices)
    return weight_counts(probed, thresholds, relative=relative)[""].tolist()


def test_absolute_count_by_hand():
    one = torch.tensor([[0.5, -0.05], [0.0, 0.1]])  # below 0.1: -0.05 and 0; 0.1 itself is not
    two = torch.tensor([[1.0, 2.0, -0.09, 3.0]])
    assert counts_of([one, two], [two], thresholds=[0.1, 10.0]) == [[3, 8, 8], [1, 4, 4]]


def test_thresholds_are_not_rounded_to_the_dtype_of_the_weights():
    """bf16 has no 0.001: the number next to it is 0.00099945, and a weight of that size is below the threshold."""
    matrix = torch.tensor([[0.00099945, 0.00100327, 1.0, 1.0]], dtype=torch.bfloat16)
    assert counts_of([matrix], thresholds=[1e-3]) == [[1, 4]]
    relative = torch.tensor([[0.1, 0.0, 1.0, 1.0]], dtype=torch.bfloat16)  # rms 0.70889 of 0.10010, 0, 1 and 1
    assert counts_of([relative], thresholds=[0.1412], relative=True) == [[1, 4]]


def test_relative_count_by_hand():
    matrix = torch.tensor([[3.0, 4.0], [0.0, 0.0]])  # rms 5/2
    assert counts_of([matrix], thresholds=[1.0, 1.5, 1.7], relative=True) == [[2, 3, 4, 4]]


def test_relative_share_is_blind_to_a_rescale_of_a_matrix_and_the_absolute_one_is_not():
    wide, narrow = normal(64, 64), normal(64, 64) * 1e-3
    layers = ([wide], [narrow], [wide, narrow])
    relative = [below / n for below, n in counts_of(*layers, thresholds=[0.1], relative=True)]
    assert relative[0] == relative[1] == relative[2]
    assert relative[0] == pytest.approx(math.erf(0.1 / math.sqrt(2)), abs=0.01)  # 0.0797
    absolute = [below / n for below, n in counts_of(*layers, thresholds=[1e-3])]
    assert known(absolute[0]) < 0.01 and absolute[1] == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.02)


def test_a_matrix_of_zeros_is_sparse_and_has_no_relative_share():
    zeros, ones = torch.zeros(2, 2), torch.ones(3, 1)
    assert counts_of([zeros], [zeros, ones], thresholds=[0.1]) == [[4, 4], [4, 7]]
    assert counts_of([zeros], [zeros, ones], thresholds=[0.1], relative=True) == [[0, 0], [0, 3]]


@pytest.mark.parametrize("family", FAMILIES)
def test_against_a_plain_count_over_the_parameters(family):
    model = Decoder(run_config(**FAMILIES[family]))
    names = [name for name, weight in model.blocks.named_parameters() if weight.ndim > 1 and "router" not in name]
    entries = [abs(w) for name in names for w in model.blocks.get_parameter(name).detach().flatten().tolist()]
    count_C = weight_counts(ProbedDecoder(model), [0.01, 0.3], relative=False)[""].sum(0)
    assert count_C.tolist() == [sum(w < eps for w in entries) for eps in (0.01, 0.3, math.inf)]


def test_kinds_by_hand():
    """The experts of a layer are one kind together; a layer without a kind has no share of it."""
    dense = {"query": torch.tensor([[0.5, 0.01]]), "gate": torch.tensor([[0.01], [0.02]])}
    experts = {"query": torch.tensor([[0.5, 0.7]]), "expert0.up": torch.ones(1, 3), "expert1.up": torch.zeros(1, 1)}
    probed = HandMadeModel([identity] * 2, normal(2, 2), matrices=[dense, experts])
    found = weight_counts(probed, [0.1], relative=False)
    assert {kind: count_LC.tolist() for kind, count_LC in found.items()} == {
        "": [[3, 4], [1, 6]],
        "query": [[1, 2], [0, 2]],
        "gate": [[2, 2], [0, 0]],
        "up": [[0, 0], [1, 4]],
    }
    assert [shares(count_C) for count_C in found["gate"]] == [[1.0], [None]]
    relative = weight_counts(probed, [0.1], relative=True)
    assert relative["up"].tolist() == [[0, 0], [0, 3]]  # the expert of zeros has no scale
