"""README's table of what fits: the recommended preset for public models on two kinds of hardware, planned."""

import sys

import pytest
from launching import ROOT
from reference_blocks import GPU_CHECK, measured_fits

sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]

from check import read_document  # noqa: E402
from fits import FULL, HARDWARE, LORA, METHODS, MODELS, choice, chosen, config_of, rows  # noqa: E402

from toolkit.models.read_model import read_model  # noqa: E402
from toolkit.plan.candidates import Candidate  # noqa: E402
from toolkit.plan.options import PlanOptions  # noqa: E402
from toolkit.plan.planner import make_plans, plan_request  # noqa: E402
from toolkit.units import GIB  # noqa: E402


def cells_of(found: Candidate | None) -> str:
    """Return preset, per-GPU batch and planned GiB, with the host's where the preset offloads, as cells of Markdown."""
    if found is None:
        return "does not fit | |"
    job, preset, memory = found.job, found.preset, found.memory
    batch = f"{job.per_device_train_batch_size}{' + ckpt' if job.activation_checkpointing else ''}"
    offloads = preset.offload_optimizer or preset.offload_param
    host = f" + {memory.host.peak_bytes / GIB:.0f} of the host" if offloads else ""
    return f"`{preset.name}` | {batch} | {memory.planned_peak_bytes / GIB:.0f}{host}"


def fits_table() -> str:
    """Return the table, and a sentence on the rows that were measured on a GPU."""
    titles = " | ".join(f"{hardware} | batch | GiB" for hardware in HARDWARE)
    lines = [f"| model | method | {titles} |", "| :--- | :--- |" + " :--- | :--- | ---: |" * len(HARDWARE)]
    for model, method in rows():
        cells = [cells_of(chosen(model, method, column)) for column in HARDWARE]
        lines.append(f"| {model} | {method} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", measured_note()])


def measured_note() -> str:
    """Return how far the allocated peaks of the table's jobs were from their plans on a GPU, with the conditions."""
    peaks, document = measured_fits(), read_document(GPU_CHECK)
    gpu, torch = document["machine"]["gpus"][0]["name"], document["versions"]["torch"]
    errors = sorted(row["error"] for row in peaks)
    return (
        f"{len(peaks)} of these jobs, as they were planned then, were rehearsed on one {gpu} with torch {torch} "
        f"({document['date'][:10]}): the plan of the allocated peak was off by {errors[0]:+.1%} to {errors[-1]:+.1%} "
        "([figures](docs/evidence/gpu.md#jobs-of-readmes-table))."
    )


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
