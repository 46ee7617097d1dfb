"""`toolkit`, the door: every command parses, asks a room, and prints. No torch is imported here.

$ toolkit presets
$ toolkit train --preset zero2 --num-processes 2 -- --model_name_or_path M --dataset D --output_dir O
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from toolkit.errors import EXIT_RUN_FAILED, EXIT_WRONG_INPUT, ToolkitError

if TYPE_CHECKING:
    from toolkit.compare.plan_check import Checked
    from toolkit.launch.door import Ready
    from toolkit.plan.job import Job
    from toolkit.plan.planner import Plan

Value = TypeVar("Value")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune on several GPUs with a preset you chose, and compare presets on the same job.",
)

PRESET_HELP = "a preset's name (see `toolkit presets`), or an accelerate YAML file"
PROCESSES_HELP = "ranks to start on this machine, one a GPU"
NVME_HELP = "folder on a local NVMe disk, for presets that swap to one; or TOOLKIT_NVME_PATH in the environment"
PRICE_HELP = "what one GPU costs an hour: rows then say what a million tokens cost"
CPU_HELP = "train on the CPU; the default where no GPU is visible"
TABLE_COLUMNS = 100
# click's, or that of typer's own copy of click, which exports only its subclass.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
TrainingArguments = Annotated[
    list[str] | None, typer.Argument(help="after `--`: arguments of the training script, passed on unchanged")
]

ModelName = Annotated[str, typer.Argument(help="a hub id, a folder, or a config.json", metavar="MODEL")]
GpuName = Annotated[str | None, typer.Option(help="a GPU's name: h100, a100-80gb, rtx-4090, ...")]
GpuMemory = Annotated[float | None, typer.Option(help="memory of one GPU, given by hand")]
GpuTflops = Annotated[float | None, typer.Option(help="dense bf16 peak of one GPU, given by hand")]
SeqLength = Annotated[int, typer.Option(help="tokens of a sequence")]
LoraRank = Annotated[int | None, typer.Option(help="LoRA adapters of this rank; full if not given")]
Quantized = Annotated[bool, typer.Option("--load-in-4bit", help="QLoRA: the base in 4 bits")]
GpusPerMachine = Annotated[int, typer.Option(help="GPUs that share a host")]
HostMemory = Annotated[float | None, typer.Option(help="a host's memory, to judge offload by")]
NvmePath = Annotated[str | None, typer.Option(help=NVME_HELP, envvar="TOOLKIT_NVME_PATH", show_envvar=False)]


@app.command()
def presets(as_json: Annotated[bool, typer.Option("--json", help="the table as JSON")] = False) -> None:
    """The presets: name, engine, what is sharded and offloaded, and when to choose each."""
    from toolkit.presets import list_presets
    from toolkit.presets.contract import contract

    found = list_presets()
    if as_json:
        rows = [preset.as_row() | {"contract": contract(preset).as_row()} for preset in found]
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("preset", "engine", "sharding", "offloads", "precision", "processes", box=None)
    for preset in found:
        offload = ", ".join(f"{what}: {where}" for what, where in _offloads(preset) if where) or "-"
        table.add_row(preset.name, preset.engine, preset.sharding, offload, preset.mixed_precision, preset.processes)
    columns = max(Console().width, TABLE_COLUMNS)  # a narrow pipe must not cut names
    console = Console(width=columns, soft_wrap=True, highlight=False)
    console.print(table, soft_wrap=False)
    console.print()
    for preset in found:
        console.print(f"{preset.name}: {preset.summary}", markup=False)


def _offloads(preset: object) -> list[tuple[str, str | None]]:
    return [(name, getattr(preset, f"offload_{name}")) for name in ("optimizer", "param")]


preset_app = typer.Typer(no_args_is_help=True, help="Print or copy a preset's files, to use from any directory.")
app.add_typer(preset_app, name="preset")


@preset_app.command()
def show(
    name: Annotated[str, typer.Argument(help=PRESET_HELP)],
    form: Annotated[str, typer.Option("--as", help="accelerate, deepspeed or trainer")] = "accelerate",
) -> None:
    """Print one preset: accelerate's YAML, DeepSpeed's JSON, or a YAML of training arguments."""
    from toolkit.presets import load_preset
    from toolkit.presets.export import shown

    print(shown(load_preset(name), form), end="")


@preset_app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="where to put the files", metavar="DIR")],
    names: Annotated[list[str] | None, typer.Argument(help="presets; all if none is named", metavar="NAME...")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite files that are there")] = False,
) -> None:
    """Copy presets, each JSON beside its YAML; paths inside are absolute, so export again after moving the folder."""
    from toolkit.presets import load_preset, preset_names
    from toolkit.presets.export import export_presets

    for path in export_presets([load_preset(name) for name in names or preset_names()], folder, force=force):
        print(path)


@app.command()
def plan(
    model: ModelName,
    world_size: Annotated[list[int], typer.Option(help="number of GPUs; repeat it")],
    preset: Annotated[list[str] | None, typer.Option(help=f"{PRESET_HELP}; repeat it; all that fit if none")] = None,
    gpu: GpuName = None,
    gpu_memory_gib: GpuMemory = None,
    gpu_tflops: GpuTflops = None,
    per_device_train_batch_size: Annotated[int, typer.Option(help="sequences of a micro-batch")] = 1,
    max_seq_length: SeqLength = 1024,
    gradient_accumulation_steps: Annotated[int, typer.Option(help="micro-batches of a step")] = 1,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing/--no-activation-checkpointing", help="recompute activations")
    ] = False,
    lora_r: LoraRank = None,
    load_in_4bit: Quantized = False,
    packing: Annotated[bool, typer.Option("--packing", help="rows joined to full length, which needs a mask")] = False,
    loss: Annotated[str, typer.Option(help="full, chunked, or fused (Liger)")] = "full",
    optimizer: Annotated[str, typer.Option(help="fused (the Trainer's default) or foreach")] = "fused",
    gpus_per_machine: GpusPerMachine = 8,
    host_memory_gib: HostMemory = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="rehearse rank 0 of each plan, and show both part by part")
    ] = False,
    cpu: Annotated[bool | None, typer.Option("--cpu/--no-cpu", help="where --verify rehearses")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the plans as JSON")] = False,
) -> None:
    """Memory, traffic and time of a job before it runs: what fits, with how much left. Arithmetic only."""
    from toolkit.plan.door import plans_of, print_json
    from toolkit.plan.job import Job
    from toolkit.plan.table import print_plans

    job = Job(
        per_device_train_batch_size=per_device_train_batch_size,
        max_seq_length=max_seq_length,
        gradient_accumulation_steps=gradient_accumulation_steps,
        activation_checkpointing=activation_checkpointing,
        lora_r=lora_r,
        load_in_4bit=load_in_4bit,
        packing=packing,
        loss=loss,
        optimizer=optimizer,
        gpus_per_machine=gpus_per_machine,
        rows_differ=False if verify else None,  # a rehearsal's rows are full
    )
    plans, request = plans_of(
        model,
        presets=preset or [],
        world_sizes=world_size,
        job=job,
        gpu=gpu,
        gpu_memory_gib=gpu_memory_gib,
        gpu_tflops=gpu_tflops,
        host_memory_gib=host_memory_gib,
    )
    if not as_json:
        print_plans(plans, request)
    checked = _check_plans(model, plans, job, cpu=cpu, as_json=as_json) if verify else []
    if as_json:
        print_json(model, plans, request, **({"verified": [one.as_row() for one in checked]} if verify else {}))
    if any(one.failed for one in checked):
        raise typer.Exit(EXIT_RUN_FAILED)


def _check_plans(model: str, plans: Sequence[Plan], job: Job, *, cpu: bool | None, as_json: bool) -> list[Checked]:
    """Each plan beside a rehearsal, told as they end."""
    from toolkit.compare.plan_check import check_plans

    checked = []
    for one in check_plans(model, [plan.as_row() for plan in plans], job, cpu=_on_cpu(cpu), say=say):
        checked.append(one)
        if not as_json:
            print("\n" + "\n".join(one.lines()))
    return checked


@app.command()
def recommend(
    model: ModelName,
    world_size: Annotated[int, typer.Option(help="number of GPUs")],
    gpu: GpuName = None,
    max_seq_length: SeqLength = 1024,
    global_batch_size: Annotated[int | None, typer.Option(help="sequences of a step; 32 or more if not given")] = None,
    lora_r: LoraRank = None,
    load_in_4bit: Quantized = False,
    wish: Annotated[str, typer.Option(help="fastest, or least-memory")] = "fastest",
    preset: Annotated[list[str] | None, typer.Option(help=f"{PRESET_HELP}; only these; repeat it")] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="dollars")] = None,
    gpus_per_machine: GpusPerMachine = 8,
    host_memory_gib: HostMemory = None,
    network_gb_per_second: Annotated[
        float | None, typer.Option(help="a machine's network, all cards, one direction")
    ] = None,
    nvme_gb_per_second: Annotated[float | None, typer.Option(help="a machine's local disk, if there is one")] = None,
    gpu_memory_gib: GpuMemory = None,
    gpu_tflops: GpuTflops = None,
    gpu_link_gb_per_second: Annotated[
        float | None, typer.Option(help="from one GPU to the next, one direction, given by hand")
    ] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="also the curve to 1,024 GPUs")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the recommendation as JSON")] = False,
) -> None:
    """The preset, micro-batch and checkpointing to use, with reasons, the next best, and the commands."""
    from toolkit.plan.job import Job
    from toolkit.plan.recommend_door import Hardware, run_recommend

    hardware = Hardware(
        gpu=gpu,
        world_size=world_size,
        gpus_per_machine=gpus_per_machine,
        gpu_memory_gib=gpu_memory_gib,
        gpu_tflops=gpu_tflops,
        gpu_link_gb_per_second=gpu_link_gb_per_second,
        network_gb_per_second=network_gb_per_second,
        nvme_gb_per_second=nvme_gb_per_second,
        host_memory_gib=host_memory_gib,
        price_per_gpu_hour=price_per_gpu_hour,
    )
    job = Job(
        max_seq_length=max_seq_length, lora_r=lora_r, load_in_4bit=load_in_4bit, gpus_per_machine=gpus_per_machine
    )
    run_recommend(
        model,
        hardware=hardware,
        job=job,
        presets=preset or [],
        global_batch_size=global_batch_size,
        wish=wish,
        scaling=scaling,
        json_wanted=as_json,
    )


@app.command()
def train(
    preset: Annotated[str, typer.Option(help=PRESET_HELP)],
    num_processes: Annotated[int, typer.Option(help=PROCESSES_HELP)],
    training_arguments: TrainingArguments = None,
    cpu: Annotated[bool | None, typer.Option("--cpu/--no-cpu", help=CPU_HELP)] = None,
    timeout_minutes: Annotated[float | None, typer.Option(help="end the run as timed_out after this long")] = None,
    nvme_path: NvmePath = None,
    hang_timeout_minutes: Annotated[
        float | None, typer.Option(help="end a run in which no rank gets on for this long; 20 if not given, 0: never")
    ] = None,
    stop_minutes: Annotated[float, typer.Option(help="after Ctrl-C or SIGTERM, wait this long for a checkpoint")] = 5,
    max_restarts: Annotated[
        int, typer.Option(help="after a killed or hanging rank, go on from the last checkpoint, this often at most")
    ] = 0,
) -> None:
    """Check the job, print the launch command, and run it.

    After `--`: at least --model_name_or_path, --dataset and --output_dir. All training arguments:
    `python -m toolkit.train --help`.
    """
    from toolkit.launch.door import check_training
    from toolkit.launch.door import train as start
    from toolkit.launch.restarts import Limits
    from toolkit.presets import load_preset

    ready = check_training(
        load_preset(preset),
        num_processes=num_processes,
        training_argv=training_arguments or [],
        cpu=_on_cpu(cpu),
        nvme_path=nvme_path,
        limits=Limits(hang_timeout_minutes=hang_timeout_minutes, stop_minutes=stop_minutes, max_restarts=max_restarts),
        say=say,
    )
    _say_device(ready.cpu, cpu)
    if ready.nvme is not None:
        say("\n".join([ready.nvme.line(), *ready.nvme.warnings]))
    elif nvme_path is not None:
        say(f"--nvme-path has no effect: preset {ready.preset.name!r} swaps to no disk")
    result = start(ready, plan=_planned(ready), timeout_minutes=timeout_minutes, say=say)
    if result.failure is not None:
        _say_failure(result.status, result.failure)
    raise typer.Exit(result.exit_code)


def _planned(ready: Ready) -> dict[str, Any] | None:
    """What this machine's GPUs will hold, said before they are used; a CPU is not planned."""
    if ready.cpu:
        return None
    from toolkit.plan.of_run import plan_here

    return plan_here(ready.preset, ready.arguments, world_size=ready.num_processes, say=say)


