"""The HTTP server of the live page: a few fixed paths, only GET and HEAD, standard library.

It listens on the loopback interface by default. On another address it requires a token, which is in the printed URL and
then in a cookie. No path names a file. The Host header must be an IP address, localhost or the bound name, against DNS
rebinding.
"""

import hmac
import ipaddress
import json
import secrets
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sparsedepth.config.sweep import read_definition
from sparsedepth.plots.draw import FIGURES
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.report.page import fill_template
from sparsedepth.serve.live import Live

COOKIE = "sparsedepth-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The report itself has the rest of its policy: its only script by hash, and no external content."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MAX_FILTER = 200
"""Characters of a filter."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    content: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A rejected request; the message is the reason."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Site:
    """The responses of all paths."""

    def __init__(self, results: Path, host: str) -> None:
        self.live = Live(results)
        self.results, self.host = results, host
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)

    def answer(self, target: str, headers: Message) -> Answer:
        """Raises Refused, and ValueError for invalid parameters."""
        self._check_host(headers.get("Host") or "")
        parts = urlsplit(target)
        parameters = {name: values[-1] for name, values in parse_qs(parts.query, max_num_fields=10).items()}
        if self.token is not None and not self._has_token(self.token, headers.get("Cookie") or ""):
            if hmac.compare_digest(parameters.get("token", "").encode(), self.token.encode()):
                cookie = f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                return Answer(content=b"", status=HTTPStatus.SEE_OTHER, headers={"Location": "/", "Set-Cookie": cookie})
            raise Refused(HTTPStatus.FORBIDDEN, "open the address that `sparsedepth serve` printed: it has a token")
        return self._at(parts.path, parameters)

    def _at(self, path: str, parameters: Mapping[str, str]) -> Answer:
        match path:
            case "/":
                meanings = {name: FIGURES[name].meaning for name in self.live.figures}
                names = {"definition": read_definition(self.results), "folder": self.results.resolve().name}
                return _html(fill_template("sparsedepth.serve", **names, figures=meanings))
            case "/page.css":
                style = "".join((files(f"sparsedepth.{part}") / "page.css").read_text() for part in ("report", "serve"))
                return Answer(content=style.encode(), kind="text/css; charset=utf-8")
            case "/page.js":
                script = (files("sparsedepth.serve") / "page.js").read_bytes()
                return Answer(content=script, kind="text/javascript; charset=utf-8")
            case "/status":
                return _json(self.live.status())
            case "/runs":
                return _json(self._runs(parameters))
            case "/report":
                return _html(self.live.reading().report(), REPORT_POLICY)
        name = path.removeprefix("/figure/")
        if path == f"/figure/{name}" and name in self.live.figures:
            try:
                image = self.live.reading().image(name)
            except NothingToDraw as reason:
                raise Refused(HTTPStatus.NOT_FOUND, str(reason)) from None
            return Answer(content=image.content, kind=image.kind)
        raise Refused(HTTPStatus.NOT_FOUND, "there is nothing at this address")

    def _runs(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        number, size = parameters.get("page", "0"), parameters.get("size", "50")
        if not (number.isdecimal() and size.isdecimal() and len(number) < 9 and len(size) < 9):
            raise ValueError("page and size must be whole numbers")
        sort, descending = parameters.get("sort", ""), "descending" in parameters
        query = parameters.get("filter", "")[:MAX_FILTER]
        return self.live.reading().page(int(number), int(size), sort, descending, query)

    def _check_host(self, header: str) -> None:
        """Raises Refused for a Host header that does not name this server."""
        host = header.rpartition(":")[0] if not header.endswith("]") and ":" in header else header
        host = host.strip("[]").lower()
        is_own = host == "localhost" or host == self.host.lower()
        if not (is_own or (is_loopback(host) if self.token is None else is_address(host))):
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "the Host header names another machine")

    @staticmethod
    def _has_token(token: str, header: str) -> bool:
        try:
            cookies = SimpleCookie(header)
        except CookieError:
            return False
        return COOKIE in cookies and hmac.compare_digest(cookies[COOKIE].value.encode(), token.encode())


def _html(text: str, policy: str = POLICY) -> Answer:
    return Answer(content=text.encode(), kind="text/html; charset=utf-8", headers={"Content-Security-Policy": policy})


def _json(value: Any) -> Answer:
    return Answer(content=json.dumps(value, allow_nan=False).encode(), kind="application/json")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sparsedepth", ""
    timeout = 30
    """Seconds to wait for a client."""

    def __getattr__(self, name: str) -> Any:
        """The base class looks up do_GET, do_POST, ...: all methods are answered in one place."""
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        assert isinstance(self.server, Server)
        try:
            if self.command not in ("GET", "HEAD"):
                self.close_connection = True  # its body is not read
                raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "this page is read-only")
            answer = self.server.site.answer(self.path, self.headers)
        except Refused as refused:
            answer = Answer(content=str(refused).encode(), status=refused.status)
        except ValueError as error:
            answer = Answer(content=str(error).encode(), status=HTTPStatus.BAD_REQUEST)
        except Exception:
            traceback.print_exc()
            answer = Answer(content=b"an error: see the server's terminal", status=HTTPStatus(500))
        self._send(answer)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Response to an invalid request; that of the base class would repeat the request in its page."""
        self.close_connection, self.request_version = True, self.protocol_version
        self._send(Answer(content=b"invalid request", status=HTTPStatus(code)))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        content = {"Content-Type": answer.kind, "Content-Length": str(len(answer.content))}
        for name, value in {**content, "Content-Security-Policy": POLICY, **HEADERS, **answer.headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """No log: the terminal shows only the URL and errors."""


class Server(ThreadingHTTPServer):
    """Serves a results folder; port 0 selects a free one."""

    daemon_threads = True

    def __init__(self, results: Path, host: str = "127.0.0.1", port: int = 8421) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.site = Site(results, host)
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        """The URL to open, with the token if one is needed."""
        host = f"[{self.site.host}]" if ":" in self.site.host else self.site.host
        token = f"?token={self.site.token}" if self.site.token else ""
        return f"http://{host}:{self.server_address[1]}/{token}"

    def server_close(self) -> None:
        super().server_close()
        self.site.live.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # OSError: the client disconnected, or timed out
            super().handle_error(request, client_address)


def is_address(host: str) -> bool:
    """Whether it is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
