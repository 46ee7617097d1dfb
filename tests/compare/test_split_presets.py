"""A real comparison of `ddp` with presets that split layers and sequences, on four ranks with the same sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import read, toolkit

pytestmark = pytest.mark.launch
PARAMETERS, NORMS = 3_219_776, 5 * 64


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Any]:
    """One trial of each preset; rows have different lengths."""
    folder = tmp_path_factory.mktemp("split") / "cmp"
    presets = [word for name in ("ddp", "fsdp2_tp", "cp") for word in ("--preset", name)]
    options = ["--num-processes", "4", "--output-dir", str(folder), "--cpu", "--repeats", "1", "--untimed-steps", "1"]
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "96"]
    job += ["--max_steps", "4", "--per_device_train_batch_size", "1", "--tp", "2", "--cp", "2"]
    ended = toolkit("compare", *presets, *options, "--", *job)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = read(folder / "results.json")
    return found


def test_split_models_and_sequences_train_the_problem_of_ddp(results: dict[str, Any]) -> None:
    rows = {row["preset"]: row for row in results["rows"]}
    assert [(row["parity"], row["parity_message"], row["group"]) for row in rows.values()] == [
        ("reference", None, None),
        ("agrees", None, None),
        ("agrees", None, None),
    ]
    assert [row["layout"] for row in rows.values()] == [None, "dp_shard 2 x tp 2", "dp_shard 2 x cp 2"]
    assert [row["per_device_train_batch_size"] for row in rows.values()] == [1, 2, 2]
    for name in ("fsdp2_tp", "cp"):
        assert rows[name]["losses"] == pytest.approx(rows["ddp"]["losses"], rel=1e-5)


def test_a_ratio_counts_no_padding_which_differs_between_layouts(results: dict[str, Any]) -> None:
    ddp, split, _ = results["rows"]
    assert split["padding_fraction"] > ddp["padding_fraction"] == 0  # a batch of one row has none
    speeds = [row["non_padding_tokens_per_second"] for row in (split, ddp)]
    assert split["ratio_to_reference"] == pytest.approx(speeds[0] / speeds[1])


def test_ranks_hold_the_bytes_that_a_rehearsal_shows(results: dict[str, Any]) -> None:
    """The formulas of tests/rehearse/test_rehearsal.py, in fp32; tensor parallelism replicates norms."""
    ddp, split, ring = ([row["parameter_bytes"], row["optimizer_bytes"]] for row in results["rows"])
    assert ddp == [4 * PARAMETERS, 8 * PARAMETERS]
    assert ring == [PARAMETERS, 2 * PARAMETERS]
    held = (PARAMETERS - NORMS) // 4 + NORMS // 2
    assert split == [4 * held, 8 * held]
