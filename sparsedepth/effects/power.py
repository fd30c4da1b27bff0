"""Power before running: which effects a design detects, and how many seeds a given effect needs.

Made-up results of the planned runs go through the fit that judges them (`effects.fit`): at C settings and S seeds of a
depth an estimate is shown beyond h_b, half of the interval at the level of one of C, over draws b of noise; and

    mean_b Phi((detectable - h_b) / sd_b) = 80%,     sd_b^2 = 2 own_b^2 / S + 2 choice^2

Noise of a run is independent in every run (`own`); what all runs of a seed share cancels. A pilot estimates it at each
depth, and its uncertainty is included: each draw has own_b^2 = own^2 df / chi^2(df). `choice` is the standard deviation
that choosing a tuned value adds to a setting's value, as large as it is in the pilot (the baseline's curve alone will
do)."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import ndtr

from sparsedepth.config.cost import cost
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import BASELINE, COSTS, Cells, cells_of
from sparsedepth.effects.fit import Fit, fit_of
from sparsedepth.effects.verdict import level_of
from sparsedepth.quantities.levels import POWER
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.schema import stored_fields
from sparsedepth.words.power import size_in_unit

DRAWS = 48
MAX_SEEDS = 64


@dataclass(frozen=True, kw_only=True)
class PilotNoise:
    """Standard deviations of a run, on the outcome's comparison scale."""

    own: float
    df: float | None = None
    """Of `own`; None: given by the user, without uncertainty."""
    choice: float = 0.0
    """Added by choosing a tuned value."""

    def __post_init__(self) -> None:
        if not (0 < self.own < math.inf):
            raise ValueError(f"noise between seeds is {self.own:g}; it must be above 0 and finite")

    def drawn(self, generator: np.random.Generator) -> float:
        """`own`, as it may be."""
        return self.own * math.sqrt(self.df / generator.chisquare(self.df) if self.df else 1.0)


@dataclass(frozen=True)
class Power:
    """The power of a design for one setting, at each of these depths."""

    setting: str
    n_layers: tuple[int, ...]
    n_seeds: int
    detectable: float | None
    """None with too few seeds."""
    n_seeds_wanted: int | None
    """None without an effect, or if MAX_SEEDS are too few."""


def pilot_noise(runs: pd.DataFrame, outcome: str) -> PilotNoise:
    """The noise of the runs of a store, pooled over depths. Raises ValueError where no cell has two seeds."""
    fits = [found for at in cells_of(runs, outcome).depths if (found := at.fit.found)]
    if not fits:
        raise ValueError(
            f"the pilot has no estimate of noise: no setting has two finished runs that differ in {outcome}"
        )
    df = np.array([found.noise.df for found in fits])
    own2 = df @ [found.noise.s2 for found in fits] / df.sum()
    choices = [_choice_variance(found) for found in fits if found.has_curve]
    return PilotNoise(own=math.sqrt(own2), df=df.sum(), choice=math.sqrt(np.mean(choices)) if choices else 0.0)


def _choice_variance(found: Fit) -> float:
    """What choosing lr adds to the variance of a setting's value: half of its part in an effect, where there is one."""
    if len(found.n_C) == 1:
        return found.values.choice_C[0]
    effect = found.combine(np.array([-1.0, 1.0, *np.zeros(len(found.n_C) - 2)]))
    return (1 - effect.seeds_share) * effect.sd**2 / 2


def measure_power(
    configs: Sequence[RunConfig],
    outcome: str,
    noise: PilotNoise,
    tuned: Sequence[str] = (),
    effect: float | None = None,
) -> list[Power]:
    """Every setting of the planned results at every depth, then every depth against the shallowest. Raises ValueError
    for an outcome that is no number of `runs`, and for an effect that is not above 0."""
    if effect is not None and not 0 < effect < math.inf:
        raise ValueError(f"effect={effect:g} must be a size above 0, whatever its direction")
    detected = cache(partial(_detectable, noise=noise, choice=noise.choice if tuned else 0.0))

    def is_enough(n_settings: int, n_seeds: int) -> bool:
        return effect is not None and (detected(n_settings, n_seeds) or math.inf) <= effect

    powers = []
    for (setting, n_settings, n_seeds), depths in _planned(configs, outcome, tuned).items():
        wanted = 3 + bisect_left(range(3, MAX_SEEDS + 1), True, key=lambda n, c=n_settings: is_enough(c, n))
        n_wanted = None if effect is None or wanted > MAX_SEEDS else wanted
        powers.append(Power(setting, tuple(depths), n_seeds, detected(n_settings, n_seeds), n_wanted))
    return powers


