"""What a user reads when the hub refuses a model, from a real server and the hub's own client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from toolkit.errors import ToolkitError
from toolkit.models.read_model import download_config

# owner -> status and the header in which the hub names the reason; message and hint
ANSWERS = {
    "gated-owner": (401, "GatedRepo", "is gated", "hf auth login"),
    "forbidden-owner": (403, "GatedRepo", "is gated", "Qwen/Qwen3-8B"),
    # the answer to those who are not logged in
    "missing-owner": (401, "RepoNotFound", "is not on the hub, or it is private", "HF_TOKEN"),
    "private-owner": (401, "", "is not on the hub, or it is private", "HF_TOKEN"),
    "other-revision": (404, "RevisionNotFound", "has no revision 'v9'", "see http"),
    "no-config": (404, "EntryNotFound", "has no config.json", "see http"),
}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        status, reason, _, _ = ANSWERS[self.path.split("/")[1]]
        self.send_response(status)
        self.send_header("X-Error-Code", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("owner", ANSWERS)
def test_a_refused_model_says_what_to_do(owner: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)  # read when the client was imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _, _, message, hint = ANSWERS[owner]
    with pytest.raises(ToolkitError, match=message) as refused:
        download_config(f"{owner}/model", revision="v9")
    assert hint in str(refused.value.hint)
