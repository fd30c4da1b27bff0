"""A card as one sentence, one table and one paragraph: the same on the terminal, on its page and in the report. And the
files of a recipe: the RunConfig as YAML with the card in comments, the card as a Markdown page and as JSON, and the
sweep of two settings that were not run together."""

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from sparsedepth.config.load import yaml_text
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.effect import Effect
from sparsedepth.files import write_text
from sparsedepth.quantities.levels import POWER
from sparsedepth.recipe.card import Candidate, Card, Comparison, Recipe, card_path, write_card
from sparsedepth.recipe.verify import pair_yaml
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.effects import interval_text, setting_text, size_text, title, unit_text
from sparsedepth.words.formats import to_markdown
from sparsedepth.words.plain_text import counted, terminal_width, visible, wrapped
from sparsedepth.words.runs import layers_hint
from sparsedepth.words.scaling import multiplier_text
from sparsedepth.words.table import fitted_table

LISTS: dict[Comparison, str] = {"better": "do", "worse": "don't", "not shown": "not shown"}
"""Comparison with the baseline -> the list that a setting is on, unless it is refused."""
OPTIONAL = ("lr", "params", "seeds", "flops", "detectable", "compute")
WIDTH = 110
"""Of comments above YAML."""
LINES = 23
"""At most so many on a terminal; the command adds a hint."""
ROOM = ((12, 12), (8, 8), (6, 6), (6, 4), (5, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 1), (1, 0))
"""Rows of the table and findings below it, in the order in which they are tried."""


def sentence(card: Card) -> str:
    """'At 24 layers use depth_scale=lns: val_loss lower by 0.0644 nat/token (0.042 to 0.0853), at equal FLOPs.'"""
    recipe = card.recipe
    caution = f"No evidence about depth: {recipe.weakness}. " if recipe.weakness else ""
    caution += f"{recipe.unknown}. " if recipe.unknown else ""
    if recipe.depth is None:
        return f"{caution}No recommendation: {recipe.abstained}."
    at = f"At {counted(recipe.depth, 'layer')}"
    if recipe.place != "inside" and (recipe.changes or recipe.is_compared):
        at += f", which were not run, by those at {' and '.join(map(str, recipe.shown_at))},"
    if recipe.effect:
        gain = f"{difference_text(recipe.effect)}{_cost_text(recipe.effect)}"
        if len(recipe.changes) == 1 and (worth := recipe.changes[0].compute):
            gain += f", worth {multiplier_text(*worth, ' times the compute')}"
        return f"{caution}{at} use {' and '.join(change.setting for change in recipe.changes)}: {gain}."
    if not recipe.is_compared or any(candidate.comparison == "better" for candidate in recipe.candidates):
        return f"{caution}{at} no recommendation: {recipe.abstained}."
    return f"{caution}{at} {_nothing_text(recipe)}."


def _nothing_text(recipe: Recipe) -> str:
    """'nothing tried was shown to help; a gain smaller than about 0.07 nat/token would probably not have been seen'."""
    settings = [candidate for candidate in recipe.candidates if not candidate.is_combination]
    n_worse = sum(candidate.comparison == "worse" and not candidate.refused for candidate in settings)
    worse = f", {n_worse} of {counted(len(settings), 'setting')} {'was' if n_worse == 1 else 'were'} shown to hurt"
    text = f"nothing tried was shown to help{worse if n_worse else ''}"
    unseen = [candidate.effect.detectable for candidate in settings if candidate.comparison == "not shown"]
    sizes = sorted(filter(None, unseen))
    if not sizes:
        return text
    is_ratio = recipe.unit == "ln ratio"
    ends = dict.fromkeys(size_text(size, recipe.unit) if is_ratio else f"{size:.2g}" for size in (sizes[0], sizes[-1]))
    size = f"{' to '.join(ends)}{unit_text(recipe.unit)}"
    return f"{text}; a gain smaller than about {size} would probably not have been seen"


def difference_text(effect: Effect) -> str:
    """'val_loss lower by 0.0644 nat/token (0.042 to 0.0853)', or 'memory lower, times 0.5 (0.4 to 0.6)'."""
    assert effect.estimate is not None
    ends = [end for end in (effect.lo, effect.hi) if end is not None]
    word = "lower" if effect.estimate < 0 else "higher"
    if effect.unit == "ln ratio":
        size, by = size_text(effect.estimate, effect.unit), ","
    else:
        flip = -1 if effect.estimate < 0 else 1
        size, by = f"{abs(effect.estimate):.3g}{unit_text(effect.unit)}", " by"
        ends = sorted(flip * end for end in ends)
    interval = f" ({' to '.join(size_text(end, effect.unit) for end in ends)})" if ends else ""
    return f"{effect.outcome} {word}{by} {size}{interval}"