def planned_cells(
    configs: Sequence[RunConfig], outcome: str, tuned: Sequence[str], *, every_budget: bool = False
) -> Cells:
    """The cells that these runs will be."""
    flops = {COSTS["flops"]: [float(cost(config).train_flops(config.train_tokens)) for config in configs]}
    runs = pd.DataFrame([stored_fields(config) | {"cell_id": config.cell_id} for config in configs])
    facts = {"outcome": "ok", outcome: 1.0, "tuned_fields": ",".join(tuned) or None}
    return cells_of(runs.assign(run_id=runs.index, **flops, **facts), outcome, every_budget=every_budget)


def _planned(configs: Sequence[RunConfig], outcome: str, tuned: Sequence[str]) -> dict[tuple[str, int, int], list[int]]:
    """(setting, settings that share its baseline, seeds that both have) -> depths."""
    rows = planned_cells(configs, outcome, tuned).rows
    seeds = rows.groupby(["n_layers", "setting"])["seed"].agg(set).to_dict()
    planned: dict[tuple[str, int, int], list[int]] = {}
    depths = sorted({depth for depth, setting in seeds if setting == BASELINE})
    for depth in depths:
        settings = [setting for at, setting in seeds if at == depth and setting != BASELINE]
        for setting in settings:
            common = seeds[depth, setting] & seeds[depth, BASELINE]
            planned.setdefault((setting, len(settings), len(common)), []).append(depth)
    for depth in depths[1:]:
        common = seeds[depth, BASELINE] & seeds[depths[0], BASELINE]
        planned[f"n_layers={depth}", len(depths) - 1, len(common)] = [depth]
    return planned


def _detectable(n_settings: int, n_seeds: int, noise: PilotNoise, choice: float) -> float | None:
    """The effect detected with probability POWER, of one of several settings beside a baseline."""
    if n_seeds < 2:
        return None
    generator = np.random.default_rng(0)
    halves, sds = np.empty(DRAWS), np.empty(DRAWS)
    for draw in range(DRAWS):
        own = noise.drawn(generator)
        y_CS = own * generator.standard_normal((n_settings + 1, n_seeds))
        found = fit_of({number: dict(enumerate(y_S)) for number, y_S in enumerate(y_CS)}).contrast({1: 1.0, 0: -1.0})
        assert found is not None
        level = level_of(np.full(n_settings, found.shared))
        low, high = found.effect.quantiles([level / 2, 1 - level / 2])
        halves[draw] = (high - low) / 2 * math.sqrt(1 + 2 * choice**2 / found.effect.sd**2)
        sds[draw] = math.hypot(own * math.sqrt(2 / n_seeds), choice * math.sqrt(2))
    return brentq(lambda size: ndtr((size - halves) / sds).mean() - POWER, 0, (halves + 4 * sds).max())


def power_table(powers: Sequence[Power], unit: str, effect: float | None) -> QueryResult:
    """One row per setting."""
    rows = []
    for power in powers:
        found = "none: too few seeds" if power.detectable is None else size_in_unit(power.detectable, unit)
        wanted = () if effect is None else (str(power.n_seeds_wanted or f"over {MAX_SEEDS}"),)
        rows.append((power.setting, ", ".join(map(str, power.n_layers)), power.n_seeds, found, *wanted))
    names = ("setting", "n_layers", "seeds", "detectable")
    return QueryResult(columns=(*names, *(() if effect is None else ("seeds wanted",))), rows=tuple(rows))
