"""The planner page's HTML, for the server and as a static file, and its table of the fewest GPUs for known models."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.paths import cache_folder
from toolkit.hardware.gpu_table import GPUS, Gpu, find_gpu
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from toolkit.models.read_model import bundled_models, read_model
from toolkit.plan.methods import METHODS
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import LOSSES

PACKAGE = Path(__file__).resolve().parents[1]
# Inside the wheel, or in the checkout.
ASSETS = next(filter(Path.is_dir, [PACKAGE / "_page"]), PACKAGE.parent / "docs" / "site" / "page" / "assets")
TABLE_GPUS = ("h100-sxm", "rtx-4090")
TABLE_PRESETS = ("single", "zero2", "zero3", "fsdp2")
TABLE_JOB = PlanOptions(
    gpu=TABLE_GPUS[0],
    num_processes=(1,),
    preset=TABLE_PRESETS,
    per_device_train_batch_size=1,
    max_seq_length=2048,
    activation_checkpointing=True,
)
TABLE_JOBS = {
    "full": TABLE_JOB,
    "lora": replace(TABLE_JOB, lora_r=16),
    "qlora": replace(TABLE_JOB, lora_r=16, load_in_4bit=True),
}
# Folders whose code decides the table.
TABLE_SOURCES = ("plan", "models", "presets", "hardware", "parallel", "job", "page")
_one_table = threading.Lock()


def page_html(*, served: bool = False, sizes: Mapping[str, int] | None = None, commit: str = "", docs: str = "") -> str:
    """Return the page: `served` by `toolkit page`, or with the `sizes` of the files of a Python that it runs itself.

    `docs` is the address of the documentation, for links to its pages.
    """
    return _template("index.html.j2").render(
        served=served,
        known="" if served else known_models_html(),
        models=list(bundled_models()),
        gpu_groups=_gpu_groups(),
        methods=list(METHODS),
        generating=[name for name, spec in METHODS.items() if spec.num_generations],  # no tokens are counted for them
        optimizers=list(OPTIMIZERS),
        losses=LOSSES,
        defaults=replace(PlanOptions(), optim=DEFAULT_OPTIMIZER),
        sizes=json.dumps(dict(sizes or {})),
        commit=commit,
        docs=docs,
    )


def known_models_html() -> str:
    """Return the table of the fewest GPUs for known models; it takes seconds, once for each state of the planner."""
    with _one_table:
        rows, gpus = known_rows(), [find_gpu(name) for name in TABLE_GPUS]
    return _template("known.html.j2").render(rows=rows, gpus=gpus, presets=TABLE_PRESETS, methods=TABLE_JOBS)


def known_rows() -> list[dict[str, Any]]:
    """Return a row per known model, by size: its parameters, and per method and GPU how many it needs, or None."""
    files = [path for name in TABLE_SOURCES for path in sorted(PACKAGE.joinpath(name).rglob("*.*"))]
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in files if path.suffix in (".py", ".json", ".yaml", ".csv"))
    )
    cached = cache_folder() / "planner-page" / f"{digest.hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        rows: list[dict[str, Any]] = json.loads(cached.read_text())
        return rows
    rows = [
        {"model": model, "parameters": read_model(model).num_params}
        | {method: _fewest_gpus(model, options) for method, options in TABLE_JOBS.items()}
        for model in bundled_models()
    ]
    rows.sort(key=lambda row: row["parameters"])
    with contextlib.suppress(OSError):  # a read-only cache is no error
        write_text(cached, json.dumps(rows))
    return rows


def _fewest_gpus(model: str, options: PlanOptions) -> dict[str, int | None]:
    from toolkit.plan.planner import plan_request
    from toolkit.plan.which_gpus import fewest_of_each

    fewest: dict[str, int | None] = dict.fromkeys(TABLE_GPUS)
    with contextlib.suppress(ToolkitError):  # peft adapts the layers of some architectures by name only
        request = replace(plan_request(model, options), world_sizes=[])
        fewest |= {gpu.name: size for gpu, size, _ in fewest_of_each(request, map(find_gpu, TABLE_GPUS))}
    return fewest


def _gpu_groups() -> list[tuple[str, list[Gpu]]]:
    """Return the GPUs by vendor, those with the most memory first; at the end those without bf16."""
    groups: dict[str, list[Gpu]] = {"NVIDIA": [], "AMD": [], "without bf16": []}
    for gpu in sorted(GPUS, key=lambda gpu: -gpu.memory_gib):
        vendor = "AMD" if gpu.other_names.startswith("AMD") else "NVIDIA"
        groups[vendor if gpu.peak_flops("bf16") else "without bf16"].append(gpu)
    return list(groups.items())


@functools.cache
def _template(name: str) -> Template:
    loader = FileSystemLoader(ASSETS)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True).get_template(name)
