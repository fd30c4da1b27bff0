"""Weight sparsity of matrices with known entries."""

import math

import pytest
import torch
from reference import FAMILIES, run_config
from support.handmade_models import HandMadeModel, identity, known, normal

from sparsedepth.measure.weight_sparsity import weight_sparsity
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def model_of(*layers):
    matrices = [{str(index): matrix for index, matrix in enumerate(layer)} for layer in layers]
    return HandMadeModel([identity] * len(layers), normal(2, 2), matrices=matrices)


def test_absolute_share_by_hand():
    one = torch.tensor([[0.5, -0.05], [0.0, 0.1]])  # below 0.1: -0.05 and 0; 0.1 itself is not
    two = torch.tensor([[1.0, 2.0, -0.09, 3.0]])
    found = weight_sparsity(model_of([one, two], [two]), [0.1, 10.0], relative=False)
    assert found.shares[""] == {0.1: [3 / 8, 1 / 4], 10.0: [1.0, 1.0]}
    assert found.total == {0.1: 4 / 12, 10.0: 1.0}
    assert found.entries[""] == [8, 4]


def test_thresholds_are_not_rounded_to_the_dtype_of_the_weights():
    """bf16 has no 0.001: the number next to it is 0.00099945, and a weight of that size is below the threshold."""
    matrix = torch.tensor([[0.00099945, 0.00100327, 1.0, 1.0]], dtype=torch.bfloat16)
    assert weight_sparsity(model_of([matrix]), [1e-3], relative=False).total == {1e-3: 1 / 4}
    relative = torch.tensor([[0.1, 0.0, 1.0, 1.0]], dtype=torch.bfloat16)  # rms 0.70889 of 0.10010, 0, 1 and 1
    assert weight_sparsity(model_of([relative]), [0.1412], relative=True).total == {0.1412: 1 / 4}


def test_relative_share_by_hand():
    matrix = torch.tensor([[3.0, 4.0], [0.0, 0.0]])  # rms 5/2
    found = weight_sparsity(model_of([matrix]), [1.0, 1.5, 1.7], relative=True)
    assert found.shares[""] == {1.0: [2 / 4], 1.5: [3 / 4], 1.7: [4 / 4]}


def test_relative_share_is_blind_to_a_rescale_of_a_matrix_and_the_absolute_one_is_not():
    wide, narrow = normal(64, 64), normal(64, 64) * 1e-3
    layers = model_of([wide], [narrow], [wide, narrow])
    relative = weight_sparsity(layers, [0.1], relative=True).shares[""][0.1]
    assert relative[0] == relative[1] == relative[2]
    assert relative[0] == pytest.approx(math.erf(0.1 / math.sqrt(2)), abs=0.01)  # 0.0797
    absolute = weight_sparsity(layers, [1e-3], relative=False).shares[""][1e-3]
    assert known(absolute[0]) < 0.01 and absolute[1] == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.02)


def test_a_matrix_of_zeros_is_sparse_and_has_no_relative_share():
    zeros, ones = torch.zeros(2, 2), torch.ones(3, 1)
    layers = model_of([zeros], [zeros, ones])
    assert weight_sparsity(layers, [0.1], relative=False).shares[""] == {0.1: [1.0, 4 / 7]}
    found = weight_sparsity(layers, [0.1], relative=True)
    assert (found.shares[""], found.total, found.entries[""]) == ({0.1: [None, 0.0]}, {0.1: 0.0}, [0, 3])


@pytest.mark.parametrize("family", FAMILIES)
def test_against_a_plain_count_over_the_parameters(family):
    model = Decoder(run_config(**FAMILIES[family]))
    names = [name for name, weight in model.blocks.named_parameters() if weight.ndim > 1 and "router" not in name]
    entries = [abs(w) for name in names for w in model.blocks.get_parameter(name).detach().flatten().tolist()]
    found = weight_sparsity(ProbedDecoder(model), [0.01, 0.3], relative=False)
    assert found.total == {eps: sum(w < eps for w in entries) / len(entries) for eps in (0.01, 0.3)}
    assert sum(found.entries[""]) == len(entries)


def test_kinds_by_hand():
    """The experts of a layer are one kind together; a layer without a kind has no share of it."""
    dense = {"query": torch.tensor([[0.5, 0.01]]), "gate": torch.tensor([[0.01], [0.02]])}
    experts = {"query": torch.tensor([[0.5, 0.7]]), "expert0.up": torch.ones(1, 3), "expert1.up": torch.zeros(1, 1)}
    probed = HandMadeModel([identity] * 2, normal(2, 2), matrices=[dense, experts])
    found = weight_sparsity(probed, [0.1], relative=False)
    assert {kind: shares[0.1] for kind, shares in found.shares.items() if kind} == {
        "query": [1 / 2, 0.0],
        "gate": [1.0, None],
        "up": [None, 1 / 4],
    }
    assert found.entries == {"": [4, 6], "query": [2, 2], "gate": [2, 0], "up": [0, 4]}
    relative = weight_sparsity(probed, [0.1], relative=True)
    assert relative.shares["up"][0.1] == [None, 0.0]  # the expert of zeros has no scale
    assert relative.entries["up"] == [0, 3]
