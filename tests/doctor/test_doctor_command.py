"""`toolkit doctor` as it is typed: on this node, with limits that are really set; reports of several nodes compared."""

import io
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from command_line import exit_code, run_command
from launching import LLAMA_8B_CONFIG, ROOT

from toolkit.doctor.examination import CHECKS, NodeFacts, compare_facts, hash_presets
from toolkit.presets import load_preset

QWEN_72B = str(ROOT / "tests" / "fixtures" / "qwen2.5-72b")
TOKEN = "hf_QmVyZ2VuSXNOb3RIZXJl"


def run_doctor(*words: str, **variables: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in [name for name in os.environ if name.startswith(("HF_", "NCCL_"))]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        code = exit_code("doctor", *words)
    return code, out.getvalue(), err.getvalue()


def report(*words: str, **variables: str) -> dict[str, Any]:
    code, out, err = run_doctor("--json", *words, **variables)
    found: dict[str, Any] = json.loads(out)
    assert code == int(any(finding["level"] == "error" for finding in found["findings"])), err
    return found


def levels(found: dict[str, Any], check: str) -> list[str]:
    return [finding["level"] for finding in found["findings"] if finding["check"] == check]


def measured(found: dict[str, Any], check: str) -> dict[str, Any]:
    (values,) = [row["measured"] for row in found["checks"] if row["check"] == check]
    return dict(values)


def test_this_node_is_measured_by_every_check() -> None:
    here = report()
    assert set(here) == {"findings", "checks", "node_facts"}
    assert [row["check"] for row in here["checks"]] == list(CHECKS)
    assert {type(value) for value in here["node_facts"].values()} <= {str, int, float, type(None)}
    for row in here["findings"]:
        assert set(row) == {"check", "level", "what", "value", "expected", "fix"}
        assert all(row[key] and isinstance(row[key], str) for key in ("check", "level", "what", "fix"))
        assert all(row[key] is None or (row[key] and isinstance(row[key], str)) for key in ("value", "expected"))
    for row in here["checks"]:
        assert set(row) == {"check", "status", "seconds", "measured", "skipped"}
        assert bool(row["skipped"]) == (row["status"] == "skipped"), row
    memory = measured(here, "host-memory")
    assert memory["installed_bytes"] == here["node_facts"]["host_memory_bytes"]
    assert 0 < memory["available_bytes"] < memory["installed_bytes"]
    assert measured(here, "shared-memory")["bytes"] == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    assert measured(here, "cores")["usable"] == len(os.sched_getaffinity(0))
    assert here["node_facts"]["hostname"] == socket.gethostname()
    assert measured(here, "libraries")["torch"] == here["node_facts"]["version torch"]
    assert {disk["free_bytes"] > 0 for disk in measured(here, "disk-space").values()} == {True}


def test_the_text_shows_each_finding_with_its_fix() -> None:
    code, out, _ = run_doctor("--gpus-per-node", "64", "--verbose")
    lines = out.splitlines()
    assert code == 1
    assert lines[0].startswith("error: ")
    at = next(index for index, line in enumerate(lines) if line.startswith("error: GPUs are missing: "))
    assert lines[at].endswith("; expected: 64, as --gpus-per-node says [gpu-count]")
    assert lines[at + 1] == "  fix: SLURM: --gpus-per-node; docker run --gpus all; without a driver: install NVIDIA's"
    assert [line for line in lines[-2:] if " 1 error" in line]
    assert [line for line in lines if line.startswith("ok ")]


def test_each_finding_is_said_once(tmp_path: Path) -> None:
    _, out, _ = run_doctor("--preset", "zero3_nvme_offload", HF_HOME=str(tmp_path))
    lines = out.splitlines()
    assert not [line for line in lines if line.startswith("ok ")], "checks that found nothing, without --verbose"
    assert len([line for line in lines if "offloads to a local disk" in line]) == 1
    assert [line for line in lines if "token" in line and "hf auth" not in line] == [
        "note: no hub token: gated and private models are refused [hub]"
    ]


def test_a_node_that_is_busy_with_something_else_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.6 * (os.cpu_count() or 1), 0.0, 0.0))
    assert "warning" in levels(report(), "cores")
    monkeypatch.setattr(os, "getloadavg", lambda: (1.4 * (os.cpu_count() or 1), 9.0, 9.0))
    assert not [row for row in report()["findings"] if "other programs" in row["what"]]


