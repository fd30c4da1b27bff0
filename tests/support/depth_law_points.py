"""Points drawn from a depth law that is known."""

import numpy as np
import pandas as pd

from sparsedepth.scaling.law import DesignMatrix

TRUTH = {"a_m": 0.9, "a_l": 1.2, "a_D": 0.3}
PARTS = {"width": 0.25, "depth": 0.15, "data": 0.4}
"""nat/token at the points' geometric means."""
E = 1.7


def grid(widths=(256, 512, 1024, 2048), depths=(4, 8, 16, 32, 64), tokens=(1e9, 4e9, 1.6e10, 6.4e10)) -> pd.DataFrame:
    """Every shape at every number of tokens, loss still to come; 12 m^2 l + 32000 m parameters."""
    rows = [(m, depth, n) for m in widths for depth in depths for n in tokens]
    points = pd.DataFrame(rows, columns=["d_model", "n_layers", "num_tokens"]).astype(float)
    points["model_size"] = 12 * points["d_model"] ** 2 * points["n_layers"] + 32_000 * points["d_model"]
    return points.assign(loss=2.0)


def planted(points: pd.DataFrame, noise: float = 0.0, seed: int = 0, **exponents: float) -> pd.DataFrame:
    """The points with losses of the known law, ln loss off by normal noise of that standard deviation."""
    truth = TRUTH | exponents
    columns = {"width": ("d_model", "a_m"), "depth": ("n_layers", "a_l"), "data": ("num_tokens", "a_D")}
    loss = np.full(len(points), E)
    for name, (column, exponent) in columns.items():
        ratio = points[column] / np.exp(np.log(points[column]).mean())
        loss += PARTS[name] * ratio ** -truth[exponent]
    error = noise * np.random.default_rng(seed).standard_normal(len(points))
    return points.assign(loss=loss * np.exp(error))


def theta_of(plan: DesignMatrix) -> np.ndarray:
    """The known law's parameters under a design, (P,)."""
    terms = plan.law.terms
    parts = [np.log(PARTS[term.name]) for term in terms]
    return np.array([np.log(E), *parts, *(TRUTH[f"a_{term.symbol}"] for term in terms)])
