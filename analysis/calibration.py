"""Do the scores of layer effectiveness follow a known required depth? A verdict for each score.

    python analysis/calibration.py RESULTS_DIR --measure          measure every run at each need: by_need.parquet
    python analysis/calibration.py RESULTS_DIR [--figure FILE]    the verdicts, from by_need.parquet

The *need* is the required depth. Three comparisons, of models of `sparsedepth/examples/known_depth.yaml`:

    hops     within one model of k-hop induction: sequences of k hops need floor(log2 k) + 2 blocks (2402.09268)
    length   within one model of A5: the position after n operations; the need grows with n (2404.08819)
    group    A5, which is not solvable, against Z60, which is, all else equal, also the seed

Scores are measured on the positions of that difficulty only, in k-hop those whose answer is not 'none'; group: on all.
A model counts at a need if its accuracy is at least SOLVED: otherwise the task needs more depth than the model has,
which no score can show.

    tau = (pairs ordered by the score as by the need - pairs ordered the other way) / pairs that differ in need

Kendall's tau-a, per seed: within a depth over pairs of one depth, across depths over pairs of two. Interval: Student's
over seeds, with a spread of at least that of tau under random order, cut at -1 and 1. p: probability of a mean over
seeds this large if the needs of each model (group: of each pair of models) are in random order.

    constant          at every depth and seed the score has one value at all needs: nothing is tested
    follows           p <= 0.025 and the mean tau >= 0.5
    does not follow   the interval of tau ends below 0.5
    undecided         otherwise

Constant are counts at their bound, and by length the scores of all positions (variance, causal, Jacobian, angles,
participation), since a model reads the same sequences whichever length is scored.

A score 'does not follow' if it does not in at least one comparison, else follows if it follows in at least one; both
with p and the interval's error rate corrected for the number of its comparisons (Bonferroni), without constant ones.

Shapes: N rows (a model at a need), P random orders.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from estimate import Estimate, estimate
from scipy.special import stdtrit
from script import run_script

from sparsedepth.config.task import IGNORED, SOLVED, task_name
from sparsedepth.files import write_bytes
from sparsedepth.store.packs import find_runs
from sparsedepth.store.parquet import table_bytes
from sparsedepth.words.plain_text import counted

CLAIM = (
    "usefulness, causal and permutation scores measure how effective layers are (2603.15389); nobody has compared them "
    "with a known required depth"
)

SCORES = (
    "needed_layers", "jointly_needed_layers", "affine_loss_added", "affine_accuracy_lost",
    "affine_loss_added_without_first", "affine_loss_added_centre", "usefulness", "usefulness_loss_increase",
    "causal_score", "permutation_score", "jacobian_deviation", "lens_loss_increase", "early_exit_loss_increase",
    "residual_variance_last", "residual_variance_growth", "angular_distance_middle", "participation_ratio",
)  # fmt: skip
"""The columns of `runs` that are tested."""

TABLE = "by_need.parquet"
FOLLOWS, LEAST_TAU = 0.025, 0.5
N_ORDERS = 2000

Verdict = Literal["follows", "does not follow", "undecided", "constant"]


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
    """None: across depths"""
    tau: Estimate
    """Over seeds."""
    p: float
    verdict: Verdict


def trials(rows: Iterable[Row]) -> list[Trial]:
    """Every score in every comparison, at each depth and across depths; only solved needs."""
    solved = sorted((row for row in rows if row.accuracy >= SOLVED), key=_order)
    results = []
    for (comparison, score), of_score in groupby(solved, key=lambda row: (row.comparison, row.score)):
        score_rows = list(of_score)
        depths = sorted({row.n_layers for row in score_rows})
        for n_layers in (*depths, None) if len(depths) > 1 else depths:
            chosen = [row for row in score_rows if n_layers in (None, row.n_layers)]
            results.append(_trial(comparison, score, n_layers, chosen))
    return [trial for trial in results if trial is not None]


def _order(row: Row) -> tuple[Any, ...]:
    return row.comparison, row.score, row.seed, row.n_layers, row.need


def _trial(comparison: str, score: str, n_layers: int | None, rows: list[Row]) -> Trial | None:
    """None if no seed has two needs to compare."""
    rng = np.random.default_rng(0)
    taus, orders_P, is_constant = [], [], True
    for _, of_seed in groupby(rows, key=lambda row: row.seed):
        seed_rows = list(of_seed)
        value_N, need_N, depth_N = (
            np.array([getattr(row, name) for row in seed_rows], dtype=float) for name in ("value", "need", "n_layers")
        )
        same_depth_NN = depth_N[:, None] == depth_N
        compared_NN = same_depth_NN if n_layers is not None else ~same_depth_NN
        if not (compared_NN & (need_N[:, None] != need_N)).any():
            continue
        is_constant &= not ((value_N[:, None] != value_N) & same_depth_NN).any()
        taus.append(float(concordance(value_N, need_N[None], compared_NN)[0]))
        orders_P.append(concordance(value_N, _random_orders(need_N, depth_N, rng), compared_NN))
    if not taus:
        return None
    null_P = np.mean(orders_P, axis=0)
    # A tau that no order of the needs changes has no spread, and is known exactly.
    least_sd = max(float(np.sqrt(np.mean([order_P.var() for order_P in orders_P]))), 1e-12)
    tau = _within_bounds(estimate(taus, least_sd))
    p = float((1 + (null_P >= np.mean(taus) - 1e-12).sum()) / (1 + N_ORDERS))
    verdict = "constant" if is_constant else _verdict(tau, p)
    return Trial(score=score, comparison=comparison, n_layers=n_layers, tau=tau, p=p, verdict=verdict)


def _within_bounds(tau: Estimate) -> Estimate:
    """Cut Student's interval at the bounds of tau."""
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


