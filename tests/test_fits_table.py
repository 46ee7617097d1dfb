"""README's table of what fits: the recommended preset for public models on two kinds of hardware, planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import ROOT

sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]

from check import read_document  # noqa: E402
from fits import FULL, HARDWARE, LORA, METHODS, MODELS, choice, chosen, config_of, rows  # noqa: E402

from toolkit.models.read_model import read_model  # noqa: E402
from toolkit.plan.candidates import Candidate  # noqa: E402
from toolkit.plan.options import PlanOptions  # noqa: E402
from toolkit.plan.planner import make_plans, plan_request  # noqa: E402
from toolkit.units import GIB  # noqa: E402

GPU_CHECK = ROOT / "benchmarks" / "results" / "gpu-check.json"


def cells_of(found: Candidate | None) -> str:
    """Return preset, micro-batch and planned GiB, with the host's where the preset offloads, as cells of Markdown."""
    if found is None:
        return "does not fit | |"
    job, preset, memory = found.job, found.preset, found.memory
    batch = f"{job.per_device_train_batch_size}{' + ckpt' if job.activation_checkpointing else ''}"
    offloads = preset.offload_optimizer or preset.offload_param
    host = f" + {memory.host.peak_bytes / GIB:.0f} of the host" if offloads else ""
    return f"`{preset.name}` | {batch} | {memory.planned_peak_bytes / GIB:.0f}{host}"


def fits_table(record: Path = GPU_CHECK) -> str:
    """Return the table; the first hardware that was measured has a column of allocated peaks and the plan's errors."""
    measured = measured_peaks(record)
    seen = [column for column in HARDWARE if any(case.endswith(f", {column}") for case in measured)][:1]
    titles = [f"{hardware} | micro-batch | GiB{' | measured' if hardware in seen else ''}" for hardware in HARDWARE]
    head = [": :--- | :--- | ---:" + (" | ---:" if hardware in seen else "") for hardware in HARDWARE]
    lines = [f"| model | method | {' | '.join(titles)} |", f"| :--- | :--- | {' | '.join(head)} |".replace(": :", ":")]
    for model, method in rows():
        cells = [
            cells_of(chosen(model, method, column))
            + (f" | {measured.get(f'{model} {method}, {column}', '')}" if column in seen else "")
            for column in HARDWARE
        ]
        lines.append(f"| {model} | {method} | {' | '.join(cells)} |")
    return "\n".join([*lines, *([] if not seen else ["", measured_note(record)])])


def measured_peaks(record: Path) -> dict[str, str]:
    """Return case -> measured allocated GiB and the plan's error, of the file of `make gpu-check`; none without it."""
    if not record.is_file():
        return {}
    fits = [row for part in read_document(record)["parts"] if part["part"] == "fits" for row in part["rows"]]
    of_peaks = [row for row in fits if row["quantity"] == "allocated"]
    return {row["case"]: f"{row['measured'] / GIB:.0f} ({row['error']:+.1%})" for row in of_peaks}


def measured_note(record: Path) -> str:
    found = read_document(record)
    gpu = found["machine"]["gpus"][0]["name"]
    return f"Measured: rank 0's allocated peak, rehearsed on one {gpu}, {found['date'][:10]} (error of the plan)."


@pytest.mark.parametrize("model", MODELS)
def test_the_models_have_their_published_sizes(model: str) -> None:
    assert round(read_model(str(config_of(model))).num_params / 1e9, 1) == MODELS[model][1]


@pytest.mark.parametrize("method", [FULL, LORA])
def test_a_cell_has_the_bytes_that_plan_says(method: str) -> None:
    found = choice("Qwen3-8B", method, HARDWARE["8 × H100 80 GB"])
    assert found is not None
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "max_seq_length")
    job = {name: getattr(found.job, name) for name in names}
    options = PlanOptions(num_processes=(8,), gpu="h100", preset=(found.preset.name,), **job, **METHODS[method])
    (plan,) = make_plans(plan_request(str(config_of("Qwen3-8B")), options))
    assert plan.verdict == "fits"
    assert plan.memory.planned_peak_bytes == found.memory.planned_peak_bytes
    assert cells_of(found).endswith(f" | {found.memory.planned_peak_bytes / GIB:.0f}")


def test_what_fits_nowhere_says_so() -> None:
    tiny = {"gpu": "rtx-4090", "num_processes": 1, "host_memory_gib": 16}
    assert cells_of(choice("Qwen3-32B", FULL, tiny)).startswith("does not fit")


def made_up_record(folder: Path, cases: dict[str, float]) -> Path:
    """Figures that nothing measured: 64 GiB, an error for each case, and a row that ran out of memory."""
    made = [
        {"case": f"{case}, 8 × H100 80 GB", "quantity": "allocated", "measured": 64 * GIB, "error": error}
        for case, error in cases.items()
    ]
    failed = {"case": "Qwen3-32B full, 8 × H100 80 GB", "quantity": "", "measured": None, "error": None}
    found = {"schema_version": 1, "date": "2000-01-02T03:04:05", "machine": {"gpus": [{"name": "Made-up GPU"}]}}
    path = folder / "gpu-check.json"
    path.write_text(json.dumps(found | {"parts": [{"part": "fits", "rows": [*made, failed]}]}))
    return path


def test_the_measured_column_comes_from_the_file_of_the_check(tmp_path: Path) -> None:
    lines = fits_table(made_up_record(tmp_path, {"Qwen3-8B full": 0.02, "Qwen3-8B LoRA r=16": -0.02})).splitlines()
    assert lines[0].startswith(
        "| model | method | 8 × H100 80 GB | micro-batch | GiB | measured | 2 × RTX 4090 24 GB |"
    )
    assert {line.count("|") for line in lines if line.startswith("|")} == {10}
    assert [line.split("|")[6].strip() for line in lines if "Qwen3-8B | " in line] == ["64 (+2.0%)", "64 (-2.0%)", ""]
    assert (
        lines[-1] == "Measured: rank 0's allocated peak, rehearsed on one Made-up GPU, 2000-01-02 (error of the plan)."
    )


def test_without_a_file_no_column_is_measured(tmp_path: Path) -> None:
    assert "easured" not in fits_table(tmp_path / "gpu-check.json")


def test_readme_has_room_for_the_measured_column(tmp_path: Path) -> None:
    record = made_up_record(tmp_path, {f"{model} {method}": 0.012 for model, method in rows()})
    longer = len(fits_table(record).encode()) - len(fits_table().encode())
    assert len((ROOT / "README.md").read_bytes()) + longer <= 10_000
