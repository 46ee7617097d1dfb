"""The search for the largest micro-batch: beside a monotone oracle, killed and gone on with, and short of memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, read
from test_parity import comparison, trial

from toolkit.compare.aggregate import compared
from toolkit.compare.dry_run import dry_run_text
from toolkit.compare.largest_batch import find_largest_batches, search
from toolkit.compare.ledger import Ledger
from toolkit.compare.probes import bounds, most_probes, probe_words, probes_among, with_largest_batches
from toolkit.compare.run import Runner, Telling

Row = dict[str, Any]
SIZES = range(1, 41)


def oracle(limit: int, tried: list[int], *, why: str = "out_of_memory") -> Callable[[int], Row]:
    """A machine on which micro-batches up to `limit` run; `tried` is what it was asked."""

    def probe(size: int) -> Row:
        tried.append(size)
        return {"trial": f"ddp-n2-b{size}", "status": "completed" if size <= limit else why}

    return probe


def test_what_is_found_is_the_oracles_limit_and_no_size_is_tried_twice() -> None:
    for limit, start, cap in product(range(41), (1, 2, 3, 8), (1, 2, 7, 32, 40)):
        tried: list[int] = []
        assert search({}, oracle(limit, tried), start=start, cap=cap) == (min(limit, cap) or None)
        assert len(tried) == len(set(tried)) <= most_probes(start=start, cap=cap)
        assert max(tried) <= cap


@pytest.mark.parametrize(("start", "cap"), [(1, 1), (2, 4), (8, 8), (8, 64), (3, 40), (1, 100)])
def test_the_longest_search_is_as_long_as_is_said(start: int, cap: int) -> None:
    lengths = []
    for limit in range(cap + 1):
        tried: list[int] = []
        search({}, oracle(limit, tried), start=start, cap=cap)
        lengths.append(len(tried))
    assert max(lengths) == most_probes(start=start, cap=cap)


@pytest.mark.parametrize("limit", [0, 1, 5, 12, 31, 64])
def test_a_search_killed_after_each_probe_goes_on_where_it_stopped(tmp_path: Path, limit: int) -> None:
    ledger, tried = Ledger(tmp_path / "ledger.jsonl"), list[int]()
    machine = oracle(limit, tried)

    def probe(size: int) -> Row:
        ledger.append(machine(size))
        raise KeyboardInterrupt

    for _ in range(most_probes(start=2, cap=64)):
        with contextlib.suppress(KeyboardInterrupt):
            search(probes_among(ledger.read(), "ddp-n2"), probe, start=2, cap=64)
    assert search(probes_among(ledger.read(), "ddp-n2"), probe, start=2, cap=64) == (limit or None)
    assert len(tried) == len(set(tried)) == len(ledger.read())


def test_where_every_size_runs_out_of_memory_the_smallest_is_tried_last() -> None:
    tried: list[int] = []
    assert search({}, oracle(0, tried, why="host_out_of_memory"), start=8, cap=64) is None
    assert tried == [8, 4, 2, 1]


def test_another_failure_than_memory_is_not_the_sizes_until_a_size_has_run() -> None:
    tried: list[int] = []
    assert search({}, oracle(0, tried, why="failed"), start=8, cap=64) is None
    assert tried == [8]
    assert search({}, oracle(11, tried, why="timed_out"), start=8, cap=64) == 11


def test_a_search_ends_at_what_the_data_can_fill(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instruction": "a", "output": str(row)}) + "\n" for row in range(50)))
    words = ["--dataset", str(rows), "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "16"]
    asked = comparison("ddp", find_max_batch=64, training_arguments=words)
    assert bounds(asked, "ddp", 2) == (12, 12)  # 50 rows hold 12 for each of 2 x 2 micro-batches
    assert bounds(comparison("ddp", find_max_batch=8, training_arguments=words), "ddp", 1) == (8, 8)


def test_a_probe_begins_with_the_longest_rows_where_rows_have_an_order() -> None:
    assert probe_words({}, 4)[-2:] == ["--train_sampling_strategy", "group_by_length"]
    assert "--train_sampling_strategy" not in probe_words({"streaming": "true"}, 4) + probe_words({"packing": True}, 4)


def test_rows_are_compared_at_the_largest_that_ran_or_at_the_smallest_that_did_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for name, ended in {"ddp-n2-b8": "completed", "ddp-n2-b16": "out_of_memory", "zero2-n2-b2": "failed"}.items():
        ledger.append({"trial": name, "status": ended})
    found = with_largest_batches(comparison("ddp", "zero2", "zero3", find_max_batch=64), ledger)
    assert {name: list(batch.values()) for name, batch in found.batches.items()} == {"ddp-n2": [8], "zero2-n2": [2]}


def test_a_row_that_no_size_runs_is_one_failure_however_often_it_is_gone_on_with(
    tmp_path: Path, faq_alpaca: Path
) -> None:
    """Every probe of ddp is in the ledger, so nothing is started."""
    ledger, skipped = Ledger(tmp_path / "ledger.jsonl"), list[str]()
    failure = {"kind": "host_out_of_memory", "phase": "forward", "measured_bytes": 7}
    for size in (4, 2, 1):
        short = {"status": "host_out_of_memory", "message": "no room", "failure": failure | {"measured_bytes": size}}
        ledger.append(trial("ddp", 0, tokens_per_second=None, **short) | {"trial": f"ddp-n2-b{size}"})
    words = ["--dataset", str(faq_alpaca), "--per_device_train_batch_size", "4"]
    asked = comparison("ddp", find_max_batch=8, training_arguments=words)
    telling = Telling(
        start=print, line=print, finish=print, skip=lambda name, why: skipped.append(f"{name}: {why}"), probe=print
    )
    runner = Runner(comparison=asked, folder=tmp_path, timeout_seconds=None, nvme={}, telling=telling)
    for _ in range(2):
        runner, without = find_largest_batches(runner, {})
    assert without == {"ddp-n2": "micro-batch 1 ended as host_out_of_memory"}
    assert skipped[:2] == [f"ddp-n2-r{repeat}: micro-batch 1 ended as host_out_of_memory" for repeat in (0, 1)]
    runner.run(without, retry_failed=True)  # would start a trial otherwise
    assert list(ledger.read()) == ["ddp-n2-b4", "ddp-n2-b2", "ddp-n2-b1", "ddp-n2-r0"]
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 4
    (row,), _ = compared(ledger.read(), asked, {})
    assert (row["status"], row["message"], row["failure"]["measured_bytes"]) == (
        "host_out_of_memory",
        "with a micro-batch of 1: no room",
        1,
    )


def test_a_dry_run_says_how_long_a_search_may_be_and_what_one_has_found(tmp_path: Path, faq_alpaca: Path) -> None:
    words = ["--model_name_or_path", "m", "--dataset", str(faq_alpaca), "--per_device_train_batch_size", "4"]
    asked = comparison(
        "ddp", "zero2", find_max_batch=32, training_arguments=words, loads={"ddp": "ddp", "zero2": "zero2"}
    )
    Ledger(tmp_path / "ledger.jsonl").append({"trial": "zero2-n2-b4", "status": "completed"})
    said = dry_run_text(asked, tmp_path, {}).splitlines()
    assert said[0] == "ddp-n2: first its largest micro-batch is searched, from 4 to 32: at most 8 runs of 2 steps"
    assert said[1] == "zero2-n2: of micro-batches up to 32, 4 were tried, and 4 runs"


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 rows longer than any `max_seq_length` here."""
    path = tmp_path_factory.mktemp("rows") / "long.jsonl"
    row = {"instruction": "count", "output": "one two three four " * 300}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    return path


