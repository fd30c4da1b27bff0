"""Do sparsity, residual variance, effectiveness and loss move together? Rank correlations per link of the chain.

    rho = Pearson(rank x, rank y)    (Spearman 1904; ties share their mean rank)
    rho given z = (rho_xy - rho_xz rho_yz) / sqrt((1 - rho_xz^2) (1 - rho_yz^2))    (Yule 1907)

Scopes. 'pooled' ranks all runs together, so depth itself drives it. 'within depth' ranks the runs of each depth among
themselves, as a share of their number, and correlates what is left. 'within K' does so among runs that differ in knob K
(and the seed) alone. 'between knobs' correlates paired effects: one point per setting of any knob and depth, its mean
change in x and in y; do the knobs that move x more also move y more?

The replicates of a cell are not independent observations of the chain: the bootstrap draws whole cells (between knobs:
points) with replacement, and its percentiles are the 95% interval. A link is 'associated' only if that interval
excludes 0. Association is not causation: `causal_evidence` says what earns more. 2603.15389 itself shows a case (weight
decay 1.0 and 3.0) where variance falls and usefulness falls with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

import numpy as np
import pandas as pd

from sparsedepth.effects.knobs import Knob, chosen_fields, keys
from sparsedepth.effects.pairs import pairs
from sparsedepth.quantities import of_stage
from sparsedepth.quantities.record import Stage
from sparsedepth.store import degeneracy
from sparsedepth.store.comparable_loss import in_terms_of, loss_of
from sparsedepth.store.student import LEVEL
from sparsedepth.store.tuning import standing

Scope = Literal["pooled", "within depth"]

STAGES: tuple[Stage, ...] = ("sparsity", "variance", "effectiveness", "loss")
LINKS: tuple[tuple[str, str], ...] = tuple(
    link for cause, effect in pairwise(STAGES) for link in product(of_stage(cause), of_stage(effect))
)
"""val_loss stands for the loss that compares the runs (`links_of`)."""

MIN_CELLS = 6
"""Fewer distinct configurations get no interval; from here on, noise is called associated in about 5% of stores."""
RESAMPLES = 1000
IN_CACHE = 100_000
"""Numbers per array that are worked on at a time: a processor's cache holds several such."""


@dataclass(frozen=True, kw_only=True)
class Link:
    cause: str
    effect: str
    scope: str
    """A Scope, 'within KNOB', 'between knobs', or a Scope with 'given QUANTITY'."""
    rho: float | None
    """None where it is undefined: fewer than three runs, or one of the two does not vary."""
    lo: float | None
    hi: float | None
    n_runs: int
    n_cells: int
    """Between knobs: points."""
    n_missing: int
    """Finished runs left out because one of the two was not measured."""
    n_diverged: int
    knob: str | None = None
    """Of scope 'within KNOB'."""

    @property
    def verdict(self) -> Literal["associated", "not distinguishable"]:
        known = self.lo is not None and self.hi is not None
        return "associated" if known and (self.lo > 0 or self.hi < 0) else "not distinguishable"


