"""What a card comes to, in a paragraph: the change or the baseline, its gain, its cost, and what stays unknown.

A recommendation says setting, lr, gain and cost, then grade and verification. An abstention says what the baseline
reaches and costs, and below which size an improvement by one of the settings tried may have gone unseen.
"""

import math
from collections.abc import Sequence

from sparsedepth import quantities
from sparsedepth.config.images import unit_for
from sparsedepth.effects.sentences import counted, estimate_text, number_text
from sparsedepth.recipe.card import Candidate, Card, Domain, Holdout, MeasuredConfiguration, MeasuredPart, Recipe
from sparsedepth.recipe.choose import BUDGET, comparison_of


def rule_text(card: Card) -> str:
    """The recipe, or the baseline; before it, where these models are no evidence about depth, a sentence that says
    so."""
    recipe = card.recipe
    weak = f"No evidence about depth: {recipe.weakness}. " if recipe.weakness else ""
    weak += f"{recipe.unknown}. " if recipe.unknown else ""
    where = "" if recipe.place == "inside" else f" ({recipe.place} from other depths)"
    at = f"At {counted(recipe.depth, 'layer')}{where}: " if recipe.depth else ""
    if recipe.changes:
        advice = _recommendation(card)
    elif any(candidate.contrast.p_holm is not None for candidate in tried(recipe)):
        reached = configuration_text(part_of(card, "baseline"), recipe)
        advice = f"keep the baseline{f' ({reached})' if reached else ''}. {_unseen(recipe)}"
    else:
        advice = f"no recommendation: {recipe.abstained}"
    return f"{weak}{at or advice[0].upper()}{advice if at else advice[1:]}."


def _recommendation(card: Card) -> str:
    use = " and ".join(f"{c.contrast.setting} instead of {c.contrast.baseline}" for c in card.recipe.changes)
    row, verification = part_of(card, "recommended"), card.held_out.verification
    lr = f" (lr {row.lr:g})" if row and row.lr is not None else ""
    verified = f"{verification.outcome} on fresh seeds" if verification else "not verified on fresh seeds yet"
    return f"use {use}{lr}: {card.recipe.objective} {gain_and_cost(card)}. Grade {card.grade}; {verified}"


def gain_and_cost(card: Card) -> str:
    """What the changes gain together, or where they were not run together one by one, and what they cost."""
    recipe = card.recipe
    together = recipe.stack.against_baseline if recipe.stack else None
    contrasts = [together] if together else [change.contrast for change in recipe.changes]
    sizes = [estimate_text(contrast.effect, contrast.unit) for contrast in contrasts]
    gain, noise = sizes[0], "shrunk towards 0 by its noise"
    if len(contrasts) > 1:
        gain = ", ".join(f"{contrast.setting} {size}" for contrast, size in zip(contrasts, sizes, strict=True))
        gain, noise = f"one by one, never run together: {gain}", "if they add up, shrunk towards 0 by their noise"
    expected = f"; {recipe.expected_gain:+.3g} expected, {noise}" if recipe.expected_gain else ""
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
    known = [f"{ours / theirs:.3g} x its {noun}" for noun, ours, theirs in pairs if ours and theirs]
    return f"at {', '.join(known)}".replace("its", "the baseline's", 1) if known else "at unknown cost"


def configuration_text(row: MeasuredConfiguration | None, recipe: Recipe) -> str:
    """'lr 0.003; val_loss 0.28 nat/token, 95% interval 0.2 to 0.36, 3 seeds; 248k parameters, 4e+11 FLOPs, 34 s a run
    on cpu'; what is not known is left out."""
    if row is None:
        return ""
    unit = quantities.IN_RUNS[recipe.objective].unit if recipe.unit == "ln ratio" else recipe.unit
    value = "not run"
    if row.mean is not None:
        cut = quantities.IN_RUNS[recipe.objective].cut_at((row.lo, row.hi))
        interval = "" if row.lo is None or row.hi is None else f", 95% interval {row.lo:.3g} to {row.hi:.3g}{cut}"
        value = f"{row.mean:.3g}{f' {unit}' if unit not in ('', '1') else ''}{interval}, {counted(row.n_seeds, 'seed')}"
    cost = [f"{short(row.params)} parameters"] if row.params else []
    cost += [f"{row.train_flops:.2g} FLOPs"] if row.train_flops else []
    cost += (
        [f"{duration(row.seconds)} a run on {', '.join(devices(row.devices)) or 'an unknown device'}"]
        if row.seconds
        else []
    )
    others = f", but {' or '.join(f'{value:g}' for value in row.rivals)} may be better" if row.rivals else ""
    lr = [] if row.lr is None else [f"lr {row.lr:g}{others}"]
    return "; ".join([*lr, f"{recipe.objective} {value}", *([", ".join(cost)] if cost else [])])


