"""A headless Chromium that is driven through its debugging pipe, so that a page can be asked again and again."""

import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage"
LOOK = """JSON.stringify({
  progress: document.querySelector("#progress")?.innerText ?? "",
  rows: document.querySelectorAll("#table-runs tbody tr").length,
  images: [...document.querySelectorAll("figure[id] svg")].map((one) => one.ariaLabel.split(":")[0]),
  ready: document.readyState === "complete", width: document.documentElement?.scrollWidth, window: innerWidth,
  filter: document.querySelector("#table-runs input")?.value ?? "", top: scrollY,
  sorted: document.querySelector("#table-runs th[aria-sort]")?.textContent ?? "",
  mark: window.mark ?? null})"""


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

    def settled(self, script):
        """What the promise of a script gives."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"]
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

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