def _say_failure(status: str, failure: dict[str, object]) -> None:
    """The failure once, at the end: what follows its file in the log is not relayed."""
    say(f"error: {status}: {failure['message']}")
    if failure.get("hint"):
        say(f"  hint: {failure['hint']}")


@app.command()
def rehearse(
    preset: Annotated[str, typer.Option(help=PRESET_HELP)],
    world_size: Annotated[int, typer.Option(help="ranks of the world that is rehearsed; none of them is needed")],
    training_arguments: TrainingArguments = None,
    rank: Annotated[int, typer.Option(help="the rank that this process is")] = 0,
    cpu: Annotated[bool | None, typer.Option("--cpu/--no-cpu", help=CPU_HELP)] = None,
    fake_tensors: Annotated[
        bool, typer.Option("--fake-tensors", help="peaks by part of a model that does not fit here (FSDP2, DDP)")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="what was found as JSON")] = False,
) -> None:
    """Run the real training script and engine as one rank of any world, in one process, and say what it holds.

    After `--`: at least --model_name_or_path (a config.json is enough). Without --dataset, rows of random tokens;
    without --output_dir, nothing is kept.
    """
    from toolkit.launch.rehearsal_lines import result_facts, result_lines
    from toolkit.launch.rehearse import plan_rehearsal, rehearse_once
    from toolkit.presets import load_preset

    argv, on_cpu = training_arguments or [], _on_cpu(cpu)
    planned = plan_rehearsal(
        load_preset(preset),
        world_size=world_size,
        rank=rank,
        training_argv=argv,
        cpu=on_cpu,
        fake_tensors=fake_tensors,
    )
    if on_cpu and cpu is None and not fake_tensors:
        say("no GPU is visible: rehearsing on the CPU in fp32")
    result, run = rehearse_once(planned, on_line=say)
    if result.failure is not None:
        _say_failure(result.status, result.failure)
        raise typer.Exit(result.exit_code)
    print(json.dumps(result_facts(run), indent=2) if as_json else "\n".join(result_lines(run)))


