"""Real comparisons of presets on a tiny Llama: killed and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT, read, toolkit

from toolkit.compare.options import CompareOptions
from toolkit.compare.predictions import dry_run_text
from toolkit.compare.results import load_results
from toolkit.compare.specification import ComparisonSpec

TRIALS = ["ddp-n2-r0", "ddp-n2-r1", "zero2-n2-r0", "zero2-n2-r1"]


def compare_command(folder: Path, model: Path, data: Path, *options: str) -> list[str]:
    job = ["--model_name_or_path", str(model), "--dataset", str(data), "--max_seq_length", "64"]
    job += ["--max_steps", "30", "--per_device_train_batch_size", "2"]
    return ["compare", *options, "--num-processes", "2", "--output", str(folder), "--cpu", "--resume", "--", *job]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Path:
    """ddp and zero2 twice each, a variant that fails and a preset without CPU support; killed twice and interrupted."""
    folder = tmp_path_factory.mktemp("comparison") / "cmp"
    options = ["--preset", "ddp", "--preset", "zero2", "--preset", "zeropp", "--repeats", "2"]
    options += ["--variant", "broken=ddp --lora_r 4 --lora_config layers_to_transform=99", "--target-interval", "0.9"]
    # in this order: ddp, zero2, broken, ddp, broken, zero2
    command = compare_command(folder, tiny_model, faq_alpaca, *options, "--order-seed", "6")
    run_until(command, signal.SIGKILL, lambda: "data: alpaca" in log_of(folder, "ddp-n2-r0"))
    run_until(command, signal.SIGKILL, lambda: len(ledger_lines(folder)) == 1)
    output = run_until(command, signal.SIGINT, lambda: "data: alpaca" in log_of(folder, "zero2-n2-r0"))
    assert "`--resume` resumes" in output
    assert read(folder / "trials" / "zero2-n2-r0" / "run.json")["status"] == "interrupted"
    before = ledger_lines(folder)
    ended = toolkit(*command)
    assert ended.returncode == 0, ended.stderr
    assert ledger_lines(folder)[: len(before)] == before  # finished trials are not repeated
    assert "already in the ledger" in ended.stderr
    (folder / "output.txt").write_text(ended.stdout + ended.stderr)
    return folder


def run_until(command: list[str], number: signal.Signals, when: Callable[[], bool]) -> str:
    """Start the comparison, send it a signal once `when` is true, and return its output."""
    started = subprocess.Popen(
        [sys.executable, "-m", "toolkit", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not when():
        assert time.monotonic() < deadline, "waited too long"
        assert started.poll() is None, started.communicate()[0]
        time.sleep(0.05)
    started.send_signal(number)
    return started.communicate(timeout=60)[0]


def log_of(folder: Path, trial: str) -> str:
    log = folder / "trials" / trial / "train.log"
    return log.read_text() if log.exists() else ""


def ledger_lines(folder: Path) -> list[str]:
    ledger = folder / "ledger.jsonl"
    return ledger.read_text().splitlines() if ledger.exists() else []


@pytest.mark.launch
def test_a_comparison_that_was_killed_three_times_has_each_trial_once(finished: Path) -> None:
    trials = [json.loads(line)["trial"] for line in ledger_lines(finished)]
    failed = [name for name in trials if name.startswith("broken")]
    assert sorted(trials) == sorted([*TRIALS, *failed])
    assert len(failed) == 1  # its second repeat would fail as the first did
    assert f"since {failed[0]} ended as failed" in (finished / "output.txt").read_text()


@pytest.mark.launch
def test_rows_have_intervals_and_agree(finished: Path) -> None:
    results = load_results(finished)
    ddp, zero2, zeropp, broken = results.rows
    assert [row.status for row in results.rows] == ["completed", "completed", "not_supported", "failed"]
    assert (ddp.parity, zero2.parity, ddp.repeats, zero2.repeats) == ("reference", "agrees", 2, 2)
    assert (zero2.gradient_bytes, ddp.gradient_bytes) == (6_439_552, 12_879_104)
    assert zero2.losses == pytest.approx(ddp.losses[: len(zero2.losses)], rel=1e-5)
    assert zero2.ratio_to_reference == pytest.approx((zero2.tokens_per_second or 0) / (ddp.tokens_per_second or 1))
    low, high = zero2.ratio_interval or (0, 0)
    assert low < (zero2.ratio_to_reference or 0) < high
    assert "CUDA kernels" in (zeropp.message or "")
    assert "layers_to_transform=99" in (broken.message or "")
    assert broken.failure is not None
    assert broken.failure.phase == "load"
    assert broken.tokens_per_second is None
    assert results.method.repeats == 2


@pytest.mark.launch
def test_trials_have_start_up_times_and_leave_no_weights(finished: Path) -> None:
    trials = load_results(finished).trials
    assert sorted(row.trial for row in trials if row.status == "completed") == TRIALS
    for row in trials:
        if row.status == "completed":
            assert (row.startup_seconds or 0) > 0
            assert row.timed_step_numbers[0] == 3
            assert read(finished / "trials" / row.trial / "run.json")["warm_start"] is True
    assert not list(finished.glob("trials/*/model.safetensors"))
    for name in ("report.md", "report.html", "results.json", "results.csv"):
        assert (finished / name).stat().st_size > 0


@pytest.mark.launch
def test_a_trial_ends_early_on_all_ranks_after_the_same_step(finished: Path) -> None:
    """±90 % is reached at the first decision with ten timed steps, after step 15; all ranks stop after step 17."""
    for name in TRIALS:
        run = finished / "trials" / name
        assert read(run / "run.json")["stopped_after"] == {"step": 17, "why": "median step known to 90.0%"}
        assert [len((run / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()) for rank in (0, 1)] == [17, 17]


@pytest.mark.launch
def test_a_dry_run_reads_the_ledger_and_starts_nothing(finished: Path) -> None:
    before = sorted(finished.rglob("*"))
    options = CompareOptions(preset=("ddp",), num_processes=("2",), output_dir=finished, dry_run=True, cpu=True)
    spec = ComparisonSpec.model_validate(read(finished / "comparison.json"))
    text = dry_run_text(options, spec, {"zeropp-n2": "needs CUDA kernels"})
    assert "ddp-n2-r0: completed, already in the ledger" in text
    assert "zeropp-n2-r0: not supported here: needs CUDA kernels" in text
    assert "--num_processes 2 -m toolkit.train" in text
    assert "0 of 8 trials to run, in " in text.splitlines()[-1]
    assert re.search(r"broken-n2-r\d: not run, since broken-n2-r\d ended as failed", text)
    assert sorted(finished.rglob("*")) == before
