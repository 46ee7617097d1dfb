"""Two-rank runs on streamed rows."""

import json
from pathlib import Path
from typing import Any

from launching import accelerate_launch, nightly_launch, rank_rows, read, succeeded, toolkit

from toolkit.record.heartbeat import read_heartbeats


def run_job(output: Path, *words: str) -> dict[str, list[Any]]:
    succeeded(accelerate_launch("ddp", *words, "--save_model", "false", "--output_dir", str(output)))
    found = [*rank_rows(output, 0), *rank_rows(output, 1)]
    return {key: [row[key] for row in found] for key in ("step", "loss", "grad_norm", "batch_sha256")}


@nightly_launch
def test_weighted_streams_resume_equal(tmp_path: Path, tiny_model: Path, faq_sharegpt: Path, faq_alpaca: Path) -> None:
    chats, rows, held_out = (tmp_path / f"{name}.jsonl" for name in ("chats", "rows", "eval"))
    parts = {chats: (faq_sharegpt, slice(60)), rows: (faq_alpaca, slice(70, 90)), held_out: (faq_alpaca, slice(60, 70))}
    for file, (source, lines) in parts.items():
        text = "\n".join(source.read_text().splitlines()[lines]) + "\n"
        file.write_text(text.replace('"output"', '"answer"') if file == rows else text)  # `--column` reads it
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(chats), str(rows), "--max_seq_length", "256"]
    job += ["--dataset_weights", "0.5", "0.5", "--system_prompt", "Be brief.", "--column", "output=answer"]
    job += ["--streaming", "true", "--streaming_buffer_size", "16", "--packing", "true"]
    job += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--max_steps", "5"]
    job += ["--lora_r", "4", "--lora_dropout", "0.1"]
    steps = ["--save_steps", "3", "--eval_dataset", str(held_out), "--dataloader_num_workers", "2"]
    whole = run_job(tmp_path / "whole", *job, *steps)
    assert whole["step"] == [1, 2, 3, 4, 5] * 2
    assert len(set(whole["batch_sha256"])) == 10
    run = read(tmp_path / "whole" / "run.json")
    assert (run["data"]["streamed"], run["data"]["rows"], run["data"]["packs"]) == (True, 80, None)
    assert [row["step"] for row in run["evaluations"]] == [5]

    checkpoint = tmp_path / "whole" / "checkpoint-3"
    manifest = read(checkpoint / "manifest.json")
    assert (manifest["streaming_buffer_size"], manifest["dataset_weights"]) == (16, [0.5, 0.5])
    resumed = run_job(tmp_path / "resumed", *job, "--resume_from_checkpoint", str(checkpoint), "--save_strategy", "no")
    later = [index for index, step in enumerate(whole["step"]) if step > 3]
    assert resumed == {key: [values[index] for index in later] for key, values in whole.items()}


@nightly_launch
def test_an_invalid_row_ends_both_ranks_and_the_fixed_file_resumes_on_one(tmp_path: Path, tiny_model: Path) -> None:
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
    succeeded(toolkit(*single, "--per_device_train_batch_size", "8", "--resume_from_checkpoint", "latest"))
    assert read(tmp_path / "out" / "run.json")["resumed_from"]["step"] == 16
