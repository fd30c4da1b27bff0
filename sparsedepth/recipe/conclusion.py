"""The conclusion of a card in a paragraph.

A recommendation names setting, lr, gain and cost, then grade and verification. An abstention names what the baseline
reaches and costs, and the size of improvement that the runs could have missed.
"""

import math
from collections.abc import Sequence

from sparsedepth import quantities
from sparsedepth.config.images import unit_for
from sparsedepth.config.plain_text import counted
from sparsedepth.effects.sentences import estimate_text, number_text
from sparsedepth.recipe.card import Candidate, Card, Domain, Holdout, MeasuredConfiguration, MeasuredPart, Recipe
from sparsedepth.recipe.choose import BUDGET, comparison_of


def rule_text(card: Card) -> str:
    """The recipe, or the baseline; with a caution first where these models are no evidence about depth."""
    recipe = card.recipe
    caution = f"No evidence about depth: {recipe.weakness}. " if recipe.weakness else ""
    caution += f"{recipe.unknown}. " if recipe.unknown else ""
    source = "" if recipe.place == "inside" else f" ({recipe.place} from other depths)"
    depth = f"At {counted(recipe.depth, 'layer')}{source}: " if recipe.depth else ""
    if recipe.changes:
        advice = _recommendation(card)
    elif any(candidate.contrast.p_holm is not None for candidate in tested(recipe)):
        baseline = configuration_text(part_of(card, "baseline"), recipe)
        stay = "no reason to leave" if recipe.weakness else "keep"
        advice = f"{stay} the baseline{f' ({baseline})' if baseline else ''}. {_abstention(recipe)}"
    else:
        advice = f"no recommendation: {recipe.abstained}"
    return f"{caution}{depth or advice[0].upper()}{advice if depth else advice[1:]}."


def _recommendation(card: Card) -> str:
    use = " and ".join(f"{c.contrast.setting} instead of {c.contrast.baseline}" for c in card.recipe.changes)
    row, verification = part_of(card, "recommended"), card.held_out.verification
    lr = f" (lr {row.lr:g})" if row and row.lr is not None else ""
    verified = f"{verification.outcome} on fresh seeds" if verification else "not yet verified on fresh seeds"
    return f"use {use}{lr}: {card.recipe.objective} {gain_and_cost(card)}. Grade {card.grade}; {verified}"


def gain_and_cost(card: Card) -> str:
    """The gain of the changes together (of each alone, if they were not run together), and their cost."""
    recipe = card.recipe
    together = recipe.stack.against_baseline if recipe.stack else None
    contrasts = [together] if together else [change.contrast for change in recipe.changes]
    sizes = [estimate_text(contrast.effect, contrast.unit) for contrast in contrasts]
    gain, note = sizes[0], "after shrinkage"
    if len(contrasts) > 1:
        gain = ", ".join(f"{contrast.setting} {size}" for contrast, size in zip(contrasts, sizes, strict=True))
        gain, note = f"each alone, not run together: {gain}", "after shrinkage, if the effects add up"
    expected = f"; {recipe.expected_gain:+.3g} expected {note}" if recipe.expected_gain else ""
    return f"{gain}{expected}; {_cost_text(part_of(card, 'recommended'), part_of(card, 'baseline'))}"


def _cost_text(row: MeasuredConfiguration | None, baseline: MeasuredConfiguration | None) -> str:
    """'at 1 x the baseline's parameters, 1.02 x its training FLOPs, 1.1 x its training time'."""
    if row is None or baseline is None:
        return "at unknown cost"
    pairs = (
        ("parameters", row.params, baseline.params),
        ("training FLOPs", row.train_flops, baseline.train_flops),
        ("training time", row.seconds, baseline.seconds),
    )
    ratios = [(noun, value / reference) for noun, value, reference in pairs if value and reference]
    owners = ("the baseline's", "its", "its")
    costs = [f"{ratio:.3g} x {owner} {noun}" for owner, (noun, ratio) in zip(owners, ratios, strict=False)]
    return f"at {', '.join(costs)}" if costs else "at unknown cost"


