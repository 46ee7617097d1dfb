"""Real comparisons of presets on a tiny Llama: killed, resumed, replayed, and with faults in their run folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, read, toolkit

from toolkit.compare.aggregate import aggregate_trials
from toolkit.compare.dry_run import dry_run_text
from toolkit.compare.ledger import TrialRecord
from toolkit.compare.options import CompareOptions
from toolkit.compare.results import load_results
from toolkit.compare.rows import Row
from toolkit.compare.run_record import read_run_record
from toolkit.compare.specification import read_comparison
from toolkit.record.folder import RunFolder

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
def test_a_row_can_be_replayed(finished: Path) -> None:
    ended = toolkit("compare", "--replay", str(finished), "--row", "ddp-n2")
    assert ended.returncode == 0, ended.stderr
    assert "where its 2 repeats predict one more run (95 %)" in ended.stdout
    run = read(finished / "replays" / "ddp-n2-0" / "run.json")
    assert (run["status"], run["warm_start"]) == ("completed", True)  # as its repeats
    unknown = toolkit("compare", "--replay", str(finished), "--row", "ddp-n3")
    assert (unknown.returncode, "--row ddp-n3 is not in the comparison" in unknown.stderr) == (2, True)


@pytest.mark.launch
def test_a_dry_run_reads_the_ledger_and_starts_nothing(finished: Path) -> None:
    before = sorted(finished.rglob("*"))
    options = CompareOptions(preset=("ddp",), num_processes=("2",), output_dir=finished, dry_run=True, cpu=True)
    text = dry_run_text(options, read_comparison(finished), {"zeropp-n2": "needs CUDA kernels"})
    assert "ddp-n2-r0: completed, already in the ledger" in text
    assert "zeropp-n2-r0: not supported here: needs CUDA kernels" in text
    assert "--num_processes 2 -m toolkit.train" in text
    assert "0 of 8 trials to run, in " in text.splitlines()[-1]
    assert re.search(r"broken-n2-r\d: not run, since broken-n2-r\d ended as failed", text)
    assert sorted(finished.rglob("*")) == before


# Faults in recorded runs: each changes the files of one row as the fault itself would have.


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def attest(fact: str, value: Any, *ranks: int) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        def edit(content: Any) -> None:
            for rank in ranks:
                content["ranks"][rank][fact] = value

        edit_json(run / "attestation.json", edit)

    return change


def rewrite_rows(rank: int, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        path = run / "ranks" / f"rank{rank}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            change(row)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return edit


def padding_alone(row: dict[str, Any]) -> None:
    row["tokens"] -= row["non_padding_tokens"]


def every_step_timed(row: dict[str, Any]) -> None:
    row["step_of_process"] += 2
    row["seconds"] = 9.0 if row["step"] == 1 else 0.1


def one_rank(run: Path) -> None:
    edit_json(run / "attestation.json", lambda content: content["ranks"].pop())
    (run / "ranks" / "rank1.jsonl").unlink()


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "bf16 Adam states": (attest("optimizer_dtype", "bfloat16", 0, 1), "optimizer_dtype is bfloat16, expected float32"),
    "clipping off": (attest("gradient_clipping", 0.0, 0, 1), "gradient_clipping is 0.0, 1.0 in ddp-n2-r0"),
    "another data order on one rank": (
        rewrite_rows(1, lambda row: row.update(batch_sha256="f" * 16)),
        "batch of step 1 on rank 1 is ffffffffffffffff, ",
    ),
    "another seed": (
        lambda run: edit_json(run / "run.json", lambda content: content["spec"].update(seed=1)),
        "seed is 1, 42 in ddp-n2-r0",
    ),
    "one process for two": (one_rank, "1 ranks attested, expected 2"),
    "DDP for another engine": (attest("engine", "ddp", 0, 1), "engine is ddp, expected deepspeed"),
    "a count of padding alone": (rewrite_rows(0, padding_alone), "step 1 has "),
    "activation checkpointing": (
        attest("activation_checkpointing", True, 0, 1),
        "activation_checkpointing is True, False in ddp-n2-r0",
    ),
    "another first loss": (rewrite_rows(0, lambda row: row.update(loss=row["loss"] + 0.01)), "loss of step 1 is "),
}


@pytest.mark.launch
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_run_fails_its_own_check(finished: Path, tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    row = zero2_with(finished, tmp_path, change, "zero2-n2-r0")
    assert row.parity == "parity failed"
    assert row.parity_message.startswith(f"repeat 0: {message}")
    assert row.tokens_per_second is None


@pytest.mark.launch
def test_a_timed_first_step_fails_parity(finished: Path, tmp_path: Path) -> None:
    def change(run: Path) -> None:
        for rank in (0, 1):
            rewrite_rows(rank, every_step_timed)(run)

    row = zero2_with(finished, tmp_path, change, "zero2-n2-r0", "zero2-n2-r1")
    assert row.parity_message == "repeat 0: step 1 is timed, with untimed_steps 2"


@pytest.mark.launch
def test_a_slow_rank_is_reported_as_skew(finished: Path, tmp_path: Path) -> None:
    def change(run: Path) -> None:
        for rank, seconds in ((0, 0.1), (1, 0.3)):
            rewrite_rows(rank, lambda row, own=seconds: row.update(own_seconds=own))(run)

    row = zero2_with(finished, tmp_path, change, "zero2-n2-r0", "zero2-n2-r1")
    assert (row.parity, row.rank_skew) == ("agrees", pytest.approx(3.0))


def zero2_with(finished: Path, tmp_path: Path, change: Callable[[Path], None], *changed: str) -> Row:
    """Return zero2's row after a change to the run folders of some of its trials."""
    spec = read_comparison(finished)
    records = []
    for position, trial in enumerate(spec.trials()):
        if trial.id in TRIALS:
            shutil.copytree(finished / "trials" / trial.id, tmp_path / trial.id)
            if trial.id in changed:
                change(tmp_path / trial.id)
            folder = RunFolder(tmp_path / trial.id)
            record = read_run_record(trial, folder, tmp_path, untimed_steps=2, position=position)
            records.append(TrialRecord.of(record))
    found, _ = aggregate_trials({record.trial: record for record in records}, spec, {})
    return next(row for row in found if row.preset == "zero2")
