"""Slopes of the best lr that were planted: found where they are, 0 where they are not, none at the edge of a grid."""

import lr_transfer
import numpy as np
import pandas as pd
import pytest

PLANTED = {"standard": (-1.0, -0.5), "mup": (0.0, -0.5), "completep": (0.0, 0.0)}


def planted(noise=0.02, factors=(0.25, 0.5, 1.0, 2.0, 4.0)):
    """Losses with a parabola in ln lr about an optimum that moves with width and depth by PLANTED's powers."""
    rng, rows = np.random.default_rng(0), []
    for rule, (width, depth) in PLANTED.items():
        for d_model in (32, 64, 128):
            for n_layers in (4, 12):
                for seed in range(3):
                    middle = 3e-3 * (d_model / 64) ** width * (n_layers / 4) ** depth
                    best = np.log(middle) + noise * rng.normal()
                    for factor in factors:
                        loss = 2 + 0.1 * (np.log(middle * factor) - best) ** 2
                        rows.append((rule, d_model, n_layers, seed, middle * factor, loss, "ok"))
    return pd.DataFrame(rows, columns=["parametrisation", "d_model", "n_layers", "seed", "lr", "val_loss", "outcome"])


def test_the_vertex_by_hand():
    """(u - 1)^2 through 0, 2, 3 is lowest at 1; a curve that is lowest at its end has none."""
    assert lr_transfer.vertex(np.array([0.0, 0.5, 2.0, 3.0]), np.array([1, 0.25, 1, 4])) == pytest.approx(1)
    assert np.isnan(lr_transfer.vertex(np.array([0.0, 1.0, 2.0]), np.array([3.0, 2.0, 1.0])))


def test_planted_slopes_are_found_and_absent_ones_are_not():
    found = {one.parametrisation: one for one in lr_transfer.transfers(lr_transfer.optima(planted(), "val_loss"))}
    for rule, powers in PLANTED.items():
        for axis, power in zip(("d_model", "n_layers"), powers, strict=True):
            slope = found[rule].slopes[axis]
            assert slope.mean == pytest.approx(power, abs=0.05) and slope.n == 3
            assert found[rule].verdict(axis) == ("does not transfer" if power else "transfers")
        assert (found[rule].at_edge, found[rule].n_curves) == (0, 18)


def test_another_knob_has_a_best_lr_of_its_own():
    """With twice the best lr at the larger width alone the slope would look like ln 2 / ln 2 = 1 without a setting."""
    runs = planted()
    other = runs[runs["d_model"] == 64].assign(weight_decay=1.0, lr=lambda rows: 2 * rows["lr"])
    both = pd.concat([runs.assign(weight_decay=0.1), other])
    (_, mup, _) = lr_transfer.transfers(lr_transfer.optima(both, "val_loss"))
    assert mup.slopes["d_model"].mean == pytest.approx(0, abs=0.05) and mup.n_curves == 24


def test_an_optimum_outside_the_grid_is_counted_and_not_guessed():
    runs = planted(factors=(1.5, 2.0, 4.0))
    curves = lr_transfer.optima(runs, "val_loss")
    assert curves["optimum"].isna().all() and lr_transfer.transfers(curves) == []
    few = lr_transfer.transfers(lr_transfer.optima(planted()[lambda rows: rows["seed"] == 0], "val_loss"))
    assert few[0].verdict("d_model") == "no interval from so few seeds"


def test_the_figure_of_optima_is_drawn(tmp_path):
    lr_transfer.draw(lr_transfer.optima(planted(), "val_loss"), tmp_path / "lr.png")
    assert (tmp_path / "lr.png").stat().st_size > 5000