def configuration_text(row: MeasuredConfiguration | None, recipe: Recipe) -> str:
    """'lr 0.003; val_loss 0.28 nat/token, 95% interval 0.2 to 0.36, 3 seeds; 248k parameters, 4e+11 FLOPs, 34 s per run
    on CPU', without what is unknown."""
    if row is None:
        return ""
    unit = quantities.IN_RUNS[recipe.objective].unit if recipe.unit == "ln ratio" else recipe.unit
    value = "unknown" if recipe.place == "inside" else f"unknown: no run at {counted(recipe.depth or 0, 'layer')}"
    if row.mean is not None:
        cut = quantities.IN_RUNS[recipe.objective].cut_at((row.lo, row.hi))
        interval = "" if row.lo is None or row.hi is None else f", 95% interval {row.lo:.3g} to {row.hi:.3g}{cut}"
        value = f"{row.mean:.3g}{f' {unit}' if unit not in ('', '1') else ''}{interval}, {counted(row.n_seeds, 'seed')}"
    cost = [f"{short(row.params)} parameters"] if row.params else []
    cost += [f"{row.train_flops:.2g} FLOPs"] if row.train_flops else []
    if row.seconds:
        cost.append(f"{duration(row.seconds)} per run on {', '.join(devices(row.devices)) or 'an unknown device'}")
    rivals = " or ".join(f"{value:g}" for value in row.rivals)
    lr = [] if row.lr is None else [f"lr {row.lr:g}{f', not distinguishable from {rivals}' if rivals else ''}"]
    return "; ".join([*lr, f"{recipe.objective} {value}", *([", ".join(cost)] if cost else [])])


def _abstention(recipe: Recipe) -> str:
    """'None of 4 changes was shown to help, 2 were shown to hurt; improvements below 0.26 to 0.29 nat/token could have
    been missed'."""
    changes = tested(recipe)
    if any(comparison_of(change.contrast) == "better" for change in changes):
        return f"No change is recommended: {recipe.abstained}"
    n_uneven = sum(bool(change.contrast.verdict_blocked_by) for change in changes)
    uneven = f" ({n_uneven} with a verdict withheld)" if n_uneven else ""
    none = f"None of {len(changes)} changes was" if len(changes) > 1 else "The one change tested was not"
    n_worse = sum(comparison_of(change.contrast) == "worse" for change in changes)
    hurt = f", {n_worse} {'was' if n_worse == 1 else 'were'} shown to hurt" if n_worse else ""
    none += f" shown to help{uneven}{hurt}"
    sizes = dict.fromkeys(_two_digits(size, recipe.unit) for size in detectable_sizes(recipe))
    if not sizes:
        return none
    unit = f" {recipe.unit}" if recipe.unit not in ("", "1", "ln ratio") else ""
    return f"{none}; improvements below {' to '.join(sizes)}{unit} could have been missed"


def detectable_sizes(recipe: Recipe) -> tuple[float, ...]:
    """The smallest and the largest detectable effect of the settings that are not distinguishable from the baseline."""
    unclear = [c.contrast for c in tested(recipe) if comparison_of(c.contrast) == "not distinguishable"]
    sizes = [contrast.detectable for contrast in unclear if contrast.detectable is not None]
    return (min(sizes), max(sizes)) if sizes else ()


def _two_digits(value: float, unit: str) -> str:
    return f"x{math.exp(value):.3g}" if unit == "ln ratio" else f"{value:.2g}"


def tested(recipe: Recipe) -> list[Candidate]:
    """The settings that have pairs, without those of a budget, such as width, which no recipe recommends."""
    return [c for c in recipe.candidates if c.contrast.has_pairs and c.contrast.knob not in BUDGET]


def part_of(card: Card, part: MeasuredPart) -> MeasuredConfiguration | None:
    return next((row for row in card.measured if part in row.parts), None)


