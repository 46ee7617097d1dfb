"""The report of a comparison, from its results alone: JSON, CSV, Markdown, HTML, and the table for the console."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from toolkit.compare import tables_and_charts as tables
from toolkit.compare.results import RESULTS_FILE, InstalledGpu, Results
from toolkit.compare.rows import NOT_SUPPORTED, Failure, Row
from toolkit.record.columns import column_of
from toolkit.report.rendering import one_line, render, rich_table, write_report_file
from toolkit.units import NOT_AVAILABLE, gib, number, percent, seconds, speed

# https://owasp.org/www-community/attacks/CSV_Injection
FORMULA = ("=", "+", "-", "@")
CSV_COLUMNS = tuple(key for key in Row.model_fields if column_of(Row, key).in_csv)
# What only the ledger has: the parity check reads it.
ONLY_IN_LEDGER = {"step_non_padding_tokens", "step_supervised_tokens", "batch_sha256"}
# Two lines of a terminal: the complete message is in report.md.
MESSAGE_CHARACTERS = 180
CPU_SPEEDS = "CPU speeds (gloo) say nothing about GPU speeds"
LabelledRow = tuple[str, Row]
"""A row with the label that the report gives it."""
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
    return render(f"report.{suffix}.j2", **_content(results))


def console_table(results: Results) -> RichTable:
    """Return one line per row, in the order given; below them, why a row has no ratio."""
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
    sections = {
        "Memory of one rank": tables.row_table("memory", results).without_unknown_columns(),
        "Memory by phase: the first step of the largest rank": tables.phases_table(results),
        "Speed": tables.row_table("speed", results).without_unknown_columns(),
        "Efficiency and cost": tables.row_table("efficiency", results).without_unknown_columns(),
        "Communication, saving, start-up": tables.row_table("overhead", results).without_unknown_columns(),
    }
    return {
        "results": results,
        "title": title(results),
        "summary": summary_sentence(results),
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
        "parity_messages": [(label, row.parity_message) for label, row in rows if row.parity_message],
        "probes": tables.probes_table(results),
        "sections": {name: table for name, table in sections.items() if table},
        "scaling": tables.scaling_table(results),
        "trials": tables.trials_table(results),
        "method": _method(results),
        "job": _job(results),
        "environment": _environment(results),
        "shell_commands": "\n".join(f"# {one_line(label)}\n{row.command}" for label, row in rows),
    }


def failure_details(results: Results, row: Row) -> str:
    """Return what a failed row measured before it ended; nothing for one that cannot run on this node."""
    if row.status == NOT_SUPPORTED:
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


def summary_sentence(results: Results) -> str:
    """Return speeds, memory and what did not complete; an order only where intervals support one."""
    rows = results.labelled_rows
    if not rows:
        return "Nothing was compared: there are no rows."
    clauses = [clause for size in results.world_sizes for clause in _world_size_clauses(results, size)]
    scaled = [row for row in results.rows if row.preset == results.reference and row.scaling_efficiency]
    if len(scaled) > 1:
        first, last = (end(scaled, key=lambda row: row.world_size) for end in (min, max))
        clauses.append(
            f"from {first.world_size} to {last.world_size} processes {results.reference} becomes"
            f" {last.speed_up or 0.0:.2f} times as fast ({percent(last.scaling_efficiency)} of ideal)"
        )
    ran = [
        f"{row.per_device_train_batch_size} ({label})"
        for label, row in rows
        if any(probe.status == "completed" for probe in row.probes or ())
    ]
    clauses += [f"the largest micro-batch that runs is {', '.join(ran)}"] if ran else []
    failed = [f"{label}: {row.status}" for label, row in rows if not row.completed and row.status != NOT_SUPPORTED]
    left_out = {
        "did not complete": failed,
        "cannot run on this node": [label for label, row in rows if row.status == NOT_SUPPORTED],
        "did not train the same problem": [label for label, row in rows if row.failed_parity],
        "not ranked here, different by design": [f"{name} ({r.group})" for name, r in rows if r.completed and r.group],
        "could not be checked against the baseline": [name for name, row in rows if row.unchecked],
    }
    clauses += [f"{len(names)} {why} ({', '.join(names)})" for why, names in left_out.items() if names]
    clauses += [CPU_SPEEDS] if results.on_cpu else []
    return "; ".join(clauses) + "."


def title(results: Results) -> str:
    """Return what was compared, and on what."""
    sizes = results.world_sizes
    last = hardware_text(results, sizes[-1]) if sizes else results.environment.device
    places = " and ".join([*map(str, sizes[:-1]), last])
    script = "" if results.job.script is None else f" of {one_line(Path(results.job.script).name)}"
    return f"Comparison{script}: {_presets(len({row.preset for row in results.rows}))} on {places}"


def hardware_text(results: Results, world_size: int) -> str:
    """Return what the processes ran on: `2 CPU processes`, `2 × NVIDIA H100`."""
    if results.on_cpu:
        return f"{world_size} CPU {'process' if world_size == 1 else 'processes'}"
    names = {gpu.name for gpu in results.environment.gpus}
    return f"{world_size} × {names.pop() if len(names) == 1 else 'GPU'}"


def notes(results: Results) -> list[str]:
    """Return what a reader must know before quoting a figure."""
    method, price, rows = results.method, results.price_per_gpu_hour, results.rows
    repeated = any(row.repeated for row in rows)
    labelled = results.labelled_rows
    throttled = [f"{label} ({', '.join(row.throttle_reasons)})" for label, row in labelled if row.throttle_reasons]
    recompiled = [label for label, row in labelled if row.recompilations_after_first_steps]
    found: dict[str, object] = {
        "Single runs, not ranked by significance: a small difference may be noise.": not repeated,
        f"Intervals: {method.interval}; a difference is claimed only where the ratio's interval"
        f" ({100 * method.ratio_confidence:.4g} %) excludes 1.": repeated,
        "Bytes are of one rank, the largest; tokens/s is of all ranks together, over the timed steps only.": True,
        f"{CPU_SPEEDS}; bytes per rank do carry over.": results.on_cpu,
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


def _world_size_clauses(results: Results, world_size: int) -> list[str]:
    """Fastest and smallest among the rows with one number of processes."""
    same_size = [
        (row.preset if label == f"{row.preset} n{world_size}" else label, row)  # the clause names the size
        for label, row in results.labelled_rows
        if row.world_size == world_size
    ]
    ranked = [(label, row) for label, row in same_size if row.comparable and row.has_speed and row.group is None]
    start, count = "On" if world_size == results.world_sizes[0] else "on", _presets(len(same_size))
    place = f"{start} {hardware_text(results, world_size)}, "
    if not ranked:
        return [f"{place}none of {count} can be ranked"]
    among = count if len(ranked) == len(same_size) else f"the {len(ranked)} of {count} that can be compared"
    label, top = max(ranked, key=lambda labelled: labelled[1].useful_speed)
    repeated = all(row.repeated for _, row in ranked)
    close = [name for name, row in ranked if row is not top and top.rank is None and not row.separated_from(top)]
    if len(ranked) == 1 or not repeated:
        speeds = _speeds_of_single_runs(ranked, among)
    elif close:
        speeds = f"no difference in speed is seen between {' and '.join([label, *close])}, the fastest of {among}"
    else:
        which = "that fits" if any(row.out_of_memory for _, row in same_size) else f"of {among}"
        speeds = f"{label} is the fastest {which} ({speed(top.tokens_per_second)} tokens/s)"
    if not repeated or any(row is not top and not row.separated_from(top) for _, row in ranked):
        baseline = results.baseline(world_size)
        label, top = next(((name, row) for name, row in ranked if row is baseline), (label, top))
    return [place + speeds, *_least_memory(results, ranked, (label, top), repeated=repeated)]


def _speeds_of_single_runs(ranked: Sequence[LabelledRow], among: str) -> str:
    """The range of speeds; without intervals there is no order to claim."""
    by_speed = sorted(ranked, key=lambda labelled: labelled[1].tokens_per_second or 0.0)
    (slowest, low), (fastest, high) = by_speed[0], by_speed[-1]
    if len(ranked) == 1:
        return f"{fastest} ran at {speed(high.tokens_per_second)} tokens/s, with no comparable row beside it"
    speeds = f"{speed(low.tokens_per_second)} ({slowest}) to {speed(high.tokens_per_second)} tokens/s ({fastest})"
    return f"{among} ran at {speeds} in single runs, unranked"


def _least_memory(
    results: Results, ranked: Sequence[LabelledRow], relative_to: LabelledRow, *, repeated: bool
) -> list[str]:
    """The row that needs least memory, relative to the fastest, or to the baseline where no row is the fastest."""

    def memory(row: Row) -> int | None:
        return row.model_state_bytes if results.on_cpu else results.peak_bytes(row)

    name, base = relative_to
    others = [
        (size, -row.useful_speed, label, row) for label, row in ranked if row is not base and (size := memory(row))
    ]
    if not (base_bytes := memory(base)) or not others:
        return []
    least, _, label, row = min(others, key=lambda other: other[:2])
    less = percent(1 - least / base_bytes)
    if least >= base_bytes or less == percent(0):
        return [f"none {'holds fewer model-state bytes' if results.on_cpu else 'uses less memory'} than {name}"]
    saved = f"holds {less} fewer model-state bytes" if results.on_cpu else f"uses {less} less memory"
    ratio = row.useful_speed / (base.useful_speed or 1.0)
    cost = f"for {percent(1 - ratio)} less speed" if ratio < 1 else f"and is {percent(ratio - 1)} faster"
    if not repeated:
        cost = f"at {ratio:.2f} times its speed"
    elif not row.separated_from(base):  # nothing is claimed
        cost = "with no difference seen in speed"
    return [f"{label} {saved} than {name} {cost}"]


def _presets(count: int) -> str:
    return f"{count} {'preset' if count == 1 else 'presets'}"
