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

from typer.testing import CliRunner

import toolkit
import toolkit.presets
from toolkit.cli.program import app_with, program
from toolkit.compare.comparison_report import ONLY_IN_LEDGER
from toolkit.compare.results import ComparedJob, ComparisonMethod, Environment, Results
from toolkit.compare.rows import FlopsPerToken, Row, Run
from toolkit.doctor.examination import CHECKS
from toolkit.job.argument_aliases import ALIASES, Alias
from toolkit.job.argument_fields import DataArguments, ModelArguments
from toolkit.job.job import Job
from toolkit.lint.findings import LEVELS, LintRule
from toolkit.lint.rules import RULES
from toolkit.models.optimizers import OF_SCRIPTS, OPTIMIZERS, UpdatedTensor, optimizer_spec
from toolkit.presets import Preset, list_presets
from toolkit.presets.characteristics import characteristics
from toolkit.presets.support import unsupported
from toolkit.record.columns import Model
from toolkit.record.measurements import Figures, Measurements
from toolkit.record.reading import RankReading
from toolkit.record.timeline import Goodput
from toolkit.screen_text import wrapped
from toolkit.units import GIB

ROOT = Path(__file__).resolve().parents[2]
OBSERVER = ROOT / "toolkit" / "observe" / "observer.py"

RESULTS_MODELS: dict[str, type[Model]] = {
    model.__name__: model for model in (Results, Environment, ComparedJob, ComparisonMethod, Row, Run, FlopsPerToken)
}

# Records of which the page has the keys alone.
NAMES_SAY_ALL = (Environment,)
# Keys whose names say it all: listed without a meaning, which the JSON Schema of the record has.
CLEAR_KEYS = set(
    re.findall(
        r"\w+",
        """
    schema_version created environment job rows trials method price_per_gpu_hour script script_sha256 model
    dataset training_arguments stop_after_steps seed per_device_train_batch_size gradient_accumulation_steps
    compute_dtype preset world_size message phase failure num_nodes attestation_sha256 wall_seconds run_folder
    losses grad_norms save_seconds save_bytes timeline probes num_params repeats repeat position order_seed search
    interval ranks_per_gpu tokens_per_second_per_gpu planned_gpu_parameter_bytes planned_gpu_gradient_bytes
    planned_gpu_optimizer_bytes flops_per_token cost_per_million_tokens tokens_per_second_interval
    without_embeddings timed_step_numbers step_tokens step_seconds padding_fraction step_seconds_median
    step_seconds_p90 peak_allocated_bytes peak_reserved_bytes peak_rank throttle_reasons first_loss last_loss
    non_padding_tokens_per_second supervised_tokens_per_second evaluation_seconds lost_steps starts
    other_seconds recompilations_after_first_steps graph_breaks_after_first_steps wrapper engine
    offload_optimizer offload_param gradient_clipping num_trainable_params neftune_noise_alpha
    attn_implementation ddp_comm_hook loss loss_chunk_tokens pipeline_schedule pipeline_stages micro_batches
    activation_dtype stages layers kernels packing optimizer_class sharding frozen_dtype learning_rates
    optimizer_steps num_optimizer_params first_rows_sha256 torch_compile compiled_modules graph_breaks rank
    device compute_dtype master_dtype optimizer_dtype command communication_fraction planned_allocated_bytes
    step_seconds_interval untimed_steps timed_seconds tied_copy_bytes packing_mask_bytes
    memory_by_phase allocator_retries mfu mfu_full_attention hfu seq_length
        """,
    )
)