def links_of(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """The links of which these runs have both sides: a degenerate score gives way to its form that is none, or is no
    link (`store.degeneracy`)."""
    loss = loss_of(runs)
    forms = sound_forms(runs)
    named = (in_terms_of(loss, pair) for pair in LINKS)
    sound = ((forms.get(cause, cause), forms.get(effect, effect)) for cause, effect in named)
    return [
        (cause, effect)
        for cause, effect in dict.fromkeys(sound)
        if cause and effect and runs[cause].notna().any() and runs[effect].notna().any()
    ]


def sound_forms(runs: pd.DataFrame) -> dict[str, str | None]:
    """Score of the chain that was measured -> the form of it that is not degenerate in these runs."""
    measured = (score for score in of_stage("effectiveness") if runs[score].notna().any())
    return {score: degeneracy.instead(score, degeneracy.rows_of(runs, score)) for score in measured}


def cautions(runs: pd.DataFrame) -> list[str]:
    """What to know of the chain's scores before they are believed; one line per score of which there is something."""
    scores = [score for score in of_stage("effectiveness") if score in runs.columns]
    lines = (degeneracy.advice(score, degeneracy.rows_of(runs, score)) for score in scores)
    return [line for line in lines if line]


def link(runs: pd.DataFrame, cause: str, effect: str, scope: Scope, seed: int = 0, given: str | None = None) -> Link:
    """One link over the runs that finished and have both numbers; partial, where something is `given`."""
    wanted = [cause, effect, *([given] if given else [])]
    usable = _usable(runs, wanted)
    stratum_N = usable["n_layers"].to_numpy() if scope == "within depth" else np.zeros(len(usable))
    return _link(runs, usable, wanted, f"{scope}, given {given}" if given else scope, stratum_N, seed)


def link_within(runs: pd.DataFrame, knob: Knob, cause: str, effect: str, seed: int = 0) -> Link:
    """One link over runs that differ in one knob and the seed alone; contexts with one setting do not count."""
    known = standing(runs)
    fields = [name for name in chosen_fields(known) if name not in {*knob.fields, "seed"}]
    known = known[["outcome", "cell_id", cause, effect]].assign(stratum=keys(known, fields))
    usable = _usable(known, [cause, effect])
    usable = usable[usable.groupby("stratum")["cell_id"].transform("nunique") > 1]
    stratum_N = pd.factorize(usable["stratum"])[0]
    within = _link(known, usable, [cause, effect], f"within {knob.name}", stratum_N, seed)
    return replace(within, knob=knob.name)


def link_between(runs: pd.DataFrame, knobs: Sequence[Knob], cause: str, effect: str, seed: int = 0) -> Link:
    """One link over settings of all knobs: mean paired change in the one against that in the other."""
    points, used = list[tuple[float, float]](), set[str]()
    for knob in knobs:
        x, y = (pairs(runs, knob, name) for name in (cause, effect))
        both = x.assign(other=y["difference"]).dropna(subset=["difference", "other"])
        changes = both.groupby(["setting", "n_layers"])[["difference", "other"]].mean()
        points += list(changes.itertuples(index=False, name=None))
        used |= {*both["run_id"], *both["run_id_baseline"]}
    frame = pd.DataFrame(points, columns=[cause, effect], dtype=float).assign(
        cell_id=range(len(points)), run_id=range(len(points)), outcome="ok"
    )
    between = _link(frame, frame, [cause, effect], "between knobs", np.zeros(len(frame)), seed)
    return replace(between, n_runs=len(used))


def _usable(runs: pd.DataFrame, wanted: Sequence[str]) -> pd.DataFrame:
    return runs[runs["outcome"] == "ok"].dropna(subset=list(wanted))


def _link(
    runs: pd.DataFrame, usable: pd.DataFrame, wanted: Sequence[str], scope: str, stratum_N: np.ndarray, seed: int
) -> Link:
    """`wanted` names the two sides, and what is given."""
    finished = runs[runs["outcome"] == "ok"]
    values = [usable[name].to_numpy(dtype=float) for name in wanted]
    cell_N, names = pd.factorize(usable["cell_id"])
    rho = lo = hi = None
    if len(usable) >= 3:
        rho = _number(_correlation(values, stratum_N, cell_N, np.ones((1, len(names))))[0])
    if rho is not None and len(names) >= MIN_CELLS:
        lo, hi = percentiles(_correlation(values, stratum_N, cell_N, resamples(len(names), seed)))
    return Link(
        cause=wanted[0],
        effect=wanted[1],
        scope=scope,
        rho=rho,
        lo=lo,
        hi=hi,
        n_runs=len(usable),
        n_cells=len(names),
        n_missing=int(finished[list(wanted)].isna().any(axis=1).sum()),
        n_diverged=int((runs["outcome"] == "diverged").sum()),
    )


def spearman(
    x_N: np.ndarray, y_N: np.ndarray, stratum_N: np.ndarray, cell_N: np.ndarray, times_BC: np.ndarray
) -> np.ndarray:
    """Rank correlations within strata, one per row of `times_BC`: how often each cell counts. NaN where undefined."""
    return _correlation([x_N, y_N], stratum_N, cell_N, times_BC)


def _correlation(
    values: Sequence[np.ndarray], stratum_N: np.ndarray, cell_N: np.ndarray, times_BC: np.ndarray
) -> np.ndarray:
    """Spearman's rho of two variables, or their partial rho given a third."""
    n_parts = max(1, len(times_BC) * len(cell_N) // IN_CACHE)
    parts = np.array_split(times_BC, n_parts)
    return np.concatenate([_correlate(values, stratum_N, times_BC[:, cell_N]) for times_BC in parts])


def _correlate(values: Sequence[np.ndarray], stratum_N: np.ndarray, weight_BN: np.ndarray) -> np.ndarray:
    ranks = [midranks(one_N, stratum_N, weight_BN) for one_N in values]
    weighted = [weight_BN * rank_BN for rank_BN in ranks]

    def rho(i: int, j: int) -> np.ndarray:
        aa_B, bb_B, ab_B = (np.einsum("bn,bn->b", weighted[c], ranks[d]) for c, d in ((i, i), (j, j), (i, j)))
        norm_B = np.sqrt(aa_B * bb_B)
        return np.divide(ab_B, norm_B, out=np.full_like(norm_B, np.nan), where=norm_B > 1e-12 * len(stratum_N))

    if len(values) == 2:
        return rho(0, 1)
    xy_B, xz_B, yz_B = rho(0, 1), rho(0, 2), rho(1, 2)
    left_B = np.sqrt((1 - xz_B**2).clip(0) * (1 - yz_B**2).clip(0))
    return np.divide(xy_B - xz_B * yz_B, left_B, out=np.full_like(left_B, np.nan), where=left_B > 1e-6)


def midranks(values_N: np.ndarray, stratum_N: np.ndarray, weight_BN: np.ndarray) -> np.ndarray:
    """Share of the weight of a run's own stratum that lies below it, its ties counted half, less 1/2 (the mean)."""
    order_N = np.lexsort((values_N, stratum_N))
    stratum, value = stratum_N[order_N], values_N[order_N]
    new_stratum = np.concatenate([[True], stratum[1:] != stratum[:-1]])
    new_tie = new_stratum | np.concatenate([[True], value[1:] != value[:-1]])
    ties_BT = np.add.reduceat(weight_BN[:, order_N], np.flatnonzero(new_tie), axis=1)  # T: groups of equal values
    below_BT = np.cumsum(ties_BT, axis=1) - ties_BT
    first_S = np.flatnonzero(new_stratum[new_tie])
    stratum_T = np.cumsum(new_stratum[new_tie]) - 1
    total_BS = np.add.reduceat(ties_BT, first_S, axis=1)
    share_BT = below_BT - below_BT[:, first_S][:, stratum_T] + ties_BT / 2
    total_BT = total_BS[:, stratum_T]
    share_BT = np.divide(share_BT, total_BT, out=np.full_like(share_BT, 0.5), where=total_BT > 0) - 0.5
    tie_N = np.empty(len(order_N), dtype=int)
    tie_N[order_N] = np.cumsum(new_tie) - 1
    return share_BT[:, tie_N]


def resamples(n_cells: int, seed: int) -> np.ndarray:
    """How often each cell is drawn, (RESAMPLES, n_cells)."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(n_cells, np.full(n_cells, 1 / n_cells), size=RESAMPLES).astype(float)


def percentiles(values_B: np.ndarray) -> tuple[float | None, float | None]:
    """The ends of the central LEVEL of a bootstrap; None where over a tenth of it is undefined: then most runs agree in
    one of the quantities, and very few cells decide."""
    values_B = values_B[np.isfinite(values_B)]
    if len(values_B) < 0.9 * RESAMPLES:
        return None, None
    tail = (1 - LEVEL) / 2
    lo, hi = np.quantile(values_B, [tail, 1 - tail])
    return float(lo), float(hi)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
