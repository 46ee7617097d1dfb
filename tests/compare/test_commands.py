"""A real comparison of presets on a tiny Llama, killed and resumed: its trials, side runs, results and report."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import fork_process
from launching import ROOT, cpu_environment, fork_server, read, succeeded, toolkit

from toolkit.compare.results import Results, load_results

pytestmark = pytest.mark.launch
TRIALS = ["ddp-n2-r0", "ddp-n2-r1", "zero2-n2-r0", "zero2-n2-r1"]
P = 336_192  # parameters of the tiny Llama


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_job: list[str]) -> Path:
    """ddp and zero2 twice each, a variant that fails and a preset without CPU support; killed and interrupted."""
    folder = tmp_path_factory.mktemp("comparison") / "cmp"
    options = ["--preset", "ddp", "--preset", "zero2", "--preset", "zeropp", "--repeats", "2", "--num-processes", "2"]
    options += ["--variant", "broken=ddp --lora_r 4 --lora_config layers_to_transform=99", "--target-interval", "0.9"]
    options += ["--order-seed", "6"]  # in this order: ddp, zero2, broken, ddp, broken, zero2
    options += ["--profile", "--measure-save", "--price-per-gpu-hour", "2", "--cpu", "--resume"]
    job = [*tiny_job, "--max_steps", "30", "--per_device_train_batch_size", "2"]
    command = ["compare", "--output", str(folder), *options, "--", *job]
    run_until(command, signal.SIGKILL, lambda: len(ledger_lines(folder)) == 1)
    reported = succeeded(toolkit("report", str(folder)))
    assert "Interrupted, of finished trials (1) only. " in reported.stdout
    output = run_until(command, signal.SIGINT, lambda: "data: alpaca" in log_of(folder, "zero2-n2-r0"))
    assert f"`toolkit report {folder}` shows the finished trials; the same command with `--resume` resumes" in output
    assert read(folder / "trials" / "zero2-n2-r0" / "run.json")["status"] == "interrupted"
    before = ledger_lines(folder)
    ended = succeeded(toolkit(*command))
    assert ledger_lines(folder)[: len(before)] == before  # finished trials are not repeated
    assert "already in the ledger" in ended.stderr
    assert "--price-per-gpu-hour has no effect" in ended.stderr
    (folder / "output.txt").write_text(ended.stdout + ended.stderr)
    return folder


@pytest.fixture(scope="module")
def results(finished: Path) -> Results:
    return load_results(finished)


def run_until(command: list[str], number: signal.Signals, when: Callable[[], bool]) -> str:
    words = [sys.executable, "-m", "toolkit", *command]
    with contextlib.chdir(ROOT), fork_process(fork_server(), words, environment=cpu_environment()) as started:
        deadline = time.monotonic() + 600
        while not when():
            assert time.monotonic() < deadline, "waited too long"
            assert started.poll() is None, started.stdout.read()
            time.sleep(0.02)
        started.send_signal(number)
        return str(started.stdout.read())


def log_of(folder: Path, trial: str) -> str:
    log = folder / "trials" / trial / "train.log"
    return log.read_text() if log.exists() else ""


def ledger_lines(folder: Path) -> list[str]:
    ledger = folder / "ledger.jsonl"
    return ledger.read_text().splitlines() if ledger.exists() else []


def test_rows_of_a_cpu_have_the_bytes_planned_on_a_gpu(results: Results) -> None:
    """Bytes per parameter, on two GPUs: ddp 4 + 4 + 8; zero2 2 + 2/2 + 12/2."""
    planned = {row.preset: row.planned_gpu_state_bytes or 0 for row in results.rows if row.completed}
    assert {name: round(size / P) for name, size in planned.items()} == {"ddp": 16, "zero2": 9}


def test_a_comparison_that_was_killed_has_each_run_once(finished: Path) -> None:
    runs = [json.loads(line)["trial"] for line in ledger_lines(finished)]
    failed = [name for name in runs if name.startswith("broken")]
    assert sorted(runs) == sorted([*TRIALS, *["ddp-n2-profile-save", "zero2-n2-profile-save"], *failed])
    assert len(failed) == 1  # its second repeat would fail as the first did
    assert "since broken on 2 processes, repeat 1 ended as failed" in (finished / "output.txt").read_text()


def test_rows_have_intervals_and_agree(results: Results) -> None:
    ddp, zero2, zeropp, broken = results.rows
    assert [row.status for row in results.rows] == ["completed", "completed", "not_supported", "failed"]
    assert (ddp.parity, zero2.parity, ddp.repeats, zero2.repeats) == ("reference", "agrees", 2, 2)
    assert (zero2.gradient_bytes, ddp.gradient_bytes) == (2 * P, 4 * P)
    assert zero2.losses == pytest.approx(ddp.losses[: len(zero2.losses)], rel=1e-5)
    assert zero2.ratio_to_reference == pytest.approx((zero2.tokens_per_second or 0) / (ddp.tokens_per_second or 1))
    low, high = zero2.ratio_interval or (0, 0)
    assert low < (zero2.ratio_to_reference or 0) < high
    assert "CUDA kernels" in (zeropp.message or "")
    assert "layers_to_transform=99" in (broken.message or "")
    assert (broken.failure.phase, broken.tokens_per_second) == ("load", None)


def test_trials_have_start_up_times_and_end_early_after_the_same_step(finished: Path, results: Results) -> None:
    """±90 % is reached at the first decision with ten timed steps, after step 15, or on a busy machine at a later one;
    all ranks stop two steps after it."""
    completed = [trial for trial in results.trials if trial.completed]
    assert sorted(trial.trial for trial in completed) == TRIALS  # no speed counts a side run
    for trial in completed:
        assert 0 < (trial.startup_seconds or 0) < (trial.wall_seconds or 0)
        assert trial.timed_step_numbers[0] == 3
        folder = finished / "trials" / trial.trial
        run = read(folder / "run.json")
        step = run["stopped_after"]["step"]
        assert step in range(17, 40, 5)
        assert run["stopped_after"]["why"] == "median step known to 90.0%"
        assert [len((folder / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()) for rank in (0, 1)] == [step] * 2
    assert not list(finished.glob("trials/*/model.safetensors"))
    assert {"report.md", "report.html", "results.json", "results.csv"} <= {path.name for path in finished.iterdir()}


def test_a_row_has_memory_by_phase_flops_and_no_figure_of_a_gpu(results: Results) -> None:
    row = results.rows[1]
    sizes = row.memory_by_phase.model_dump()
    assert sizes.pop("bytes_of") == "rss"
    assert all(4 * P < size <= (row.peak_host_bytes or 0) for size in sizes.values())
    assert row.flops_per_token.causal == 6 * P + 6 * 2 * 64 * row.flops_per_token.seq_length
    assert 0 < (row.non_padding_tokens_per_second or 0) <= (row.tokens_per_second or 0)
    assert len(row.attestation_sha256 or "") == 64
    assert "attention flash" in (row.kernels or "")
    gpu_only = ("mfu", "hfu", "energy_joules", "throttle_reasons", "peak_driver_bytes", "cost_per_million_tokens")
    assert {getattr(row, key) for key in gpu_only} == {None}


def test_a_side_run_measures_communication_and_a_checkpoint(finished: Path, results: Results) -> None:
    row = results.rows[1]
    assert 0 < (row.exposed_communication_fraction or 0) <= (row.communication_fraction or 0) < 1
    assert (row.save_seconds or 0) > 0
    assert (row.save_bytes or 0) > 12 * P  # weights, and AdamW's two states, in fp32
    assert (row.timeline.step, [rank.rank for rank in row.timeline.ranks]) == (4, [0, 1])
    assert "One step of every rank" in (finished / "report.html").read_text()
    assert not list(finished.glob("extras/*/checkpoint-*"))


@pytest.mark.gpu
def test_on_a_gpu_memory_by_phase_is_of_the_allocator(tmp_path: Path, tiny_job: list[str]) -> None:
    job = [*tiny_job, "--max_steps", "4", "--save_strategy", "no", "--save_model", "false"]
    job += ["--output_dir", str(tmp_path / "run")]
    succeeded(toolkit("train", "--preset", "single", "--num-processes", "1", "--no-cpu", "--", *job))
    measured = read(tmp_path / "run" / "run.json")["measured"]
    memory = measured["memory_by_phase"]
    assert memory["bytes_of"] == "allocated"
    assert 4 * P <= memory["load"] < memory["forward"]
    assert memory["load"] + 8 * P <= memory["step"] <= measured["peak_allocated_bytes"]  # AdamW's two fp32 states
