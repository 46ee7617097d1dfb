"""A real comparison of `ddp` with presets that split layers and sequences, on four ranks with the same sequences."""

from __future__ import annotations

from typing import Any

import pytest
from launching import read, toolkit
from split_runs import build_models, build_rows

pytestmark = [pytest.mark.launch, pytest.mark.nightly]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One trial of each preset, by preset; sequences have different lengths."""
    folder = tmp_path_factory.mktemp("split")
    build_models(folder)
    build_rows(folder)
    (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text() * 2)  # three steps of eight rows
    names = ("ddp", "fsdp2_tp", "cp", "pipeline_1f1b")
    presets = [word for name in names for word in ("--preset", name)]
    options = ["--num-processes", "4", "--output-dir", str(folder / "cmp"), "--cpu", "--repeats", "1"]
    job = ["--model_name_or_path", str(folder / "llama_tied"), "--dataset", str(folder / "rows.jsonl")]
    job += ["--max_seq_length", "64", "--max_steps", "2", "--gradient_accumulation_steps", "2"]
    job += ["--per_device_train_batch_size", "1", "--tp", "2", "--cp", "2", "--pp", "2"]
    ended = toolkit("compare", *presets, *options, "--untimed-steps", "1", "--", *job)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {row["preset"]: row for row in read(folder / "cmp" / "results.json")["rows"]}


def test_split_models_and_sequences_train_the_problem_of_ddp(rows: dict[str, dict[str, Any]]) -> None:
    assert [(row["parity"], row["parity_message"], row["group"]) for row in rows.values()] == [
        ("reference", None, None),
        *[("agrees", None, None)] * 3,
    ]
    assert [row["layout"] for row in rows.values()] == [
        None,
        "dp_shard 2 x tp 2",
        "dp_shard 2 x cp 2",
        "dp_replicate 2 x pp 2",
    ]
    assert [row["per_device_train_batch_size"] for row in rows.values()] == [1, 2, 2, 2]
    for name in ("fsdp2_tp", "cp", "pipeline_1f1b"):
        assert rows[name]["losses"] == pytest.approx(rows["ddp"]["losses"], rel=1e-5)


def test_a_ratio_counts_no_padding_which_differs_between_layouts(rows: dict[str, dict[str, Any]]) -> None:
    ddp, split = rows["ddp"], rows["fsdp2_tp"]
    assert split["padding_fraction"] > ddp["padding_fraction"] == 0  # a batch of one row has none
    speeds = [row["non_padding_tokens_per_second"] for row in (split, ddp)]
    assert split["ratio_to_reference"] == pytest.approx(speeds[0] / speeds[1])
