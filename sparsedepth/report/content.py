"""What the report says, before it is a page: sentences and tables, computed from the rows of the store."""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.images import unit_for
from sparsedepth.config.sweep import SweepDefinition, read_definition
from sparsedepth.effects.causal_evidence import LinkEvidence, weigh
from sparsedepth.effects.chain import cautions
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.sentences import contrast_sentence, counted
from sparsedepth.effects.text_report import evidence_lines, heading_of
from sparsedepth.recipe.build_card import build_card
from sparsedepth.recipe.card import Card
from sparsedepth.recipe.card_text import headline, rule_with_verification
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.provenance import manifest_facts, manifest_of
from sparsedepth.recipe.trial import claim_of, with_trial
from sparsedepth.report.by_depth import depth_sentence, range_text, recipes_by_depth
from sparsedepth.report.tables import Table, all_contrasts, table_of, table_of_effects, table_of_runs
from sparsedepth.store.best import best
from sparsedepth.store.checksums import damage_text
from sparsedepth.store.comparable_loss import COMMON, OWN, loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.pack import is_pack
from sparsedepth.store.search import Search, search_of
from sparsedepth.store.tuning_roles import result_rows, without_measured_models
from sparsedepth.sweep.status import scan

UNFINISHED = ("failed", "infeasible", "pruned")
MOST_IN_SUMMARY = 4
SHOWS = {
    "causes": "an intervention on the one alone moved the other",
    "predicts": "depths that were held out are predicted, which shows no cause",
    "associated": "an association, which shows no cause",
}
"""Word of a link -> what it says; the strongest first."""


@dataclass(frozen=True, kw_only=True)
class Content:
    title: str
    definitions: tuple[SweepDefinition, ...]
    summary: tuple[str, ...]
    card: Card | None
    """Of the recipe, verified where it was; None where no run was trained, and of a search."""
    by_depth: tuple[Table, str] | None
    """The recipe of each depth, and what the table says; None as `card`."""
    runs: Table
    effects: Table | None
    links: tuple[tuple[str, tuple[str, ...]], ...]
    """(cause -> effect: word, what the word rests on)"""
    failures: Table
    methods: Table
    provenance: Table
    run_ids: tuple[str, ...]


def content(
    store: Store, folders: Sequence[Path], depth: int | None = None, objective: str = "loss", tried: Card | None = None
) -> Content:
    """Everything but the pictures; `tried` is the recipe's card after it was verified.

    Raises ValueError for an objective without a better direction, and for a card that does not verify this very recipe.
    """
    runs = store.frame("select * from runs order by run_id")
    definitions = tuple(one for folder in folders if (one := read_definition(folder)) is not None)
    known = result_rows(runs).reset_index(drop=True) if len(without_measured_models(runs)) else None
    loss = loss_of(runs)
    search = search_of(folders) if tried is None else None
    searched = search_sentences(store, search, folders, depth, objective) if search and known is not None else ()
    objective = loss if objective == "loss" else objective
    compared = None if search else known  # no proposal of a search is a baseline
    effects = [] if compared is None else all_contrasts(without_measured_models(runs))
    links = [] if compared is None else [link for link in weigh(compared) if link.within.rho is not None]
    card = None if compared is None else card_of(runs, compared, folders, depth, objective, tried)
    failures = table_of_failures(folders, runs)
    runs_table = table_of_runs(runs)
    names = [column.name for column in runs_table.columns]
    skipped = (f"{damage_text(store.damaged)}.",) if store.damaged else ()
    return Content(
        title=", ".join(one.name for one in definitions) or ", ".join(map(str, folders)),
        definitions=definitions,
        summary=(*searched, *summarise(runs, known, card, effects, links, failures), *skipped),
        card=card,
        by_depth=None if compared is None else recipes_by_depth(runs, objective),
        runs=runs_table,
        effects=table_of_effects(effects) if effects else None,
        links=tuple((heading_of(one), tuple(evidence_lines(one))) for one in links),
        failures=failures,
        methods=table_of_methods(
            [*names, *(name for link in links for name in (link.within.cause, link.within.effect))],
            runs["corpus"].dropna(),
        ),
        provenance=table_of_provenance(runs),
        run_ids=tuple(runs["run_id"]),
    )


