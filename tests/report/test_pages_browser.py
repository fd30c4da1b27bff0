"""Pages of nine kinds of results in Chromium: wide and narrow, light and dark, by pointer and by keyboard, and without
JavaScript. With axe-core in `AXE` (npm pack axe-core; the path of its axe.min.js) they are also checked by it."""

import json
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support import report_pages
from support.browser import CHROMIUM, Browser

from sparsedepth.report.page import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package: chromium)"),
]

LOOK = """JSON.stringify({
  width: document.documentElement.scrollWidth, window: innerWidth,
  answers: [...document.querySelectorAll(".answers li")].map((one) => one.getBoundingClientRect().bottom + scrollY),
  broken: [...document.querySelectorAll(".facts a, nav a")].filter((one) => !document.querySelector(one.hash)).length,
  figures: [...document.querySelectorAll("figure svg")].map((one) => one.clientWidth),
  texts: [...document.querySelectorAll("figure")].flatMap((figure) => {
    const box = figure.querySelector("svg").getBoundingClientRect();
    return [...figure.querySelectorAll("svg text")].filter((text) => {
      const { left, right, top, bottom } = text.getBoundingClientRect();
      return left < box.left - 1 || right > box.right + 1 || top < box.top - 1 || bottom > box.bottom + 1;
    }).map((text) => `${figure.id}: ${text.textContent}`);
  }),
})"""

SORT = """JSON.stringify([...document.querySelectorAll("[data-table]")].flatMap((frame) => {
  const heads = [...frame.querySelectorAll("th")], body = frame.querySelector("tbody");
  return heads.filter((head) => head.classList.contains("number")).flatMap((head) => {
    const column = heads.indexOf(head), wrong = [];
    for (const sign of [1, -1]) {
      head.querySelector("button").click();
      const cells = [...body.rows].map((row) => row.cells[column].dataset).filter(({ key }) => key !== "");
      const isWrong = cells.some(({ key, unit }, i) =>
        i && cells[i - 1].unit === unit && sign * (key - cells[i - 1].key) < 0);
      if (isWrong || cells.some(({ key }) => Number.isNaN(Number(key)))) wrong.push(`${head.textContent} ${sign}`);
    }
    return wrong;
  });
}))"""

AXE = "axe.run().then(({ violations }) => violations.map((one) => `${one.id}: ${one.nodes[0].html.slice(0, 200)}`))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Name -> page, made when it is first asked for."""
    made = {}

    def page(kind) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind.__name__)
            made[kind] = folder / "report.html"
            write_report(kind(folder / "results"), made[kind])
        return made[kind]

    return page


def show(browser: Browser, page: Path, width: int = 1400, scheme: str = "light") -> dict:
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.resize(width)
    browser.open(page.as_uri())
    return json.loads(browser.value(LOOK))


@pytest.mark.parametrize("kind", report_pages.KINDS, ids=lambda kind: kind.__name__)
def test_answers_come_first_tables_sort_and_nothing_is_cut(kind, pages, browser):
    page = pages(kind)
    browser.events.clear()
    for width, scheme in ((1400, "light"), (390, "dark")):
        seen = show(browser, page, width, scheme)
        assert seen["width"] <= seen["window"] == width
        assert seen["answers"] and not seen["broken"] and not seen["texts"]
        assert seen["figures"] and min(seen["figures"]) > 150
        if width == 1400:
            assert max(seen["answers"]) <= 700
            assert json.loads(browser.value(SORT)) == []
        if script := os.environ.get("AXE"):
            browser.value(f"{Path(script).read_text()}; 0")
            assert browser.settled(AXE) == []
    assert all(urlsplit(address).scheme in ("file", "data") for address in browser.asked_for())
    assert not browser.errors()


PLACES = """JSON.stringify((() => {
  const rows = [...document.querySelectorAll("#table-runs tr")].filter((row) => row.rowIndex < 9);
  return rows.map((row) => [...row.cells].map((cell) => Math.round(cell.getBoundingClientRect().left)));
})())"""