def _verdict(tau: Estimate, p: float, n_comparisons: int = 1) -> Verdict:
    """At an error rate of FOLLOWS on either side for all comparisons together."""
    rate = FOLLOWS / n_comparisons
    if tau.mean is not None and tau.mean >= LEAST_TAU and p <= rate:
        return "follows"
    if tau.mean is None or tau.error is None or tau.df is None:
        return "undecided"
    return "does not follow" if tau.mean + float(stdtrit(tau.df, 1 - rate)) * tau.error < LEAST_TAU else "undecided"


def overall(of_score: list[Trial]) -> Verdict:
    """One verdict from all comparisons."""
    tested = [trial for trial in of_score if trial.verdict != "constant"]
    verdicts = {_verdict(trial.tau, trial.p, len(tested)) for trial in tested}
    return min(verdicts, key=["does not follow", "follows", "undecided"].index, default="undecided")


def tally(of_score: list[Trial]) -> str:
    """'follows in 8 of 11, does not in 1, constant in 1': the number of comparisons by verdict."""
    verdicts = [trial.verdict for trial in of_score]
    constant = f", constant in {n}" if (n := verdicts.count("constant")) else ""
    return f"follows in {_share(verdicts)}, does not in {verdicts.count('does not follow')}{constant}"


def _share(verdicts: Sequence[Verdict]) -> str:
    """'8 of 11': the comparisons in which a score follows, of those that test it."""
    return f"{verdicts.count('follows')} of {len(verdicts) - verdicts.count('constant')}"


def read(results: Path) -> list[Row]:
    """The table of a results folder, or of a pack."""
    return [Row(**row) for row in pq.read_table(results / TABLE).to_pylist()]


def measure(results: Path) -> None:
    """Measure every run of a task of known depth in the results folder, by need, into its table. The table is complete
    after each run; the same command continues with the missing runs."""
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
        measured = measure_run(loaded.probed, config, source.held_out, None, step=config.n_steps)
        accuracy = measured.summary["val_accuracy"] or 0.0
        for score in SCORES:
            if (value := measured.summary.get(score)) is not None:
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
    """A task's held-out sequences, with only the positions of one difficulty as targets."""

    source: Any
    config: Any
    difficulty: int | None

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Any:
        """Enough sequences that those with one number of hops have about n_tokens."""
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


def report(all_trials: list[Trial]) -> Iterator[str]:
    """A verdict for each score, then a line for each comparison."""
    for score in SCORES:
        of_score = [trial for trial in all_trials if trial.score == score]
        if of_score:
            yield f"  {score}: {overall(of_score)} ({tally(of_score)})"
        for trial in of_score:
            depth = "across depths" if trial.n_layers is None else f"{trial.n_layers} layers"
            yield (
                f"    {trial.comparison}, {depth}: {trial.verdict}; tau {trial.tau}, "
                f"{counted(trial.tau.n, 'seed')}, p {trial.p:.2g}"
            )
    n_tested = sum(trial.verdict != "constant" for trial in all_trials)
    yield (
        f"{n_tested} comparisons: by chance at most about {FOLLOWS * n_tested:.1f} are 'follows'; "
        "a score's verdict is corrected for the number of its comparisons (Bonferroni)"
    )


PANELS = (
    ("hops", "needed_layers", "hops: blocks of known need"),
    ("length", "needed_layers", "A5: operations"),
    ("length", "jointly_needed_layers", "A5: operations"),
)
"""(comparison, score, axis label of the need)"""
COMPARISONS = {"hops": "more hops", "length": "more operations", "group": "A5 against Z60"}
Colours = Mapping[Any, Any]
"""n_layers -> colour"""
ACROSS = "#444444"
"""Colour of comparisons across depths."""


def _draw(rows: list[Row], all_trials: list[Trial], path: Path) -> None:
    """Scores against the need, one line per model; every tau with its interval, also in the .csv."""
    from sparsedepth.plots.page import Drawing, check_path, write as write_figure

    check_path(path)
    data = pd.DataFrame(
        {
            "score": trial.score, "comparison": trial.comparison, "n_layers": trial.n_layers, "tau": trial.tau.mean,
            "tau_lo": trial.tau.lo, "tau_hi": trial.tau.hi, "seeds": trial.tau.n, "p": trial.p,
            "verdict": trial.verdict,
        }
        for trial in all_trials
    )  # fmt: skip
    write_figure(Drawing(data=data, page=lambda: _page(rows, all_trials)), path)


