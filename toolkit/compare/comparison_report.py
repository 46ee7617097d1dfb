"""The report of a comparison, from its results alone: JSON, CSV, Markdown, HTML, and the table for the console."""

import csv
import io
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from toolkit.compare import tables_and_charts as tables
from toolkit.compare.results import RESULTS_FILE, InstalledGpu, Results
from toolkit.compare.rows import Failure, Row
from toolkit.compare.significance import SAME_SPEED, answer, verdict
from toolkit.record.columns import column_of
from toolkit.report.rendering import one_line, render, rich_table, write_report_file
from toolkit.units import NOT_AVAILABLE, counted, gib, number, percent, seconds

FORMULA = ("=", "+", "-", "@")  # https://owasp.org/www-community/attacks/CSV_Injection
CSV_COLUMNS = tuple(key for key in Row.model_fields if column_of(Row, key).in_csv)
# What only the ledger has: the parity check reads it.
ONLY_IN_LEDGER = {"step_non_padding_tokens", "step_supervised_tokens", "batch_sha256"}
MESSAGE_CHARACTERS = 180  # two lines of a terminal: the complete message is in report.md
NamesAndValues = list[tuple[str, str]]


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write the files of a comparison, the data first. Raises ToolkitError for a folder that cannot be written."""
    texts = {RESULTS_FILE: json_text(results), "results.csv": csv_text(results)}
    texts |= {f"report.{suffix}": report_text(results, suffix) for suffix in ("md", "html")}
    return [write_report_file(folder / name, text) for name, text in texts.items()]


def json_text(results: Results) -> str:
    """Return `results.json` as it is written: indented, and strict JSON (an unknown is null, never NaN)."""
    content = results.model_dump(mode="json", exclude={"trials": {"__all__": ONLY_IN_LEDGER}})
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def csv_text(results: Results) -> str:
    """Return `results.csv`; text that a spreadsheet would execute as a formula has an apostrophe in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in results.rows:
        values = [getattr(row, key) for key in CSV_COLUMNS]
        lines = [one_line(value) if isinstance(value, str) else value for value in values]
        writer.writerow([f"'{line}" if isinstance(line, str) and line.startswith(FORMULA) else line for line in lines])
    return text.getvalue()


def report_text(results: Results, suffix: str) -> str:
    """Return a comparison as Markdown (`md`) or as a self-contained page (`html`)."""
    return render(f"report.{suffix}.j2", **_content(results.as_reported()))


def console_table(results: Results) -> RichTable:
    """Return one line per row, in the order given; below them, why a row has no ratio."""
    results = results.as_reported()
    table = rich_table(tables.row_table("comparison", results, narrow=True))
    reasons = {
        label: (row.status_text, row.parity_message if row.failed_parity else row.message or row.parity_message)
        for label, row in results.labelled_rows
        if row.failed_parity or row.message or not row.completed or (row.unchecked and row.parity_message)
    }
    lines = [f"{label}: {ended}: {message or 'no message'}" for label, (ended, message) in reasons.items()]
    table.caption = Text("\n".join(one_line(line, MESSAGE_CHARACTERS) for line in lines), style="")
    table.caption_justify = "left"
    return table


def _content(results: Results) -> dict[str, Any]:
    rows = results.labelled_rows
    is_scaled = any(row.scaling_efficiency is not None and row.speed_up != 1 for row in results.rows)
    memory = "resident memory (RSS)" if results.on_cpu else "allocated memory"
    sections = {
        "Memory of one rank": tables.row_table("memory", results),
        f"Memory by phase: the first step of the largest rank, {memory}": tables.phases_table(results),
    }
    if results.shows_speeds:
        sections |= {
            "Speed": tables.row_table("speed", results),
            "Efficiency and cost": tables.row_table("efficiency", results),
            "Communication, saving, start-up": tables.row_table("overhead", results),
        }
    return {
        "results": results,
        "title": title(results),
        "about": about(results),
        "answer": answer(results),
        "notes": notes(results),
        "comparison": tables.row_table("comparison", results),
        "comparable": [row.comparable for row in results.rows],
        "memory_chart": tables.memory_chart(results),
        "speed_chart": tables.speed_chart(results),
        "losses_chart": tables.losses_chart(results),
        "scaling_chart": tables.scaling_chart(results),
        "profiled_steps": tables.profiled_steps(results),
        "failures": [(label, row, failure_details(results, row)) for label, row in rows if not row.completed],
        "parity": tables.parity_table(results),
        "messages": [
            (label, text)
            for label, row in rows
            for text in (row.parity_message, row.message if row.completed else None)
            if text
        ],
        "probes": tables.probes_table(results),
        "sections": {name: table for name, table in sections.items() if table and table.has_figures},
        "scaling": tables.row_table("scaling", results) if is_scaled else None,
        "trials": tables.trials_table(results) if results.shows_speeds else None,
        "method": _method(results),
        "job": _job(results),
        "environment": _environment(results),
        "shell_commands": "\n".join(f"# {one_line(label)}\n{row.command}" for label, row in rows),
    }


