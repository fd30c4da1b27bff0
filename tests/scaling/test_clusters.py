"""Points that share a training run: the random effect's algebra, its variances, intervals that rows make too narrow."""

import numpy as np
import pandas as pd
import pytest
from support.depth_law_points import grid, planted, theta_of

from sparsedepth.plots.scaling import law_page
from sparsedepth.scaling.fit_law import ClusterEffect, bootstrap, cluster_effect, fit_law, refit
from sparsedepth.scaling.law import Law, design
from sparsedepth.scaling.points import read_points
from sparsedepth.scaling.report import Report, law_points
from sparsedepth.words.scaling import law_heading, law_warnings

SHAPE = ("d_model", "n_layers")


def warnings_of(fitted):
    return law_warnings(Report(source="x", fit=fitted, n_excluded=0, boot=None))


def test_seeds_of_one_shape_without_clusters_are_warned_of():
    """Two runs of each shape and budget share what the law misses there."""
    twice = planted(pd.concat([grid(), grid()], ignore_index=True), noise=0.003)
    said = "160 points have 80 shapes and budgets"
    assert any(warning.startswith(said) for warning in warnings_of(fit_law(twice, n_starts=4)))
    assert not any(said in w for w in warnings_of(fit_law(twice.assign(cluster=np.arange(160) % 80), n_starts=4)))


def test_clusters_of_an_exact_fit_share_nothing():
    points = planted(grid()).assign(loss=3.0, cluster=[f"c{i // 2}" for i in range(len(grid()))])
    report = Report(source="x", fit=fit_law(points, n_starts=4), n_excluded=0, boot=None)
    assert "sd 0 between, 0 within (0% of the variance is between)" in [*law_heading(report)][2]


def clustered(between, noise=0.004, seed=0):
    """Five token counts of each shape as one run, whose ln loss is off by one normal draw."""
    points = planted(grid(depths=(4, 8, 16, 32)), noise=noise, seed=seed)
    points = points.assign(cluster=points["d_model"].astype(str) + " " + points["n_layers"].astype(str))
    index = points.groupby("cluster", sort=False).ngroup().to_numpy()
    shift = between * np.random.default_rng(seed + 1).standard_normal(index.max() + 1)
    return points.assign(loss=points["loss"] * np.exp(shift[index]))


def test_the_cost_is_that_of_the_inverse_covariance():
    """S = s_e^2 r' V^-1 r with V = s_e^2 I + s_u^2 (1 where two points share a cluster); so is its minimum."""
    points = clustered(0.02)
    index = points.groupby("cluster", sort=False).ngroup().to_numpy()
    plan = design(points, Law())
    found = refit(plan, theta_of(plan), ClusterEffect(index=index, between=0.02, within=0.004))
    fitted_N, by_NP = plan.at(found.theta_P)
    residual = fitted_N - plan.y
    inverse = np.linalg.inv(0.004**2 * np.eye(len(index)) + 0.02**2 * (index[:, None] == index))
    assert found.cost == pytest.approx(0.004**2 * residual @ inverse @ residual, rel=1e-9)
    slope, scale = by_NP.T @ inverse @ residual, np.sqrt(np.einsum("np,nm,mp->p", by_NP, inverse, by_NP))
    assert np.abs(slope / scale).max() < 1e-4 * np.sqrt(residual @ inverse @ residual)


def test_the_variances_of_planted_effects_are_found():
    """400 clusters of four: the moments are unbiased, so that their mean error is small."""
    generator = np.random.default_rng(0)
    index = np.repeat(np.arange(400), 4)
    residual = 0.02 * generator.standard_normal(400)[index] + 0.01 * generator.standard_normal(1600)
    found = cluster_effect(index, residual, 0)
    assert found.between == pytest.approx(0.02, rel=0.1) and found.within == pytest.approx(0.01, rel=0.05)
    alone = cluster_effect(np.arange(1600), residual, 3)
    assert alone.between == 0 and alone.within == pytest.approx(np.hypot(0.02, 0.01), rel=0.1)
    assert cluster_effect(index, 0.01 * generator.standard_normal(1600), 0).between < 0.002
    one = cluster_effect(np.zeros(1600, int), residual, 3)
    assert one.between == 0 and one.within == pytest.approx(alone.within)


def test_resampled_clusters_give_the_width_that_rows_hide():
    points = clustered(0.01)
    rows, runs = fit_law(points.drop(columns="cluster"), n_starts=8), fit_law(points, n_starts=8)
    assert runs.clusters is not None and len(runs.clusters.sizes) == 16
    assert runs.clusters.between == pytest.approx(0.01, rel=0.6)
    assert (
        runs.df == 16 - 7 and rows.df == 64 - 7 and any("16 clusters are fewer than 20" in w for w in warnings_of(runs))
    )
    widths = []
    for fitted in (rows, runs):
        lo, hi = bootstrap(fitted, 100).intervals["width_part"]
        widths.append(hi - lo)
        units = "clusters" if fitted is runs else "points"
        assert f"bootstrap over {units}." in law_page(law_points(fitted), fitted, bootstrap(fitted, 20)).get_supxlabel()
    assert widths[1] > 1.2 * widths[0]


def test_the_columns_that_name_a_cluster(tmp_path):
    points = clustered(0.01)
    path = tmp_path / "points.csv"
    points.rename(columns={"cluster": "name"}).to_csv(path, index=False)
    assert read_points(path, cluster="name")["cluster"].nunique() == 16
    assert read_points(path, cluster=",".join(SHAPE))["cluster"].nunique() == 16
    assert "cluster" not in read_points(path)
    with pytest.raises(ValueError, match="has no column run"):
        read_points(path, cluster="run")