def _page(rows: list[Row], all_trials: list[Trial]) -> Any:
    from matplotlib.figure import Figure

    from sparsedepth.plots.page import caption, depth_legend
    from sparsedepth.plots.style import depth_colours

    colours = depth_colours(row.n_layers for row in rows)
    page = Figure(figsize=(11.5, 6.6))
    grid = page.add_gridspec(len(PANELS), 4, width_ratios=(1.4, 1, 1, 1))
    for row_index, panel in enumerate(PANELS):
        _draw_needs(page.add_subplot(grid[row_index, 0]), panel, rows, colours)
    tested = [trial for trial in all_trials if trial.verdict != "constant"]
    verdicts = {score: [trial.verdict for trial in tested if trial.score == score] for score in SCORES}
    scores = sorted(filter(verdicts.get, SCORES), key=lambda score: -np.mean(np.array(verdicts[score]) == "follows"))
    forests = [page.add_subplot(grid[:, 1 + row_index]) for row_index in range(len(COMPARISONS))]
    for axes, comparison in zip(forests, COMPARISONS, strict=True):
        _draw_taus(axes, comparison, scores, tested, colours)
    forests[0].set_yticks(range(len(scores)), [textwrap.fill(score.replace("_", " "), 22) for score in scores])
    forests[1].set_xlabel("Kendall's tau of score and need: 1 if the score always rises with the need")
    for row_index, score in enumerate(scores):
        forests[-1].text(1.15, row_index, _share(verdicts[score]), va="center", fontsize=8)
    forests[-1].text(1.15, -1.0, "follows", fontsize=8)
    depth_legend(page, colours)
    n_seeds = counted(max(trial.tau.n for trial in all_trials), "seed")
    caption(
        page, f"Left: thin lines are models, at the needs that they solve (accuracy at least {SOLVED}); thick: mean. "
        f"Right: does a score rise with the need? Mean and 95% interval over up to {n_seeds}, at each depth and "
        "(diamonds) across depths. Filled: it follows (p at most 0.025 and tau at least 0.5). Not drawn and not "
        "counted: comparisons in which the score has one value at all needs.",
    )  # fmt: skip
    return page


def _draw_needs(axes: Any, panel: tuple[str, str, str], rows: list[Row], colours: Colours) -> None:
    """A score of every model against the need of the positions it was measured on."""
    from matplotlib.ticker import MaxNLocator

    comparison, score, need = panel
    solved = [row for row in rows if (row.comparison, row.score) == (comparison, score) and row.accuracy >= SOLVED]
    for n_layers, of_depth in pd.DataFrame(sorted(solved, key=_order), columns=SCHEMA.names).groupby("n_layers"):
        for _, line in of_depth.groupby("seed"):
            axes.plot(line["need"], line["value"], linewidth=0.6, alpha=0.35, color=colours[n_layers])
        mean = of_depth.groupby("need")["value"].mean()
        axes.plot(mean.index, mean, marker="o", markersize=4, linewidth=2, color=colours[n_layers])
    axes.set(xlabel=need, ylabel=score.replace("_", " "))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_taus(axes: Any, comparison: str, scores: list[str], tested: list[Trial], colours: Colours) -> None:
    """One row per score, with a marker for each depth and one across depths."""
    for row_index, score in enumerate(scores):
        of_score = [trial for trial in tested if (trial.score, trial.comparison) == (score, comparison)]
        for offset, trial in zip(np.linspace(-0.3, 0.3, len(of_score)), of_score, strict=True):
            colour = ACROSS if trial.n_layers is None else colours[trial.n_layers]
            marker = "D" if trial.n_layers is None else "o"
            face = colour if trial.verdict == "follows" else "white"
            axes.plot([trial.tau.lo, trial.tau.hi], [row_index + offset] * 2, color=colour, linewidth=0.8)
            axes.plot(trial.tau.mean, row_index + offset, marker, color=colour, markerfacecolor=face, markersize=4)
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set(xlim=(-1.1, 1.1), ylim=(len(scores) - 0.4, -0.6), title=COMPARISONS[comparison])
    axes.set_yticks(range(len(scores)), [])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Do the scores follow a known required depth?")
    parser.add_argument("results", type=Path)
    parser.add_argument("--measure", action="store_true", help="first measure every run at each need: by_need.parquet")
    parser.add_argument("--figure", type=Path, help="draw the verdicts into this .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options.results)
    if not (options.results / TABLE).is_file():
        raise ValueError(f"no {TABLE} in {options.results}; --measure makes it from runs of known_depth.yaml")
    rows = read(options.results)
    all_trials, n_runs = trials(rows), len({row.run_id for row in rows})
    if not all_trials:
        raise ValueError(f"no two needs of these {n_runs} runs are both solved")
    print(f"Claimed: {CLAIM}\nMeasured, Kendall's tau of score and need, {n_runs} runs:")
    print("\n".join(report(all_trials)))
    if options.figure:
        _draw(rows, all_trials, options.figure)


if __name__ == "__main__":
    run_script(main)
