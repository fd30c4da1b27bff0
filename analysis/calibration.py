"""Do the scores of layer effectiveness follow a need for depth that is known? A verdict for each score.

    python analysis/calibration.py RESULTS_DIR --measure          measures every run by need: by_need.parquet
    python analysis/calibration.py RESULTS_DIR [--figure FILE]    the verdicts, from by_need.parquet

Three comparisons, of models of `sweeps/known_depth.yaml`:

    hops     within one model of k-hop induction: sequences of k hops need floor(log2 k) + 2 blocks (2402.09268)
    length   within one model of A5: the position after n operations; the need grows with n (2404.08819)
    group    A5, which is not solvable, against Z60, which is, at equal everything, seed included

Scored are the positions of that difficulty alone, in k-hop those whose answer is not 'none'; group: all. A model counts
at a need where its accuracy is at least SOLVED: what is not solved needs more depth than there is, unseen by any score.

    tau = (pairs that the score orders as the need does - pairs it orders the other way) / pairs that differ in need

Kendall's tau-a, per seed: within a depth over pairs of one depth, across depths over pairs of two. Interval: Student's
over seeds, whose spread is taken to be at least that of tau under random order, ended at -1 and 1. p: of a mean over
seeds as large where the needs of each model (group: of each pair of models) are in random order.

    follows           p <= 0.025 and the mean tau >= 0.5, in one comparison at least, and 'does not' in none
    does not follow   the interval of tau ends below 0.5, in one comparison at least
    undecided         all else

Shapes: N rows (a model at a need), P random orders.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsedepth.effects.intervals import Estimate, estimate
from sparsedepth.effects.script import NOTHING, run_script
from sparsedepth.effects.sentences import counted, estimate_text
from sparsedepth.files import write_bytes
from sparsedepth.store.run_tables import table_bytes

CLAIM = (
    "usefulness, causal and permutation scores measure how effective layers are (2603.15389); nobody has compared them "
    "with a need for depth that is known"
)

SCORES = (
    "needed_layers", "jointly_needed_layers", "affine_loss_added", "affine_accuracy_lost",
    "affine_loss_added_without_first", "affine_loss_added_centre", "usefulness", "usefulness_loss_increase",
    "causal_score", "permutation_score", "jacobian_deviation", "lens_loss_increase", "early_exit_loss_increase",
    "residual_variance_last", "residual_variance_growth", "angular_distance_middle", "participation_ratio",
)  # fmt: skip
"""Those that are tested, of the columns of `runs`."""

TABLE = "by_need.parquet"
SOLVED = 0.9
FOLLOWS, LEAST_TAU = 0.025, 0.5
N_ORDERS = 2000

Verdict = Literal["follows", "does not follow", "undecided"]


@dataclass(frozen=True)
class Row:
    """A score of one model at one need."""

    comparison: str
    n_layers: int
    seed: int
    need: float
    accuracy: float
    run_id: str
    score: str
    value: float


_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64()}
SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in get_type_hints(Row).items()])


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One score in one comparison."""

    score: str
    comparison: str
    n_layers: int | None
    """None = across depths"""
    tau: Estimate
    """over seeds"""
    p: float
    verdict: Verdict


def trials(rows: Iterable[Row]) -> list[Trial]:
    """Every score in every comparison, at each depth and across depths; only needs that are solved."""
    solved = sorted((row for row in rows if row.accuracy >= SOLVED), key=_place)
    made: list[Trial] = []
    for (comparison, score), of_score in groupby(solved, key=lambda row: (row.comparison, row.score)):
        known = list(of_score)
        depths = sorted({row.n_layers for row in known})
        for n_layers in (*depths, None) if len(depths) > 1 else depths:
            chosen = [row for row in known if n_layers in (None, row.n_layers)]
            trial = _trial(comparison, score, n_layers, chosen)
            made += [] if trial is None else [trial]
    return made


def _place(row: Row) -> tuple[Any, ...]:
    return row.comparison, row.score, row.seed, row.n_layers, row.need