# Table of a page of evidence -> the benchmark that recorded it.
RECORDED = {"overhead": "overhead", "observed_pages_kept": "overhead", "traced_grid": "plan_errors"}
# Record of `benchmarks/peers.py` -> the figure that evidence/peers.md shows of it.
PEERS = dict.fromkeys(("peers_in_turns", "peers_two_ranks_in_turns"), "tokens_per_cpu_second")

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
    "plan_of_8_bits": (f"plan {QWEN} --num-processes 8 --gpu h100 --preset zero2 --optim adamw_bnb_8bit", 2),
    "simulated_pipelines": (
        "simulate pipeline --stages 8 --micro-batches 32 --forward-ms 29.8 --backward-ms 48.9 --transfer-ms 0.6",
        1,
    ),
    "simulated_failures": (
        "simulate failures --gpus 16384 --checkpoint-seconds 30 --restart-minutes 10 --detection-minutes 10",
        1,
    ),
    "simulated_stragglers": ("simulate stragglers --workers 16 --slow-workers 1 --slow-factor 1.5", 1),
}

# Kind of file -> the section of reference/lint.md that has the rules whose first kind it is.
LINT_SECTIONS = {
    "accelerate": "accelerate YAML",
    "deepspeed": "DeepSpeed JSON",
    "trainer": "Trainer arguments",
    "axolotl": "axolotl",
    **dict.fromkeys(("sbatch", "shell", "skypilot", "verl", "openrlhf"), "Job scripts"),
}


