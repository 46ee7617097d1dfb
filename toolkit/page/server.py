"""The planner page: its HTML, also as a static file, and its server on this node, for the browser of one user.

A plan reads any model folder that its user can read, and asks the hub with the user's token. So the page is refused to
other users of the node, to pages of other addresses (`Origin`), and under other names of this node (`Host`), which
somebody else's domain may have (DNS rebinding).
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from toolkit.entry_point import exit_code_of
from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.paths import cache_folder
from toolkit.hardware.gpu_table import GPUS, Gpu, find_gpu
from toolkit.hardware.system_text import text_of
from toolkit.models.config_fields import MAX_CONFIG_BYTES
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OF_SCRIPTS, OPTIMIZERS
from toolkit.models.read_model import bundled_models, read_model
from toolkit.plan.methods import METHODS
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import LOSSES

PACKAGE = Path(__file__).resolve().parents[1]
# Inside the wheel, or in the checkout.
ASSETS = next(filter(Path.is_dir, [PACKAGE / "_page"]), PACKAGE.parent / "docs" / "site" / "page" / "assets")
TABLE_GPUS = ("h100-sxm", "rtx-4090")
TABLE_PRESETS = ("single", "zero2", "zero3", "fsdp2")
TABLE_JOB = PlanOptions(
    gpu=TABLE_GPUS[0],
    num_processes=(1,),
    preset=TABLE_PRESETS,
    per_device_train_batch_size=1,
    max_seq_length=2048,
    activation_checkpointing=True,
)
TABLE_JOBS = {
    "full": TABLE_JOB,
    "lora": replace(TABLE_JOB, lora_r=16),
    "qlora": replace(TABLE_JOB, lora_r=16, load_in_4bit=True),
}
# Folders whose code decides the table.
TABLE_SOURCES = ("plan", "models", "presets", "hardware", "parallel", "job", "page")
_one_table = threading.Lock()


def page_html(*, served: bool = False, sizes: Mapping[str, int] | None = None, commit: str = "", docs: str = "") -> str:
    """Return the page: `served` by `toolkit page`, or with the `sizes` of the files of a Python that it runs itself.

    `docs` is the address of the documentation, for links to its pages.
    """
    return _template("index.html.j2").render(
        served=served,
        known="" if served else known_models_html(),
        models=list(bundled_models()),
        gpu_groups=_gpu_groups(),
        methods=list(METHODS),
        generating=[name for name, spec in METHODS.items() if spec.num_generations],  # no tokens are counted for them
        optimizers=[each for each in OPTIMIZERS if each not in OF_SCRIPTS],  # it recommends, too
        losses=LOSSES,
        defaults=replace(PlanOptions(), optim=DEFAULT_OPTIMIZER, loss=LOSSES[0]),
        sizes=json.dumps(dict(sizes or {})),
        commit=commit,
        docs=docs,
    )


def known_models_html() -> str:
    """Return the table of the fewest GPUs for known models; it takes seconds, once for each state of the planner."""
    with _one_table:
        rows, gpus = known_rows(), [find_gpu(name) for name in TABLE_GPUS]
    return _template("known.html.j2").render(rows=rows, gpus=gpus, presets=TABLE_PRESETS, methods=TABLE_JOBS)


def known_rows() -> list[dict[str, Any]]:
    """Return a row per known model, by size: its parameters, and per method and GPU how many it needs, or None."""
    files = [path for name in TABLE_SOURCES for path in sorted(PACKAGE.joinpath(name).rglob("*.*"))]
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in files if path.suffix in (".py", ".json", ".yaml", ".csv"))
    )
    cached = cache_folder() / "planner-page" / f"{digest.hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        rows: list[dict[str, Any]] = json.loads(cached.read_text())
        return rows
    rows = [
        {"model": model, "parameters": read_model(model).num_params}
        | {method: _fewest_gpus(model, options) for method, options in TABLE_JOBS.items()}
        for model in bundled_models()
    ]
    rows.sort(key=lambda row: row["parameters"])
    with contextlib.suppress(OSError):  # a read-only cache is no error
        write_text(cached, json.dumps(rows))
    return rows


def _fewest_gpus(model: str, options: PlanOptions) -> dict[str, int | None]:
    from toolkit.plan.planner import plan_request
    from toolkit.plan.which_gpus import fewest_of_each

    fewest: dict[str, int | None] = dict.fromkeys(TABLE_GPUS)
    with contextlib.suppress(ToolkitError):  # peft adapts the layers of some architectures by name only
        request = replace(plan_request(model, options), world_sizes=[])
        fewest |= {gpu.name: size for gpu, size, _ in fewest_of_each(request, map(find_gpu, TABLE_GPUS))}
    return fewest


def _gpu_groups() -> list[tuple[str, list[Gpu]]]:
    groups: dict[str, list[Gpu]] = {"NVIDIA": [], "AMD": [], "without bf16": []}
    for gpu in sorted(GPUS, key=lambda gpu: -gpu.memory_gib):
        vendor = "AMD" if gpu.other_names.startswith("AMD") else "NVIDIA"
        groups[vendor if gpu.peak_flops("bf16") else "without bf16"].append(gpu)
    return list(groups.items())


@cache
def _template(name: str) -> Template:
    loader = FileSystemLoader(ASSETS)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True).get_template(name)


# -- the server

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