def _trial(comparison: str, score: str, n_layers: int | None, rows: list[Row]) -> Trial | None:
    """None where no seed has two needs to compare."""
    rng = np.random.default_rng(0)
    taus, orders_P = [], []
    for _, of_seed in groupby(rows, key=lambda row: row.seed):
        seed_rows = list(of_seed)
        value_N, need_N, depth_N = (
            np.array([getattr(row, name) for row in seed_rows], dtype=float) for name in ("value", "need", "n_layers")
        )
        same_depth_NN = depth_N[:, None] == depth_N
        compared_NN = same_depth_NN if n_layers is not None else ~same_depth_NN
        if not (compared_NN & (need_N[:, None] != need_N)).any():
            continue
        taus.append(float(concordance(value_N, need_N[None], compared_NN)[0]))
        orders_P.append(concordance(value_N, _random_orders(need_N, depth_N, rng), compared_NN))
    if not taus:
        return None
    null_P = np.mean(orders_P, axis=0)
    tau = _within_bounds(estimate(taus, least_sd=float(np.sqrt(np.mean([order_P.var() for order_P in orders_P])))))
    p = float((1 + (null_P >= np.mean(taus) - 1e-12).sum()) / (1 + N_ORDERS))
    return Trial(score=score, comparison=comparison, n_layers=n_layers, tau=tau, p=p, verdict=_verdict(tau, p))


def _within_bounds(tau: Estimate) -> Estimate:
    """Student's interval knows no bounds; tau has them."""
    return tau if tau.lo is None or tau.hi is None else replace(tau, lo=max(tau.lo, -1.0), hi=min(tau.hi, 1.0))


def concordance(value_N: np.ndarray, need_PN: np.ndarray, compared_NN: np.ndarray) -> np.ndarray:
    """Kendall's tau-a of the score with each order of the needs, over the compared pairs that differ in need: [P]."""
    score_NN = np.sign(value_N[:, None] - value_N) * compared_NN
    need_PNN = np.sign(need_PN[:, :, None] - need_PN[:, None, :])
    n_pairs_P = np.maximum((np.abs(need_PNN) * compared_NN).sum((1, 2)), 1)
    return (score_NN * need_PNN).sum((1, 2)) / n_pairs_P


def _random_orders(need_N: np.ndarray, depth_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The needs of each depth's models in random order: [P, N]."""
    need_PN = np.repeat(need_N[None], N_ORDERS, axis=0)
    for depth in np.unique(depth_N):
        of_depth_N = depth_N == depth
        need_PN[:, of_depth_N] = rng.permuted(need_PN[:, of_depth_N], axis=1)
    return need_PN


def _verdict(tau: Estimate, p: float) -> Verdict:
    if tau.mean is not None and tau.mean >= LEAST_TAU and p <= FOLLOWS:
        return "follows"
    return "does not follow" if tau.hi is not None and tau.hi < LEAST_TAU else "undecided"


def overall(of_score: Iterable[Trial]) -> Verdict:
    """One verdict from those of all comparisons."""
    verdicts = {trial.verdict for trial in of_score}
    for verdict in ("does not follow", "follows"):
        if verdict in verdicts:
            return verdict
    return "undecided"


def tally(of_score: list[Trial]) -> str:
    """'follows in 9 of 12, does not in 1': how many comparisons came to which verdict."""
    verdicts = [trial.verdict for trial in of_score]
    return f"follows in {verdicts.count('follows')} of {len(verdicts)}, does not in {verdicts.count('does not follow')}"


def read(results: Path) -> list[Row]:
    """The table of a results folder, or of a pack."""
    return [Row(**row) for row in pq.read_table(results / TABLE).to_pylist()]


def measure(results: Path) -> None:
    """Write every run of a task of known depth in the results folder, by need, into its table; the table is whole
    after each run, and the same command goes on with those that it lacks."""
    from sparsedepth.store.find import find_runs

    folders = sorted(run.folder for part in find_runs([results]) if part.pack is None for run in part.runs)
    rows = read(results) if (results / TABLE).is_file() else []
    measured = {row.run_id for row in rows}
    for done, folder in enumerate(folders, start=1):
        if folder.name not in measured:
            print(f"measuring {done} of {len(folders)}: {folder.name}", file=sys.stderr)
            rows += _by_need(folder)
            write(rows, results)


def write(rows: Iterable[Row], results: Path) -> None:
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=SCHEMA)
    write_bytes(results / TABLE, table_bytes(table, level=19))


def _by_need(folder: Path) -> Iterator[Row]:
    from sparsedepth.config.task import task_name
    from sparsedepth.data.tasks.stream import TaskSource
    from sparsedepth.measure.suite import measure_run
    from sparsedepth.probe.load import load_model

    loaded = load_model(folder)
    if loaded.config is None or task_name(loaded.config.corpus) not in ("k_hop", "state_tracking"):
        return
    added = tuple(name for name in ("joint", "jacobian", "participation") if name not in loaded.config.measures)
    config = loaded.config.model_copy(
        update={"val_tokens": loaded.config.measure_tokens, "measures": (*loaded.config.measures, *added)}
    )
    for comparison, difficulty, need in needs(config):
        source = _Scored(TaskSource(config), config, difficulty)
        made = measure_run(loaded.probed, config, source.held_out, None, step=config.n_steps)
        accuracy = made.summary["val_accuracy"] or 0.0
        for score in SCORES:
            if (value := made.summary.get(score)) is not None:
                yield Row(comparison, config.n_layers, config.seed, need, accuracy, folder.name, score, float(value))


