"""Two-rank runs on streamed rows, and on two files with weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, read, toolkit
from token_streams import batch_hashes, encoder, rank_arguments

from toolkit.observe.batches import ObservedCollator
from toolkit.record.heartbeat import read_heartbeats
from toolkit.train.data.collation import Collator, batch_facts
from toolkit.train.data.streaming import MixedRows, TokenStream, open_stream, stream_loader


def run_job(output: Path, *words: str) -> dict[str, list[Any]]:
    """Values of each step by key under DDP, rank 0 first."""
    config = ROOT / "accelerate_configs" / "ddp.yaml"
    ended = accelerate_launch(config, *words, "--save_model", "false", "--output_dir", str(output))
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    files = [output / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {
        key: [row[key] for row in found] for key in ("step", "loss", "grad_norm", "batch_sha256", "non_padding_tokens")
    }


def assert_resumes_exactly(whole: dict[str, list[Any]], output: Path, *words: str) -> None:
    resumed = run_job(output, *words, "--save_strategy", "no")
    later = [index for index, step in enumerate(whole["step"]) if step > 3]
    for key in ("step", "loss", "grad_norm", "batch_sha256"):
        assert resumed[key] == [whole[key][index] for index in later]


@pytest.mark.launch
def test_a_streamed_run_is_equal_when_resumed(
    tmp_path: Path, tiny_model: Path, faq_sharegpt: Path, faq_alpaca: Path
) -> None:
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text("\n".join(faq_sharegpt.read_text().splitlines()[:60]) + "\n")
    held_out.write_text("\n".join(faq_alpaca.read_text().splitlines()[60:70]) + "\n")
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--max_seq_length", "256"]
    job += ["--streaming", "true", "--streaming_buffer_size", "16", "--packing", "true", "--system_prompt", "Be brief."]
    job += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--max_steps", "5"]
    job += ["--lora_r", "4", "--lora_dropout", "0.1"]
    steps = ["--save_steps", "3", "--eval_dataset", str(held_out), "--dataloader_num_workers", "2"]
    whole = run_job(tmp_path / "whole", *job, *steps)
    assert whole["step"] == [1, 2, 3, 4, 5] * 2
    assert len(set(whole["batch_sha256"])) == 10
    run = read(tmp_path / "whole" / "run.json")
    assert (run["data"]["streamed"], run["data"]["rows"], run["data"]["packs"]) == (True, 60, None)
    assert [row["step"] for row in run["evaluations"]] == [5]

    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert read(checkpoint / "manifest.json")["streaming_buffer_size"] == 16
    assert_resumes_exactly(whole, tmp_path / "resumed", *job, "--resume_from_checkpoint", str(checkpoint))


@pytest.mark.launch
def test_an_invalid_row_ends_both_ranks_and_the_fixed_file_resumes_on_one(
    tmp_path: Path, tiny_model: Path, tokenizer: Any
) -> None:
    rows = tmp_path / "rows.jsonl"
    unread = "x" * 2**18  # an extra field, so that `toolkit train` checks the first 128 rows only
    valid = [json.dumps({"text": f"row number {n}", "unread": unread}) + "\n" for n in range(134)]
    rows.write_text("".join(valid) + '{"text": 135, "unread": ""}\n')
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--output_dir", str(tmp_path / "out")]
    words += ["--streaming", "true", "--streaming_buffer_size", "4", "--per_device_train_batch_size", "4"]
    words += ["--max_seq_length", "32", "--max_steps", "18", "--save_steps", "8", "--save_model", "false"]
    ended = toolkit("train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--", *words)
    assert ended.returncode == 2, ended.stderr[-3000:]
    assert "Traceback" not in ended.stdout + ended.stderr
    failure = read(tmp_path / "out" / "failure.json")
    assert (failure["kind"], failure["invalid_input"], failure["phase"]) == ("failed", True, "data")
    assert failure["message"] == f"{rows}: row 135, line 135: `text` is number, expected a string"
    assert failure["message"] in ended.stderr
    assert "`--resume_from_checkpoint latest`" in failure["hint"]
    assert read(tmp_path / "out" / "run.json")["status"] == "failed"
    assert [beat for beat in read_heartbeats(tmp_path / "out" / "ranks") if beat.process is not None] == []

    rows.write_text("".join(valid) + '{"text": "row number 134", "unread": ""}\n')
    single = ["train", "--preset", "single", "--num-processes", "1", "--cpu", "--", *words]
    ended = toolkit(*single, "--per_device_train_batch_size", "8", "--resume_from_checkpoint", "latest")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert read(tmp_path / "out" / "run.json")["resumed_from"]["step"] == 16
    steps = [json.loads(line) for line in (tmp_path / "out" / "ranks" / "rank0.jsonl").read_text().splitlines()]
    stream, training = open_stream(str(rows), "train", buffer_size=4, seed=42), rank_arguments(0, 1, batch=8)
    sequences = TokenStream(MixedRows(streams=(stream,)), [encoder(tokenizer, stream)], training)
    collator = ObservedCollator(Collator(tokenizer), batch_facts)
    uninterrupted = iter(stream_loader(sequences, collator, training, "cpu"))  # type: ignore[arg-type]
    expected = [sha256[:16] for sha256 in batch_hashes(uninterrupted, 18, {})]
    assert [row["batch_sha256"] for row in steps if row["step"] > 16] == expected[16:]


@pytest.mark.launch
def test_two_weighted_files_give_the_same_steps_when_resumed(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path, faq_sharegpt: Path
) -> None:
    """10 and 20 rows in two formats: 20 are half of an epoch of 40 rows, which is 5 steps of 8."""
    files = [tmp_path / "alpaca.jsonl", tmp_path / "sharegpt.jsonl"]
    for file, source, rows in zip(files, (faq_alpaca, faq_sharegpt), (slice(10), slice(10, 30)), strict=True):
        file.write_text("\n".join(source.read_text().splitlines()[rows]) + "\n")
    job = ["--model_name_or_path", str(tiny_model), "--dataset", *map(str, files), "--dataset_weights", "0.5", "0.5"]
    job += ["--max_seq_length", "64", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    job += ["--num_train_epochs", "2"]
    whole = run_job(tmp_path / "ddp", *job, "--save_steps", "3")
    assert whole["step"] == [*range(1, 11)] * 2
    data = read(tmp_path / "ddp" / "run.json")["data"]
    found = [(source["rows"], source["epoch_rows"], source["weight"]) for source in data["sources"]]
    assert found == [(10, 20, 0.5), (20, 20, 0.5)]
    assert (data["format"], data["rows"], data["epoch_rows"]) == ("alpaca, sharegpt", 30, 40)
    assert sum(whole["non_padding_tokens"]) == 2 * data["tokens"]  # two epochs of 40 rows
    assert "20 rows, each 2.00 times" in (tmp_path / "ddp" / "train.log").read_text()

    checkpoint = tmp_path / "ddp" / "checkpoint-3"
    assert read(checkpoint / "manifest.json")["dataset_weights"] == [0.5, 0.5]
    assert_resumes_exactly(whole, tmp_path / "resumed", *job, "--resume_from_checkpoint", str(checkpoint))
