"""The planner page on this node, for the browser of one user.

A plan reads any model folder that its user can read, and asks the hub with the user's token. So that nobody else does
that through the page, it is refused to other users of the node, to pages of other addresses (`Origin`), and to names
that point here without being this node's (`Host`: DNS rebinding).
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from toolkit.entry_point import exit_code_of
from toolkit.errors import ToolkitError
from toolkit.hardware.system_text import text_of
from toolkit.models.config_fields import MAX_CONFIG_BYTES
from toolkit.page.page_html import ASSETS, known_models_html, page_html

DEFAULT_PORT = 8642
LOOPBACK = "127.0.0.1"
NAMES_OF_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
# The page loads nothing from elsewhere, and no other page can show it in a frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
REQUEST_SECONDS = 60


class PageServer(ThreadingTCPServer):
    """The page's files, made when they are first asked for, and its answers, one at a time."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, reply: Callable[[str], str]) -> None:
        self.files: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html", functools.partial(page_html, served=True)),
            "/page.css": ("text/css", (ASSETS / "page.css").read_text),
            "/page.js": ("text/javascript", (ASSETS / "page.js").read_text),
            "/known": ("text/html", known_models_html),
        }
        self.reply, self.answering = reply, threading.Lock()
        super().__init__((LOOPBACK, port), PageRequest)
        self.port: int = self.server_address[1]
        self.address = f"http://{LOOPBACK}:{self.port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of ours; a browser that no longer waits is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class PageRequest(BaseHTTPRequestHandler):
    """One request: a file of the page, or a message to answer."""

    server: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "toolkit", ""

    def do_GET(self) -> None:
        """Send a file of the page."""
        kind, text = self.server.files.get(self.path.partition("?")[0], ("", str))
        if not self._is_refused():
            self._send(HTTPStatus.OK if kind else HTTPStatus.NOT_FOUND, kind or "text/plain", text())

    def do_POST(self) -> None:
        """Answer a message of the page; the terminal, and not the page, says what went wrong unexpectedly."""
        length, replies = self.headers.get("Content-Length", ""), list[str]()
        if self._is_refused():
            return
        if self.path != "/ask" or self.headers.get_content_type() != "application/json":
            return self._send(HTTPStatus.BAD_REQUEST, "text/plain", "expected JSON")
        if not length.isdecimal() or int(length) > MAX_CONFIG_BYTES:
            return self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "text/plain", "expected a smaller message")
        message = self.rfile.read(int(length)).decode(errors="replace")
        with self.server.answering:
            exit_code_of(lambda: replies.append(self.server.reply(message)))
        status = HTTPStatus.OK if replies else HTTPStatus.INTERNAL_SERVER_ERROR
        self._send(status, "application/json", *replies or ["{}"])

    def _is_refused(self) -> bool:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        is_ours = NAMES_OF_LOOPBACK.fullmatch(host) and origin in (None, f"http://{host}")
        if is_ours and not _is_of_another_user(self.client_address[1], self.server.port):
            return False
        self._send(HTTPStatus.FORBIDDEN, "text/plain", f"only for {self.server.address}, and for one user")
        return True

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        described = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in {**described, **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *_: Any) -> None:
        """Print nothing per request."""


def _is_of_another_user(client_port: int, port: int) -> bool:
    """Whether the kernel knows the other end as a socket of a user who is neither this one nor root."""
    ends = re.compile(rf" *\d+: \S+:{client_port:04X} \S+:{port:04X} (?:\S+ ){{4}} *(\d+)")
    tables = [text_of(Path(f"/proc/net/{table}")) or "" for table in ("tcp", "tcp6")]
    users = {int(found[1]) for table in tables for line in table.splitlines() if (found := ends.match(line))}
    return not users <= {0, os.getuid()}


def open_server(port: int, reply: Callable[[str], str], *, or_free: bool) -> PageServer:
    """Return a server that listens on a port, or with `or_free` on any other if that is taken.

    Raises ToolkitError for a port that cannot be had.
    """
    try:
        return PageServer(port, reply)
    except OSError as error:
        if or_free:
            return PageServer(0, reply)
        raise ToolkitError(f"port {port}: {error.strerror}", hint="leave out `--port`: a free one is taken") from None


def open_browser(address: str) -> bool:
    """Open an address if there is a screen to show it on; a browser in a terminal would take the terminal."""
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    if has_screen:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    return has_screen
