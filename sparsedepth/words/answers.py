"""The answers on top of the report, a line for each question: a sentence, its numbers, and the figure with them."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsedepth.quantities import IN_RUNS
from sparsedepth.words.effects import interval_text
from sparsedepth.words.plain_text import counted, listed, sentence_of
from sparsedepth.words.recipe import sentence
from sparsedepth.words.scaling import flops_text, multiplier_text

if TYPE_CHECKING:
    from sparsedepth.recipe.card import Card
    from sparsedepth.report.answers import Answer
    from sparsedepth.store.best import Ranking


class Line(NamedTuple):
    question: str
    answer: str
    effect: str = ""
    """With its interval."""
    verdict: str = ""
    basis: str = ""
    figure: str = ""


def recipe_line(card: "Card", by_depth: Sequence[tuple[int, str, str]]) -> Line:
    """`by_depth`: of each depth its number of layers, what to use there, and its loss, the lowest first."""
    effect = card.recipe.effect
    answer = sentence(card)
    if len(by_depth) > 1:
        depth, use, loss = by_depth[0]
        answer += f" Lowest {card.recipe.objective} of all depths: {loss}, {counted(depth, 'layer')}, {use}."
    line = Line("What to use, at which depth?", answer, verdict="not shown", figure="effects")
    if effect is None or effect.estimate is None:
        return line
    row = effect.model_dump()
    return line._replace(effect=interval_text(row), verdict=_verdict_text(row), basis=_basis_text(row))


def variance_line(answer: "Answer", outcome: str) -> Line:
    """On the setting with the largest effect shown at the deepest depth, or without one the largest."""
    rows = [row for row in _rows(answer) if row["outcome"] == outcome]
    line = Line("Does it lower the residual variance?", answer.sentence, verdict="not compared", figure="variance")
    if not rows:
        return line
    deepest = max(row["n_layers"] for row in rows)
    at = [row for row in rows if row["n_layers"] == deepest]
    row = max(at, key=lambda row: (row["verdict"] in ("lower", "higher"), abs(row["estimate"])))
    effect = f"{row['setting']} at {deepest} layers {interval_text(row)}"
    return line._replace(effect=effect, verdict=_verdict_text(row), basis=_basis_text(row))


def depth_line(answer: "Answer") -> Line:
    """On the deepest depth judged at equal FLOPs, else the deepest that was compared."""
    line = Line("Does depth earn its cost?", answer.sentence, verdict="not compared", figure="depth")
    if answer.judged:
        one = answer.judged[-1]
        row = {"estimate": one.estimate, "lo": one.lo, "hi": one.hi, "unit": "nat/token"}
        effect = f"{one.n_layers} against {one.against} layers {interval_text(row)}"
        basis = f"equal FLOPs ({flops_text(one.largest or math.nan)}), {counted(one.seeds, 'seed')}"
        return line._replace(effect=effect, verdict=one.verdict, basis=basis, figure="isoflop")
    rows = _rows(answer)
    if not rows:
        return line
    row = rows[-1]
    effect = f"{row['n_layers']} layers against the shallowest {interval_text(row)}"
    return line._replace(effect=effect, verdict=_verdict_text(row), basis=_basis_text(row))


def cost_line(card: "Card") -> Line:
    """Of the recipe, relative to the baseline; and what it is worth in compute, where three budgets were run."""
    recipe = card.recipe
    line = Line("At what cost?", "", verdict="counted", figure="pareto")
    if recipe.effect is None:
        return line._replace(answer="No setting is recommended, so nothing costs more than the baseline.")
    costs = {"training FLOPs": recipe.effect.flops, "parameters": recipe.effect.params_total}
    costs |= {"active parameters": recipe.effect.params_active, "time": recipe.effect.time}
    known = [f"×{ratio:.3g} {name}" for name, ratio in costs.items() if ratio is not None]
    names = " and ".join(change.setting for change in recipe.changes)
    answer = f"{names}: {listed(known)}, relative to the baseline." if known else f"{names}: its costs are not known."
    worth = recipe.changes[0].compute if len(recipe.changes) == 1 else None
    if worth is None:
        return line._replace(answer=answer, basis="the baseline at this depth")
    multiplier, lo, hi = worth
    shown = lo is not None and hi is not None and not lo <= 1 <= hi
    return line._replace(
        answer=answer,
        effect=f"worth {multiplier_text(multiplier, lo, hi, ' times the compute')}",
        verdict=("more" if multiplier > 1 else "less") if shown else "not shown",
        basis="equal loss, one law over all budgets",
        figure="isoflop",
    )


def _rows(answer: "Answer") -> list[dict[str, Any]]:
    """Those with an estimate; a column that is NULL in all rows is absent."""
    rows = [{"lo": None, "hi": None, **row} for row in answer.rows.records()]
    return [row for row in rows if row.get("estimate") is not None]


def _verdict_text(row: Mapping[str, Any]) -> str:
    p = row.get("p_adjusted")
    return row["verdict"] if p is None else f"{row['verdict']}, adjusted p {p:.2g}"


def _basis_text(row: Mapping[str, Any]) -> str:
    """'equal tokens, at equal lr, 6 seeds'"""
    name = row.get("basis")
    basis = {None: "", "none": "no cost in common", "flops": "equal FLOPs"}.get(name, f"equal {name}")
    at = row.get("at") or ""
    at = {"": "", "own lr": "each at its own lr"}.get(at, f"at {at}")
    seeds = counted(int(row["seeds"]), "seed") if row.get("seeds") else ""
    return ", ".join(filter(None, (basis, at, seeds)))


def search_line(ranking: "Ranking") -> Line:
    """The best proposal by one objective of a search."""
    row = ranking.table.records()[0]
    value = row[ranking.by]
    shown = "no value" if value is None else f"{value:.4g}"
    at = dict.fromkeys((f"n_layers={ranking.knobs[0]['n_layers']}", ranking.settings[0]))
    return Line(
        f"Which proposal is best in {ranking.by}?",
        f"Best of {counted(ranking.n_cells, 'proposal')}: {ranking.by} {shown} at {', '.join(at)}.",
        effect="" if row.get("lo") is None else f"95% interval {row['lo']:.4g} to {row['hi']:.4g}",
        verdict="not shown: the best of many is optimistic",
        basis=counted(int(row["seeds"]), "seed"),
        figure="pareto" if ranking.beside else "slices",
    )


OF_A_RUN = {
    "What does it reach?": ("val_loss", "{loss} {value} after {depth}"),
    "How far does the residual variance grow?": ("residual_variance_last", "last layer: {value} after {depth}"),
    "Are its deep layers used?": ("needed_layers", "{value} of {depth} are needed"),
    "At what cost?": ("train_flops", "{value} training FLOPs"),
}
"""Question -> the quantity that answers it, and the answer."""


def run_line(question: str, run: Mapping[str, Any], loss: str) -> Line:
    """Of a folder with one run alone, or one measured model."""
    name, text = OF_A_RUN[question]
    name = loss if name == "val_loss" else name
    value, unit = run.get(name), IN_RUNS[name].unit
    line = Line(question, f"{name} was not measured.", verdict="one run, not compared", figure="layer_profile")
    if value is None or value != value:
        return line
    depth = "its layers" if run["n_layers"] is None else counted(int(run["n_layers"]), "layer")
    shown = f"{value:.4g}{f' {unit}' * (unit not in ('', '1', 'layer', 'FLOP'))}"
    ends = [run.get(f"{name}_{end}") for end in ("lo", "hi")]
    known = all(end is not None and end == end for end in ends)
    effect = f"95% interval {ends[0]:.4g} to {ends[1]:.4g}" if known else ""
    return line._replace(answer=sentence_of(text.format(loss=loss, value=shown, depth=depth)), effect=effect)
