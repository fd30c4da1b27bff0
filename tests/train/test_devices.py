"""Two processes take the steps of one, in every way, and continue each other's checkpoints."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import forked_commands, train_on_two_processes

from sparsedepth.train.devices import ALONE, Devices, check_world

WAYS = ["dense ddp", "dense fsdp", "dense ddp, micro-batches", "dense fsdp, micro-batches", "dense one, then ddp"]
WAYS += ["experts ddp", "experts fsdp", "experts ddp, then fsdp"]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """What two processes left."""
    folder = tmp_path_factory.mktemp("two")
    train_on_two_processes.trained("dense", checkpoints=folder / "one", stop_step=train_on_two_processes.HALF_WAY)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code, _, err = forked_commands.call([str(folder)], environment, program=train_on_two_processes.__file__)
    assert code == 0, err
    return folder


@pytest.fixture(scope="module")
def one() -> dict:
    """What one process finds."""
    return {family: train_on_two_processes.trained(family) for family in train_on_two_processes.FAMILIES}


@pytest.mark.parametrize("way", WAYS)
def test_losses_weights_and_observations_are_those_of_one_process(way, one, two):
    model, expected = one[way.split()[0]]
    found = json.loads((two / f"{way}.json").read_text())
    for name in ("train_loss", "grad_norm", "balance_loss"):
        ours, theirs = ([row[name] for row in curves] for curves in (expected.curves, found["curves"]))
        assert theirs == (pytest.approx(ours, rel=1e-5) if ours[0] is not None else ours), name
    for rank in (0, 1):
        for name, weight in load_file(two / f"{way}.{rank}").items():
            torch.testing.assert_close(weight, model.get_parameter(name), atol=1e-5, rtol=1e-4)
    rows, own = found["observations"], expected.observations
    assert [row["step"] for row in rows] == [row["step"] for row in own] == [0, 5, 10]
    assert [row["value"] for row in rows] == pytest.approx([row["value"] for row in own], rel=1e-5)


def test_one_process_continues_what_two_left(one, two):
    _, result = train_on_two_processes.trained("experts", checkpoints=two / "fsdp")
    losses = [row["train_loss"] for row in one["experts"][1].curves]
    assert [row["train_loss"] for row in result.curves] == pytest.approx(losses, rel=1e-5)


def test_shares_are_equal_disjoint_and_whole(monkeypatch):
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    tokens = np.arange(12).reshape(6, 2)
    shares = [Devices("ddp", rank, 3).share(tokens) for rank in range(3)]
    assert np.array_equal(np.concatenate(shares), tokens) and {len(share) for share in shares} == {2}
    assert np.array_equal(ALONE.share(tokens), tokens)
    with pytest.raises(ValueError, match=r"6 sequences .* 4 processes"):
        Devices("ddp", 0, 4).share(tokens)


def test_how_processes_are_started_must_fit(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    check_world("none")
    with pytest.raises(ValueError, match="torchrun --nproc-per-node"):
        check_world("fsdp")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    check_world("ddp")
    with pytest.raises(ValueError, match="one of 2 processes"):
        check_world("none")
