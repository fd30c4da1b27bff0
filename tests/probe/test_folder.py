"""Headers of every kind of dishonesty: refused in one line, without a crash and without memory."""

import json
import random
import resource

import pytest
import torch
from safetensors.torch import save

from sparsedepth.probe.folder import check_weights

HONEST = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})


def spoilt(rng: random.Random) -> bytes:
    """A file with a random lie in its header, or random bytes altogether."""
    length = int.from_bytes(HONEST[:8], "little")
    header, data = json.loads(HONEST[8 : 8 + length]), HONEST[8 + length :]
    entry = header[rng.choice("ab")]
    number = rng.choice([-1, 0, 1, 7, 2**31, 2**63, 2**64, 10**30, 1.5, "2", None, [], {}])
    match rng.randrange(7):
        case 0:
            entry["shape"] = rng.choice([[number], [2**40, 2**40], number, [[1]]])
        case 1:
            entry["data_offsets"] = rng.choice([[0, number], [number, 8], number, [8, 0], [0, 8, 16]])
        case 2:
            entry["dtype"] = rng.choice(["F33", "", None, 4, "PICKLE"])
        case 3:
            del entry[rng.choice(list(entry))]
        case 4:
            return rng.randbytes(rng.randrange(64))
        case 5:
            return rng.choice([2**20, 2**40, 2**63, length + 1000]).to_bytes(8, "little") + HONEST[8:]
        case 6:
            place = rng.randrange(8, 8 + length)
            return HONEST[:place] + rng.randbytes(1 + rng.randrange(8)) + HONEST[place + 8 :]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_random_headers_are_refused_or_sound(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(HONEST)
    check_weights(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(1000):
        path.write_bytes(spoilt(rng))
        try:
            check_weights(path)
        except ValueError as error:
            assert "\n" not in str(error) and "is not a valid safetensors file" in str(error)
            refused += 1
    assert refused > 830
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_header_above_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse: no byte of it on disk
    with pytest.raises(ValueError, match="claims a header of 200,000,000"):
        check_weights(path)
