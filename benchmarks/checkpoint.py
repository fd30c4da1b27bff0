"""How long does writing a checkpoint in a thread hold up another thread, such as training's?

    python benchmarks/checkpoint.py --gigabytes 0.8 --repeats 3

The other thread takes a turn every millisecond; its longest wait beyond that is the stall. `save`: bytes made in
memory, hashed and written. `save_file`: `sparsedepth.train.checkpoint`, as checkpoints are written.
"""

import argparse
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

from sparsedepth import files
from sparsedepth.train.checkpoint import write_tensors

TURN_SECONDS = 0.001


def by_save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    content = save(tensors)
    hashlib.sha256(content).hexdigest()
    files.write_bytes(path, content)


def stall(write: Callable[[], object]) -> tuple[float, float]:
    """The other thread's longest wait, and the seconds that writing took."""
    writer = threading.Thread(target=write)
    began = turn = time.perf_counter()
    longest = 0.0
    writer.start()
    while writer.is_alive():
        time.sleep(TURN_SECONDS)
        before, turn = turn, time.perf_counter()
        longest = max(longest, turn - before - TURN_SECONDS)
    return longest, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    n_tensors = 100  # 24 layers and their moments have more
    tensors = {f"w{i}": torch.randn(int(given.gigabytes * 1e9 / 4 / n_tensors)) for i in range(n_tensors)}
    with tempfile.TemporaryDirectory() as folder:
        for name, write in {"save": by_save, "save_file": write_tensors}.items():
            for _ in range(given.repeats):
                longest, seconds = stall(lambda write=write: write(Path(folder) / "x.safetensors", tensors))
                print(f"{name:10} stall {longest:.3f} s, writing {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
