"""A card in sentences, and as a YAML file for `train` with its evidence in comments; its first sentence is
`conclusion`'s."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparsedepth.config.load import yaml_text
from sparsedepth.config.plain_text import counted, visible
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.sentences import effect_text, estimate_text, number_text
from sparsedepth.files import write_text
from sparsedepth.recipe.card import (
    Candidate,
    Card,
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
from sparsedepth.store import terminal

IN_SAMPLE = {"C": "in-sample, several seeds", "D": "in-sample, no replicates"}

Statement = tuple[str, str]
"""(heading, text)"""


def headline(card: Card) -> list[Statement]:
    """Grade and verification."""
    lines = [grade_statement(card)]
    if card.held_out.verification:
        lines.append(("Verification", verification_text(card, card.held_out.verification)))
    elif card.recipe.changes:
        lines.append(("Verification", "none yet; `sparsedepth recipe verify` trains it on fresh seeds"))
    return lines


def grade_statement(card: Card) -> Statement:
    return f"Grade {card.grade}" if card.grade else "Evidence", grade_text(card)


def statements(card: Card) -> list[Statement]:
    """All but the rule and the settings tested: grade, verification, the changes together, tests, domain."""
    recipe, holdout = card.recipe, card.held_out.depth_test
    return [
        *headline(card),
        *([("Together", stack_text(recipe))] if recipe.changes else []),
        ("Diverged", f"{counted(recipe.n_diverged, 'run')} of {len(recipe.run_ids)}"),
        *(holdout_statements(holdout, recipe)[:-1] if holdout else []),
        ("Domain", ", ".join(f"{name} {text}" for name, text in domain_texts(recipe.domain))),
    ]


def card_text(card: Card, width: int | None = None) -> str:
    """The card for a terminal: rule, measured configurations, grade and verification, settings tested, held-out test,
    domain. The evidence in sentences, and the runs, are on the card's page."""
    width = width or terminal.terminal_width()
    recipe = card.recipe
    closing = [
        *([f"Together: {stack_text(recipe)}"] if recipe.changes else []),
        *([f"Diverged: {counted(recipe.n_diverged, 'run')} of {len(recipe.run_ids)}"] if recipe.n_diverged else []),
        f"Valid for: {valid_for(recipe.domain)} (full list: in the card that -o writes).",
    ]
    parts = [
        textwrap.fill(rule_text(card), width, break_on_hyphens=False),
        measured_text(card, width),
        terminal.wrapped((f"{heading}: {text}" for heading, text in headline(card)), width),
        settings_text(card, width),
        _holdout_text(card, width),
        terminal.wrapped(closing, width),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


def _holdout_text(card: Card, width: int) -> str:
    """The held-out test: outcome, table of predictions, scores; '' without one."""
    holdout = card.held_out.depth_test
    if holdout is None:
        return ""
    test, *rest = holdout_statements(holdout, card.recipe)
    table = terminal.fit(holdout_table(holdout), ("fitted",), width).text + "\n" if holdout.predictions else ""
    lines = [": ".join(statement) for statement in (test, *rest[len(holdout.predictions) : -1])]
    legend = ["predicted: the fitted effect, shrunk by its reliability"] if table else []
    return f"{terminal.wrapped([lines[0], *legend], width)}{table}{terminal.wrapped(lines[1:], width)}"


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
    """How the recommended changes do together."""
    stack = recipe.stack
    if stack is None:
        return "one change, nothing to combine" if recipe.changes else "no change recommended"
    if stack.against_baseline is None and stack.against_best is None:
        return "not run together: the changes were tested one by one and may interact"
    baseline, best = comparison_text(stack.against_baseline), comparison_text(stack.against_best)
    return f"run together: against the baseline {baseline}; against the best single change, {stack.best}, {best}"


def comparison_text(contrast: Contrast | None) -> str:
    """'better: -0.1 nat/token (...), 3 pairs': the changes together against the baseline or the best change."""
    if contrast is None:
        return "not compared (no run with the same seed)"
    if contrast.n_diverged:
        return f"worse ({contrast.n_diverged} of the runs diverged)"
    return f"{comparison_of(contrast)}: {gain_text(contrast, 'pair')}"


def gain_text(gain: Contrast | None, noun: str = "seed") -> str:
    if gain is None:
        return "not compared"
    return f"{estimate_text(gain.effect, gain.unit)}, {counted(gain.effect.n, noun)}"


def holdout_statements(holdout: Holdout, recipe: Recipe) -> list[Statement]:
    """The held-out test with its outcome, each setting's prediction, the prediction error, and last all scores."""
    recommended = " and ".join(holdout.changes)
    gain = holdout.gain and estimate_text(holdout.gain.effect, holdout.gain.unit)
    outcome = holdout.outcome if recommended else "no recommendation to confirm"
    test = (
        f"fitted on {holdout.axis} {', '.join(map(str, holdout.fitted_on))}, which recommend "
        f"{recommended or f'no change ({holdout.abstained})'} {held_at(holdout)}: "
        f"{outcome}" + (f"; there it changed {holdout.objective} by {gain}" if gain else "")
    )
    lines = [("Held-out test", test)]
    lines += [("Predicted", _prediction_text(p.candidate, p.measured)) for p in holdout.predictions]
    lines.append(("Prediction error", prediction_text(holdout)))
    if holdout.changes != tuple(change.contrast.setting for change in recipe.changes):
        reason = f"all runs together do not recommend what the shallower ones did ({recommended or 'no change'})"
        lines.append(("Not confirmed", reason))
    return [*lines, ("Scores", _scores_text(holdout))]


def _scores_text(holdout: Holdout) -> str:
    accuracy = "unknown" if holdout.decision_accuracy is None else f"{holdout.decision_accuracy:.0%}"
    error_interval = accuracy_interval = ""
    if holdout.error_interval:
        error_interval = "95% interval {:.3g} to {:.3g}; ".format(*holdout.error_interval)
    if holdout.accuracy_interval:
        accuracy_interval = "95% interval {:.0%} to {:.0%}; ".format(*holdout.accuracy_interval)
    naive, naive_accuracy = holdout.naive or "no setting", "unknown"
    if holdout.decisions_right_by_naive is not None and holdout.n_decisions:
        naive_accuracy = f"{holdout.decisions_right_by_naive / holdout.n_decisions:.0%}"
    return (
        f"mean error {number_text(holdout.error, '')} ({error_interval}{number_text(holdout.error_of_no_effect, '')} "
        f"for predicting no effect, {number_text(holdout.error_of_naive, '')} for {naive} alone) {holdout.unit}; signs "
        f"right for {holdout.signs_right} of {holdout.n_signs} significant settings; decision accuracy {accuracy} "
        f"({accuracy_interval}{naive_accuracy} for {naive} alone) over {counted(holdout.n_decisions, 'pair')} of "
        f"{counted(holdout.n_configurations, 'configuration')}; regret {number_text(holdout.regret, '')} against the "
        f"best configuration there ({number_text(holdout.regret_of_baseline, '')} for the baseline)"
    )


def _prediction_text(candidate: Candidate, measured: Contrast | None) -> str:
    fitted, observed = candidate.contrast, "unknown"
    if measured is not None and measured.effect.mean is not None:
        lo, hi = measured.effect.lo, measured.effect.hi
        observed = number_text(measured.effect.mean)
        observed += "" if lo is None or hi is None else f" (95% interval {lo:+.3g} to {hi:+.3g})"
    predicted = f"{number_text(candidate.shrunk)}, shrunk from {estimate_text(fitted.effect, fitted.unit)}"
    return f"{fitted.setting} vs {fitted.baseline}: {predicted}, measured {observed}"


def verification_text(card: Card, verification: Verification) -> str:
    return (
        f"on fresh seeds {', '.join(map(str, verification.seeds))}: {verification.outcome}: "
        f"{card.recipe.objective} {verified_gain_text(card, verification)}"
    )


def verified_gain_text(card: Card, verification: Verification) -> str:
    """The recipe against the baseline, with the p that earlier verifications of the recipe raised."""
    gain, n_earlier = verification.gain, card.version - 2
    if gain is None or gain.p_holm is None:
        return gain_text(gain)
    earlier = counted(n_earlier, "earlier verification")
    return f"{gain_text(gain)}, p {gain.p_holm:.2g} after correction for {earlier}"


def rule_with_verification(card: Card) -> str:
    """The recipe in a sentence, and the result of its verification in a second one."""
    verification, rule = card.held_out.verification, rule_text(card)
    if not verification:
        return rule
    return f"{rule} Verification {verification_text(card, verification)}; grade {card.grade}: {grade_text(card)}."


def trial_text(folder: Path, card: Card, width: int | None = None) -> str:
    """The recipe as verified in a folder next to the results, for a terminal."""
    text = f"Recipe, verified in {folder.name}: {rule_with_verification(card)}"
    return textwrap.fill(text, width or terminal.terminal_width(), break_on_hyphens=False)


def grade_text(card: Card) -> str:
    """The reasons for the grade; of an abstention, its evidence."""
    evidence = card.recipe.weakness or card.recipe.unknown or IN_SAMPLE[card.recipe.grade]
    if card.recipe.place != "inside":
        evidence = f"{card.recipe.place}, not run at {card.recipe.depth} layers; at other depths {evidence}"
    if not card.recipe.changes:
        return f"{evidence}; {tests_text(card)}"
    is_supported = card.mechanism.supported_by is not None
    support = "supported by an intervention" if is_supported else "no intervention supports the mechanism"
    if passed(card.held_out.outcomes) and card.recipe.domain.is_one_scale:
        support += "; one width and one budget, so at most grade C"
    return f"{evidence}; {tests_text(card)}; {support}"


def mechanism_text(card: Card) -> str:
    """The reason for the mechanism's evidence level."""
    recipe, setting = card.recipe, card.mechanism.supported_by
    if not recipe.changes:
        return "nothing is recommended"
    if setting is None:
        return "no intervention moved one link of the chain, and the objective, in the direction of every change"
    support = next(each for each in card.mechanism.interventions if each.effect.setting == setting)
    return (
        f"{setting} alone makes {support.moved.outcome} {support.moved.verdict} and {recipe.objective} "
        f"{support.effect.verdict}, as every change of the recipe does"
    )


def learning_rate_lines(rates: LearningRate) -> Iterator[str]:
    """The tuned values of each field; and AdamW's time scale where weight decay varies."""
    for name, values in rates.tried.items():
        yield (
            f"{name} tuned for each configuration over {_numbers(values)}; best: {_numbers(rates.best[name])}; "
            f"{counted(rates.n_at_edge, 'run')} of {rates.n_runs} at the edge of the values tried"
        )
    if not rates.tried:
        used = _numbers(sorted({rate for rate, _ in rates.used})) or "unknown"
        yield f"lr was not tuned for each configuration (lr {used}): a setting may need a different one"
    for rate, decay in rates.used:
        scale = f"{1 / (rate * decay):.4g} steps" if decay else "infinite"
        yield f"lr {rate:g}, weight_decay {decay:g}: AdamW time scale 1/(lr weight_decay) = {scale}"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def negative_lines(card: Card) -> Iterator[str]:
    """Settings that are not recommended, with the reason; diverged runs; changes that verification found not needed."""
    for candidate in card.recipe.candidates:
        contrast = candidate.contrast
        if candidate.refused:
            yield f"{contrast.setting} vs {contrast.baseline}: {candidate.refused}; {effect_text(contrast)}"
    for run in card.diverged:
        yield f"run {run.run_id} diverged: {run.cause or 'cause unknown'}"
    verification = card.held_out.verification
    for ingredient in verification.ingredients if verification else ():
        if ingredient.verdict != "needed":
            yield f"on fresh seeds {ingredient.left_out} is {ingredient.verdict}: {gain_text(ingredient.gain)}"


def to_yaml(card: Card) -> str:
    """The RunConfig as YAML without a seed, its evidence as comments above it.

    Raises ValueError for a recipe with no run to start from.
    """
    recipe = card.recipe
    if recipe.config is None:
        raise ValueError(f"there is no configuration to write: {recipe.abstained}")
    runs = terminal.wrapped([f"Runs: {' '.join(recipe.run_ids) or 'none'}"], 110)
    defaulted = terminal.wrapped(defaults_texts(recipe), 110)
    comments = f"{card_text(card, 110)}\n{runs}\n{defaulted}".rstrip("\n").split("\n")
    values = recipe.config.model_dump(mode="json", exclude={"seed"})
    values = {
        name: v for name, v in values.items() if v is not None or RunConfig.model_fields[name].default is not None
    }
    first = {"n_layers", *(name for change in recipe.changes for name in change.values)}
    values = dict(sorted(values.items(), key=lambda item: item[0] not in first))
    # visible: to YAML, U+0085 and U+2028 are line breaks too, and would end a comment
    return "".join(f"{f'# {visible(line)}'.rstrip()}\n" for line in comments) + yaml_text(values)


def defaults_texts(recipe: Recipe) -> list[str]:
    """A sentence that names the fields of the configuration that are this program's defaults; none without any."""
    if not recipe.defaulted:
        return []
    return [f"Not stated by the imported table, so at this program's defaults: {', '.join(recipe.defaulted)}."]


def write_yaml(path: Path, card: Card) -> None:
    """Write `to_yaml` to a file, whole or not at all."""
    write_text(path, to_yaml(card))
