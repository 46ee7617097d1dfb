"""Reports of several nodes are compared: versions, presets, drivers, hardware, clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from toolkit.cli.program import app, main
from toolkit.doctor.node_comparison import (
    NodeFacts,
    clock_offset_seconds,
    compare_facts,
    difference_lines,
    hash_presets,
)
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


def found(**changes: Any) -> list[tuple[str, str]]:
    """Return level and fact of the differences between a node and one like it but for some facts."""
    changed = {name.replace("version_", "version "): value for name, value in changes.items()}
    return [(row.level, row.fact) for row in compare_facts({"n1": FACTS, "n2": FACTS | {"hostname": "n2"} | changed})]


def test_equal_nodes_do_not_differ() -> None:
    assert found() == []
    assert found(unix_time=1500.0) == []  # the clocks agree with their file server's
    assert found(host_memory_bytes=1_990_000_000_000) == []  # the firmware's share


def test_each_difference_has_its_level_and_errors_come_first() -> None:
    assert found(
        driver="570.124.06", vbios="7 × 96.00.89.00.01, 1 × 96.00.A5", kernel="6.8.0-47", version_torch="2.12"
    ) == [
        ("error", "version torch"),
        ("warning", "driver"),
        ("warning", "vbios"),
        ("note", "kernel"),
    ]
    assert found(preset_files="0000", gpus="7 × NVIDIA H100 80GB HBM3", nccl=None) == [
        ("error", "gpus"),
        ("error", "nccl"),
        ("error", "preset_files"),
    ]
    assert found(host_memory_bytes=1_000_000_000_000) == [("warning", "host_memory_bytes")]
    assert found(**{"preset zero3": "a fact that the other node does not have"}) == [("error", "preset zero3")]


def test_clocks_are_compared_with_their_file_servers_and_without_one_only_noted() -> None:
    assert found(clock_offset_seconds=0.9) == []
    assert found(clock_offset_seconds=-1.2) == [("error", "clock_offset_seconds")]
    assert found(clock_offset_seconds=None) == []
    assert found(clock_offset_seconds=None, unix_time=1001.5) == [("note", "unix_time")]


def test_the_text_groups_nodes_by_their_value() -> None:
    nodes = {name: FACTS for name in ("n1", "n2")} | {"n3": FACTS | {"host_memory_bytes": 2**40}}
    (difference,) = compare_facts(nodes)
    assert difference_lines(difference) == [
        "warning: host_memory_bytes differs: the smallest node decides what fits",
        "  1862.65 GiB: n1, n2",
        "  1024.00 GiB: n3",
        "  fix: nodes of one kind",
    ]


@pytest.fixture
def reports(tmp_path: Path) -> list[str]:
    """Two reports of this node as the program writes them, the second from a node with another torch."""
    result = CliRunner().invoke(app, ["doctor", "--json", "--preset", "zero2"])
    report = json.loads(result.stdout)
    assert report["node_facts"]["preset zero2"] == hash_presets([load_preset("zero2")])
    names = []
    for host, torch in (("n1", report["node_facts"]["version torch"]), ("n2", "2.0.0")):
        report["node_facts"] |= {"hostname": host, "version torch": torch}
        names.append(str(tmp_path / f"{host}.json"))
        Path(names[-1]).write_text(json.dumps(report))
    return names


def test_the_command_compares_what_it_wrote(reports: list[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", "--compare", *reports])
    assert result.exit_code == 1
    assert "error: version torch differs: ranks of other versions fail, or train something else" in result.stdout
    assert "  2.0.0: n2" in result.stdout.splitlines()
    found = json.loads(CliRunner().invoke(app, ["doctor", "--compare", "--json", *reports]).stdout)
    assert found["nodes"] == ["n1", "n2"]
    assert [(row["level"], row["fact"], row["values"]["n2"]) for row in found["differences"]] == [
        ("error", "version torch", "2.0.0")
    ]


def test_nodes_of_one_name_are_told_apart_by_their_file(reports: list[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", "--compare", "--json", reports[0], reports[0]])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"nodes": ["n1", f"n1 ({reports[0]})"], "differences": []}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is not a report of `toolkit doctor --json`"),
        ('{"node_facts": {"hostname": "a", "unix_time": 1, "gpus": [1]}}', "is not a report"),
        ("[1", "not JSON"),
        (None, "one.json"),
    ],
)
def test_a_file_that_is_no_report_is_refused(
    text: str | None, message: str, reports: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--compare", reports[0], str(path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_one_report_has_no_difference_and_none_is_refused(
    reports: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for words, code, message in ((reports[:1], 0, "1 node: no differences\n"), ([], 2, "error: --compare needs")):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--compare", *words])
        assert ended.value.code == code
        assert capsys.readouterr().err.startswith(message)


def test_a_changed_preset_file_changes_the_hash(tmp_path: Path) -> None:
    original = load_preset("ddp")
    copy = tmp_path / "ddp.yaml"
    copy.write_text(original.accelerate_config_path.read_text())
    before = hash_presets([read_preset(copy)])
    copy.write_text(copy.read_text() + "# a comment\n")
    assert hash_presets([read_preset(copy)]) != before
    assert len(before) == 16


def test_a_local_disk_has_no_clock_of_its_own(tmp_path: Path) -> None:
    assert clock_offset_seconds(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