def needs(config: Any) -> Iterator[tuple[str, int | None, float]]:
    """(comparison, difficulty that is scored or None for all, need) of a run."""
    if config.task_group is None:
        for k in (2**i for i in range(10) if config.min_hops <= 2**i <= config.max_hops):
            yield "hops", k, float(k.bit_length() + 1)
        return
    if config.task_group in ("A5", "S5"):
        for n_operations in sorted({round((config.seq_len - 1) * share) for share in (0.25, 0.5, 0.75, 1.0)}):
            yield "length", n_operations, float(n_operations)
    if config.task_group in ("A5", "Z60"):
        yield "group", None, float(config.task_group == "A5")


@dataclass(frozen=True)
class _Scored:
    """A task's held-out sequences of which only the positions of one difficulty count."""

    source: Any
    config: Any
    difficulty: int | None

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Any:
        """Enough are drawn that those of one number of hops are about n_tokens."""
        from sparsedepth.config.task import IGNORED

        is_k_hop = self.config.task_group is None
        n_kinds = self.config.max_hops - self.config.min_hops + 1 if is_k_hop else 1
        drawn = self.source.held_out(seq_len, n_kinds * n_tokens, n_kinds * skip_tokens)
        if self.difficulty is None:
            return drawn
        counts_NT = drawn.difficulty == self.difficulty
        if is_k_hop:
            counts_NT &= drawn.targets != self.config.letters  # 'none' is its token
        kept_N = counts_NT.any(1)
        targets_NT = np.where(counts_NT, drawn.targets, IGNORED)
        return replace(drawn, inputs=drawn.inputs[kept_N], targets=targets_NT[kept_N], difficulty=None)


def report(made: list[Trial]) -> Iterator[str]:
    """A verdict for each score, under it a line for each comparison."""
    for score in SCORES:
        of_score = [trial for trial in made if trial.score == score]
        if of_score:
            yield f"  {score}: {overall(of_score)} ({tally(of_score)})"
        for trial in of_score:
            place = "across depths" if trial.n_layers is None else f"{trial.n_layers} layers"
            yield (
                f"    {trial.comparison}, {place}: {trial.verdict}; tau {estimate_text(trial.tau, '1')}, "
                f"{counted(trial.tau.n, 'seed')}, p {trial.p:.2g}"
            )
    yield f"{len(made)} verdicts: chance alone makes at most about {FOLLOWS * len(made):.1f} of them 'follows'"


PANELS = (
    ("hops", "needed_layers", "hops: blocks of known need"),
    ("length", "needed_layers", "A5: operations"),
    ("length", "jointly_needed_layers", "A5: operations"),
)
"""(comparison, score, what the need is)"""
COMPARISONS = {"hops": "more hops", "length": "more operations", "group": "A5 against Z60"}
Colours = Mapping[int, Any]
"""By n_layers."""
ACROSS = "#444444"
"""Colour of what is compared across depths."""


def _draw(rows: list[Row], made: list[Trial], path: Path) -> None:
    """Two scores against the need, each model a line; every tau with its interval; the taus in the .csv."""
    import pandas as pd

    from sparsedepth.plots.page import Drawing, check_suffix
    from sparsedepth.plots.page import write as write_figure

    check_suffix(path)
    data = pd.DataFrame(
        {
            "score": trial.score, "comparison": trial.comparison, "n_layers": trial.n_layers, "tau": trial.tau.mean,
            "tau_lo": trial.tau.lo, "tau_hi": trial.tau.hi, "seeds": trial.tau.n, "p": trial.p,
            "verdict": trial.verdict,
        }
        for trial in made
    )  # fmt: skip
    write_figure(Drawing(data=data, page=lambda: _page(rows, made)), path)