FITS = """JSON.stringify((({ scrollWidth, clientWidth }, heads, more) => ({
  fits: scrollWidth <= clientWidth,
  shown: heads.filter((head) => head.offsetWidth).map((head) => head.textContent.trim()),
  hidden: heads.filter((head) => !head.offsetWidth).length, more: more.hidden ? "" : more.textContent,
}))(document.querySelector("#table-runs .scroll"), [...document.querySelectorAll("#table-runs th")],
  document.querySelector("#table-runs .more")))"""


def test_of_a_wide_table_the_columns_that_fit_are_shown_and_a_button_shows_the_others(pages, browser):
    """Loss first; at another width others fit, also once it is sorted; in print all are there."""

    def fits():
        browser.value("document.querySelector('#table-runs').scrollIntoView({ behavior: 'instant' })")
        time.sleep(0.5)
        return json.loads(browser.value(FITS))

    show(browser, pages(report_pages.many_runs), 640)
    narrow = fits()
    assert narrow["fits"] and narrow["shown"][:2] == ["run_id", "val_loss"]
    assert narrow["more"] == f"{narrow['hidden']} more columns"
    browser.value("document.querySelector('#table-runs th:nth-child(2) button').click()")
    browser.resize(800)
    wider = fits()
    assert wider["fits"] and wider["hidden"] < narrow["hidden"]
    browser.value("document.querySelector('#table-runs .more').click()")
    whole = fits()
    assert not whole["hidden"] and whole["more"] == "fewer columns"
    browser.value("document.querySelector('#table-runs .more').click()")
    browser.ask("Emulation.setEmulatedMedia", media="print")
    assert not json.loads(browser.value(FITS))["hidden"]
    browser.ask("Emulation.setEmulatedMedia", media="screen")
    assert fits() == wider


def test_a_long_table_keeps_its_columns_and_lays_out_the_rows_in_view_when_sorted(pages, browser):
    show(browser, pages(report_pages.many_runs))
    before = json.loads(browser.value(PLACES))
    browser.value("document.querySelector('#table-runs th:nth-child(2) button').click()")
    after = json.loads(browser.value(PLACES))
    assert all(max(abs(x - y) for x, y in zip(before[0], row, strict=True)) <= 1 for row in (*before, *after))
    seen = "checkVisibility({ contentVisibilityAuto: true })"
    rows = f"[...document.querySelectorAll('#table-runs tbody tr')].map((row) => row.cells[0].{seen})"
    browser.value("document.querySelector('#table-runs').scrollIntoView({ behavior: 'instant' })")
    time.sleep(0.5)
    n_laid_out = browser.value(f"{rows}.filter(Boolean).length")
    assert 10 < n_laid_out < 150  # of 216


@pytest.mark.parametrize("kind", report_pages.KINDS, ids=lambda kind: kind.__name__)
def test_without_javascript_answers_figures_and_tables_stand(kind, pages, browser):
    browser.ask("Emulation.setScriptExecutionDisabled", value=True)
    try:
        seen = show(browser, pages(kind))
    finally:
        browser.ask("Emulation.setScriptExecutionDisabled", value=False)
    assert seen["answers"] and max(seen["answers"]) <= 700 and seen["figures"] and not seen["texts"]


POINT = """(() => {
  const svg = document.querySelector("#figure-FIGURE svg");
  svg.scrollIntoView({ block: "center", behavior: "instant" });
  const { points } = JSON.parse(document.querySelector("#figure-FIGURE script").textContent);
  const { a, d, e, f } = svg.getScreenCTM();
  return JSON.stringify(points.map(([x, y, , , text, runs]) => [x * a + e, y * d + f, text, runs]));
})()"""


def points_of(browser: Browser, figure: str) -> list:
    """Where its points are in the window, once what is near them has been laid out."""
    browser.value(POINT.replace("FIGURE", figure))
    time.sleep(0.5)
    return json.loads(browser.value(POINT.replace("FIGURE", figure)))


