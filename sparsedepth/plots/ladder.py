"""A ladder: loss against compute with the law of the baseline, and below it what each setting is worth.

Upper panel: the runs, and the baseline's law with its 95% band. Lower panel: the multiplier of each setting, the same
at all budgets unless a drift is shown (`scaling.multiplier`), as in the text; pale, with a drift that is not; 1 is the
baseline."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.plots.facets import FLOPS_LABEL, Panel, lines_drawing, range_of
from sparsedepth.plots.page import Drawing, NothingToDraw, check_path, write
from sparsedepth.plots.runs import settings_in_order
from sparsedepth.plots.style import GREY, Style, setting_styles
from sparsedepth.quantities.quantity import Named
from sparsedepth.scaling.multiplier import MultiplierLaw, laws_of
from sparsedepth.scaling.points import BASELINE
from sparsedepth.scaling.speedup import ladder_of_store
from sparsedepth.store.connection import Store
from sparsedepth.words.captions import escaped, ladder_caption

MOST = 8
"""Settings, those that are worth most."""


def ladder(store: Store) -> Drawing:
    """Raises NothingToDraw where a budget has several seeds, or fewer than three have one run."""
    try:
        return ladder_drawing(laws_of(ladder_of_store(store).losses, BASELINE), BASELINE)
    except ValueError as error:
        raise NothingToDraw(str(error)) from None


def draw_ladder(
    laws: Mapping[str, MultiplierLaw], baseline: str, path: Path, loss: str, currency: str, table: Path | None = None
) -> None:
    """Draw what was read from `table` into a .png, .svg or .pdf file, with the numbers as CSV next to it. Raises
    ValueError as `check_path`."""
    check_path(path, table)
    write(ladder_drawing(laws, baseline, loss, currency), path)


def ladder_drawing(
    laws: Mapping[str, MultiplierLaw], baseline: str, loss: str = "loss (nat/token)", currency: str = "compute"
) -> Drawing:
    """`loss`, `currency`: what losses and budgets are called.

    Its points: panel ('loss' or 'multiplier'), setting, x (train_flops), mean, lo, hi, with_drift, n_seeds."""
    worth = {name: law.worth.estimate if law.worth else -np.inf for name, law in laws.items()}
    shown = sorted(laws, key=worth.__getitem__, reverse=True)[:MOST]
    first = laws[shown[0]]
    points = _points(first, baseline, {name: laws[name] for name in shown})
    worths = points[points["panel"] == "multiplier"]
    looks = setting_styles(sorted(settings_in_order(points["setting"]), key=baseline.__ne__))  # a name of anyone's
    look: Named = {"x": "flops", "x_label": FLOPS_LABEL if currency == "compute" else escaped(currency)}
    kinds = [
        Panel(key="loss", y_label=escaped(loss), decorate=partial(_draw_band, first), **look),
        Panel(
            key="multiplier",
            y_label=f"{escaped(currency)} multiplier",
            range=range_of(worths),
            decorate=partial(_draw_pale, looks),
            **look,
        ),
    ]
    notes = ladder_caption(len(laws) - len(shown), [name for name in shown if laws[name].has_drift], currency)
    labels = {} if baseline == BASELINE else {baseline: f"{baseline} ({BASELINE})"}
    return lines_drawing(
        points, kinds[: 2 - worths.empty], notes, styles=looks, labels=labels, columns=1, size=(4.6, 2.9)
    )


def _points(first: MultiplierLaw, baseline: str, laws: Mapping[str, MultiplierLaw]) -> pd.DataFrame:
    rows: list[tuple[Any, ...]] = []
    for name, law, is_setting in [(baseline, first, False), *((name, law, True) for name, law in laws.items())]:
        own_N = law.ladder.is_setting_N == is_setting
        for C, log_loss in zip(law.ladder.C_N[own_N], law.ladder.mean_N[own_N], strict=True):
            rows.append(("loss", name, C, float(np.exp(log_loss)), *[np.nan] * 3))
            with_drift = law.worth_at(float(C)) if is_setting else None
            if with_drift and (found := law.found_at(float(C))):
                values = np.exp((found.estimate, *found.interval, with_drift.estimate))
                rows.append(("multiplier", name, C, *values.tolist()))
    return pd.DataFrame(rows, columns=["panel", "setting", "x", "mean", "lo", "hi", "with_drift"]).assign(n_seeds=1)


def _draw_band(law: MultiplierLaw, axis: Any, rows: pd.DataFrame) -> None:
    C_N = law.ladder.C_N[~law.ladder.is_setting_N]
    C_G = np.geomspace(C_N.min(), C_N.max(), 60)
    middle_G, half_G = law.baseline_at(C_G)
    axis.fill_between(
        C_G, middle_G * np.exp(-half_G), middle_G * np.exp(half_G), color=GREY, alpha=0.3, linewidth=0, zorder=1
    )
    axis.plot(C_G, middle_G, color=GREY, linewidth=1.0, zorder=1)


def _draw_pale(looks: Mapping[str, Style], axis: Any, rows: pd.DataFrame) -> None:
    axis.axhline(1.0, color=GREY, linewidth=1.0, zorder=1)
    for name, own in rows.groupby("setting"):
        colour, marker, _ = looks[str(name)]
        axis.plot(own["x"], own["with_drift"], color=colour, marker=marker, linestyle="", markersize=3, alpha=0.35)
