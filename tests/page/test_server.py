"""`toolkit page` over HTTP: its answers are the command line's, and they are for one user's browser alone."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run_command
from launching import ROOT
from served_page import ServedPage, served_page

from toolkit.models.config_fields import MAX_CONFIG_BYTES
from toolkit.page import server

LLAMA = ROOT / "tests" / "fixtures" / "llama-8b"
LORA = {"lora_r": "16", "load_in_4bit": "on"}
EPOCHS = {"dataset_tokens": "9000000", "num_train_epochs": "2"}
BATCH = {"global_batch_size": "64", "per_device_train_batch_size": "2", "activation_checkpointing": "off"}
JOBS = {
    "full": ("Qwen/Qwen3-8B", {"gpu": "h100-sxm", "gpus": "8"}),
    "dpo": ("Qwen3-4B", {"gpu": "l40s", "gpus": "4", "method": "dpo"} | EPOCHS),
    "qlora": ("meta-llama/Llama-3.1-70B", {"gpu": "a100-80gb", "gpus": "2"} | LORA),
    "price": ("google/gemma-2-2b", {"gpu": "rtx-4090", "price_per_gpu_hour": "0.4"} | EPOCHS),
    "nodes": ("microsoft/phi-4", {"gpu": "h200", "nodes": "2"} | BATCH),
    "folder": (str(LLAMA), {"gpu": "mi300x", "gpus": "1", "max_seq_length": "4096"}),
    "no such folder": ("./nowhere", {"gpu": "h100"}),
    "not a number": ("Qwen/Qwen3-8B", {"gpu": "h100", "host_memory_gib": "-1"}),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPage]:
    with served_page("--port", 0, cwd=tmp_path_factory.mktemp("served")) as started:
        yield started


DAILY = {("plan", "dpo"), ("plan", "folder"), ("recommend", "qlora"), ("plan", "not a number")}
ASKED = [(command, name) for name in JOBS for command in ("plan", "recommend")]


@pytest.mark.parametrize(
    ("command", "name"), [pytest.param(*each, marks=() if each in DAILY else pytest.mark.nightly) for each in ASKED]
)
def test_an_answer_is_what_the_command_prints(
    command: str, name: str, page: ServedPage, capsys: pytest.CaptureFixture[str]
) -> None:
    model, fields = JOBS[name]
    answer = page.ask(command, model, fields)
    code, out, err = run_command([*shlex.split(answer["words"])[1:], "--json"], capsys)
    assert code == (2 if "error" in answer else 0)
    if code == 0:
        assert answer["text"] == out
    else:
        assert (
            err
            == "error: " + "\n  hint: ".join(filter(None, [answer["error"]["message"], answer["error"]["hint"]])) + "\n"
        )


def test_a_value_that_is_no_number_is_refused_with_its_field(page: ServedPage) -> None:
    error = page.ask("plan", "Qwen3-8B", {"gpu": "h100", "max_seq_length": "many"})["error"]
    assert error["message"] == "--max-seq-length is 'many', expected a whole number"
    assert error["field"] == "max_seq_length"


def test_the_page_and_its_files_are_served_and_nothing_else(page: ServedPage) -> None:
    status, html = page.get()
    assert (status, "Will it fit" in html, "data-served" in html) == (200, True, True)
    assert [page.get(path)[0] for path in ("page.css", "page.js", "page.js?fresh")] == [200, 200, 200]
    for path in ("index.html.j2", "page_html.py", "../server.py", "%2e%2e/server.py", "/etc/passwd", "ask"):
        assert page.get(path)[0] == 404, path


def test_a_method_that_a_known_model_is_refused_and_what_fits_nowhere_are_left_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    models = ("nvidia/Nemotron-H-8B-Base-8K", "moonshotai/Kimi-K2-Instruct")  # peft refuses a layer of the first
    monkeypatch.setattr(server, "bundled_models", lambda: models)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    small, large = server.known_rows()
    assert small["full"]["h100-sxm"] == 2
    assert small["lora"] == large["qlora"] == dict.fromkeys(server.TABLE_GPUS)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "planner.example:8642"},
        {"Host": "127.0.0.1.example"},
        {"Origin": "https://example.org"},
        {"Origin": "http://localhost:1"},
        {"Origin": "null"},
    ],
    ids=str,
)
def test_another_site_is_refused(headers: dict[str, str], page: ServedPage) -> None:
    job = json.dumps({"request": {"command": "plan", "model": "Qwen3-8B", "fields": {"gpu": "h100"}}}).encode()
    assert page.get(**headers)[0] == 403
    assert page.post(job, **headers)[0] == 403


def test_the_pages_own_origin_is_answered_also_through_a_tunnel(page: ServedPage) -> None:
    job = json.dumps({"request": {"command": "plan", "model": "Qwen3-8B", "fields": {"gpu": "h100"}}}).encode()
    assert page.post(job, Origin=page.address.rstrip("/"))[0] == 200
    assert page.post(job, Host="localhost:9000", Origin="http://localhost:9000")[0] == 200


def test_a_form_of_another_site_cannot_ask(page: ServedPage) -> None:
    assert page.post(b"{}", Content_Type="text/plain")[0] == 400


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_node_is_refused(page: ServedPage) -> None:
    code = """