def markdown_table(head: Sequence[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; the cells may hold Markdown."""
    lines = [f"| {' | '.join(head)} |", "| :--- " * len(head) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def folded(table: str) -> str:
    """Return a table that opens with a click."""
    rows = len(table.strip().splitlines()) - 2
    return f"<details markdown>\n<summary>The table: {rows} rows</summary>\n\n{table.strip()}\n\n</details>"


def definitions(meanings: Mapping[str, str]) -> str:
    """Return a list of keys with their meanings, after a line with those whose names say it all."""
    clear = ["`" + key + "`" for key in meanings if set(key.split("`, `")) <= CLEAR_KEYS]
    lines = ["- " + ", ".join(clear)] if clear else []
    lines += [f"- `{key}`: {meaning}" for key, meaning in meanings.items() if "`" + key + "`" not in clear]
    return "\n".join(lines)


def preset_table() -> str:
    """Return one row per preset, linked to its file: bytes, communication volume, and the processes that it needs."""
    head = ["preset", "processes", "bytes per parameter", "communication"]
    return markdown_table(head, [_preset_row(preset) for preset in list_presets()])


def _preset_row(preset: Preset) -> list[str]:
    traits = characteristics(preset)
    processes = ", ".join([preset.processes, *(f"`--{name}`" for name in preset.degrees)])
    name = f"[`{preset.name}`](../../accelerate_configs/{preset.name}.yaml)"
    sent = traits.communication.split(";")[0]  # what is sent of layers, sequences and experts has a page of its own
    volume = re.sub(",? per accumulation step", "", sent)  # the page says so once
    on_gpu, on_host = traits.bytes_on("gpu"), traits.bytes_on("cpu")
    return [name, processes, on_gpu if on_host == "0" else f"{on_gpu}, host {on_host}", volume]


def optimizer_table() -> str:
    """Return the optimizers below the presets that they work under, with the bytes of their states per parameter."""
    names: dict[str, dict[str, list[str]]] = {}
    for optim in (each for each in OPTIMIZERS if each not in OF_SCRIPTS):
        names.setdefault(_presets_of_optimizer(optim), {}).setdefault(_state_size(optim), []).append(f"`{optim}`")
    return "\n".join(
        f"- {presets}:\n" + "\n".join(f"    - {size} bytes: {', '.join(each)}" for size, each in by_size.items())
        for presets, by_size in names.items()
    )


def _presets_of_optimizer(optim: str) -> str:
    refused = [p.name for p in list_presets() if unsupported(p, Job(optim=optim)) is not None]
    return ", ".join(p.name for p in list_presets() if p.name not in refused) if refused else "every preset"


def _state_size(optim: str) -> str:
    matrix = UpdatedTensor(shape=(4096, 4096), is_hidden_matrix=True, is_projected=True)
    spec = optimizer_spec(optim) or OPTIMIZERS[optim]
    return f"{spec.state_bytes([matrix]) / matrix.num_elements:.3g}"


def lint_rules() -> str:
    """Return the lint rules in sections by file and level. A rule's heading is its name: findings link there."""
    sections: dict[str, list[str]] = {
        f"{heading}: {level}s": [] for heading in dict.fromkeys(LINT_SECTIONS.values()) for level in LEVELS
    }
    for rule in sorted(RULES, key=lambda rule: rule.name):
        sections[f"{LINT_SECTIONS[rule.kinds[0]]}: {rule.level}s"].append(_lint_rule(rule))
    return "\n\n".join(f"## {heading}\n\n" + "\n\n".join(rules) for heading, rules in sections.items() if rules)


def _lint_rule(rule: LintRule) -> str:
    since = f"`{rule.checked_against.split()[0]}>={rule.removed_in}`. " if rule.removed_in else ""
    return f"### {rule.name}\n\n{since}{_claim(rule.description)}."


def _claim(description: str) -> str:
    """Return the first clause of a rule's text: what is wrong, without brackets and what follows from it."""
    outside_code = r"(?=(?:[^`]*`[^`]*`)*[^`]*$)"
    sentence = re.split(r"\. (?=[A-Z`0-9])", re.sub(r" \([^()`]{9,}\)", "", description))[0]
    return re.split(f"(?:[:;]|, (?:which|whatever|even|also|unless|once)) {outside_code}", sentence)[0].rstrip(".")


def doctor_table() -> str:
    """Return the checks of `toolkit doctor`; a name links to the source of the threshold."""
    return ", ".join(_check_name(name, check.source) for name, check in CHECKS.items())


def _check_name(name: str, source: str) -> str:
    address = re.search(r"https://[^\s,;]+", source)
    return f"[`{name}`]({address[0]})" if address else f"`{name}`"


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
    ratio = str(peers.shown(row["ours_over_theirs"].get(figure)))
    return "another job" if row.get("differences") else ratio.replace(" to ", "–")


def verified_fields() -> str:
    """Return the verified fields that deviated in a run, with those that were missed."""
    _, rows = _benchmark("record").read_result("verification")
    deviating = [row for row in rows if row["field"]]
    missed = Counter(row["field"] for row in deviating if not row["found"])
    fields = dict.fromkeys(row["field"] for row in deviating)
    return ", ".join(f"`{field}`" + (f" ({missed[field]} missed)" if missed[field] else "") for field in fields)


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
    head = ["preset", "planned, GiB", "measured, GiB", "error of the plan", "loss of step 3"]
    lines = []
    for (preset, quantity), row in sorted(rows.items()):
        if quantity == "allocated" and (loss := rows.get((preset, "loss"))):
            _, _, *peaks = _measured_row(row)
            lines.append([f"`{preset}`", *peaks, f"{loss['measured']:.4f}"])
    return markdown_table(head, lines)


def printed(command: str, paragraphs: int) -> str:
    """Return the first paragraphs that a command prints; of Qwen3-8B, a well-known model, without the hub."""
    answer = CliRunner().invoke(app_with(), command.split(), env={"COLUMNS": str(COLUMNS)}).stdout
    shown = "\n\n".join(answer.rstrip().split("\n\n")[:paragraphs])
    lines = [part for line in shown.splitlines() for part in wrapped(line.rstrip(), COLUMNS)]
    return "\n".join(["```text", *lines, "```"])


def argument_table() -> str:
    """Return the names of the arguments that the training script has beside those of `TrainingArguments`."""
    kinds = {"Model, method, parallelism and measurement": ModelArguments, "Data": DataArguments}
    return "\n".join(
        f"- {kind}: " + ", ".join(f"`--{field.name}`" for field in dataclasses.fields(arguments))
        for kind, arguments in kinds.items()
    )


def alias_table() -> str:
    """Return the arguments of TRL, axolotl and LLaMA-Factory that are accepted, and what they become."""
    rows = [row for word, alias in ALIASES.items() for row in _alias_rows(word, alias)]
    width = max(len(theirs) for theirs, _ in rows)
    return "\n".join(["```text", *(f"{theirs:{width}}  {ours}" for theirs, ours in rows), "```"])


def _alias_rows(word: str, alias: Alias) -> Iterator[tuple[str, str]]:
    if alias.values is None:
        yield f"--{word}", f"--{alias.name}"
        return
    for theirs, ours in alias.values.items():
        yield f"--{word} {theirs}", f"--{alias.name} {ours}"


def commands() -> str:
    """Return every command with its summary; those of a group by their names."""
    return "\n".join(_command_line(name, command) for name, command in program().commands.items())


def _command_line(name: str, command: Any) -> str:
    words = ", ".join(f"`{word}`" for word in getattr(command, "commands", {}))
    summary = " ".join(command.help.split("\n\n")[0].split()).split(": ")[0].rstrip(".")
    return f"- `toolkit {name}`{' ' + words if words else ''}: {summary}."


# Section of run-folder.md -> the keys that mean the same in a row: of the largest rank, or of the repeats' median.
SAME_IN_RUN = {
    "attestationjson": (
        *("num_params", "num_trainable_params", "parameter_bytes", "gradient_bytes", "optimizer_bytes"),
        *("accumulated_gradient_bytes", "accumulate", "compute_dtype"),
    ),
    "goodput": (
        *("startup_seconds", "checkpoint_seconds", "evaluation_seconds", "restart_seconds", "lost_seconds"),
        "waiting_seconds",
    ),
}


def results_table(name: str) -> str:
    """Return the keys of a part of `results.json` and their meanings.

    A trial's leave out what it shares with a row, and a row's what run.json has.
    """
    model = RESULTS_MODELS[name]
    keys = [*model.model_fields]
    if model in NAMES_SAY_ALL:
        return ", ".join(f"`{key}`" for key in keys)
    if model is Run:
        keys = [key for key in keys if key not in Row.model_fields and key not in ONLY_IN_LEDGER]
    measured = {*Measurements().summary()} if model is Row else set()
    same = SAME_IN_RUN if model is Row else {}
    elsewhere = measured.union(*same.values())
    lines = [definitions({key: _meaning(model, key) for key in keys if key not in elsewhere})]
    if measured:
        lines.append("- as in [the run folder](run-folder.md#measured): the keys of `measured`, except `steps`")
    for place, names in same.items():
        shared = ", ".join(f"`{name}`" for name in names if name in keys)
        lines.append(f"- as in [the run folder](run-folder.md#{place}): {shared}")
    return "\n".join(lines)


def _meaning(model: type[Model], key: str) -> str:
    return " ".join((model.model_fields[key].description or "").split())


def measured_table() -> str:
    """Return the keys of `measured` in `run.json`."""
    fields = [key for key in Figures.model_fields if key in Measurements().summary()]
    return definitions({key: _meaning(Figures, key) for key in fields})


def rank_reading_table() -> str:
    """Return the keys of one rank in `attestation.json`; those without a meaning share the next one's."""
    meanings, together = dict[str, str](), list[str]()
    for key, field in RankReading.model_fields.items():
        together.append(key)
        if field.description:
            meanings["`, `".join(together)] = " ".join(field.description.split())
            together = []
    return definitions(meanings)


def goodput_table() -> str:
    """Return the keys of `goodput` in `run.json`."""
    fields: dict[str, Any] = {**Goodput.model_fields, **Goodput.model_computed_fields}
    return definitions({key: field.description or "" for key, field in fields.items()})


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
    "rank_reading": rank_reading_table,
    "presets": preset_table,
    "optimizers": optimizer_table,
    "lint_rules": lint_rules,
    "doctor_checks": doctor_table,
    "arguments": argument_table,
    "aliases": alias_table,
    "commands": commands,
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
