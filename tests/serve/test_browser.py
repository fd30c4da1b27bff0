"""The live page in Chromium, headless, beside a sweep that runs: real runs, a real server, a real browser.

The browser is driven through its debugging pipe, so that the page can be asked again and again as time goes by.
"""

import contextlib
import http.client
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
  shown: Number(document.body.dataset.shown ?? 0), counts: document.querySelector("#counts").textContent,
  running: [...document.querySelectorAll("#running li")].map((one) => one.textContent),
  runs: document.querySelector("#table-runs output").value, problem: document.querySelector("#problem").textContent,
  rows: document.querySelectorAll("#table-runs tbody tr").length, best: document.querySelector("#best").textContent,
  ended: document.querySelector("#ended").textContent, width: document.documentElement.scrollWidth,
  images: [...document.images].map((one) => [one.closest("figure").dataset.figure, one.naturalWidth, one.src]),
  reasons: [...document.querySelectorAll(".reason")].map((one) => one.textContent).join("")})"""


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
        page = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
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
                assert "error" not in answer, answer
                return answer["result"]
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
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition, seconds=300):
        """The first look that meets the condition."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            seen = self.look()
            if condition(seen):
                return seen
            time.sleep(0.5)
        raise AssertionError(f"not within {seconds} s: {seen}")

    def errors(self):
        logged = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        thrown = [event for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        return [entry for entry in logged if entry["level"] == "error" and "404" not in entry["text"]] + thrown

    def asked_for(self):
        """Every address that the page asked for."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return {event["request"]["url"] for event in sent}

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


def drawn(page):
    """The figures that are shown, and where from."""
    return {name: address for name, width, address in page["images"] if width}


def serve(started, results):
    process = started("serve", results, "--port", 0)
    line = process.stdout.readline()
    assert "http://127.0.0.1:" in line, line
    return process, line.split()[1]


def test_the_page_follows_a_sweep_while_it_runs(tmp_path, browser, started):
    """It sees runs running, then complete, and draws anew; at 390 px nothing is cut off; Ctrl-C ends the server."""
    out = tmp_path / "results"
    fields = {"base": {"train_tokens": 128 * 200, "n_layers": 2}, "space": {"lr": [1e-3, 3e-3]}, "seeds": [0]}
    one_by_one = ("--workers", 1, "--stack", 1)
    sweep = started("sweep", definition(tmp_path, **fields), "--out", out, *one_by_one, "--device", "cpu")
    while not (out / "sweep.yaml").exists():
        assert sweep.poll() is None
        time.sleep(0.2)
    server, url = serve(started, out)
    browser.open(url)
    begun = browser.wait(lambda page: page["running"])
    assert "lr=" in begun["running"][0] and "running" in begun["counts"] and "complete" not in begun["counts"]
    first = browser.wait(lambda page: page["rows"] and len(drawn(page)) == 3)
    assert first["rows"] == 1 and "no front" in first["reasons"], "the other is to come"
    assert first["best"].startswith("Best so far: lowest single run: val_loss") and not first["problem"]
    last = browser.wait(lambda page: page["rows"] == 2 and len(drawn(page)) == 4 and page["shown"] > first["shown"])
    assert last["runs"] == "page 1 of 1, 2 of 2 runs" and not last["reasons"]
    assert all(drawn(last)[name] != drawn(first)[name] for name in drawn(first))
    browser.wait(lambda page: page["counts"] == "2 complete" and not page["running"])
    assert all(urlsplit(address).netloc in ("", urlsplit(url).netloc) for address in browser.asked_for())
    assert not browser.errors()
    browser.ask("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert browser.look()["width"] <= 390
    browser.open(f"{url}report")
    assert browser.value("document.querySelectorAll('figure img').length") > 4 and not browser.errors()
    assert sweep.wait(60) == 0
    os.killpg(server.pid, signal.SIGINT)
    said, errors = server.communicate(timeout=300)
    assert server.returncode == 0 and said == "ended\n" and errors == ""


def test_sorting_filtering_and_paging_by_hand(tmp_path, browser, started):
    from support.made_up_runs import make_run
    from support.runs_frame import config_of

    for seed in range(60):
        make_run(tmp_path / "results", config_of(n_layers=2, seed=seed), {"val_loss": 3.5 - 0.01 * seed})
    server, url = serve(started, tmp_path / "results")
    browser.open(url)
    assert browser.wait(lambda page: page["rows"] == 50)["runs"] == "page 1 of 2, 60 of 60 runs"
    browser.value("document.querySelector('#next').click()")
    browser.wait(lambda page: page["rows"] == 10)
    heads = "[...document.querySelectorAll('#table-runs th button')]"
    press = f"{heads}.find((one) => one.textContent === 'val_loss').click()"
    browser.value(press)
    browser.wait(lambda page: page["rows"] == 50)
    browser.value(press)
    until = time.monotonic() + 300
    while browser.value("document.querySelector('#table-runs th[aria-sort]')?.ariaSort") != "descending":
        assert time.monotonic() < until
    column = "[...document.querySelectorAll('#table-runs th')].findIndex((one) => one.textContent === 'val_loss')"
    assert browser.value(f"document.querySelector('#table-runs tbody tr').cells[{column}].textContent") == "3.500"
    box = "document.querySelector('input')"
    browser.value(f"{box}.value = '2.91'; {box}.dispatchEvent(new Event('input'))")
    browser.wait(lambda page: page["runs"] == "page 1 of 1, 1 of 60 runs")
    assert not browser.errors()
    os.killpg(server.pid, signal.SIGKILL)
    browser.wait(lambda page: "The server does not answer" in page["problem"])


@pytest.mark.parametrize("name", ["evil.test", "localhost"])
def test_a_name_that_was_rebound_to_this_machine_is_refused(tmp_path, started, name):
    """A real request to the server with the Host that a rebound name would send."""
    from support.report_folder import fill

    fill(tmp_path / "results")
    _, url = serve(started, tmp_path / "results")
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=300)
    connection.request("GET", "/status", headers={"Host": f"{name}:{urlsplit(url).port}"})
    assert connection.getresponse().status == (200 if name == "localhost" else 421)
    connection.close()
