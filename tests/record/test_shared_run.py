"""A verified run is shared by a fixed list of fields, and rows that cannot be true are refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

from toolkit.errors import ToolkitError
from toolkit.record.measurements import median_interval
from toolkit.record.shared_run import SharedRun, check_shared_rows

SCHEMA = ROOT / "docs" / "reference" / "shared-run.schema.json"
SECRET = "secret-7f3a"
UNREAD = ("loss", "grad_norm", "peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")
COUNTS = {"cpu_seconds": 0.1, "batch_sha256": "0" * 16} | dict.fromkeys(
    ("tokens", "non_padding_tokens", "supervised_tokens"), 2048
)


def write_run(folder: Path, **changes: Any) -> Path:
    """Write a run folder of two H100s, with private names wherever a run folder has names."""
    rank = {"rank": 0, "num_params": 10**9, "num_trainable_params": 10**9, "device": "cuda:0", "hint": SECRET}
    rank |= {"activation_checkpointing": True, "compute_dtype": "bfloat16", "master_dtype": "float32"}
    body = {"preset": "zero2", "verdict": "attested", "ranks": [rank]}
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    spec = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "optim": "adamw_torch_fused"}
    spec |= {"data": {"max_seq_length": 1024, "packing": False, "dataset": [f"/{SECRET}/rows.jsonl"]}}
    spec |= {"model": {"model_name_or_path": f"{SECRET}/model", "untimed_steps": 2, "lora_r": None}}
    measured = {"timed_steps": 8, "step_seconds_median": 0.5, "tokens_per_second": 8000.0}
    measured |= {"peak_allocated_bytes": 40 * 2**30}
    run = {"status": "completed", "preset": "zero2", "world_size": 2, "spec": spec, "measured": measured}
    run |= {"hardware": {"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]}, "nodes": [SECRET], "argv": [SECRET]}
    run |= {"versions": {"torch": "2.13.0", SECRET: "1"}, "command": SECRET}
    (folder / "ranks").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run | changes.pop("run", {})))
    (folder / "attestation.json").write_text(json.dumps(body | changes.pop("attestation", {})))
    assert not changes
    for number in range(2):
        same = {"rank": number, "world_size": 2} | dict.fromkeys(UNREAD)
        rows = [same | {"step": step, "seconds": 0.1 * step} | COUNTS for step in range(1, 11)]
        (folder / "ranks" / f"rank{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_row_has_no_name_path_or_host_of_the_run(tmp_path: Path) -> None:
    shared = SharedRun.of_run(write_run(tmp_path / "run"))
    assert SECRET not in shared.model_dump_json()
    assert shared.model is None
    assert shared.gpu == "h100-sxm"
    assert shared.tokens_per_second_per_gpu == 4000
    assert shared.step_seconds_interval == pytest.approx((0.3, 1.0))
    assert shared.problems() == []


def test_a_model_is_named_only_if_its_count_is_shipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    run["spec"]["model"]["model_name_or_path"] = "Qwen/Qwen3-8B"
    (folder / "run.json").write_text(json.dumps(run))
    assert SharedRun.of_run(folder).model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run": {"status": "out_of_memory"}}, "ended as out_of_memory"),
        ({"run": {"rehearsal": {"rank": 0}, "measured": None}}, "rehearsal"),
        ({"run": {"schema_version": 2}}, "schema_version is 2, expected 1"),
        ({"attestation": {"verdict": "attestation_failed"}}, "not verified"),
        ({"attestation": {"preset": "zero3"}}, "not verified"),  # changed after its digest was made
    ],
)
def test_only_a_completed_and_verified_run_is_shared(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=why):
        SharedRun.of_run(write_run(tmp_path / "run", **changes))


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("peak_allocated_bytes", 200 * 2**30, "more than a h100-sxm has"),
        ("tokens_per_second_per_gpu", 40_000.0, "more than its batch has"),
        ("num_params", 10**13, "times the peak of a h100-sxm"),
        ("gpu", "h1000", "not in the table"),
        ("step_seconds_interval", [0.6, 0.7], "does not contain the median"),
        ("verification_sha256", None, "where it is from"),
        ("verification_sha256", "abc", "verification_sha256"),
        ("user", "me", "user"),
    ],
)
def test_a_row_that_cannot_be_true_is_refused(field: str, value: Any, why: str, tmp_path: Path) -> None:
    row = json.loads(SharedRun.of_run(write_run(tmp_path / "run")).model_dump_json())
    path = tmp_path / "row.json"
    path.write_text(json.dumps(row))
    assert check_shared_rows(path) == []
    path.write_text(json.dumps(row | {field: value}))
    assert any(why in problem for problem in check_shared_rows(path))


def test_the_interval_of_a_median_has_its_order_statistics() -> None:
    assert median_interval([float(number) for number in range(5)]) is None
    assert median_interval([float(number) for number in range(6)]) == (0, 5)  # 1 - 2/64 = 97 %
    assert median_interval([float(number) for number in range(9)]) == (1, 7)  # 1 - 20/512 = 96 %


def test_the_published_schema_is_that_of_the_row() -> None:
    assert json.loads(SCHEMA.read_text()) == SharedRun.model_json_schema()
