"""The files of a report are written completely or not at all, and the data is strict."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from results_documents import ROOT, Document, console_lines, csv_text, read, write_report

from toolkit.errors import ToolkitError


@pytest.mark.parametrize(("index", "preset"), [(2, "zero3"), (3, "fsdp2")])
def test_a_row_that_failed_or_trained_another_problem_never_has_a_ratio(
    results: Document, tmp_path: Path, index: int, preset: str
) -> None:
    results["rows"][index]["ratio_to_reference"] = 2.0
    files = write_report(results, tmp_path)
    assert read(files.results_json)["rows"][index]["ratio_to_reference"] is None
    rows = list(csv.DictReader(files.results_csv.read_text("utf-8").splitlines()))
    assert (rows[index]["preset"], rows[index]["ratio_to_reference"]) == (preset, "")
    assert next(line for line in console_lines(results) if line.startswith(preset)).endswith("n/a")
    assert results["rows"][index]["ratio_to_reference"] == 2.0  # the document of the caller is unchanged


def test_nan_is_unknown_and_the_json_stays_strict(results: Document, tmp_path: Path) -> None:
    results["rows"][2].update(status="diverged", losses=[2.5, float("nan")], last_loss=float("nan"))
    found = json.loads(write_report(results, tmp_path).results_json.read_text("utf-8"), parse_constant=pytest.fail)
    assert (found["rows"][2]["losses"], found["rows"][2]["last_loss"]) == ([2.5, None], None)


def test_report_writes_five_files_and_writing_again_changes_nothing(results: Document, tmp_path: Path) -> None:
    write_report(results, tmp_path)
    first = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(first) == ["comparison.png", "report.html", "report.md", "results.csv", "results.json"]
    write_report(read(tmp_path), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == first


def test_a_folder_that_cannot_be_written_is_named(results: Document, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolkitError, match=r"cannot write .*results\.json"):
        write_report(results, tmp_path / "file")


def test_an_undecodable_byte_in_a_message_breaks_no_file(results: Document, tmp_path: Path) -> None:
    results["rows"][2]["message"] = b"\xff killed".decode("utf-8", "surrogateescape")
    assert read(write_report(results, tmp_path).results_json)["rows"][2]["message"] == "? killed"


def test_report_needs_neither_torch_nor_matplotlib_to_be_imported() -> None:
    heavy = "[name for name in ('torch', 'matplotlib', 'rich') if name in sys.modules]"
    code = f"import sys, toolkit.compare.report; print({heavy})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "[]\n"


def test_csv_columns_are_frozen(results: Document) -> None:
    header, *lines = csv_text(results).splitlines()
    assert header == (
        "trial,preset,world_size,status,message,parity,parity_message,tokens_per_second,tokens_per_second_per_gpu,"
        "tokens_per_cpu_second,supervised_tokens_per_second,padding_fraction,timed_steps,step_seconds_median,"
        "step_seconds_p90,num_params,num_trainable_params,parameter_bytes,gradient_bytes,optimizer_bytes,"
        "peak_allocated_bytes,peak_reserved_bytes,peak_host_bytes,peak_rank,first_loss,last_loss,ratio_to_reference,"
        "wall_seconds,timed_seconds,run_folder,command,group,repeats,difference,rank,rank_skew,speed_up,"
        "scaling_efficiency,non_padding_tokens_per_second,peak_driver_bytes,allocator_retries,energy_joules,"
        "attestation_sha256,startup_seconds,planned_peak_bytes,planned_allocated_bytes,mfu,mfu_full_attention,hfu,cost_per_million_tokens,"
        "communication_fraction,exposed_communication_fraction,save_seconds,save_bytes,per_device_train_batch_size,"
        "accumulate,accumulated_gradient_bytes,layout,goodput_fraction,checkpoint_seconds,evaluation_seconds,"
        "restart_seconds,lost_seconds,waiting_seconds,num_nodes"
    )
    assert len(lines) == 4  # the message with a line break is one line too
    assert lines[1].startswith("zero2-n2,zero2,2,completed,,agrees,,300.0,150.0,120.0,112.5,0.25,2,0.6667,0.72,")