def failure_details(results: Results, row: Row) -> str:
    """Return what a failed row measured before it ended; nothing for one that cannot run on this node."""
    if row.unsupported:
        return ""
    failure = row.failure or Failure(kind=row.status, measured_bytes=results.peak_bytes(row))
    parts = {
        f"world_size {row.world_size}": True,
        f"steps with a loss: {len(row.losses)}": True,
        f"in phase {failure.phase}": failure.phase,
        f"predicted peak {gib(failure.predicted_bytes)}": failure.predicted_bytes is not None,
        f"last measured peak {gib(failure.measured_bytes)}": failure.measured_bytes is not None,
        f"on rank {row.peak_rank}": row.peak_rank is not None,
        f"after {seconds(row.wall_seconds)}": row.wall_seconds is not None,
        f"folder {one_line(row.run_folder)}": True,
    }
    return ", ".join(part for part, is_known in parts.items() if is_known)


def _job(results: Results) -> NamesAndValues:
    job = results.job
    what = [("model", job.model or NOT_AVAILABLE), ("dataset", job.dataset or NOT_AVAILABLE)]
    if job.script is not None:
        ends = "where the script ends" if job.stop_after_steps is None else f"after step {job.stop_after_steps}"
        what = [("script", job.script), ("its SHA-256", job.script_sha256 or NOT_AVAILABLE), ("a trial ends", ends)]
    counts = {(row.num_params, row.num_trainable_params) for row in results.rows if row.completed}
    parameters = [f"{number(total, 0)} ({number(trainable, 0)})" for total, trainable in sorted(counts, key=str)]
    numbers = ("per_device_train_batch_size", "gradient_accumulation_steps", "compute_dtype", "seed", "untimed_steps")
    return [
        *what,
        ("training arguments" if job.script is None else "its arguments", shlex.join(job.training_arguments)),
        *((name, NOT_AVAILABLE if (value := getattr(job, name)) is None else str(value)) for name in numbers),
        ("parameters (trainable)", ", ".join(parameters) or NOT_AVAILABLE),
    ]


def _environment(results: Results) -> NamesAndValues:
    environment, disk = results.environment, results.environment.disk
    limits = [] if environment.memory_limit_bytes is None else [f"memory {gib(environment.memory_limit_bytes)}"]
    limits += [] if environment.cpu_limit is None else [f"{environment.cpu_limit:g} CPU cores"]
    gpus = Counter(_gpu(gpu) for gpu in environment.gpus)
    free = disk and f"{disk.filesystem or NOT_AVAILABLE}, {gib(disk.free_bytes)} free of {gib(disk.total_bytes)}"
    return [
        ("device", environment.device),
        ("GPUs", ", ".join(f"{count} × {gpu}" for gpu, count in gpus.items()) or "none"),
        ("CPU", f"{environment.cpu or NOT_AVAILABLE}, {environment.cpu_count or NOT_AVAILABLE} cores"),
        ("host memory", gib(environment.host_memory_bytes)),
        ("container limits", ", ".join(limits) or "none found"),
        ("disk", free or NOT_AVAILABLE),
        ("Python", environment.python),
        *sorted(environment.versions.items()),
        ("git commit", environment.git_commit or NOT_AVAILABLE),
        ("created", results.created),
    ]


def _method(results: Results) -> NamesAndValues:
    method, target = results.method, results.method.target_interval
    early = "all steps ran" if target is None else f"within {100 * target:g} % of the median (95 %), or all steps"
    return [
        ("repeats", f"{method.repeats}, in an order drawn with seed {method.order_seed}"),
        ("timed steps", early),
        ("intervals", method.interval),
        ("confidence of a ratio", f"{100 * method.ratio_confidence:.4g} %"),
        ("scaling", method.scaling or NOT_AVAILABLE),
    ]


def _gpu(gpu: InstalledGpu) -> str:
    """`NVIDIA H100 (79.65 GiB; driver 570.86.15; power limit 700 W; clocks up to 1980 and 2619 MHz)`."""
    parts = [gib(gpu.memory_bytes)] + ([f"driver {gpu.driver}"] if gpu.driver else [])
    if gpu.power_limit_watts is not None:
        parts.append(f"power limit {gpu.power_limit_watts:g} W")
    if gpu.max_sm_clock_mhz is not None and gpu.max_memory_clock_mhz is not None:
        parts.append(f"clocks up to {gpu.max_sm_clock_mhz} (SM) and {gpu.max_memory_clock_mhz} MHz (memory)")
    return f"{gpu.name} ({'; '.join(parts)})"


