"""The report as one HTML file: no external asset, no network, the same file for the same results.

Pictures are SVG (with a PNG in it if it would be large), their numbers CSV links; what they answer to the pointer is
JSON. The template escapes names from the store, matplotlib those in pictures; the content policy of the page allows no
script but its own, and loads nothing.

`report --watch` rewrites the page while sweeps run, until no run is left: aside and renamed, so that a browser never
sees half of it; its own script loads it again. The progress on it is of each writing. Rows and figures are made again
when runs were completed, and then not for REST times as long as that took, which leaves most of the machine to the
sweep. The last page is that of `report`."""

import base64
import hashlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from sparsedepth import __version__, quantities
from sparsedepth.config.section import Fields
from sparsedepth.config.sweep import readable_definition
from sparsedepth.files import MARKER, digest, write_bytes
from sparsedepth.plots.draw import FIGURES, Progress, default_figure, drawable, silent
from sparsedepth.plots.page import Drawing, NothingToDraw, csv_bytes, marks_of, render
from sparsedepth.recipe.card import Card, read_card, recipe_table
from sparsedepth.recipe.files import to_yaml
from sparsedepth.report.content import content
from sparsedepth.report.tables import table_of
from sparsedepth.store.connection import Store, open_store
from sparsedepth.sweep.status import SweepSummary, sweep_summary, varied_fields
from sparsedepth.words.plain_text import counted, duration, in_shell, visible
from sparsedepth.words.recipe import card_markdown, paragraph, sentence
from sparsedepth.words.status import best_text, counts_text, remark_lines, running_text
from sparsedepth.words.sweep import run_text

LARGEST_SVG = 1_000_000
"""Bytes; a larger picture is embedded as PNG."""
CONTENT_SHARE = 0.3
"""Of the time of a report: effects and recipe; the rest is drawing."""
ARXIV = re.compile(r"\b[0-3]\d(0[1-9]|1[0-2])\.\d{5}\b")
REST = 5.0
SILENT_SECONDS = 120.0
"""The page says that it was not written for so long, or for as long as ten writings or two makings of its figures."""


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

    Raises ValueError as `checked`, `open_store` and `content` do, all of them before a picture is drawn."""
    verified = checked(objective, card)
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        page = html(folders, parts_of(store, folders, depth, objective, verified, progress)).encode()
    write_bytes(out, page)
    return len(page)


def checked(objective: str, card: Path | None) -> Card | None:
    """The verified card in this file. Raises ValueError for what no rows are needed to refuse: as `read_card`, for an
    objective without a better direction, and for a card that holds no verification."""
    verified = read_card(card) if card else None
    if objective != "loss":
        quantities.rankable(objective)
    if verified is not None and verified.verification is None:
        raise ValueError("this card holds no verification; give the one that `sparsedepth recipe verify` wrote")
    return verified


def parts_of(
    store: Store, folders: Sequence[Path], depth: int | None, objective: str, verified: Card | None, progress: Progress
) -> Fields:
    """What the template shows of an open store, which was read from `folders`."""
    progress("effects and recipe", 0.0)  # first, since they refuse a wrong card
    report = content(store, folders, depth, objective, verified)
    pictures, not_drawn = draw_pictures(
        store, lambda name, done: progress(f"figure {name}", CONTENT_SHARE + done * (1 - CONTENT_SHARE))
    )
    answers = {line.figure: line.answer for line in reversed(report.answers)}
    for picture in pictures:
        picture["result"] = answers.get(picture["name"], picture["caption"])
    advice = advice_of(report.card) if report.card else None
    return {"report": report, "pictures": pictures, "not_drawn": not_drawn, "advice": advice}


def html(folders: Sequence[Path], parts: Fields | None, live: Fields | None = None) -> str:
    """The page of `folders`, of which `parts` (None: no run is complete) and, while it is watched, `live` are shown.
    Values from the store are text, never markup."""
    package = files("sparsedepth.report")
    scripts = ("tables.js", "figures.js", "restore.js", *["reload.js"] * bool(live and live["seconds"]))
    script = "".join((package / name).read_text() for name in scripts)
    definitions = [definition for folder in folders if (definition := readable_definition(folder))]
    environment = Environment(
        loader=PackageLoader("sparsedepth.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["linked"] = linked
    return environment.get_template("page.html.j2").render(
        **(parts or {"report": None}),
        live=live,
        title=", ".join(definition.name for definition in definitions) or ", ".join(each.name for each in folders),
        definitions=definitions,
        style=(package / "page.css").read_text(),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        command=in_shell(*folders),
    )


def linked(text: str) -> Markup:
    """The text with a link on each number of arXiv."""
    return Markup(ARXIV.sub(r'<a href="https://arxiv.org/abs/\g<0>">\g<0></a>', str(escape(text))))


def advice_of(card: Card) -> Fields:
    config = to_yaml(card) if card.recipe.config is not None else None
    settings = recipe_table(card).without_empty()
    return {
        "rule": sentence(card),
        "settings": table_of(dict.fromkeys(settings.columns, ""), settings.rows),
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
    tokens = reader.parse(card_markdown(card, recipe_table(card)))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{int(token.tag[1]) + 2}"
    return Markup(reader.renderer.render(tokens, reader.options, {}))


def draw_pictures(store: Store, progress: Progress) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every figure that the store has numbers for, as the template shows it, and why each of the others is missing.
    Those of one run are drawn where it is the only one: with several it would be any of them."""
    alone = default_figure(store)
    of_one = [name for name, kind in FIGURES.items() if kind.of_one_run and name != alone]
    names = [name for name in FIGURES if name not in of_one]
    absent = {name: f"it is of one run: sparsedepth plot DIR --figure {name} --run ID" for name in of_one}
    pictures = []
    for name, found in drawable(store, names, progress=progress):
        if isinstance(found, NothingToDraw):
            absent[name] = str(found)
        else:
            pictures.append(
                {
                    "name": name,
                    "meaning": FIGURES[name].meaning,
                    **draw_image(name, found),
                    "numbers": data_uri(csv_bytes(found.data), "text/csv"),
                    "n_rows": len(found.data),
                }
            )
    return pictures, absent


