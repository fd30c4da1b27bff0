"""The page of `report --watch` in Chromium, headless, beside a sweep that runs: real runs, a real browser.

The browser is driven through its debugging pipe, so that the page can be asked again and again as time goes by.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from urllib.parse import urlsplit

import pytest
from support.tiny_sweep import definition, start

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package: chromium)"),
]

LOOK = """JSON.stringify({
  progress: document.querySelector("#progress")?.innerText ?? "",
  rows: document.querySelectorAll("#table-runs tbody tr").length,
  images: [...document.images].filter((one) => one.naturalWidth > 100).map((one) => one.alt.split(":")[0]),
  ready: document.readyState === "complete", width: document.documentElement?.scrollWidth, window: innerWidth,
  mark: window.mark ?? null})"""

FILTER = """(() => {
  const input = document.querySelector("#table-runs input");
  if (input) { input.value = "TEXT"; window.mark = 1; }
  return input !== null;
})()"""


class Browser:
    """One page of a headless Chromium, through --remote-debugging-pipe."""

    def __init__(self, profile):
        read, self.write_end = os.pipe()
        self.read_end, write = os.pipe()
        command = f"exec {CHROMIUM} {FLAGS} --user-data-dir={profile} --remote-debugging-pipe 3<&{read} 4>&{write}"
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self.number, self.buffer, self.session, self.events = 0, b"", None, []
        page = self.ask("Target.createTarget", url="about:blank")["result"]["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["result"]["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        of_page = {"sessionId": self.session} if self.session else {}
        os.write(self.write_end, json.dumps(message | of_page).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                return answer
            self.events.append(answer)

    def read(self):
        while b"\0" not in self.buffer:
            content = os.read(self.read_end, 65536)
            assert content, "the browser has ended"
            self.buffer += content
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def open(self, url):
        self.ask("Page.navigate", url=url)
        while self.value("`${location} ${document.readyState}`") != f"{url} complete":
            time.sleep(0.2)

    def look(self):
        return json.loads(self.value(LOOK))

    def value(self, script):
        """What a script returns; asked again where the page was loaded meanwhile, which ends the script."""
        while "result" not in (answer := self.ask("Runtime.evaluate", expression=script, returnByValue=True)):
            time.sleep(0.1)
        assert "exceptionDetails" not in answer["result"], answer
        return answer["result"]["result"].get("value")

    def wait(self, condition, seconds=300):
        """The first look that meets the condition."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            seen = self.look()
            if seen["ready"] and condition(seen):
                return seen
            time.sleep(0.5)
        raise AssertionError(f"not within {seconds} s: {seen}")

    def errors(self):
        logged = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        thrown = [event for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        return [entry for entry in logged if entry["level"] == "error"] + thrown

    def asked_for(self):
        """Every address that the page asked for."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return {event["request"]["url"] for event in sent}

    def resize(self, width):
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.write_end)
        os.close(self.read_end)


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
    """By itself it shows runs running, then complete; nothing is cut off at 1,200 and 390 px; it waits while used."""
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
    first = browser.wait(lambda seen: seen["rows"] == 1 and seen["images"])
    assert "1 complete" in first["progress"] and "lowest single run: val_loss" in first["progress"]
    for width in (1200, 390):
        browser.resize(width)
        seen = browser.wait(lambda seen, width=width: seen["window"] == width and seen["rows"])
        assert seen["width"] <= width
    while not browser.value(FILTER.replace("TEXT", "ok")):
        time.sleep(0.2)
    if browser.look()["progress"]:
        time.sleep(3)
        assert browser.look()["mark"] == 1, "not loaded again while a filter is in use"
    browser.value(FILTER.replace("TEXT", ""))
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