@app.command()
def compare(
    preset: Annotated[list[str] | None, typer.Option(help=f"{PRESET_HELP}; repeat it")] = None,
    output: Annotated[Path | None, typer.Option(help="folder of the comparison: trials, ledger, report")] = None,
    num_processes: Annotated[
        list[str] | None, typer.Option(help=f"{PROCESSES_HELP}; `1,2,4` compares several world sizes")
    ] = None,
    training_arguments: TrainingArguments = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help='a preset under another name, with arguments of its own: "NAME=PRESET --argument value"'),
    ] = None,
    repeats: Annotated[int, typer.Option(help="trials of each row, interleaved; with one, nothing is claimed")] = 3,
    order_seed: Annotated[int, typer.Option(help="seed of the trials' order")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on where the comparison in --output stopped")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="with --resume: run the failed trials again")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print every trial's command; start nothing")] = False,
    untimed_steps: Annotated[int, typer.Option(help="first steps of each trial that no speed counts")] = 2,
    target_interval: Annotated[
        float | None,
        typer.Option(
            help="end a trial when its median step is known to this share; 0.01 on GPUs, 0.03 on a CPU or with"
            " offload if not given; 0: never"
        ),
    ] = None,
    trial_minutes: Annotated[
        float | None, typer.Option(help="end a trial's steps after this long, as completed")
    ] = None,
    trial_timeout_minutes: Annotated[float, typer.Option(help="end a trial as timed_out after this long")] = 120,
    reference: Annotated[
        str | None, typer.Option(help="the preset that ratios are to; default: ddp, else the first")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help="over several world sizes: strong (same global batch) or weak, the default")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="with --dry-run: predict for this GPU, such as h100, which need not be here")
    ] = None,
    find_max_batch: Annotated[
        int | None, typer.Option(help="search each row's largest micro-batch up to this one, and compare there")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="a comparison's folder: run its --row again", metavar="DIR")
    ] = None,
    row: Annotated[str | None, typer.Option(help="with --replay: the row, such as zero2-n2")] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="one more run of each row, profiled: communication, and one step's picture"),
    ] = False,
    measure_save: Annotated[
        bool, typer.Option("--measure-save", help="one more run of each row that saves a checkpoint: seconds and bytes")
    ] = False,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help=PRICE_HELP, min=0)] = None,
    cpu: Annotated[bool | None, typer.Option("--cpu/--no-cpu", help=CPU_HELP)] = None,
    nvme_path: NvmePath = None,
) -> None:
    """Train the same job under each preset, and report memory, speed and loss.

    Needs --preset, --num-processes and --output. After `--`: the job, at least --model_name_or_path, --dataset and
    --max_steps, as for `toolkit train`.
    """
    from toolkit.compare import door

    if replay is not None:
        name = _given("row", row)
        door.replay(replay, name, timeout_seconds=trial_timeout_minutes * 60, nvme_path=nvme_path)
        return
    asked = door.Asked(
        presets=preset or [],
        variants=variant or [],
        num_processes=_given("num-processes", num_processes),
        training_arguments=training_arguments or [],
        repeats=repeats,
        order_seed=order_seed,
        untimed_steps=untimed_steps,
        target_interval=target_interval,
        trial_minutes=trial_minutes,
        reference=reference,
        scaling=scaling,
        find_max_batch=find_max_batch,
        cpu=gpu is None and _on_cpu(cpu),
        nvme_path=nvme_path,
        gpu=gpu,
    )
    door.run_comparison(
        asked,
        output=_given("output", output),
        resume=resume,
        retry_failed=retry_failed,
        dry_run=dry_run,
        on_checked=lambda on_cpu: _say_device(on_cpu, cpu),
        timeout_seconds=trial_timeout_minutes * 60,
        beside=door.Beside(profile=profile, measure_save=measure_save, price_per_gpu_hour=price_per_gpu_hour),
    )


