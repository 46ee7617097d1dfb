"""Tables and listings of the docs that are generated from the program and from the records of benchmarks.

A page has each between `<!-- build: NAME -->` and `<!-- /build -->`, so that a code host and a clone show it.
tests/test_readme.py writes them and checks that they are those of today.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

import toolkit
import toolkit.presets
from toolkit.cli.program import app
from toolkit.compare.comparison_report import ONLY_IN_LEDGER
from toolkit.compare.results import ComparedJob, ComparisonMethod, Disk, Environment, InstalledGpu, Results
from toolkit.compare.rows import Failure, FlopsPerToken, Probe, Row, RunRecord, Timeline, TimelineRank
from toolkit.doctor.examination import all_checks
from toolkit.job.argument_aliases import ALIASES, HINTS, Alias
from toolkit.job.argument_fields import DataArguments, ModelArguments
from toolkit.job.job import Job
from toolkit.lint.findings import LintRule
from toolkit.lint.rules import RULES
from toolkit.models.optimizers import OPTIMIZERS, UpdatedTensor
from toolkit.presets import Preset, list_presets
from toolkit.presets.characteristics import characteristics
from toolkit.presets.support import unsupported
from toolkit.record.columns import Model, column_of
from toolkit.record.measurements import Figures, Measurements, MemoryByPhase
from toolkit.record.timeline import Goodput
from toolkit.screen_text import wrapped
from toolkit.units import GIB, counted

ROOT = Path(__file__).resolve().parents[2]
OBSERVER = ROOT / "toolkit" / "observe" / "observer.py"

RESULTS_MODELS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (
        *(Results, Environment, InstalledGpu, Disk, ComparedJob, ComparisonMethod, Row, RunRecord, Failure, Probe),
        *(MemoryByPhase, FlopsPerToken, Timeline, TimelineRank),
    )
}

# Table of a page of evidence -> the benchmark that recorded it.
RECORDED = {"overhead": "overhead", "traced_grid": "plan_errors"}
RECORDED |= dict.fromkeys(("observed_pages_kept", "first_step"), "overhead")
# Record of `benchmarks/peers.py` -> the figure that evidence/peers.md shows of it.
PEERS = dict.fromkeys(("peers_in_turns", "peers_two_ranks_in_turns"), "tokens_per_cpu_second")
PEERS["peers_one_process"] = "peak_pss_bytes"

UNFOLDED_ROWS = 10

QWEN = "Qwen/Qwen3-8B"
GPU_CHECK = ROOT / "benchmarks" / "results" / "gpu-check.json"
GPU_RANKS = GPU_CHECK.with_name("gpu-ranks.json")
COLUMNS = 90
# Commands whose output a page shows, and how many of its paragraphs.
PRINTED = {
    "recommendation": (f"recommend {QWEN} --gpu h100 --num-processes 8 --max-seq-length 2048", 2),
    "recommendation_of_lora": (
        f"recommend {QWEN} --gpu rtx-4090 --num-processes 2 --max-seq-length 2048 --lora-r 16",
        2,
    ),
    "plan": (
        f"plan {QWEN} --num-processes 8 --gpu h100 --preset zero2 --preset zero3 --max-seq-length 4096"
        " --per-device-train-batch-size 1 --activation-checkpointing",
        2,
    ),
    "plan_of_dpo": (f"plan {QWEN} --gpu h100 --num-processes 8 --preset zero2 --preset zero3 --method dpo", 2),
    "plan_of_a_dpo_script": (
        f"plan {QWEN} --method dpo --lora-r 16 --preset zero3 --preset fsdp2 --num-processes 8 --gpu h100"
        " --per-device-train-batch-size 2 --max-seq-length 1024",
        2,
    ),
    "simulated_pipelines": (
        "simulate pipeline --stages 8 --micro-batches 32 --forward-ms 29.8 --backward-ms 29.4 --weight-ms 19.5"
        " --transfer-ms 0.6",
        1,
    ),
    "simulated_failures": (
        "simulate failures --gpus 16384 --checkpoint-seconds 30 --restart-minutes 10 --detection-minutes 10",
        1,
    ),
    "simulated_stragglers": ("simulate stragglers --workers 16 --slow-workers 1 --slow-factor 1.5", 1),
}

FILE_KINDS = {"deepspeed": "DeepSpeed JSON", "trainer": "Trainer", "shell": "shell script", "skypilot": "SkyPilot"}


def markdown_table(head: Sequence[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; the cells may hold Markdown."""
    lines = [f"| {' | '.join(head)} |", "| :--- " * len(head) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def folded(table: str) -> str:
    """Return a table that opens with a click."""
    rows = len(table.strip().splitlines()) - 2
    return f"<details markdown>\n<summary>The table: {rows} rows</summary>\n\n{table.strip()}\n\n</details>"


def preset_table() -> str:
    """Return one row per preset: what it does and when to choose it."""
    head = ["preset", "when to choose it", "engine", "sharding", "offloads", "processes"]
    return markdown_table(head, [_preset_row(preset) for preset in list_presets()])


def _preset_row(preset: Preset) -> list[str]:
    devices = {"optimizer": preset.offload_optimizer, "parameters": preset.offload_param}
    offloads = ", ".join(f"{what} to {device}" for what, device in devices.items() if device) or "–"
    processes = ", ".join([preset.processes, *(f"`--{name}`" for name in preset.degrees)])
    return [f"`{preset.name}`", preset.summary, f"`{preset.engine}`", f"`{preset.sharding}`", offloads, processes]


def characteristics_table() -> str:
    """Return one row per preset: bytes, communication volume, requirements and limits."""
    head = ["preset", "GPU bytes per parameter", "host bytes", "communication"]
    head += ["FSDP1", "equivalent", "needs", "not with"]
    return markdown_table(head, [_characteristics_row(preset) for preset in list_presets()])


def _characteristics_row(preset: Preset) -> list[str]:
    found = characteristics(preset)
    cells = [f"`{preset.name}`", found.bytes_on("gpu"), found.bytes_on("cpu"), found.communication]
    cells += [found.fsdp1_name or "–", found.other_name or "–"]
    return [*cells, "; ".join(found.needs), "; ".join(found.not_with) or "–"]


def optimizer_table() -> str:
    """Return one row per optimizer: its class, what it keeps, and the presets that it works under."""
    return markdown_table(["`--optim`", "class", "states", "bytes", "presets"], [*map(_optimizer_row, OPTIMIZERS)])


def _optimizer_row(optim: str) -> list[str]:
    spec, matrix = OPTIMIZERS[optim], UpdatedTensor(shape=(4096, 4096), is_hidden_matrix=True)
    refused = [p.name for p in list_presets() if unsupported(p, Job(optim=optim)) is not None]
    presets = "all" if not refused else ", ".join(p.name for p in list_presets() if p.name not in refused)
    share = spec.state_bytes([matrix]) / matrix.num_elements
    states = spec.summary + ("; paged" if spec.paged else "")
    return [f"`{optim}`", f"`{spec.class_name}`", states, f"{share:.3g}", presets]


def lint_index() -> str:
    """Return links to the rules of each level."""
    names = {level: [rule.name for rule in RULES if rule.level == level] for level in ("error", "warning", "note")}
    return "\n\n".join(
        f"**{counted(len(found), level)}**: {', '.join(f'[{name}](#{name})' for name in sorted(found))}"
        for level, found in names.items()
    )


def lint_rules() -> str:
    """Return a section per lint rule, whose heading is the rule's name: findings link there."""
    return "\n\n".join(map(_lint_rule, sorted(RULES, key=lambda rule: rule.name)))


def _lint_rule(rule: LintRule) -> str:
    kinds = ", ".join(FILE_KINDS.get(kind, kind) for kind in rule.kinds)
    checked = rule.checked_against + (f", from {rule.removed_in}" if rule.removed_in else "")
    what = f"*{rule.level}* in {kinds}; checked with {checked}."
    return "\n\n".join([f"### {rule.name}", what, rule.description, f"Write instead: {rule.fix}"])


def doctor_table() -> str:
    """Return one row per check of `toolkit doctor`."""
    rows = [
        [f"`{check.name}`", check.looks_at, check.threshold + (" (`--long`)" if check.long else ""), check.source]
        for check in all_checks()
    ]
    return markdown_table(["check", "what it looks at", "when it is a finding", "source of the threshold"], rows)


def preset_files() -> str:
    """Return links to the files of every preset, as they ship."""
    return "\n".join(f"- `{preset.name}`: {_file_links(preset)}" for preset in list_presets())


def _file_links(preset: Preset) -> str:
    return ", ".join(f"[`{path}`](../../{path})" for path in preset.texts())


def recorded_table(name: str) -> str:
    """Return the table of a benchmark's recorded results."""
    benchmark, record = _benchmark(RECORDED[name]), _benchmark("record")
    header, rows_of = getattr(benchmark, "TABLES", {}).get(name) or (benchmark.HEADER, benchmark.table_rows)
    rows = [[*map(str, cells)] for cells in rows_of(*record.read_result(name))]
    return folded(markdown_table(header, rows)) if len(rows) > UNFOLDED_ROWS else markdown_table(header, rows)


def _benchmark(name: str) -> Any:
    for folder in ("benchmarks", "benchmarks/gpu"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))
    return import_module(name)