# Held-out test


def prediction_text(holdout: Holdout, with_interval: bool = True) -> str:
    """'0.202 nat/token (95% interval 0.00265 to 0.401) against 0.16 for predicting no effect: failed'."""
    if holdout.prediction is None:
        return "unknown: no prediction could be compared"
    details = f" {holdout.unit}" if holdout.unit not in ("", "1") else ""
    if holdout.error_interval:
        lo, hi = holdout.error_interval
        details += f" (95% interval {lo:.3g} to {hi:.3g}{'' if lo else ', cut at 0'})"
    return (
        f"{number_text(holdout.error, '')}{details if with_interval else ''} against "
        f"{number_text(holdout.error_of_no_effect, '')} for predicting no effect: {holdout.prediction}"
    )


def tests_text(card: Card) -> str:
    """Every held-out test with its outcome, or that there was none."""
    holdout, (depth_outcome, fresh_outcome) = card.held_out.depth_test, card.held_out.outcomes
    tests = []
    if holdout:
        outcome = f"recipe {depth_outcome}" if depth_outcome else "no recommendation to confirm"
        tests.append(f"held-out test {held_at(holdout)}: {outcome}; prediction error {prediction_text(holdout, False)}")
    if fresh_outcome:
        tests.append(f"{fresh_outcome} on fresh seeds")
    grades = ", which grades A and B need" if card.recipe.changes else ""
    return "; ".join(tests) or f"no held-out test{grades}"


def held_at(holdout: Holdout) -> str:
    """'at 32 layers', 'at d_model=256'."""
    held = holdout.held or holdout.depth
    return f"at {counted(held, 'layer')}" if holdout.axis == "n_layers" and held else f"at {holdout.axis}={held}"


# Domain


def valid_for(domain: Domain) -> str:
    """'task state_tracking S5, width 32, 223k to 696k parameters, 288k tokens, CPU. Not evidence for text or ...'."""
    corpora = domain.values.get("corpus", ())
    tasks = [name.removeprefix("task:") for name in corpora if name.startswith("task:")]
    are_tasks, are_images = len(tasks) == len(corpora) > 0, unit_for("/token", corpora) == "/image"
    groups = ", ".join(group for group in domain.values.get("task_group", ()) if group != "None")
    of_group = f"{' ' if len(tasks) == 1 else ' of '}{groups}" if are_tasks and groups else ""
    data = f"task {', '.join(tasks)}{of_group}" if are_tasks else f"corpus {', '.join(corpora) or 'unknown'}"
    texts = {"d_model": "width {}", "params_total": "{} parameters", "tokens_trained": "{} tokens"}
    ranges = dict(domain.ranges)
    if are_images and "tokens_trained" in ranges and len({*ranges.get("seq_len", ())}) == 1:
        (low, high), (patches, _) = ranges["tokens_trained"], ranges["seq_len"]
        texts["tokens_trained"], ranges["tokens_trained"] = "{} images", (low / patches, high / patches)
    sizes = [text.format(_from_to(ranges[name])) for name, text in texts.items() if name in ranges]
    hardware = [", ".join(devices(domain.values["device"]))] if "device" in domain.values else []
    other_data = "text" if are_tasks else "other images" if are_images else "other text"
    return f"{', '.join([data, *sizes, *hardware])}. Not evidence for {other_data} or for larger models"


def devices(names: Sequence[str]) -> list[str]:
    """'CPU' of 'cpu (x86_64)'."""
    short_names = (name.partition(" (")[0] for name in names)
    return list(dict.fromkeys(name.upper() if name in ("cpu", "mps") else name for name in short_names))


def _from_to(ends: tuple[int | float, int | float]) -> str:
    return " to ".join(dict.fromkeys(map(short, ends)))


def short(value: float) -> str:
    """'288k', '1.3M'."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """'34 s', '5.6 min', '1.2 h'."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 3600 else f"{seconds / 3600:.2g} h"
