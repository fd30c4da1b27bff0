"""The files of a recipe: the RunConfig as YAML with the card in comments, the card as a Markdown page and as JSON, and
the sweep of two settings that were not run together."""

from collections.abc import Iterable
from pathlib import Path

from sparsedepth.config.load import yaml_text
from sparsedepth.config.plain_text import visible, wrapped
from sparsedepth.config.run import RunConfig
from sparsedepth.files import write_text
from sparsedepth.recipe import text
from sparsedepth.recipe.card import Card, card_path, write_card
from sparsedepth.recipe.verify import pair_yaml
from sparsedepth.store.query_result import to_markdown

WIDTH = 110


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
    """The path of the Markdown page of the recipe in `path`."""
    return card_path(path).with_suffix(".md")


def pair_path(path: Path) -> Path:
    """'recipe.pair.yaml' of 'recipe.yaml'."""
    return path.with_suffix(f".pair{path.suffix}")


def to_yaml(card: Card) -> str:
    """The RunConfig as YAML without a seed, its evidence as comments above it.

    Raises ValueError for a recipe with no run to start from.
    """
    recipe = card.recipe
    if recipe.config is None:
        raise ValueError(f"there is no configuration to write: {recipe.abstained}")
    runs = [f"Runs: {' '.join(recipe.run_ids) or 'none'}", *defaults_texts(card)]
    comments = f"{text.card_text(card, WIDTH, lines=None)}\n\n{wrapped(runs, WIDTH)}".rstrip("\n").split("\n")
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


# Markdown


def card_markdown(card: Card) -> str:
    """The card as one page. Names of corpora and settings cannot inject markup (`_inert`)."""
    verification, has_settings = card.verification, bool(card.recipe.candidates)
    parts = [
        f"# Recipe card, version {card.version}",
        "## Rule",
        f"**{_inert(text.sentence(card))}**",
        *map(_inert, defaults_texts(card)),
        "## Settings",
        to_markdown(text.recipe_table(card).without_empty()) if has_settings else "none",
        _bullets(text.paragraph(card)),
        "## Tests",
        _bullets(text.tests_lines(card)),
    ]
    if card.holdout and card.holdout.predictions:
        rows = [(p.setting, *map(text.effect_text, (p.predicted, p.measured))) for p in card.holdout.predictions]
        lines = [("setting", "predicted", "measured"), ("---",) * 3, *rows]
        parts.append(f"At {card.holdout.depth} layers, from those at {', '.join(map(str, card.holdout.fitted_on))}:")
        parts.append("\n".join(f"| {' | '.join(map(_inert, line))} |" for line in lines))
    if verification:
        parts += [f"Verification: {_inert(text.verification_text(card))}", _bullets(text.ingredient_texts(card))]
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
        "Cost": cost if known.node_hours is None else f"{cost}; {known.node_hours:.3g} node hours on a cluster",
        "Command of this card": known.command,
    }
    return _bullets(f"{name}: {fact}" for name, fact in facts.items() if fact)


def _inert(line: str) -> str:
    """One line without markup."""
    return " ".join(line.split()).replace("<", "&lt;").replace("`", "'").replace("|", "/")


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_inert(line)}" for line in lines) or "none"