def peers_table(name: str) -> str:
    """Return one row per job, one column per program: our figure, then the ratio to each program's with its 95 % CI."""
    peers, figure = _benchmark("peers"), PEERS[name]
    _, rows = _benchmark("record").read_result(name)
    programs = dict.fromkeys(row["program"] for row in rows if row["program"] != peers.OURS)
    cells = {(row["job"], row["program"]): _peer_cell(row, figure) for row in rows}
    lines = [
        [f"`{job}`", cells[job, peers.OURS], *(cells.get((job, program), "not run") for program in programs)]
        for job in dict.fromkeys(row["job"] for row in rows)
    ]
    return markdown_table(["job", "toolkit", *programs], lines)


def _peer_cell(row: dict[str, Any], figure: str) -> str:
    peers = _benchmark("peers")
    if "error" in row:
        return "error"
    if row["program"] == peers.OURS:
        return str(peers.format_figure(figure, row["medians"][figure]))
    return "another job" if row.get("differences") else str(peers.shown(row["ours_over_theirs"].get(figure)))


def verified_fields() -> str:
    """Return each verified field with the number of runs in which it deviated, and was found."""
    _, rows = _benchmark("record").read_result("verification")
    deviating = [row for row in rows if row["field"]]
    runs = Counter(row["field"] for row in deviating)
    missed = Counter(row["field"] for row in deviating if not row["found"])
    shown = {field: f" ({missed[field]} missed)" if missed[field] else "" for field in runs}
    return ", ".join(f"`{field}` {runs[field]}{shown[field]}" for field in runs)


