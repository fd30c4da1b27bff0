"""Tensor files: atomic, with their checksum, and errors of the system as such."""

import errno

import pytest
import torch
from safetensors.torch import load_file, save

from sparsedepth import files
from sparsedepth.train import checkpoint
from sparsedepth.train.checkpoint import write_tensors


def test_the_file_holds_the_tensors_and_has_the_checksum(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1], dtype=torch.bfloat16)}
    path = tmp_path / "x.safetensors"
    assert write_tensors(path, tensors) == files.sha256(path)
    assert path.read_bytes() == save(tensors)
    assert all(torch.equal(load_file(path)[name], tensor) for name, tensor in tensors.items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # results are shared


def test_a_full_disk_is_an_error_of_the_system_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.zeros(2)})
    before = path.read_bytes()

    def full(tensors, name):
        raise checkpoint.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left on device") as failure:
        write_tensors(path, {"a": torch.ones(2)})
    assert failure.value.errno == errno.ENOSPC and failure.value.filename == str(path)
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]
