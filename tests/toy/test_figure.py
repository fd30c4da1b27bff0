"""The toys' figure: the numbers in the CSV are those of the fits, and it is what a folder of toys alone draws."""

import numpy as np
import pandas as pd
import pytest

from sparsedepth.plots.draw import draw
from sparsedepth.store.connection import open_store
from sparsedepth.toy.config import ToyConfig
from sparsedepth.toy.record import save_toy


def fill(results, **fields):
    """rho 0 falls as 1/l, rho 1 as 1/l^3; the temperature only scales."""
    for n_layers in fields.pop("n_layers", (2, 3, 4, 8)):
        config = ToyConfig(n_layers=n_layers, rho=(0.0, 1.0), **fields)
        rows = [
            {"rho": rho, "teacher_seed": teacher, "temperature": temperature, "seed": 0, "train_loss": None}
            | {"test_loss": (1 + 0.1 * teacher) / temperature * n_layers ** -(1 + 2 * rho)}
            for rho in config.rho
            for teacher in config.teacher_seed
            for temperature in config.temperature
        ]
        save_toy(results, config, [{"student": k, **row} for k, row in enumerate(rows)], [], {})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    fill(results, temperature=(0.1, 0.5, 1.0))
    fill(results, target="mse")
    with open_store(results) as opened:
        yield opened


@pytest.mark.parametrize("figure", ["toy", None])
def test_a_folder_of_toys_is_drawn_with_its_numbers(store, tmp_path, figure):
    draw(store, figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    data = pd.read_csv(tmp_path / "figure.csv")
    assert len(data) == 2 * 3 * 4 * 3 + 2 * 3 * 4  # rho x teachers x depths x temperatures, and the mse students
    expected = 1 + 2 * data["rho"]
    assert np.allclose(data["alpha"], expected, rtol=1e-3) and np.allclose(data["slope"], expected)
    assert np.allclose(data["fitted_loss"], data["test_loss"], rtol=1e-3)


def test_the_same_numbers_give_the_same_file(store, tmp_path):
    for name in ("a", "b"):
        draw(store, "toy", tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_too_few_depths_are_said(tmp_path):
    fill(tmp_path, n_layers=(2, 3))
    with open_store(tmp_path) as store, pytest.raises(ValueError, match="train more depths"):
        draw(store, "toy", tmp_path / "figure.png")
