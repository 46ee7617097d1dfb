"""Two-rank runs on streamed rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, read, toolkit
from token_streams import batch_hashes, rank_arguments

from toolkit.observe.batches import ObservedCollator
from toolkit.record.heartbeat import read_heartbeats
from toolkit.train.data.collation import Collator, batch_facts
from toolkit.train.data.stream_loader import batch_share, stream_loader
from toolkit.train.data.streaming import TokenStream, open_stream
from toolkit.train.data.tokenization import row_encoder


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_sharegpt: Path) -> list[str]:
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text("\n".join(faq_sharegpt.read_text().splitlines()[:60]) + "\n")
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(rows), "--max_seq_length", "256"]
    words += ["--streaming", "true", "--streaming_buffer_size", "16", "--packing", "true"]
    words += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--max_steps", "5"]
    words += ["--system_prompt", "Be brief."]
    return [*words, "--lora_r", "4", "--lora_dropout", "0.1", "--save_model", "false"]


def run_job(preset: str, output: Path, words: list[str]) -> dict[str, list[Any]]:
    """Values of each step by key, rank 0 first."""
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    ended = accelerate_launch(config, *words, "--output_dir", str(output))
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    files = [output / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {key: [row[key] for row in found] for key in ("step", "loss", "grad_norm", "batch_sha256")}


@pytest.mark.launch
def test_a_streamed_run_is_equal_under_another_preset_and_when_resumed(
    job: list[str], tmp_path: Path, faq_alpaca: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(faq_alpaca.read_text().splitlines()[60:70]) + "\n")
    steps = ["--save_steps", "3", "--eval_dataset", str(held_out), "--dataloader_num_workers", "2"]
    uninterrupted = run_job("ddp", tmp_path / "uninterrupted", [*job, *steps])
    assert uninterrupted["step"] == [1, 2, 3, 4, 5] * 2
    assert len(set(uninterrupted["batch_sha256"])) == 10
    run = read(tmp_path / "uninterrupted" / "run.json")
    assert (run["data"]["streamed"], run["data"]["rows"], run["data"]["packs"]) == (True, 60, None)
    assert [row["step"] for row in run["evaluations"]] == [5]

    other = run_job("zero3", tmp_path / "zero3", [*job, "--save_strategy", "no"])
    assert other["batch_sha256"] == uninterrupted["batch_sha256"]
    assert other["loss"] == pytest.approx(uninterrupted["loss"], abs=1e-4)

    checkpoint = tmp_path / "uninterrupted" / "checkpoint-3"
    assert read(checkpoint / "manifest.json")["streaming_buffer_size"] == 16
    resume = ["--resume_from_checkpoint", str(checkpoint), "--save_strategy", "no"]
    resumed = run_job("ddp", tmp_path / "resumed", [*job, *resume])
    assert resumed["step"] == [4, 5] * 2
    for key in ("loss", "grad_norm", "batch_sha256"):
        assert resumed[key] == uninterrupted[key][3:5] + uninterrupted[key][8:10]


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
    words += ["--max_steps", "18", "--save_steps", "8", "--save_model", "false"]
    command = ["train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--", *words]
    ended = toolkit(*command)
    assert ended.returncode == 2, ended.stderr[-3000:]
    assert "Traceback" not in ended.stdout + ended.stderr
    message = f"{rows}: row 135, line 135: `text` is number, expected a string"
    assert message in ended.stderr
    failure = read(tmp_path / "out" / "failure.json")
    assert (failure["kind"], failure["invalid_input"], failure["phase"]) == ("failed", True, "data")
    assert failure["message"] == message
    assert "`--resume_from_checkpoint latest`" in failure["hint"]
    assert read(tmp_path / "out" / "run.json")["status"] == "failed"
    assert [beat for beat in read_heartbeats(tmp_path / "out" / "ranks") if beat.process is not None] == []

    rows.write_text("".join(valid) + '{"text": "row number 134", "unread": ""}\n')
    single = ["train", "--preset", "single", "--num-processes", "1", "--cpu", "--", *words]
    ended = toolkit(*single, "--per_device_train_batch_size", "8", "--resume_from_checkpoint", "latest")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert read(tmp_path / "out" / "run.json")["resumed_from"]["step"] == 16
    steps = [json.loads(line) for line in (tmp_path / "out" / "ranks" / "rank0.jsonl").read_text().splitlines()]
    stream = open_stream(str(rows), "train", buffer_size=4, seed=42)
    encode = row_encoder(tokenizer=tokenizer, data_format="text", max_seq_length=1024, loss_on=None, system_prompt=None)
    training = rank_arguments(0, 1, batch=8)
    uninterrupted = stream_loader(
        TokenStream(stream, [encode], batch_share(training)),
        ObservedCollator(Collator(tokenizer), batch_facts),
        training,
        "cpu",
    )
    expected = [sha256[:16] for sha256 in batch_hashes(iter(uninterrupted), 18, {})]
    assert [row["batch_sha256"] for row in steps if row["step"] > 16] == expected[16:]
