"""The page of `report --watch` in Chromium, headless, beside a sweep that runs: real runs, a real browser.

The browser is driven through its debugging pipe, so that the page can be asked again and again as time goes by.
"""

import contextlib
import os
import signal
import time
from urllib.parse import urlsplit

import pytest
from support.browser import CHROMIUM, Browser
from support.tiny_sweep import definition, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package: chromium)"),
]

FILTER = """(() => {
  const input = document.querySelector("#table-runs input");
  if (input) {
    input.value = "ok";
    input.dispatchEvent(new Event("input"));
    [...document.querySelectorAll("#table-runs th button")].find((one) => one.textContent === "val_loss").click();
    scrollTo({ top: 300, behavior: "instant" });
    window.mark = 1;
  }
  return input !== null;
})()"""


@pytest.fixture
def started():
    """Starts a command of ours, which ends with the test."""
    processes = []

    def begin(*arguments):
        processes.append(start(*arguments))
        return processes[-1]

    yield begin
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def browser(tmp_path):
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.close()


def test_the_page_follows_a_sweep_while_it_runs(tmp_path, browser, started):
    """It shows runs running, then complete; nothing is cut off at 1,200 and 390 px; it is loaded again as it was."""
    out, page = tmp_path / "results", tmp_path / "page.html"
    fields = {"base": {"train_tokens": 128 * 600, "n_layers": 2}, "space": {"lr": [1e-3, 3e-3]}, "seeds": [0]}
    one_by_one = ("--workers", 1, "--stack", 1)
    sweep = started("sweep", definition(tmp_path, **fields), "--out", out, *one_by_one, "--device", "cpu")
    while not (out / "sweep.yaml").exists():
        assert sweep.poll() is None
        time.sleep(0.2)
    watching = started("report", out, "-o", page, "--watch", 0.5)
    while not page.exists():
        assert watching.poll() is None
        time.sleep(0.2)
    browser.open(page.as_uri())
    browser.wait(lambda seen: "running: lr=" in seen["progress"] and "0 complete" in seen["progress"])
    first = browser.wait(lambda seen: seen["rows"] == 1 and seen["images"] and "1 complete" in seen["progress"])
    assert "lowest single run: val_loss" in first["progress"]
    for width in (1200, 390):
        browser.resize(width)
        seen = browser.wait(lambda seen, width=width: seen["window"] == width and seen["rows"])
        assert seen["width"] <= width
    while not browser.value(FILTER):
        time.sleep(0.2)
    if browser.look()["progress"]:
        seen = browser.wait(lambda seen: seen["mark"] is None and seen["rows"])
        assert seen["filter"] == "ok" and seen["sorted"] == "val_loss" and seen["top"] > 100, "loaded again as it was"
    last = browser.wait(lambda seen: seen["rows"] == 2 and not seen["progress"])
    assert last["mark"] is None and len(last["images"]) > 4 and last["width"] <= 390
    browser.value("window.mark = 2")
    time.sleep(3)
    assert browser.look()["mark"] == 2, "the last page stays"
    assert all(urlsplit(address).scheme in ("file", "data") for address in browser.asked_for())
    assert not browser.errors()
    assert sweep.wait(60) == 0
    said, errors = watching.communicate(timeout=300)
    assert watching.returncode == 0 and "no run is left" in said and "error" not in errors
