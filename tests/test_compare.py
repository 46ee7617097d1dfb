"""A comparison for real: two presets of a tiny Llama, interrupted, resumed, killed, reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, read, toolkit

from toolkit.compare.ledger import Ledger
from toolkit.compare.rows import with_parity


def words(folder: Path, tiny_model: Path, data: Path, *presets: str) -> list[str]:
    chosen = [word for preset in presets for word in ("--preset", preset)]
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(data), "--max_seq_length", "64"]
    job += ["--max_steps", "5", "--per_device_train_batch_size", "2"]
    return ["compare", *chosen, "--num-processes", "2", "--output", str(folder), "--cpu", "--resume", "--", *job]


@pytest.mark.launch
def test_a_comparison_that_is_stopped_goes_on_and_repeats_nothing(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    command = words(tmp_path / "cmp", tiny_model, faq_alpaca, "ddp", "zero2")
    started = subprocess.Popen(
        [sys.executable, "-m", "toolkit", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ledger = tmp_path / "cmp" / "ledger.jsonl"
    wait_for(lambda: ledger.exists() and ledger.read_text().endswith("\n"))
    log = tmp_path / "cmp/trials/zero2-n2/train.log"
    wait_for(lambda: log.exists() and "data: alpaca" in log.read_text())
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=60)
    assert started.returncode == 1
    assert "`--resume` goes on" in said
    assert read(tmp_path / "cmp/trials/zero2-n2/run.json")["status"] == "interrupted"
    before = ledger.read_text()
    assert [json.loads(line)["trial"] for line in before.splitlines()] == ["ddp-n2"]

    ended = toolkit(*command)
    assert ended.returncode == 0, ended.stderr
    assert ledger.read_text().startswith(before)  # the finished trial was not run again
    assert "ddp-n2: completed" in ended.stderr
    assert "already in the ledger" in ended.stderr
    check_results(tmp_path / "cmp", ended.stdout)


def check_results(folder: Path, printed: str) -> None:
    results = read(folder / "results.json")
    assert (results["schema_version"], results["reference"]) == (1, "ddp")
    ddp, zero2 = results["rows"]
    assert [row["status"] for row in (ddp, zero2)] == ["completed", "completed"]
    assert (ddp["parity"], zero2["parity"]) == ("reference", "agrees")
    assert (ddp["timed_steps"], len(ddp["losses"])) == (3, 5)
    assert (zero2["gradient_bytes"], ddp["gradient_bytes"]) == (6_439_552, 12_879_104)
    assert zero2["losses"] == pytest.approx(ddp["losses"], rel=1e-6)
    assert zero2["ratio_to_reference"] == pytest.approx(zero2["tokens_per_second"] / ddp["tokens_per_second"])
    for name in ("report.md", "report.html", "results.json", "results.csv", "comparison.png"):
        assert (folder / name).stat().st_size > 0
        assert str(folder / name) in printed
    assert not (folder / "trials/ddp-n2/model.safetensors").exists()


@pytest.mark.launch
def test_a_trial_that_fails_is_a_row_and_the_comparison_a_success(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    """ZeRO-3 is refused its first step by an attention implementation that is not installed; so is ddp."""
    command = words(tmp_path / "cmp", tiny_model, faq_alpaca, "ddp")
    ended = toolkit(*command, "--attn_implementation", "flash_attention_2")
    assert ended.returncode == 0, ended.stderr
    (row,) = read(tmp_path / "cmp" / "results.json")["rows"]
    assert row["status"] == "failed"
    assert row["ratio_to_reference"] is None
    assert row["tokens_per_second"] is None
    assert "flash" in row["message"].lower()
    assert toolkit("report", str(tmp_path / "cmp")).returncode == 0


def test_a_line_cut_off_by_a_kill_is_dropped_at_any_byte(tmp_path: Path) -> None:
    whole = Ledger(tmp_path / "whole.jsonl")
    rows = [{"trial": "a", "status": "completed"}, {"trial": "b", "status": "completed"}]
    for row in rows:
        whole.append(row)
    content = whole.path.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(len(content) + 1):
        torn = Ledger(tmp_path / "torn.jsonl")
        torn.path.write_bytes(content[:cut])
        kept = [] if cut < first else (["a"] if cut < len(content) else ["a", "b"])
        assert list(torn.read()) == kept
        torn.append({"trial": "c", "status": "completed"})
        assert list(torn.read()) == [*kept, "c"]


def row(preset: str, **changes: object) -> dict[str, object]:
    return {
        "preset": preset,
        "world_size": 2,
        "status": "completed",
        "num_trainable_params": 10,
        "initial_weights_sha256": "w",
        "batch_sha256": [["a", "b"]],
        "first_loss": 2.0,
        "compute_dtype": "float32",
        "tokens_per_second": 100.0,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_loss": 2.00003}, r"first loss 2.000030 against 2.000000 of ddp \(relative 1.5e-05, allowed 1e-05\)"),
        ({"initial_weights_sha256": "x"}, "its initial weights are not those of ddp"),
        ({"batch_sha256": [["b", "a"]]}, "its batches, or their order, are not those of ddp"),
        ({"num_trainable_params": 9}, "9 trainable parameters, 10 in those of ddp"),
    ],
)
def test_a_row_that_trained_another_problem_gets_no_ratio(changes: dict[str, object], said: str) -> None:
    import re

    _, other = with_parity([row("ddp"), row("zero2", **changes)], "ddp")
    assert (other["parity"], other["ratio_to_reference"]) == ("parity failed", None)
    assert re.fullmatch(said, other["parity_message"])


def test_the_same_first_loss_in_bf16_may_differ_a_thousandth() -> None:
    half = {"compute_dtype": "bfloat16", "first_loss": 2.0015}
    _, other = with_parity([row("ddp"), row("zero2", tokens_per_second=80.0, **half)], "ddp")
    assert (other["parity"], other["ratio_to_reference"]) == ("agrees", 0.8)


def test_nothing_is_compared_with_a_reference_that_failed() -> None:
    _, other = with_parity([row("ddp", status="out_of_memory"), row("zero2")], "ddp")
    assert (other["parity"], other["ratio_to_reference"]) == (None, None)


def test_another_world_size_is_not_compared() -> None:
    _, other = with_parity([row("ddp"), row("ddp", world_size=4)], "ddp")
    assert (other["parity"], other["ratio_to_reference"]) == ("reference", 1.0)
    _, alone = with_parity([row("ddp"), row("zero2", world_size=4)], "ddp")
    assert alone["ratio_to_reference"] is None


def wait_for(condition: object, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