def draw_image(name: str, drawing: Drawing) -> Fields:
    """What is inside the SVG of the figure, its size in points, its caption, and its marks."""
    page, notes, (content,) = render(drawing.page, ".svg", has_caption=False)  # the page has it, in its own type
    width, height = (round(72 * float(inches), 1) for inches in page.get_size_inches())
    if len(content) > LARGEST_SVG:
        uri = data_uri(render(drawing.page, ".png", has_caption=False).pictures[0], "image/png")
        inside = f'<image href="{uri}" width="{width}" height="{height}"/>'
    else:
        inside = inside_svg(name, content.decode())
    marks = marks_of(page)._asdict()
    return {
        "svg": Markup(inside),
        "width": width,
        "height": height,
        "caption": notes.replace(r"\$", "$"),
        "marks": marks,
    }


def inside_svg(name: str, svg: str) -> str:
    """What matplotlib wrote between the tags of its SVG, as a part of a page: without what is for a file alone, without
    names but those of marks (`plots.page.mark_id`) and of parts used again, which are of this figure."""
    inside = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", inside, flags=re.DOTALL)
    inside = inside.replace('id="mark:', 'data-mark="').replace("xlink:href", "href")
    inside = re.sub(r'<g id="[^"]*">', "<g>", inside)
    return re.sub(r'(id="|#)([a-z]+[0-9a-f]{10})', rf"\1{name}-\2", inside)


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


