"""The sentences and tables of the report, computed from the rows of the store."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.effects.cells import BASELINE, Cells
from sparsedepth.effects.chain import LinkEvidence, cautions, chain_evidence
from sparsedepth.effects.frame import compared
from sparsedepth.plots.forest import COLUMNS, cells_of_store, effects_of
from sparsedepth.plots.runs import all_runs
from sparsedepth.recipe.build_card import derive_card, manifest_facts, manifest_of
from sparsedepth.recipe.card import Card
from sparsedepth.recipe.choose import Evidence
from sparsedepth.recipe.judge_ladder import judge_ladder
from sparsedepth.report.answers import depth_answer, variance_answer
from sparsedepth.report.tables import (
    PageTable,
    best_by_depth,
    front_of,
    table_of,
    table_of_effects,
    table_of_ladder,
    table_of_runs,
)
from sparsedepth.scaling.shapes import shapes_answer
from sparsedepth.scaling.speedup import Worths, ladder_of_store, worth
from sparsedepth.store.best import Ranking, best
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.comparable_loss import COMMON, LOSSES, OWN, loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.packs import is_pack
from sparsedepth.store.saved_queries import answered
from sparsedepth.store.search import definitions_of, search_of
from sparsedepth.store.setting import pending
from sparsedepth.store.tuning_roles import result_rows, without_measured_models
from sparsedepth.sweep.results_folder import ResultsIndex
from sparsedepth.sweep.status import scan
from sparsedepth.words.answers import (
    OF_A_LADDER,
    OF_A_RUN,
    OF_SHAPES,
    Line,
    cost_line,
    depth_line,
    ladder_line,
    recipe_line,
    run_line,
    search_line,
    shapes_line,
    variance_line,
)
from sparsedepth.words.chain import evidence_lines, link_heading
from sparsedepth.words.differences import pending_text
from sparsedepth.words.plain_text import in_shell, sentence_of
from sparsedepth.words.recipe import claim_of
from sparsedepth.words.report import LINK_MEANINGS, VARIANCE, counts, search_sentences, summary
from sparsedepth.words.runs import search_text
from sparsedepth.words.scaling import shapes_lines

UNFINISHED = ("failed", "infeasible", "pruned")
MOST_IN_SUMMARY = 4


@dataclass(frozen=True, kw_only=True)
class Content:
    answers: tuple[Line, ...]
    """To the questions that a sweep is run for."""
    first: tuple[PageTable, str] | None
    """What to use at each depth, or the front of a search; and the caption of the table."""
    summary: tuple[str, ...]
    card: Card | None
    """The recipe's card, the verified one if there is one; None without trained runs, and for a search."""
    runs: PageTable
    effects: PageTable | None
    links: tuple[tuple[str, tuple[str, ...]], ...]
    """('cause -> effect: verdict', lines of evidence)"""
    failures: PageTable
    methods: PageTable
    provenance: PageTable
    run_ids: tuple[str, ...]


def content(
    store: Store,
    folders: Sequence[Path],
    depth: int | None = None,
    objective: str = "loss",
    verified: Card | None = None,
) -> Content:
    """Everything but the pictures; `verified` is the card of the recipe after `recipe verify`. Raises ValueError for a
    card of another recipe, and as `best` does."""
    runs = all_runs(store)
    trained = result_rows(runs).reset_index(drop=True) if len(without_measured_models(runs)) else None
    search = search_of(folders) if verified is None else None
    rankings = [] if trained is None else _rankings(store, search, objective, depth)
    objective = loss_of(runs) if objective == "loss" else objective
    cells = None if search or trained is None else cells_of_store(store)  # a search has no baseline
    found = None if cells is None else Evidence(cells.of_outcome(objective))
    compute = worth(store, objective) if found else {}
    ladder = None if cells is None else _of_ladder(store, cells)
    has_card = found and not (ladder and verified is None)  # a ladder has no seeds for a recipe
    card = recipe_card(found, folders, depth, verified, compute) if has_card else None  # can refuse the card
    effects = pd.DataFrame(columns=[*COLUMNS]) if cells is None else effects_of(store)
    links = [] if cells is None else _links(cells)
    failures, n_failed = table_of_failures(folders, runs)
    runs_table = table_of_runs(runs)
    judged = effects.iloc[:0] if ladder else effects  # of a ladder the law judges, not one budget
    told = [*findings(runs, trained, cells, card, judged, links, n_failed, store.damaged)]
    told[:0] = [] if trained is None else _first_told(store, search, rankings, folders)
    answers, first = ladder or _top(store, runs, objective, card, cells, found, rankings)
    return Content(
        answers=answers,
        first=first,
        summary=tuple(told),
        card=card,
        runs=runs_table,
        effects=None if cells is None or effects.empty else table_of_effects(effects, cells, compute),
        links=tuple((link_heading(link), tuple(evidence_lines(link))) for link in links),
        failures=failures,
        methods=table_of_methods(runs_table, links),
        provenance=table_of_provenance(runs),
        run_ids=tuple(runs["run_id"]),
    )


