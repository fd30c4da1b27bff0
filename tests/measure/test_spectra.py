"""Batches of decompositions: those of one matrix at a time, and the CPU where a GPU's does not converge."""

import pytest
import torch

from sparsedepth.measure import spectra


def matrices(n: int, d: int) -> list[torch.Tensor]:
    x_nDD = torch.randn(n, d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [*(x_nDD @ x_nDD.mT)]


@pytest.mark.parametrize("limit", [1, 2 * 6 * 6 * 8, 2**28])
def test_batches_equal_one_at_a_time(monkeypatch, limit):
    monkeypatch.setattr(spectra, "BATCH_BYTES", limit)
    given = matrices(5, 6)
    given[2] = torch.diag(torch.tensor([3.0, 2, 1, 0, 0, 0], dtype=torch.float64))
    values = spectra.batched(torch.linalg.eigvalsh, given)
    inverses = spectra.batched(lambda x: torch.linalg.pinv(x, hermitian=True), given)
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
    (value,) = spectra.batched(eigvalsh, [given[0].as_subclass(OnGpu)])
    assert asked == [OnGpu, torch.Tensor]
    torch.testing.assert_close(value, torch.linalg.eigvalsh(given[0]))


def test_what_does_not_converge_on_a_cpu_is_an_error():
    def fails(x):
        raise torch.linalg.LinAlgError("no")

    with pytest.raises(torch.linalg.LinAlgError):
        spectra.batched(fails, matrices(1, 2))
