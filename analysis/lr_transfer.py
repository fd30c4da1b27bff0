"""Does the best learning rate change with width or depth? A slope for each parametrisation.

    python analysis/lr_transfer.py RESULTS_DIR [...] [--figure FILE]

Runs with several lr at one width and depth form a curve for each seed. Its optimum is the vertex of the parabola in ln
lr through its lowest loss and the two neighbours (a curve whose lowest loss is at an end has none; these are counted).
Over all widths and depths of a parametrisation, by least squares for each seed,

    ln lr* = a_s + b_w ln d_model + b_d ln n_layers,   s = the setting of all other fields, with a separate a each

with the mean of b over seeds and Student's interval. lr transfers along an axis if the interval contains 0 and lies
within +-LIMIT: a slope of 0.25 changes the optimum by a factor of 1.4 over four times the size.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from estimate import Estimate, estimate
from script import read_runs, run_script

from sparsedepth.config.role import fields_where
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.plots.page import FORMATS
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.schema import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = (
    "with the standard parametrisation the best lr falls with width and depth; with muP it stays over width "
    "(2203.03466), with CompleteP over width and depth (2505.01618)"
)
DERIVED = fields_where(RunConfig, lambda role: role.derived_if_missing)
AXES = {"d_model": "width", "n_layers": "depth"}
LIMIT = 0.25


def keys(runs: pd.DataFrame, fields: list[str]) -> pd.Series:
    """A text per run; two are equal exactly where all `fields` are (NULL equals NULL)."""
    columns = [_texts(runs[name]) for name in fields]
    rows = zip(*columns, strict=True) if columns else ([] for _ in range(len(runs)))
    return pd.Series(["\x1f".join(row) for row in rows], index=runs.index, dtype=object)


def _texts(values: pd.Series) -> list[str]:
    """The repr of every plain value, computed once per distinct value."""
    try:
        codes, distinct = pd.factorize(values, use_na_sentinel=False)
    except TypeError:  # unhashable lists, in frames that do not come from a store
        return [repr(plain(value)) for value in values]
    texts = [repr(plain(value)) for value in distinct]
    return [texts[code] for code in codes]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    parametrisation: str
    slopes: dict[str, Estimate]
    """Of the axes that vary."""
    at_edge: int
    """Curves without an optimum."""
    n_curves: int

    def verdict(self, axis: str) -> str:
        slope = self.slopes[axis]
        if slope.lo is None or slope.hi is None:
            return "no interval from so few seeds"
        if slope.covers(0.0):
            return "transfers" if slope.lo > -LIMIT and slope.hi < LIMIT else "undecided"
        return "does not transfer" if max(abs(slope.lo), abs(slope.hi)) >= LIMIT else "changes, by less than the limit"


def optima(runs: pd.DataFrame, loss: str) -> pd.DataFrame:
    """One row per curve: parametrisation, d_model, n_layers, seed, setting, and ln lr* (NaN at an edge)."""
    finished = runs[(runs["outcome"] == "ok") & runs[loss].notna()]
    excluded = {"lr", "parametrisation", *AXES, *DERIVED}
    fields = [name for name in CELL_FIELDS if name in finished.columns and name not in excluded]
    finished = finished.assign(setting=keys(finished, fields))
    rows = []
    for key, curve in finished.groupby(["parametrisation", "d_model", "n_layers", "seed", "setting"], sort=True):
        by_lr = curve.groupby("lr")[loss].mean()
        if len(by_lr) >= 3:
            rows.append((*key, vertex(np.log(by_lr.index.to_numpy(dtype=float)), by_lr.to_numpy(dtype=float))))
    return pd.DataFrame(rows, columns=["parametrisation", "d_model", "n_layers", "seed", "setting", "optimum"])


def vertex(u_X: np.ndarray, loss_X: np.ndarray) -> float:
    """The vertex of the parabola through the lowest value and its neighbours; NaN if the lowest is at an end."""
    lowest = int(loss_X.argmin())
    if lowest in (0, len(u_X) - 1):
        return float("nan")
    square, linear, _ = np.polyfit(u_X[lowest - 1 : lowest + 2], loss_X[lowest - 1 : lowest + 2], 2)
    return float(-linear / (2 * square))


def transfers(curves: pd.DataFrame) -> list[Transfer]:
    """One for each parametrisation with optima at two widths, or two depths."""
    results = []
    for name in sorted(set(curves["parametrisation"])):
        of_rule = curves[curves["parametrisation"] == name]
        with_optimum = of_rule.dropna()
        axes = [axis for axis in AXES if with_optimum[axis].nunique() > 1]
        if not axes:
            continue
        slopes: dict[str, list[float]] = {axis: [] for axis in axes}
        for seed in sorted(set(with_optimum["seed"])):
            of_seed = with_optimum[with_optimum["seed"] == seed]
            values = np.log(of_seed[axes].astype(float)).assign(optimum=of_seed["optimum"])
            values = values - values.groupby(of_seed["setting"]).transform("mean")
            design = values[axes].to_numpy()
            if np.linalg.matrix_rank(design) == len(axes):
                fitted = np.linalg.lstsq(design, values["optimum"].to_numpy(), rcond=None)[0]
                for axis, slope in zip(axes, fitted, strict=True):
                    slopes[axis].append(float(slope))
        edge = int(of_rule["optimum"].isna().sum())
        estimates = {axis: estimate(values) for axis, values in slopes.items()}
        results.append(Transfer(parametrisation=name, slopes=estimates, at_edge=edge, n_curves=len(of_rule)))
    return results


def draw(curves: pd.DataFrame, file: Path) -> None:
    """The optima over width and over depth, with their numbers in a CSV next to the picture."""
    from sparsedepth.plots.page import Drawing, write

    data = curves.dropna().assign(lr=lambda rows: np.exp(rows["optimum"]))
    write(Drawing(data=data, page=lambda: page_of(data, n_curves=len(curves))), file)


def page_of(data: pd.DataFrame, n_curves: int) -> "Figure":
    from matplotlib.figure import Figure

    from sparsedepth.plots.page import caption, legend_above, line_handle
    from sparsedepth.plots.style import SERIES, log_scale

    styles = dict(zip(sorted(set(data["parametrisation"])), SERIES, strict=False))
    page = Figure(figsize=(6.4, 3.6))
    panels = page.subplots(1, 2, sharey=True)
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        for rule, (colour, marker, dashes) in styles.items():
            optima_of_rule = data[data["parametrisation"] == rule]
            panel.scatter(optima_of_rule[axis], optima_of_rule["lr"], s=16, marker=marker, color=colour, alpha=0.5)
            mean = optima_of_rule.groupby(axis)["optimum"].mean()
            panel.plot(mean.index, np.exp(mean), color=colour, linestyle=dashes, linewidth=1.4)
        sizes = sorted(set(data[axis]))
        panel.set(xscale="log", title=f"over {label}", xlabel=axis)
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
        panel.set_xticks([], minor=True)
    log_scale(panels[0], "y", data["lr"])
    panels[0].set_ylabel("best learning rate")
    handles = [line_handle(rule, style) for rule, style in styles.items()]
    legend_above(page, handles)
    text = "Points: best lr of one seed at each width and depth; lines: geometric mean."
    if edge := n_curves - len(data):
        text += f" Not shown: {edge} of {n_curves} curves: lowest at an end of their grid."
    caption(page, text)
    return page


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="lr_transfer.py", description="Does the best lr transfer?")
    parser.add_argument("results", nargs="+")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    if options.figure is not None and options.figure.suffix.lower() not in FORMATS:
        parser.error(f"--figure {options.figure} must end in one of: {', '.join(FORMATS)}")
    runs = read_runs(options.results)
    curves = optima(runs, loss_of(runs))
    results = transfers(curves)
    if not results:
        raise ValueError(f"these {len(runs)} runs lack three lr at two widths or depths of one parametrisation")
    print(f"Claimed: {CLAIM}\nMeasured, the slope of ln lr* on the logarithm of:")
    for transfer in results:
        for axis, slope in transfer.slopes.items():
            text = f"{slope} over {slope.n} seeds: {transfer.verdict(axis)}"
            print(f"  {transfer.parametrisation}, {AXES[axis]}: {text}")
        if transfer.at_edge:
            print(
                f"  {transfer.parametrisation}: {transfer.at_edge} of {transfer.n_curves} curves are lowest at an end"
            )
    if options.figure is not None:
        draw(curves, options.figure)
        print(f"written: {options.figure}")


if __name__ == "__main__":
    run_script(main)
