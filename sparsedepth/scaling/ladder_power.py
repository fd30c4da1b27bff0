"""Power of a ladder before running: the smallest multiplier that one run at each planned budget would show.

Made-up losses, ln L = a pilot's law + noise, in which no setting is worth anything, go through the law that judges them
(`scaling.multiplier`). Over draws b, c of the noise, each with its estimate e and the gain that it would have shown,

    ln detectable = the quantile POWER of least_shown_b - e_c, and of least_shown_b + e_c

The noise is what a pilot's law leaves: of a ladder's settings their differences from its baseline; of shapes the whole,
with what the two sides of a ladder would share. Its uncertainty is included, by chi^2(df). Where the planned budgets
are not those of the pilot, its law is taken at its nearest one.

Shapes: B budgets, J settings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sparsedepth.effects.cells import BASELINE, Cells
from sparsedepth.effects.depths import with_budgets
from sparsedepth.effects.power import PilotNoise, Power
from sparsedepth.effects.verdict import level_of
from sparsedepth.quantities.levels import POWER
from sparsedepth.scaling.aspect import N_PARAMETERS
from sparsedepth.scaling.ladder import MIN_BUDGETS
from sparsedepth.scaling.multiplier import SHARED, MultiplierLaw, laws_of
from sparsedepth.scaling.shapes import shapes_answer
from sparsedepth.scaling.speedup import ladder_of_store
from sparsedepth.store.connection import Store

DRAWS = 48


class LadderPilot(NamedTuple):
    loss_at: Callable[[np.ndarray], np.ndarray]
    """Of the baseline, at budgets [FLOPs]."""
    C_N: np.ndarray
    """Its own budgets."""
    of_run: PilotNoise
    """Of ln L."""


class PlannedLadder(NamedTuple):
    C_B: np.ndarray
    """The baseline's budgets [FLOPs]."""
    depths: tuple[int, ...]
    settings: Sequence[str]


def planned_ladder(cells: Cells) -> PlannedLadder | None:
    """Of runs to be made of one seed; None where a setting, or the baseline, is at fewer than three budgets."""
    rows = with_budgets(cells)
    budgets = rows.groupby("name")["budget"].unique()
    if len(budgets) < 2 or budgets.map(len).min() < MIN_BUDGETS:
        return None
    return PlannedLadder(budgets.pop(BASELINE), tuple(sorted({*rows["n_layers"]})), [*budgets.index])


def ladder_pilot(store: Store) -> LadderPilot:
    """Of a ladder, or of shapes. Raises ValueError for other runs."""
    shapes = shapes_answer(store)
    if shapes is not None and shapes.law is not None:
        runs, fit = shapes.law.runs, shapes.law.main
        sd = math.sqrt(fit.square / (len(runs) - N_PARAMETERS)) / runs["loss"].mean()
        return LadderPilot(shapes.law.loss_at, runs["flops"].to_numpy(), PilotNoise(own=sd, df=fit.df))
    return pilot_of_laws([*laws_of(ladder_of_store(store).losses, BASELINE).values()])


def pilot_of_laws(laws: Sequence[MultiplierLaw]) -> LadderPilot:
    """Of the settings of a ladder. Raises ValueError where nothing tells their noise."""
    variance_J, df_J = np.array([replace(law, prior=None).left for law in laws]).T
    if not df_J.any():
        raise ValueError("no setting was run at two budgets: nothing tells the noise")
    sd = math.sqrt(variance_J @ df_J / df_J.sum() / 2)  # a difference has the noise of two runs
    return LadderPilot(lambda C_B: laws[0].baseline_at(C_B)[0], laws[0].ladder.C_N, PilotNoise(own=sd, df=df_J.sum()))


def ladder_power(planned: PlannedLadder, pilot: LadderPilot) -> list[Power]:
    """Of each setting: ln of the multiplier that is shown with probability POWER."""
    C_B, settings, noise = planned.C_B, planned.settings, pilot.of_run
    generator = np.random.default_rng(0)
    level = level_of(np.full(len(settings), SHARED))
    middle = math.exp(np.log(C_B).mean())
    loss_B = pilot.loss_at(C_B * np.clip(middle, pilot.C_N.min(), pilot.C_N.max()) / middle)
    found = []
    for _ in range(DRAWS):
        names = (BASELINE, *settings)
        loss_NB = loss_B * np.exp(generator.normal(0, noise.drawn(generator), (len(names), len(C_B))))
        losses = {
            name: {C: {0: loss} for C, loss in zip(C_B, row, strict=True)}
            for name, row in zip(names, loss_NB, strict=True)
        }
        for law in laws_of(losses, BASELINE).values():
            assert law.judged_by is not None
            found.append((law.least_shown(level), law.judged_by.estimate))
    least, estimate = np.array(found).T
    log_m = np.quantile(np.add.outer(least, [*estimate, *-estimate]), POWER)
    return [Power(name, planned.depths, 1, log_m, None) for name in settings]
