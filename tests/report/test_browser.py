"""The page in headless Chromium, without a network."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest
from support.report_folder import HOSTILE, fill

from sparsedepth.plots.draw import FIGURES
from sparsedepth.report import page as report_page
from sparsedepth.report.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--enable-logging=stderr", "--virtual-time-budget=5000"),
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package: chromium)")

PROBE = """
window.addEventListener("load", () => {
  const found = { width: innerWidth, scroll: document.documentElement.scrollWidth, hostile: window.hostile ?? null };
  const figures = [...document.querySelectorAll("figure svg")];
  const drawn = (one) => one.querySelectorAll("path").length;
  found.images = figures.map((one) => [one.ariaLabel.split(":")[0], drawn(one), one.clientWidth]);
  const captions = [...document.querySelectorAll("figure[id] figcaption")];
  found.captions = captions.map((one) => [one.textContent, parseFloat(getComputedStyle(one).fontSize)]);
  found.whole = ["runs", "effects"].map((name) => document.querySelector(`#table-${name} > .scroll`))
    .map((one) => one.scrollHeight <= one.offsetHeight);
  const frame = document.querySelector("#table-runs"), table = frame.querySelector("table");
  const heads = [...table.tHead.rows[0].cells], column = (name) => heads.findIndex((one) => one.textContent === name);
  const keys = (name) => [...table.tBodies[0].rows].map((row) => row.cells[column(name)].dataset.key);
  const press = (name) => heads[column(name)].querySelector("button").click();
  press("val_loss"); found.up = keys("val_loss"); found.sorted = heads[column("val_loss")].getAttribute("aria-sort");
  press("val_loss"); found.down = keys("val_loss"); found.turned = heads[column("val_loss")].getAttribute("aria-sort");
  press("depth_scale"); found.words = keys("depth_scale"); found.marks = heads.filter((one) => one.ariaSort).length;
  const buttons = heads.map((one) => one.querySelector("button"));
  found.reached = buttons.filter((one) => { one.focus(); return document.activeElement === one; }).length;
  found.heads = heads.length;
  const cards = [...document.querySelectorAll(".card .scroll:not(.page)")];
  found.cards = cards.map((table) => table.scrollWidth <= table.clientWidth);
  const filter = frame.querySelector("input");
  filter.value = "NONE diverged"; filter.dispatchEvent(new Event("input"));
  found.shown = [...table.tBodies[0].rows].filter((row) => row.offsetParent !== null).length;
  found.said = frame.querySelector("output").value;
  parent.postMessage(JSON.stringify(found), "*");
});
"""


def chromium(page: Path, *flags: str) -> subprocess.CompletedProcess:
    profile = page.parent / "profile"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    fill(folder / "results", corpus=HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "FIGURES", {name: FIGURES[name] for name in ("variance", "effects", "pareto")})
        write_report([folder / "results"], folder / "report.html")
    return folder / "report.html"


def probed(page: Path, width: int) -> dict:
    """What a copy of the page, with a script that uses it, finds of itself in a frame of that width (a window cannot be
    as narrow as a phone)."""
    text = re.sub(r"script-src 'sha256-[^']*'", "script-src 'unsafe-inline'", page.read_text())
    inner = escape(text.replace("</body>", f"<script>{PROBE}</script></body>"), quote=True)
    listen = 'addEventListener("message", (event) => { document.body.dataset.found = event.data; });'
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{inner}"></iframe>'
    found = page.with_name(f"probed-{width}.html")
    found.write_text(f"<!doctype html><meta charset=utf-8><body><script>{listen}</script>{frame}</body>")
    done = chromium(found, "--window-size=1400,1000", "--dump-dom")
    (answer,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    return json.loads(unescape(answer))


def test_no_console_error(page):
    done = chromium(page, "--dump-dom")
    assert "Every complete run" in done.stdout
    assert "CONSOLE" not in done.stderr
    broken = page.with_name("broken.html")
    broken.write_text(page.read_text().replace("</body>", "<script>nonsense()</script></body>"))
    assert "CONSOLE" in chromium(broken, "--dump-dom").stderr  # the policy refuses any other script, and says so


@pytest.mark.parametrize("width", [390, 1280])
def test_tables_sort_and_filter_and_figures_show_at_any_width(page, width):
    found = probed(page, width)
    assert found["width"] == width
    assert found["scroll"] <= width and found["cards"] == [True]  # the recipe's table is not cut
    assert found["hostile"] is None and found["whole"] == [True, True]  # no scroll bar inside that of the page
    assert all(size > 14 for _, size in found["captions"]) and "95% interval" in found["captions"][1][0]
    assert width < 1280 or all(shown > 0.6 * (1280 - 64) for _, _, shown in found["images"])
    assert [name for name, _, _ in found["images"]] == ["variance", "effects", "pareto"]
    assert all(drawn > 10 and shown > 100 for _, drawn, shown in found["images"])
    numbers = [float(key) for key in found["up"] if key]
    assert numbers == sorted(numbers) and len(numbers) == 12 and found["up"][-1] == ""
    assert [float(key) for key in found["down"] if key] == numbers[::-1] and found["down"][-1] == ""
    assert (found["sorted"], found["turned"], found["marks"]) == ("ascending", "descending", 1)
    assert found["words"] == ["lns"] * 6 + ["none"] * 7
    assert found["reached"] == found["heads"]  # buttons: Enter and space press them
    assert (found["shown"], found["said"]) == (1, "1 of 13")


def test_the_page_prints(page):
    target = page.with_suffix(".pdf")
    chromium(page, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    assert target.read_bytes().startswith(b"%PDF") and target.stat().st_size > 20_000
