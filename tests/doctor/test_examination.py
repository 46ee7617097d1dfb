"""Reports of several nodes are compared: versions, presets, drivers, hardware, clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command

from toolkit.doctor.examination import NodeFacts, clock_offset_seconds, compare_facts, hash_presets
from toolkit.presets import load_preset, read_preset

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
def reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Two reports of this node as the program writes them, the second from a node with another torch."""
    _, out, _ = run_command(["doctor", "--json", "--preset", "zero2"], capsys)
    report = json.loads(out)
    assert report["node_facts"]["preset zero2"] == hash_presets([load_preset("zero2")])
    names = []
    for host, torch in (("n1", report["node_facts"]["version torch"]), ("n2", "2.0.0")):
        report["node_facts"] |= {"hostname": host, "version torch": torch}
        names.append(str(tmp_path / f"{host}.json"))
        Path(names[-1]).write_text(json.dumps(report))
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


def test_what_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    code, _, err = run_command(["doctor", "--compare", str(tmp_path / "other.json")], capsys)
    assert (code, "is not a report of `toolkit doctor --json`" in err) == (2, True)
    code, _, err = run_command(["doctor", "--compare"], capsys)
    assert (code, err[:22]) == (2, "error: --compare needs")


def test_a_changed_preset_file_changes_the_hash(tmp_path: Path) -> None:
    copy = tmp_path / "ddp.yaml"
    copy.write_text(load_preset("ddp").accelerate_config_path.read_text())
    before = hash_presets([read_preset(copy)])
    copy.write_text(copy.read_text() + "# a comment\n")
    assert hash_presets([read_preset(copy)]) != before
    assert len(before) == 16


def test_a_local_disk_has_no_clock_of_its_own(tmp_path: Path) -> None:
    assert clock_offset_seconds(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
