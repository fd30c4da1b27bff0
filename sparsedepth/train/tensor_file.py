"""safetensors files, written while other threads continue: `save_file` does not hold Python's interpreter lock."""

import errno
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sparsedepth import files


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write the tensors to `path` atomically and durably; returns the file's SHA-256. Raises OSError."""
    with files.atomic_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(tensors, temporary)
        except SafetensorError as error:
            code = re.search(r"\(os error (\d+)\)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)) from None
        temporary.chmod(mode)  # `save_file` makes it private, but results are shared
        return files.sha256(temporary)