def run_cold(
    command: list[str], before: Callable[[], None] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": programs} | variables
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": 240}
    return subprocess.run(command, env=environment, preexec_fn=before, **options)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("toolkit.doctor.ops", "error: torch, deepspeed are not installed"),
        ("toolkit doctor", "error: libraries are not installed: torch, deepspeed [libraries]"),
    ],
)
def test_without_torch_it_says_what_is_missing_and_what_to_type(module: str, line: str, tmp_path: Path) -> None:
    """As where only the package itself is installed: metadata and modules of torch and DeepSpeed are not found."""
    hidden = (
        "import importlib.metadata as metadata, sys\n"
        "found = metadata.Distribution.from_name\n"
        "def from_name(name):\n"
        "    if name in ('torch', 'deepspeed'):\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.Distribution.from_name = from_name\n"
        "sys.modules.update(torch=None, deepspeed=None)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hidden)
    ended = run_cold([sys.executable, "-m", *module.split()], PYTHONPATH=f"{tmp_path}:{ROOT}")
    lines = (ended.stdout + ended.stderr).splitlines()
    assert line in lines, ended.stderr
    assert "pip install 'finetune-toolkit[train,deepspeed]'" in lines[lines.index(line) + 1]


# -- this node with limits that are really set


def test_low_limits_are_found(tmp_path: Path) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))

    ended = run_cold(
        [sys.executable, "-m", "toolkit", "doctor", "--json", "--num-processes", "4"], lower, HF_HOME=str(tmp_path)
    )
    found = json.loads(ended.stdout)
    assert levels(found, "ulimit-nofile") == ["warning"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm")
def test_the_shared_memory_of_a_container_is_an_error() -> None:
    script = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec python -m toolkit doctor --json"
    ended = run_cold(["unshare", "--mount", "sh", "-c", script])
    if "unshare failed" in ended.stderr:
        pytest.skip(f"this container has no mount namespaces: {ended.stderr.strip()}")
    found = json.loads(ended.stdout)
    assert (ended.returncode, levels(found, "shared-memory")) == (1, ["error"])
    assert measured(found, "shared-memory") == {"bytes": 64 * 2**20, "writable": True}


def test_an_interface_that_does_not_exist_and_a_switched_off_fast_path_are_found() -> None:
    found = report(NCCL_SOCKET_IFNAME="nosuchcard0", NCCL_P2P_DISABLE="1")
    assert levels(found, "nccl-variables") == ["error", "warning"]
    assert "unset NCCL_P2P_DISABLE (not on consumer cards without P2P)" in {row["fix"] for row in found["findings"]}


def test_of_a_token_only_its_presence_is_shown_and_a_readable_token_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o644)
    _, text, messages = run_doctor(HF_HOME=str(tmp_path), GLOO_SOCKET_IFNAME=TOKEN)
    assert "GLOO_SOCKET_IFNAME names no interface of this node: ***" in text
    found = report(HF_HOME=str(tmp_path), GLOO_SOCKET_IFNAME=TOKEN)
    assert TOKEN not in text + messages + json.dumps(found)
    assert (measured(found, "hub")["token"], levels(found, "hub")) == ("token file", ["warning"])
    assert f"chmod 600 {tmp_path}/token" in {finding["fix"] for finding in found["findings"]}


# -- what a preset needs


def test_a_preset_that_needs_more_host_memory_or_another_disk_is_an_error(tmp_path: Path) -> None:
    found = report("--preset", "zero3_cpu_offload", "--num-processes", "2", QWEN_72B)
    assert levels(found, "host-memory")[0] == "error"
    assert measured(found, "host-memory")["needed_bytes"] > 10**12  # 16 bytes for each of 72.7 billion parameters
    missing = report("--nvme-path", str(tmp_path / "missing"))
    assert "error" in levels(missing, "nvme-offload")


@pytest.mark.parametrize("has_header", [False, True])
def test_a_missing_disk_is_reported_whether_or_not_libaio_is_there(has_header: bool, tmp_path: Path) -> None:
    include, ops = tmp_path / "include", tmp_path / "ops"
    include.mkdir()
    (include / "libaio.h").touch()
    compiler = {"CPLUS_INCLUDE_PATH": str(include)} if has_header else {"CXX": "no-such-compiler"}
    found = report("--preset", "zero3_nvme_offload", TORCH_EXTENSIONS_DIR=str(ops), **compiler)
    refused = [finding["what"] for finding in found["findings"] if finding["check"] == "nvme-offload"]
    assert set(levels(found, "nvme-offload")) == {"error"}
    missing = "DeepSpeed's async_io is not compiled" if has_header else "libaio's header is missing"
    assert refused[0] == f"NVMe offload: {missing}"
    assert refused[-1] == "preset 'zero3_nvme_offload' offloads to a local disk, and none is given"
    # The library beside the header is the node's own: this has one, or it is the only finding between the two.
    assert refused[1:-1] in ([], ["libaio is not installed; NVMe offload reads and writes through it"] * has_header)


