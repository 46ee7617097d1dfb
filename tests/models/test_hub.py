"""What a user reads when the hub refuses a model, from a real server; and what is sent and kept."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.models.hub import download_config

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

REQUESTS: list[dict[str, str]] = []


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        owner = self.path.split("/")[1]
        if owner == "public-owner":  # redirects to another host, as the hub does for large files
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/file-host")  # type: ignore[attr-defined]
            self.end_headers()
            return
        if owner == "file-host":
            REQUESTS.append(dict(self.headers))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"model_type": "llama"}')
            return
        REQUESTS.append(dict(self.headers))
        status, reason, _, _ = ANSWERS[owner]
        self.send_response(status)
        self.send_header("X-Error-Code", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def online(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("owner", ANSWERS)
def test_a_refused_model_says_what_to_do(owner: str) -> None:
    _, _, message, hint = ANSWERS[owner]
    with pytest.raises(ToolkitError, match=message) as refused:
        download_config(f"{owner}/model", revision="v9")
    assert hint in str(refused.value.hint)


@pytest.mark.usefixtures("online")
def test_the_token_is_sent_to_the_hub_and_to_no_host_that_it_redirects_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    REQUESTS.clear()
    with pytest.raises(ToolkitError):
        download_config("gated-owner/model")
    assert download_config("public-owner/model").read_text() == '{"model_type": "llama"}'
    assert [sent.get("Authorization") for sent in REQUESTS] == ["Bearer hf_secret", None]


@pytest.mark.usefixtures("online")
def test_a_model_that_was_downloaded_is_found_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded = download_config("public-owner/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download_config("public-owner/model") == downloaded
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert download_config("public-owner/model") == downloaded


@pytest.mark.usefixtures("online")
def test_the_file_in_the_hubs_own_cache_is_used_where_it_is_the_same(tmp_path: Path) -> None:
    cached = tmp_path / "hub-home/hub/models--public-owner--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text('{"model_type": "llama"}')
    assert download_config("public-owner/model") == cached / "snapshots" / "abc" / "config.json"
