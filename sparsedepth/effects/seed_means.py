"""Values of several contexts and seeds, reduced to one row per seed.

The seed is the unit, and each of the contexts c = 1..C has equal weight, whatever its number of seeds n_c. Where all
contexts have the same seeds, a row is the seed's mean. Else, with the seed's residuals r_sc from the means of its
contexts,

    row_s = mean over contexts + sqrt(S (S - 1)) sum over c of r_sc sqrt(n_c / (n_c - 1)) / (C n_c)

so that var_s / S is the variance of the mean over contexts. Its degrees of freedom are Satterthwaite's for contexts of
equal noise, (sum 1/n_c)^2 / sum 1/(n_c^2 (n_c - 1)), at most S - 1. A context with one seed shows no noise: with any,
rows are the seeds' means, as if contexts were alike.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True, kw_only=True)
class SeedMeans:
    by_seed: pd.DataFrame
    df: float
    """Degrees of freedom of the spread between its rows."""
    weights: pd.Series
    """Of each value in the mean."""


def seed_means(values: pd.DataFrame, seed: pd.Series, context: pd.Series) -> SeedMeans:
    """The rows of `values`, without missing ones, by their `seed` and `context`."""
    by_seed, cell = values.groupby(seed).mean(), [context.rename("context"), seed.rename("seed")]
    cells, n_seeds = values.groupby(cell).mean(), len(by_seed)
    count_C = cells.groupby("context").size()
    if n_seeds < 2 or (count_C == n_seeds).all() or count_C.min() < 2:
        weights = 1 / (seed.map(seed.value_counts()) * max(n_seeds, 1))
        return SeedMeans(by_seed=by_seed, df=n_seeds - 1, weights=weights)
    share_C = 1 / (len(count_C) * count_C)
    mean_C, scale_C = cells.groupby("context").mean(), share_C * np.sqrt(count_C / (count_C - 1))
    residuals = (cells - mean_C).mul(scale_C, axis=0, level="context").groupby("seed").sum()
    df = (1 / count_C).sum() ** 2 / (1 / (count_C**2 * (count_C - 1))).sum()
    return SeedMeans(
        by_seed=mean_C.mean() + residuals * math.sqrt(n_seeds * (n_seeds - 1)),
        df=min(float(df), n_seeds - 1),
        weights=context.map(share_C) / seed.groupby(cell).transform("size"),
    )
