"""A real comparison of `ddp` with presets that split layers and sequences, on four ranks with the same sequences."""

from pathlib import Path

import pytest
from launching import read, succeeded, toolkit
from split_runs import build_models, build_rows

pytestmark = [pytest.mark.launch, pytest.mark.nightly]


def test_split_models_and_sequences_train_the_problem_of_ddp_and_a_ratio_counts_no_padding(tmp_path: Path) -> None:
    """One trial of each preset; sequences have different lengths, so padding differs between layouts."""
    build_models(tmp_path)
    build_rows(tmp_path)
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text() * 2)  # three steps of eight rows
    names = ("ddp", "fsdp2_tp", "cp", "pipeline_1f1b")
    presets = [word for name in names for word in ("--preset", name)]
    options = ["--num-processes", "4", "--output-dir", str(tmp_path / "cmp"), "--cpu", "--repeats", "1"]
    job = ["--model_name_or_path", str(tmp_path / "llama_tied"), "--dataset", str(tmp_path / "rows.jsonl")]
    job += ["--max_seq_length", "64", "--max_steps", "2", "--gradient_accumulation_steps", "2"]
    job += ["--per_device_train_batch_size", "1", "--tp", "2", "--cp", "2", "--pp", "2"]
    succeeded(toolkit("compare", *presets, *options, "--untimed-steps", "1", "--", *job))
    rows = {row["preset"]: row for row in read(tmp_path / "cmp" / "results.json")["rows"]}
    assert [(row["parity"], row["parity_message"], row["group"]) for row in rows.values()] == [
        ("reference", None, None),
        *[("agrees", None, None)] * 3,
    ]
    layouts = [row["layout"] for row in rows.values()]
    assert layouts == [None, "dp_shard 2 x tp 2", "dp_shard 2 x cp 2", "dp_replicate 2 x pp 2"]
    assert [row["per_device_train_batch_size"] for row in rows.values()] == [1, 2, 2, 2]
    for name in ("fsdp2_tp", "cp", "pipeline_1f1b"):
        assert rows[name]["losses"] == pytest.approx(rows["ddp"]["losses"], rel=1e-5)
    ddp, split = rows["ddp"], rows["fsdp2_tp"]
    assert split["padding_fraction"] > ddp["padding_fraction"] == 0  # a batch of one row has none
    speeds = [row["non_padding_tokens_per_second"] for row in (split, ddp)]
    assert split["ratio_to_reference"] == pytest.approx(speeds[0] / speeds[1])
