"""The figure of the toys: loss against depth with fits, and the exponent by temperature or rho.

One column per kind of student (target, integrator and other differing fields). Above: points are means over teachers,
lines the mean of the teachers' fits c l^-alpha + L_rest, dashed if only the slope is known. Below: filled markers are
alpha with its 95% interval over teachers, hollow ones the slope; grey lines are the paper's expectations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.effects.intervals import Estimate
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.style import GREY, SERIES, caption, line_handle, log_scale
from sparsedepth.store.connection import Store
from sparsedepth.toy.exponents import Exponent, exponents, varied

EXPECTED = {"euler": (1.0, 3.0), "midpoint": (1.0, 4.0)}
"""Independent layers, and a converged smooth teacher (2602.05970)."""
LABELS = {"kl": "KL (nat per input)", "kl_given_head": "KL (nat per input)", "mse": "mean squared error"}


@dataclass(frozen=True, kw_only=True)
class FigureColumn:
    """One kind of student."""

    title: str
    target: str
    integrator: str
    settings: tuple[Exponent, ...]

    def axis(self, name: str) -> list[Any]:
        return sorted({exponent.setting[name] for exponent in self.settings})


def toys(store: Store) -> Drawing:
    """The figure of a store's toys. Raises NothingToDraw."""
    rows = store.frame("select * from toys")
    if rows.empty:
        raise NothingToDraw("the store holds no toy networks")
    kinds = columns(rows)
    return Drawing(data=data(kinds), page=partial(page_of_toys, kinds))


def columns(toys: pd.DataFrame) -> list[FigureColumn]:
    """The kinds of students in the rows of `toys`. Raises NothingToDraw where no setting has depths for a fit."""
    fitted = exponents(toys)
    if not fitted:
        raise NothingToDraw("no setting of these toys has 4 depths, so there is no exponent to draw; train more depths")
    kinds = [name for name in varied(fitted) if name not in ("rho", "temperature")]
    by_kind: dict[tuple[str, ...], list[Exponent]] = {}
    for exponent in fitted:
        by_kind.setdefault(tuple(str(exponent.setting[name]) for name in kinds), []).append(exponent)
    return [
        FigureColumn(
            title=", ".join(f"{name} {value}" for name, value in zip(kinds, kind, strict=True)) or "all students",
            target=str(settings[0].setting["target"]),
            integrator=str(settings[0].setting["integrator"]),
            settings=tuple(settings),
        )
        for kind, settings in by_kind.items()
    ]


def data(columns: Sequence[FigureColumn]) -> pd.DataFrame:
    """Everything drawn: a row per setting, teacher and depth."""
    frames = []
    for exponent in (exponent for column in columns for exponent in column.settings):
        frame = exponent.losses.copy()
        fits = frame["teacher_seed"].map(exponent.teachers)
        fitted = zip(fits, frame["n_layers"], strict=True)
        frame["fitted_loss"] = [float(fit(np.array(float(depth)))) for fit, depth in fitted]
        for name in ("alpha", "c", "rest", "slope"):
            frame[f"teacher_{name}"] = [getattr(fit, name) for fit in fits]
        for name in ("alpha", "slope"):
            estimate: Estimate = getattr(exponent, name)
            frame[name], frame[f"{name}_lo"], frame[f"{name}_hi"] = estimate.mean, estimate.lo, estimate.hi
        for position, (name, value) in enumerate(exponent.setting.items()):
            frame.insert(position, name, value)
        frames.append(frame.astype({name: object for name in exponent.setting}))
    return pd.concat(frames, ignore_index=True)


