"""How much of a knob's effect on an outcome is mediated, for instance by residual variance?

Over pairs i of runs that differ in the knob alone, with d the setting minus the baseline (see `contrast`):

    d_y,i = direct_depth + b d_m,i + e_i        least squares, an intercept per depth
    share = b mean(d_m) / mean(d_y)             indirect / total (Baron & Kenny 1986; the product of coefficients)

The 95% interval is Student's. Its variance is the jackknife's over contexts (the combinations of other settings in
which the knob was varied, each with its pairs at all depths and of all seeds), plus that over seeds, since a seed may
shift the effect in all contexts alike; degrees of freedom are Satterthwaite's. Deviates: Cameron, Gelbach & Miller
(2011) subtract the variance over single pairs of context and seed, which both contain; with 3 to 10 seeds such
intervals hold the truth in .90 to .97 of simulated sweeps.

A share is given only with its interval, from MIN_CONTEXTS contexts on, and where the total effect itself excludes 0.
The knob is set, the mediator is only observed: whatever moves both mediator and outcome counts as mediation (in
`causal_evidence` the mediator is moved by itself), and noise in the mediator pulls b, and so the share, towards 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
import pandas as pd

from sparsedepth.effects.chain import STAGES, jackknife_variance, leave_one_out
from sparsedepth.effects.intervals import Estimate, ExtraVariance, estimate, t_interval, with_extra_variances
from sparsedepth.effects.knobs import Knob
from sparsedepth.effects.pairs import pairs
from sparsedepth.quantities import of_stage
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.degeneracy import degeneracy, score_rows

MIN_CONTEXTS = 6
NAMES = (
    "weight_sparsity",
    "attention_sparsity_rel",
    "residual_variance_last",
    "usefulness",
    "usefulness_loss_increase",
    "val_loss",
)
PATHS: tuple[tuple[str, str], ...] = tuple(
    path
    for cause, effect in combinations(STAGES, 2)
    if cause != "sparsity" or effect == "variance"
    for path in product(of_stage(cause), of_stage(effect))
    if set(path) <= set(NAMES)
)
"""(mediator, outcome); val_loss: replaced by the loss that compares the runs."""


@dataclass(frozen=True, kw_only=True)
class Mediation:
    knob: str
    setting: str
    baseline: str
    mediator: str
    outcome: str
    total: Estimate
    """Effect on the outcome, over all depths, on the scale of `contrast`."""
    share: float | None
    """1: all of it is mediated; 0: none. None, as its interval, where the total effect does not exclude 0, below
    MIN_CONTEXTS contexts, and where one context or seed decides whether there is a share."""
    lo: float | None
    hi: float | None
    n_contexts: int


def mediations(runs: pd.DataFrame, knob: Knob, paths: Sequence[Sequence[str]] = PATHS) -> list[Mediation]:
    """Every path, for every setting of a knob that has a pair with both numbers; none through a degenerate score."""
    loss = loss_of(runs)
    paths = [with_loss(loss, path) for path in paths]
    names = dict.fromkeys(name for path in paths for name in path)
    sound = [name for name in names if not degeneracy(name, score_rows(runs, name)).is_degenerate]
    by_name = {name: pairs(runs, knob, name) for name in sound if runs[name].notna().any()}
    every_path = [
        mediation(by_name[mediator], by_name[outcome], knob, setting, mediator, outcome)
        for mediator, outcome in paths
        if mediator in by_name and outcome in by_name
        for setting in list(knob.settings)[1:]
    ]
    return [path for path in every_path if path.total.n]


def mediation(
    of_mediator: pd.DataFrame,
    of_outcome: pd.DataFrame,
    knob: Knob,
    setting: str,
    mediator: str,
    outcome: str,
) -> Mediation:
    """One path at one setting, from the knob's `pairs` in either quantity."""
    pairs = of_outcome.assign(of_mediator=of_mediator["difference"])
    pairs = pairs[pairs["setting"] == setting].dropna(subset=["difference", "of_mediator"])
    total = replace(estimate(pairs.groupby("seed")["difference"].mean().to_numpy()), n=len(pairs))
    n_contexts = pairs["context"].nunique()
    is_sample = total.excludes_zero and n_contexts >= MIN_CONTEXTS
    share = _share_estimate(pairs) if is_sample else None
    return Mediation(
        knob=knob.name,
        setting=setting,
        baseline=knob.baseline,
        mediator=mediator,
        outcome=outcome,
        total=total,
        share=share.mean if share else None,
        lo=share.lo if share else None,
        hi=share.hi if share else None,
        n_contexts=n_contexts,
    )


def _share_estimate(pairs: pd.DataFrame) -> Estimate | None:
    """The share with its interval; None where one context or seed decides whether there is a share."""
    share, variances = float(_share(pairs, np.ones((1, len(pairs))))[0]), []
    for unit in ("context", "seed"):
        unit_N, units = pd.factorize(pairs[unit])
        variance = jackknife_variance(_share(pairs, leave_one_out(len(units))[:, unit_N]))
        if variance is None:
            return None
        variances.append(ExtraVariance(variance=variance, df=len(units) - 1))
    over_contexts, over_seeds = variances
    alone = t_interval(share, math.sqrt(over_contexts.variance), over_contexts.df, len(pairs))
    return with_extra_variances(alone, [over_seeds])


def _share(pairs: pd.DataFrame, weight_BN: np.ndarray) -> np.ndarray:
    """One share per row of weights; NaN where the mediator does not vary or the total effect is 0."""
    m_N, y_N = pairs["of_mediator"].to_numpy(dtype=float), pairs["difference"].to_numpy(dtype=float)
    mm_B = my_B = np.zeros(len(weight_BN))
    for depth in pairs["n_layers"].unique():
        at = (pairs["n_layers"] == depth).to_numpy()
        w_BN, m, y = weight_BN[:, at], m_N[at], y_N[at]
        n_B = np.maximum(w_BN.sum(axis=1), 1e-300)
        mm_B = mm_B + w_BN @ (m * m) - (w_BN @ m) ** 2 / n_B
        my_B = my_B + w_BN @ (m * y) - (w_BN @ m) * (w_BN @ y) / n_B
    scale = float(m_N @ m_N) or 1.0
    b_B = np.divide(my_B, mm_B, out=np.full_like(mm_B, np.nan), where=mm_B > 1e-12 * scale)
    total_B = weight_BN @ y_N
    return np.divide(
        b_B * (weight_BN @ m_N), total_B, out=np.full_like(total_B, np.nan), where=np.abs(total_B) > 1e-300
    )
