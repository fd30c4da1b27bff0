"""The compiler's cache, in the results folder: RESULTS/work/compiler-cache/HOST-0, HOST-1, ...

A process that is killed while it compiles can leave half a file there, with which every later run of that shape would
fail. The run that finds it marks the folder as damaged and takes the next; nothing is deleted, since other runs may be
reading the folder. A cache that the user has chosen (TORCHINDUCTOR_CACHE_DIR) is used until it fails.
"""

import itertools
import os
import socket
import sys
import traceback
from pathlib import Path

VARIABLE, DEPENDENT = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
DAMAGED = "damaged"
"""The file that marks a folder."""

COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


def use_cache(results: Path) -> Path:
    """Choose the folder for what this process compiles: the first of this machine that is not damaged."""
    chosen = os.environ.get(VARIABLE)
    if chosen and Path(chosen).parent != _root(results):
        return Path(chosen)
    host = socket.gethostname().partition(".")[0] or "host"
    folders = (_root(results) / f"{host}-{number}" for number in itertools.count())
    folder = next(folder for folder in folders if not (folder / DAMAGED).exists())
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(folder)
    return folder


def abandon_cache(results: Path) -> None:
    """Never use the current folder again, and forget what this process has compiled."""
    chosen = os.environ.pop(VARIABLE, None)
    os.environ.pop(DEPENDENT, None)
    if chosen and Path(chosen).parent == _root(results):
        (Path(chosen) / DAMAGED).touch()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def _root(results: Path) -> Path:
    return results.resolve() / "work" / "compiler-cache"


def is_compiler_error(error: BaseException) -> bool:
    """Whether the compiler raised this, or what it came from."""
    chain: BaseException | None = error
    while chain is not None:
        last_frames = traceback.extract_tb(chain.__traceback__)[-1:]
        places = [frame.filename.replace(os.sep, ".") for frame in last_frames]
        if type(chain).__module__.startswith(COMPILERS) or any(f".{part}." in p for part in COMPILERS for p in places):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