def _page(rows: list[Row], made: list[Trial]) -> Any:
    from matplotlib.figure import Figure

    from sparsedepth.plots.style import caption, depth_colours, depth_legend

    colours = depth_colours(row.n_layers for row in rows)
    page = Figure(figsize=(11.5, 6.6), layout="constrained")
    grid = page.add_gridspec(len(PANELS), 4, width_ratios=(1.5, 1, 1, 1))
    for place, panel in enumerate(PANELS):
        _draw_needs(page.add_subplot(grid[place, 0]), panel, rows, colours)
    scores = [score for score in SCORES if any(trial.score == score for trial in made)]
    forests = [page.add_subplot(grid[:, 1 + place]) for place in range(len(COMPARISONS))]
    for axes, comparison in zip(forests, COMPARISONS, strict=True):
        _draw_taus(axes, comparison, scores, made, colours)
    forests[0].set_yticks(range(len(scores)), [score.replace("_", " ") for score in scores])
    forests[1].set_xlabel("order of score and need, Kendall's tau: 1 where the score rises whenever the need does")
    for place, score in enumerate(scores):
        verdicts = [trial.verdict for trial in made if trial.score == score]
        forests[-1].text(1.15, place, f"{verdicts.count('follows')} of {len(verdicts)}", va="center", fontsize=8)
    forests[-1].text(1.15, -1.0, "follows", fontsize=8)
    depth_legend(page, colours)
    n_seeds = counted(max(trial.tau.n for trial in made), "seed")
    caption(
        page, f"Left: a thin line for each model, at the needs that it solves (accuracy at least {SOLVED}); thick: "
        f"mean. Right: does a score rise with the need? Mean and 95% interval over up to {n_seeds}, at each depth and, "
        "as a diamond, across depths; filled: it follows (p at most 0.025 and tau at least 0.5).",
    )  # fmt: skip
    return page


def _draw_needs(axes: Any, panel: tuple[str, str, str], rows: list[Row], colours: Colours) -> None:
    """A score of every model against the need of what it was measured on."""
    from matplotlib.ticker import MaxNLocator

    comparison, score, need = panel
    shown = [row for row in rows if (row.comparison, row.score) == (comparison, score) and row.accuracy >= SOLVED]
    for (n_layers, _), line in groupby(sorted(shown, key=_place), key=lambda row: (row.n_layers, row.seed)):
        points = [(row.need, row.value) for row in line]
        axes.plot(*zip(*points, strict=True), linewidth=0.6, alpha=0.35, color=colours[n_layers])
    for n_layers, of_depth in groupby(sorted(shown, key=lambda row: row.n_layers), key=lambda row: row.n_layers):
        by_need = groupby(sorted(of_depth, key=lambda row: row.need), key=lambda row: row.need)
        means = [(at, np.mean([row.value for row in at_need])) for at, at_need in by_need]
        axes.plot(*zip(*means, strict=True), marker="o", markersize=4, linewidth=2, color=colours[n_layers])
    axes.set(xlabel=need, ylabel=score.replace("_", " "))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_taus(axes: Any, comparison: str, scores: list[str], made: list[Trial], colours: Colours) -> None:
    """A row for each score, in it a mark for each depth in the colour of the depth, and one across depths."""
    for place, score in enumerate(scores):
        of_score = [trial for trial in made if (trial.score, trial.comparison) == (score, comparison)]
        for offset, trial in zip(np.linspace(-0.3, 0.3, len(of_score)), of_score, strict=True):
            colour = ACROSS if trial.n_layers is None else colours[trial.n_layers]
            marker = "D" if trial.n_layers is None else "o"
            face = colour if trial.verdict == "follows" else "white"
            axes.plot([trial.tau.lo, trial.tau.hi], [place + offset] * 2, color=colour, linewidth=0.8)
            axes.plot(trial.tau.mean, place + offset, marker, color=colour, markerfacecolor=face, markersize=4)
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set(xlim=(-1.1, 1.1), ylim=(len(scores) - 0.4, -0.6), title=COMPARISONS[comparison])
    axes.set_yticks(range(len(scores)), [])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Do the scores follow a need for depth that is known?")
    parser.add_argument("results", type=Path)
    parser.add_argument("--measure", action="store_true", help="measure every run by need first: by_need.parquet")
    parser.add_argument("--figure", type=Path, help="draw the verdicts into this .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options.results)
    if not (options.results / TABLE).is_file():
        print(
            f"no {TABLE} in {options.results}; --measure makes it of runs of sweeps/known_depth.yaml", file=sys.stderr
        )
        return NOTHING
    rows = read(options.results)
    made = trials(rows)
    if not made:
        print(f"no two needs of these {len({row.run_id for row in rows})} runs are both solved", file=sys.stderr)
        return NOTHING
    n_runs = len({row.run_id for row in rows})
    print(f"Claimed: {CLAIM}\nMeasured, order of a score with the need, Kendall's tau, {n_runs} runs:")
    print("\n".join(report(made)))
    if options.figure:
        _draw(rows, made, options.figure)
    return 0


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
