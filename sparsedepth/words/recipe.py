"""Words of a recipe: the card as one sentence, one table and one paragraph, the same on the terminal, on its page and
in the report; why something is not recommended; and the outcomes of its tests."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsedepth.quantities.levels import POWER
from sparsedepth.words.effects import (
    all_diverged,
    interval_text,
    second_look_lines,
    setting_text,
    size_text,
    title,
    unit_text,
    untuned_line,
)
from sparsedepth.words.formats import to_markdown
from sparsedepth.words.plain_text import commas, counted, listed, sentence_of, terminal_width, wrapped
from sparsedepth.words.runs import layers_hint
from sparsedepth.words.scaling import multiplier_text
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.effects.effect import Effect
    from sparsedepth.recipe.card import Card, Holdout, Recipe
    from sparsedepth.store.query_result import QueryResult

OPTIONAL = ("lr", "params", "fitted", "seeds", "flops", "detectable", "compute")
SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
ROWS, FINDINGS = 5, 2
"""Of the card on the terminal; its page has all."""
OUTCOMES = ("failed", "passed", "not run")
"""Of tests, in the order in which they are told."""
NAMED = 3
"""Settings of one reason that are named."""


def sentence(card: "Card") -> str:
    """'At 24 layers use depth_scale=lns: val_loss lower by 0.0644 nat/token (0.042 to 0.0853), at equal FLOPs. 24
    layers are not worth their cost: ...'"""
    recipe = card.recipe
    weak = f"No evidence about depth: {recipe.weakness}." if recipe.weakness else ""
    unknown = f"{recipe.unknown}." if recipe.unknown else ""
    return " ".join(filter(None, [weak, unknown, _choice(recipe), sentence_of(recipe.cost_of_depth)]))


def _choice(recipe: "Recipe") -> str:
    if recipe.depth is None:
        return f"No recommendation: {recipe.abstained}."
    at = f"At {counted(recipe.depth, 'layer')}"
    if recipe.place != "inside" and (recipe.changes or recipe.is_compared):
        at += f", which were not run, by those at {' and '.join(map(str, recipe.shown_at))},"
    if recipe.effect:
        gain = f"{difference_text(recipe.effect)}{_cost_text(recipe.effect)}"
        if len(recipe.changes) == 1 and (worth := recipe.changes[0].compute):
            gain += f", worth {multiplier_text(*worth, ' times the compute')}"
        return f"{at} use {' and '.join(change.setting for change in recipe.changes)}: {gain}."
    if not recipe.is_compared or any(candidate.comparison == "better" for candidate in recipe.candidates):
        return f"{at} no recommendation: {recipe.abstained}."
    return f"{at} {_nothing_text(recipe)}."


def _nothing_text(recipe: "Recipe") -> str:
    """'nothing tried was shown to help; a gain of about 0.07 nat/token or more would probably have been seen'."""
    settings = [candidate for candidate in recipe.candidates if not candidate.is_combination]
    text = "nothing tried was shown to help"
    if n_worse := sum(candidate.comparison == "worse" and not candidate.refused for candidate in settings):
        text += f", {n_worse} of {counted(len(settings), 'setting')} {'was' if n_worse == 1 else 'were'} shown to hurt"
    if not recipe.unseen:
        return text
    is_ratio = recipe.unit == "ln ratio"
    ends = [size_text(size, recipe.unit) if is_ratio else f"{size:.2g}" for size in recipe.unseen]
    size = f"{' to '.join(dict.fromkeys((ends[0], ends[-1])))}{unit_text(recipe.unit)}"
    at = "" if recipe.place == "inside" else f" at {recipe.shown_at[0]}"
    return f"{text}; a gain of about {size} or more would probably have been seen{at}"


def claim_of(recipe: "Recipe") -> str:
    """The changes, depth and objective of a recipe, as text."""
    named = " and ".join(sorted(change.setting for change in recipe.changes))
    return f"{named or 'nothing'} at n_layers={recipe.depth} for {recipe.objective}"


def difference_text(effect: "Effect") -> str:
    """'val_loss lower by 0.0644 nat/token (0.042 to 0.0853)', or 'memory lower, times 0.5 (0.4 to 0.6)'."""
    assert effect.estimate is not None
    sign = -1 if effect.estimate < 0 and effect.unit != "ln ratio" else 1
    ends = sorted(sign * end for end in (effect.lo, effect.hi) if end is not None)
    interval = f" ({' to '.join(size_text(end, effect.unit) for end in ends)})" if ends else ""
    by = "," if effect.unit == "ln ratio" else " by"
    return (
        f"{effect.outcome} {'lower' if effect.estimate < 0 else 'higher'}{by} "
        f"{size_text(sign * effect.estimate, effect.unit)}{unit_text(effect.unit)}{interval}"
    )