def _given(name: str, value: Value | None) -> Value:
    """An option that only some uses of a command can do without."""
    if not value:
        raise ToolkitError(f"missing option '--{name}'", hint="see `toolkit compare --help`")
    return value


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="a comparison's folder; or two: before and after", metavar="DIR [DIR]")
    ],
    price_per_gpu_hour: Annotated[float | None, typer.Option(help=PRICE_HELP, min=0)] = None,
) -> None:
    """Write the report of a comparison again, from its files alone; of two comparisons, what changed between them.

    Two must train the same job: else it says what differs, with exit code 2.
    """
    from toolkit.compare import door

    if len(folders) > 2:
        raise ToolkitError(f"{len(folders)} folders are given, expected one, or two that are compared")
    if len(folders) == 2:
        if price_per_gpu_hour is not None:
            raise ToolkitError("--price-per-gpu-hour belongs to the report of one comparison", hint="name one folder")
        door.report_both(*folders)
        return
    door.write_report_again(folders[0], price_per_gpu_hour=price_per_gpu_hour)


checkpoint_app = typer.Typer(no_args_is_help=True, help="Look into a checkpoint, export it, prove it, or move it.")
app.add_typer(checkpoint_app, name="checkpoint")

CheckpointPath = Annotated[Path, typer.Argument(help="a checkpoint folder", metavar="CHECKPOINT")]
BaseModel = Annotated[str | None, typer.Option(help="the base model, where the recorded one is not there")]


