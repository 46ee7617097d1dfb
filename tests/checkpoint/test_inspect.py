"""Checkpoints are inspected from their files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import toolkit

from toolkit.checkpoint.inspect import inspect_checkpoint

pytestmark = pytest.mark.launch


def test_inspect_lists_every_checkpoint_of_a_run(saved_runs: dict[str, Path]) -> None:
    ended = toolkit("checkpoint", "inspect", str(saved_runs["zero3"]), "--json")
    found = json.loads(ended.stdout)["checkpoints"]
    assert [each["step"] for each in found] == [6, 4, 2]
    assert {each["state"] for each in found} == {"complete"}
    assert (found[0]["engine"], found[0]["preset"], found[0]["world_size"]) == ("deepspeed", "zero3", 2)
    assert (found[0]["num_params"], found[0]["adapter"]) == (3_219_776, False)
    assert found[0]["optimizer_bytes"] >= 12 * 3_219_776


def test_a_checkpoint_without_a_manifest_has_unknown_completeness(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    summary = inspect_checkpoint(checkpoint)
    assert summary.state == "no manifest: completeness unknown"
    assert (summary.engine, summary.step, summary.world_size) == ("deepspeed", 6, 2)
