"""What the process of a rank imports, starts, and leaves behind."""

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, SCRIPTS, accelerate_launch, cpu_environment, preset_job, read, run_warm

from toolkit import installation
from toolkit.observe.failure_report import report_failure
from toolkit.observe.progress import Progress
from toolkit.observe.rank_process import garbage_collector_off
from toolkit.record.folder import RunFolder

MMAP_FROM_64_KIB = "glibc.malloc.mmap_threshold=65536"
KEPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from count_faults import faults_of_freed_memory
from toolkit.observe.rank_process import keep_freed_pages

print(faults_of_freed_memory())
keep_freed_pages()
print(faults_of_freed_memory())
"""
pytestmark = pytest.mark.launch


@pytest.mark.nightly
def test_a_rank_imports_neither_bitsandbytes_nor_inductor_asks_no_numactl_and_leaves_no_shared_memory(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    """DeepSpeed would start it each time that it counts devices, and peft and DeepSpeed's Muon import the others."""
    words = [*preset_job("zero3", tiny_model, faq_alpaca), "--lora_r", "4", "--output_dir", str(tmp_path / "out")]
    ended = accelerate_launch(ROOT / "accelerate_configs" / "zero3.yaml", *words, script="rank_costs.py")
    assert ended.returncode == 0, ended.stderr[-3000:]
    rank = read(tmp_path / "out.json")
    assert {"peft", "deepspeed.runtime.zero.muon.original_muon"} <= set(rank["modules"])
    assert not {"bitsandbytes", "torch._inductor.compile_fx"} & set(rank["modules"])
    assert "numactl" not in rank["started"]
    buffers = [line for line in rank["mapped"] if "deepspeed_allreduce_buffer" in line]
    assert len(buffers) == 2, "one of each rank"
    assert all(line.endswith("(deleted)") for line in buffers), "DeepSpeed leaves 64 MiB per rank in /dev/shm"
    assert rank["faults_of_freed_memory"] < 100, "of 16,384 pages"


@pytest.mark.parametrize("settings", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": MMAP_FROM_64_KIB}])
def test_pages_of_freed_memory_are_kept_unless_the_user_has_set_malloc(settings: dict[str, str]) -> None:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")} | settings
    counted = subprocess.run([sys.executable, "-c", KEPT], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert counted.stderr == ""
    before, after = (int(number) for number in counted.stdout.split())
    assert before >= 16_384, "glibc maps 64 MiB anew each time"
    assert after >= 16_384 if settings else after < 100


WRAPPED = """
from torch.utils.file_baton import FileBaton
from toolkit.observe.rank_process import prepare_environment

prepare_environment()
once = FileBaton.wait
prepare_environment()
print(FileBaton.wait is once, once.__module__)
"""


def test_a_rank_that_is_forked_from_a_prepared_process_reports_a_wait_once(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text(WRAPPED)
    printed = run_warm([sys.executable, str(tmp_path / "prepare.py")], cpu_environment())
    assert printed.stdout.split() == ["True", "toolkit.observe.rank_process"], printed.stderr


def test_garbage_is_collected_again_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), garbage_collector_off():
        raise ImportError("no such library")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("module", "broken"),
    [("toolkit.train", "torch"), pytest.param("toolkit.observe", "transformers", marks=pytest.mark.nightly)],
)
def test_a_library_that_a_rank_cannot_import_is_in_failure_json(module: str, broken: str, tmp_path: Path) -> None:
    """Without a launcher of ours, which would read the log; an earlier run's records stay as they are."""
    (tmp_path / f"{broken}.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "script.py").touch()
    out, earlier = tmp_path / "out", tmp_path / "earlier"
    RunFolder(earlier).update_run(status="completed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "RANK": "0"}
    for folder in (out, earlier):
        words = (
            ["--output_dir", str(folder)] if module == "toolkit.train" else ["--output-dir", str(folder), "script.py"]
        )
        command = [sys.executable, "-m", module, *words]
        ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert (ended.returncode, "error (rank 0, phase start, step 0): ImportError: lib" in ended.stderr) == (1, True)
    failure, run = read(out / "failure.json"), read(out / "run.json")
    assert failure["message"] == "ImportError: libcudart.so.13: cannot open shared object file"
    assert (failure["kind"], run["status"]) == ("failed", "failed")
    assert read(earlier / "run.json")["status"] == "completed"
    assert not (earlier / "failure.json").exists()


def test_a_library_that_is_not_installed_is_reported_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(installation.EXTRAS, "a_library", "train")
    missing = ModuleNotFoundError("No module named 'a_library'", name="a_library.part")
    assert report_failure(missing, Progress(output_dir=tmp_path)) == 2
    assert read(tmp_path / "failure.json")["message"] == "a_library is not installed"
    assert "finetune-toolkit[train]'" in capsys.readouterr().err


def test_a_rank_without_a_launcher_names_the_next_step_on_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert report_failure(full, Progress(output_dir=tmp_path)) == 1
    assert "hint: free some space" in capsys.readouterr().err