# What one rank may hold: imports and the tiny model take 1.5 GiB of it, each row of 512 tokens 0.29 GiB more.
DATA_LIMIT_BYTES = 29 * 2**30 // 10


@pytest.mark.launch
def test_a_search_meets_the_limit_of_host_memory_and_the_comparison_goes_on(
    tmp_path: Path, tiny_model: Path, long_rows: Path
) -> None:
    """Ranks inherit the limit. Which sizes run is the machine's affair; that they are all those up to one, is not."""
    words = ["compare", "--preset", "ddp", "--num-processes", "1", "--output", str(tmp_path / "cmp"), "--cpu"]
    words += ["--repeats", "1", "--find-max-batch", "6", "--", "--model_name_or_path", str(tiny_model)]
    words += ["--dataset", str(long_rows), "--max_seq_length", "512", "--max_steps", "3"]
    words += ["--per_device_train_batch_size", "4"]
    ended = subprocess.run(
        [sys.executable, "-m", "toolkit", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT_BYTES, DATA_LIMIT_BYTES)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (row,) = read(tmp_path / "cmp" / "results.json")["rows"]
    tried = {probe["per_device_train_batch_size"]: probe for probe in row["probes"]}
    largest = row["per_device_train_batch_size"]
    assert {size for size, probe in tried.items() if probe["status"] == "completed"} == {
        s for s in tried if s <= largest
    }
    failed = [probe for probe in tried.values() if probe["status"] != "completed"]
    assert largest + 1 in tried
    for probe in failed:
        assert probe["status"] == probe["failure"]["kind"] == "host_out_of_memory"
        assert probe["failure"]["phase"] in ("forward", "backward", "step")
        assert 2**28 < probe["failure"]["measured_bytes"] <= DATA_LIMIT_BYTES + 2**30
    assert (row["status"], row["timed_steps"]) == ("completed", 1)
    page = (tmp_path / "cmp" / "report.html").read_text()
    assert page.count("host_<wbr>out_<wbr>of_<wbr>memory") == 1  # the smallest that does not run
    assert f"the largest micro-batch that runs is {largest} (ddp)" in ended.stdout.replace("\n", " ")