def _cost_text(effect: Effect) -> str:
    if effect.flops is None:
        return ", at unknown cost"
    return f", at {effect.flops:.3g} times the FLOPs" if abs(effect.flops - 1) > 0.005 else ", at equal FLOPs"


def effect_text(effect: Effect | None) -> str:
    """'-0.0644 nat/token (-0.0853 to -0.042)'."""
    if effect is None or effect.estimate is None:
        return "not compared"
    return interval_text(effect.model_dump())


def recipe_table(card: Card, most: int | None = None) -> QueryResult:
    """The settings tried, a row each: those to do, not to do, and not shown; combinations last in their list. Of `most`
    rows each list has one at least, and the worth in compute is without its interval, which would wrap."""
    names = ("list", "effect", "lo", "hi", "detectable", "seeds", "diverged", "lr", "flops", "params", "compute")
    order = [*LISTS]
    found = sorted(
        card.recipe.candidates,
        key=lambda c: (order.index(c.comparison), c.is_combination, -abs(c.effect.estimate or 0.0)),
    )
    first = {candidate.comparison: candidate for candidate in reversed(found)}
    kept = {c.setting for c in sorted(found, key=lambda c: c is not first[c.comparison])[:most]}
    rows = tuple(_row(candidate, most is not None) for candidate in found if candidate.setting in kept)
    return QueryResult(columns=(*names, "setting"), rows=rows)


def _row(candidate: Candidate, is_short: bool) -> tuple:
    effect = candidate.effect
    sizes = (effect.estimate, effect.lo, effect.hi)
    texts = [None if size is None else size_text(size, effect.unit, "+") for size in sizes]
    is_open = candidate.comparison == "not shown" and effect.detectable is not None
    detectable = size_text(effect.detectable or 0.0, effect.unit) if is_open else None
    listed = "left out" if candidate.refused else LISTS[candidate.comparison]
    listed = listed if effect.lo is not None else "no interval"
    costs = [None if cost is None else f"x{cost:.3g}" for cost in (effect.flops, effect.params_total)]
    lr = None if effect.lr is None else f"{effect.lr:g}"
    multiplier, lo, hi = candidate.compute or (0.0, None, None)
    worth = f"x{multiplier_text(multiplier, *((None, None) if is_short else (lo, hi)))}" if multiplier else None
    return (listed, *texts, detectable, effect.seeds, effect.diverged or None, lr, *costs, worth, candidate.setting)


def paragraph(card: Card, most: int | None = None) -> list[str]:
    """Sentences: what depends on another setting and what else was found, in at most `most` sentences; what the table
    shows; where it was seen."""
    recipe = card.recipe
    hint = layers_hint(recipe.objective)
    findings = [*_findings(recipe)]
    findings += [f"{hint[0].upper()}{hint[1:]}."] if hint else []
    explained = [f"{recipe.left_out[0].upper()}{recipe.left_out[1:]}."] if recipe.left_out else []
    explained += [_explained(recipe)] if recipe.candidates else []
    seen = [f"Seen only on {recipe.seen_on}."] if recipe.run_ids else []
    return [*findings[:most], *explained, *seen]


def _explained(recipe: Recipe) -> str:
    effect = recipe.candidates[0].effect
    over = "over" if effect.unit == "ln ratio" else "minus"
    value, lr = effect.baseline_value, effect.lr_baseline
    known = [recipe.baseline_text, f"lr {lr:g}" if lr is not None and recipe.tried else ""]
    if value is not None and effect.unit != "ln ratio":
        known.append(f"{recipe.objective} {value:.3g}")
    known.append(counted(recipe.baseline_seeds, "seed") if recipe.baseline_seeds else "")
    parts = " of seeds and choice of lr" if recipe.tried else ""
    at = "" if recipe.place == "inside" else f" at {recipe.shown_at[0]} layers"
    return (
        f"{title(effect.outcome, effect.unit)}; setting {over} baseline{at} ({', '.join(filter(None, known))}); "
        f"lo, hi: 95% interval{parts}; detectable: seen with {POWER:.0%} power."
    )