def pointer(browser: Browser, kind: str, x: float, y: float, buttons: int = 0) -> None:
    name = {"buttons": buttons, "button": "left" if kind != "mouseMoved" else "none", "clickCount": 1}
    browser.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **name)


def press(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def tip(browser: Browser, figure: str) -> str:
    return browser.value(f"(({{ hidden, textContent }}) => hidden ? '' : textContent)"
                         f"(document.querySelector('#figure-{figure} .tip'))")  # fmt: skip


def test_the_pointer_and_the_arrow_keys_tell_the_values_of_a_point(pages, browser):
    show(browser, pages(report_pages.many_runs))
    x, y, text, _ = points_of(browser, "depth")[0]
    pointer(browser, "mouseMoved", x + 2, y)
    assert tip(browser, "depth").endswith(text) and "n_layers 2: " in text and "6 seeds" in text
    pointer(browser, "mouseMoved", 5, 5)
    browser.value("document.querySelector('#figure-effects .scroll').focus()")
    press(browser, "ArrowRight")
    assert "2 layers" in tip(browser, "effects") and "weight_decay=" in tip(browser, "effects")
    press(browser, "Escape")
    assert tip(browser, "effects") == ""
    assert not browser.errors()


def test_a_rectangle_keeps_its_runs_in_the_table_and_buttons_switch_depths(pages, browser):
    show(browser, pages(report_pages.many_runs))
    points = points_of(browser, "chain")
    (left, top, _, runs), *_ = points
    inside = {run for x, y, _, run in points if left - 8 <= x <= left + 8 and top - 8 <= y <= top + 8}
    pointer(browser, "mouseMoved", left - 8, top - 8)
    pointer(browser, "mousePressed", left - 8, top - 8, 1)
    pointer(browser, "mouseMoved", left, top, 1)
    pointer(browser, "mouseMoved", left + 8, top + 8, 1)
    pointer(browser, "mouseReleased", left + 8, top + 8)
    kept = "[...document.querySelectorAll('#table-runs tbody tr:not([hidden])')].map((one) => one.cells[0].textContent)"
    assert runs in inside and set(browser.value(kept)) == inside
    browser.value("document.querySelector('#figure-chain .scroll').focus()")
    press(browser, "Escape")
    assert len(browser.value(kept)) == 216
    marked = "[...document.querySelectorAll('#figure-chain [data-mark^=\"16 layers\"]')]"
    drawn = f"{marked}.filter((one) => getComputedStyle(one).display !== 'none').length"
    assert browser.value(drawn) > 0
    buttons = "[...document.querySelectorAll('#figure-chain .groups button')]"
    browser.value(f"{buttons}.find((one) => one.textContent === '16 layers').click()")
    assert browser.value(drawn) == 0


def test_a_rectangle_on_parallel_coordinates_dims_the_other_proposals(pages, browser):
    show(browser, pages(report_pages.search))
    x, y, *_ = points_of(browser, "parallel")[0]
    pointer(browser, "mousePressed", x - 4, y - 4, 1)
    pointer(browser, "mouseMoved", x + 4, y + 4, 1)
    pointer(browser, "mouseReleased", x + 4, y + 4)
    assert browser.value("document.querySelectorAll('#table-runs tbody tr:not([hidden])').length") < 12
    assert 0 < browser.value("document.querySelectorAll('#figure-parallel .dim').length") < 12


def test_a_filter_takes_conditions(pages, browser):
    show(browser, pages(report_pages.many_runs))
    ask = """(() => { const frame = document.querySelector("#table-runs"), input = frame.querySelector("input");
      input.value = "TEXT"; input.dispatchEvent(new Event("input")); return frame.querySelector("output").value; })()"""
    said = {text: browser.value(ask.replace("TEXT", text)) for text in ("n_layers=12", "n_layers<=4 seed!=0", "=")}
    assert said == {"n_layers=12": "36 of 216", "n_layers<=4 seed!=0": "60 of 216", "=": "0 of 216"}
