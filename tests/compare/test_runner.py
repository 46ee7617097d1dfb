"""How a comparison runs: progress, side runs, and the search for the largest batch, also under a memory limit."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from comparison_records import comparison, comparison_runner, failure, probe, trial
from fork_server import SERVER_VARIABLE
from launching import ROOT, TINY_SIZES, nightly_launch, read
from random_models import random_llama

from toolkit.compare.build_results import aggregate_trials
from toolkit.compare.ledger import Ledger, LedgerRecord, probes_of
from toolkit.compare.predictions import search_bounds
from toolkit.compare.rows import Failure, RowKey
from toolkit.compare.runner import ConsoleProgress, find_largest_batches, search
from toolkit.compare.specification import with_largest_batches

DDP = RowKey(preset="ddp", world_size=2)


STEP = "step 3/8  loss 2.0000  1.00 s  100 tokens/s  peak 1.00 GiB RSS  5 s left"


def test_the_live_line_has_the_trial_the_time_left_in_all_and_the_newest_step() -> None:
    progress = ConsoleProgress(3)
    progress.is_live = True
    progress.finish(trial("ddp", 0, wall_seconds=100.0))
    progress.start("zero2-n2-r0")
    progress.output_line(STEP)
    assert progress.describe(30.0) == f"[2/3] zero2-n2-r0  30 s  about 2 min 50 s left in all  {STEP}"


def test_a_pipe_gets_the_steps_of_a_trial_once_per_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, clock = ConsoleProgress(1), iter((0.0, 30.0, 61.0, 62.0, 125.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress.start("ddp-n2-r0")
    for step in range(1, 5):
        progress.output_line(f"step {step}/8  loss 2.0000")
    printed = [line.partition(":")[2] for line in capsys.readouterr().err.splitlines()]
    assert printed == [" starting", " step 2/8  loss 2.0000", " step 4/8  loss 2.0000"]


def oracle(limit: int, tried: list[int], *, why: str = "out_of_memory") -> Callable[[int], LedgerRecord]:
    """A probe that completes up to `limit`, and adds each size to `tried`."""

    def run(size: int) -> LedgerRecord:
        tried.append(size)
        return probe("ddp", size, status="completed" if size <= limit else why)

    return run


def test_the_search_finds_the_limit_and_tries_no_size_twice() -> None:
    for limit, start, cap in product(range(41), (1, 2, 3, 8), (1, 2, 7, 32, 40)):
        tried: list[int] = []
        assert search({}, oracle(limit, tried), start=start, cap=cap) == (min(limit, cap) or None)
        assert len(tried) == len(set(tried)) <= 2 * cap.bit_length()
        assert max(tried) <= cap


def test_a_search_killed_after_each_probe_resumes_where_it_stopped(tmp_path: Path) -> None:
    ledger, tried = Ledger(tmp_path / "ledger.jsonl"), list[int]()
    run = oracle(5, tried)

    def killed_probe(size: int) -> LedgerRecord:
        ledger.append(run(size))
        raise KeyboardInterrupt

    for _ in range(12):
        with contextlib.suppress(KeyboardInterrupt):
            search(probes_of(ledger.read(), DDP), killed_probe, start=2, cap=64)
    assert search(probes_of(ledger.read(), DDP), killed_probe, start=2, cap=64) == 5
    assert len(tried) == len(set(tried)) == len(ledger.read())


def test_a_failure_other_than_memory_ends_a_search_in_which_nothing_has_run() -> None:
    tried: list[int] = []
    assert search({}, oracle(0, tried, why="failed"), start=8, cap=64) is None
    assert tried == [8]
    assert search({}, oracle(11, tried, why="timed_out"), start=8, cap=64) == 11


def test_a_search_ends_at_the_largest_batch_that_the_data_fills(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instruction": "a", "output": str(row)}) + "\n" for row in range(50)))
    words = ["--dataset", str(rows), "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "16"]
    spec = comparison("ddp", find_max_batch=64, training_arguments=words)
    limited = comparison("ddp", find_max_batch=8, training_arguments=words)
    assert search_bounds(spec, DDP) == (12, 12)  # 50 rows hold 12 for each of 2 x 2 per-GPU batches
    assert search_bounds(limited, RowKey(preset="ddp", world_size=1)) == (8, 8)


def test_rows_run_at_the_largest_size_that_ran_or_at_the_smallest_that_did_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for preset, size, status in (("ddp", 8, "completed"), ("ddp", 16, "out_of_memory"), ("zero2", 2, "failed")):
        ledger.append(probe(preset, size, status=status))
    found = with_largest_batches(comparison("ddp", "zero2", "zero3", find_max_batch=64), ledger.read())
    assert {name: list(batch.values()) for name, batch in found.batches.items()} == {"ddp-n2": [8], "zero2-n2": [2]}


def test_a_row_that_runs_at_no_size_is_one_failure_however_often_it_is_resumed(
    tmp_path: Path, faq_alpaca: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every probe of ddp is in the ledger, so nothing is started."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for size in (4, 2, 1):
        facts = failure("host_out_of_memory", phase="forward", measured_bytes=size)
        ended = {"status": "host_out_of_memory", "message": "no room", "failure": facts}
        ledger.append(probe("ddp", size, tokens_per_second=None, **ended))
    words = ("--dataset", str(faq_alpaca), "--per_device_train_batch_size", "4")
    spec = comparison("ddp", find_max_batch=8, training_arguments=words)
    for _ in range(2):
        runner = find_largest_batches(comparison_runner(spec, tmp_path, find_max_batch=8))
    assert runner.unsupported == {"ddp-n2": "per-GPU batch 1 ended as host_out_of_memory"}
    assert (
        "ddp on 2 processes, repeat 2: not run, since per-GPU batch 1 ended as host_out_of_memory"
        in capsys.readouterr().err
    )
    replace(runner, options=replace(runner.options, retry_failed=True)).run()  # would start a trial otherwise
    assert list(ledger.read()) == ["ddp-n2-b4", "ddp-n2-b2", "ddp-n2-b1", "ddp-n2-r0"]
    assert len(ledger.path.read_text().splitlines()) == 4
    (row,), _ = aggregate_trials(ledger.read(), spec, {})
    assert (row.status, row.message) == ("host_out_of_memory", "with a per-GPU batch of 1: no room")
    assert row.failure == Failure.model_validate(facts)


# What one rank may hold: imports and a small model take 1.5 GiB of it, the logits of each row of 512 tokens, out of the
# real tokenizer's 49,152, 0.29 GiB more.
DATA_LIMIT_BYTES = 23 * 2**30 // 10


@nightly_launch
def test_a_search_runs_into_a_limit_of_host_memory_and_the_comparison_completes(tmp_path: Path, tokenizer: Any) -> None:
    """Ranks inherit the limit. Which sizes run depends on the node; that all up to the largest do, does not."""
    random_llama(tmp_path / "model", tokenizer, **TINY_SIZES)
    rows = tmp_path / "long.jsonl"  # longer than --max_seq_length
    rows.write_text(64 * (json.dumps({"instruction": "count", "output": "one two three four " * 300}) + "\n"))
    words = ["compare", "--preset", "ddp", "--num-processes", "1", "--output", str(tmp_path / "cmp"), "--cpu"]
    words += ["--repeats", "1", "--find-max-batch", "4", "--untimed-steps", "1"]
    words += ["--", "--model_name_or_path", str(tmp_path / "model"), "--dataset", str(rows), "--max_seq_length", "512"]
    words += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--loss", "full"]
    environment = {name: value for name, value in os.environ.items() if name != SERVER_VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-m", "toolkit", *words],
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},  # a forked rank has its server's limits
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT_BYTES, DATA_LIMIT_BYTES)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (row,) = read(tmp_path / "cmp" / "results.json")["rows"]
    tried, largest = row["probes"], row["per_device_train_batch_size"]
    sizes = {each["per_device_train_batch_size"]: each["status"] for each in tried}
    assert {size: status == "completed" for size, status in sizes.items()} == {size: size <= largest for size in sizes}
    assert largest + 1 in sizes
    for failed in (each for each in tried if each["status"] != "completed"):
        assert failed["status"] == failed["failure"]["kind"] == "host_out_of_memory"
        assert failed["failure"]["phase"] in ("forward", "backward", "step")
        assert 2**28 < failed["failure"]["measured_bytes"] <= DATA_LIMIT_BYTES + 2**30
    assert (row["status"], row["timed_steps"]) == ("completed", 1)
    page = (tmp_path / "cmp" / "report.html").read_text()
    assert page.count("host_<wbr>out_<wbr>of_<wbr>memory") == 1  # the smallest that does not run
    assert f"the largest per-GPU batch that runs is {largest} (ddp)" in ended.stdout.replace("\n", " ")