import encodings.idna, os, socket, sys
os.setuid(65534)
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(b"GET / HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n")
print(connection.recv(100))
"""
    done = subprocess.run([sys.executable, "-c", code, str(page.port)], capture_output=True, text=True, check=True)
    assert " 403 " in done.stdout


def test_only_this_node_is_listened_to(page: ServedPage) -> None:
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", page.port), timeout=5):  # noqa: PT011
        pass


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"no JSON", b'{"request": {}}', b'{"preset": "../x.yaml"}', b"[" * 100_000], ids=len
)
def test_what_no_page_sends_gets_no_answer_and_no_traceback(content: bytes, page: ServedPage) -> None:
    assert page.post(content) == (500, "{}")


def test_a_message_that_is_too_long_is_not_read(page: ServedPage) -> None:
    with socket.create_connection(("127.0.0.1", page.port), timeout=30) as raw:
        lines = ("POST /ask HTTP/1.1", "Host: localhost", "Content-Type: application/json")
        raw.sendall("\r\n".join([*lines, f"Content-Length: {MAX_CONFIG_BYTES + 1}", "", ""]).encode())
        assert b" 413 " in raw.recv(100)


def test_options_that_read_files_or_start_processes_are_not_the_pages(page: ServedPage) -> None:
    fields = {"gpu": "h100", "verify": "on", "config": "/etc/passwd", "dataset": "/etc/passwd", "measured": "/etc"}
    answer = page.ask("plan", "Qwen3-8B", fields)
    assert answer["words"] == "toolkit plan Qwen3-8B --gpu h100 --num-processes 8"
    error = page.ask("plan", "--verify", {"gpu": "h100"})["error"]
    assert error["message"] == "model '--verify' is neither a folder nor a hub id"


def test_a_pasted_configuration_is_planned_and_writes_no_file(page: ServedPage, tmp_path: Path) -> None:
    config = (LLAMA / "config.json").read_text()
    for model in ("config.json", "models/mine"):
        assert "text" in page.ask("plan", model, {"gpu": "h100"}, config=config)
    for model in (str(tmp_path), f"{tmp_path}/config.json", "../config.json", "~/mine"):
        error = page.ask("plan", model, {"gpu": "h100"}, config=config)["error"]
        assert error["message"].endswith("is not a name for a pasted configuration")
    assert list(tmp_path.iterdir()) == []
    assert list(Path(f"/proc/{page.process.pid}/cwd").iterdir()) == []


def test_the_files_of_a_preset_are_a_zip(page: ServedPage) -> None:
    status, text = page.post(b'{"preset": "zero2"}')
    assert status == 200
    assert json.loads(text)["files"].startswith("UEsDB")


def test_no_answer_loads_torch(page: ServedPage) -> None:
    assert "text" in page.ask("recommend", "Qwen3-8B", {"gpu": "h100"})
    assert "libtorch" not in Path(f"/proc/{page.process.pid}/maps").read_text()


def test_ctrl_c_ends_it_with_exit_code_0(tmp_path: Path) -> None:
    with served_page("--port", 0, cwd=tmp_path) as started:
        assert started.get()[0] == 200
        assert started.interrupt()[0] == 0


def test_a_port_that_is_taken_is_an_error_if_it_was_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with served_page("--port", port, cwd=tmp_path) as started:
            _, err = started.process.communicate(timeout=60)
    assert started.process.returncode == 2
    assert f"error: port {port}: Address already in use\n  hint: `--port 0` takes" in err


@pytest.mark.nightly
def test_without_a_port_two_pages_can_be_served_at_once(tmp_path: Path) -> None:
    with served_page(cwd=tmp_path) as first, served_page(cwd=tmp_path) as second:
        assert first.address != second.address
        assert second.get()[0] == 200