def _cost_text(effect: "Effect") -> str:
    if effect.flops is None:
        return ", at unknown cost"
    return f", at {effect.flops:.3g} times the FLOPs" if abs(effect.flops - 1) > 0.005 else ", at equal FLOPs"


def effect_text(effect: "Effect | None") -> str:
    """'-0.0644 nat/token (-0.0853 to -0.042)'."""
    return "not compared" if effect is None or effect.estimate is None else interval_text(effect.model_dump())


# The paragraph


def paragraph(card: "Card", most: int | None = None) -> list[str]:
    """Sentences: what depends on another setting and what else was found, in at most `most` sentences; what the table
    shows; where it was seen."""
    recipe = card.recipe
    explained = (
        sentence_of(recipe.left_out),
        _explained(recipe) if recipe.candidates else "",
        sentence_of(untuned_line(recipe.shared_lr)) if recipe.candidates else "",
        f"Seen only on {recipe.seen_on}." if recipe.run_ids else "",
    )
    return [*[*_findings(recipe)][:most], *filter(None, explained)]


def _explained(recipe: "Recipe") -> str:
    effect = recipe.candidates[0].effect
    value = effect.fitted_baseline
    lr, tuned = effect.lr_baseline, next(iter(recipe.tried), "")
    is_ratio = effect.unit == "ln ratio"
    known = (
        recipe.baseline_text,
        f"{tuned} {lr:g}" if lr is not None and tuned else "",
        f"fitted {recipe.objective} {value:.4g}" if value is not None and not is_ratio else "",
        counted(recipe.baseline_seeds, "seed") if recipe.baseline_seeds else "",
    )
    at = "" if recipe.place == "inside" else f" at {recipe.shown_at[0]} layers"
    interval = f"95% interval{f' of seeds and choice of {tuned}' * bool(tuned)}"
    if len(recipe.candidates) > 1:
        interval += "; verdicts: adjusted over settings, as intervals are not"
    return (
        f"{title(effect.outcome, effect.unit)}; setting {'over' if is_ratio else 'minus'} baseline{at} "
        f"({commas(filter(None, known))}); lo, hi: {interval}; "
        f"detectable: seen with {POWER:.0%} power."
    )


def _findings(recipe: "Recipe") -> Iterator[str]:
    """Better settings that are left out, effects that depend on another setting, lost runs, withheld verdicts."""
    first, second = recipe.untested or ("", "")
    if recipe.untested:
        yield f"{second} is better alone too, but was not run with {first}: -o writes the sweep that tests both."
    for candidate in recipe.candidates:
        if candidate.refused and candidate.setting != second:
            yield f"{candidate.setting} is left out: {candidate.refused}."
    for candidate in sorted(recipe.candidates, key=lambda candidate: not candidate.recommended):
        yield from map(sentence_of, second_look_lines(candidate.effect.model_dump()))
    told = {frozenset((e.setting, e.context)) for e in recipe.others if e.question == "beside"}
    for effect in recipe.others:
        if effect.question == "beside" or frozenset((effect.setting, effect.context)) not in told:
            yield f"But {setting_text(effect.model_dump())}: {effect.verdict}, {effect_text(effect)}."
    effects = [candidate.effect for candidate in recipe.candidates]
    lost = {"the baseline": effects[0].diverged_baseline if effects else 0}
    lost |= {effect.setting: effect.diverged for effect in effects}
    if texts := [f"{counted(n, 'run')} of {name}" for name, n in lost.items() if n]:
        yield f"Diverged: {commas(texts)}."
    withheld: dict[str, list[str]] = {}
    for effect in effects:
        if effect.reason:
            word = "lr decides: " if effect.verdict == "lr decides" else ""
            withheld.setdefault(f"{word}{effect.reason}", []).append(effect.setting)
    for reason, names in withheld.items():
        yield f"{'; '.join(names[:NAMED])}{' ...' * (len(names) > NAMED)}: {reason}."
    if hint := layers_hint(recipe.objective):
        yield sentence_of(hint)


