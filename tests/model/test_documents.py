"""What is computed once per batch, and forgotten with it."""

import gc
import weakref

import torch

from sparsedepth.model.attention import offsets, starts
from sparsedepth.model.cache import once_per_tensor

PACKED = [[7, 7, 8, 8, 7], [1, 1, 1, 1, 1]]


def test_starts_and_offsets_by_hand():
    document_BT = torch.tensor(PACKED)
    assert starts(document_BT).int().tolist() == [[1, 0, 1, 0, 1], [1, 0, 0, 0, 0]]
    assert offsets(document_BT).tolist() == [0, 2, 4, 5, 10]
    assert offsets(document_BT).dtype == torch.int32


def counted():
    calls = []

    @once_per_tensor
    def compute(document_BT, *more):
        calls.append(more)
        return document_BT + 0

    return compute, calls


def test_one_answer_per_batch():
    compute, calls = counted()
    first, second = torch.tensor(PACKED), torch.tensor(PACKED)
    for document_BT in (first, first, second, second):
        assert torch.equal(compute(document_BT), document_BT)
    assert len(calls) == 2
    compute(second, 3)
    assert len(calls) == 3


def test_a_changed_batch_is_computed_anew():
    compute, calls = counted()
    document_BT = torch.tensor(PACKED)
    compute(document_BT)
    document_BT[0, 0] = 5
    assert compute(document_BT)[0, 0] == 5
    assert len(calls) == 2


def test_the_answer_is_freed_with_its_batch():
    compute, _ = counted()
    document_BT = torch.tensor(PACKED)
    answer = weakref.ref(compute(document_BT))
    assert answer() is not None
    del document_BT
    gc.collect()
    assert answer() is None
