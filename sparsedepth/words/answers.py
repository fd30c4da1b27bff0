"""The answers on top of the report, a line for each question: a sentence, its numbers, and the figure with them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparsedepth.quantities import IN_RUNS
from sparsedepth.quantities.levels import ALPHA
from sparsedepth.quantities.quantity import Named, Row
from sparsedepth.words.effects import interval_text, second_look_lines
from sparsedepth.words.judge import ends_text, place_text, time_text, worth_text
from sparsedepth.words.plain_text import commas, counted, listed, sentence_of
from sparsedepth.words.recipe import sentence
from sparsedepth.words.scaling import NO_TIMES, flops_text, in_nats, multiplier_text, shapes_lines

if TYPE_CHECKING:
    from sparsedepth.recipe.card import Card
    from sparsedepth.report.answers import Answer
    from sparsedepth.scaling.shapes import ShapesAnswer
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
    """`by_depth`: of each depth its number of layers, what to use there, and its outcome, the best first."""
    effect = card.recipe.effect
    answer = sentence(card)
    if len(by_depth) > 1:
        depth, use, loss = by_depth[0]
        most = IN_RUNS[card.recipe.objective].better
        best = f"that at {counted(depth, 'layer')} has the {most}est {card.recipe.objective}"
        answer += f" Of the choices at each depth, {best}: {loss}, {use}."
    line = Line("What to use, at which depth?", answer, verdict="not shown", figure="effects")
    return line if effect is None or effect.estimate is None else _with_effect(line, effect.model_dump())


def variance_line(answer: "Answer", outcome: str) -> Line:
    """On the setting with the largest effect shown at the deepest depth, or without one the largest."""
    rows = [row for row in _rows(answer) if row["outcome"] == outcome]
    line = Line("Does it lower the residual variance?", answer.sentence, verdict="not compared", figure="variance")
    if not rows:
        return line
    deepest = max(row["n_layers"] for row in rows)
    at = [row for row in rows if row["n_layers"] == deepest]
    row = max(at, key=lambda row: (row["verdict"] in ("lower", "higher"), abs(row["estimate"])))
    return _with_effect(line, row, f"{row['setting']} at {deepest} layers ")


def depth_line(answer: "Answer") -> Line:
    """On the deepest depth judged at equal FLOPs, else the deepest that was compared."""
    line = Line("Does depth earn its cost?", answer.sentence, verdict="not compared", figure="depth")
    if answer.judged:
        one = answer.judged[-1]
        effect = f"{one.n_layers} against {one.against} layers {in_nats(one)}"
        basis = f"equal FLOPs ({flops_text(one.largest or math.nan)}), {counted(one.seeds, 'seed')}"
        return line._replace(effect=effect, verdict=one.verdict, basis=basis, figure="isoflop")
    if rows := _rows(answer):
        return _with_effect(line, rows[-1], f"{rows[-1]['n_layers']} layers against the shallowest ")
    return line


OF_A_LADDER = ("What is it worth?", "Does that change with size?", "And beyond these sizes?", "At what cost?")


def ladder_line(question: str, record: Row) -> Line:
    """On a setting of one run at each budget, as `judge` has it."""
    p, drift = record["p_adjusted"], record["p_drift"]
    verdict = record["verdict"] if p is None else f"{record['verdict']}, adjusted p {p:.2g}"
    worth, size, beyond, cost = OF_A_LADDER
    answers = {
        worth: (f"{record['variant']}: {worth_text(record)}", verdict),
        size: ("Not known: fewer than three budgets", "not known"),
        beyond: ("Not known", "not extrapolated"),
        cost: (f"Both are compared at equal FLOPs; {NO_TIMES}", "counted"),
    }
    if drift is not None:
        answers[size] = ends_text(record), f"drift {'shown' if drift < ALPHA else 'not shown'}, p {drift:.2g}"
    if record["beyond"] is not None:
        answers[beyond] = f"{place_text(record, 'beyond')} FLOPs, four times the largest budget", "extrapolated"
    if record["time_multiplier"] is not None:
        answers[cost] = f"Worth {time_text(record)}", "measured"
    answer, verdict = answers[question]
    return Line(question, f"{answer}.", "", verdict, "", "ladder")


OF_SHAPES = ("How deep for its width?", "What does twice the depth per width change?")


def shapes_line(question: str, found: "ShapesAnswer") -> Line:
    """Of one run of each of many shapes."""
    assert found.law is not None
    _, best, at, *doublings = shapes_lines(found)
    basis = "equal FLOPs, one law over shapes"
    if question == OF_SHAPES[0]:
        verdict = f"a move {'shown' if found.law.moves else 'not shown'}, p {found.law.p_move:.2g}"
        return Line(question, sentence_of(best), "", verdict, basis)
    return Line(question, sentence_of(f"{at} {'; '.join(map(str.strip, doublings))}"), "", "by aspect", basis)


def cost_line(card: "Card") -> Line:
    """Of the recipe, relative to the baseline; and what it is worth in compute, where three budgets were run."""
    cost, changes = card.recipe.effect, card.recipe.changes
    answer = "No setting is recommended: nothing more than the baseline."
    worth = None
    if cost is not None:
        costs = {"training FLOPs": cost.flops, "parameters": cost.params_total}
        costs |= {"active parameters": cost.params_active, "time": cost.time}
        known = [f"×{ratio:.3g} {name}" for name, ratio in costs.items() if ratio is not None] or ["not known"]
        answer = f"{listed([each.setting for each in changes])}: {listed(known)}, relative to the baseline."
        worth = changes[0].compute if len(changes) == 1 else None
    if worth is None:
        return Line("At what cost?", answer, verdict="counted", figure="pareto")
    _, lo, hi = worth
    effect = f"worth {multiplier_text(*worth, ' times the compute')}"
    verdict = "not shown" if lo is None or hi is None or lo <= 1 <= hi else "shown"
    return Line("At what cost?", answer, effect, verdict, "equal loss, one law over all budgets", "pareto")


def _rows(answer: "Answer") -> list[Named]:
    """Those with an estimate; a column that is NULL in all rows is absent."""
    rows = [{"lo": None, "hi": None, **row} for row in answer.rows.records()]
    return [row for row in rows if row.get("estimate") is not None]


def _with_effect(line: Line, row: Row, what: str = "") -> Line:
    """With the interval of a row, its verdict, and a basis such as 'equal tokens, at equal lr, 6 seeds'."""
    p = "" if row.get("p_adjusted") is None else f", adjusted p {row['p_adjusted']:.2g}"
    verdict = "; ".join([f"{row['verdict']}{p}", *second_look_lines(row)])
    basis, at, seeds = row.get("basis"), row.get("at"), row.get("seeds")
    texts = (
        {"none": "no cost in common", "flops": "equal FLOPs"}.get(basis, f"equal {basis}") if basis else "",
        ("each at its own lr" if at == "own lr" else f"at {at}") if at else "",
        counted(int(seeds), "seed") if seeds else "",
    )
    return line._replace(effect=f"{what}{interval_text(row)}", verdict=verdict, basis=commas(filter(None, texts)))


def search_line(ranking: "Ranking") -> Line:
    """The best proposal by one objective of a search."""
    row = ranking.table.records()[0]
    value = "no value" if row[ranking.by] is None else f"{row[ranking.by]:.4g}"
    at = commas(dict.fromkeys((f"n_layers={ranking.knobs[0]['n_layers']}", ranking.settings[0])))
    return Line(
        f"Which proposal is best in {ranking.by}?",
        f"Best of {counted(ranking.n_cells, 'proposal')}: {ranking.by} {value} at {at}.",
        effect="" if row.get("lo") is None else f"95% interval {row['lo']:.4g} to {row['hi']:.4g}",
        verdict="not shown: the best of many is optimistic",
        basis=counted(int(row["seeds"]), "seed"),
        figure="pareto" if ranking.beside else "slices",
    )


OF_A_RUN = {
    "What does it reach?": ("val_loss", "{name} {value} nat/token after {depth}."),
    "How far does the residual variance grow?": ("residual_variance_last", "Last layer: {value} after {depth}."),
    "Are its deep layers used?": ("needed_layers", "{value} of {depth} are needed."),
    "At what cost?": ("train_flops", "{value} training FLOPs."),
}
"""Question -> the quantity that answers it, and the answer."""


def run_line(question: str, run: Row, loss: str) -> Line:
    """Of a folder with one run alone, or one measured model."""
    name, text = OF_A_RUN[question]
    name = loss if name == "val_loss" else name
    known = run.get(name) is not None and run[name] == run[name]
    depth = "its layers" if run["n_layers"] is None else counted(int(run["n_layers"]), "layer")
    why = "is not known: the run diverged" if run.get("outcome") == "diverged" else "was not measured"
    answer = text.format(name=name, value=f"{run[name]:.4g}", depth=depth) if known else f"{name} {why}."
    return Line(question, answer, verdict="one run, not compared", figure="layer_profile")
