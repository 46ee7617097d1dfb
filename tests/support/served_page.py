"""`toolkit page` in a process of its own, and requests to it."""

import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class ServedPage:
    """A page that is being served, and its process."""

    address: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        """Port of the address."""
        return int(self.address.rstrip("/").rpartition(":")[2])

    def get(self, path: str = "", **headers: str) -> tuple[int, str]:
        """Return status and text of a file."""
        return self._send(urllib.request.Request(self.address + path, headers=headers))

    def post(self, content: bytes, path: str = "ask", **headers: str) -> tuple[int, str]:
        """Return status and text of the answer to a message."""
        kinds = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        return self._send(urllib.request.Request(self.address + path, data=content, headers=kinds))

    def ask(self, command: str, model: str, fields: Mapping[str, str], **more: str) -> dict[str, Any]:
        """Return the page's answer to a job."""
        request = {"command": command, "model": model, "fields": dict(fields), **more}
        status, text = self.post(json.dumps({"request": request}).encode())
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _send(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answered:
                return answered.status, answered.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C; return the exit code and what is left on stderr."""
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, err


@contextlib.contextmanager
def served_page(
    *words: object,
    cwd: Path,
    program: Sequence[object] = (sys.executable, "-m", "toolkit"),
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServedPage]:
    """Start `toolkit page --no-browser`, and end it."""
    command = [*map(str, program), "page", "--no-browser", *map(str, words)]
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        try:
            yield ServedPage(address=process.stdout.readline().strip(), process=process)
        finally:
            process.kill()
