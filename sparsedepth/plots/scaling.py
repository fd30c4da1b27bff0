"""The fit of the depth law: each term of the loss against its predictor, and the residuals.

Upper row: loss minus E and the other fitted terms, with the fitted term c x^-a as a line and the 95% band of its
bootstrap refits. Lower row: the residual ln loss - ln L against the same predictor. The colour is the depth."""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from sparsedepth.plots.page import Drawing, caption, check_path, colour_bar, write
from sparsedepth.plots.style import GREY, depth_map, log_scale
from sparsedepth.scaling.fit_law import Bootstrap, FittedLaw
from sparsedepth.scaling.report import curve_of, law_points
from sparsedepth.words.captions import law_caption, term_title


def draw_law(fitted: FittedLaw, boot: Bootstrap | None, path: Path, table: Path | None = None) -> Path:
    """Draw what was read from `table` into a .png, .svg or .pdf file, with the numbers as CSV next to it; returns the
    CSV's path. Raises ValueError as `check_path`."""
    check_path(path, table)
    points = law_points(fitted)
    write(Drawing(data=points, page=partial(law_page, points, fitted, boot)), path)
    return path.with_suffix(".csv")


def law_page(points: pd.DataFrame, fitted: FittedLaw, boot: Bootstrap | None = None) -> Figure:
    """Two rows, one column per term."""
    terms = fitted.law.terms
    page = Figure(figsize=(3.4 * len(terms) + 0.4, 5.2))
    axes = page.subplots(2, len(terms), squeeze=False, sharex="col", height_ratios=(2, 1))
    for k, term in enumerate(terms):
        shades = _draw_term(axes[:, k], points, term.name, term.column, curve_of(fitted, boot, k))
        axes[0, k].set_title(term_title(fitted, boot, term, points), fontsize=8)
    axes[0, 0].set_ylabel("loss minus E and the other terms\n(nat/token)")
    axes[1, 0].set_ylabel("ln loss - ln fitted")
    colour_bar(axes[0, -1], shades, "n_layers")
    caption(page, law_caption(fitted, boot))
    return page


def _draw_term(axes: Any, points: pd.DataFrame, name: str, column: str, curve: pd.DataFrame) -> Any:
    """Draw the term above and the residuals below; returns the points, which the colour bar needs."""
    part, residuals = axes
    shown = points[points[f"{name}_rest"] > 0]
    style = {"cmap": depth_map(), "vmin": points["n_layers"].min(), "vmax": points["n_layers"].max(), "linewidth": 0}
    part.fill_between(curve[column], curve["lo"], curve["hi"], color=GREY, alpha=0.25, linewidth=0)
    shades = part.scatter(shown[column], shown[f"{name}_rest"], c=shown["n_layers"], s=12, alpha=0.85, **style)
    part.plot(curve[column], curve["fitted"], color="black", linewidth=1.2)
    log_scale(part, "x", points[column])
    if column == "num_tokens":  # 10G, not 1e+10: there are three panels' labels on a page's width
        part.xaxis.set_major_formatter(EngFormatter(sep=""))
        if points[column].max() > 20 * points[column].min():
            part.xaxis.set_major_locator(LogLocator())
    if len(shown):
        log_scale(part, "y", shown[f"{name}_rest"])
    residuals.axhline(0, color="black", linewidth=0.8)
    residuals.scatter(points[column], points["residual"], c=points["n_layers"], s=8, **style)
    residuals.set_xlabel("training tokens" if column == "num_tokens" else column)
    return shades