def _first_told(
    store: Store, search: SweepDefinition | None, rankings: Sequence[Ranking], folders: Sequence[Path]
) -> Iterator[str]:
    """Of a search its question and its best, and how many runs are to come."""
    if search and rankings:
        yield from search_sentences(rankings[0], search_text(search), in_shell(*folders))
    if waiting := pending_text(pending(store)):
        yield sentence_of(waiting)


def _links(cells: Cells) -> list[LinkEvidence]:
    """Those of the chain that are known."""
    return [link for link in chain_evidence(cells) if link.within.rho is not None]


def _of_ladder(store: Store, cells: Cells) -> tuple[tuple[Line, ...], tuple[PageTable, str]] | None:
    """Answers and table of one run at each of several budgets, as `judge` has them; None of other runs."""
    try:
        stored = ladder_of_store(store)
        judged = judge_ladder(stored.losses, BASELINE, stored.log_speeds)
    except ValueError:  # `effects --as speedup` gives the reason
        return None
    most = judged.table.records()[0]
    return tuple(ladder_line(question, most) for question in OF_A_LADDER), table_of_ladder(judged, cells.settings)


def _top(
    store: Store,
    runs: pd.DataFrame,
    loss: str,
    card: Card | None,
    cells: Cells | None,
    found: Evidence | None,
    rankings: Sequence[Ranking],
) -> tuple[tuple[Line, ...], tuple[PageTable, str] | None]:
    """Answers and table of a search, of shapes, or of a grid."""
    if rankings:
        return tuple(map(search_line, rankings)), front_of(rankings[0])
    if cells is None:
        return tuple(_answers(runs, loss, card, None, None)), table_of_models(store)
    shapes = shapes_answer(store)
    if shapes is not None and shapes.decides:
        table = table_of(dict.fromkeys(shapes.table.columns, ""), shapes.table.rows)
        return tuple(shapes_line(question, shapes) for question in OF_SHAPES), (table, shapes_lines(shapes)[0])
    by_depth = None if found is None else best_by_depth(found.cells)
    return tuple(_answers(runs, loss, card, cells, by_depth)), by_depth or table_of_models(store)


def _rankings(store: Store, search: SweepDefinition | None, objective: str, depth: int | None) -> list[Ranking]:
    """The best of each objective of a search; none of a grid."""
    if search is None:
        return []
    asked = search.objectives if objective == "loss" else [objective]
    return [best(store, None if name in LOSSES else name, depth, top=1) for name in asked]


def _answers(
    runs: pd.DataFrame,
    loss: str,
    card: Card | None,
    cells: Cells | None,
    by_depth: tuple[PageTable, str] | None,
) -> Iterator[Line]:
    """What one run reached, or the answers of a grid."""
    if len(runs) == 1:
        yield from (run_line(question, runs.iloc[0].to_dict(), loss) for question in OF_A_RUN)
    elif card and cells:
        of_depth = depth_answer(cells)
        known = [row for row in by_depth[0].rows if row[4].key != ""] if by_depth else []
        known.sort(key=lambda row: quantities.sign(card.recipe.objective) * -float(row[4].key))
        depths = [(int(row[0].key), row[1].text, row[4].text) for row in known]
        lines = (
            recipe_line(card, depths),
            variance_line(variance_answer(cells), VARIANCE),
            depth_line(of_depth),
            cost_line(card),
        )
        yield from (lines[2], *lines[:2], lines[3]) if of_depth.judged else lines  # at equal FLOPs depth was asked for


def recipe_card(
    found: Evidence, folders: Sequence[Path], depth: int | None, verified: Card | None, compute: Worths
) -> Card:
    """The recipe's card: `verified`, or one built from the evidence, with the verification that lies next to the
    folders, if any. Raises ValueError if `verified` holds another recipe."""
    card = derive_card(found.runs, depth, found.cells.outcome, folders=folders, evidence=found, compute=compute)
    if verified is None:
        return card
    of_card = claim_of(verified.recipe)
    of_runs = claim_of(card.recipe)
    if of_card != of_runs:
        raise ValueError(
            f"this card verified {of_card}, but these runs recommend {of_runs}; give the card of their recipe"
        )
    return verified


