"""A ladder: loss against compute with the law of the baseline, and below it what each setting is worth.

Upper panel: the runs, and the baseline's law with its 95% band. Lower panel: the multiplier of each setting at each of
its budgets, with its drift whether shown or not (`scaling.ladder`); 1 is the baseline."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.plots.facets import FLOPS_LABEL, Panel, lines_drawing
from sparsedepth.plots.page import Drawing, NothingToDraw, check_path, write
from sparsedepth.plots.style import GREY
from sparsedepth.quantities.quantity import Named
from sparsedepth.scaling.ladder import LadderLaw, laws_of
from sparsedepth.scaling.points import BASELINE
from sparsedepth.scaling.speedup import ladder_of_store
from sparsedepth.store.connection import Store
from sparsedepth.words.captions import ladder_caption

MOST = 8
"""Settings, those that are worth most."""


def ladder(store: Store) -> Drawing:
    """Raises NothingToDraw where a budget has several seeds, or fewer than three have one run."""
    try:
        return ladder_drawing(laws_of(ladder_of_store(store).losses, BASELINE), BASELINE)
    except ValueError as error:
        raise NothingToDraw(str(error)) from None


def draw_ladder(laws: Mapping[str, LadderLaw], baseline: str, path: Path) -> None:
    """Draw into a .png, .svg or .pdf file, with the numbers as CSV next to it. Raises ValueError for another suffix."""
    check_path(path)
    write(ladder_drawing(laws, baseline), path)


def ladder_drawing(laws: Mapping[str, LadderLaw], baseline: str) -> Drawing:
    """Its points: panel ('loss' or 'multiplier'), setting, x (train_flops), mean, lo, hi, n_seeds."""
    worth = {name: law.worth.estimate if law.worth else -np.inf for name, law in laws.items()}
    shown = sorted(laws, key=worth.__getitem__, reverse=True)[:MOST]
    first = laws[shown[0]]
    rows: list[tuple[Any, ...]] = []
    for name, law, is_setting in [(baseline, first, False), *((name, laws[name], True) for name in shown)]:
        own_N = law.ladder.is_setting_N == is_setting
        for C, log_loss in zip(law.ladder.C_N[own_N], law.ladder.mean_N[own_N], strict=True):
            rows.append(("loss", name, C, float(np.exp(log_loss)), np.nan, np.nan))
            found = law.worth_at(float(C)) if is_setting else None
            if found is not None:
                rows.append(("multiplier", name, C, *np.exp((found.estimate, *found.interval)).tolist()))
    points = pd.DataFrame(rows, columns=["panel", "setting", "x", "mean", "lo", "hi"]).assign(n_seeds=1)
    look: Named = {"x": "flops", "x_label": FLOPS_LABEL}
    ends = points["x"].min() / 1.1, points["x"].max() * 1.1
    kinds = [
        Panel(
            key="loss", y_label="loss (nat/token)", scale="linear", decorate=partial(_draw_band, first, ends), **look
        ),
        Panel(
            key="multiplier", y_label="compute multiplier", scale="linear", decorate=partial(_draw_one, ends), **look
        ),
    ]
    known = [kind for kind in kinds if (points["panel"] == kind.key).any()]
    return lines_drawing(points, known, ladder_caption(len(laws) - len(shown)), columns=1, size=(4.6, 2.9))


def _draw_band(law: LadderLaw, ends: tuple[float, float], axis: Any, rows: pd.DataFrame) -> None:
    C_N = law.ladder.C_N[~law.ladder.is_setting_N]
    C_G = np.geomspace(C_N.min(), C_N.max(), 60)
    middle_G, half_G = law.baseline_at(C_G)
    axis.fill_between(
        C_G, middle_G * np.exp(-half_G), middle_G * np.exp(half_G), color=GREY, alpha=0.3, linewidth=0, zorder=1
    )
    axis.plot(C_G, middle_G, color=GREY, linewidth=1.0, zorder=1)
    axis.set_xlim(*ends)


def _draw_one(ends: tuple[float, float], axis: Any, rows: pd.DataFrame) -> None:
    axis.axhline(1.0, color=GREY, linewidth=1.0, zorder=1)
    axis.set_xlim(*ends)
