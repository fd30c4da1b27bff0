"""The files of a recipe: the RunConfig as YAML with the card in comments, the card as a Markdown page and as JSON, and
the sweep of two settings that were not run together."""

from pathlib import Path

from sparsedepth.config.load import yaml_text
from sparsedepth.config.run import RunConfig
from sparsedepth.files import write_text
from sparsedepth.recipe.card import Card, card_path, recipe_table, write_card
from sparsedepth.recipe.verify import pair_fields
from sparsedepth.words.plain_text import visible, wrapped
from sparsedepth.words.recipe import card_markdown, card_text, defaults_texts

WIDTH = 110
"""Of comments above YAML."""


def write_recipe(path: Path, card: Card) -> None:
    """Write the YAML at `path`, and the other files next to it."""
    write_text(path, to_yaml(card))
    write_page(path, card)
    if card.recipe.untested:
        write_text(pair_path(path), yaml_text(pair_fields(card)))


def write_page(path: Path, card: Card) -> tuple[Path, Path]:
    """Write the card's JSON and Markdown next to `path`; returns their paths."""
    data, page = write_card(path, card), page_path(path)
    write_text(page, card_markdown(card, recipe_table(card)))
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
    comments = f"{card_text(card, recipe_table(card), WIDTH)}\n\n{wrapped(runs, WIDTH)}".rstrip("\n").split("\n")
    values = recipe.config.model_dump(mode="json", exclude={"seed"})
    values = {
        name: v for name, v in values.items() if v is not None or RunConfig.model_fields[name].default is not None
    }
    first = {"n_layers", *(name for change in recipe.changes for name in change.values)}
    values = dict(sorted(values.items(), key=lambda item: item[0] not in first))
    # visible: to YAML, U+0085 and U+2028 are line breaks too, and would end a comment
    return "".join(f"{f'# {visible(line)}'.rstrip()}\n" for line in comments) + yaml_text(values)
