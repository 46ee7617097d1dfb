"""The files of a run folder: run.json changed by several processes, saves, the reading of a rank, its fast paths."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from toolkit.observe.verify.differences import kernel_differences
from toolkit.record.folder import RunFolder
from toolkit.record.kernel_table import kernels_summary, merged_rows, reading_of, row, table_lines
from toolkit.record.reading import RankReading
from toolkit.record.run_files import SaveRecord, describe_slowest_save

ON_SLURM = {"SLURM_JOB_ID": "7"}


def save(step: int, seconds: float | None, **more: float) -> SaveRecord:
    return SaveRecord(kind="checkpoint", step=step, seconds=seconds, **more)


@pytest.mark.parametrize(
    ("environment", "warns"),
    [
        ({}, False),  # a laptop
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),  # one node
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        *[({name: "7"}, True) for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SKYPILOT_TASK_ID")],
    ],
)
def test_a_save_that_is_longer_than_the_shortest_notice_is_a_warning_where_a_node_may_be_taken_back(
    environment: dict[str, str], warns: bool
) -> None:
    described = describe_slowest_save([save(10, 12.0), save(20, 41.0), save(30, 13.0)], environment)
    assert (described is not None) is warns
    if described is not None:
        assert described.startswith("warning: checkpoint-20 took 41.0 s to save; ")
        assert "30 s (Google Cloud, Azure) to 120 s (AWS)" in described


def test_the_fingerprint_counts_and_no_wait_for_an_earlier_save_no_fast_one_and_no_incomplete_checkpoint() -> None:
    described = describe_slowest_save([save(10, 20.0, stall_seconds=75.0, waited_seconds=35.0)], ON_SLURM)
    assert (described or "").startswith("warning: checkpoint-10 took 40.0 s to save; ")
    unfinished = [save(10, None), SaveRecord(kind="model", step=10, seconds=50.0)]
    assert [describe_slowest_save(saves, ON_SLURM) for saves in ([save(10, 29.0)], [], unfinished)] == [None] * 3


WRITERS, CHANGES = 3, 30
CHANGE_OFTEN = f"""
import sys
from pathlib import Path
from toolkit.record.folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
for change in range({CHANGES}):
    folder.update_run(**{{f"writer{{sys.argv[2]}}_{{change}}": change}})
"""


def test_no_fact_is_lost_where_several_processes_change_run_json(tmp_path: Path) -> None:
    """The launcher, rank 0, a rank that fails and its watchdog all do."""
    words = [sys.executable, "-c", CHANGE_OFTEN, str(tmp_path)]
    writers = [subprocess.Popen([*words, str(number)], cwd=ROOT) for number in range(WRITERS)]
    assert [writer.wait() for writer in writers] == [0] * WRITERS
    run = RunFolder(tmp_path).read_run() or {}
    expected = {f"writer{number}_{change}" for number in range(WRITERS) for change in range(CHANGES)}
    assert run.keys() == {"schema_version", *expected}


ATTESTED = Path(__file__).parents[1] / "fixtures" / "attested_ranks.jsonl"
"""Rank 1 under DDP, ZeRO-2, ZeRO-3, FSDP2, with packed LoRA, and of a loop, as runs on two CPU ranks wrote it."""


@pytest.mark.parametrize("line", ATTESTED.read_text().splitlines())
def test_a_rank_is_written_as_it_was_before_its_reading_had_a_type(line: str) -> None:
    assert json.dumps(RankReading.model_validate_json(line).to_json()) == line


def test_what_is_read_later_is_added_and_what_was_not_read_stays_absent() -> None:
    engine, gradients = RankReading(engine="ddp", sharding="replicate"), RankReading(gradient_dtype="float32")
    reading = engine | gradients | RankReading(engine="pipeline", frozen_dtype=None)
    known = {"engine": "pipeline", "sharding": "replicate", "frozen_dtype": None, "gradient_dtype": "float32"}
    assert list(reading.to_json().items()) == list(known.items())
    assert engine.to_json() == {"engine": "ddp", "sharding": "replicate"}


def test_only_what_was_asked_for_and_did_not_run_is_a_difference() -> None:
    rows = [row("attention", "sdpa", "math", detail="float32", costs="1.5 GiB of scores", repair="bf16=True")]
    rows += [row("experts", "grouped_mm", "grouped_mm"), row("liger", "use_liger_kernel", "", repair="drop it")]
    rank = RankReading(rank=1) | reading_of(rows)
    assert (rank.attention, rank.experts, "liger" in rank.to_json()) == ("math", "grouped_mm", False)
    assert list(map(str, kernel_differences([rank]))) == ["liger on rank 1 is nothing, expected use_liger_kernel"]
    assert kernel_differences([RankReading()]) == []  # nothing was read
    assert table_lines(merged_rows([rank])) == [
        "kernels      asked             ran",
        "  liger      use_liger_kernel  nothing     not as asked; repair: drop it",
        "  attention  sdpa              math        slower path; float32; 1.5 GiB of scores; repair: bf16=True",
        "  experts    grouped_mm        grouped_mm",
    ]
    assert table_lines([]) == []


def test_a_kernel_that_one_node_lacks_is_in_the_tables_row() -> None:
    repair = "pip install mamba-ssm"
    first = reading_of([row("mixers", None, "kernel")])
    second = reading_of([row("mixers", None, "torch loop", repair=repair)])
    merged = merged_rows([first, second])
    assert [(each["ran"], each["repair"]) for each in merged] == [("torch loop", repair)]
    assert kernels_summary(merged) == "mixers torch loop"
    assert kernels_summary([]) is None
