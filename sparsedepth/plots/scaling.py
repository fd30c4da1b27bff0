"""The depth law in one picture: each part of the loss against its predictor, and what the law leaves over.

Upper row: loss less E and less the other fitted parts, with the fitted part c x^-a as a line and the 95% band of its
bootstrap refits. Lower row: the residual ln loss - ln L against the same predictor. Colour is depth.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from sparsedepth.plots.page import Drawing, check_suffix, write
from sparsedepth.plots.style import GREY, caption, depth_map, log_scale
from sparsedepth.scaling.fit import LEVEL, Fit
from sparsedepth.scaling.law import contributions, predict
from sparsedepth.scaling.uncertainty import Bootstrap

LABELS = {"d_model": "d_model", "n_layers": "n_layers", "num_tokens": "training tokens"}


@dataclass(frozen=True, kw_only=True)
class LawPicture:
    points: pd.DataFrame
    """d_model, n_layers, num_tokens, loss, fitted, residual (of ln loss), and per term NAME_part (fitted) and
    NAME_rest (loss less E and the other parts), in nat/token."""
    curves: dict[str, pd.DataFrame]
    """By term: its column, the fitted part, and the ends lo and hi of the bootstrap's 95% band (NaN without one)."""
    titles: dict[str, str]
    note: str


def law_picture(fitted: Fit, boot: Bootstrap | None = None) -> LawPicture:
    """The numbers of the figure."""
    plan, law = fitted.plan, fitted.law
    term_KN = contributions(fitted.theta[None], plan.z)[0][0]
    fitted_N = predict(fitted.theta[None], plan, fitted.points)[0]
    points = fitted.points.assign(fitted=fitted_N, residual=plan.y - np.log(fitted_N))
    curves, titles = {}, {}
    known = {number.name: number for number in fitted.parameters()}
    for k, term in enumerate(law.terms):
        points[f"{term.name}_part"] = term_KN[k]
        points[f"{term.name}_rest"] = points["loss"] - fitted_N + term_KN[k]
        curves[term.name] = _curve(fitted, boot, k)
        exponent = known[f"a_{term.symbol}"]
        ends = boot.intervals.get(exponent.name) if boot else None
        lo, hi = ends if ends else (exponent.lo, exponent.hi)
        interval = "held" if lo is None or hi is None else f"{lo:.2f} to {hi:.2f}"
        titles[term.name] = f"{term.name}: a_{term.symbol} = {exponent.value:.3f} ({interval})"
    kind = f"95% band and intervals: bootstrap over {plan.units}" if boot else "95% intervals: from the Jacobian"
    note = f"{law.text()}; E = {known['E'].value:.3f} nat/token. {fitted.n_points} points. {kind}."
    return LawPicture(points=points, curves=curves, titles=titles, note=note)


def _curve(fitted: Fit, boot: Bootstrap | None, k: int) -> pd.DataFrame:
    term, plan = fitted.law.terms[k], fitted.plan
    ends = fitted.points[term.column].min(), fitted.points[term.column].max()
    column_G = np.geomspace(*ends, 100)
    z_G = np.log(fitted.law.predictor(term, column_G)) - plan.centre[k]

    def part(theta_RP: np.ndarray) -> np.ndarray:
        n_terms = len(fitted.law.terms)
        return np.exp(theta_RP[:, k, None] - theta_RP[:, n_terms + k, None] * z_G)

    nothing = np.full(len(z_G), np.nan)
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    lo, hi = np.quantile(part(boot.theta), tails, axis=0) if boot and len(boot.theta) else (nothing, nothing)
    return pd.DataFrame({term.column: column_G, "fitted": part(fitted.theta[None])[0], "lo": lo, "hi": hi})


def draw_law(fitted: Fit, boot: Bootstrap | None, path: Path) -> Path:
    """Draw into a .png, .svg or .pdf file, with the points' numbers as CSV beside it; returns the CSV's path.

    Raises ValueError for another suffix.
    """
    check_suffix(path)
    picture = law_picture(fitted, boot)
    write(Drawing(data=picture.points, page=partial(law_page, picture, fitted)), path)
    return path.with_suffix(".csv")


def law_page(picture: LawPicture, fitted: Fit) -> Figure:
    """Two rows, one column per term."""
    terms = fitted.law.terms
    page = Figure(figsize=(3.4 * len(terms) + 0.4, 5.2), layout="constrained")
    axes = page.subplots(2, len(terms), squeeze=False, sharex="col", height_ratios=(2, 1))
    shades = [_draw_term(axes[:, k], picture, term.name, term.column) for k, term in enumerate(terms)]
    axes[0, 0].set_ylabel("loss less E and the other parts\n(nat/token)")
    axes[1, 0].set_ylabel("ln loss - ln fitted")
    page.colorbar(shades[-1], ax=axes[:, -1], label="n_layers", aspect=40, pad=0.02)
    caption(page, picture.note)
    return page


def _draw_term(axes: Any, picture: LawPicture, name: str, column: str) -> Any:
    """The part above, the residuals below; returns what has the colours."""
    part, rest = axes
    points, curve = picture.points, picture.curves[name]
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
    hidden = len(points) - len(shown)
    part.set_title(picture.titles[name] + (f"\n{hidden} points at or below 0 not shown" if hidden else ""), fontsize=8)
    rest.axhline(0, color="black", linewidth=0.8)
    rest.scatter(points[column], points["residual"], c=points["n_layers"], s=8, **style)
    rest.set_xlabel(LABELS[column])
    return shades
