"""The best depth per width at each budget: planted optima that move or stay, many shapes of one run each."""

import numpy as np
import pytest
from support.shape_ladders import BUDGETS, shapes

from sparsedepth.scaling.aspect import aspect_law


def score(n_draws, optima, **world):
    found = {name: [] for name in ("covered", "half", "moves", "beyond")}
    for number in range(n_draws):
        law = aspect_law(shapes(np.random.default_rng([number, round(10 * optima[0]) % 97]), optima, **world))
        found["moves"].append(law.moves)
        for best, truth in zip(law.best_at(BUDGETS), optima, strict=True):
            found["beyond"].append(best.lo is None)
            if best.lo is not None:
                found["covered"].append(best.lo <= truth <= best.hi)
                found["half"].append((best.hi - best.lo) / 2)
    return {name: float(np.median(of) if name == "half" else np.mean(of)) for name, of in found.items()}


draws = pytest.mark.parametrize("n_draws", [20, pytest.param(300, marks=pytest.mark.slow)])


@draws
def test_a_best_aspect_that_moves(n_draws):
    of = score(n_draws, (-0.5, 0.0, 0.5))
    print(of)
    whole = n_draws == 300
    assert of["covered"] >= (0.93 if whole else 0.8) and of["half"] <= 0.3 and of["beyond"] == 0
    assert of["moves"] >= (0.95 if whole else 0.8)


@draws
@pytest.mark.parametrize("clusters", [0.0, 0.004], ids=["independent", "shapes deviate together"])
def test_a_best_aspect_that_stays(clusters, n_draws):
    of = score(n_draws, (0.0, 0.0, 0.0), clusters=clusters)
    print(of)
    whole = n_draws == 300
    assert of["covered"] >= (0.93 if whole else 0.8) and of["moves"] <= (22 / 300 if whole else 0.2)


def test_a_loss_that_knows_no_best_aspect_has_none():
    """No curvature: nothing is bounded."""
    rng = np.random.default_rng(5)
    frame = shapes(rng, (0.0, 0.0, 0.0))
    frame["loss"] -= 0.02 * np.log2(64 * frame["n_layers"] / frame["d_model"]) ** 2
    law = aspect_law(frame)
    assert all(best.lo is None for best in law.best_at(BUDGETS)) and not law.moves


def test_too_few_shapes_are_refused():
    frame = shapes(np.random.default_rng(1), (0.0, 0.0, 0.0))
    for few, reason in (
        (frame.assign(d_model=frame["n_layers"] * 64), "aspects"),
        (frame.head(9), "runs"),
    ):
        with pytest.raises(ValueError, match=reason):
            aspect_law(few)