# The card


def tests_lines(card: "Card") -> list[str]:
    """'passed   equal cost: FLOPs x1', a line for each test."""
    return [f"{test.outcome:<8} {test.name}: {test.text}" for test in card.tests]


def told_by_outcome(card: "Card") -> list[str]:
    """'passed: equal cost (FLOPs x1)', a line for each outcome."""
    return [
        f"{outcome}: {commas(tests)}"
        for outcome in OUTCOMES
        if (tests := [f"{test.name} ({test.text})" for test in card.tests if test.outcome == outcome])
    ]


def card_text(card: "Card", table: "QueryResult", width: int | None = None, findings: int | None = None) -> str:
    """The card for a terminal, with rows of its table; of a part of them, tests and `findings` in short."""
    width = width or terminal_width()
    n_more = len(card.recipe.candidates) - len(table.rows)
    more = f"\n{counted(n_more, 'more setting')}: on the card that -o writes" if n_more else ""
    tests = tests_lines(card) if findings is None else told_by_outcome(card)
    parts = [
        textwrap.fill(sentence(card), width, break_on_hyphens=False),
        f"{fitted_table(table, OPTIONAL, width).text}{more}" if table.rows else "",
        wrapped(tests, width),
        wrapped(paragraph(card, findings), width),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


def card_markdown(card: "Card", table: "QueryResult") -> str:
    """The card as one page. Names of corpora and settings cannot inject markup (`_inert`)."""
    verification = card.verification
    parts = [
        f"# Recipe card, version {card.version}",
        "## Rule",
        f"**{_inert(sentence(card))}**",
        *map(_inert, defaults_texts(card)),
        "## Settings",
        to_markdown(table.without_empty()) if table.rows else "none",
        _bullets(paragraph(card)),
        "## Tests",
        _bullets(tests_lines(card)),
    ]
    if card.holdout and card.holdout.predictions:
        rows = [(p.setting, effect_text(p.predicted), effect_text(p.measured)) for p in card.holdout.predictions]
        lines = [("setting", "predicted", "measured"), ("---",) * 3, *rows]
        parts += [
            f"At {card.holdout.depth} layers, from those at {commas(card.holdout.fitted_on)}:",
            "\n".join(f"| {' | '.join(map(_inert, line))} |" for line in lines),
        ]
    if verification:
        parts += [f"Verification: {_inert(verification_text(card))}", _bullets(ingredient_texts(card))]
    return "\n\n".join([*parts, "## Provenance", _bullets(_provenance(card))]) + "\n"


def _provenance(card: "Card") -> Iterator[str]:
    known = card.provenance
    verification = card.verification
    cost = commas(f"{hours:.3g} h on {device}" for device, hours in known.hours.items()) or "unknown"
    cost += "" if known.node_hours is None else f"; {known.node_hours:.3g} node hours on a cluster"
    facts = {
        "Runs": " ".join(known.run_ids) or "none",
        "Runs of the verification": " ".join(verification.run_ids) if verification else "",
        "Seeds": commas(known.seeds) or "none",
        "Manifests": known.manifests or "not all present",
        "Code": "; ".join(known.code),
        "Kernels": "; ".join(known.kernels),
        "Data": "; ".join(known.data),
        "Cost of all runs": cost,
        "Command of this card": known.command,
    }
    return (f"{name}: {fact}" for name, fact in facts.items() if fact)


def _inert(line: str) -> str:
    """One line without markup."""
    return " ".join(line.split()).replace("<", "&lt;").replace("`", "'").replace("|", "/")


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_inert(line)}" for line in lines) or "none"


def defaults_texts(card: "Card") -> list[str]:
    """A sentence that names the fields of the configuration that are this program's defaults; none without any."""
    names = commas(card.recipe.defaulted)
    return [f"Not stated by the imported table, so at this program's defaults: {names}."] if names else []


# Verification


def verification_text(card: "Card") -> str:
    """'confirmed on fresh seeds 3, 4, 5: val_loss -0.2 nat/token (...)'; '' without a verification."""
    verification = card.verification
    if verification is None:
        return ""
    gain = verification.gain
    n_earlier = card.version - 2
    seeds = commas(verification.seeds)
    text = f"{verification.outcome} on fresh seeds {seeds}: {card.recipe.objective} {effect_text(gain)}"
    if n_earlier > 0 and gain is not None and gain.p_adjusted is not None:
        text += f", p {gain.p_adjusted:.2g} after correction for {counted(n_earlier, 'earlier verification')}"
    return text


