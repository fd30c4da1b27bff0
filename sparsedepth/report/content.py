"""The sentences and tables of the report, computed from the rows of the store."""

import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.sweep import SweepDefinition, read_definition
from sparsedepth.effects.cells import Cells
from sparsedepth.effects.chain import LinkEvidence, cautions, chain_evidence
from sparsedepth.effects.frame import compared
from sparsedepth.plots.forest import COLUMNS, cells_of_store, effects_of
from sparsedepth.plots.runs import all_runs
from sparsedepth.recipe.build_card import claim_of, derive_card, manifest_facts, manifest_of
from sparsedepth.recipe.card import Card
from sparsedepth.recipe.choose import Evidence
from sparsedepth.recipe.text import sentence, tests_lines, verification_text
from sparsedepth.report.answers import depth_answer, variance_answer
from sparsedepth.report.tables import PageTable, best_by_depth, table_of, table_of_effects, table_of_runs
from sparsedepth.scaling.speedup import Worths, worth
from sparsedepth.store.best import best
from sparsedepth.store.checksums import damage_text
from sparsedepth.store.comparable_loss import COMMON, OWN, loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.packs import is_pack
from sparsedepth.store.search import search_of
from sparsedepth.store.tuning_roles import result_rows, without_measured_models
from sparsedepth.sweep.status import scan
from sparsedepth.words.best import degenerate_text
from sparsedepth.words.chain import caution_line, evidence_lines, link_heading
from sparsedepth.words.effects import effect_sentence
from sparsedepth.words.plain_text import counted
from sparsedepth.words.runs import search_text

UNFINISHED = ("failed", "infeasible", "pruned")
MOST_IN_SUMMARY = 4
LINK_MEANINGS = {
    "causes": "an intervention on the first alone changed the second",
    "predicts": "it predicts held-out depths, which does not show a cause",
    "associated": "an association, which does not show a cause",
}
"""Verdict on a link -> its meaning; the strongest first."""


@dataclass(frozen=True, kw_only=True)
class Content:
    summary: tuple[str, ...]
    card: Card | None
    """The recipe's card, the verified one if there is one; None without trained runs, and for a search."""
    by_depth: tuple[PageTable, str] | None
    """The recipe of each depth, and the caption of the table; None as `card`."""
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
    loss = loss_of(runs)
    search = search_of(folders) if verified is None else None
    searched = search_sentences(store, search, folders, depth, objective) if search and trained is not None else ()
    objective = loss if objective == "loss" else objective
    cells = None if search or trained is None else cells_of_store(store)  # a search has no baseline
    found = None if cells is None else Evidence(cells.of_outcome(objective))
    compute = worth(store, objective) if found else {}
    card = None if found is None else recipe_card(found, folders, depth, verified, compute)  # can refuse the card
    effects = pd.DataFrame(columns=[*COLUMNS]) if cells is None else effects_of(store)
    chain = [] if cells is None else chain_evidence(cells)
    links = [link for link in chain if link.within.rho is not None]
    failures = table_of_failures(folders, runs)
    runs_table = table_of_runs(runs)
    on_page = {column.name for column in runs_table.columns}
    on_page |= {name for link in links for name in (link.within.cause, link.within.effect)}
    skipped = (f"{damage_text(store.damaged)}.",) if store.damaged else ()
    return Content(
        summary=(*searched, *summarise(runs, trained, cells, card, effects, links, failures), *skipped),
        card=card,
        by_depth=None if found is None else best_by_depth(found),
        runs=runs_table,
        effects=None if cells is None or effects.empty else table_of_effects(effects, cells, compute),
        links=tuple((link_heading(link), tuple(evidence_lines(link))) for link in links),
        failures=failures,
        methods=table_of_methods(on_page),
        provenance=table_of_provenance(runs),
        run_ids=tuple(runs["run_id"]),
    )


def recipe_card(
    found: Evidence, folders: Sequence[Path], depth: int | None, verified: Card | None, compute: Worths
) -> Card:
    """The recipe's card: `verified`, or one built from the evidence, with the verification that lies next to the
    folders, if any. Raises ValueError if `verified` holds another recipe."""
    card = derive_card(found.runs, depth, found.cells.outcome, folders=folders, evidence=found, compute=compute)
    if verified is None:
        return card
    of_card, of_runs = claim_of(verified.recipe), claim_of(card.recipe)
    if of_card != of_runs:
        raise ValueError(
            f"this card verified {of_card}, but these runs recommend {of_runs}; give the card of their recipe"
        )
    return verified


def search_sentences(
    store: Store, search: SweepDefinition, folders: Sequence[Path], depth: int | None, objective: str
) -> tuple[str, ...]:
    """The best proposal of a search, cautions, and the commands for more. Raises ValueError as `best` does."""
    ranking = best(store, None if objective == "loss" else objective, depth, top=1)
    row = ranking.table.records()[0]
    folder, text = shlex.join(map(str, folders)), search_text(search)
    value = "no value" if row[ranking.by] is None else f"{row[ranking.by]:.4g}"
    setting = f"n_layers={ranking.knobs[0]['n_layers']}, {ranking.settings[0]}"
    return (
        f"Best of {counted(ranking.n_cells, 'proposal')}: {ranking.by} {value} at {setting}.",
        *([f"{degenerate}."] if (degenerate := degenerate_text(ranking)) else []),
        f"{text[0].upper()}{text[1:]}: sparsedepth best {folder} --again again.yaml.",
        f"What each axis does: sparsedepth effects {folder}.",
    )


