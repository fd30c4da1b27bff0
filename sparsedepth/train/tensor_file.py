"""safetensors files, written while other threads continue: `save_file` does not hold Python's
interpreter lock."""

import errno
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sparsedepth import files


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write the tensors to `path` atomically and durably; returns the file's SHA-256. Raises
    OSError."""
    with files.atomic_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        with errors_of_system():
            save_file(tensors, temporary)
        temporary.chmod(mode)  # `save_file` makes it private, but results are shared
        return files.sha256(temporary)


@contextmanager
def errors_of_system() -> Generator[None]:
    """Errors of safetensors while writing, such as a full disk, as the OSError that caused them."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error).partition(" (os error")[0]) from None