def _unseen(recipe: Recipe) -> str:
    """'None of 4 changes was shown to help; an improvement below 0.26 to 0.29 nat/token may have gone unseen'."""
    changes = tried(recipe)
    better = [change for change in changes if comparison_of(change.contrast) == "better"]
    if better:
        return f"No change may be taken: {recipe.abstained}"
    unfair = [change for change in changes if change.contrast.verdict_blocked_by]
    uneven = f" ({len(unfair)} with uneven tuning)" if unfair else ""
    none = f"None of {counted(len(changes), 'change')} was shown to help{uneven}"
    sizes = detectable_sizes(recipe)
    if not sizes:
        return none
    ends = dict.fromkeys(_two_digits(size, recipe.unit) for size in sizes)
    in_unit = f" {recipe.unit}" if recipe.unit not in ("", "1", "ln ratio") else ""
    return f"{none}; an improvement below {' to '.join(ends)}{in_unit} may have gone unseen"


def detectable_sizes(recipe: Recipe) -> tuple[float, ...]:
    """The smallest and the largest effect that would have been told apart, over the settings of which nothing can be
    told; empty where none has one."""
    in_doubt = [c.contrast for c in tried(recipe) if comparison_of(c.contrast) == "not distinguishable"]
    sizes = [contrast.detectable for contrast in in_doubt if contrast.detectable is not None]
    return (min(sizes), max(sizes)) if sizes else ()


def _two_digits(value: float, unit: str) -> str:
    return f"x{math.exp(value):.3g}" if unit == "ln ratio" else f"{value:.2g}"


def tried(recipe: Recipe) -> list[Candidate]:
    """The settings that have pairs; those that are a budget, such as width, can be no recipe."""
    return [c for c in recipe.candidates if c.contrast.has_pairs and c.contrast.knob not in BUDGET]


def part_of(card: Card, part: MeasuredPart) -> MeasuredConfiguration | None:
    return next((row for row in card.measured if part in row.parts), None)


# Held-out test


def prediction_text(holdout: Holdout, with_interval: bool = True) -> str:
    """'0.202 nat/token (95% interval 0.00265 to 0.401) against 0.16 for predicting no effect: failed'."""
    if holdout.prediction is None:
        return "unknown: no prediction could be compared"
    more = f" {holdout.unit}" if holdout.unit not in ("", "1") else ""
    if holdout.error_interval:
        lo, hi = holdout.error_interval
        more += f" (95% interval {lo:.3g} to {hi:.3g}{'' if lo else ', cut at 0'})"
    return (
        f"{number_text(holdout.error, '')}{more if with_interval else ''} against "
        f"{number_text(holdout.error_of_no_effect, '')} for predicting no effect: {holdout.prediction}"
    )


def tests_text(card: Card) -> str:
    """Every held-out test that was made, with its outcome; or that none was."""
    holdout, outcomes = card.held_out.depth_test, card.held_out.outcomes
    made = [f"{outcomes[1]} on fresh seeds"] if outcomes[1] else []
    if holdout:
        outcome = f"recipe {outcomes[0]}" if outcomes[0] else "no recommendation to confirm"
        made.insert(
            0, f"held-out test {held_at(holdout)} made: {outcome}; prediction error {prediction_text(holdout, False)}"
        )
    grades = ", which grades A and B need" if card.recipe.changes else ""
    return "; ".join(made) or f"no held-out test was made{grades}"


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
    words = {"d_model": "width {}", "params_total": "{} parameters", "tokens_trained": "{} tokens"}
    ranges = dict(domain.ranges)
    if are_images and "tokens_trained" in ranges and len({*ranges.get("seq_len", ())}) == 1:
        (low, high), (patches, _) = ranges["tokens_trained"], ranges["seq_len"]
        words["tokens_trained"], ranges["tokens_trained"] = "{} images", (low / patches, high / patches)
    sizes = [text.format(_from_to(ranges[name])) for name, text in words.items() if name in ranges]
    on = [", ".join(devices(domain.values["device"]))] if "device" in domain.values else []
    beyond = "text" if are_tasks else "other images" if are_images else "other text"
    return f"{', '.join([data, *sizes, *on])}. Not evidence for {beyond} or for larger models"


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