@checkpoint_app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="a checkpoint, or a run folder with several", metavar="DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="the facts as JSON")] = False,
) -> None:
    """Engine, preset, step, world size, parameters and bytes; complete, or damaged and where (exit code 1)."""
    _checkpoint("inspect", path, *(["--json"] if as_json else []))


@checkpoint_app.command("export")
def export_checkpoint(
    path: CheckpointPath,
    out: Annotated[Path, typer.Argument(help="a new folder", metavar="OUT")],
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="add the adapter to its base model")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    max_shard_size: Annotated[str, typer.Option(help="largest weights file")] = "5GB",
    base_model: BaseModel = None,
) -> None:
    """Write any engine's checkpoint as one Hugging Face folder of safetensors, one tensor in memory at a time."""
    options = ["--dtype", dtype, "--max-shard-size", max_shard_size, *(["--merge-lora"] if merge_lora else [])]
    _checkpoint("export", path, out, *options, base_model=base_model)


@checkpoint_app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="a checkpoint, an exported folder, or a run folder", metavar="DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="the result as JSON")] = False,
    base_model: BaseModel = None,
) -> None:
    """Load it again: no tensor missing, empty or NaN, and logits equal to the live model's. Exit code 1 if not."""
    _checkpoint("verify", path, *(["--json"] if as_json else []), base_model=base_model)