def card_of(
    runs: pd.DataFrame,
    known: pd.DataFrame,
    folders: Sequence[Path],
    depth: int | None,
    objective: str,
    tried: Card | None = None,
) -> Card:
    """The recipe's card, from the rows of `runs` and the trained, chosen ones among them, with the trial beside the
    folders, if any; or the verified one that was `tried`.
    Raises ValueError where that tried another recipe, or none."""
    recipe = derive(runs, depth, objective)
    if tried is None:
        return with_trial(build_card(runs, recipe, folders=folders), folders)
    if tried.held_out.verification is None:
        raise ValueError("this card holds no verification: give the one that `sparsedepth recipe verify` wrote")
    theirs, ours = claim_of(tried.recipe), claim_of(recipe)
    if theirs != ours:
        raise ValueError(f"this card tried {theirs}, but these runs recommend {ours}")
    return tried


def search_sentences(
    store: Store, search: Search, folders: Sequence[Path], depth: int | None, objective: str
) -> tuple[str, ...]:
    """The best proposal of a search, what that is worth, and what tells more. Raises ValueError as `best` does."""
    ranking = best(store, None if objective == "loss" else objective, depth, top=1)
    row = ranking.table.records()[0]
    folder = shlex.join(map(str, folders))
    value = "no value" if row[ranking.by] is None else f"{row[ranking.by]:.4g}"
    setting = f"n_layers={ranking.knobs[0]['n_layers']}, {ranking.settings[0]}"
    return (
        f"Best of {counted(ranking.n_cells, 'proposal')}: {ranking.by} {value} at {setting}.",
        f"{search.text[0].upper()}{search.text[1:]}: sparsedepth best {folder} --again again.yaml.",
        f"What each axis does: sparsedepth effects {folder}.",
    )


def summarise(
    runs: pd.DataFrame,
    known: pd.DataFrame | None,
    card: Card | None,
    effects: Sequence[Contrast],
    links: Sequence[LinkEvidence],
    failures: Table,
) -> list[str]:
    """What these runs say, in plain sentences, the most important first."""
    sentences = [rule_with_verification(card)] if card else []
    sure = headline(card) if card else []  # how much, how sure, at what cost; verification stands with the rule
    sentences += [f"{heading}: {text}." for heading, text in sure if heading != "Verification"]
    if card and known is not None and (along := depth_sentence(known, loss_of(runs))):
        sentences.append(along)
    sentences.append(counts_text(runs, known))
    distinct = [effect for effect in effects if effect.verdict != "not distinguishable"]
    if effects:
        barred = sum(effect.verdict_ignoring_tuning != effect.verdict for effect in effects)
        uneven = f"; {barred} more do, but with uneven tuning" if barred else ""
        sentences.append(
            f"{len(distinct)} of {counted(len(effects), 'effect')} exceed the noise of seeds after Holm's "
            f"correction over all that were tested on an outcome at a depth{uneven}."
        )
    on_loss = [effect for effect in distinct if effect.outcome in (OWN, COMMON)]
    deepest = max((effect.n_layers or 0 for effect in on_loss), default=0)
    at_depth = [effect for effect in on_loss if (effect.n_layers or 0) == deepest]
    at_depth.sort(key=lambda effect: -abs(effect.effect.mean or 0.0))
    sentences += [f"{contrast_sentence(effect)}." for effect in at_depth[:MOST_IN_SUMMARY]]
    named = [effect for effect in distinct if effect not in at_depth[:MOST_IN_SUMMARY]]
    if others := _named(named):
        own = any(effect.tuned.startswith("each") for effect in named)
        sentences.append(
            f"{'The others' if at_depth else 'They are'}: {others}."
            f"{' Each setting has its own lr, which moves these as well.' if own else ''}"
        )
    earned = sorted((link for link in links if link.word in SHOWS), key=lambda link: list(SHOWS).index(link.word))
    sentences += [_together(link) for link in earned[:MOST_IN_SUMMARY]]
    sentences += [f"{caution}." for caution in ([] if known is None else cautions(known))]
    n_failed = sum(int(row[0].key or 0) for row in failures.rows)
    if n_failed:
        sentences.append(f"{counted(n_failed, 'run')} diverged, failed or ended early; their causes are listed below.")
    return sentences


