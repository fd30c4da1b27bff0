"""The fit of the depth law: each term of the loss against its predictor, and the residuals.

Upper row: loss minus E and the other fitted terms, with the fitted term c x^-a as a line and the 95% band of its
bootstrap refits. Lower row: the residual ln loss - ln L against the same predictor. The colour is the depth.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from sparsedepth.plots.page import Drawing, caption, check_path, colour_bar, write
from sparsedepth.plots.style import GREY, depth_map, log_scale
from sparsedepth.scaling.fit import Bootstrap, Fit
from sparsedepth.scaling.law import contributions, fitted_loss
from sparsedepth.store.small_sample import LEVEL

LABELS = {"d_model": "d_model", "n_layers": "n_layers", "num_tokens": "training tokens"}


@dataclass(frozen=True, kw_only=True)
class LawData:
    points: pd.DataFrame
    """d_model, n_layers, num_tokens, loss, fitted, residual (of ln loss), and per term NAME_part (fitted) and
    NAME_rest (loss minus E and the other terms), in nat/token."""
    curves: dict[str, pd.DataFrame]
    """term -> its column, the fitted term, and the bootstrap's 95% band lo, hi (NaN without one)"""
    titles: dict[str, str]
    note: str


def law_data(fitted: Fit, boot: Bootstrap | None = None) -> LawData:
    """The numbers of the figure."""
    plan, law = fitted.plan, fitted.law
    term_KN = contributions(fitted.theta, plan.z)[0]
    fitted_N = fitted_loss(fitted.theta, plan.z)
    points = fitted.points.assign(fitted=fitted_N, residual=plan.y - np.log(fitted_N))
    curves, titles = {}, {}
    parameters = fitted.parameters
    for k, term in enumerate(law.terms):
        points[f"{term.name}_part"] = term_KN[k]
        points[f"{term.name}_rest"] = points["loss"] - fitted_N + term_KN[k]
        curves[term.name] = _curve(fitted, boot, k)
        exponent = parameters[f"a_{term.symbol}"]
        ends = boot.intervals.get(exponent.name) if boot else None
        lo, hi = ends if ends else (exponent.lo, exponent.hi)
        interval = "fixed" if lo is None or hi is None else f"{lo:.2f} to {hi:.2f}"
        titles[term.name] = f"{term.name}: a_{term.symbol} = {exponent.value:.3f} ({interval})"
    kind = f"95% band and intervals: bootstrap over {fitted.unit}" if boot else "95% intervals: from the Jacobian"
    note = f"{law.text()}; E = {parameters['E'].value:.3f} nat/token. {fitted.n_points} points. {kind}."
    return LawData(points=points, curves=curves, titles=titles, note=note)


def _curve(fitted: Fit, boot: Bootstrap | None, k: int) -> pd.DataFrame:
    term, plan = fitted.law.terms[k], fitted.plan
    ends = fitted.points[term.column].min(), fitted.points[term.column].max()
    column_G = np.geomspace(*ends, 100)
    z_G = np.log(term.factor * column_G) - plan.centre[k]

    def part(theta: np.ndarray) -> np.ndarray:
        n_terms = len(fitted.law.terms)
        return np.exp(theta[..., k, None] - theta[..., n_terms + k, None] * z_G)

    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    lo, hi = np.quantile(part(boot.theta), tails, axis=0) if boot else np.full((2, len(z_G)), np.nan)
    return pd.DataFrame({term.column: column_G, "fitted": part(fitted.theta), "lo": lo, "hi": hi})


def draw_law(fitted: Fit, boot: Bootstrap | None, path: Path) -> Path:
    """Draw into a .png, .svg or .pdf file, with the numbers as CSV next to it; returns the CSV's path.

    Raises ValueError for another suffix, or a folder that does not exist.
    """
    check_path(path)
    data = law_data(fitted, boot)
    write(Drawing(data=data.points, page=partial(law_page, data, fitted)), path)
    return path.with_suffix(".csv")


def law_page(data: LawData, fitted: Fit) -> Figure:
    """Two rows, one column per term."""
    terms = fitted.law.terms
    page = Figure(figsize=(3.4 * len(terms) + 0.4, 5.2))
    axes = page.subplots(2, len(terms), squeeze=False, sharex="col", height_ratios=(2, 1))
    shades = [_draw_term(axes[:, k], data, term.name, term.column) for k, term in enumerate(terms)]
    axes[0, 0].set_ylabel("loss minus E and the other terms\n(nat/token)")
    axes[1, 0].set_ylabel("ln loss - ln fitted")
    colour_bar(axes[0, -1], shades[-1], "n_layers")
    caption(page, data.note)
    return page


def _draw_term(axes: Any, data: LawData, name: str, column: str) -> Any:
    """Draw the term above and the residuals below; returns the points, which the colour bar needs."""
    part, residuals = axes
    points, curve = data.points, data.curves[name]
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
    n_hidden = len(points) - len(shown)
    part.set_title(data.titles[name] + (f"\n{n_hidden} points at or below 0 not shown" if n_hidden else ""), fontsize=8)
    residuals.axhline(0, color="black", linewidth=0.8)
    residuals.scatter(points[column], points["residual"], c=points["n_layers"], s=8, **style)
    residuals.set_xlabel(LABELS[column])
    return shades
