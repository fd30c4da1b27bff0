"""The files of a folder of checkpoints, by name: only these are ever deleted. No torch."""

import contextlib
from pathlib import Path


def checkpoint_files(folder: Path) -> list[Path]:
    """Checkpoints, and the parts that a killed process left, such as `save_file`'s .tmpXXXXXX."""
    return [*folder.glob("step-*"), *folder.glob(".step-*.tmp-*"), *folder.glob(".tmp*")]


def remove_checkpoints(folder: Path) -> None:
    """Delete the checkpoints in a folder that is no link, and the folder if nothing else is in it."""
    if folder.is_dir() and not folder.is_symlink():
        for path in checkpoint_files(folder):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
