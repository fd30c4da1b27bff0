import shutil
from pathlib import Path

import pytest
from support.hf_families import tiny_folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def model(saved, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))