@checkpoint_app.command()
def convert(
    path: CheckpointPath,
    out: Annotated[Path, typer.Argument(help="a new folder", metavar="OUT")],
    preset: Annotated[str, typer.Option(help=PRESET_HELP)],
    num_processes: Annotated[int, typer.Option(help=PROCESSES_HELP)],
    base_model: BaseModel = None,
) -> None:
    """Make a checkpoint, optimizer states included, that another preset or number of processes resumes from."""
    options = ["--preset", preset, "--num-processes", str(num_processes)]
    _checkpoint("convert", path, out, *options, base_model=base_model)


def _checkpoint(*words: object, base_model: str | None = None) -> None:
    """The room that reads tensors runs in a process of its own."""
    import subprocess

    named = [] if base_model is None else ["--base-model", base_model]
    command = [sys.executable, "-m", "toolkit.checkpoint", *map(str, words), *named]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def lint(
    paths: Annotated[list[Path], typer.Argument(help="configuration files, or folders of them", metavar="FILE...")],
    as_json: Annotated[bool, typer.Option("--json", help="the findings as JSON")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="write the file to stdout with its mechanical fixes")] = False,
    in_place: Annotated[bool, typer.Option("--in-place", help="with --fix: change the files, keep a .bak")] = False,
) -> None:
    """Say what an accelerate YAML, DeepSpeed JSON or Trainer file does in fact, and what to write instead.

    Exit code 0: clean; 1: findings; 2: a file cannot be read. A JSON that a YAML names is read with it.
    """
    from toolkit.lint.door import run_lint

    raise typer.Exit(run_lint(paths, as_json=as_json, fix=fix, in_place=in_place, say=say))


def _on_cpu(asked: bool | None) -> bool:
    """What the user says, else whether there is no GPU."""
    from toolkit.hardware.gpus import count_gpus

    return count_gpus() == 0 if asked is None else asked


def _say_device(on_cpu: bool, asked: bool | None) -> None:
    """A choice that nobody asked for is said."""
    if on_cpu and asked is None:
        say("no GPU is visible: training on the CPU (gloo, fp32)")


def say(line: str) -> None:
    """Talk goes to stderr; data goes to stdout."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run a command; what a user can fix is two lines and an exit code, without a traceback."""
    try:
        sys.exit(app(args=argv, prog_name="toolkit", standalone_mode=False))
    except ToolkitError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    except UsageError as error:
        _say_usage(error)
        sys.exit(EXIT_WRONG_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        say("stopped")
        sys.exit(EXIT_RUN_FAILED)


def _say_usage(error: Any) -> None:
    """What typer refuses, said like every other wrong input; `toolkit` alone is no mistake to explain."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    what = " ".join(str(error.format_message()).split())
    # Options of the toolkit have dashes, training arguments underscores.
    misplaced = "no such option" in what.lower() and "_" in what
    hint = "training arguments stand after `--`" if misplaced else f"see `{error.ctx.command_path} --help`"
    say(f"error: {what[:1].lower()}{what[1:].rstrip('.')}\n  hint: {hint}")


if __name__ == "__main__":
    main()
