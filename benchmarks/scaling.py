"""Fits of the depth law: batched, against one by one with SciPy; and a whole bootstrap.

    python benchmarks/scaling.py --points 203 --fits 1000 --one-by-one 50
    python benchmarks/scaling.py --quick

The points are drawn from a known law with noise of 0.5%, over shapes and tokens like those of a real grid. One by one:
scipy.optimize.least_squares with the same analytic Jacobian, from the same start, to the same gradient. Set
OMP_NUM_THREADS to the number of cores to measure for.
"""

import argparse
import time

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from sparsedepth.scaling.fit import Fit, fit
from sparsedepth.scaling.law import jacobian
from sparsedepth.scaling.solve import solve
from sparsedepth.scaling.uncertainty import PERTURBED, bootstrap


def draw(n_points: int) -> pd.DataFrame:
    """Random shapes of 12 to 48 layers, width and depth correlated, with losses of the law."""
    generator = np.random.default_rng(0)
    layers_N = np.round(np.exp(generator.uniform(np.log(12), np.log(48), n_points)))
    width_N = 64 * np.round(2.0 * layers_N * np.exp(0.2 * generator.standard_normal(n_points)))
    tokens_N = np.exp(generator.uniform(np.log(1e9), np.log(3e11), n_points))
    loss_N = 275 * width_N**-0.95 + 2000 * (100 * layers_N) ** -1.2 + 8.5 * (tokens_N / 1e6) ** -0.3 + 1.75
    loss_N *= np.exp(0.005 * generator.standard_normal(n_points))
    return pd.DataFrame({"d_model": width_N, "n_layers": layers_N, "num_tokens": tokens_N, "loss": loss_N})


def one_by_one(found: Fit, weight_RN: np.ndarray) -> np.ndarray:
    """The lowest cost for every row of weights, (R,)."""
    costs = []
    for weight_N in weight_RN:
        root_N = np.sqrt(weight_N)
        solved = least_squares(
            lambda theta_P, root_N=root_N: root_N * (jacobian(theta_P[None], found.plan.z)[0][0] - found.plan.y),
            found.theta,
            jac=lambda theta_P, root_N=root_N: (root_N * jacobian(theta_P[None], found.plan.z)[1][0]).T,
            method="lm",
            gtol=1e-8,
            xtol=1e-14,
            ftol=1e-14,
        )
        costs.append(2 * solved.cost)
    return np.array(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=203)
    parser.add_argument("--fits", type=int, default=1000)
    parser.add_argument("--one-by-one", type=int, default=50, help="how many of them SciPy does")
    parser.add_argument("--quick", action="store_true", help="100 fits, 5 of them one by one")
    options = parser.parse_args()
    n_fits, n_slow = (100, 5) if options.quick else (options.fits, options.one_by_one)
    points = draw(options.points)

    began = time.perf_counter()
    found = fit(points)
    print(f"fit from {found.n_starts} starts: {time.perf_counter() - began:.2f} s, {found.n_reached} reached the best")

    n = found.n_points
    weight_RN = np.random.default_rng(1).multinomial(n, np.full(n, 1 / n), size=n_fits).astype(float)
    began = time.perf_counter()
    batched = solve(found.plan, np.tile(found.theta, (n_fits, 1)), weight_RN)
    each = (time.perf_counter() - began) / n_fits
    print(f"batched: {1e3 * each:.3f} ms per fit, {batched.converged.sum()} of {n_fits} converged to a cosine of 1e-8")

    began = time.perf_counter()
    cost_R = one_by_one(found, weight_RN[:n_slow])
    slow = (time.perf_counter() - began) / n_slow
    worst = np.abs(batched.cost[:n_slow] / cost_R - 1).max()
    print(
        f"one by one (SciPy): {1e3 * slow:.3f} ms per fit, {slow / each:.0f} times as long; costs agree to {worst:.0e}"
    )

    began = time.perf_counter()
    boot = bootstrap(found, n_fits)
    print(
        f"bootstrap of {n_fits}, {1 + PERTURBED} starts each: {time.perf_counter() - began:.2f} s, "
        f"{boot.n_converged} converged; a_l {found.exponent('a_l'):.3f}, 95% {boot.intervals['a_l'][0]:.3f} to "
        f"{boot.intervals['a_l'][1]:.3f}"
    )


if __name__ == "__main__":
    main()