def ingredient_texts(card: "Card") -> list[str]:
    """'without depth_scale=lns: +0.02 nat/token (...): needed', for each change left out of the recipe."""
    ingredients = card.verification.ingredients if card.verification else ()
    return [f"without {each.left_out}: {effect_text(each.effect)}: {each.verdict}" for each in ingredients]


def trial_text(folder: Path, card: "Card") -> str:
    """The recipe as verified in a folder next to the results, for a terminal."""
    text = f"Recipe, verified in {folder.name}: {sentence(card)} It was {verification_text(card)}."
    return textwrap.fill(text, terminal_width(), break_on_hyphens=False)


def in_sample_text(recipe: "Recipe", effect: "Effect") -> str:
    p = "" if effect.p_adjusted is None else f", adjusted p {effect.p_adjusted:.3g}"
    where = "" if recipe.place == "inside" else f" at {recipe.shown_at[0]} layers, the nearest run"
    return f"{counted(effect.seeds or 0, 'seed')}{p}{where}"


def held_out_text(holdout: "Holdout", is_other: bool) -> str:
    """What the smaller depths recommend, and what became of it; `is_other`: it is not the recipe of the card."""
    text = f"{commas(holdout.fitted_on)} layers recommend {' and '.join(holdout.changes) or 'no change'}"
    text += ", not this recipe" * is_other + f"; {holdout.outcome}" * bool(holdout.changes) + f" at {holdout.depth}"
    if holdout.errors is not None:
        text += "; mean error of its predictions {:.2g}, of predicting no effect {:.2g}".format(*holdout.errors)
    return text


# Why not, and where


def nothing_finished(n_tuning: int, n_diverged: int, only_measured: bool) -> str:
    """Why a store without a result has no recipe."""
    if n_diverged:
        return all_diverged(n_diverged)
    if n_tuning:
        return f"only tuning runs are complete so far ({n_tuning})"
    return "no finished run" + ": models that were only measured, whose training choices are not known" * only_measured


def nothing_recommended(recipe: "Recipe", data: Sequence[str], elsewhere: Sequence[int] = ()) -> str:
    """Why no setting is recommended; `data`: the fields of the data in which the runs differ; `elsewhere`: the depths
    at which settings can be compared."""
    if not recipe.candidates:
        if data:
            return f"the runs differ only in their data ({commas(data[:NAMED])}), which is not a remedy"
        if len(recipe.shown_at) > 1:
            return f"no setting was run at both {recipe.shown_at[0]} and {recipe.shown_at[1]} layers"
        others = f"; settings were run at {listed([*map(str, elsewhere)])} layers (--depth)" if elsewhere else ""
        return f"its complete runs have one configuration: there is nothing to compare{others}"
    if refused := [c for c in recipe.candidates if c.refused and c.comparison == "better"]:
        return "; ".join(f"{candidate.setting} is better, but {candidate.refused}" for candidate in refused)
    if not recipe.is_compared:
        return next((c.effect.reason for c in recipe.candidates if c.effect.reason), "there is no interval")
    return "nothing tried was shown to help"


def domain_text(
    corpora: Sequence[str], groups: Sequence[str], sizes: Mapping[str, tuple[float, float]], devices: Iterable[str]
) -> str:
    """'task state_tracking S5, width 32, 223k to 696k parameters, 288k tokens, CPU'. `sizes`: '{} tokens' -> least and
    largest."""
    tasks = [name.removeprefix("task:") for name in corpora if name.startswith("task:")]
    data = f"corpus {commas(corpora) or 'unknown'}"
    if tasks and len(tasks) == len(corpora):
        of_groups = f"{' ' if len(tasks) == 1 else ' of '}{commas(groups)}" if groups else ""
        data = f"task {commas(tasks)}{of_groups}"
    texts = [text.format(" to ".join(dict.fromkeys(map(_short, ends)))) for text, ends in sizes.items()]
    names = (name.partition(" (")[0] for name in devices)
    return commas([data, *texts, *dict.fromkeys(name.upper() if name in ("cpu", "mps") else name for name in names)])


def _short(value: float) -> str:
    """'288k', '1.3M'."""
    scale, letter = next(each for each in SCALES if abs(value) >= each[0])
    return f"{value / (scale or 1):.3g}{letter}"