# -- invalid input


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["--preset", "zero4"], "unknown preset 'zero4'", "did you mean"),
        ([str(LLAMA_8B_CONFIG)], "a MODEL has no effect without --preset", "toolkit doctor --preset NAME MODEL"),
        (["--preset", "ddp", "no-such-model"], "no-such-model", "hint"),
        (["a.json", "b.json"], "one MODEL at most, 2 given", "--compare"),
        (["--compare"], "--compare needs the reports of the nodes", "toolkit doctor --compare *.json"),
        (["--compare", f"{QWEN_72B}/config.json"], "is not a report of `toolkit doctor --json`", "config.json"),
    ],
)
def test_invalid_input_is_refused_before_anything_is_measured(
    words: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command(["doctor", *words], capsys)
    assert (code, out) == (2, "")
    assert error in err
    assert hint in err


# -- reports of several nodes

FACTS: NodeFacts = {
    "hostname": "n1",
    "unix_time": 1000.0,
    "clock_offset_seconds": 0.02,
    "driver": "570.86.15",
    "vbios": "8 × 96.00.89.00.01",
    "gpus": "8 × NVIDIA H100 80GB HBM3",
    "kernel": "6.8.0-45",
    "nccl": "nvidia-nccl-cu12 2.27.3",
    "host_memory_bytes": 2_000_000_000_000,
    "preset_files": "a15d898e667600fe",
    "version torch": "2.13.0",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"unix_time": 1500.0}, []),  # the clocks agree with their file server's
        ({"host_memory_bytes": 1_990_000_000_000}, []),  # the firmware's share
        ({"host_memory_bytes": 1_000_000_000_000}, [("warning", "host_memory_bytes")]),
        (
            {"driver": "570.124.06", "kernel": "6.8.0-47", "version torch": "2.12"},  # errors come first
            [("error", "version torch"), ("warning", "driver"), ("note", "kernel")],
        ),
        ({"preset_files": "0000", "nccl": None}, [("error", "nccl"), ("error", "preset_files")]),
        ({"preset zero3": "a fact that the other node does not have"}, [("error", "preset zero3")]),
        ({"clock_offset_seconds": 0.9}, []),
        ({"clock_offset_seconds": -1.2}, [("error", "clock_offset_seconds")]),
        ({"clock_offset_seconds": None, "unix_time": 1001.5}, [("note", "unix_time")]),
    ],
)
def test_each_difference_between_two_nodes_has_its_level(
    changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    rows = compare_facts({"n1": FACTS, "n2": FACTS | {"hostname": "n2"} | changes})
    assert [(row.level, row.fact) for row in rows] == expected


def test_the_text_groups_nodes_by_their_value() -> None:
    nodes = {name: FACTS for name in ("n1", "n2")} | {"n3": FACTS | {"host_memory_bytes": 2**40}}
    (difference,) = compare_facts(nodes)
    assert difference.lines()[1:3] == ["  1862.65 GiB: n1, n2", "  1024.00 GiB: n3"]


@pytest.fixture
def reports(tmp_path: Path) -> list[str]:
    """Two reports of this node as the program writes them, the second from a node with another torch."""
    written = report("--preset", "zero2")
    assert written["node_facts"]["preset zero2"] == hash_presets([load_preset("zero2")])
    names = []
    for host, torch in (("n1", written["node_facts"]["version torch"]), ("n2", "2.0.0")):
        written["node_facts"] |= {"hostname": host, "version torch": torch}
        names.append(str(tmp_path / f"{host}.json"))
        Path(names[-1]).write_text(json.dumps(written))
    return names


def test_the_command_compares_what_it_wrote(reports: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(["doctor", "--compare", *reports], capsys)
    assert code == 1
    assert "error: version torch differs: ranks of other versions fail, or train something else" in out
    assert "  2.0.0: n2" in out.splitlines()
    found = json.loads(run_command(["doctor", "--compare", "--json", *reports], capsys)[1])
    (row,) = found["differences"]
    assert (found["nodes"], row["level"], row["fact"]) == (["n1", "n2"], "error", "version torch")
    assert row["values"]["n2"] == "2.0.0"
    code, out, err = run_command(["doctor", "--compare", "--json", reports[0], reports[0]], capsys)
    assert (code, json.loads(out)) == (0, {"nodes": ["n1", f"n1 ({reports[0]})"], "differences": []})
    assert err == "2 nodes: no differences\n"
