"""A small corpus on disk."""

from pathlib import Path

import pytest


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder of 60 documents of 20 to 138 bytes."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"document {i:02}: " + "é" * i + "\n" * 7)
    return folder