class WatchedReport:
    """The page of folders that are read again and again."""

    def __init__(
        self, folders: Sequence[Path], out: Path, seconds: float, depth: int | None, objective: str, card: Path | None
    ) -> None:
        """Raises ValueError for a path that is no folder of a sweep, and as `checked` does."""
        for folder in folders:
            if not folder.is_dir():
                what = "is a file, which does not change" if folder.is_file() else "is not an existing folder"
                raise ValueError(f"{folder} {what}; give the results folder of a sweep, or leave out --watch")
        self.folders = folders
        self.out = out
        self.seconds = seconds
        self._asked = depth, objective, checked(objective, card)
        self._parts: Fields | None = None
        self._problem = "no run is complete yet"
        self._version: str | None = None
        self._next = self._duration = 0.0
        self._curves: dict[str, list[tuple[float, float]]] = {}
        """run_id -> (share done, loss) of a running run, as it was at each writing."""
        self._begun: dict[Path, tuple[float, float]] = {}
        """Folder -> time and share done at the first writing."""

    def rounds(self) -> Iterator[None]:
        """Write the page once for each item; the last is written without one. Raises ValueError where the report of the
        complete runs cannot be made."""
        while True:
            summaries = [sweep_summary(folder) for folder in self.folders]  # before the rows: of no later state
            is_begun = any(summary.states for summary in summaries)
            if is_begun and not any(summary.is_left for summary in summaries):
                break
            self._write(summaries, self.seconds)
            if self._make(summaries):
                self._write(summaries, self.seconds)
            yield
        self._next = 0.0
        self._make(summaries)
        if self._problem:
            self._write(summaries)
            raise ValueError(self._problem)
        write_bytes(self.out, html(self.folders, self._parts).encode())

    def stop(self) -> None:
        """Write the page as of now, with the figures there are, so that it no longer loads itself again."""
        self._write([sweep_summary(folder) for folder in self.folders])

    def _make(self, summaries: Sequence[SweepSummary]) -> bool:
        """Make rows and figures again if they are due; whether they were."""
        begun = time.monotonic()
        version = _version(self.folders)
        if version == self._version or begun < self._next:
            return False
        try:
            with open_store(*self.folders, skip_damaged=True) as store:
                self._parts = parts_of(store, self.folders, *self._asked, silent)
            self._problem = ""
        except ValueError as error:
            is_empty = not any(summary.counts["complete"] for summary in summaries)
            self._parts = None
            self._problem = "no run is complete yet" if is_empty else str(error)
        self._version = version
        self._duration = time.monotonic() - begun
        self._next = time.monotonic() + REST * self._duration
        return True

    def _write(self, summaries: Sequence[SweepSummary], seconds: float = 0.0) -> None:
        note = f"{self._problem[:1].upper()}{self._problem[1:]}. " if self._problem else ""
        if seconds:
            note += f"This page loads itself again every {duration(seconds)} until no run is left, as it is then: with "
            note += "its place, filters, order and opened parts."
        else:
            note += "This page is no longer written."
        now = time.time()
        live = {
            "sweeps": [self._progress_of(*of, now) for of in zip(summaries, self.folders, strict=True)],
            "note": visible(note),
            "at": now,  # in seconds since 1970
            "written": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now)),
            "seconds": seconds,  # until the page loads itself again; 0: never
            "silent": max(SILENT_SECONDS, 10 * seconds, 2 * self._duration),
        }
        write_bytes(self.out, html(self.folders, self._parts, live).encode())

    def _progress_of(self, summary: SweepSummary, folder: Path, now: float) -> Fields:
        """The progress of a folder's sweep, as the template shows it: the lines of `status`, with each running run by
        what the sweep varies and by its loss so far."""
        lines, curves = [], []
        definition = summary.definition
        for state in summary.states:
            if state.state == "running":
                name = run_text(varied_fields(definition, state.config)) if definition and state.config else ""
                lines.append(f"running: {running_text(state, name or state.run_id)}")
                points = self._curves.setdefault(state.run_id, [])
                if state.progress and state.progress.loss is not None:
                    points.append((state.progress.done, state.progress.loss))
                curves += [curve_of(name or state.run_id, points)] if len(points) > 1 else []
        for (state, cause), n in summary.ended.most_common():
            lines.append(f"{state} {counted(n, 'run')}: {cause or 'no reason given'}")
        lines += [best_text(summary.best)] if summary.best else []
        begun, share = self._begun.setdefault(folder, (now, summary.share))
        gained = summary.share - share
        return {
            "folder": visible(str(folder)) if len(self.folders) > 1 else "",
            "share": summary.share,
            "percent": f"{math.floor(100 * summary.share)}%",
            "left": duration((now - begun) * (1 - summary.share) / gained) if gained > 0 else "",
            "counts": counts_text(summary) if summary.states else "no runs yet",
            "lines": [visible(line) for line in (*lines, *remark_lines(summary))],
            "curves": curves,
        }


def curve_of(name: str, points: Sequence[tuple[float, float]]) -> Fields:
    """A line of the loss over the share done, in a picture of 200 by 50, from the highest loss down to the lowest."""
    losses = [loss for _, loss in points]
    span = max(losses) - min(losses) or 1.0
    places = " ".join(f"{200 * done:.1f},{2 + 46 * (max(losses) - loss) / span:.1f}" for done, loss in points)
    return {"name": visible(name), "points": places, "first": f"{losses[0]:.4g}", "last": f"{losses[-1]:.4g}"}


def _version(folders: Sequence[Path]) -> str:
    """Changes when a run is completed or removed."""
    paths = [path for folder in folders for path in folder.glob(f"runs/*/{MARKER}")]
    return digest(sorted((str(path.parent), path.stat().st_mtime_ns) for path in paths))
