"""The report as one HTML file: no external asset, no network, the same file for the same results.

Pictures are data URIs (SVG, or PNG if the SVG would be large), their numbers CSV links. The template escapes names from
the store; the content policy of the page allows no script but its own, and loads nothing.
"""

import base64
import hashlib
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup
from matplotlib.figure import Figure

from sparsedepth.files import write_bytes
from sparsedepth.plots.draw import FIGURES, NUMBERS_SHARE, Progress, default_figure, drawable, silent
from sparsedepth.plots.page import Drawing, csv_bytes, render
from sparsedepth.recipe.card import Card, read_card
from sparsedepth.recipe.text import card_markdown, paragraph, recipe_table, sentence, to_yaml
from sparsedepth.report.content import check, content, definitions_of, title_of
from sparsedepth.report.tables import table_of
from sparsedepth.store.connection import Store, open_store

LARGEST_SVG = 1_000_000
"""Bytes; a larger picture is embedded as PNG."""
CONTENT_SHARE = 0.3
"""Of the time of a report: effects and recipe; the rest is drawing."""


def write_report(
    folders: Sequence[Path],
    out: Path,
    depth: int | None = None,
    objective: str = "loss",
    card: Path | None = None,
    skip_damaged: bool = False,
    progress: Progress = silent,
) -> int:
    """Write the page atomically; returns its size in bytes. `card` is that of a verified recipe.

    Raises ValueError as `read_card`, `check`, `open_store` and `content` do, all of them before a picture is drawn.
    """
    verified = read_card(card) if card else None
    check(objective, verified)
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        page = html(folders, parts_of(store, folders, depth, objective, verified, progress))
    text = page.encode()
    write_bytes(out, text)
    return len(text)


def parts_of(
    store: Store,
    folders: Sequence[Path],
    depth: int | None = None,
    objective: str = "loss",
    verified: Card | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """What the template shows of an open store, which was read from `folders`."""
    progress("effects and recipe", 0.0)  # first, since they refuse a wrong card
    report = content(store, folders, depth, objective, verified)
    pictures, not_drawn = draw_pictures(
        store, lambda name, done: progress(f"figure {name}", CONTENT_SHARE + done * (1 - CONTENT_SHARE))
    )
    advice = advice_of(report.card) if report.card else None
    return {"report": report, "pictures": pictures, "not_drawn": not_drawn, "advice": advice}


def html(folders: Sequence[Path], parts: dict[str, Any] | None, live: dict[str, Any] | None = None) -> str:
    """The page of `folders`, of which `parts` (None: no run is complete) and, while it is watched, `live` are shown.
    Values from the store are text, never markup."""
    package = files("sparsedepth.report")
    scripts = ("tables.js", "reload.js") if live and live["seconds"] else ("tables.js",)
    script = "".join((package / name).read_text() for name in scripts)
    definitions = definitions_of(folders)
    environment = Environment(
        loader=PackageLoader("sparsedepth.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        **(parts or {"report": None, "pictures": [], "not_drawn": {}, "advice": None}),
        live=live,
        title=title_of(folders, definitions),
        definitions=definitions,
        style=(package / "page.css").read_text(),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        command=" ".join(shlex.quote(str(folder)) for folder in folders),
    )


def advice_of(card: Card) -> dict[str, Any]:
    """The parts of the recipe card that the template shows."""
    config = to_yaml(card) if card.recipe.config is not None else None
    settings = recipe_table(card).without_empty()
    return {
        "rule": sentence(card),
        "settings": table_of([(name, "") for name in settings.columns], settings.rows),
        "tests": card.tests,
        "paragraph": paragraph(card),
        "page": card_html(card),
        "config": config,
        "config_uri": data_uri(config.encode(), "text/yaml") if config else None,
    }


def card_html(card: Card) -> Markup:
    """The card's Markdown as HTML, with headings below those of the report. Names in it are untrusted: no HTML, links
    or images."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "image", "autolink"])
    tokens = reader.parse(card_markdown(card))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{int(token.tag[1]) + 2}"
    return Markup(reader.renderer.render(tokens, reader.options, {}))


def draw_pictures(store: Store, progress: Progress = silent) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every figure that the store has numbers for, as the template shows it, and why each of the others is missing.
    Those of one run are drawn where it is the only one: with several it would be any of them."""
    alone = default_figure(store)
    of_one = [name for name, kind in FIGURES.items() if kind.of_one_run and name != alone]
    names = [name for name in FIGURES if name not in of_one]
    drawings, absent = drawable(store, names, progress=lambda name, done: progress(name, done * NUMBERS_SHARE))
    absent |= {name: f"it is of one run: sparsedepth plot DIR --figure {name} --run ID" for name in of_one}
    pictures = []
    for done, (name, drawing) in enumerate(drawings.items()):
        progress(name, NUMBERS_SHARE + (1 - NUMBERS_SHARE) * done / len(drawings))
        numbers = {"numbers": data_uri(csv_bytes(drawing.data), "text/csv"), "n_rows": len(drawing.data)}
        pictures.append({"name": name, "meaning": FIGURES[name].meaning, **draw_image(drawing), **numbers})
    return pictures, absent


def draw_image(drawing: Drawing) -> dict[str, Any]:
    """The figure as an SVG, or as a PNG if the SVG would be large; its size in CSS pixels."""
    pages: list[Figure] = []

    def page() -> Figure:
        pages.append(drawing.page())
        return pages[-1]

    content, kind = render(page, ".svg"), "image/svg+xml"
    if len(content) > LARGEST_SVG:
        content, kind = render(page, ".png"), "image/png"
    width, height = pages[-1].get_size_inches()
    return {"uri": data_uri(content, kind), "width": round(96 * width), "height": round(96 * height)}


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
