"""Build the planner page into a folder: `python docs/site/page/planner_page.py build/page`; `make page` does.

The page is static HTML with a table of well-known models; what computes in the browser is in page_runtime.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE)]

from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: E402
from page_runtime import write_runtime  # noqa: E402

from toolkit.entry_point import exit_code_of  # noqa: E402
from toolkit.errors import ToolkitError  # noqa: E402
from toolkit.files.paths import cache_folder  # noqa: E402
from toolkit.hardware.gpu_table import GPUS, find_gpu  # noqa: E402
from toolkit.models.optimizers import OPTIMIZERS  # noqa: E402
from toolkit.models.read_model import known_models, read_model  # noqa: E402
from toolkit.plan.methods import METHODS  # noqa: E402
from toolkit.plan.options import PlanOptions  # noqa: E402
from toolkit.plan.planned_job import LOSSES  # noqa: E402
from toolkit.plan.planner import plan_request  # noqa: E402
from toolkit.plan.which_gpus import gpus_for  # noqa: E402

STATIC = ("page.css", "page.js", "worker.js")
TABLE_GPUS = ("h100-sxm", "rtx-4090")
TABLE_PRESETS = ("single", "zero2", "zero3", "fsdp2")
TABLE_METHODS = {
    "full": PlanOptions(),
    "lora": PlanOptions(lora_r=16),
    "qlora": PlanOptions(lora_r=16, load_in_4bit=True),
}
TABLE_ROWS = {"per_device_train_batch_size": 1, "max_seq_length": 2048, "activation_checkpointing": True}
# Folders whose code decides the table.
TABLE_SOURCES = ("plan", "models", "presets", "hardware", "parallel", "job")


def fewest_gpus(model: str, method: str) -> dict[str, list[object] | None]:
    """Return, of each of `TABLE_GPUS`, how many a job needs and under which preset; None where none of them do."""
    options = replace(TABLE_METHODS[method], gpu=TABLE_GPUS[0], num_processes=(1,), preset=TABLE_PRESETS, **TABLE_ROWS)
    request = replace(plan_request(model, options), world_sizes=[])
    found: dict[str, list[object] | None] = dict.fromkeys(TABLE_GPUS)
    for plan in gpus_for(request, dict.fromkeys(TABLE_GPUS, 1.0)):
        row = plan.as_row()
        found[row["gpu"]] = [row["world_size"], row["preset"]]
    return found


def table_rows() -> list[dict[str, object]]:
    """Return a row per well-known model, by size; planned once for each state of the planner's sources."""
    files = [path for name in TABLE_SOURCES for path in sorted((ROOT / "toolkit" / name).rglob("*.*"))]
    sources = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [Path(__file__), *sources]))
    cached = cache_folder() / "planner-page" / f"{digest.hexdigest()[:32]}.json"
    if not cached.exists():
        rows = [
            {"model": model, "parameters": read_model(model).num_params}
            | {method: fewest_gpus(model, method) for method in TABLE_METHODS}
            for model in known_models()
        ]
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps(sorted(rows, key=lambda row: row["parameters"])))
    rows = json.loads(cached.read_text())
    return rows


def commit() -> str:
    """Return the commit that the page is built from; empty outside of a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def build(folder: Path, *, docs: str | None = None) -> None:
    """Write the page; `docs` is the address of the documentation from there, for links to its pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in STATIC:
        (folder / name).write_bytes((HERE / name).read_bytes())
    write_runtime(folder)
    templates = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    templates.filters["attribute"] = lambda value: escape(json.dumps(value))
    defaults = PlanOptions()
    html = templates.get_template("index.html.j2").render(
        rows=table_rows(),
        gpus=[(gpu.name, gpu.memory_gib) for gpu in GPUS if gpu.peak_flops("bf16")],
        other_gpus=[(gpu.name, gpu.memory_gib) for gpu in GPUS if not gpu.peak_flops("bf16")],
        table_gpus=[find_gpu(name) for name in TABLE_GPUS],
        table_presets=TABLE_PRESETS,
        methods=list(METHODS),
        optimizers=list(OPTIMIZERS),
        losses=LOSSES,
        defaults=defaults,
        sizes={path.name: path.stat().st_size for path in sorted(folder.glob("*.gz"))},
        commit=commit(),
        docs=docs,
    )
    (folder / "index.html").write_text(html)


def main() -> int:
    """Build the page where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", help="address of the documentation, for links to the evidence")
    arguments = parser.parse_args()

    def work() -> None:
        try:
            build(arguments.folder, docs=arguments.docs)
        except ModuleNotFoundError as error:
            raise ToolkitError(f"{error.name} is not installed", hint="`make setup`") from None
        print(arguments.folder / "index.html")

    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())