def measured_fits(record: Path = GPU_CHECK) -> list[dict[str, Any]]:
    """Return the measured allocated peaks of README's jobs, from the file of `make gpu-check`."""
    parts = json.loads(record.read_text())["parts"] if record.is_file() else []
    rows = [row for part in parts if part["part"] == "fits" for row in part["rows"]]
    return [row for row in rows if row["quantity"] == "allocated"]


def fits_measured(record: Path = GPU_CHECK) -> str:
    """Return one row per measured job of README's table: planned and measured allocated peak."""
    head = ["job", "preset", "planned, GiB", "measured, GiB", "error of the plan"]
    return markdown_table(head, [_measured_row(row) for row in measured_fits(record)])


def _measured_row(row: dict[str, Any]) -> list[str]:
    sizes = [f"{row[name] / GIB:.1f}" for name in ("planned", "measured")]
    return [row["case"], f"`{row['preset']}`", *sizes, f"{row['error']:+.1%}"]


def ranks_measured(record: Path = GPU_RANKS) -> str:
    """Return one row per preset that ran with real ranks on one GPU: its allocated peak and its loss."""
    (part,) = [part for part in json.loads(record.read_text())["parts"] if part["part"] == "ranks"]
    rows = {(row["case"], row["quantity"]): row for row in part["rows"]}
    head = ["preset", "planned, GiB", "measured, GiB", "error of the plan", "loss of step 3", "of `single`"]
    lines = []
    for (preset, quantity), row in sorted(rows.items()):
        if quantity == "allocated" and (loss := rows.get((preset, "loss"))):
            _, _, *peaks = _measured_row(row)
            lines.append([f"`{preset}`", *peaks, f"{loss['measured']:.4f}", f"{loss['planned']:.4f}"])
    return markdown_table(head, lines)