def _findings(recipe: Recipe) -> Iterator[str]:
    """Better settings that are left out, effects that depend on another setting, lost runs, withheld verdicts."""
    first, second = recipe.untested or ("", "")
    if recipe.untested:
        yield f"{second} is better alone too, but was not run with {first}: -o writes the sweep that tests both."
    for candidate in recipe.candidates:
        if candidate.refused and candidate.setting != second:
            yield f"{candidate.setting} is left out: {candidate.refused}."
    told = {frozenset((e.setting, e.context)) for e in recipe.others if e.question == "beside"}
    for effect in recipe.others:
        if effect.question == "beside" or frozenset((effect.setting, effect.context)) not in told:
            yield f"But {setting_text(effect.model_dump())}: {effect.verdict}, {effect_text(effect)}."
    lost = [("the baseline", candidate.effect.diverged_baseline) for candidate in recipe.candidates[:1]]
    lost += [(candidate.setting, candidate.effect.diverged) for candidate in recipe.candidates]
    if texts := [f"{counted(n, 'run')} of {name}" for name, n in lost if n]:
        yield f"Diverged: {', '.join(texts)}."
    withheld: dict[str, list[str]] = {}
    for effect in (candidate.effect for candidate in recipe.candidates):
        if effect.reason:
            word = "lr decides: " if effect.verdict == "lr decides" else ""
            withheld.setdefault(f"{word}{effect.reason}", []).append(effect.setting)
    for reason, names in withheld.items():
        yield f"{'; '.join(names[:3])}{' ...' if len(names) > 3 else ''}: {reason}."


def tests_lines(card: Card, is_short: bool = False) -> list[str]:
    """'passed   equal cost: FLOPs x1', a line for each test; or those not run in one line."""
    lines = [f"{test.outcome:<8} {test.name}: {test.text}" for test in card.tests]
    missing = [f"{test.name} ({test.text})" for test in card.tests if test.outcome == "not run"]
    if not is_short or not missing:
        return lines
    return [*(line for line in lines if not line.startswith("not run")), f"not run  {', '.join(missing)}"]


def card_text(card: Card, width: int | None = None, lines: int | None = LINES) -> str:
    """The card for a terminal, in at most `lines` lines; what has no room is on the card's page."""
    width = width or terminal_width()
    text = ""
    for n_rows, n_findings in ROOM if lines else [(None, None)]:
        text = _composed(card, width, n_rows, n_findings)
        if lines is None or text.count("\n") < lines:
            break
    return text


