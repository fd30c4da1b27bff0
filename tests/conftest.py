"""Marks that skip themselves: `gpu` without a CUDA device, `slow` unless asked for with -m slow."""

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wants_slow = "slow" in (config.getoption("-m") or "")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("slow") and not wants_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
