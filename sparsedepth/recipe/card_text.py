"""A card in sentences, and as a file that `train` reads with its evidence on top: written from the record alone; its
first sentence is `conclusion`'s."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparsedepth.config.load import yaml_text
from sparsedepth.config.plain_text import visible
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.sentences import counted, effect_text, estimate_text, number_text
from sparsedepth.files import write_text
from sparsedepth.recipe.card import (
    Candidate,
    Card,
    Compared,
    Domain,
    Holdout,
    LearningRate,
    Recipe,
    Verification,
    passed,
)
from sparsedepth.recipe.choose import comparison_of
from sparsedepth.recipe.conclusion import held_at, prediction_text, rule_text, tests_text, valid_for
from sparsedepth.recipe.tables import holdout_table, measured_text, settings_text
from sparsedepth.store import render

IN_SAMPLE = {"C": "in-sample, several seeds", "D": "in-sample, no replicates"}

Statement = tuple[str, str]
"""(heading, text)"""


def headline(card: Card) -> list[Statement]:
    """How sure it is, and what verifying found."""
    verification = card.held_out.verification
    verified = "none yet: `sparsedepth recipe verify` trains it on fresh seeds"
    if verification:
        verified = verification_text(card, verification)
    return [
        (f"Grade {card.grade}" if card.grade else "Evidence", grade_text(card)),
        *([("Verification", verified)] if verification or card.recipe.changes else []),
    ]


def statements(card: Card) -> list[Statement]:
    """Beside the rule and the settings tried: grade, verification, the changes together, tests, domain."""
    recipe, holdout = card.recipe, card.held_out.depth_test
    return [
        *headline(card),
        *([("Together", stack_text(recipe))] if recipe.changes else []),
        ("Diverged", f"{counted(recipe.n_diverged, 'run')} of {len(recipe.run_ids)}"),
        *(holdout_statements(holdout, recipe)[:-1] if holdout else []),
        ("Domain", ", ".join(f"{name} {text}" for name, text in domain_texts(recipe.domain))),
    ]


def card_text(card: Card, width: int | None = None) -> str:
    """The card for a terminal: the rule, what was measured beside it, grade and verification; a table of the settings
    tried; the held-out test; where it holds. The evidence in sentences, and the runs, are on the card's page."""
    width = width or render.terminal_width()
    recipe = card.recipe
    last = [
        *([f"Together: {stack_text(recipe)}"] if recipe.changes else []),
        *([f"Diverged: {counted(recipe.n_diverged, 'run')} of {len(recipe.run_ids)}"] if recipe.n_diverged else []),
        f"Valid for: {valid_for(recipe.domain)} (full list: the card that -o writes).",
    ]
    parts = [
        textwrap.fill(rule_text(card), width, break_on_hyphens=False),
        measured_text(card, width),
        render.wrapped((f"{heading}: {text}" for heading, text in headline(card)), width),
        settings_text(card, width),
        _holdout_text(card, width),
        render.wrapped(last, width),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


def _holdout_text(card: Card, width: int) -> str:
    """What the held-out test predicted, in a table, and its outcome; '' where none was made."""
    holdout = card.held_out.depth_test
    if holdout is None:
        return ""
    test, *rest = holdout_statements(holdout, card.recipe)
    table = render.compact(holdout_table(holdout), ("fitted",), width) + "\n" if holdout.predictions else ""
    lines = [": ".join(statement) for statement in (test, *rest[len(holdout.predictions) : -1])]
    return f"{render.wrapped(lines[:1], width)}{table}{render.wrapped(lines[1:], width)}"


def domain_texts(domain: Domain) -> list[Statement]:
    """(name, its values or its range)"""
    ranges = [(name, " to ".join(dict.fromkeys(map(_end, ends)))) for name, ends in domain.ranges.items()]
    return [*ranges, *((name, ", ".join(_in_ranges(values))) for name, values in domain.values.items())]


def _in_ranges(values: Sequence[str]) -> list[str]:
    """The values in their order, runs of three whole numbers and more as '0 to 15'."""
    runs: list[list[str]] = []
    for value in values:
        follows = runs and value.isdecimal() and runs[-1][-1].isdecimal() and int(value) == int(runs[-1][-1]) + 1
        if follows:
            runs[-1].append(value)
        else:
            runs.append([value])
    return [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else run)]