def findings(
    runs: pd.DataFrame,
    trained: pd.DataFrame | None,
    cells: Cells | None,
    card: Card | None,
    effects: pd.DataFrame,
    links: Sequence[LinkEvidence],
    n_failed: int,
    damaged: Sequence[DamagedRun],
) -> Iterator[str]:
    """What the summary tells, the most important first: of the effects shown on the loss at the deepest depth, and of
    links, a few."""
    shown = effects[effects["verdict"].isin(["lower", "higher"])]
    on_loss = shown[shown["outcome"].isin([OWN, COMMON])]
    at_depth = on_loss[on_loss["n_layers"] == on_loss["n_layers"].max()]
    judged = compared(cells) if cells else trained
    return summary(
        card,
        counts(trained, len(without_measured_models(runs)), int(runs["model"].notna().sum())),
        (len(effects), len(shown)),
        at_depth.loc[at_depth["estimate"].abs().sort_values(ascending=False).index][:MOST_IN_SUMMARY],
        [link for verdict in LINK_MEANINGS for link in links if link.verdict == verdict][:MOST_IN_SUMMARY],
        [] if judged is None else cautions(judged),
        n_failed,
        damaged,
    )


def table_of_models(store: Store) -> tuple[PageTable, str] | None:
    """The depth that measured models use, and its caption; None without any."""
    found = answered(store, "models")
    table = found.result.without_empty()
    caption = f"{found.query.asks} {found.query.explains}"
    return (table_of(dict.fromkeys(table.columns, ""), table.rows), caption) if table.rows else None


def table_of_failures(folders: Sequence[Path], runs: pd.DataFrame) -> tuple[PageTable, int]:
    """Number of runs without a result by state and cause: diverged ones from the store, others from the folders; and
    of all."""
    diverged = runs[runs["outcome"] == "diverged"]
    causes = Counter(("diverged", str(cause)) for cause in diverged["diverged_cause"].fillna("cause unknown"))
    for folder in folders:
        if (folder / "work").is_dir() or is_pack(folder):
            states = scan(ResultsIndex(folder, next(iter(definitions_of([folder])), None)))
            reasons = [(run.state, run.reason or "no reason given") for run in states if run.state in UNFINISHED]
            causes.update((state, why.partition(":")[0] if state == "pruned" else why) for state, why in reasons)
    rows = ((n, state, cause) for (state, cause), n in causes.most_common())
    return table_of({"runs": "", "state": "", "cause": ""}, rows), causes.total()


def table_of_methods(runs: PageTable, links: Sequence[LinkEvidence]) -> PageTable:
    """The definition of every measured quantity in these, with its unit."""
    names = {name for link in links for name in (link.within.cause, link.within.effect)}
    names.update(column.name for column in runs.columns)
    on_page = [column for column in quantities.RUNS if column.name in names]
    columns = ("quantity", "unit", "definition", "source")
    return table_of(dict.fromkeys(columns, ""), ((q.name, q.unit, q.meaning, q.source or "–") for q in on_page))


def table_of_provenance(runs: pd.DataFrame) -> PageTable:
    """The facts in the runs' manifests, each distinct value with its number of runs."""
    facts = pd.DataFrame([manifest_facts(manifest_of(folder)) for folder in runs["folder"]])
    facts.insert(0, "device", runs["device"].to_numpy())
    rows = [(name, value, n) for name in facts for value, n in Counter(facts[name].dropna()).most_common()]
    started = sorted(runs["started"].dropna())
    rows += [("started", f"{started[0]} to {started[-1]}", len(started))] if started else []
    seconds = pd.to_numeric(runs["seconds"], errors="coerce").dropna()
    on_nodes = runs["node_hours"].dropna()
    time = "wall-clock time of all runs; a trunk counts in each of its branches"
    rows += [(time, f"{seconds.sum() / 3600:.3g} h", len(seconds))] if len(seconds) else []
    if len(on_nodes):
        rows.append(("node hours on a cluster, lost starts included", f"{on_nodes.sum():.3g} h", len(on_nodes)))
    return table_of({"fact": "", "value": "", "runs": ""}, rows)
