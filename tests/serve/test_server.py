"""The live page's server, asked over HTTP as a browser, a stranger's page and a neighbour would."""

import http.client
import json
import re
import threading
import time

import pytest
from support.made_up_runs import make_run
from support.report_folder import HOSTILE, fill
from support.runs_frame import config_of

from sparsedepth.report.tables import table_of
from sparsedepth.serve import live
from sparsedepth.serve.live import Live, RefreshedValue, StoreReading
from sparsedepth.serve.server import HEADERS, Server, is_loopback


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "results"
    fill(folder, corpus=HOSTILE)
    return folder


@pytest.fixture(scope="module")
def server(results):
    with Server(results, port=0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(server, path, method="GET", host=None, **headers):
    """The answer's status, headers and text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=300)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content.decode(errors="replace")


def ask_json(server, path):
    status, headers, text = ask(server, path)
    assert status == 200 and headers["Content-Type"] == "application/json", text
    return json.loads(text)


def test_the_page_brings_nothing_from_elsewhere_and_no_script_of_its_own(server):
    status, headers, text = ask(server, "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert re.findall(r'(?:src|href)="([^"#]+)"', text) == ["data:,", "/page.css", "/page.js", "/report"]
    assert "<script>" not in text and "style=" not in text and "onclick" not in text
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert ask(server, "/page.js")[1]["Content-Type"].startswith("text/javascript")
    script = ask(server, "/page.js")[2]
    assert "innerHTML" not in script and "http" not in script and "eval" not in script


@pytest.mark.parametrize("path", ["/", "/status", "/runs", "/nothing", "/runs?page=x", "/figure/pareto.py"])
def test_every_answer_has_the_security_headers(server, path):
    _, headers, _ = ask(server, path)
    assert all(headers[name] == value for name, value in HEADERS.items())
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Server"].strip() == "sparsedepth" and "Access-Control-Allow-Origin" not in headers


def test_how_the_sweep_stands(server):
    status = ask_json(server, "/status")
    assert status["counts"] == {"complete": 13, "failed": 1} and status["share"] == 1.0 and not status["is_running"]
    assert status["ended"] == [{"runs": 1, "state": "failed", "cause": HOSTILE}]
    assert ask_json(server, "/status")["version"] == status["version"]


def test_rows_come_by_page_sorted_and_filtered(server):
    first = ask_json(server, "/runs?size=5&sort=val_loss")
    names = [column["name"] for column in first["columns"]]
    at, seed = names.index("val_loss"), names.index("seed")
    assert [row[at] for row in first["rows"][:2]] == ["2.700", "2.700"] and first["n_pages"] == 3
    assert (first["n_runs"], first["n_matching"], first["page"]) == (13, 13, 0)
    last = ask_json(server, "/runs?size=5&page=99&sort=val_loss&descending=1")
    assert last["page"] == 2 and last["rows"][-1][at] == "–", "what is missing comes last either way"
    found = ask_json(server, "/runs?filter=LNS+ok&sort=seed&descending=1")
    assert found["n_matching"] == 6 and [row[seed] for row in found["rows"]] == ["2", "2", "1", "1", "0", "0"]
    assert len(ask_json(server, "/runs?size=99999999")["rows"]) == 13


def test_figures_are_drawn_once_and_what_is_missing_is_said(server, monkeypatch):
    status, headers, text = ask(server, "/figure/variance")
    assert status == 200 and headers["Content-Type"] == "image/svg+xml" and "<svg" in text
    monkeypatch.setattr(live, "draw_image", None)
    assert ask(server, "/figure/variance?v=1")[2] == text
    assert ask(server, "/figure/curves")[0] == 404 and "no finished run has a curve" in ask(server, "/figure/curves")[2]


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/../../etc/passwd",
            "/..%2f..%2fetc%2fpasswd",
            "//etc/passwd",
            "/figure/../../work/0123456789ab/config.yaml",
        ),
        *(
            "/figure/",
            "/figure/overview",
            "/figure/%2e%2e",
            "/sweep.yaml",
            "/runs/",
            "/page.html.j2",
            "/server.py",
            "/%00",
        ),
    ],
)
def test_no_address_names_a_file(server, path):
    status, _, text = ask(server, path)
    assert status == 404 and text == "there is nothing at this address"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_only_reading_is_answered(server, results, method):
    before = sorted(results.rglob("*"))
    status, headers, _ = ask(server, "/status", method)
    assert status == 405 and headers["Connection"] == "close"
    assert sorted(results.rglob("*")) == before


def test_a_head_is_a_get_without_its_content(server):
    status, headers, text = ask(server, "/status", "HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 100 and text == ""


@pytest.mark.parametrize("query", ["page=-1", "page=1e3", "size=", "page=9999999999", "&".join("abcdefghijklm")])
def test_a_question_without_sense_is_refused_or_bounded(server, query):
    status, _, text = ask(server, f"/runs?{query}")
    assert (status == 400 and "\n" not in text) or json.loads(text)["n_runs"] == 13


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9999", "localhost:1", "LOCALHOST", "[::1]:80", "127.1.2.3"])
def test_this_machine_is_known_by_its_addresses(server, host):
    assert ask(server, "/status", host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8421", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.7", "", "[::1"]
)
def test_a_page_that_reaches_it_by_another_name_learns_nothing(server, host):
    status, _, text = ask(server, "/status", host=host or " ")
    assert status == 421 and "run" not in text


def test_other_addresses_ask_for_a_token(results):
    """Bound to every address; the token comes from the printed address, moves into a cookie and leaves the address."""
    with Server(results, host="0.0.0.0", port=0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        token = running.url.rpartition("=")[2]
        assert len(token) >= 32 and ask(running, "/status")[0] == 403
        assert (
            ask(running, "/?token=wrong")[0] == ask(running, "/?token=")[0] == ask(running, "/?token=%C3%A4")[0] == 403
        )
        assert ask(running, "/status", Cookie="sparsedepth-token=wrong")[0] == 403
        assert ask(running, "/", Cookie=f"other={token}")[0] == ask(running, "/", Cookie="a;;=\x01")[0] == 403
        status, headers, _ = ask(running, f"/?token={token}", host="10.1.2.3:8421")
        assert status == 303 and headers["Location"] == "/"
        cookie = headers["Set-Cookie"]
        assert cookie == f"sparsedepth-token={token}; Path=/; HttpOnly; SameSite=Strict"
        assert ask(running, "/status", Cookie=cookie.partition(";")[0])[0] == 200
        assert ask(running, "/status", host="evil.example", Cookie=cookie.partition(";")[0])[0] == 421
        running.shutdown()


def test_loopback_is_told_from_other_addresses():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", "")] == [False] * 5


def test_a_request_that_is_none_gets_no_page_of_its_own_words(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=300)
    connection.connect()
    connection.sock.sendall(b"GET /<script> nonsense HTTP/9.9 x\r\n\r\n")
    answer = connection.sock.makefile("rb").read().decode()
    assert "script>" not in answer.partition("\r\n\r\n")[2] and "nosniff" in answer
    connection.close()


def test_the_whole_report_is_a_page_of_its_own(server, monkeypatch):
    """With a policy of its own, which the server's would narrow; `test_browser` opens the true one."""
    monkeypatch.setattr(live, "html", lambda store, folders: f"{folders[0].name}: {store.sql('select 1').rows}")
    status, headers, text = ask(server, "/report")
    assert status == 200 and "default-src" not in headers["Content-Security-Policy"]
    assert text == "results: ((1,),)"


def test_a_run_that_is_completed_is_read_and_drawn_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(live, "REST", 0.0)
    site = Live(tmp_path)
    (tmp_path / "runs").mkdir()
    empty = site.status()
    assert empty["counts"] == {} and empty["problem"] == "no run is complete yet"
    assert site.reading().page(0, 9, "", False, "")["rows"] == []
    make_run(tmp_path, config_of(n_layers=2, seed=0), {"val_loss": 2.0})
    one = site.status()
    assert one["version"] != empty["version"] and one["counts"] == {"complete": 1} and one["problem"] == ""
    assert site.status()["version"] == one["version"] and site.reading() is site.reading()
    make_run(tmp_path, config_of(n_layers=2, seed=1), {"val_loss": 2.0})
    assert site.status()["version"] != one["version"] and len(site.reading().runs.rows) == 2


def test_who_asks_while_it_is_made_gets_the_old_value(monkeypatch):
    monkeypatch.setattr(live, "LEAST_SECONDS", 0.0)
    started, go_on, made = threading.Event(), threading.Event(), []

    def make():
        made.append(len(made))
        if len(made) == 2:
            started.set()
            assert go_on.wait(10)
        return made[-1]

    shared = RefreshedValue(make)
    assert shared.get() == 0
    slow = threading.Thread(target=shared.get)
    time.sleep(0.01)
    slow.start()
    assert started.wait(10) and shared.get() == 0
    go_on.set()
    slow.join()
    assert made == [0, 1]


def test_two_thousand_rows_page_in_under_two_seconds():
    """Sorting and filtering them, as a click does; reading 2,000 runs is `store`'s to hold."""
    reading = StoreReading.__new__(StoreReading)
    names = [("run_id", ""), *((f"column_{i}", "") for i in range(24))]
    reading.version, reading.runs = (
        "v",
        table_of(names, ((f"{i:012x}", *(i * j % 997 for j in range(24))) for i in range(2000))),
    )
    reading._texts = ["\n".join(cell.text for cell in row).lower() for row in reading.runs.rows]
    began = time.process_time()
    page = reading.page(3, 50, "column_7", True, "9")
    assert time.process_time() - began < 0.5
    values = [float(row[8].replace(",", "")) for row in page["rows"]]
    assert values == sorted(values, reverse=True) and len(values) == 50