def _end(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def stack_text(recipe: Recipe) -> str:
    """Whether the recommended changes were run together, and what came of it."""
    stack = recipe.stack
    if stack is None:
        return "one change: nothing to stack" if recipe.changes else "no change recommended, so none to stack"
    if stack.against_baseline is None and stack.against_best is None:
        return "stack not run: the changes were tested one by one and may interact"
    baseline, best = comparison_text(stack.against_baseline), comparison_text(stack.against_best)
    return f"stack run: against the baseline {baseline}; against the best single change, {stack.best}, {best}"


def comparison_text(contrast: Contrast | None) -> str:
    """'better: -0.1 nat/token (...), 3 pairs': the changes together against a rival."""
    if contrast is None:
        return "not compared (it has no run with the same seed)"
    if contrast.n_diverged:
        return f"worse ({contrast.n_diverged} of the runs diverged)"
    return f"{comparison_of(contrast)}: {gain_text(contrast, 'pair')}"


def gain_text(gain: Contrast | None, noun: str = "seed") -> str:
    if gain is None:
        return "not compared"
    return f"{estimate_text(gain.effect, gain.unit)}, {counted(gain.effect.n, noun)}"


def holdout_statements(holdout: Holdout, recipe: Recipe) -> list[Statement]:
    """The held-out test with its outcome, each setting's prediction, how good they were, and last all scores."""
    advised = " and ".join(holdout.changes)
    gain = holdout.gain and estimate_text(holdout.gain.effect, holdout.gain.unit)
    outcome = holdout.outcome if advised else "no recommendation to confirm"
    test = (
        f"fitted on {holdout.axis} {', '.join(map(str, holdout.fitted_on))}, which advise "
        f"{advised or f'no change ({holdout.abstained})'} {held_at(holdout)}: "
        f"{outcome}" + (f"; there it changed {holdout.objective} by {gain}" if gain else "")
    )
    predicted = [(prediction.candidate, prediction.measured) for prediction in holdout.predictions]
    lines = [("Held-out test", test), *(("Predicted", _prediction_text(*pair)) for pair in predicted)]
    right = "none to order" if holdout.decision_accuracy is None else f"{holdout.decision_accuracy:.0%}"
    between = ["", ""]
    if holdout.error_interval:
        between[0] = "95% interval {:.3g} to {:.3g}, ".format(*holdout.error_interval)
    if holdout.accuracy_interval:
        between[1] = "95% interval {:.0%} to {:.0%}, ".format(*holdout.accuracy_interval)
    by_naive = "none"
    if holdout.decisions_right_by_naive is not None and holdout.n_decisions:
        by_naive = f"{holdout.decisions_right_by_naive / holdout.n_decisions:.0%}"
    scores = (
        f"error {number_text(holdout.error, '')} ({between[0]}of predicting no effect "
        f"{number_text(holdout.error_of_no_effect, '')}, of {holdout.naive or 'no setting'} alone "
        f"{number_text(holdout.error_of_naive, '')}) {holdout.unit}; signs right {holdout.signs_right} of "
        f"{holdout.n_signs} that are distinguishable; decision accuracy {right} ({between[1]}of "
        f"{holdout.naive or 'no setting'} alone {by_naive}) over "
        f"{counted(holdout.n_decisions, 'pair')} of {counted(holdout.n_configurations, 'configuration')}; regret "
        f"{number_text(holdout.regret, '')} against the best configuration there (the baseline's "
        f"{number_text(holdout.regret_of_baseline, '')})"
    )
    lines.append(("Prediction error", prediction_text(holdout)))
    if holdout.changes != tuple(change.contrast.setting for change in recipe.changes):
        otherwise = "all runs together advise otherwise than the shallower ones did"
        lines.append(("Not confirmed", f"{otherwise} ({advised or 'no change'})"))
    return [*lines, ("Scores", scores)]


def _prediction_text(candidate: Candidate, measured: Contrast | None) -> str:
    tested, seen = candidate.contrast, "unknown"
    if measured is not None and measured.effect.mean is not None:
        lo, hi = measured.effect.lo, measured.effect.hi
        seen = number_text(measured.effect.mean)
        seen += "" if lo is None or hi is None else f" (95% interval {lo:+.3g} to {hi:+.3g})"
    expected = f"{number_text(candidate.shrunk)}, shrunk of {estimate_text(tested.effect, tested.unit)}"
    return f"{tested.setting} vs {tested.baseline}: {expected}, measured {seen}"


def verification_sentence(card: Card, verification: Verification) -> str:
    """What verifying said of the recipe, with the grade that it leaves."""
    return f"Its verification {verification_text(card, verification)}; grade {card.grade}: {grade_text(card)}."


def verification_text(card: Card, verification: Verification) -> str:
    return (
        f"on the fresh seeds {', '.join(map(str, verification.seeds))}: {verification.outcome}: "
        f"{card.recipe.objective} {gain_text(verification.gain)}"
    )


def rule_with_verification(card: Card) -> str:
    """The recipe in a sentence; a second one says what verifying it found."""
    verification = card.held_out.verification
    rule = rule_text(card)
    return f"{rule} {verification_sentence(card, verification)}" if verification else rule


def trial_text(folder: Path, card: Card, width: int | None = None) -> str:
    """What a folder beside the results found of their recipe, for a terminal."""
    text = f"Recipe, tried in {folder.name}: {rule_with_verification(card)}"
    return textwrap.fill(text, width or render.terminal_width(), break_on_hyphens=False)


def grade_text(card: Card) -> str:
    """Why the grade is what it is; of an abstention, what its evidence is."""
    evidence = card.recipe.weakness or card.recipe.unknown or IN_SAMPLE[card.recipe.grade]
    if card.recipe.place != "inside":
        evidence = f"{card.recipe.place}, not run at {card.recipe.depth} layers; elsewhere {evidence}"
    if not card.recipe.changes:
        return f"{evidence}; {tests_text(card)}"
    supported = card.mechanism.supported_by is not None
    proof = "supported by an intervention" if supported else "no intervention supports the mechanism"
    if passed(card.held_out.outcomes) and card.recipe.domain.is_one_scale:
        proof += "; one width and one budget, which earn no more than C"
    return f"{evidence}; {tests_text(card)}; {proof}"


def mechanism_text(card: Card) -> str:
    """Why the mechanism has its word."""
    recipe, setting = card.recipe, card.mechanism.supported_by
    if not recipe.changes:
        return "nothing is recommended"
    if setting is None:
        return "no intervention on one link moved that link, and the objective the recipe's way, as every change does"
    proof = next(tried for tried in card.mechanism.interventions if tried.effect.setting == setting)
    return (
        f"{setting} alone makes {proof.moved.outcome} {proof.moved.verdict} and {recipe.objective} "
        f"{proof.effect.verdict}, as every change of the recipe does"
    )


def learning_rate_lines(rates: LearningRate) -> Iterator[str]:
    """The values tried for each configuration, where tuned; and AdamW's time scale where weight decay varies."""
    for name, values in rates.tried.items():
        yield (
            f"{name} tuned for each configuration over {_numbers(values)}; best: {_numbers(rates.best[name])}; "
            f"{counted(rates.n_at_edge, 'run')} of {rates.n_runs} at the edge of the values tried"
        )
    if not rates.tried:
        used = _numbers(sorted({rate for rate, _ in rates.used})) or "unknown"
        yield f"lr was not tuned for each configuration (lr {used}): a setting may want another"
    for rate, decay in rates.used:
        scale = f"{1 / (rate * decay):.4g} steps" if decay else "infinite"
        yield f"lr {rate:g}, weight_decay {decay:g}: AdamW time scale 1/(lr weight_decay) = {scale}"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def negative_lines(card: Card) -> Iterator[str]:
    """What was not taken, and why; what diverged; what verifying did not find needed."""
    for candidate in card.recipe.candidates:
        contrast = candidate.contrast
        if candidate.refused:
            yield f"{contrast.setting} vs {contrast.baseline}: {candidate.refused}; {effect_text(contrast)}"
    for run in card.diverged:
        yield f"run {run.run_id} diverged: {run.cause or 'cause unknown'}"
    verification = card.held_out.verification
    for ingredient in verification.ingredients if verification else ():
        if ingredient.verdict != "needed":
            yield f"on the fresh seeds {ingredient.left_out} is {ingredient.verdict}: {gain_text(ingredient.gain)}"


def literature_lines(rows: Sequence[Compared]) -> Iterator[str]:
    """The card beside the published tables, verdict first."""
    if not rows:
        yield "no published table compares what this card does"
        return
    agree, contradict = (sum(row.verdict == verdict for row in rows) for verdict in ("agrees", "contradicts"))
    yield f"{agree} agree, {contradict} contradict, {len(rows) - agree - contradict} cannot be compared"
    for row in rows:
        ours = row.knob
        if row.contrast is not None:
            ours = f"{row.contrast.setting} vs {row.contrast.baseline}"
            ours += f": {estimate_text(row.contrast.effect, '')}" if row.contrast.effect.n else ""
        yield f"{row.verdict}: {ours}; published: {row.published} [{row.source}]: {row.why}"


def to_yaml(card: Card) -> str:
    """The RunConfig as YAML, its evidence as comments above it. The seed is left to the reader.

    Raises ValueError for a recipe with no run to start from.
    """
    recipe = card.recipe
    if recipe.config is None:
        raise ValueError(f"there is no configuration to write: {recipe.abstained}")
    runs = render.wrapped([f"Runs: {' '.join(recipe.run_ids) or 'none'}"], 110)
    comments = f"{card_text(card, 110)}\n{runs}".rstrip("\n").split("\n")
    values = recipe.config.model_dump(mode="json", exclude={"seed"})
    values = {
        name: v for name, v in values.items() if v is not None or RunConfig.model_fields[name].default is not None
    }
    first = {"n_layers", *(name for change in recipe.changes for name in change.values)}
    values = dict(sorted(values.items(), key=lambda item: item[0] not in first))
    # visible: U+0085 and U+2028, too, are line breaks to YAML, and would end a comment
    return "".join(f"{f'# {visible(line)}'.rstrip()}\n" for line in comments) + yaml_text(values)


def write_yaml(path: Path, card: Card) -> None:
    """Write `to_yaml` to a file, whole or not at all."""
    write_text(path, to_yaml(card))