def _composed(card: Card, width: int, n_rows: int | None, n_findings: int | None) -> str:
    n = len(card.recipe.candidates)
    table = fitted_table(recipe_table(card, n_rows), OPTIONAL, width).text if n else ""
    more = f"\n{counted(n - n_rows, 'more setting')}: on the card that -o writes" if n_rows and n > n_rows else ""
    parts = [
        textwrap.fill(sentence(card), width, break_on_hyphens=False),
        f"{table}{more}",
        wrapped(tests_lines(card, is_short=n_rows is not None), width),
        wrapped(paragraph(card, n_findings), width),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


def verification_text(card: Card) -> str:
    """'confirmed on fresh seeds 3, 4, 5: val_loss -0.2 nat/token (...)'; '' without a verification."""
    verification = card.verification
    if verification is None:
        return ""
    gain, n_earlier, seeds = verification.gain, card.version - 2, ", ".join(map(str, verification.seeds))
    text = f"{verification.outcome} on fresh seeds {seeds}: {card.recipe.objective} {effect_text(gain)}"
    if n_earlier > 0 and gain is not None and gain.p_adjusted is not None:
        text += f", p {gain.p_adjusted:.2g} after correction for {counted(n_earlier, 'earlier verification')}"
    return text


def ingredient_texts(card: Card) -> list[str]:
    """'without depth_scale=lns: +0.02 nat/token (...): needed', for each change left out of the recipe."""
    ingredients = card.verification.ingredients if card.verification else ()
    return [f"without {each.left_out}: {effect_text(each.effect)}: {each.verdict}" for each in ingredients]


def trial_text(folder: Path, card: Card) -> str:
    """The recipe as verified in a folder next to the results, for a terminal."""
    text = f"Recipe, verified in {folder.name}: {sentence(card)} It was {verification_text(card)}."
    return textwrap.fill(text, terminal_width(), break_on_hyphens=False)


# Files


def write_recipe(path: Path, card: Card) -> None:
    """Write the YAML at `path`, and the other files next to it."""
    write_text(path, to_yaml(card))
    write_page(path, card)
    if card.recipe.untested:
        write_text(pair_path(path), pair_yaml(card))


def write_page(path: Path, card: Card) -> tuple[Path, Path]:
    """Write the card's JSON and Markdown next to `path`; returns their paths."""
    data, page = write_card(path, card), page_path(path)
    write_text(page, card_markdown(card))
    return data, page


def page_path(path: Path) -> Path:
    return card_path(path).with_suffix(".md")


def pair_path(path: Path) -> Path:
    """'recipe.pair.yaml' of 'recipe.yaml'."""
    return path.with_suffix(f".pair{path.suffix}")


def to_yaml(card: Card) -> str:
    """The RunConfig as YAML without a seed, its evidence as comments above it.

    Raises ValueError for a recipe with no run to start from."""
    recipe = card.recipe
    if recipe.config is None:
        raise ValueError(f"there is no configuration to write: {recipe.abstained}")
    runs = [f"Runs: {' '.join(recipe.run_ids) or 'none'}", *defaults_texts(card)]
    comments = f"{card_text(card, WIDTH, lines=None)}\n\n{wrapped(runs, WIDTH)}".rstrip("\n").split("\n")
    values = recipe.config.model_dump(mode="json", exclude={"seed"})
    values = {
        name: v for name, v in values.items() if v is not None or RunConfig.model_fields[name].default is not None
    }
    first = {"n_layers", *(name for change in recipe.changes for name in change.values)}
    values = dict(sorted(values.items(), key=lambda item: item[0] not in first))
    # visible: to YAML, U+0085 and U+2028 are line breaks too, and would end a comment
    return "".join(f"{f'# {visible(line)}'.rstrip()}\n" for line in comments) + yaml_text(values)


def defaults_texts(card: Card) -> list[str]:
    """A sentence that names the fields of the configuration that are this program's defaults; none without any."""
    names = ", ".join(card.recipe.defaulted)
    return [f"Not stated by the imported table, so at this program's defaults: {names}."] if names else []


def card_markdown(card: Card) -> str:
    """The card as one page. Names of corpora and settings cannot inject markup (`_inert`)."""
    verification, has_settings = card.verification, bool(card.recipe.candidates)
    parts = [
        f"# Recipe card, version {card.version}",
        "## Rule",
        f"**{_inert(sentence(card))}**",
        *map(_inert, defaults_texts(card)),
        "## Settings",
        to_markdown(recipe_table(card).without_empty()) if has_settings else "none",
        _bullets(paragraph(card)),
        "## Tests",
        _bullets(tests_lines(card)),
    ]
    if card.holdout and card.holdout.predictions:
        rows = [(p.setting, *map(effect_text, (p.predicted, p.measured))) for p in card.holdout.predictions]
        lines = [("setting", "predicted", "measured"), ("---",) * 3, *rows]
        parts.append(f"At {card.holdout.depth} layers, from those at {', '.join(map(str, card.holdout.fitted_on))}:")
        parts.append("\n".join(f"| {' | '.join(map(_inert, line))} |" for line in lines))
    if verification:
        parts += [f"Verification: {_inert(verification_text(card))}", _bullets(ingredient_texts(card))]
    return "\n\n".join([*parts, "## Provenance", _provenance(card)]) + "\n"


def _provenance(card: Card) -> str:
    known, verification = card.provenance, card.verification
    cost = ", ".join(f"{hours:.3g} h on {device}" for device, hours in known.hours.items()) or "unknown"
    facts = {
        "Runs": " ".join(known.run_ids) or "none",
        "Runs of the verification": " ".join(verification.run_ids) if verification else "",
        "Seeds": ", ".join(map(str, known.seeds)) or "none",
        "Manifests": known.manifests or "not all present",
        "Code": "; ".join(known.code),
        "Kernels": "; ".join(known.kernels),
        "Data": "; ".join(known.data),
        "Cost of all runs": cost
        if known.node_hours is None
        else f"{cost}; {known.node_hours:.3g} node hours on a cluster",
        "Command of this card": known.command,
    }
    return _bullets(f"{name}: {fact}" for name, fact in facts.items() if fact)


def _inert(line: str) -> str:
    """One line without markup."""
    return " ".join(line.split()).replace("<", "&lt;").replace("`", "'").replace("|", "/")


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_inert(line)}" for line in lines) or "none"
