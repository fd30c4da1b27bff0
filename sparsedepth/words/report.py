"""Words of the report and of the questions on variance and depth: their answers, and the findings in sentences."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sparsedepth.quantities.levels import ALPHA, POWER
from sparsedepth.quantities.quantity import Row
from sparsedepth.words.best import degenerate_text
from sparsedepth.words.differences import baseline_text, data_text, depth_text
from sparsedepth.words.effects import (
    budget_text,
    compared_at,
    effect_sentence,
    measured_nowhere,
    own_lr_line,
    second_look_lines,
    size_text,
    unit_text,
    untuned_line,
)
from sparsedepth.words.plain_text import commas, counted, listed, sentence_of, wrapped
from sparsedepth.words.recipe import told_by_outcome, verification_text
from sparsedepth.words.runs import damage_text
from sparsedepth.words.scaling import at_largest, flops_text
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.effects.cells import Cells
    from sparsedepth.effects.chain import LinkEvidence
    from sparsedepth.recipe.card import Card
    from sparsedepth.report.answers import Answer
    from sparsedepth.scaling.crossover import Crossover
    from sparsedepth.store.best import Ranking
    from sparsedepth.store.checksums import DamagedRun

VARIANCE, NEEDED = "residual_variance_last", "needed_layers"
SHOWN = ("lower", "higher")
MOST_NAMED = 2
NO_COST = "no runs at equal FLOPs, so the cost of depth is not judged"
LINK_MEANINGS = {
    "causes": "an intervention on the first alone changed the second",
    "predicts": "it predicts held-out depths, which does not show a cause",
    "associated": "an association, which does not show a cause",
}
"""Verdict on a link -> its meaning; the strongest first."""


def whole_answer(answer: "Answer", width: int | None = None) -> str:
    """Sentence, table and notes."""
    head = wrapped([answer.sentence], width)
    table = fitted_table(answer.table, answer.optional, width).text if answer.table.rows else ""
    return f"{head}{table}\n{wrapped(answer.notes, width) if table else ''}".rstrip("\n")


def with_baseline(setting: str, sentence: str) -> str:
    """The sentence of an answer whose baseline is this setting."""
    return f"With {setting} as the baseline: {sentence[:1].lower()}{sentence[1:]}"


# Variance


def variance_sentence(variance: "pd.DataFrame") -> str:
    """On the deepest depth with an effect."""
    judged = variance[variance["estimate"].notna()]
    if judged.empty:
        return f"No setting is compared in its residual variance: {variance['reason'].iloc[-1]}."
    depth = judged["n_layers"].max()
    at = variance[variance["n_layers"] == depth]
    lower, higher, decided = ([*at.loc[at["verdict"] == word, "setting"]] for word in (*SHOWN, "lr decides"))
    if lower or higher:
        shown = [(word, names) for word, names in (("lower", lower), ("raise", higher)) if names]
        first, *second = (f"{_named(names)} {word}{'s' * (len(names) == 1)}" for word, names in shown)
        text = f"At {depth} layers {first} the residual variance{''.join(f', and {other} it' for other in second)}"
    else:
        text = f"At {depth} layers no setting is shown to change the residual variance{_missed(at)}"
    return f"{text}{f'; lr decides for {_named(decided)}' if decided else ''}."


def harm_text(harm: Mapping[str, Sequence[str]]) -> str:
    """' There depth_scale=lns raises val_loss; n_kv_heads=1 lowers usefulness; so harm 2 more settings.'"""
    named = [f"{name} {listed(done)}" for name, done in sorted(harm.items(), key=lambda one: one[0].count(","))]
    more = counted(len(named) - MOST_NAMED, "more setting") if len(named) > MOST_NAMED else ""
    return f" There {'; '.join(named[:MOST_NAMED])}{f'; so harm {more}' if more else ''}." if named else ""


def raised_line(n_layers: int, raised: Mapping[str, Sequence[str]]) -> str:
    """'raised at 12 layers: weight_sparsity by weight_decay=1; usefulness by no setting'; '' without a quantity."""
    by = (f"{name} by {_named(settings) if settings else 'no setting'}" for name, settings in raised.items())
    return f"raised at {n_layers} layers: {'; '.join(by)}" if raised else ""


def variance_notes(
    cells: "Cells",
    raised: str,
    turned: Sequence[Row],
    looks: Sequence[Row],
    caution: str,
    n_more: int,
) -> tuple[str, ...]:
    """`raised`: what raises the other quantities; `turned`: settings of another sign at own lr; `looks`: rows with
    their second looks; `caution`: on the form of usefulness; `n_more`: settings that are not in the table."""
    decides = f"; lr decides: not shown, or of another sign, at the {cells.field} of one side" * cells.at_equal_lr
    notes = (
        raised,
        f"variance, lo, hi: {VARIANCE} of the setting over that of the baseline at n_layers"
        f"{compared_at(cells.field, cells.at_equal_lr)}, with 95% interval; verdict_at: by depth; lower, higher: "
        f"adjusted p below {ALPHA}{decides}",
        *map(own_lr_line, turned),
        *(line for row in looks for line in second_look_lines(row)),
        "other columns: differences from the baseline; *: lower or higher, as above"
        + "; lr: baseline -> setting" * any(row["lr"] is not None for row in looks),
        *((baseline_text(cells.settings), data_text(cells.settings)) if cells.settings else ()),
        budget_text(cells),
        caution,
        f"{counted(n_more, 'more setting')}: --format csv" if n_more else "",
    )
    return tuple(filter(None, notes))


def _named(settings: Sequence[str]) -> str:
    """'depth_scale=lns, weight_decay=1 and 3 more settings', those of the fewest fields first."""
    ordered = sorted(settings, key=lambda name: name.count(","))
    named = ordered[:MOST_NAMED] if len(ordered) > MOST_NAMED + 1 else ordered
    if len(ordered) > len(named):
        named = [*named, counted(len(ordered) - len(named), "more setting")]
    return listed(named)


def _missed(rows: "pd.DataFrame") -> str:
    """'; a change of about 0.5 nat/token or more would probably have been seen'."""
    if rows["detectable"].isna().all():
        return ""
    size = abs(rows["detectable"].median())
    unit = rows["unit"].iloc[0]
    by = "by a factor " if unit == "ln ratio" else ""
    change = f"{by}of about {size_text(size, unit, times='')}{unit_text(unit)}"
    return f"; a change {change} or more would probably have been seen"


# Depth


def depth_sentence(compared: Mapping[str, "pd.DataFrame"], crossovers: Sequence["Crossover"], cells: "Cells") -> str:
    """`compared`: basis ('tokens', 'flops', or 'none' alone) -> rows of the depths at this basis; `crossovers`: of the
    baseline, those that were judged."""
    if "none" in compared:
        return f"The depths differ in tokens and in FLOPs: what depth alone does is not shown; {NO_COST}."
    tokens, flops = compared["tokens"], compared["flops"]
    at_tokens = _at_equal_tokens(tokens, cells) if len(tokens) else "no runs at equal tokens"
    cost = NO_COST
    if crossovers:
        cost = f"at equal FLOPs {_cost_text(crossovers)}"
    elif len(flops):
        budget = flops_text(flops["train_flops"].mean())
        cost = f"at equal FLOPs ({budget}) {cells.outcome} is not shown to differ between depths{_missed(flops)}"
    return sentence_of(f"{at_tokens}; {cost}")


def _at_equal_tokens(rows: "pd.DataFrame", cells: "Cells") -> str:
    shown = rows[rows["verdict"].isin(SHOWN)].sort_values("estimate")
    if shown.empty:
        return f"at equal tokens {cells.outcome} is not shown to differ between depths{_missed(rows)}"
    best = shown.iloc[0]
    size = f"{abs(best['estimate']):.3g} {cells.unit} {'less' if best['estimate'] < 0 else 'more'}"
    return f"at equal tokens {best['n_layers']} layers have {size} {cells.outcome} than {int(rows['n_layers'].min())}"


def _cost_text(crossovers: Sequence["Crossover"]) -> str:
    """'8 and 16 layers are worth their cost (16: at 1e13 FLOPs -0.08 nat/token (...) against 8 layers); ...'"""
    parts = []
    for verdict, known in {"worth it": "", "not worth it": "not ", "not known": "not known to be "}.items():
        if of_verdict := [one for one in crossovers if one.verdict == verdict]:
            names = [str(one.n_layers) for one in of_verdict]
            size = at_largest(of_verdict[-1])
            size = f" ({names[-1]}: {size})" if len(names) > 1 else f": {size}"
            parts.append(f"{listed(names)} layers are {known}worth their cost{size}")
    return "; ".join(parts)


def depth_notes(cells: "Cells", columns: Sequence[str], reasons: Iterable[str]) -> tuple[str, ...]:
    """`columns`: of the table; `reasons`: '16 layers: ...' for withheld verdicts, and second looks."""
    own = f", each at its own {cells.field}" if cells.field else ""
    seen = f", with 95% interval; detectable: the effect that would have been seen ({POWER:.0%} power)"
    seen *= "lo" in columns
    notes = (
        f"fitted: {cells.outcome}{own}; effect: minus that of the shallowest depth [{cells.unit}]{seen}",
        "equal: what both depths share; tokens, flops (training): of a run, relative to the shallowest depth",
        "worth_it: less loss than every shallower depth at equal FLOPs (yes), or more than one of them (no)"
        if "worth_it" in columns
        else "",
        "" if NEEDED in columns else measured_nowhere(NEEDED),
        untuned_line(cells.shared_lr),
        *reasons,
        *((*depth_text(cells.settings).splitlines(), baseline_text(cells.settings)) if cells.settings else ()),
    )
    return tuple(filter(None, notes))


# The summary


def summary(
    card: "Card | None",
    counted_runs: str,
    n_effects: tuple[int, int],
    largest: "pd.DataFrame",
    links: Iterable["LinkEvidence"],
    cautions: Iterable[str],
    n_failed: int,
    damaged: Sequence["DamagedRun"],
) -> Iterator[str]:
    """The findings beside the answers, the most important first. `n_effects`: all, and those shown."""
    if card:
        if card.verification:
            yield f"The recipe was {verification_text(card)}."
        yield from (f"Tests {' '.join(line.split())}." for line in told_by_outcome(card))
    yield counted_runs
    n_all, n_shown = n_effects
    if n_all:
        yield f"{n_shown} of {counted(n_all, 'effect')} are shown to be lower or higher (table of effects)."
    yield from (f"{effect_sentence(row)}." for row in largest.to_dict("records"))
    yield from map(link_sentence, links)
    yield from (f"{caution}." for caution in cautions)
    if n_failed:
        yield f"{counted(n_failed, 'run')} diverged, failed or ended early; their causes are listed below."
    if damaged:
        yield f"{damage_text(damaged)}."


def link_sentence(evidence: "LinkEvidence") -> str:
    link = evidence.within
    assert link.rho is not None and link.lo is not None and link.hi is not None
    return (
        f"At equal depth, more {link.cause} goes with {'more' if link.rho > 0 else 'less'} {link.effect} "
        f"(Spearman {link.rho:+.2f}, 95% interval {link.lo:+.2f} to {link.hi:+.2f}, {counted(link.n_runs, 'run')} of "
        f"{counted(link.n_settings, 'combination')} of settings): "
        f"{LINK_MEANINGS[evidence.verdict]}."
    )


def search_sentences(ranking: "Ranking", search: str, folders: str) -> Iterator[str]:
    """Cautions, and the commands for more. `search`: what it was; `folders`: as in a command."""
    if degenerate := degenerate_text(ranking):
        yield f"{degenerate}."
    yield sentence_of(f"{search}: sparsedepth best {folders} --again again.yaml")
    yield f"What each axis does: sparsedepth effects {folders}."


def counts(results: "pd.DataFrame | None", n_trained: int, n_models: int) -> str:
    """'200 runs of 23 configurations finished, at n_layers 4, 8, with 6 to 16 seeds each', and measured models.
    `results`: rows of `runs`; None without trained runs."""
    trained = ""
    if results is not None and results.empty:
        trained = f"{counted(n_trained, 'run')} of tuning, and none of the results yet"
    elif results is not None:
        finished = results[results["outcome"] == "ok"]
        depths = commas(sorted({*results["n_layers"]}))
        n_seeds = finished.groupby("cell_id")["seed"].nunique()
        seeds = " to ".join(dict.fromkeys(map(str, (n_seeds.min(), n_seeds.max())))) if len(n_seeds) else "0"
        seeds = seeds if n_seeds.any() or n_seeds.empty else "unknown"
        trained = (
            f"{counted(len(finished), 'run')} of {counted(len(n_seeds), 'configuration')} finished, "
            f"at n_layers {depths}, with {seeds} seed{'s' * (seeds != '1')} each"
        )
    models = f"{counted(n_models, 'model')} measured without a known training configuration" if n_models else ""
    return f"{'; '.join(filter(None, (trained, models)))}."