def page_of_toys(columns: Sequence[FigureColumn]) -> Figure:
    """Two rows of panels, a column for each kind of student."""
    page = Figure(figsize=(max(6.8, 3.4 * len(columns)), 6.6), layout="constrained")
    axes = page.subplots(2, len(columns), squeeze=False)
    rhos = sorted({rho for column in columns for rho in column.axis("rho")})
    styles = {rho: SERIES[index % len(SERIES)] for index, rho in enumerate(rhos)}
    for column, (above, below) in zip(columns, axes.T, strict=True):
        _draw_losses(above, column, styles)
        _draw_exponents(below, column, styles)
    handles = [line_handle(f"ρ = {rho:g}", (colour, marker, "")) for rho, (colour, marker, _) in styles.items()]
    page.legend(handles=handles, loc="outside upper left", ncols=6)
    n_teachers = sorted({len(exponent.teachers) for column in columns for exponent in column.settings})
    caption(
        page,
        f"ρ: correlation of the teacher's layers (1 = tied, 0 = independent); {' or '.join(map(str, n_teachers))} "
        "teachers.",
        "Above: mean over teachers; line: fit c l^-α + rest, dashed: slope alone; pale: higher temperature.",
        "Below: α with 95% interval over teachers; hollow: slope of log loss; grey: expected (independent, smooth).",
    )
    return page


def _draw_losses(axis: Any, column: FigureColumn, styles: dict[float, tuple[str, str, str]]) -> None:
    temperatures, losses = column.axis("temperature"), []
    for exponent in column.settings:
        colour, marker, _ = styles[exponent.setting["rho"]]
        shade = 1 - 0.7 * temperatures.index(exponent.setting["temperature"]) / max(1, len(temperatures) - 1)
        means = exponent.losses.groupby("n_layers")["test_loss"].mean()
        depths = np.geomspace(means.index.min(), means.index.max(), 50)
        line = np.mean([fit(depths) for fit in exponent.teachers.values()], axis=0)
        axis.plot(means.index, means, color=colour, marker=marker, markersize=4, linestyle="", alpha=shade)
        dashes = "-" if exponent.alpha.mean is not None else (0, (4, 3))
        axis.plot(depths, line, color=colour, linewidth=1.1, linestyle=dashes, alpha=shade)
        losses += [*means]
    trained = sorted({depth for exponent in column.settings for depth in exponent.depths})
    log_scale(axis, "x", trained)
    axis.set_xticks(trained, [str(depth) for depth in trained])
    log_scale(axis, "y", losses)
    axis.set(xlabel="student depth (n_layers)", ylabel=f"test loss: {LABELS[column.target]}")
    axis.set_title(column.title, fontsize=8)


def _draw_exponents(axis: Any, column: FigureColumn, styles: dict[float, tuple[str, str, str]]) -> None:
    by_temperature = len(column.axis("temperature")) > 1
    name = "temperature" if by_temperature else "rho"
    for rho, (colour, marker, _) in styles.items():
        settings = [exponent for exponent in column.settings if exponent.setting["rho"] == rho]
        for key, hollow in (("slope", True), ("alpha", False)):
            known = [exponent for exponent in settings if getattr(exponent, key).mean is not None]
            x = [exponent.setting[name] for exponent in known]
            estimates = [getattr(exponent, key) for exponent in known]
            face = "white" if hollow else colour
            axis.errorbar(
                x, [e.mean for e in estimates], yerr=None if hollow else _bars(estimates), color=colour, marker=marker,
                markerfacecolor=face, markersize=5, linewidth=0.8, capsize=2,
                linestyle=":" if hollow and by_temperature else "-" if by_temperature else "",
            )  # fmt: skip
    for expected in EXPECTED[column.integrator]:
        axis.axhline(expected, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    if by_temperature:
        axis.set_xscale("log")
    else:
        axis.set_xticks(list(styles), [f"{rho:g}" for rho in styles])
        axis.set_xlim(-0.15, 1.15)
    axis.set(xlabel="temperature" if by_temperature else "ρ", ylabel="depth exponent α")
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))


def _bars(estimates: Sequence[Estimate]) -> np.ndarray:
    """Distances from the mean to the interval's ends; 0 without an interval."""
    ends_N3 = np.array([(estimate.lo, estimate.mean, estimate.hi) for estimate in estimates], dtype=float)
    return np.nan_to_num(np.diff(ends_N3.reshape(-1, 3)).T)