def _named(effects: Sequence[Contrast]) -> str:
    """'residual_variance_last lower with depth_scale=lns at n_layers 4, 12; usefulness ...'."""
    depths: dict[str, dict[str, list[str]]] = {}
    for effect in effects:
        of_setting = depths.setdefault(effect.outcome, {}).setdefault(f"{effect.verdict} with {effect.setting}", [])
        of_setting += [] if effect.n_layers is None else [str(effect.n_layers)]

    def places(at: Sequence[str]) -> str:
        return f" at n_layers {', '.join(at)}" if at else ""

    return "; ".join(
        f"{outcome} {', '.join(text + places(at) for text, at in by_setting.items())}"
        for outcome, by_setting in depths.items()
    )


def _together(evidence: LinkEvidence) -> str:
    link = evidence.within
    assert link.rho is not None and link.lo is not None and link.hi is not None
    return (
        f"At equal depth, more {link.cause} goes with {'more' if link.rho > 0 else 'less'} {link.effect} "
        f"(Spearman {link.rho:+.2f}, 95% interval {link.lo:+.2f} to {link.hi:+.2f}, {counted(link.n_runs, 'run')} of "
        f"{counted(link.n_units, 'combination')} of settings): "
        f"{SHOWS[evidence.word]}."
    )


def counts_text(runs: pd.DataFrame, known: pd.DataFrame | None) -> str:
    """'200 runs of 23 configurations finished, at n_layers 4, 8, with 6 to 16 seeds each', and what else is here."""
    n_models = int(runs["model"].notna().sum())
    parts = []
    if known is not None:
        finished = known[known["outcome"] == "ok"]
        depths = ", ".join(map(str, sorted(set(known["n_layers"]))))
        seeds = range_text(finished.groupby("cell_id")["seed"].nunique())
        parts.append(
            f"{counted(len(finished), 'run')} of {counted(finished['cell_id'].nunique(), 'configuration')} finished, "
            f"at n_layers {depths}, with {seeds} seed{'s' * (seeds != '1')} each"
        )
    if n_models:
        parts.append(f"{counted(n_models, 'model')} measured without a known training configuration")
    return f"{'; '.join(parts)}."


def table_of_failures(folders: Sequence[Path], runs: pd.DataFrame) -> Table:
    """How many runs have no result, by state and cause: diverged ones of the store, others of the sweeps' folders."""
    diverged = runs[runs["outcome"] == "diverged"]
    causes = Counter(("diverged", str(cause)) for cause in diverged["diverged_cause"].fillna("cause unknown"))
    for folder in folders:
        if (folder / "work").is_dir() or is_pack(folder):
            states = scan(folder, read_definition(folder))
            causes.update((one.state, one.reason or "no reason given") for one in states if one.state in UNFINISHED)
    columns = [("runs", ""), ("state", ""), ("cause", "")]
    return table_of(columns, ((n, state, cause) for (state, cause), n in causes.most_common()))


def table_of_methods(names: Sequence[str], corpora: Iterable[object]) -> Table:
    """The definition of every measured quantity that the page names, its unit on these corpora."""
    named = [column for column in quantities.RUNS if column.name in names]
    columns = [("quantity", ""), ("unit", ""), ("definition", ""), ("source", "")]
    return table_of(columns, ((q.name, unit_for(q.unit, corpora), q.meaning, q.source or "–") for q in named))


def table_of_provenance(runs: pd.DataFrame) -> Table:
    """What the runs' manifests say, each distinct value with its number of runs."""
    facts: dict[str, Counter[str]] = {}
    for row in runs[["folder", "device", "packages"]].itertuples(index=False):
        for name, value in (("device", row.device), *manifest_facts(manifest_of(row.folder)).items()):
            if isinstance(value, str) and value:
                facts.setdefault(name, Counter())[value] += 1
    started = sorted(runs["started"].dropna())
    times = [("started", f"{started[0]} to {started[-1]}", len(started))] if started else []
    total = pd.to_numeric(runs["seconds"], errors="coerce").sum()
    times.append(("wall-clock time of all runs", f"{total / 3600:.3g} h", len(runs)))
    if len(on_nodes := runs["node_hours"].dropna()):
        times.append(("node hours on a cluster, lost starts included", f"{on_nodes.sum():.3g} h", len(on_nodes)))
    rows = [(name, value, n) for name, values in facts.items() for value, n in values.most_common()]
    return table_of([("fact", ""), ("value", ""), ("runs", "")], [*rows, *times])