def printed(command: str, paragraphs: int) -> str:
    """Return the first paragraphs that a command prints; of Qwen3-8B, a well-known model, without the hub."""
    answer = CliRunner().invoke(app, command.split(), env={"COLUMNS": str(COLUMNS)}).stdout
    shown = "\n\n".join(answer.rstrip().split("\n\n")[:paragraphs])
    lines = [part for line in shown.splitlines() for part in wrapped(line.rstrip(), COLUMNS)]
    return "\n".join(["```text", *lines, "```"])


def argument_table() -> str:
    """Return the arguments that the training script has beside those of `TrainingArguments`."""
    fields = [*dataclasses.fields(ModelArguments), *dataclasses.fields(DataArguments)]
    return markdown_table(
        ["argument", "what it is"], [[f"`--{field.name}`", _argument_help(field)] for field in fields]
    )


def _argument_help(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata["help"]).replace("|", "/").replace("%%", "%")


def alias_table() -> str:
    """Return the arguments of TRL, axolotl and LLaMA-Factory that are accepted, and what they become."""
    return markdown_table(
        ["accepted", "becomes"], [row for word, alias in ALIASES.items() for row in _alias_rows(word, alias)]
    )


def _alias_rows(word: str, alias: Alias) -> Iterator[list[str]]:
    if alias.values is None:
        yield [f"`--{word}`", f"`--{alias.name}`"]
        return
    for theirs, ours in alias.values.items():
        yield [f"`--{word} {theirs}`", f"`--{alias.name} {ours}`"]


def hint_table() -> str:
    """Return the arguments of other tools that mean something else here, with what to type instead."""
    return markdown_table(["not accepted", "instead"], [[f"`--{word}`", hint] for word, hint in HINTS.items()])


def commands() -> str:
    """Return every command and subcommand: its help text, arguments and options."""
    program: Any = typer.main.get_command(app)
    return "\n".join(
        line for name, command in program.commands.items() for line in _command(f"toolkit {name}", command)
    )


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"## {name}\n\n{command.help}\n"
    if hasattr(command, "commands"):
        for word, below in command.commands.items():
            yield from _command(f"{name} {word}", below)
        return
    yield f"```\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    records = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    yield markdown_table(["argument or option", "what it is"], [[f"`{first}`", _cell(text)] for first, text in records])
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;")


def results_table(name: str) -> str:
    """Return one row per key of a part of `results.json`; a trial's leaves out what it shares with a row."""
    schema = Results.model_json_schema(mode="serialization")
    model, properties = RESULTS_MODELS[name], (schema["$defs"].get(name) or schema)["properties"]
    rows = []
    for key, field in model.model_fields.items():
        if model is RunRecord and (key in Row.model_fields or key in ONLY_IN_LEDGER):
            continue
        column = column_of(model, key)
        of_a_row = f" Of a row: {column.repeats}." if column.repeats and model is Row else ""
        meaning = " ".join((field.description or "").split())
        rows.append([f"`{key}`", _json_type(properties[key]), column.unit or "", f"{meaning}{of_a_row}"])
    return markdown_table(["key", "type", "unit", "meaning"], rows)


