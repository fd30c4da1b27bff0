"""A recipe card as a Markdown page of twelve sections, from the template card.md.j2."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsedepth.config.load import yaml_text
from sparsedepth.effects.depth_slope import slope_sentence
from sparsedepth.effects.sentences import number_text, ratio_text
from sparsedepth.files import write_text
from sparsedepth.recipe import card_text, conclusion
from sparsedepth.recipe.card import Card, card_path, write_card
from sparsedepth.recipe.tables import measured_table
from sparsedepth.store.render import to_markdown


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
    environment.filters |= {"number": number_text, "interval": _interval, "ratio": ratio_text, "bullets": _bullets}
    return environment.get_template("card.md.j2").render(
        card=card,
        recipe=card.recipe,
        differing=_differing_yaml(card),
        measured=Verbatim(to_markdown(measured_table(card).without_empty())),
        text=card_text,
        conclusion=conclusion,
        slope_sentence=slope_sentence,
    )


def write_page(path: Path, card: Card) -> tuple[Path, Path]:
    """Write the card's JSON and Markdown next to `path`; returns their paths."""
    data, page = write_card(path, card), page_path(path)
    write_text(page, card_markdown(card))
    return data, page


def page_path(path: Path) -> Path:
    """The path of the Markdown page of the recipe in `path`."""
    return card_path(path).with_suffix(".md")


def _differing_yaml(card: Card) -> Verbatim | None:
    """The fields that differ from RunConfig's defaults."""
    if card.recipe.config is None:
        return None
    differing = card.recipe.config.model_dump(mode="json", exclude_defaults=True, exclude={"seed"})
    return Verbatim(yaml_text({"n_layers": card.recipe.depth, **differing}).rstrip())


def _inert(value: Any) -> str:
    """One line without markup."""
    if isinstance(value, Verbatim):
        return value
    return " ".join(str(value).split()).replace("<", "&lt;").replace("`", "'").replace("|", "/")


def _bullets(lines: Iterable[str]) -> Verbatim:
    return Verbatim("\n".join(f"- {_inert(line)}" for line in lines) or "none")


def _interval(lo: float | None, hi: float | None) -> str:
    return "no interval" if lo is None or hi is None else f"({lo:+.3g} to {hi:+.3g})"