def summarise(
    runs: pd.DataFrame,
    trained: pd.DataFrame | None,
    cells: Cells | None,
    card: Card | None,
    effects: pd.DataFrame,
    links: Sequence[LinkEvidence],
    failures: PageTable,
) -> list[str]:
    """The findings as sentences, the most important first."""
    sentences = []
    if card and cells:
        sentences = [sentence(card), variance_answer(cells).sentence, depth_answer(cells).sentence]
    if card and card.verification:
        sentences.append(f"The recipe was {verification_text(card)}.")
    if card and card.tests:
        sentences.append(f"Tests: {'; '.join(' '.join(line.split()) for line in tests_lines(card))}.")
    sentences.append(counts_text(runs, trained))
    shown = effects[effects["verdict"].isin(["lower", "higher"])]
    if len(effects):
        sentences.append(
            f"{len(shown)} of {counted(len(effects), 'effect')} are shown to be lower or higher (table of effects)."
        )
    on_loss = shown[shown["outcome"].isin([OWN, COMMON])]
    at_depth = on_loss[on_loss["n_layers"] == on_loss["n_layers"].max()]
    at_depth = at_depth.loc[at_depth["estimate"].abs().sort_values(ascending=False).index][:MOST_IN_SUMMARY]
    sentences += [f"{effect_sentence(row)}." for row in at_depth.to_dict("records")]
    linked = [link for verdict in LINK_MEANINGS for link in links if link.verdict == verdict]
    sentences += [_link_sentence(link) for link in linked[:MOST_IN_SUMMARY]]
    judged = compared(cells) if cells else trained
    sentences += [f"{caution_line(caution)}." for caution in ([] if judged is None else cautions(judged))]
    if n_failed := sum(int(row[0].key or 0) for row in failures.rows):
        sentences.append(f"{counted(n_failed, 'run')} diverged, failed or ended early; their causes are listed below.")
    return sentences


def _link_sentence(evidence: LinkEvidence) -> str:
    link = evidence.within
    assert link.rho is not None and link.lo is not None and link.hi is not None
    return (
        f"At equal depth, more {link.cause} goes with {'more' if link.rho > 0 else 'less'} {link.effect} "
        f"(Spearman {link.rho:+.2f}, 95% interval {link.lo:+.2f} to {link.hi:+.2f}, {counted(link.n_runs, 'run')} of "
        f"{counted(link.n_settings, 'combination')} of settings): "
        f"{LINK_MEANINGS[evidence.verdict]}."
    )


def counts_text(runs: pd.DataFrame, trained: pd.DataFrame | None) -> str:
    """'200 runs of 23 configurations finished, at n_layers 4, 8, with 6 to 16 seeds each', and measured models."""
    n_models = int(runs["model"].notna().sum())
    parts = []
    if trained is not None and trained.empty:
        parts.append(f"{counted(len(without_measured_models(runs)), 'run')} of tuning, and none of the results yet")
    elif trained is not None:
        finished = trained[trained["outcome"] == "ok"]
        depths = ", ".join(map(str, sorted(set(trained["n_layers"]))))
        n_seeds = finished.groupby("cell_id")["seed"].nunique()
        seeds = " to ".join(dict.fromkeys(map(str, (n_seeds.min(), n_seeds.max())))) if len(n_seeds) else "0"
        parts.append(
            f"{counted(len(finished), 'run')} of {counted(finished['cell_id'].nunique(), 'configuration')} finished, "
            f"at n_layers {depths}, with {seeds} seed{'s' * (seeds != '1')} each"
        )
    if n_models:
        parts.append(f"{counted(n_models, 'model')} measured without a known training configuration")
    return f"{'; '.join(parts)}."


def table_of_failures(folders: Sequence[Path], runs: pd.DataFrame) -> PageTable:
    """Number of runs without a result by state and cause: diverged ones from the store, others from the folders."""
    diverged = runs[runs["outcome"] == "diverged"]
    causes = Counter(("diverged", str(cause)) for cause in diverged["diverged_cause"].fillna("cause unknown"))
    for folder in folders:
        if (folder / "work").is_dir() or is_pack(folder):
            states = scan(folder, read_definition(folder))
            causes.update((run.state, run.reason or "no reason given") for run in states if run.state in UNFINISHED)
    columns = [("runs", ""), ("state", ""), ("cause", "")]
    return table_of(columns, ((n, state, cause) for (state, cause), n in causes.most_common()))


def table_of_methods(names: Collection[str]) -> PageTable:
    """The definition of every measured quantity on the page, with its unit."""
    on_page = [column for column in quantities.RUNS if column.name in names]
    columns = [("quantity", ""), ("unit", ""), ("definition", ""), ("source", "")]
    return table_of(columns, ((q.name, q.unit, q.meaning, q.source or "–") for q in on_page))


def table_of_provenance(runs: pd.DataFrame) -> PageTable:
    """The facts in the runs' manifests, each distinct value with its number of runs."""
    facts: dict[str, Counter[str]] = {}
    for row in runs[["folder", "device", "packages"]].itertuples(index=False):
        for name, value in (("device", row.device), *manifest_facts(manifest_of(row.folder)).items()):
            if isinstance(value, str) and value:
                facts.setdefault(name, Counter())[value] += 1
    started = sorted(runs["started"].dropna())
    times = [("started", f"{started[0]} to {started[-1]}", len(started))] if started else []
    total = pd.to_numeric(runs["seconds"], errors="coerce").sum()
    times.append(
        ("wall-clock time of all runs; a trunk counts in each of its branches", f"{total / 3600:.3g} h", len(runs))
    )
    if len(on_nodes := runs["node_hours"].dropna()):
        times.append(("node hours on a cluster, lost starts included", f"{on_nodes.sum():.3g} h", len(on_nodes)))
    rows = [(name, value, n) for name, values in facts.items() for value, n in values.most_common()]
    return table_of([("fact", ""), ("value", ""), ("runs", "")], [*rows, *times])