def measured_table() -> str:
    """Return one row per key of `measured` in `run.json`."""
    fields = {key: field for key, field in Figures.model_fields.items() if key in Measurements().summary()}
    rows = [
        [f"`{key}`", column_of(Figures, key).unit or "", " ".join((field.description or "").split())]
        for key, field in fields.items()
    ]
    return markdown_table(["key", "unit", "meaning"], rows)


def goodput_table() -> str:
    """Return one row per key of `goodput` in `run.json`."""
    fields = {**Goodput.model_fields, **Goodput.model_computed_fields}
    return markdown_table(["key", "meaning"], [[f"`{key}`", field.description or ""] for key, field in fields.items()])


def _json_type(schema: dict[str, Any]) -> str:
    types = [found.get("type", "object") for found in schema.get("anyOf", [schema])]
    return " or ".join(dict.fromkeys(types))


def public_names() -> list[str]:
    names = [f"toolkit.{name}" for name in toolkit.__all__ if not name.startswith("__")]
    return names + [f"toolkit.presets.{name}" for name in toolkit.presets.__all__ if name not in toolkit.__all__]


def python_names() -> str:
    """Return every public name of the package and the first sentence of its docstring."""
    return markdown_table(["name", "what it is"], [[f"`{name}`", _summary(name)] for name in public_names()])


def _summary(name: str) -> str:
    """Return the first paragraph of a docstring; that of `observe`, whose import brings torch, from its source."""
    module, _, word = name.rpartition(".")
    if word == "observe":
        functions = [node for node in ast.parse(OBSERVER.read_text()).body if isinstance(node, ast.FunctionDef)]
        text = ast.get_docstring(next(node for node in functions if node.name == word))
    else:
        text = inspect.getdoc(getattr(import_module(module), word))
    return " ".join((text or "").split("\n\n")[0].split())


def python_directives() -> str:
    """Return mkdocstrings' directives for every public name of the package: the site shows signatures."""
    return "\n".join(f"::: {name}\n" for name in public_names())


BUILT: dict[str, Callable[[], str]] = {
    **{name: functools.partial(printed, *shown) for name, shown in PRINTED.items()},
    "fits_measured": fits_measured,
    "ranks_measured": ranks_measured,
    "goodput": goodput_table,
    "presets": preset_table,
    "optimizers": optimizer_table,
    "lint_rules": lint_rules,
    "lint_index": lint_index,
    "doctor_checks": doctor_table,
    "characteristics": characteristics_table,
    "arguments": argument_table,
    "aliases": alias_table,
    "hints": hint_table,
    "commands": commands,
    "preset_files": preset_files,
    "python_names": python_names,
    "run_measured": measured_table,
    **{f"recorded_{name}": functools.partial(recorded_table, name) for name in RECORDED},
    **{f"recorded_{name}": functools.partial(peers_table, name) for name in PEERS},
    "recorded_verification": verified_fields,
    **{f"results_{name}": functools.partial(results_table, name) for name in RESULTS_MODELS},
}
# Blocks that the site shows in another form.
ON_SITE: dict[str, Callable[[], str]] = {"python_names": python_directives}
BLOCK = re.compile(r"^(<!-- build: (\w+) -->\n).*?(^<!-- /build -->)$", re.MULTILINE | re.DOTALL)


def with_blocks(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a page in which each of these blocks is as the program has it today."""
    return BLOCK.sub(
        lambda found: f"{found[1]}{blocks[found[2]]().strip()}\n{found[3]}" if found[2] in blocks else found[0], text
    )
