"""The files of a recipe: the RunConfig as YAML with the card in comments, the card as a Markdown page and as JSON, and
the sweep of two settings that were not run together."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsedepth.config.load import yaml_text
from sparsedepth.config.plain_text import visible
from sparsedepth.config.run import RunConfig
from sparsedepth.files import write_text
from sparsedepth.recipe import text
from sparsedepth.recipe.card import Card, card_path, write_card
from sparsedepth.recipe.verify import pair_yaml
from sparsedepth.store import terminal
from sparsedepth.store.render import to_markdown

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
    comments = f"{text.card_text(card, WIDTH, lines=None)}\n\n{terminal.wrapped(runs, WIDTH)}".rstrip("\n").split("\n")
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


class Verbatim(str):
    """Text that is Markdown already."""


def card_markdown(card: Card) -> str:
    """The card as one page. Names of corpora and settings cannot inject markup (`_inert`)."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("sparsedepth.recipe", "."),
        undefined=StrictUndefined,
        finalize=_inert,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["bullets"] = _bullets
    return environment.get_template("card.md.j2").render(
        card=card,
        recipe=card.recipe,
        table=Verbatim(to_markdown(text.recipe_table(card).without_empty())),
        text=text,
        defaults=defaults_texts(card),
    )


def _inert(value: Any) -> str:
    """One line without markup."""
    if isinstance(value, Verbatim):
        return value
    return " ".join(str(value).split()).replace("<", "&lt;").replace("`", "'").replace("|", "/")


def _bullets(lines: Iterable[str]) -> Verbatim:
    return Verbatim("\n".join(f"- {_inert(line)}" for line in lines) or "none")