def title(results: Results) -> str:
    """Return what was compared, and on what."""
    job, sizes = results.job, results.world_sizes
    last = results.hardware(sizes[-1]) if sizes else results.environment.device
    count = counted(len({row.preset for row in results.rows}), "preset")
    return f"{_short(job.script or job.model)}: {count} on {' and '.join([*map(str, sizes[:-1]), last])}"


def about(results: Results) -> str:
    """Return the data, the hardware and the date in one line."""
    job, environment = results.job, results.environment
    datasets = [_short(name) for name in (job.dataset or "").split(", ") if name]
    repeats = f"{'up to ' * results.method.search}{counted(results.method.repeats, 'run')} of each"
    cpu = f"{environment.cpu or 'CPU'}, {environment.cpu_count or NOT_AVAILABLE} cores" if results.on_cpu else None
    versions = f"torch {environment.versions.get('torch', NOT_AVAILABLE)}"
    facts = (", ".join(datasets) or None, job.compute_dtype, repeats, cpu, versions, results.created[:10])
    return " · ".join(filter(None, facts))


def _short(name: str | None) -> str:
    text = one_line(name or NOT_AVAILABLE)
    return text if text.count("/") == 1 and text[0] not in "/~." else text.rstrip("/").rpartition("/")[2]


def notes(results: Results) -> list[str]:
    """Return what a reader must know before quoting a figure."""
    method, price, rows = results.method, results.price_per_gpu_hour, results.rows
    repeated, shared, hidden = any(row.repeated for row in rows), method.ranks_per_gpu, not results.shows_speeds
    labelled = results.labelled_rows
    throttled = [f"{label} ({', '.join(row.throttle_reasons)})" for label, row in labelled if row.throttle_reasons]
    recompiled = [label for label, row in labelled if row.recompilations_after_first_steps]
    planned = results.on_cpu and any(row.planned_gpu_state_bytes for row in rows)
    found: dict[str, object] = {
        f"{shared} ranks share each GPU: memory, sharding, losses and parity are those of as many GPUs; speeds are not,"
        " and are not shown.": shared > 1,
        "Single runs: no interval, so no difference in speed can be claimed.": not (
            repeated or hidden or results.on_cpu
        ),
        "Single runs on a CPU: their speeds vary by tens of per cent and are not shown.": hidden and results.on_cpu,
        f"Intervals: {method.interval}; a difference is claimed only where the ratio's interval"
        f" ({100 * method.ratio_confidence:.4g} %) excludes 1.": repeated,
        f"Unclear: the interval includes 1 and reaches further than {percent(SAME_SPEED)} from it; more trials narrow"
        " it.": repeated and any(verdict(row.ratio_interval) == "unclear" for row in rows),
        "Bytes are of one rank, the largest.": True,
        "tokens/s is of all ranks together, over the timed steps only.": any(row.has_speed for row in rows),
        "From a CPU to GPUs, the number of elements per rank, sharding and parity carry over. Speeds do not, nor do"
        " bytes: a CPU has everything in fp32, a GPU ZeRO's weights and gradients in bf16.": results.on_cpu,
        "Planned with GPUs: the planner's bytes of the same job, preset and number of processes, on a GPU or"
        " offloaded to its host, in the preset's mixed precision; no GPU measured them here.": planned,
        "A CPU has no allocator peak: peak memory is resident host memory (RSS), libraries included.": results.on_cpu,
        "Parity failed: the row did not train the baseline's problem, so its speed is not compared.": any(
            row.failed_parity for row in rows
        ),
        "Where ranks share a layer or a sequence, a batch is larger by as many ranks, so that every step has the same"
        " sequences; a ratio counts tokens without padding, which differs between batches.": any(
            row.layout is not None for row in rows
        ),
        "MFU counts all parameters and causal attention, padding included, relative to the GPU's dense"
        f" {results.job.compute_dtype} peak; HFU adds what activation checkpointing repeats.": any(
            row.mfu is not None for row in rows
        ),
        f"Cost: per million non-padding tokens, at {price or 0:g} per GPU-hour.": price is not None,
        f"GPU clocks were reduced during timed steps: {', '.join(throttled)}.": throttled,
        f"Timed steps include compilation (train.log has the reasons): {', '.join(recompiled)}.": recompiled,
        "A row whose parity is n/a could not be checked against the baseline, and is not compared.": any(
            row.unchecked for row in rows
        ),
    }
    return [note for note, applies in found.items() if applies]
