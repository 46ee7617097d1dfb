"""A training loop on accelerate alone is observed by one line, and recorded as a Trainer is."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import ROOT, SCRIPTS, accelerate_launch, cpu_environment, nightly_launch, read, run_warm

from toolkit.errors import ToolkitError
from toolkit.observe.accelerate_loop import STAYS_IN_EVAL, observe_loop
from toolkit.observe.observer import observe
from toolkit.observe.verify.verification import OTHER_SIZES, SAME_ROWS
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import StepRow, read_rows

SCRIPT = SCRIPTS / "accelerate_loop.py"


def launched(preset: str, mode: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    own = ["--output-dir", str(folder), "--require", preset, *options, str(SCRIPT), mode, "its-own-line"]
    return accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *own, module="toolkit.observe")


def alone(mode: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_warm([sys.executable, str(SCRIPT), mode, str(folder)], cpu_environment() | {"OMP_NUM_THREADS": "1"})


def rows_of(folder: Path, rank: int = 0) -> list[StepRow]:
    return read_rows(RunFolder(folder).rank_rows(rank))


@pytest.mark.launch
@pytest.mark.parametrize(
    "preset",
    ["zero2", pytest.param("ddp", marks=pytest.mark.nightly), pytest.param("fsdp2", marks=pytest.mark.nightly)],
)
def test_a_loop_is_verified_and_recorded_under_a_preset(preset: str, tmp_path: Path) -> None:
    ended = launched(preset, "plain", tmp_path, "--stop-after-steps", "3")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"verified: {preset} (" in ended.stdout
    first, second = rows_of(tmp_path), rows_of(tmp_path, 1)
    assert [row.step for row in first] == [row.step for row in second] == [1, 2, 3]
    assert {(row.tokens, row.non_padding_tokens, row.supervised_tokens) for row in first} == {(32, 32, None)}
    assert len({row.batch_sha256 for row in (*first, *second)}) == 6
    assert all(row.loss and (row.grad_norm or row.local_grad_norm) for row in first)
    attestation = read(tmp_path / "attestation.json")
    assert (attestation["verdict"], attestation["differences"]) == ("attested", [])
    assert [reading["clipped"] for reading in attestation["ranks"]] == [False, False]
    run = read(tmp_path / "run.json")
    assert (run["status"], run["exit_code"], run["world_size"]) == ("completed", 0, 2)


@nightly_launch
@pytest.mark.parametrize(
    ("preset", "mode", "said"),
    [
        ("zero2", "contradicts", "gradient_clipping on rank 0 is 1.0, expected 0.5"),  # DeepSpeed clips by its own
        (
            "fsdp2",
            "whole",
            "hint: FSDP2 gathers this model as a whole, since its layers are not known: name their class",
        ),
    ],
)
def test_a_loop_that_contradicts_its_preset_ends_after_the_first_step(
    preset: str, mode: str, said: str, tmp_path: Path
) -> None:
    ended = launched(preset, mode, tmp_path)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert read(tmp_path / "run.json")["status"] == "attestation_failed"


@nightly_launch
@pytest.mark.parametrize(
    ("mode", "warning"),
    [
        ("own_loader", SAME_ROWS),
        ("other_size", OTHER_SIZES.format("2 and 3")),
        ("twice", "warning: the loss is divided by gradient_accumulation_steps (2) by the script, and again by acc"),
        ("stays", STAYS_IN_EVAL.format(5)),
        ("stays_alike", ""),  # in eval mode too, without a dropout
        ("plain", ""),
    ],
)
def test_what_a_loop_trains_otherwise_than_it_seems_is_named(mode: str, warning: str, tmp_path: Path) -> None:
    ended = launched("ddp", mode, tmp_path, "--stop-after-steps", "5" if "stays" in mode else "2")
    assert ended.returncode == 0, ended.stderr[-3000:]
    named = [line for line in ended.stdout.splitlines() if line.startswith("warning")]
    assert [line.startswith(warning) for line in named] == [True] * bool(warning), named


@pytest.mark.launch
def test_batches_belong_to_the_step_that_trains_on_them_whenever_the_loop_fetches_them(tmp_path: Path) -> None:
    ended = alone("three", tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    plain, late, skips = ([row.batch_sha256 for row in rows_of(tmp_path / mode)] for mode in ("plain", "late", "skips"))
    assert len(set(plain)) == 8
    assert late == [*plain, *plain]
    assert skips == plain[2:]


@nightly_launch
def test_workers_that_outlive_the_observer_give_the_loop_its_own_batches(tmp_path: Path) -> None:
    ended = alone("workers", tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    digests = [row.batch_sha256 for row in rows_of(tmp_path)]
    assert (len(digests), len(set(digests))) == (16, 8)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("mode", "code", "status", "said"),
    [
        ("fails", 1, "failed", "LookupError: what the loop could not find"),
        ("open", 0, "failed", "error: the loop ended without `observer.close()`: use `with observe(...):`"),
    ],
)
def test_a_loop_that_does_not_end_well_is_recorded_as_failed(
    mode: str, code: int, status: str, said: str, tmp_path: Path
) -> None:
    ended = alone(mode, tmp_path / "run")
    assert (ended.returncode, read(tmp_path / "run" / "run.json")["status"]) == (code, status)
    assert said in ended.stderr


def test_only_what_accelerate_has_prepared_is_observed(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(1, 1)
    with pytest.raises(ToolkitError, match="this model is not one that the accelerator has prepared"):
        observe_loop(accelerator=SimpleNamespace(), model=model, optimizer=None, folder=tmp_path)
    model._is_accelerate_prepared = True
    with pytest.raises(ToolkitError, match="this optimizer is not one that the accelerator has prepared"):
        observe_loop(accelerator=SimpleNamespace(), model=model, optimizer=None, folder=tmp_path)
    with pytest.raises(ToolkitError, match="given SimpleNamespace, expected a Trainer") as refused:
        observe(SimpleNamespace(), folder=tmp_path)
    assert "accelerator=..., model=..., optimizer=..." in str(refused.value.hint)
    assert not list(tmp_path.iterdir())
