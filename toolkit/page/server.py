"""The planner page on this node, for the browser of one user.

A plan reads any model folder that its user can read, and asks the hub with the user's token. So the page is refused to
other users of the node, to pages of other addresses (`Origin`), and under other names of this node (`Host`), which
somebody else's domain may have (DNS rebinding).
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from toolkit.entry_point import exit_code_of
from toolkit.hardware.system_text import text_of
from toolkit.models.config_fields import MAX_CONFIG_BYTES
from toolkit.page.page_html import ASSETS, known_models_html, page_html

DEFAULT_PORT = 8642
LOOPBACK = "127.0.0.1"
NAMES_OF_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # any port: of a tunnel, for example
FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "/": ("text/html", partial(page_html, served=True)),
    "/page.css": ("text/css", (ASSETS / "page.css").read_text),
    "/page.js": ("text/javascript", (ASSETS / "page.js").read_text),
    "/known": ("text/html", known_models_html),
}
HEADERS = {  # it loads nothing from elsewhere, and no other page shows it in a frame
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingTCPServer):
    """Serves the page's files and the answers of `reply`, one at a time. Raises OSError for a port that is taken."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, reply: Callable[[str], str]) -> None:
        super().__init__((LOOPBACK, port), PageRequest)
        self.reply, self.answering = reply, threading.Lock()
        self.port: int = self.server_address[1]
        self.address = f"http://{LOOPBACK}:{self.port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of ours; a browser that no longer waits is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class PageRequest(BaseHTTPRequestHandler):
    """One request: a file of the page, or a message to answer."""

    server: PageServer
    timeout = 60
    server_version, sys_version = "toolkit", ""

    def do_GET(self) -> None:
        """Send a file of the page."""
        kind, text = FILES.get(self.path.partition("?")[0], ("", str))
        if not self._is_refused():
            self._send(200 if kind else 404, text(), kind or "text/plain")

    def do_POST(self) -> None:
        """Answer a message of the page; the terminal, and not the page, says what went wrong unexpectedly."""
        if self._is_refused():
            return
        if self.path != "/ask" or self.headers.get_content_type() != "application/json":
            return self._send(400, "expected JSON")  # a form of another site cannot send it
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_CONFIG_BYTES:
            return self._send(413, "expected a smaller message")
        message, replies = self.rfile.read(int(length)).decode(errors="replace"), list[str]()
        with self.server.answering:
            exit_code_of(lambda: replies.append(self.server.reply(message)))
        self._send(200 if replies else 500, (replies or ["{}"])[0], "application/json")

    def _is_refused(self) -> bool:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        is_ours = NAMES_OF_LOOPBACK.fullmatch(host) and origin in (None, f"http://{host}")
        if is_ours and _is_of_this_user(self.client_address[1], self.server.port):
            return False
        self._send(403, f"only for {self.server.address}, and for one user")
        return True

    def _send(self, status: int, text: str, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *_: Any) -> None:
        """Print nothing per request."""


def _is_of_this_user(client_port: int, port: int) -> bool:
    """Whether the kernel lists the other end as a socket of this user or of root; also if it lists none."""
    ends = re.compile(rf"^ *\d+: \S+:{client_port:04X} \S+:{port:04X} (?:\S+ ){{4}} *(\d+)", re.MULTILINE)
    tables = (text_of(Path(f"/proc/net/{table}")) or "" for table in ("tcp", "tcp6"))
    return {int(user) for table in tables for user in ends.findall(table)} <= {0, os.getuid()}
